"""Values of a wrong type that were no typed errors once, each by a direct call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bson import Code

from microqueue import InvalidArgument, MicroqueueError, Queue, QueueSettings, Topic
from microqueue.cli import metrics
from microqueue.embedded.probe import check_port
from microqueue.insights import Insights
from microqueue.testing import memory_queue
from tests.hostile import Interpreted, check
from tests.rejection import rejecting

OPERATOR = {"$ne": 1}
HOSTS = ["\udcff", "a\x00b", "a" * 70 + ".b"]
"""Text that no host can be called: no name service is asked for it."""


@pytest.fixture
def queue() -> Queue[Any]:
    return memory_queue()


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("queue", lambda insights: insights.running(queue=OPERATOR)),
        ("queue", lambda insights: insights.latency(queue=OPERATOR)),
        ("which", lambda insights: insights.tasks(OPERATOR)),
        ("mask", lambda insights: insights.tasks(mask=5)),
        ("convert", lambda insights: insights.tasks(convert=5)),
        ("topic", lambda insights: insights.topics(topic=OPERATOR)),
        ("text", lambda insights: insights.find(OPERATOR)),
    ],
)
def test_insights_reject_what_is_no_name_filter_or_function(
    queue: Queue[Any], argument: str, call: Callable[[Insights], Any]
) -> None:
    with rejecting(argument):
        call(Insights(queue))


@pytest.mark.parametrize("name", [0.0, 0, False, [], {}, ["job"], OPERATOR])
def test_peek_rejects_what_is_no_name(queue: Queue[Any], name: Any) -> None:
    with rejecting("name", name):
        queue.peek(name=name)


@pytest.mark.parametrize("which", [OPERATOR, 1.5, [OPERATOR], object()])
def test_dead_letters_reject_what_is_no_filter(queue: Queue[Any], which: Any) -> None:
    for call in (queue.dead_letters.count, queue.dead_letters.groups):
        with pytest.raises(InvalidArgument) as caught:
            call(which)
        assert caught.value.argument


@pytest.mark.parametrize("on_gap", [OPERATOR, [], 5, "ignore"])
def test_subscription_rejects_what_cannot_handle_a_gap(queue: Queue[Any], on_gap: Any) -> None:
    with rejecting("on_gap"):
        Topic(queue, "news").subscribe("start", on_gap=on_gap)


@pytest.mark.parametrize("backoff", [{1: 2}, {None: 1}, {("a",): 1}, {"$ne": 1}])
def test_options_of_a_backoff_have_known_names(backoff: Any) -> None:
    with pytest.raises(InvalidArgument):
        QueueSettings(backoff=backoff)


def test_code_of_bson_is_no_text(queue: Queue[Any]) -> None:
    code = Code("return true")
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("task_id", lambda: queue.enqueue({}, task_id=code)),
        ("name", lambda: queue.enqueue({}, name=code)),
        ("worker_id", lambda: queue.pop(worker_id=code)),
        ("reason", lambda: queue.pause(reason=code)),
        ("position", lambda: Topic(queue, "news").get(code)),
        ("key", lambda: Topic(queue, "news").publish({}, key=code)),
        ("name", lambda: Topic(queue, code)),
        ("text", lambda: Insights(queue).find(code)),
    ]
    for argument, call in calls:
        with rejecting(argument):
            call()
    assert not queue.peek()


@pytest.mark.parametrize("host", HOSTS)
def test_text_that_is_no_host_of_the_dashboard_is_rejected(queue: Queue[Any], host: str) -> None:
    pytest.importorskip("fastapi")
    server = pytest.importorskip("microqueue.dashboard.server")
    with rejecting("port"):
        server.DashboardServer(queue, host=host, port=0, insecure=True)


@pytest.mark.parametrize("host", HOSTS)
def test_text_that_is_no_host_of_metrics_is_rejected(host: str) -> None:
    pytest.importorskip("prometheus_client")
    with pytest.raises(MicroqueueError) as caught, metrics.serve_worker_metrics(host, 0):
        pass
    assert isinstance(caught.value, InvalidArgument)
    assert caught.value.argument == "metrics_port"


@pytest.mark.parametrize("port", [-1, 65536, 10**400])
def test_port_out_of_range_is_rejected_by_its_name(port: int) -> None:
    with rejecting("dashboard_port", port):
        check_port(port, "dashboard_port")


@pytest.mark.parametrize(
    ("pattern", "is_literal"),
    [
        ("^hostile7c1e", True),
        (r"\$hostile7c1e\.b", True),
        ("hostile7c1e.b", False),
        (".*|hostile7c1e", False),
        ("^hostile7c1e$", False),
    ],
)
def test_check_of_commands_knows_a_pattern_from_escaped_text(
    pattern: str, *, is_literal: bool
) -> None:
    command = {"find": "tasks", "filter": {"error.message": {"$regex": pattern}}}
    if is_literal:
        check("find", command)
        return
    with pytest.raises(Interpreted):
        check("find", command)
