from __future__ import annotations

from typing import Any

import bson
import pytest
from pymongo.errors import CursorNotFound, OperationFailure

from microqueue.spark.read import raw_batches
from microqueue.spark.read.raw_batches import unpack_once

TASKS = [{"_id": n, "text": "x" * n, "deep": [{"n": n}, []]} for n in range(250)]


@pytest.fixture
def tasks(microqueue_database: Any) -> Any:
    microqueue_database.tasks.insert_many(TASKS)
    return microqueue_database.tasks


def test_a_cursor_that_unpacks_once_returns_the_same_batches(tasks: Any) -> None:
    usual = list(tasks.find_raw_batches(batch_size=100))
    once = list(unpack_once(tasks.find_raw_batches(batch_size=100)))
    assert once == usual
    assert [len(bson.decode_all(raw)) for raw in once] == [100, 100, 50]
    assert list(unpack_once(tasks.find_raw_batches({"_id": -1}))) == []


def test_unpacking_once_skips_the_unpacking_of_pymongo(
    tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cursor = tasks.find_raw_batches()
    monkeypatch.setattr(cursor, "_unpack_response", lambda *_, **__: 1 / 0)  # pymongo's own way.
    assert sum(len(bson.decode_all(raw)) for raw in unpack_once(cursor)) == len(TASKS)


def test_errors_are_those_of_pymongo(tasks: Any) -> None:
    with pytest.raises(OperationFailure, match="unknown operator"):
        list(unpack_once(tasks.find_raw_batches({"_id": {"$odd": 1}})))
    cursor = unpack_once(tasks.find_raw_batches(batch_size=100))
    next(cursor)
    tasks.database.command("killCursors", tasks.name, cursors=[cursor.cursor_id])
    with pytest.raises(CursorNotFound):
        next(cursor)


def test_a_pymongo_without_the_internals_is_used_unchanged(
    tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_batches, "SHALLOW", None)
    assert sum(len(bson.decode_all(raw)) for raw in unpack_once(tasks.find_raw_batches())) == 250
