"""Held loads that meet: what one gives up in between, the other still brings in."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import pytest
from pymongo.errors import PyMongoError

from microqueue import DeadLetterFilter, NewTask, Queue, QueueSettings
from microqueue.core import core_of
from microqueue.operations import bulk_load
from microqueue.operations.call import Operation
from microqueue.operations.enqueue import new_document

NOW = datetime(2026, 5, 1, tzinfo=UTC)
NAME = "orders"


def rows(queue: Queue[Any], by: str, **options: Any) -> list[dict[str, Any]]:
    documents = [
        new_document(
            NewTask[Any](payload={"n": number}, **_options(number, by, **options)),
            queue=NAME,
            payload={"n": number},
            settings=queue.settings,
            now=NOW,
            position=number,
            insert_token=by,
        )
        for number in range(3)
    ]
    return [bulk_load.held(document, by) for document in documents]


def _options(number: int, by: str, *, keyed: bool) -> dict[str, Any]:
    if keyed:
        return {"task_id": f"row-{number}"}
    return {"task_id": f"{by}-{number}", "dedupe_key": f"row-{number}"}


def loading(queue: Queue[Any], by: str, **options: Any) -> Operation[tuple[int, int]]:
    return bulk_load.insert_chunk(rows(queue, by, **options), settings=queue.settings, hold=by)


@pytest.mark.parametrize("keyed", [True, False], ids=["ids", "dedupe keys"])
@pytest.mark.parametrize("before", ["update_many", "find", None])
def test_a_load_that_is_given_up_takes_no_row_of_another_away(
    microqueue_database: Any, keyed: bool, before: str | None
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, NAME)
    queue.ensure_indexes()
    assert core_of(queue).run(loading(queue, "given up", keyed=keyed)) == (3, 0)

    def meddled() -> Operation[tuple[int, int]]:
        """Load the same rows, and have the other load given up before some call."""
        operation = loading(queue, "other", keyed=keyed)
        call, refused = next(operation), False
        try:
            while True:
                if refused and call.method == before:
                    core_of(queue).run(bulk_load.abandon([NAME], "given up"))
                    refused = False
                try:
                    reply = yield call
                except PyMongoError as exc:  # The driver throws it here, for the operation.
                    refused = True
                    call = operation.throw(exc)
                else:
                    call = operation.send(reply)
        except StopIteration as ended:
            return cast("tuple[int, int]", ended.value)

    inserted, known = core_of(queue).run(meddled())
    assert inserted + known == 3
    core_of(queue).run(bulk_load.abandon([NAME], "given up"))
    assert core_of(queue).run(bulk_load.release([NAME], "other", NOW)) == 3
    assert sorted(task.payload["n"] for task in queue.pop_many(9)) == [0, 1, 2]


def test_rows_whose_keys_are_taken_stay_out(microqueue_database: Any) -> None:
    queue: Queue[Any] = Queue(microqueue_database, NAME)
    queue.enqueue({"n": 0}, dedupe_key="row-0")
    queue.enqueue({"n": 1}, dedupe_key="row-1")
    assert core_of(queue).run(loading(queue, "load", keyed=False)) == (1, 2)
    assert core_of(queue).run(loading(queue, "load", keyed=False)) == (1, 2)
    assert core_of(queue).run(bulk_load.release([NAME], "load", NOW)) == 1


@pytest.mark.parametrize("place", ["status", "collection"])
@pytest.mark.parametrize("end", ["failed", "replayed"])
def test_a_load_counts_its_own_rows_as_new_although_they_failed_since(
    microqueue_database: Any, place: Any, end: str
) -> None:
    settings = QueueSettings(dead_letters=place)
    queue: Queue[Any] = Queue(microqueue_database, NAME, settings=settings)
    queue.ensure_indexes()

    def load(by: str) -> tuple[int, int]:
        documents = [
            new_document(
                NewTask[Any](payload={}, task_id=f"row-{number}"),
                queue=NAME,
                payload={},
                settings=settings,
                now=NOW,
                position=number,
                insert_token=by,
            )
            for number in range(3)
        ]
        loading = bulk_load.insert_chunk(documents, settings=settings, hold=None)
        return core_of(queue).run(loading)

    assert load("first") == (3, 0)
    for task in queue.pop_many(2):
        queue.mark_failure(task, "broken")
    if end == "replayed":
        queue.dead_letters.replay(DeadLetterFilter())
    failed = 2 * (end == "failed")
    for by, counts in (("first", (3, 0)), ("second", (0, 3))):
        assert load(by) == counts
        stats = queue.stats()
        assert (stats.ready, stats.failed) == (3 - failed, failed)
