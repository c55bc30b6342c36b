"""The benchmark of results: it waits for real tasks, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import results
from benchmarks.database import Database
from microqueue.embedded import EmbeddedServer


@pytest.mark.parametrize("kind", ["threads", "coroutines"])
def test_every_task_is_settled_and_waited_for(
    kind: str, microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    database = Database(microqueue_server.uri, microqueue_database.name)
    found = results.measure(database, kind=kind, count=3, others=4)
    assert found.count == 3
    assert 0 < found.p50 <= found.p99
    assert found.settle_p50 > 0
    done = microqueue_database.tasks.count_documents({"status": "done"})
    assert done == 3 + results.WARM_UP
