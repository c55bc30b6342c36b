"""Requests of all kinds, made from the OpenAPI description: none of them is a server error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from microqueue import Queue, Topic
from microqueue.dashboard import dashboard
from microqueue.dashboard.server import DashboardServer
from microqueue.testing import memory_queue

EXAMPLES = 25


@pytest.fixture(scope="module")
def address(new_database: Callable[[], Any]) -> Iterator[str]:
    """A dashboard with a task in each status, served over the network."""
    queue: Queue[Any] = Queue(new_database())
    queue.enqueue_many([{"n": n} for n in range(20)])
    queue.enqueue({}, delay=3600)
    done, dead, _running = queue.pop_many(3)
    queue.mark_done(done)
    queue.mark_failure(dead, "order 1 timed out", code="Timeout")
    topic = Topic(queue, "x")
    topic.bind("mail")
    topic.publish({"n": 1}, message_id="x")
    server = DashboardServer(queue, port=0, manual_actions=True)
    with server.running():
        yield server.address


SCHEMA = schemathesis.openapi.from_dict(dashboard(memory_queue()).openapi())
FOUND: list[Any] = list(SCHEMA.get_all_operations())
OPERATIONS = {found.ok().label: found.ok() for found in FOUND}


@pytest.mark.parametrize("label", OPERATIONS)
def test_no_request_is_a_server_error(label: str, address: str) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(case=OPERATIONS[label].as_strategy())
    def ask(case: Any) -> None:
        response = case.call(base_url=address.rstrip("/"), timeout=60)
        case.validate_response(response, checks=[not_a_server_error])
        if response.status_code >= 400:
            assert response.headers["content-type"][0] == "application/problem+json", label

    ask()


def test_description_names_the_routes_of_the_api() -> None:
    assert "POST /api/v1/dead-letters/replay" in OPERATIONS
    assert "GET /api/v1/tasks/{task_id}" in OPERATIONS
    assert "POST /api/v1/topics/{topic}/bind" in OPERATIONS
    assert len(OPERATIONS) >= 35
