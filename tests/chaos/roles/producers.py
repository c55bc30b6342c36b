"""Producers: single tasks, batches, delays, priorities, dedupe keys and transactions."""

from __future__ import annotations

import signal
import threading
from typing import Any

from pymongo.errors import PyMongoError

from microqueue import (
    DuplicateTask,
    InvalidArgument,
    MicroqueueError,
    NewTask,
    Queue,
    ServerUnavailable,
)
from tests.chaos.handlers import FINAL_STATUS, Participant
from tests.chaos.ledger import now
from tests.chaos.plan import PlannedTask, tasks_of_chunk

REPEATS = 4


class Aborted(Exception):
    """Ends a transaction on purpose: nothing of it is stored."""


def run_producer(
    me: Participant, database: str, *, seed: int, chunk: int, size: int, rate: float
) -> None:
    """Enqueue the tasks of a chunk, at most ``rate`` in a second, and end."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    settings = me.setup.settings(database)
    address = me.setup.address(database)
    with Queue[Any].from_uri(address, settings=settings) as first:
        client = first._connection.client  # type: ignore[union-attr]  # noqa: SLF001
        producer = Producer(me, client, database)
        began, count = now(), 0
        options: dict[str, Any] = {
            "lease_sec": me.setup.lease_sec,
            "transactions": me.setup.transactions,
            "kinds": me.setup.kinds,
        }
        for group in tasks_of_chunk(seed, chunk, size, database=database, **options):
            if stopping.is_set():
                break
            producer.enqueue(group)
            count += len(group)
            stopping.wait(max(began + count / rate - now(), 0))


class Producer:
    """Enqueues groups of planned tasks, and writes what became of each."""

    def __init__(self, me: Participant, client: Any, database: str) -> None:
        self._me = me
        self._client = client
        self._database = database
        self._queues: dict[str, Queue[Any]] = {}

    def _queue(self, name: str) -> Queue[Any]:
        if name not in self._queues:
            settings = self._me.setup.settings(self._database)
            self._queues[name] = Queue(self._client[self._database], name, settings=settings)
        return self._queues[name]

    def enqueue(self, group: list[PlannedTask]) -> None:
        """Enqueue tasks of one queue, by the way that the first of them has."""
        keys, how = [task.key for task in group], group[0].how
        try:
            self._plan(group)
            queue = self._queue(group[0].queue)
            if how == "many":
                report = queue.enqueue_many([self._new(task) for task in group])
                taken = {one.payload["key"] for one in report.tasks}
                self._note("rejected", [key for key in keys if key not in taken], "duplicate")
                keys = [key for key in keys if key in taken]
            elif how in {"transaction", "aborted"}:
                self._in_transaction(queue, group, abort=how == "aborted")
            else:
                for task in group:
                    self._enqueue_one(queue, task)
        except (DuplicateTask, InvalidArgument, Aborted) as exc:
            self._note("rejected", keys, repr(exc)[:200])
        except (MicroqueueError, PyMongoError) as exc:
            self._note("uncertain", keys, repr(exc)[:200])
        else:
            self._note("stored", keys)

    def _enqueue_one(self, queue: Queue[Any], task: PlannedTask) -> None:
        """Enqueue a task; if the outcome is unknown, repeat the call with the same id."""
        payload, options = self._payload(task), task.options()
        if task.dedupe_key is not None:
            queue.enqueue(payload, **options)
            return
        for number in range(1, REPEATS + 1):
            try:
                queue.enqueue(payload, task_id=task.key, **options)
            except ServerUnavailable:
                if number == REPEATS:
                    raise
            except DuplicateTask:
                return  # A majority has the task, which is its own: the id is unique.
            else:
                return

    def _plan(self, group: list[PlannedTask]) -> None:
        instant = now()
        self._me.ledger.write_all(
            {
                "event": "plan",
                "at": instant,
                "key": task.key,
                "queue": task.queue,
                "due_at": None if task.delay is None else instant + task.delay,
                "max_attempts": task.max_attempts or self._me.setup.max_attempts,
                "priority": task.priority,
                "kind": task.kind,
                "expect": FINAL_STATUS[task.kind],
                "dedupe": task.dedupe_key,
                "how": task.how,
            }
            for task in group
        )

    def _payload(self, task: PlannedTask) -> dict[str, Any]:
        payload = {"key": task.key, "kind": task.kind, "sec": task.sec, "times": task.times}
        return {**payload, "database": self._database}

    def _new(self, task: PlannedTask) -> NewTask[Any]:
        return NewTask[Any](payload=self._payload(task), **task.options())

    def _in_transaction(self, queue: Queue[Any], group: list[PlannedTask], *, abort: bool) -> None:
        """Enqueue with a write of the producer's own, as with an outbox."""

        def write(session: Any) -> None:
            orders = self._client[self._database].orders
            for task in group:
                orders.insert_one({"key": task.key}, session=session)
                queue.enqueue(self._payload(task), session=session, **task.options())
            if abort:
                raise Aborted

        with self._client.start_session() as session:
            session.with_transaction(write)

    def _note(self, event: str, keys: list[str], error: str | None = None) -> None:
        more = {} if error is None else {"error": error}
        self._me.ledger.write_all({"event": event, "key": key, **more} for key in keys)
