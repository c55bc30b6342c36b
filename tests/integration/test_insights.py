"""The read-only views: what they return, that they change nothing, and that each uses an index."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from pymongo import AsyncMongoClient
from pymongo.errors import ExecutionTimeout

from microqueue import (
    AsyncQueue,
    BackoffPolicy,
    DeadLetterFilter,
    InvalidArgument,
    Queue,
    QueueSettings,
    Sweeper,
)
from microqueue.core import core_of
from microqueue.dashboard.payloads import Redactor
from microqueue.embedded import EmbeddedServer
from microqueue.insights import AsyncInsights, Insights, TaskFilter
from microqueue.new_task import NewTask
from microqueue.operations import dead_letters, paging, search
from microqueue.operations.enqueue import new_document
from microqueue.operations.matching import LONGEST_MESSAGE, literal_prefix, normalise
from microqueue.operations.workers import beat
from microqueue.reports import WorkerInfo
from microqueue.task import Task
from microqueue.testing import FakeClock
from tests.integration.queues import popped, profiled
from tests.rejection import rejecting

pytestmark = pytest.mark.usefixtures("unhurried_searches")

SETTINGS = QueueSettings(visibility_timeout=60, backoff=BackoffPolicy(base_sec=5, jitter="none"))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(datetime(2026, 5, 1, 12, 0, 30, tzinfo=UTC))


@pytest.fixture
def mail(microqueue_database: Any, clock: FakeClock) -> Queue[Any]:
    return Queue(microqueue_database, "mail", settings=SETTINGS, clock=clock)


@pytest.fixture
def other(microqueue_database: Any, clock: FakeClock) -> Queue[Any]:
    return Queue(microqueue_database, "other", settings=SETTINGS, clock=clock)


def fail_one(queue: Queue[Any], message: str, code: str | None = None, **payload: Any) -> Task[Any]:
    added = queue.enqueue(payload, priority=255)
    task = popped(queue)
    assert task.id == added.id
    queue.mark_failure(task, message, code=code)
    return task


# The overview


def test_overview_counts_every_queue(mail: Queue[Any], other: Queue[Any], clock: FakeClock) -> None:
    mail.enqueue_many([{} for _ in range(5)])
    other.enqueue({}, delay=600)
    popped(mail)
    clock.advance(61)
    popped(mail)
    mail.mark_done(popped(mail))
    mail.mark_failure(popped(mail), "no")
    overview = Insights(other).overview()
    by_name = {one.queue: one for one in overview.queues}
    assert list(by_name) == ["mail", "other"]
    counted = by_name["mail"]
    assert (counted.ready, counted.delayed, counted.processing, counted.overdue) == (1, 0, 2, 1)
    assert (counted.failed, counted.done_last_hour, counted.failed_last_hour) == (1, 1, 1)
    assert counted.oldest_ready_age_sec == 61
    assert by_name["other"].delayed == 1
    assert by_name["other"].next_due_at == clock.now() + timedelta(seconds=600 - 61)


def test_overview_of_an_empty_collection_shows_the_queue_asked_for(mail: Queue[Any]) -> None:
    overview = Insights(mail).overview()
    assert [one.queue for one in overview.queues] == ["mail"]
    assert overview.queues[0].ready == 0
    assert (overview.last_sweep, overview.last_active_sweep) == (None, None)


def test_minutes_count_what_was_finished_in_each(mail: Queue[Any], clock: FakeClock) -> None:
    insights = Insights(mail)
    mail.enqueue_many([{} for _ in range(4)])
    mail.mark_done(popped(mail))
    assert insights.overview().minutes.done["mail"][-1] == 1
    clock.advance(60)
    mail.mark_done(popped(mail))
    mail.mark_done(popped(mail))
    mail.mark_failure(popped(mail), "no")
    minutes = insights.overview().minutes
    assert list(minutes.done["mail"][-3:]) == [0, 1, 2]
    assert list(minutes.failed["mail"][-3:]) == [0, 0, 1]
    clock.advance(59 * 60)
    assert list(insights.overview().minutes.done["mail"][:2]) == [2, 0]
    clock.advance(60)
    assert insights.overview().minutes.done == {}


def test_minutes_that_are_over_are_not_read_again(
    mail: Queue[Any], clock: FakeClock, microqueue_database: Any
) -> None:
    insights = Insights(mail)
    mail.enqueue({})
    mail.mark_done(popped(mail))
    clock.advance(10 * 60)
    assert sum(insights.overview().minutes.done["mail"]) == 1
    microqueue_database.tasks.delete_many({})
    assert sum(insights.overview().minutes.done["mail"]) == 1, "it was read again"
    assert sum(Insights(mail).overview().minutes.done.get("mail", ())) == 0


def test_running_tasks_come_with_their_leases_and_the_soonest_first(
    mail: Queue[Any], clock: FakeClock
) -> None:
    mail.enqueue_many([{"n": 1}, {"n": 2}], headers={"task": "resize"})
    late, early = popped(mail, worker_id="a"), popped(mail, worker_id="b")
    mail.touch(late, extend=300)
    clock.advance(60)
    first, second = Insights(mail).running()
    assert (first.id, first.overdue, first.worker_id) == (early.id, True, "b")
    assert (second.id, second.overdue, second.name) == (late.id, False, "resize")
    assert second.lease_expires_at == clock.now() + timedelta(seconds=240)
    assert (second.attempt, second.max_attempts) == (1, 10)
    assert Insights(mail).running("other") == []


def test_workers_are_shown_with_what_they_hold_and_whether_they_live(
    mail: Queue[Any], clock: FakeClock
) -> None:
    now = clock.now()
    for name in ("a", "b"):
        core_of(mail).run(
            beat(
                WorkerInfo(
                    id=name,
                    collection="tasks",
                    host="h",
                    pid=1,
                    queues=["mail"],
                    concurrency=2,
                    running=0,
                    handled=3,
                    started_at=now,
                    heartbeat_at=now,
                    heartbeat_sec=10 if name == "a" else 1,
                )
            )
        )
    mail.enqueue({})
    task = popped(mail, worker_id="a")
    clock.advance(5)
    a, b = Insights(mail).overview().workers
    assert (a.alive, b.alive) == (True, False)
    assert [held.id for held in a.holds] == [task.id]
    assert b.holds == []


def test_sweeper_leaves_its_last_report_and_the_last_that_moved_something(
    mail: Queue[Any], clock: FakeClock
) -> None:
    mail.enqueue({})
    popped(mail)
    clock.advance(60)
    sweeper = Sweeper(mail)
    moved = sweeper.run_once()
    assert moved.reclaimed == 1
    clock.advance(1)
    idle = sweeper.run_once()
    last, active = Insights(mail).last_sweeps()
    assert last == idle
    assert active == moved


def test_sweeper_of_some_jobs_or_queues_leaves_its_report_at_the_same_place(
    mail: Queue[Any], clock: FakeClock
) -> None:
    for sweeper in (Sweeper(mail, jobs=["promote_due"]), Sweeper(mail, queues=["mail"])):
        clock.advance(1)
        report = sweeper.run_once()
        assert Insights(mail).last_sweeps()[0] == report


def test_sweep_that_was_skipped_leaves_no_report(
    mail: Queue[Any], microqueue_database: Any, clock: FakeClock
) -> None:
    mail.ensure_indexes()
    held = {"_id": "sweeper:tasks", "token": "x", "expires_at": clock.now() + timedelta(hours=1)}
    microqueue_database.microqueue_locks.insert_one(held)
    assert Sweeper(mail).run_once().skipped
    assert Insights(mail).last_sweeps() == (None, None)


# The list of tasks


def ids(page: Any) -> list[Any]:
    return [document["_id"] for document in page.documents]


def test_tasks_are_paged_newest_first_over_all_queues(
    mail: Queue[Any], other: Queue[Any], clock: FakeClock
) -> None:
    added = []
    for n in range(7):
        added.append((mail if n % 2 else other).enqueue({"n": n}).id)
        if n % 3:
            clock.advance(1)
    insights = Insights(mail)
    seen: list[Any] = []
    cursor = None
    while True:
        page = insights.tasks(limit=2, cursor=cursor)
        seen += ids(page)
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == added[::-1]


def test_ids_of_all_types_that_share_an_instant_are_paged_each_once(mail: Queue[Any]) -> None:
    given: list[Any] = [7, "seven", uuid4(), "eight", 8, None, None]
    added = {mail.enqueue({}, task_id=one).id for one in given}
    insights = Insights(mail)
    seen: list[Any] = []
    cursor = None
    for _ in range(len(given)):
        page = insights.tasks(limit=1, cursor=cursor)
        seen += ids(page)
        cursor = page.next_cursor
    assert set(seen) == added
    assert len(seen) == len(given)


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ({"status": "ready"}, ["elsewhere", "ready"]),
        ({"status": "delayed"}, ["delayed"]),
        ({"status": "pending"}, ["delayed", "elsewhere", "ready"]),
        ({"status": "processing"}, ["overdue", "running"]),
        ({"status": "overdue"}, ["overdue"]),
        ({"status": "done"}, ["done"]),
        ({"status": "failed"}, ["dead", "dead too"]),
        ({"queue": "other"}, ["elsewhere"]),
        ({"code": "Timeout"}, ["dead"]),
        ({"code": ""}, ["delayed", "done", "elsewhere", "ready", "running", "overdue", "dead too"]),
        ({"status": "failed", "code": ""}, ["dead too"]),
        ({"text": "NEEDLE"}, ["ready"]),
        ({"text": "17"}, ["done"]),
        ({"text": "timed out"}, ["dead"]),
        ({"text": "hunter2"}, []),
        ({"status": "failed", "text": "timed out"}, ["dead"]),
        ({"text": "a.*b"}, ["elsewhere"]),
        ({"text": "nothing of that kind"}, []),
        ({"name": "pay"}, ["ready", "delayed"]),
        ({"name": "pay", "status": "ready"}, ["ready"]),
        ({"name": "pay", "text": "needle"}, ["ready"]),
        ({"name": "pay", "queue": "other"}, []),
        ({"name": "", "status": "ready"}, ["elsewhere"]),
        ({"name": "p.y"}, []),
    ],
)
@pytest.mark.parametrize("walking", [False, True])
def test_tasks_are_filtered(
    mail: Queue[Any],
    other: Queue[Any],
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    which: dict[str, Any],
    expected: list[str],
    walking: bool,
) -> None:
    names: dict[Any, str] = {}

    def enqueue(
        label: str, queue: Queue[Any] = mail, name: str | None = None, **payload: Any
    ) -> None:
        names[queue.enqueue(payload, priority=9, name=name).id] = label

    enqueue("overdue")
    popped(mail)
    clock.advance(60)
    enqueue("running")
    popped(mail)
    enqueue("done", deep={"list": [{"number": 17}]})
    mail.mark_done(popped(mail))
    names[fail_one(mail, "order 4 timed out", "Timeout", password="hunter2").id] = "dead"
    names[fail_one(mail, "boom").id] = "dead too"
    enqueue("ready", name="pay", deep={"list": ["a needle here"]}, token="hunter2")
    delayed = mail.enqueue({}, delay=60, headers={"task": "pay"}).id
    names[delayed] = "delayed"
    tasks = core_of(mail).collections.tasks  # As earlier versions stored the name.
    tasks.update_one({"_id": delayed}, {"$unset": {"name": ""}})
    enqueue("elsewhere", other, pattern="a.*b")
    monkeypatch.setattr(paging, "SCAN_SEC", 60.0)
    if walking:  # As on a server where the matches are too rare to be found at once.
        monkeypatch.setattr(paging, "STEP", 2)
        slow_server(monkeypatch, mail)
    shown = Redactor("password|token").mask
    page = Insights(mail).tasks(TaskFilter(**which), limit=20, mask=shown)
    assert sorted(names[one] for one in ids(page)) == sorted(expected)
    assert page.complete


def slow_server(monkeypatch: pytest.MonkeyPatch, queue: Queue[Any]) -> None:
    """Have every search with a limit of time run out of it."""
    real = core_of(queue).collections.tasks.find

    def find(*arguments: Any, max_time_ms: int | None = None, **options: Any) -> Any:
        if max_time_ms is not None:
            raise ExecutionTimeout("too slow")
        return real(*arguments, **options)

    class Slow:
        def __init__(self, tasks: Any) -> None:
            self._tasks = tasks
            self.find = find

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tasks, name)

    monkeypatch.setattr(core_of(queue).collections, "tasks", Slow(core_of(queue).collections.tasks))


def test_walk_that_takes_too_long_stops_and_goes_on_from_there(
    mail: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = mail.enqueue({"text": "needle"}).id
    mail.enqueue_many([{} for _ in range(9)])
    monkeypatch.setattr(paging, "STEP", 4)
    monkeypatch.setattr(paging, "SCAN_SEC", -1.0)
    insights = Insights(mail)
    which = TaskFilter(text="needle")
    first = insights.tasks(which)
    assert (ids(first), first.complete) == ([], False)
    second = insights.tasks(which, cursor=first.next_cursor)
    assert (ids(second), second.complete) == ([], False)
    third = insights.tasks(which, cursor=second.next_cursor)
    assert (ids(third), third.complete, third.next_cursor) == ([wanted], True, None)


def test_page_of_dead_letters_stops_where_its_caller_has_enough(
    mail: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mail.enqueue_many([{"n": n} for n in range(5)])
    for task in mail.pop_many(5):
        mail.mark_failure(task, f"order {task.payload['n']} is bad")
    monkeypatch.setattr(search, "PORTION", 2)
    insights, taken = Insights(mail), list[Any]()

    def convert(document: Any, _now: Any) -> Any:
        taken.append(document)
        return document

    which = DeadLetterFilter(group="order <n> is bad")
    options: Any = {"convert": convert, "stop": lambda: len(taken) >= 4}
    page = insights.dead_letters("mail", which, **options)
    assert (len(page.documents), page.complete) == (4, True)
    taken.clear()
    rest = insights.dead_letters("mail", which, cursor=page.next_cursor, **options)
    assert (len(rest.documents), rest.next_cursor) == (1, None)
    assert {one["_id"] for one in page.documents}.isdisjoint(one["_id"] for one in rest.documents)


@pytest.mark.parametrize("text", ["x" * 10_001, "\ud800"])
def test_text_that_cannot_be_asked_for_is_rejected(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        TaskFilter(text=text)
    assert caught.value.argument == "text"


def test_tasks_are_bounded_in_time(mail: Queue[Any], clock: FakeClock) -> None:
    mail.enqueue({})
    clock.advance(10)
    wanted = mail.enqueue({}).id
    clock.advance(10)
    mail.enqueue({})
    bounds = {"since": clock.now() - timedelta(seconds=10), "until": clock.now()}
    assert ids(Insights(mail).tasks(TaskFilter(**bounds))) == [wanted]


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "x",
        "{}",
        '{"at": 1, "id": 2}',
        '{"at": {"$date": "2026-05-01T00:00:00Z"}, "id": {"$ne": 1}}',
    ],
)
def test_cursor_that_is_none_of_ours_is_rejected(mail: Queue[Any], cursor: str) -> None:
    with rejecting("cursor"):
        Insights(mail).tasks(cursor=cursor)


@pytest.mark.parametrize("task_id", [7, "seven", uuid4(), "7f"])
def test_task_is_found_by_its_id_as_text(mail: Queue[Any], task_id: Any) -> None:
    added = mail.enqueue({}, task_id=task_id)
    found = Insights(mail).find(str(added.id))
    assert found is not None
    assert found["_id"] == added.id
    assert Insights(mail).find("other") is None


def test_dead_letters_of_their_own_collection_are_listed_once(
    microqueue_database: Any, clock: FakeClock
) -> None:
    settings = SETTINGS.model_copy(update={"dead_letters": "collection"})
    queue: Queue[Any] = Queue(microqueue_database, settings=settings, clock=clock)
    dead = [fail_one(queue, f"order {n} timed out", n=n).id for n in range(3)]
    insights = Insights(queue)
    assert set(ids(insights.tasks(TaskFilter(status="failed")))) == set(dead)
    assert ids(insights.tasks(TaskFilter(status="failed", text="order 1 "))) == [dead[1]]
    assert insights.overview().queues[0].failed == 3
    assert queue.dead_letters.groups().groups[0].count == 3


# Groups of dead letters


@pytest.mark.parametrize(
    ("message", "group"),
    [
        ("order 17 timed out", "order <n> timed out"),
        ("no file 'a b.txt'", "no file <text>"),
        ('no key "x"', "no key <text>"),
        ("id 6650c0ffee0123456789abcd is gone", "id <hex> is gone"),
        ("at 0x7f3a", "at <hex>"),
        ("user 123e4567-e89b-12d3-a456-426614174000", "user <uuid>"),
        ("plain (text)? [yes] $1 ^ *", "plain (text)? [yes] $<n> ^ *"),
        ("", ""),
    ],
)
def test_message_is_normalised(message: str, group: str) -> None:
    assert normalise(message) == group
    assert message.startswith(literal_prefix(group))


@pytest.mark.parametrize("length", range(LONGEST_MESSAGE - 7, LONGEST_MESSAGE + 2))
@pytest.mark.parametrize("value", ["17", "'x'", "0xff", "123e4567-e89b-12d3-a456-426614174000"])
def test_long_message_is_not_cut_inside_of_a_placeholder(length: int, value: str) -> None:
    cut = normalise(f"{'z' * length}{value} failed")
    assert len(cut) <= LONGEST_MESSAGE
    assert "<" not in cut or ">" in cut
    assert normalise(cut) == cut


ODD_PIECES = [
    "17", "4", "٣", "1234567890123456", "0x1f", "10x1f", "deadbeef", "deadbeefdeadbeef", "-", " ",
    "'a b'", "'", '"x"', '"', "<n>", "<hex>", "<text>", "<", "123e4567-e89b-12d3-a456-426614174000",
    "order", "Order", "a.b", "(", "[", "\\", "$", "^", "\n", "\0", "é", "z" * 290,
]  # fmt: skip


@pytest.mark.parametrize("dead_letters", ["status", "collection"])
def test_filter_of_each_group_matches_its_letters_and_no_others(
    microqueue_database: Any, clock: FakeClock, dead_letters: Any
) -> None:
    settings = SETTINGS.model_copy(update={"dead_letters": dead_letters})
    queue: Queue[Any] = Queue(microqueue_database, settings=settings, clock=clock)
    pick = random.Random(7)
    messages = {"", *ODD_PIECES}
    messages |= {"".join(pick.choices(ODD_PIECES, k=pick.randint(2, 5))) for _ in range(600)}
    letters: list[dict[str, Any]] = [
        {"_id": n, "queue": "default", "status": "failed", "updated_at": clock.now(), "payload": {},
         "error": {"message": message, "code": None, "at": clock.now()}}
        for n, message in enumerate(sorted(messages))
    ]  # fmt: skip
    microqueue_database.tasks.insert_many(letters)
    found = queue.dead_letters.groups().groups
    assert sum(one.count for one in found) == len(letters)
    for group in found[::6]:
        own = {one["_id"] for one in letters if normalise(one["error"]["message"]) == group.message}
        assert len(own) == group.count
        which = DeadLetterFilter(group=group.message)
        assert queue.dead_letters.count(which) == group.count, group.message
        listed = queue.dead_letters.list(group=group.message, limit=len(own))
        assert {one.id for one in listed} == own
        assert listed.next_cursor is None
    assert queue.dead_letters.discard(DeadLetterFilter(group="<n>"), limit=1) == 1
    assert queue.dead_letters.replay(DeadLetterFilter(group="<hex>")).replayed > 1


def test_filter_of_a_group_is_followed_however_many_letters_there_are(
    mail: Queue[Any], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.operations.dead_letters.IDS_AT_ONCE", 3)
    monkeypatch.setattr("microqueue.operations.paging.STEP", 4)
    dead = []
    for n in range(20):
        dead.append(fail_one(mail, f"order {n} timed out", n=n).id)
        fail_one(mail, "order none timed out")
        clock.advance(1)
    which = DeadLetterFilter(group="order <n> timed out")
    pages, cursor = [], None
    while True:
        page = mail.dead_letters.list(group=which.group, limit=6, cursor=cursor)
        pages.append([one.id for one in page])
        cursor = page.next_cursor
        if cursor is None:
            break
    assert [len(page) for page in pages] == [6, 6, 6, 2]
    assert [one for page in pages for one in page] == dead[::-1]
    assert mail.dead_letters.discard(which, limit=4) == 4
    assert mail.dead_letters.count(which) == 16
    report = mail.dead_letters.replay(which, spread=160)
    assert (report.matched, report.replayed) == (16, 16)
    waits = [mail.get(one).next_retry_at for one in dead[4:]]  # type: ignore[union-attr]  # They are there.
    assert waits[1:] == sorted(waits[1:], key=str), "the oldest failure goes first"
    assert len(set(waits)) == 16
    assert mail.stats().failed == 20


def test_letter_that_failed_again_since_it_was_looked_at_is_another_one(
    mail: Queue[Any], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    letter = fail_one(mail, "order 1 timed out")
    queries = dead_letters.queries

    def while_it_fails_again(*arguments: Any) -> Any:
        found = yield from queries(*arguments)
        clock.advance(1)
        mail.dead_letters.replay(letter.id)
        mail.mark_failure(popped(mail), "something else")
        return found

    monkeypatch.setattr(dead_letters, "queries", while_it_fails_again)
    assert mail.dead_letters.discard(DeadLetterFilter(group="order <n> timed out")) == 0
    assert mail.stats().failed == 1


def test_groups_join_messages_that_differ_in_numbers(mail: Queue[Any], clock: FakeClock) -> None:
    started = clock.now()
    for n in range(3):
        fail_one(mail, f"order {n} timed out", "Timeout")
        clock.advance(10)
    last = fail_one(mail, "order 99 timed out", "Timeout")
    fail_one(mail, "order 5 timed out", "Other")
    fail_one(mail, "boom")
    found = mail.dead_letters.groups()
    assert (found.total, found.truncated) == (6, False)
    largest = found.groups[0]
    assert (largest.code, largest.message, largest.count) == ("Timeout", "order <n> timed out", 4)
    assert (largest.first_at, largest.last_at) == (started, clock.now())
    assert (largest.latest_id, largest.sample) == (last.id, "order 99 timed out")
    assert {(one.code, one.count) for one in found.groups[1:]} == {("Other", 1), (None, 1)}


def test_filter_of_a_group_selects_its_letters_alone(mail: Queue[Any]) -> None:
    for n in range(3):
        fail_one(mail, f"order {n} timed out", "Timeout")
    fail_one(mail, "order 1 timed out twice", "Timeout")
    fail_one(mail, "order 1 timed out", "Other")
    fail_one(mail, "order 1 timed out")
    which = DeadLetterFilter(code="Timeout", group="order <n> timed out")
    assert mail.dead_letters.count(which) == 3
    assert mail.dead_letters.count(DeadLetterFilter(code="", group=which.group)) == 1
    assert mail.dead_letters.count(DeadLetterFilter(group=which.group, text="order 1")) == 3
    assert mail.dead_letters.replay(which).replayed == 3
    assert mail.stats().ready == 3


# Replay, spread and edited


def test_replay_is_spread_evenly_over_a_period(mail: Queue[Any], clock: FakeClock) -> None:
    for n in range(10):
        fail_one(mail, "no", n=n)
        clock.advance(1)
    report = mail.dead_letters.replay(DeadLetterFilter(), delay=60, spread=100)
    assert report.replayed == 10
    tasks = sorted(mail.peek(20), key=lambda task: task.payload["n"])
    waits = [(task.next_retry_at - clock.now()).total_seconds() for task in tasks]  # type: ignore[operator]  # All have one.
    assert waits == [60 + 10 * n for n in range(10)]


def test_replay_over_a_period_without_a_delay_starts_at_once(mail: Queue[Any]) -> None:
    for n in range(4):
        fail_one(mail, "no", n=n)
    assert mail.dead_letters.replay(DeadLetterFilter(), spread=60, limit=2).replayed == 2
    stats = mail.stats()
    assert (stats.ready, stats.delayed, stats.failed) == (1, 1, 2)


@pytest.mark.parametrize("place", ["status", "collection"])
def test_letter_is_edited_and_replayed_in_one_write(
    microqueue_database: Any, clock: FakeClock, place: Any
) -> None:
    settings = SETTINGS.model_copy(update={"dead_letters": place})
    queue: Queue[Any] = Queue(microqueue_database, settings=settings, clock=clock)
    letter = fail_one(queue, "no", to="nobody")
    assert queue.dead_letters.edit_and_replay(letter.id, {"to": "ada"}).replayed == 1
    task = popped(queue)
    assert (task.id, task.payload, task.replays) == (letter.id, {"to": "ada"}, 1)
    assert queue.dead_letters.edit_and_replay(letter.id, {}).replayed == 0
    with rejecting("payload"):
        queue.dead_letters.edit_and_replay(letter.id, "text")


# Sync and async are the same


async def test_async_insights_tell_the_same(
    microqueue_server: EmbeddedServer, mail: Queue[Any], clock: FakeClock
) -> None:
    fail_one(mail, "no", "Code")
    mail.enqueue_many([{"n": n} for n in range(3)])
    popped(mail)
    Sweeper(mail).run_once()
    async with AsyncMongoClient[Any](microqueue_server.uri) as client:
        database = client[core_of(mail).collections.database.name]
        queue: AsyncQueue[Any] = AsyncQueue(database, "mail", settings=SETTINGS, clock=clock)
        there, here = AsyncInsights(queue), Insights(mail)
        assert await there.overview() == here.overview()
        assert await there.running("mail") == here.running("mail")
        assert await there.last_sweeps() == here.last_sweeps()
        assert await there.tasks(limit=2) == here.tasks(limit=2)
        assert await there.stats() == here.stats() == [mail.stats()]
        page = await there.dead_letters("mail", DeadLetterFilter())
        assert page == here.dead_letters("mail", DeadLetterFilter())
        (letter,) = page.documents
        assert await there.find(str(letter["_id"])) == letter
        assert await queue.dead_letters.groups() == mail.dead_letters.groups()
        assert await queue.dead_letters.count(DeadLetterFilter()) == 1
        edited = await queue.dead_letters.edit_and_replay(letter["_id"], {"n": 1})
        assert edited.replayed == 1
    with pytest.raises(InvalidArgument):
        AsyncInsights(mail)  # type: ignore[arg-type]  # The point.
    with pytest.raises(InvalidArgument):
        Insights(queue)  # type: ignore[arg-type]  # The point.


# On an index, whatever the size

EACH = 10_000


@pytest.fixture(scope="module")
def large(new_database: Callable[[], Any]) -> Iterator[Queue[Any]]:
    """10,000 tasks each in two queues that are ready, delayed, done long ago, and failed."""
    database = new_database()
    queue: Queue[Any] = Queue(database, "mail", clock=FakeClock())
    queue.ensure_indexes()
    now = queue.now() - timedelta(hours=3)
    states: list[dict[str, Any]] = [
        {},
        dict.fromkeys(("next_retry_at", "deadline_at"), now + timedelta(days=1)),
        {"status": "done", "finished_at": now, "deadline_at": now},
        {"status": "failed", "finished_at": now, "error": {"message": "no", "code": "x"}},
    ]
    for state in states:
        documents = []
        for n in range(2 * EACH):
            new = new_document(
                NewTask.model_construct(payload={}, priority=0),
                queue="mail" if n % 2 else "other",
                payload={"n": n},
                settings=QueueSettings(),
                now=now,
                position=n,
            )
            documents.append(new | state)
        database.tasks.insert_many(documents, ordered=False)
    yield queue
    database.drop_collection("tasks")


VIEWS: dict[str, tuple[Callable[[Insights], Any], int]] = {
    "running": (lambda insights: insights.running(), 2),
    "a page of all": (lambda insights: insights.tasks(limit=50), 120),
    "a page of a queue": (lambda insights: insights.tasks(TaskFilter(queue="mail")), 120),
    "a page of failed": (lambda insights: insights.tasks(TaskFilter(status="failed")), 120),
    "a page of dead letters": (
        lambda insights: insights.dead_letters("mail", DeadLetterFilter()),
        60,
    ),
    # Done and failed within the hour: none of the many.
    "overview but counts": (lambda insights: insights.overview().minutes, 3 * 2 * EACH + 100),
}


@pytest.mark.parametrize("name", VIEWS)
def test_view_is_read_on_an_index(large: Queue[Any], name: str) -> None:
    view, most = VIEWS[name]
    with profiled(core_of(large).collections.database) as recorded:
        view(Insights(large))
    assert recorded, "the profiler saw nothing"
    assert "COLLSCAN" not in {str(entry.get("planSummary")) for entry in recorded}
    assert sum(entry.get("keysExamined", 0) for entry in recorded) <= most
    assert {entry["op"] for entry in recorded} <= {"query", "command", "getmore"}
    for entry in recorded:
        assert "skip" not in entry["command"]
        assert not entry.get("hasSortStage") or entry["keysExamined"] < 100


def test_second_page_costs_no_more_than_the_first(large: Queue[Any]) -> None:
    insights = Insights(large)
    cursor = insights.tasks(limit=50).next_cursor
    for _ in range(20):
        cursor = insights.tasks(limit=50, cursor=cursor).next_cursor
    with profiled(core_of(large).collections.database) as recorded:
        assert len(insights.tasks(limit=50, cursor=cursor).documents) == 50
    keys = sum(entry.get("keysExamined", 0) for entry in recorded)
    assert keys <= 200, [entry["planSummary"] for entry in recorded]
