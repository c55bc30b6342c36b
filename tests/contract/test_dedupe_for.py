"""``dedupe_for``: a dedupe key that is taken for a period, whatever becomes of its task."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from microqueue import DuplicateTask, NewTask, TaskStatus
from tests.contract.conftest import Harness
from tests.rejection import raising, rejecting

HOUR = 3600


async def done(queue: Any) -> None:
    await queue.mark_done(await queue.pop())


async def failed(queue: Any) -> None:
    await queue.mark_failure(await queue.pop(), "no")


async def purged(queue: Any) -> None:
    await done(queue)
    assert await queue.purge(status="done") == 1


async def purged_unclaimed(queue: Any) -> None:
    assert await queue.purge(status="pending") == 1


async def discarded(queue: Any) -> None:
    await failed(queue)
    letters = await queue.dead_letters.list()
    assert await queue.dead_letters.discard([task.id for task in letters.tasks]) == 1


ENDS = {one.__name__: one for one in (done, failed, purged, purged_unclaimed, discarded)}


@pytest.mark.parametrize("dead_letters", ["status", "collection"])
@pytest.mark.parametrize("end", ENDS)
async def test_key_stays_taken_for_its_period_after_the_task_ended(
    harness: Harness, end: str, dead_letters: Any
) -> None:
    queue = harness.queue(dead_letters=dead_letters)
    first = await queue.enqueue({"n": 1}, dedupe_key="k", dedupe_for=HOUR)
    until = harness.clock.now() + timedelta(hours=1)
    assert first.dedupe_until == until
    await ENDS[end](queue)
    harness.clock.advance(HOUR - 1)
    with pytest.raises(DuplicateTask) as caught:
        await queue.enqueue({"n": 2}, dedupe_key="k", dedupe_for=60)
    assert (caught.value.existing_id, caught.value.dedupe_key) == (first.id, "k")
    assert caught.value.held_until == until
    harness.clock.advance(1)
    again = await queue.enqueue({"n": 3}, dedupe_key="k", dedupe_for=HOUR)
    assert again.id != first.id
    assert (await queue.pop()).payload == {"n": 3}


async def test_key_of_a_task_that_is_deleted_when_it_is_done_stays_taken(harness: Harness) -> None:
    queue = harness.queue(retention=0)
    await queue.ensure_indexes()
    first = await queue.enqueue({}, dedupe_key="k", dedupe_for=HOUR)
    await done(queue)
    assert await harness.stored() == []
    for on_duplicate in ("raise", "return", "replace"):
        with pytest.raises(DuplicateTask) as caught:
            await queue.enqueue({}, dedupe_key="k", dedupe_for=HOUR, on_duplicate=on_duplicate)
        assert caught.value.existing_id == first.id
    assert await harness.stored() == []


async def test_live_task_has_its_key_beyond_the_period(harness: Harness, queue: Any) -> None:
    first = await queue.enqueue({}, dedupe_key="k", dedupe_for=10)
    harness.clock.advance(20)
    with pytest.raises(DuplicateTask) as caught:
        await queue.enqueue({}, dedupe_key="k", dedupe_for=10)
    assert (caught.value.existing_id, caught.value.held_until) == (first.id, None)
    assert len(await harness.stored()) == 1
    await done(queue)
    await queue.enqueue({}, dedupe_key="k", dedupe_for=10)


async def test_stored_task_is_that_of_the_options(harness: Harness, queue: Any) -> None:
    options = {"delay": 30, "expires_in": 90, "priority": 4, "headers": {"a": 1}}
    task = await queue.enqueue({"n": 1}, dedupe_key="k", dedupe_for=HOUR, **options)
    plain = await queue.enqueue({"n": 1}, dedupe_key="other", **options)
    with_period, without = await harness.stored()
    assert with_period.pop("dedupe_until") is not None
    assert with_period.pop("insert_token") is not None
    for one in (with_period, without):
        for name in ("_id", "position", "dedupe_key"):
            del one[name]
    assert with_period == without
    assert await queue.get(task.id) == task
    assert task.next_retry_at == plain.next_retry_at
    assert await queue.pop() is None
    harness.clock.advance(30)
    assert len(await queue.pop_many(5)) == 2


async def test_keys_of_other_queues_and_without_a_period_are_other_keys(harness: Harness) -> None:
    queue, other = harness.queue(), harness.queue("other")
    await queue.enqueue({}, dedupe_key="k", dedupe_for=HOUR)
    await other.enqueue({}, dedupe_key="k", dedupe_for=HOUR)
    await queue.enqueue({}, dedupe_key="another", dedupe_for=HOUR)
    with pytest.raises(DuplicateTask):
        await queue.enqueue({}, dedupe_key="k")
    for _ in range(2):
        await done(queue)
    await queue.enqueue({}, dedupe_key="k")  # It looks at live tasks only.


async def test_task_that_holds_a_key_is_returned_or_replaced(harness: Harness, queue: Any) -> None:
    def again(n: int, on_duplicate: str) -> Any:
        return queue.enqueue({"n": n}, dedupe_key="k", dedupe_for=HOUR, on_duplicate=on_duplicate)

    first = await again(1, "return")
    until = first.dedupe_until
    assert not first.is_duplicate
    assert (await again(2, "return")).payload == {"n": 1}
    harness.clock.advance(10)
    replaced = await again(3, "replace")
    assert (replaced.id, replaced.payload, replaced.is_duplicate) == (first.id, {"n": 3}, True)
    assert replaced.dedupe_until == until  # The period is that of the first call.
    await done(queue)
    found = await again(4, "return")
    assert (found.id, found.status, found.is_duplicate) == (first.id, TaskStatus.DONE, True)
    fields = {"held_until": until, "existing_id": first.id, "dedupe_key": "k"}
    with raising(DuplicateTask, "not_pending", **fields):
        await again(5, "replace")
    harness.clock.advance(HOUR - 10)
    assert not (await again(6, "replace")).is_duplicate


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("dead_letters", ["status", "collection"])
async def test_cancelling_frees_the_key(
    harness: Harness, dead_letters: Any, *, running: bool
) -> None:
    queue = harness.queue(dead_letters=dead_letters)
    first = await queue.enqueue({}, dedupe_key="k", dedupe_for=HOUR)
    if running:
        await queue.pop()
    await queue.cancel(first.id)
    second = await queue.enqueue({}, dedupe_key="k", dedupe_for=HOUR)
    await queue.dead_letters.replay(first.id)  # The second one is live: it has the key.
    await done(queue)
    with pytest.raises(DuplicateTask) as caught:
        await queue.enqueue({}, dedupe_key="k", dedupe_for=HOUR)
    assert caught.value.existing_id == second.id


async def is_free(queue: Any, key: str) -> bool:
    """Return whether a key is free for a period; if so, it is taken afterwards."""
    try:
        await queue.enqueue({"n": "free"}, dedupe_key=key, dedupe_for=HOUR)
    except DuplicateTask:
        return False
    return True


@pytest.mark.parametrize(
    "options",
    [
        {"dedupe_key": "k2", "dedupe_for": HOUR},
        {"dedupe_key": "k2"},
        {},
    ],
    ids=["for a period", "another key", "no key"],
)
@pytest.mark.parametrize("many", [False, True])
async def test_replacement_does_not_change_a_key_for_a_period(
    queue: Any, options: Any, *, many: bool
) -> None:
    first = await queue.enqueue({"n": 1}, task_id="T", dedupe_key="k1", dedupe_for=HOUR)
    again = {"task_id": "T", "on_duplicate": "replace", **options}
    if many:
        report = await queue.enqueue_many([NewTask(payload={"n": 2}, **again)])
        assert (report.added, len(report.duplicates), report.tasks) == (0, 1, [])
    else:
        with pytest.raises(DuplicateTask) as caught:
            await queue.enqueue({"n": 2}, **again)
        assert (caught.value.code, caught.value.existing_id) == ("other_key", "T")
        assert "dedupe_key='k1'" in str(caught.value)
    assert await queue.get("T") == first, "it is unchanged"
    assert await is_free(queue, "k2")
    assert not await is_free(queue, "k1")
    same = {**again, "dedupe_key": "k1"}
    replaced = await queue.enqueue({"n": 3}, **same)
    assert (replaced.payload, replaced.dedupe_until) == ({"n": 3}, first.dedupe_until)
    await queue.cancel("T")
    assert await is_free(queue, "k1")


@pytest.mark.parametrize("by", ["id", "key"])
async def test_replacement_brings_no_period_to_a_task_without_one(queue: Any, by: str) -> None:
    options: Any = {"task_id": "T"} if by == "id" else {}
    first = await queue.enqueue({"n": 1}, task_id="T", dedupe_key="k")
    with pytest.raises(DuplicateTask) as caught:
        await queue.enqueue(
            {"n": 2}, dedupe_key="k", dedupe_for=HOUR, on_duplicate="replace", **options
        )
    assert (caught.value.code, caught.value.existing_id) == ("no_period", first.id)
    assert await queue.get("T") == first
    replaced = await queue.enqueue({"n": 3}, dedupe_key="k", on_duplicate="replace", **options)
    assert (replaced.id, replaced.payload) == ("T", {"n": 3})
    await done(queue)
    assert await is_free(queue, "k")


async def test_key_without_a_period_changes_with_a_replacement(queue: Any) -> None:
    await queue.enqueue({"n": 1}, task_id="T", dedupe_key="k1")
    await queue.enqueue({"n": 2}, task_id="T", dedupe_key="k2", on_duplicate="replace")
    assert not await is_free(queue, "k2")
    assert await is_free(queue, "k1")


async def test_task_id_that_is_taken_takes_no_key(queue: Any) -> None:
    await queue.enqueue({}, task_id="a")
    with pytest.raises(DuplicateTask) as caught:
        await queue.enqueue({}, task_id="a", dedupe_key="k", dedupe_for=HOUR)
    assert (caught.value.dedupe_key, caught.value.existing_id) == (None, "a")
    await queue.enqueue({}, task_id="b", dedupe_key="k", dedupe_for=HOUR)


async def test_enqueue_many_takes_keys_for_each_item(harness: Harness) -> None:
    queue = harness.queue(batch_size=3)
    held = await queue.enqueue({"n": -1}, dedupe_key="held", dedupe_for=HOUR)
    await done(queue)

    def item(n: int, key: str, **options: Any) -> Any:
        return NewTask(payload={"n": n}, dedupe_key=key, dedupe_for=HOUR, **options)

    report = await queue.enqueue_many(
        [
            {"n": 0},
            item(1, "held"),
            item(2, "a"),
            item(3, "a"),
            item(4, "held", on_duplicate="return"),
            item(5, "b", delay=60),
            item(6, "b", on_duplicate="replace"),
        ]
    )
    assert [(task.payload["n"], task.is_duplicate) for task in report.tasks] == [
        (0, False), (2, False), (-1, True), (5, False), (6, True),
    ]  # fmt: skip
    assert report.tasks[2].id == held.id
    assert report.added == 3
    assert [(one.index, one.dedupe_key) for one in report.duplicates] == [(1, "held"), (3, "a")]
    assert [task.payload["n"] for task in await queue.pop_many(9)] == [0, 2, 6]
    again = await queue.enqueue_many([item(7, "a"), item(8, "b"), item(9, "c")])
    assert [task.payload["n"] for task in again.tasks] == [9]


async def test_keys_are_kept_in_their_collection_until_their_period_is_over(
    harness: Harness, queue: Any
) -> None:
    task = await queue.enqueue({}, dedupe_key="k", dedupe_for=60)
    (key,) = await harness.stored("microqueue_dedupe_keys")
    assert key["_id"] == {"collection": "tasks", "queue": "default", "key": "k"}
    assert key["task_id"] == task.id
    await done(queue)
    harness.clock.advance(60)
    second = await queue.enqueue({}, dedupe_key="k", dedupe_for=60)
    (key,) = await harness.stored("microqueue_dedupe_keys")
    assert key["task_id"] == second.id


@pytest.mark.one_driver
@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"dedupe_for": 60}, timedelta(seconds=60)),  # Without a key.
        ({"dedupe_for": 0, "dedupe_key": "k"}, 0),
        ({"dedupe_for": "1h", "dedupe_key": "k"}, "1h"),
    ],
)
async def test_bad_periods_are_rejected(
    harness: Harness, queue: Any, options: dict[str, Any], value: Any
) -> None:
    with rejecting("dedupe_for", value):
        await queue.enqueue({}, **options)
    assert await harness.stored() == []
