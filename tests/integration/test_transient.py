"""Connections that break, primaries that step down: what is repeated, and what surfaces."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from pymongo import MongoClient, monitoring
from pymongo.errors import AutoReconnect, PyMongoError

from microqueue import (
    AsyncQueue,
    DeadLetterFilter,
    Hooks,
    NewTask,
    OperationFailed,
    Queue,
    QueueSettings,
    ServerUnavailable,
    Sweeper,
    TaskStatus,
    Topic,
)
from microqueue.core import core_of
from microqueue.drivers.error_translation import translate
from microqueue.embedded import EmbeddedServer
from microqueue.operations.call import Call, Target
from microqueue.operations.replay import PlannedReplay, requeue
from tests.integration.queues import popped
from tests.servers import fail_command
from tests.waiting import wait_for


@contextmanager
def failing(client: MongoClient[Any], commands: list[str], **data: Any) -> Iterator[None]:
    """Make the server fail the next commands of these names."""
    mode = {"times": data.pop("times", 1)}
    point = {"failCommands": commands, "appName": "victim", **data}
    with fail_command(client, mode, **point):
        yield


class Commands(monitoring.CommandListener):
    """Counts what was sent, by name."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.names.append(event.command_name)

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Count starts only."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Count starts only."""


@pytest.fixture
def commands() -> Commands:
    return Commands()


@pytest.fixture
def victim(
    microqueue_server: EmbeddedServer, microqueue_database: Any, commands: Commands
) -> Iterator[Queue[Any]]:
    """A queue whose commands can be failed, with the driver's own retries switched off."""
    with MongoClient[Any](
        microqueue_server.uri,
        appname="victim",
        retryWrites=False,
        retryReads=False,
        event_listeners=[commands],
    ) as client:
        queue: Queue[Any] = Queue(client[microqueue_database.name])
        queue.ensure_indexes()
        queue.now()
        yield queue


REPEATED: dict[str, tuple[str, Callable[[Queue[Any], Any], Any]]] = {
    "enqueue": ("insert", lambda queue, _: queue.enqueue({})),
    "enqueue_many": ("insert", lambda queue, _: queue.enqueue_many([{}, {}])),
    "mark_done": ("update", lambda queue, task: queue.mark_done(task)),
    "mark_retry": ("update", lambda queue, task: queue.mark_retry(task)),
    "mark_failure": ("update", lambda queue, task: queue.mark_failure(task, "x")),
    "release": ("update", lambda queue, task: queue.release(task)),
    "touch": ("update", lambda queue, task: queue.touch(task)),
    "get": ("find", lambda queue, task: queue.get(task.id)),
    "stats": ("aggregate", lambda queue, _: queue.stats()),
    "schedules.put": ("insert", lambda queue, _: queue.schedules.put("a", every=60)),
    "schedules.put, changed": ("update", lambda queue, _: put_twice(queue)),
    "schedules.pause": ("findAndModify", lambda queue, _: put_twice(queue, "pause")),
    "schedules.resume": ("update", lambda queue, _: put_twice(queue, "pause", "resume")),
    "schedules.trigger": ("insert", lambda queue, _: put_twice(queue, "trigger")),
    "schedules.remove": ("delete", lambda queue, _: put_twice(queue, "remove")),
    "bind": ("update", lambda queue, _: bind_twice(queue)),
    "unbind": ("update", lambda queue, _: bind_twice(queue, unbind=True)),
}


def bind_twice(queue: Queue[Any], *, unbind: bool = False) -> None:
    topic = Topic(queue, "news")
    for priority in (1, 2):
        topic.bind("mail", priority=priority)
    if unbind:
        assert topic.unbind("mail")
    assert [one.queue for one in topic.bindings()] == ([] if unbind else ["mail"])


def put_twice(queue: Queue[Any], *methods: str) -> None:
    for every in (60, 61):
        queue.schedules.put("a", every=every)
    for method in methods:
        getattr(queue.schedules, method)("a")
    found = queue.schedules.get("a")
    assert (found is None) is (methods == ("remove",))
    assert found is None or found.every == timedelta(seconds=61)
    assert found is None or found.runs == methods.count("trigger")


@pytest.mark.parametrize("fault", [{"closeConnection": True}, {"errorCode": 10107}])
@pytest.mark.parametrize("name", REPEATED)
def test_safe_calls_are_repeated_until_they_succeed(
    victim: Queue[Any], microqueue_client: MongoClient[Any], name: str, fault: dict[str, Any]
) -> None:
    victim.enqueue({})
    task = victim.pop()
    command, call = REPEATED[name]
    with failing(microqueue_client, [command], times=3, **fault):
        call(victim, task)


def test_repeating_ends_at_the_deadline(
    microqueue_server: EmbeddedServer, microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    with MongoClient[Any](microqueue_server.uri, appname="victim", retryWrites=False) as client:
        settings = QueueSettings(retry_deadline=0.3)
        Queue[Any](client[microqueue_database.name]).ensure_indexes()  # That may take longer.
        queue: Queue[Any] = Queue(client[microqueue_database.name], settings=settings)
        with failing(microqueue_client, ["insert"], times=10_000, errorCode=10107):
            started = time.monotonic()
            with pytest.raises(ServerUnavailable) as caught:
                queue.enqueue({})
        assert time.monotonic() - started < 12  # The default would be 15 seconds.
        assert isinstance(caught.value.__cause__, AutoReconnect)


def test_without_a_deadline_nothing_is_repeated(
    victim: Queue[Any], microqueue_client: MongoClient[Any], commands: Commands
) -> None:
    settings = QueueSettings(retry_deadline=0)
    queue: Queue[Any] = Queue(core_of(victim).collections.tasks, settings=settings)
    queue.now()
    queue.ensure_indexes()
    commands.names.clear()
    with failing(microqueue_client, ["insert"], errorCode=10107), pytest.raises(ServerUnavailable):
        queue.enqueue({})
    assert commands.names == ["insert"]


def test_errors_that_do_not_pass_are_not_repeated(
    victim: Queue[Any], microqueue_client: MongoClient[Any], commands: Commands
) -> None:
    commands.names.clear()
    with (
        failing(microqueue_client, ["insert"], times=5, errorCode=13),
        pytest.raises(OperationFailed) as caught,
    ):
        victim.enqueue({})
    assert not isinstance(caught.value, ServerUnavailable)
    assert commands.names == ["insert"]


class ReplyLost:
    """Performs a method once without letting its reply through, as a broken connection does."""

    def __init__(
        self,
        collection: Any,
        method: str,
        *,
        performed: bool = True,
        in_between: Callable[[], object] = lambda: None,
    ) -> None:
        self._collection = collection
        self._method = method
        self._performed = performed
        self._in_between = in_between
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._collection, name)
        if name != self._method or self.lost:
            return value

        def lose(*arguments: Any, **options: Any) -> Any:
            self.lost += 1
            if self._performed:
                with suppress(PyMongoError):  # It is part of the reply.
                    value(*arguments, **options)
            self._in_between()
            raise AutoReconnect("connection closed")

        async def lose_async(*arguments: Any, **options: Any) -> Any:
            self.lost += 1
            if self._performed:
                with suppress(PyMongoError):
                    await value(*arguments, **options)
            self._in_between()
            raise AutoReconnect("connection closed")

        return lose_async if inspect.iscoroutinefunction(value) else lose


def losing(queue: Queue[Any] | AsyncQueue[Any], method: str, **options: Any) -> ReplyLost:
    lossy = ReplyLost(core_of(queue).collections.tasks, method, **options)
    core_of(queue).collections.tasks = lossy
    return lossy


def test_pop_finds_its_claim_again_when_the_reply_was_lost(microqueue_queue: Queue[Any]) -> None:
    microqueue_queue.enqueue_many([{"n": 1}, {"n": 2}])
    assert losing(microqueue_queue, "find_one_and_update").lost == 0
    task = microqueue_queue.pop()
    assert task is not None
    assert (task.payload, task.attempts) == ({"n": 1}, 1)
    assert microqueue_queue.stats().processing == 1
    microqueue_queue.mark_done(task)


def test_pop_that_claimed_nothing_says_so_and_can_be_called_again(
    microqueue_queue: Queue[Any],
) -> None:
    microqueue_queue.enqueue({"n": 1})
    losing(microqueue_queue, "find_one_and_update", performed=False)
    with pytest.raises(ServerUnavailable):
        microqueue_queue.pop()
    task = microqueue_queue.pop()
    assert task is not None
    assert task.attempts == 1


def test_batch_finds_its_claims_again_when_the_reply_was_lost(
    microqueue_queue: Queue[Any],
) -> None:
    microqueue_queue.enqueue_many([{"n": n} for n in range(5)])
    losing(microqueue_queue, "update_many")
    tasks = microqueue_queue.pop_many(5)
    assert [task.payload["n"] for task in tasks] == [0, 1, 2, 3, 4]
    assert {task.attempts for task in tasks} == {1}


@pytest.mark.parametrize("task_id", [None, "own"])
def test_insert_whose_reply_was_lost_is_not_taken_for_a_duplicate(
    microqueue_queue: Queue[Any], task_id: Any
) -> None:
    microqueue_queue.ensure_indexes()
    losing(microqueue_queue, "insert_one")
    microqueue_queue.enqueue({"n": 1}, task_id=task_id, dedupe_key="k")
    assert microqueue_queue.stats().ready == 1


def test_batch_insert_whose_reply_was_lost_reports_no_duplicates(
    microqueue_queue: Queue[Any],
) -> None:
    microqueue_queue.ensure_indexes()
    losing(microqueue_queue, "insert_many")
    report = microqueue_queue.enqueue_many([{"n": n} for n in range(10)])
    assert (report.added, report.duplicates) == (10, [])
    assert microqueue_queue.stats().ready == 10


@pytest.mark.parametrize("dedupe_key", [None, "k"])
@pytest.mark.parametrize("started", [0, 1, 3])
def test_replay_counts_what_a_write_replayed_whose_reply_was_lost(
    microqueue_database: Any, dedupe_key: str | None, started: int
) -> None:
    queue, other = Queue[Any](microqueue_database), Queue[Any](microqueue_database)
    queue.enqueue_many([{"n": n} for n in range(4)])
    queue.enqueue({"n": 4}, dedupe_key=dedupe_key)
    for task in queue.pop_many(9):
        queue.mark_failure(task, "broken")

    def in_between() -> None:
        for finish in (other.mark_done, other.mark_retry, other.release)[:started]:
            finish(popped(other))

    lossy = losing(queue, "update_many", in_between=in_between)
    report = queue.dead_letters.replay(DeadLetterFilter())

    assert lossy.lost == 1
    assert (report.matched, report.replayed, report.skipped) == (5, 5, [])
    assert queue.stats().failed == 0
    assert {one["replays"] for one in core_of(other).collections.tasks.find()} == {1}


def lose_reply(queue: Queue[Any], target: Target, method: str) -> ReplyLost:
    collections = core_of(queue).collections
    lossy = ReplyLost(getattr(collections, target), method)
    setattr(collections, target, lossy)
    return lossy


def dead_letter(queue: Queue[Any]) -> None:
    queue.enqueue({})
    queue.mark_failure(popped(queue), "broken")


def delayed_task(queue: Queue[Any]) -> None:
    task = queue.enqueue({}, delay=0.01)
    wait_for(lambda: task.next_retry_at is not None and queue.now() > task.next_retry_at)


UNCOUNTED: dict[str, tuple[Callable[[Queue[Any]], Any], Target, str, Any, Any]] = {
    "discard": (
        dead_letter,
        Target.TASKS,
        "delete_many",
        lambda queue: queue.dead_letters.discard(DeadLetterFilter()),
        0,
    ),
    "purge": (
        lambda queue: queue.enqueue({}),
        Target.TASKS,
        "delete_many",
        lambda queue: queue.purge(status="pending"),
        0,
    ),
    "promote_due": (
        delayed_task,
        Target.TASKS,
        "update_many",
        lambda queue: Sweeper(queue).promote_due(),
        0,
    ),
    "schedules.remove": (
        lambda queue: queue.schedules.put("a", every=60),
        Target.SCHEDULES,
        "delete_one",
        lambda queue: queue.schedules.remove("a"),
        False,
    ),
    "unbind": (
        lambda queue: Topic(queue, "news").bind("mail"),
        Target.BINDINGS,
        "update_one",
        lambda queue: Topic(queue, "news").unbind("mail"),
        False,
    ),
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_what_a_write_whose_reply_was_lost_changed_is_not_counted(
    microqueue_database: Any, name: str
) -> None:
    queue = Queue[Any](microqueue_database)
    prepare, target, method, call, expected = UNCOUNTED[name]
    prepare(queue)
    lossy = lose_reply(queue, target, method)
    assert call(queue) == expected
    assert lossy.lost == 1
    again = Queue[Any](microqueue_database)
    assert not call(again), "the write was made"
    assert again.stats().ready == (1 if name == "promote_due" else 0)


def test_replay_does_not_count_what_another_one_replayed(microqueue_database: Any) -> None:
    queue, other = Queue[Any](microqueue_database), Queue[Any](microqueue_database)
    queue.enqueue_many([{"n": n} for n in range(5)])
    for task in queue.pop_many(9):
        queue.mark_failure(task, "broken")

    def in_between() -> None:
        assert other.dead_letters.replay(DeadLetterFilter(), limit=2).replayed == 2

    losing(queue, "update_many", performed=False, in_between=in_between)
    report = queue.dead_letters.replay(DeadLetterFilter())
    assert report.replayed == 3


@pytest.mark.parametrize("blocked", [False, True])
def test_run_of_replays_counts_what_a_write_replayed_whose_reply_was_lost(
    microqueue_queue: Queue[Any], blocked: bool
) -> None:
    queue = microqueue_queue
    queue.enqueue_many([{"n": n} for n in range(3)])
    queue.enqueue({"n": 3}, dedupe_key="k")
    for task in queue.pop_many(9):
        queue.mark_failure(task, "broken")
    if blocked:
        queue.enqueue({}, dedupe_key="k", delay=3600)
    dead_letters = list(core_of(queue).collections.tasks.find({"status": "failed"}))
    now = queue.now()

    def send_back(run: str) -> int:
        planned = [PlannedReplay(one, now) for one in dead_letters]
        operation = requeue(
            planned, run=run, queue=None, position=7, now=now, settings=queue.settings
        )
        return core_of(queue).run(operation)

    lossy = losing(queue, "bulk_write")
    assert send_back("one") == 4 - blocked
    assert lossy.lost == 1
    assert send_back("another") == 0
    assert queue.stats().failed == blocked


# Dead letters in their own collection: the task may have moved there before the repeat.

SEPARATE_DLQ = QueueSettings(dead_letters="collection")
OWN_IDS = [None, "own"]


def fail_all(queue: Queue[Any]) -> None:
    for task in queue.pop_many(10):
        queue.mark_failure(task, "broken")


def discard_all(queue: Queue[Any]) -> None:
    fail_all(queue)
    queue.dead_letters.discard(DeadLetterFilter())


def replay_and_purge_all(queue: Queue[Any]) -> None:
    fail_all(queue)
    queue.dead_letters.replay(DeadLetterFilter())
    queue.mark_done_many(queue.pop_many(10))
    queue.purge(status="done")


ENDS: dict[str, tuple[Callable[[Queue[Any]], None], bool]] = {
    "failed": (fail_all, True),
    "discarded": (discard_all, False),
    "replayed": (replay_and_purge_all, False),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("task_id", OWN_IDS)
def test_insert_whose_task_left_before_the_repeat_is_neither_a_duplicate_nor_made_twice(
    microqueue_database: Any, task_id: Any, end: str
) -> None:
    queue = Queue[Any](microqueue_database, settings=SEPARATE_DLQ)
    other = Queue[Any](microqueue_database, settings=SEPARATE_DLQ)
    queue.ensure_indexes()
    act, stays = ENDS[end]
    lossy = losing(queue, "insert_one", in_between=lambda: act(other))

    task = queue.enqueue({"n": 1}, task_id=task_id)

    assert lossy.lost == 1
    assert core_of(other).collections.tasks.count_documents({}) == 0
    assert [one.id for one in other.dead_letters.list()] == ([task.id] if stays else [])


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("task_id", OWN_IDS)
def test_batch_whose_tasks_left_before_the_repeat_is_neither_duplicate_nor_made_twice(
    microqueue_database: Any, task_id: Any, end: str
) -> None:
    queue = Queue[Any](microqueue_database, settings=SEPARATE_DLQ)
    other = Queue[Any](microqueue_database, settings=SEPARATE_DLQ)
    queue.enqueue({}, task_id="foreign")
    fail_all(other)
    (foreign,) = other.dead_letters.list()
    queue.enqueue({}, task_id="waits", delay=3600)
    ends, stays = ENDS[end]

    def in_between() -> None:
        core_of(other).collections.dead_letters.delete_one({"_id": "foreign"})
        ends(other)
        core_of(other).collections.dead_letters.insert_one(foreign_letter)

    foreign_letter = core_of(other).collections.dead_letters.find_one({"_id": foreign.id})
    lossy = losing(queue, "insert_many", in_between=in_between)
    new = [NewTask[Any](payload={"n": n}, task_id=task_id and f"{task_id}{n}") for n in range(3)]
    late = NewTask[Any](payload={}, task_id=task_id and "late", delay=3600)
    dead = NewTask[Any](payload={}, task_id="foreign")
    live = NewTask[Any](payload={}, task_id="waits")
    twice = [NewTask[Any](payload={"n": 9}, task_id=task_id)] if task_id else []

    report = queue.enqueue_many([*new, late, dead, live, *twice, *twice])

    assert lossy.lost == 1
    duplicates = ["foreign", "waits", *(["own"] if twice else [])]
    assert [one.task_id for one in report.duplicates] == duplicates
    assert report.added == 4 + len(twice)
    assert core_of(other).collections.tasks.count_documents({}) == 2, (
        "the late one, and the one that waits"
    )
    assert len(other.dead_letters.list()) == 1 + (3 + len(twice)) * stays


def test_insert_that_is_stored_is_not_repeated_where_its_task_may_move(
    victim: Queue[Any], commands: Commands
) -> None:
    queue = Queue[Any](core_of(victim).collections.tasks, settings=SEPARATE_DLQ)
    queue.ensure_indexes()
    commands.names.clear()
    losing(queue, "insert_one")

    queue.enqueue({}, task_id="own")

    assert commands.names.count("insert") == 1, "its task could have moved before the repeat"
    assert queue.stats().ready == 1


@pytest.mark.parametrize("many", [False, True])
def test_insert_that_was_not_made_is_repeated_until_the_deadline(
    victim: Queue[Any], microqueue_client: MongoClient[Any], many: bool
) -> None:
    def add(queue: Queue[Any]) -> object:
        return queue.enqueue_many([{}, {}]) if many else queue.enqueue({})

    queue = Queue[Any](core_of(victim).collections.tasks, settings=SEPARATE_DLQ)
    with failing(microqueue_client, ["insert"], times=4, errorCode=10107):
        add(queue)
    assert queue.stats().ready == 1 + many

    hurried = SEPARATE_DLQ.model_copy(update={"retry_deadline": timedelta(seconds=0.3)})
    queue = Queue[Any](core_of(victim).collections.tasks, settings=hurried)
    queue.now()
    with failing(microqueue_client, ["insert"], times=10_000, errorCode=10107):
        started = time.monotonic()
        with pytest.raises(ServerUnavailable) as caught:
            add(queue)
    assert time.monotonic() - started < 12  # The default would be 15 seconds.
    assert isinstance(caught.value.__cause__, PyMongoError)
    assert queue.stats().ready == 1 + many


def test_insert_is_not_repeated_when_the_deadline_passes_during_the_check(
    victim: Queue[Any], commands: Commands
) -> None:
    hurried = SEPARATE_DLQ.model_copy(update={"retry_deadline": timedelta(seconds=2)})
    queue = Queue[Any](core_of(victim).collections.tasks, settings=hurried)
    queue.ensure_indexes()
    queue.now()
    lossy = losing(queue, "insert_one", performed=False)

    def check_takes_long(call: Call) -> None:
        if lossy.lost and call.method == "find" and call.target is Target.TASKS:
            time.sleep(2)

    core_of(queue)._driver.before_call = check_takes_long  # noqa: SLF001
    commands.names.clear()
    with pytest.raises(ServerUnavailable) as caught:
        queue.enqueue({}, task_id="own")
    assert isinstance(caught.value.__cause__, AutoReconnect)
    assert "connection closed" in str(caught.value.__cause__)  # The error of the attempt.
    assert "insert" not in commands.names


async def test_async_insert_is_not_repeated_when_the_deadline_passes_during_the_check(
    database_uri: str, microqueue_database: Any
) -> None:
    hurried = SEPARATE_DLQ.model_copy(update={"retry_deadline": timedelta(seconds=2)})
    async with AsyncQueue[Any].from_uri(database_uri, settings=hurried) as queue:
        await queue.ensure_indexes()
        await queue.now()
        lossy = losing(queue, "insert_one", performed=False)

        def check_takes_long(call: Call) -> None:
            if lossy.lost and call.method == "find" and call.target is Target.TASKS:
                time.sleep(2)

        core_of(queue)._driver.before_call = check_takes_long  # noqa: SLF001
        with pytest.raises(ServerUnavailable) as caught:
            await queue.enqueue({}, task_id="own")
    assert "connection closed" in str(caught.value.__cause__)  # The error of the attempt.


async def test_async_insert_whose_task_left_before_the_repeat_is_not_made_twice(
    database_uri: str, microqueue_database: Any
) -> None:
    other = Queue[Any](microqueue_database, settings=SEPARATE_DLQ)
    async with AsyncQueue[Any].from_uri(database_uri, settings=SEPARATE_DLQ) as queue:
        await queue.ensure_indexes()
        for method in ("insert_one", "insert_many"):
            lossy = losing(queue, method, in_between=lambda: fail_all(other))
            if method == "insert_one":
                await queue.enqueue({}, task_id=method)
            else:
                await queue.enqueue_many([NewTask[Any](payload={}, task_id=method)])
            assert lossy.lost == 1
    assert core_of(other).collections.tasks.count_documents({}) == 0
    assert {one.id for one in other.dead_letters.list()} == {"insert_one", "insert_many"}


@pytest.mark.parametrize("name", ["mark_done", "mark_retry", "mark_failure", "release"])
def test_settlement_whose_reply_was_lost_counts_once(
    microqueue_queue: Queue[Any], name: str
) -> None:
    microqueue_queue.enqueue({})
    task = microqueue_queue.pop()
    assert task is not None
    losing(microqueue_queue, "update_one")
    REPEATED[name][1](microqueue_queue, task)
    stored = microqueue_queue.get(task.id)
    assert stored is not None
    assert len(stored.history) == 1
    assert stored.attempts == (0 if name == "release" else 1)


class Letters(Hooks):
    def __init__(self) -> None:
        self.reported: list[Any] = []

    def on_dead_letter(self, letter: Any) -> None:
        self.reported.append((letter.id, letter.error.code))


@pytest.mark.parametrize("performed", [True, False], ids=["written", "not written"])
@pytest.mark.parametrize("status", ["pending", "processing"])
def test_cancellation_whose_reply_was_lost_reaches_the_hooks(
    microqueue_database: Any, status: str, performed: bool
) -> None:
    letters = Letters()
    queue: Queue[Any] = Queue(microqueue_database, hooks=[letters])
    task = queue.enqueue({})
    if status == "processing":
        assert queue.pop() is not None
    losing(queue, "find_one_and_update", performed=performed)
    if not performed:
        with pytest.raises(ServerUnavailable):
            queue.cancel(task.id)
        assert letters.reported == []
    assert queue.cancel(task.id).status == "failed"
    assert letters.reported == [(task.id, "cancelled")]


def test_server_time_is_read_again_after_a_failover(
    victim: Queue[Any], microqueue_client: MongoClient[Any]
) -> None:
    assert not victim.clock.stale
    # The first repeat is immediate; the second waits, and forgets the time before.
    with failing(microqueue_client, ["insert"], times=2, errorCode=10107):
        victim.enqueue({})
    assert victim.clock.stale


@pytest.mark.usefixtures("own_server")
def test_no_task_is_lost_or_doubled_while_the_primary_steps_down() -> None:
    with EmbeddedServer.start() as server, MongoClient[Any](server.uri) as client:
        queue: Queue[Any] = Queue(client.test)
        queue.ensure_indexes()
        stepped_down = threading.Event()

        def step_down() -> None:
            command = {"replSetStepDown": 1, "secondaryCatchUpPeriodSecs": 0, "force": True}
            client.admin.command(command)
            stepped_down.set()

        thread = threading.Thread(target=step_down)
        delivered = []
        for n in range(60):
            if n == 20:
                thread.start()
                stepped_down.wait(30)
            queue.enqueue({"n": n}, task_id=n)
            task = queue.pop()
            assert task is not None
            queue.mark_done(task)
            delivered.append(task.id)
        thread.join()
        assert delivered == list(range(60))
        assert queue.stats().done == 60
        assert {task.attempts for task in queue.peek(100)} == {1}


async def test_async_calls_are_repeated_as_well(
    database_uri: str, microqueue_client: MongoClient[Any]
) -> None:
    options: dict[str, Any] = {"appname": "victim", "retryWrites": False}
    async with AsyncQueue[Any].from_uri(database_uri, **options) as queue:
        await queue.enqueue({})
        task = await queue.pop()
        assert task is not None
        with failing(microqueue_client, ["insert", "update"], times=4, closeConnection=True):
            await queue.enqueue({})
            await queue.mark_done(task)
        stored = await queue.get(task.id)
        assert stored is not None
        assert stored.status is TaskStatus.DONE


def test_messages_name_no_password() -> None:
    error = AutoReconnect("mongodb://user:secret@host: connection closed")
    assert "secret" not in str(translate(error))
