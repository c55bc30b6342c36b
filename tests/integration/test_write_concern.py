"""No call returns, or reports a duplicate, after a write that was not acknowledged as it should be.

Each operation is performed again and again; the first time none of its writes is acknowledged,
then all but its first, and so on, until all are. Whatever it would have said, it must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient, MongoClient, monitoring

from microqueue import (
    AsyncQueue,
    DeadLetterFilter,
    DuplicateTask,
    MicroqueueError,
    NewTask,
    OperationFailed,
    Queue,
    QueueSettings,
    ServerUnavailable,
    Topic,
)
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.operations import archive, bulk_load
from microqueue.operations.enqueue import new_document
from microqueue.operations.replay import PlannedReplay, requeue
from tests.integration.queues import popped
from tests.servers import fail_command

NOW = datetime(2100, 1, 1, tzinfo=UTC)
WRITES = ("insert", "update", "delete", "findAndModify", "commitTransaction")
ERRORS = {
    "timed out": {"code": 64, "errmsg": "timed out", "errInfo": {"wtimeout": True}},
    "killed": {"code": 11601, "errmsg": "operation was interrupted"},
    "too few members": {"code": 100, "errmsg": "not enough data-bearing nodes"},
}


class Writes(monitoring.CommandListener):
    """Counts the writes that were sent."""

    def __init__(self) -> None:
        self.count = 0

    def started(self, event: monitoring.CommandStartedEvent) -> None:
        self.count += event.command_name in WRITES

    def succeeded(self, event: monitoring.CommandSucceededEvent) -> None:
        """Count starts only."""

    def failed(self, event: monitoring.CommandFailedEvent) -> None:
        """Count starts only."""


@contextmanager
def unacknowledged(client: MongoClient[Any], error: Any, *, after: int) -> Iterator[None]:
    """Let the server perform writes, and say that it could not wait for others."""
    data = {"failCommands": list(WRITES), "appName": "victim", "writeConcernError": error}
    # "skip" is at least one, or it is "always".
    mode: Any = {"skip": after} if after else "alwaysOn"
    with fail_command(client, mode, **data):
        yield


def failed_letter(queue: Queue[Any], **options: Any) -> dict[str, Any]:
    """Make a dead letter, and give it as it is stored."""
    task = queue.enqueue({}, **options)
    queue.mark_failure(popped(queue), "broken")
    for collection in (core_of(queue).collections.tasks, core_of(queue).collections.dead_letters):
        if found := collection.find_one({"_id": task.id, "status": "failed"}):
            letter: dict[str, Any] = found
            return letter
    raise AssertionError("there is no letter")


def blocked_letter(queue: Queue[Any]) -> dict[str, Any]:
    """Make a dead letter whose dedupe key a live task has."""
    letter = failed_letter(queue, dedupe_key="key")
    queue.enqueue({}, dedupe_key="key")
    return letter


def settled(queue: Queue[Any], **options: Any) -> Any:
    queue.enqueue({}, **options)
    task = popped(queue)
    queue.mark_done(task)
    return task


def relived(queue: Queue[Any]) -> Any:
    letter = failed_letter(queue)
    queue.dead_letters.replay(letter["_id"])
    return letter


def rows(queue: Queue[Any], token: str, hold: str | None = None) -> list[dict[str, Any]]:
    documents = [
        new_document(
            NewTask[Any](payload={}, task_id=f"row-{number}"),
            queue=queue.name,
            payload={},
            settings=queue.settings,
            now=NOW,
            position=number,
            insert_token=token,
        )
        for number in range(3)
    ]
    return [bulk_load.held(one, hold) for one in documents] if hold else documents


def add_rows(queue: Queue[Any], token: str, hold: str | None = None) -> Any:
    documents = rows(queue, token, hold)
    return core_of(queue).run(bulk_load.insert_chunk(documents, settings=queue.settings, hold=hold))


def send_back(queue: Queue[Any], letter: dict[str, Any]) -> Any:
    options: dict[str, Any] = {"run": "run", "queue": None, "position": 1}
    back = [PlannedReplay(letter, NOW - timedelta(days=1))]
    return core_of(queue).run(requeue(back, now=NOW, settings=queue.settings, **options))


def new_topic(queue: Queue[Any], *, bound: tuple[str, ...] = (), published: bool = False) -> str:
    """Make a topic with bound queues, and give its name."""
    topic = Topic(queue, uuid4().hex)
    for name in bound:
        topic.bind(name)
    if published:
        topic.publish({}, message_id="m")
    return topic.name


def publish(queue: Queue[Any], topic: str) -> Any:
    return Topic(queue, topic).publish({}, message_id="m")


CASES: dict[str, tuple[Callable[[Queue[Any]], Any], Callable[[Queue[Any], Any], Any]]] = {
    "enqueue": (lambda queue: None, lambda queue, _: queue.enqueue({}, task_id=1)),
    "enqueue, the id is taken": (
        lambda queue: queue.enqueue({}, task_id=1),
        lambda queue, _: queue.enqueue({}, task_id=1),
    ),
    "enqueue, the key is taken": (
        lambda queue: queue.enqueue({}, dedupe_key="key"),
        lambda queue, _: queue.enqueue({}, dedupe_key="key"),
    ),
    "enqueue, a dead letter has the id": (
        lambda queue: failed_letter(queue, task_id=1),
        lambda queue, _: queue.enqueue({}, task_id=1),
    ),
    "enqueue_many, one is taken": (
        lambda queue: queue.enqueue({}, task_id=1),
        lambda queue, _: queue.enqueue_many([NewTask(payload={}, task_id=n) for n in (0, 1, 2)]),
    ),
    "enqueue, return": (
        lambda queue: queue.enqueue({}, task_id=1),
        lambda queue, _: queue.enqueue({}, task_id=1, on_duplicate="return"),
    ),
    "enqueue, replace": (
        lambda queue: queue.enqueue({}, task_id=1),
        lambda queue, _: queue.enqueue({}, task_id=1, on_duplicate="replace"),
    ),
    "enqueue, for a period": (
        lambda queue: None,
        lambda queue, _: queue.enqueue({}, dedupe_key="key", dedupe_for=60),
    ),
    "enqueue, taken for a period": (
        lambda queue: settled(queue, dedupe_key="key", dedupe_for=60),
        lambda queue, _: queue.enqueue({}, dedupe_key="key", dedupe_for=60),
    ),
    "publish": (new_topic, publish),
    "publish, one bound queue": (partial(new_topic, bound=("a",)), publish),
    "publish, two bound queues": (partial(new_topic, bound=("a", "b")), publish),
    "publish, known": (partial(new_topic, bound=("a", "b"), published=True), publish),
    "bind": (new_topic, lambda queue, topic: Topic(queue, topic).bind("a")),
    "bind, known": (
        partial(new_topic, bound=("a",)),
        lambda queue, topic: Topic(queue, topic).bind("a", "shop.*"),
    ),
    "unbind": (
        partial(new_topic, bound=("a",)),
        lambda queue, topic: Topic(queue, topic).unbind("a"),
    ),
    "pop": (lambda queue: queue.enqueue({}), lambda queue, _: queue.pop()),
    "pop_many": (
        lambda queue: queue.enqueue_many([{}, {}, {}]),
        lambda queue, _: queue.pop_many(3),
    ),
    "mark_done": (
        lambda queue: queue.enqueue({}) and popped(queue),
        lambda queue, task: queue.mark_done(task),
    ),
    "mark_done, known": (
        settled,
        lambda queue, task: queue.mark_done(task),
    ),
    "mark_done_many, known": (
        settled,
        lambda queue, task: queue.mark_done_many([task]),
    ),
    "mark_failure": (
        lambda queue: queue.enqueue({}) and popped(queue),
        lambda queue, task: queue.mark_failure(task, "broken"),
    ),
    "replay": (failed_letter, lambda queue, letter: queue.dead_letters.replay(letter["_id"])),
    "replay, the key is taken": (
        blocked_letter,
        lambda queue, letter: queue.dead_letters.replay(DeadLetterFilter()),
    ),
    "requeue": (failed_letter, send_back),
    "requeue, the key is taken": (blocked_letter, send_back),
    "discard": (
        failed_letter,
        lambda queue, letter: queue.dead_letters.discard(letter["_id"], missing_ok=True),
    ),
    "load": (lambda queue: None, lambda queue, _: add_rows(queue, "a")),
    "load, written before": (
        lambda queue: add_rows(queue, "a"),
        lambda queue, _: add_rows(queue, "a"),
    ),
    "load, another has the rows": (
        lambda queue: add_rows(queue, "a"),
        lambda queue, _: add_rows(queue, "b"),
    ),
    "held load, another holds the rows": (
        lambda queue: add_rows(queue, "a", "a"),
        lambda queue, _: add_rows(queue, "b", "b"),
    ),
    "archive purge": (
        failed_letter,
        lambda queue, letter: core_of(queue).run(archive.delete_archived([letter], now=NOW)),
    ),
    "archive purge, it lives on": (
        relived,
        lambda queue, letter: core_of(queue).run(archive.delete_archived([letter], now=NOW)),
    ),
}


@pytest.fixture(scope="module")
def victims(microqueue_server: EmbeddedServer) -> Iterator[tuple[MongoClient[Any], Writes]]:
    """A client whose writes can go unacknowledged, and the count of them."""
    writes = Writes()
    options: dict[str, Any] = {"appname": "victim", "event_listeners": [writes]}
    with MongoClient[Any](microqueue_server.uri, **options) as client:
        yield client, writes


def outcome_of(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except MicroqueueError as exc:
        return type(exc)


@pytest.mark.parametrize("dead_letters", ["status", "collection"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_reported_after_an_unacknowledged_write(
    victims: tuple[MongoClient[Any], Writes],
    microqueue_client: MongoClient[Any],
    microqueue_database: Any,
    name: str,
    dead_letters: str,
) -> None:
    prepare, call = CASES[name]
    client, writes = victims
    settings = QueueSettings.model_validate({"dead_letters": dead_letters, "retention": None})
    error = list(ERRORS.values())[len(name) % len(ERRORS)]
    healthy: Queue[Any] = Queue(microqueue_database, settings=settings)
    # What timed out would be tried again until the deadline.
    hasty = settings.model_copy(update={"retry_deadline": timedelta(0)})
    queue: Queue[Any] = Queue(client[microqueue_database.name], settings=hasty)
    healthy.ensure_indexes()
    queue.ensure_indexes()
    queue.now()
    for acknowledged in range(30):
        for collection in (
            core_of(healthy).collections.tasks,
            core_of(healthy).collections.dead_letters,
            core_of(healthy).collections.dedupe_keys,
        ):
            collection.delete_many({})
        given = prepare(healthy)
        before = writes.count
        with unacknowledged(microqueue_client, error, after=acknowledged):
            outcome = outcome_of(partial(call, queue, given))
        if writes.count - before <= acknowledged:
            assert outcome is not ServerUnavailable
            return
        assert outcome is ServerUnavailable, f"with {acknowledged} of {writes.count - before}"
        # It may be repeated, and says then what is so.
        again = outcome_of(partial(call, queue, given))
        assert again is None or again is DuplicateTask or not isinstance(again, type)
    pytest.fail("it writes for ever")


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("client_class", [AsyncMongoClient, AsyncIOMotorClient])
async def test_async_calls_report_nothing_either(
    microqueue_server: EmbeddedServer,
    microqueue_client: MongoClient[Any],
    microqueue_database: Any,
    client_class: Any,
    error: str,
) -> None:
    client = client_class(microqueue_server.uri, appname="victim")
    hasty = QueueSettings(retry_deadline=0)
    queue: AsyncQueue[Any] = AsyncQueue(client[microqueue_database.name], settings=hasty)
    try:
        await queue.enqueue({}, task_id=1)
        task = await queue.pop()
        assert task is not None
        with unacknowledged(microqueue_client, ERRORS[error], after=0):
            for call in (
                lambda: queue.enqueue({}, task_id=1),
                lambda: queue.enqueue({}),
                lambda: queue.enqueue_many([{}, NewTask(payload={}, task_id=1)]),
                lambda: queue.mark_done(task),
            ):
                with pytest.raises(ServerUnavailable):
                    await call()
        with pytest.raises(DuplicateTask):
            await queue.enqueue({}, task_id=1)
        await queue.mark_done(task)
    finally:
        closing = client.close()
        if closing is not None:
            await closing


def test_a_unique_index_that_is_not_ours_is_named(microqueue_queue: Queue[Any]) -> None:
    core_of(microqueue_queue).collections.tasks.create_index("payload.to", unique=True, name="mine")
    microqueue_queue.enqueue({"to": "a"})
    for add in (
        lambda: microqueue_queue.enqueue({"to": "a"}),
        lambda: microqueue_queue.enqueue_many([{"to": "a"}, {"to": "b"}]),
    ):
        with pytest.raises(OperationFailed, match="mine"):
            add()
