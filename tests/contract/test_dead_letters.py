from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from microqueue import DeadLetterFilter, InvalidArgument, TaskNotFound, TaskStatus, WrongStatus
from tests.contract.conftest import Harness
from tests.rejection import rejecting


@pytest.fixture(params=["status", "collection"])
def letters_queue(harness: Harness, request: pytest.FixtureRequest) -> Any:
    """A queue for each place in which dead letters may be kept."""
    return harness.queue(dead_letters=request.param, batch_size=4)


async def bury(
    harness: Harness, queue: Any, count: int, code: str, message: str = "no"
) -> list[Any]:
    buried = []
    for _ in range(count):
        await queue.enqueue({"code": code})
        task = await queue.pop()
        await queue.mark_failure(task, message, code=code)
        buried.append(task)
        harness.clock.advance(1)
    return buried


async def all_pages(queue: Any, **options: Any) -> list[Any]:
    tasks: list[Any] = []
    cursor = None
    while True:
        page = await queue.dead_letters.list(cursor=cursor, **options)
        tasks += page
        cursor = page.next_cursor
        if cursor is None:
            return tasks


async def test_letters_are_listed_newest_first_page_by_page(
    harness: Harness, letters_queue: Any
) -> None:
    buried = await bury(harness, letters_queue, 7, "c")
    listed = await all_pages(letters_queue, limit=3)
    assert [task.id for task in listed] == [task.id for task in reversed(buried)]
    assert len(await letters_queue.dead_letters.list(limit=3)) == 3


async def test_pages_lose_nothing_when_many_failed_in_one_millisecond(
    harness: Harness, letters_queue: Any
) -> None:
    ids: list[Any] = ["b", 7, "a", 2**40, UUID(int=7)]
    for task_id in ids:
        await letters_queue.enqueue({}, task_id=task_id)
    await letters_queue.enqueue_many([{}, {}])
    for task in await letters_queue.pop_many(7):
        await letters_queue.mark_failure(task, "no")
    listed = await all_pages(letters_queue, limit=1)
    assert len(listed) == 7
    assert {task.id for task in listed} >= set(ids)


async def test_letters_are_found_by_code_text_and_time(
    harness: Harness, letters_queue: Any
) -> None:
    await bury(harness, letters_queue, 2, "smtp", "Timeout after 30s (host.*)")
    moment = harness.clock.now()
    await bury(harness, letters_queue, 3, "bad", "cannot parse")
    find = letters_queue.dead_letters.list
    assert len(await find(code="smtp")) == 2
    assert len(await find(text="TIMEOUT")) == 2
    assert len(await find(text="host.*")) == 2
    assert len(await find(text="hos.*t")) == 0
    assert len(await find(since=moment)) == 3
    assert len(await find(until=moment)) == 2
    assert len(await find(code="bad", until=moment)) == 0


async def bury_named(queue: Any) -> None:
    for name in ("pay", "ship", None, "pay"):
        await queue.enqueue({}, name=name)
    # As earlier versions stored it, and malformed.
    await queue.enqueue({}, headers={"task": "ship\n"})
    await queue.enqueue({}, headers={"task": 7})
    for task in await queue.pop_many(6):
        await queue.mark_failure(task, f"no {task.name}", code=task.name)


async def test_letters_are_found_and_replayed_by_name(harness: Harness, letters_queue: Any) -> None:
    await bury_named(letters_queue)
    dead = letters_queue.dead_letters
    for name, number in (("pay", 2), ("ship", 1), ("ship\n", 1), ("", 2), ("other", 0)):
        found = await dead.list(name=name)
        assert [task.name for task in found] == [name or None] * number
        assert len(await dead.list(name=name, text="no")) == number
        assert len(await dead.list(name=name, group=f"no {name or None}")) == number
        assert await dead.count(DeadLetterFilter(name=name)) == number
    assert len(await dead.list(name="pay", code="ship")) == 0
    assert (await dead.replay(DeadLetterFilter(name="pay"))).replayed == 2
    assert [task.name for task in await letters_queue.pop_many(9)] == ["pay", "pay"]
    assert await dead.discard(DeadLetterFilter(name="")) == 2
    assert {task.name for task in await dead.list()} == {"ship", "ship\n"}


async def test_stats_count_by_code(harness: Harness, letters_queue: Any) -> None:
    empty = await letters_queue.dead_letters.stats()
    assert (empty.total, empty.by_code, empty.oldest_at) == (0, {}, None)
    begun = harness.clock.now()
    await bury(harness, letters_queue, 1, "a")
    await bury(harness, letters_queue, 2, "b")
    stats = await letters_queue.dead_letters.stats()
    assert stats.total == 3
    assert list(stats.by_code.items()) == [("b", 2), ("a", 1)]
    assert stats.oldest_at == begun
    assert stats.newest_at == begun + timedelta(seconds=2)
    assert (await letters_queue.stats()).failed == 3


async def test_replayed_task_keeps_its_history_and_counts_its_replays(
    harness: Harness, letters_queue: Any
) -> None:
    (task,) = await bury(harness, letters_queue, 1, "c")
    report = await letters_queue.dead_letters.replay(task.id)
    assert (report.matched, report.replayed, report.skipped) == (1, 1, [])
    again = await letters_queue.pop()
    assert again.id == task.id
    assert (again.attempts, again.replays, len(again.history)) == (1, 1, 1)
    await letters_queue.mark_failure(again, "still no")
    await letters_queue.dead_letters.replay([again])
    done = await letters_queue.pop()
    await letters_queue.mark_done(done)
    final = await letters_queue.get(task.id)
    assert (final.status, final.replays, len(final.history)) == (TaskStatus.DONE, 2, 3)
    assert (await letters_queue.dead_letters.stats()).total == 0


async def test_replay_without_reset_leaves_room_for_one_more_attempt(
    harness: Harness, letters_queue: Any
) -> None:
    await letters_queue.enqueue({}, max_attempts=2)
    for _ in range(2):
        await letters_queue.mark_retry(await letters_queue.pop(), delay=0)
    await letters_queue.dead_letters.replay(DeadLetterFilter(), reset_attempts=False)
    task = await letters_queue.pop()
    assert (task.attempts, task.max_attempts) == (3, 3)
    assert await letters_queue.mark_retry(task) is TaskStatus.FAILED


async def test_replay_by_filter_limit_and_delay(harness: Harness, letters_queue: Any) -> None:
    old = await bury(harness, letters_queue, 3, "a")
    await bury(harness, letters_queue, 2, "b")
    dead = letters_queue.dead_letters
    which = DeadLetterFilter(code="a")
    dry = await dead.replay(which, dry_run=True)
    assert (dry.matched, dry.replayed, dry.dry_run) == (3, 0, True)
    assert (await dead.stats()).total == 5
    report = await dead.replay(which, limit=2, delay=30)
    assert report.replayed == 2
    assert await letters_queue.pop() is None
    harness.clock.advance(30)
    assert {(await letters_queue.pop()).id for _ in range(2)} == {old[0].id, old[1].id}
    assert (await dead.stats()).by_code == {"b": 2, "a": 1}


async def test_replay_takes_more_than_one_batch(harness: Harness, letters_queue: Any) -> None:
    await bury(harness, letters_queue, 10, "a")
    report = await letters_queue.dead_letters.replay(DeadLetterFilter())
    assert (report.matched, report.replayed) == (10, 10)
    assert (await letters_queue.stats()).ready == 10


async def test_replayed_letter_that_had_expired_is_delivered(
    harness: Harness, letters_queue: Any
) -> None:
    await letters_queue.enqueue({}, expires_in=1)
    harness.clock.advance(1)
    assert await letters_queue.pop() is None
    assert (await letters_queue.dead_letters.replay(DeadLetterFilter(code="expired"))).replayed == 1
    assert await letters_queue.pop() is not None


async def test_replayed_task_goes_behind_what_already_waits(
    harness: Harness, letters_queue: Any
) -> None:
    (task,) = await bury(harness, letters_queue, 1, "a")
    waiting = await letters_queue.enqueue({})
    harness.clock.advance(1)
    await letters_queue.dead_letters.replay(task)
    assert [(await letters_queue.pop()).id for _ in range(2)] == [waiting.id, task.id]


async def test_replay_of_a_taken_dedupe_key_is_skipped_and_stays_dead(
    harness: Harness, letters_queue: Any
) -> None:
    await letters_queue.enqueue({}, dedupe_key="k")
    dead = await letters_queue.pop()
    await letters_queue.mark_failure(dead, "no")
    (other,) = await bury(harness, letters_queue, 1, "other")
    await letters_queue.enqueue({}, dedupe_key="k")
    report = await letters_queue.dead_letters.replay(DeadLetterFilter())
    assert (report.matched, report.replayed, report.skipped) == (2, 1, [dead.id])
    assert (await letters_queue.get(dead.id)).status is TaskStatus.FAILED
    assert (await letters_queue.get(other.id)).status is TaskStatus.PENDING
    assert (await letters_queue.dead_letters.stats()).total == 1
    live = await letters_queue.pop()
    await letters_queue.mark_done(live)
    assert (await letters_queue.dead_letters.replay(dead.id)).replayed == 1


async def test_only_failed_tasks_are_replayed_or_discarded(
    harness: Harness, letters_queue: Any
) -> None:
    task = await letters_queue.enqueue({})
    report = await letters_queue.dead_letters.replay(task.id)
    assert (report.matched, report.replayed) == (0, 0)
    assert await letters_queue.dead_letters.discard([task.id]) == 0
    assert (await letters_queue.stats()).ready == 1


async def test_discard_deletes_what_was_chosen(harness: Harness, letters_queue: Any) -> None:
    buried = await bury(harness, letters_queue, 6, "a")
    await bury(harness, letters_queue, 1, "b")
    dead = letters_queue.dead_letters
    assert await dead.discard(buried[0]) == 1
    assert await dead.discard(DeadLetterFilter(code="a"), limit=2) == 2
    assert await dead.discard(DeadLetterFilter(code="a")) == 3
    assert (await dead.stats()).by_code == {"b": 1}
    assert await letters_queue.get(buried[0].id) is None


async def test_letters_of_other_queues_are_left_alone(harness: Harness) -> None:
    a, b = harness.queue("a"), harness.queue("b")
    (letter,) = await bury(harness, a, 1, "c")
    assert len(await b.dead_letters.list()) == 0
    for act in (b.dead_letters.replay, b.dead_letters.discard):
        with pytest.raises(TaskNotFound) as caught:
            await act(letter.id)
        assert (caught.value.queue, caught.value.found_in) == ("b", "a")
    assert await b.dead_letters.discard(DeadLetterFilter()) == 0
    assert (await a.dead_letters.stats()).total == 1


# Ids that do not exist


@pytest.mark.parametrize("several", [False, True])
async def test_id_that_does_not_exist_is_named_and_nothing_is_changed(
    harness: Harness, letters_queue: Any, several: bool
) -> None:
    (letter,) = await bury(harness, letters_queue, 1, "c")
    unknown: list[Any] = ["unknown", 7] if several else ["unknown"]
    chosen = [unknown[0], letter.id, *unknown[1:]] if several else unknown[0]
    dead = letters_queue.dead_letters
    for call in (
        dead.replay(chosen),
        dead.replay(chosen, dry_run=True),
        dead.discard(chosen),
        dead.edit_and_replay("unknown", {}),
    ):
        with pytest.raises(TaskNotFound) as caught:
            await call
        assert caught.value.task_id == "unknown"
        assert caught.value.found_in is None
    with pytest.raises(TaskNotFound) as caught:
        await dead.discard(chosen)
    assert caught.value.task_ids == unknown
    assert all(repr(one) in str(caught.value) for one in unknown)
    assert (await dead.stats()).total == 1


async def test_ids_that_do_not_exist_are_reported_where_they_are_accepted(
    harness: Harness, letters_queue: Any
) -> None:
    first, second = await bury(harness, letters_queue, 2, "c")
    dead = letters_queue.dead_letters
    assert await dead.missing(["unknown", first, second.id, 7]) == ["unknown", 7]
    chosen = [first, "unknown"]
    dry = await dead.replay(chosen, missing_ok=True, dry_run=True)
    assert (dry.matched, dry.missing) == (1, ["unknown"])
    report = await dead.replay(chosen, missing_ok=True)
    assert (report.matched, report.replayed, report.missing) == (1, 1, ["unknown"])
    again = await dead.replay(chosen, missing_ok=True)
    assert (again.matched, again.replayed, again.missing) == (0, 0, ["unknown"])
    assert await dead.discard([second, "unknown"], missing_ok=True) == 1
    assert await dead.discard([second, "unknown"], missing_ok=True) == 0
    with pytest.raises(TaskNotFound):
        await dead.discard(second)
    assert (await dead.replay([])).missing == []


async def test_replay_of_what_was_replayed_is_safe_to_repeat(
    harness: Harness, letters_queue: Any
) -> None:
    (letter,) = await bury(harness, letters_queue, 1, "c")
    assert (await letters_queue.dead_letters.replay(letter)).replayed == 1
    report = await letters_queue.dead_letters.replay(letter)
    assert (report.matched, report.missing) == (0, [])


# All queues


@pytest.mark.parametrize("kept", ["status", "collection"])
async def test_letters_of_all_queues_are_listed_counted_and_acted_on(
    harness: Harness, kept: str
) -> None:
    a, b, empty = (harness.queue(name, dead_letters=kept, batch_size=4) for name in ("a", "b", "c"))
    ordered = []
    for _ in range(3):
        ordered += await bury(harness, a, 1, "one", "late 1")
        ordered += await bury(harness, b, 2, "two", "late 2")
    every = empty.dead_letters.all_queues
    listed, cursor = [], None
    while True:
        page = await every.list(limit=2, cursor=cursor)
        listed += [task.id for task in page]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert listed == [task.id for task in reversed(ordered)]
    assert (await empty.dead_letters.stats()).total == 0
    assert (await every.stats()).by_code == {"two": 6, "one": 3}
    found = await every.groups()
    assert [(one.code, one.count) for one in found.groups] == [("two", 6), ("one", 3)]
    assert await every.count(DeadLetterFilter(text="late")) == 9
    assert len(await every.list(group=found.groups[0].message, limit=20)) == 9
    first = await every.replay(DeadLetterFilter(), limit=2)  # The oldest failures of all.
    assert first.replayed == 2
    waiting = [(await queue.pop()).id for queue in (a, b)]
    assert waiting == [ordered[0].id, ordered[1].id]
    assert await every.discard([ordered[2].id, ordered[3].id]) == 2  # Of both queues.
    with pytest.raises(TaskNotFound):
        await every.discard([ordered[4].id, "unknown"])
    assert await every.discard(DeadLetterFilter(code="two")) == 4
    assert (await every.stats()).by_code == {"one": 1}


async def test_letter_cannot_be_cancelled_wherever_it_is_kept(
    harness: Harness, letters_queue: Any
) -> None:
    (letter,) = await bury(harness, letters_queue, 1, "c")
    with pytest.raises(WrongStatus) as caught:
        await letters_queue.cancel(letter.id)
    assert caught.value.status == "failed"
    await letters_queue.dead_letters.discard(letter.id)
    with pytest.raises(TaskNotFound):
        await letters_queue.cancel(letter.id)


async def test_letters_in_a_collection_of_their_own_leave_tasks(harness: Harness) -> None:
    queue = harness.queue(dead_letters="collection")
    (task,) = await bury(harness, queue, 1, "c")
    assert await harness.stored() == []
    (copy,) = await harness.stored("tasks_dlq")
    assert (copy["_id"], copy["status"]) == (task.id, "failed")
    await queue.mark_failure(task, "no", code="c")  # Repeated: a quiet success.


async def test_sweeper_moves_letters_that_were_left_in_tasks(harness: Harness) -> None:
    before = harness.queue()
    await bury(harness, before, 3, "c")
    after = harness.queue(dead_letters="collection", batch_size=2)
    assert (await after.dead_letters.stats()).total == 3
    assert (await harness.sweeper(after).run_once()).moved == 3
    assert await harness.stored() == []
    assert (await after.dead_letters.stats()).total == 3


async def test_foreign_id_hides_no_other_letter(harness: Harness, letters_queue: Any) -> None:
    await bury(harness, letters_queue, 2, "c")
    (document, *_) = await harness.stored("tasks") or await harness.stored("tasks_dlq")
    inserted = harness.database.tasks.insert_one({**document, "_id": 1.5})
    if not harness.blocking:
        await inserted
    assert len(await letters_queue.dead_letters.list()) == 3


BAD_CURSORS = ["", "x", "{}", '{"at": 1, "id": 2}', '{"at": {"$date": 0}, "id": {"$gt": 1}}']


@pytest.mark.one_driver
@pytest.mark.parametrize("cursor", BAD_CURSORS)
async def test_bad_cursor_is_rejected(queue: Any, cursor: str) -> None:
    with rejecting("cursor"):
        await queue.dead_letters.list(cursor=cursor)


@pytest.mark.one_driver
@pytest.mark.parametrize("text", ["\ud800", 5])
async def test_text_that_cannot_be_searched_is_rejected(queue: Any, text: Any) -> None:
    for name in ("text", "code"):
        with rejecting(name, text):
            await queue.dead_letters.list(**{name: text})


@pytest.mark.one_driver
@pytest.mark.parametrize("which", [{"$ne": None}, [{"$gt": ""}], None, 1.5, b"x"])
async def test_choice_that_is_no_id_is_rejected(queue: Any, which: Any) -> None:
    with pytest.raises(InvalidArgument):
        await queue.dead_letters.replay(which)
    with pytest.raises(InvalidArgument):
        await queue.dead_letters.discard(which)
