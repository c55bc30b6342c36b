"""The core of a queue: its operations, shared by :class:`Queue` and :class:`AsyncQueue`.

A queue has a core and performs its operations. Code inside the package reaches the core with
:func:`core_of`::

    core = core_of(queue)
    core.collections.name              # where the tasks are
    core.run(core.promote_due())       # awaited for an AsyncQueue

The core performs no I/O itself: each operation is a generator that ``run`` drives.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from microqueue.arguments import (
    check_code,
    check_count,
    check_id,
    check_name,
    check_popped,
    check_session,
    check_several,
    check_status,
    refused,
)
from microqueue.clock import LARGEST_SKEW, TICK, Clock, later
from microqueue.durations import Duration, duration_argument, to_positive_timedelta
from microqueue.errors import InvalidArgument, InvalidPayload, LeaseLost
from microqueue.model import shorten
from microqueue.new_task import AddedTasks, Duplicate, EnqueueOptions, EnqueueReport, NewTask
from microqueue.operations import (
    administration,
    claim,
    diagnostics,
    dlq_collection,
    enqueue,
    indexes,
    lookup,
    maintenance,
    pauses,
    poll,
    settle,
    stats,
    workers,
)
from microqueue.operations.call import Document, Operation, Target, dlq_collection_name
from microqueue.operations.claim import Spread
from microqueue.operations.poll import PollResult
from microqueue.operations.server_clock import read_clock
from microqueue.operations.settle import Settlement
from microqueue.operations.stats import Bounds, KnownSamples
from microqueue.payload import PayloadCodec, check_encodable, codec_of, encode_all
from microqueue.positions import Positions
from microqueue.reports import Pause, QueueStats, WorkerInfo
from microqueue.settings import QueueSettings
from microqueue.task import Claimed, Lease, PayloadT, Task, TaskError, TaskStatus
from microqueue.task_ids import possible_ids

if TYPE_CHECKING:
    from microqueue.drivers.asynchronous import AsyncDriver
    from microqueue.drivers.collections import Collections
    from microqueue.drivers.sync import SyncDriver

__all__ = ["AsyncCore", "HasCore", "QueueCore", "SyncCore", "core_of", "new_token", "worker_name"]

T = TypeVar("T")
REMEMBERED_SEC = 1.0
"""How long a claim trusts what was last read about a pause."""
_HOST = socket.gethostname()


class QueueCore(Generic[PayloadT]):
    """The name, settings, clock and collections of a queue, and its operations."""

    def __init__(
        self,
        driver: SyncDriver | AsyncDriver,
        collections: Collections,
        name: str,
        *,
        settings: QueueSettings,
        payload_model: type[PayloadT] | None,
        clock: Clock,
    ) -> None:
        self._driver: Any = driver
        self.name = check_name(name)
        self.settings = settings
        self.clock = clock
        self.collections = collections
        self._codec: PayloadCodec[PayloadT] = codec_of(payload_model)
        self._positions = Positions()
        self._spread = Spread()
        self._samples = KnownSamples()
        self._indexed = not settings.ensure_indexes
        self._known_pause: tuple[bool, float] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.place})"

    def run(self, operation: Operation[Any]) -> Any:
        """Run an operation on the queue's collections; of an ``AsyncQueue``, await it."""
        return self._driver.run(operation)

    @property
    def place(self) -> str:
        """The names of the database and the collection."""
        return f"{self.collections.database.name}.{self.collections.name}"

    def now(self) -> Operation[datetime]:
        """Return the server's time."""
        return (yield from read_clock(self.clock))

    def count_bounds(self, *, exact: bool) -> Bounds:
        """Return how far to count: in memory, without a limit."""
        unbounded = exact or self.collections.in_memory
        limit = None if unbounded else self.settings.count_limit
        return Bounds(self.collections.name, limit, self._samples)

    def ensure_indexes(self, *, adjust: bool) -> Operation[list[str]]:
        """Perform :meth:`Queue.ensure_indexes`."""
        tasks = self.collections.name
        wanted = indexes.task_indexes(self.settings.retention)
        created = yield from indexes.ensure_indexes(wanted, tasks, adjust=adjust)
        if self.settings.separate_dlq:
            created += yield from indexes.ensure_indexes(
                indexes.dead_letter_indexes(),
                dlq_collection_name(tasks),
                target=Target.DEAD_LETTERS,
            )
        self._indexed = True
        return created

    def begin(self, session: Any = None) -> Operation[datetime]:
        """Create missing indexes before the first write, and return the server's time.

        In a caller's transaction no index is created: an index build cannot join it.
        """
        if not self._indexed and session is None:
            # Only ensure_indexes() changes the retention of an existing collection.
            yield from self.ensure_indexes(adjust=False)
        return (yield from self.now())

    def next_position(self) -> Operation[tuple[datetime, int]]:
        """Return the server's time, and the position behind all waiting tasks."""
        now = yield from self.begin()
        return now, self._positions.take(now)

    def check_payload(self, payload: Any) -> None:
        """Raise :class:`InvalidPayload` if a worker of this queue could not read the payload."""
        self._codec.load(payload)

    def to_task(self, document: Document) -> Task[PayloadT]:
        """Return a stored document as a task; an invalid payload is returned as it is stored."""
        try:
            payload = self._codec.load(document.get("payload"))
        except InvalidPayload:
            payload = None
        return Task.from_document(document, payload)

    # Produce

    def enqueue(self, new: NewTask[PayloadT], session: Any) -> Operation[Task[PayloadT]]:
        """Perform :meth:`Queue.enqueue`."""
        given, payload = self._codec.accept(new.payload)
        now = yield from self._begin_adding([new], session)
        (document,) = self._documents([new], [payload], now)
        (stored,) = self._encoded([document])
        yield from enqueue.enqueue(document, stored=stored, settings=self.settings, session=session)
        return Task.from_document(document, given)

    def enqueue_many(
        self, items: Iterable[Any], options: EnqueueOptions, session: Any
    ) -> Operation[EnqueueReport[PayloadT]]:
        """Perform :meth:`Queue.enqueue_many`; all items are checked before any is written."""
        if "payload" in options:
            raise refused("payload", cast("Any", options)["payload"], "the items are the payloads")
        given = list(check_several("items", items, "give a list of payloads or NewTasks"))
        bare: NewTask[Any] = NewTask(payload=None, **options)
        news = [item if isinstance(item, NewTask) else bare for item in given]
        accept = self._codec.accept
        accepted = [
            accept(item if new is bare else new.payload)
            for item, new in zip(given, news, strict=True)
        ]
        now = yield from self._begin_adding(news, session)
        documents = self._documents(news, [payload for _, payload in accepted], now)
        encoded = self._encoded(documents)
        left_out: set[int] = set()
        for start in range(0, len(documents), self.settings.batch_size):
            chunk = slice(start, start + self.settings.batch_size)
            places = yield from enqueue.enqueue_many(
                documents[chunk], stored=encoded[chunk], settings=self.settings, session=session
            )
            left_out |= {start + place for place in places}
        return EnqueueReport.model_construct(
            tasks=AddedTasks(
                [
                    (document, payload)
                    for place, (document, (payload, _)) in enumerate(
                        zip(documents, accepted, strict=True)
                    )
                    if place not in left_out
                ]
            ),
            duplicates=[
                Duplicate(
                    index=place,
                    task_id=documents[place]["_id"],
                    dedupe_key=documents[place].get("dedupe_key"),
                )
                for place in sorted(left_out)
            ],
        )

    def _begin_adding(self, news: Iterable[NewTask[Any]], session: Any) -> Operation[datetime]:
        """Return the server's time; in a transaction, check first that the dedupe index exists.

        A transaction cannot wait for an index that is being built.
        """
        check_session(session, self.collections.client)
        now = yield from self.begin(session)
        keys = (new.dedupe_key for new in news if new.dedupe_key is not None)
        if session is not None and not self._indexed and (key := next(keys, None)) is not None:
            wanted = indexes.task_indexes(self.settings.retention)
            missing = yield from indexes.missing_indexes(wanted)
            if "dedupe" in missing:
                instead = "call ensure_indexes() before the first transaction"
                raise refused("dedupe_key", key, instead)
            self._indexed = not missing
        return now

    def _documents(
        self, news: Sequence[NewTask[Any]], payloads: Sequence[Document], now: datetime
    ) -> list[Document]:
        position = self._positions.take(now, len(news))
        documents: list[Document] = []
        pattern: NewTask[Any] | None = None
        for place, (new, payload) in enumerate(zip(news, payloads, strict=True), position):
            if new is pattern and new.task_id is None:
                documents.append(enqueue.like(documents[-1], payload=payload, position=place))
                continue
            pattern = new
            documents.append(
                enqueue.new_document(
                    new,
                    queue=self.name,
                    payload=payload,
                    settings=self.settings,
                    now=now,
                    position=place,
                )
            )
        return documents

    def _encoded(self, documents: Sequence[Document]) -> Sequence[Any]:
        """Encode documents, so that one that cannot be stored is rejected before any write."""
        encoded = encode_all(documents, self.collections.codec_options)
        return documents if self.collections.in_memory else encoded

    # Claim

    def pop(self, worker_id: str | None) -> Operation[list[Task[PayloadT]]]:
        """Claim the next task; the list is empty if there is none."""
        if not (yield from self._may_claim()):
            return []
        yield from self.promote_due()
        while True:
            lease = yield from self._new_lease(worker_id)
            document = yield from claim.pop(self.name, lease)
            if document is None:
                return []
            claimed = yield from self._deliver([document], lease)
            if claimed:
                return [claimed[0].task]
            # The task had probably expired. Others at the front may have expired, too.
            yield from maintenance.expire_undelivered(lease.started_at, self.settings, [self.name])

    def pop_many(self, limit: int, worker_id: str | None) -> Operation[list[Task[PayloadT]]]:
        """Perform :meth:`Queue.pop_many`."""
        if not (yield from self._may_claim()):
            return []
        yield from self.promote_due()
        return [one.task for one in (yield from self.claim_batch(limit, worker_id))]

    def promote_due(self) -> Operation[int]:
        """Make delayed tasks ready that are due; return how many."""
        now = yield from self.begin()
        return (yield from claim.promote_due(self.name, now, limit=self.settings.promote_limit))

    def poll(self, queues: Sequence[str]) -> Operation[PollResult]:
        """Return whether these queues have ready, due or paused work, with one query."""
        now = yield from self.begin()
        read = poll.poll_in_memory if self.collections.in_memory else poll.poll
        return (yield from read(self.collections.name, queues, now=now))

    def claim_batch(
        self,
        limit: int,
        worker_id: str | None = None,
        *,
        after: datetime | None = None,
        token: str | None = None,
        one_reply: bool = False,
    ) -> Operation[list[Claimed]]:
        """Claim up to ``limit`` ready tasks, without checking for due tasks or pauses.

        The claim starts later than ``after``, the worker's previous claim, so that its claims stay
        in order when the clock is read again. A caller that chooses the lease ``token`` can recover
        what a failed claim took with :meth:`recover_claim`. With ``one_reply`` the claim takes no
        more than 16 MB.
        """
        while True:
            lease = yield from self._new_lease(worker_id, after=after, token=token)
            documents = yield from claim.pop_many(
                self.name, lease, limit=limit, spread=self._spread, one_reply=one_reply
            )
            claimed = yield from self._deliver(documents, lease)
            if claimed or not documents:
                return claimed
            yield from maintenance.expire_undelivered(lease.started_at, self.settings, [self.name])

    def recover_claim(self, token: str, worker_id: str) -> Operation[list[Claimed]]:
        """Recover what a failed claim took under ``token``, with the leases renewed."""
        now = yield from self.begin()
        expires_at = later(now, self.settings.visibility_timeout)
        documents = yield from claim.recover_claim(token, expires_at)
        if not documents:
            return []
        # All tasks of a claim have one start: tasks of its earlier rounds are settled by now.
        started_at = documents[0]["started_at"]
        lease = Lease.trusted(
            token=token, worker_id=worker_id, started_at=started_at, expires_at=expires_at
        )
        return (yield from self._deliver(documents, lease))

    def _new_lease(
        self, worker_id: str | None, *, after: datetime | None = None, token: str | None = None
    ) -> Operation[Lease]:
        now = yield from self.begin()
        started_at = now
        # If the clock went back by more, it was wrong before.
        if after is not None and now <= after < now + LARGEST_SKEW:
            started_at = after + TICK
        return Lease.trusted(
            token=token or new_token(),
            worker_id=worker_id or f"{_HOST}:{os.getpid()}",
            started_at=started_at,
            expires_at=later(now, self.settings.visibility_timeout),
        )

    def _deliver(self, documents: list[Document], lease: Lease) -> Operation[list[Claimed]]:
        """Return the tasks that may run; fail the expired, exhausted and invalid ones."""
        now = lease.started_at
        deliverable: list[Claimed] = []
        for document in documents:
            settlement = None if clearly_deliverable(document) else undeliverable(document, now)
            if settlement is None:
                try:
                    payload = self._codec.load(document.get("payload"))
                    deliverable.append(Claimed(document, lease, payload))
                except InvalidPayload as exc:
                    error = TaskError(message=str(exc), code="invalid_payload", at=now)
                    settlement = settle.failed(now, error)
            if settlement is not None:
                task: Task[Any] = Task.from_document(document)
                with suppress(LeaseLost):  # Another worker has the task now.
                    yield from self._settle(task, settlement, now)
        if own := [one for one in deliverable if one.own_timeout_sec is not None]:
            granted_at = lease.expires_at - self.settings.visibility_timeout
            yield from claim.apply_own_timeouts([one.document for one in own], lease, granted_at)
            for one in own:
                expires_at = one.document["lease_expires_at"]
                one.lease = lease.model_copy(update={"expires_at": expires_at})
        return deliverable

    def next_poll_sec(self) -> Operation[float | None]:
        """Return after how many seconds a waiting pop polls again without news from the stream.

        The next delayed task is due then, or the pause must be read again: the change stream
        does not report a resume. ``None``: there is no such time.
        """
        if not (yield from self._may_claim()):
            return REMEMBERED_SEC
        now = yield from self.now()
        due_at = yield from lookup.next_due(self.name)
        return None if due_at is None else max((due_at - now).total_seconds(), 0.0)

    # Settle

    def _settle(
        self, task: Task[Any], settlement: Settlement, now: datetime, session: Any = None
    ) -> Operation[None]:
        yield from settle.settle(task, settlement, now=now, settings=self.settings, session=session)
        if self.settings.separate_dlq and settlement.changes["status"] == TaskStatus.FAILED:
            yield from dlq_collection.move_out_by_id(task.id)

    def mark_done(self, task: Task[Any], result: Any, session: Any) -> Operation[None]:
        """Perform :meth:`Queue.mark_done`."""
        check_session(session, self.collections.client)
        check_popped(task)
        if result is not None:
            check_encodable({"result": result}, self.collections.codec_options)
        now = yield from self.now()
        yield from self._settle(task, settle.done(now, result=result), now, session)

    def mark_done_many(self, tasks: Iterable[Task[Any]]) -> Operation[list[LeaseLost]]:
        """Perform :meth:`Queue.mark_done_many`."""
        popped: list[Task[Any]] = []
        lost: list[LeaseLost] = []
        for task in check_several("tasks", tasks, "give a list of the Tasks that pop returned"):
            try:
                popped.append(check_popped(task))
            except LeaseLost as exc:
                lost.append(exc)
        now = yield from self.now()
        lost += yield from settle.mark_all_done(popped, now=now, settings=self.settings)
        return lost

    def mark_retry(
        self, task: Task[Any], error: object, code: str | None, delay: Duration | None
    ) -> Operation[TaskStatus]:
        """Perform :meth:`Queue.mark_retry`."""
        check_popped(task)
        check_code(code)
        given = duration_argument("delay", delay)
        now = yield from self.now()
        policy = task.backoff or self.settings.backoff
        delay_sec = (
            policy.delay_seconds(task.attempts, previous=task.backoff_sec)
            if given is None
            else given.total_seconds()
        )
        reason = settle.describe_error(error, code, now, otherwise="the handler asked for a retry")
        settlement = settle.retried(task, now, reason, delay_sec=delay_sec)
        yield from self._settle(task, settlement, now)
        return TaskStatus(settlement.changes["status"])

    def mark_failure(self, task: Task[Any], message: object, code: str | None) -> Operation[None]:
        """Perform :meth:`Queue.mark_failure`."""
        check_popped(task)
        check_code(code)
        now = yield from self.now()
        error = settle.describe_error(message, code, now, otherwise="failed")
        yield from self._settle(task, settle.failed(now, error), now)

    def release(self, task: Task[Any], *, front: bool) -> Operation[None]:
        """Perform :meth:`Queue.release`."""
        check_popped(task)
        now = yield from self.now()
        yield from self._settle(task, settle.released(task, now, front=front), now)

    def touch(self, task: Task[PayloadT], extend: Duration | None) -> Operation[Task[PayloadT]]:
        """Perform :meth:`Queue.touch`."""
        lease = check_popped(task).lease
        given = duration_argument("extend", extend)
        now = yield from self.now()
        expires_at = later(now, given if given is not None else self._lease_length(task))
        yield from settle.touch(task, expires_at, now)
        renewed = lease.model_copy(update={"expires_at": expires_at}) if lease else None
        return task.model_copy(update={"lease": renewed, "updated_at": now})

    def _lease_length(self, task: Task[Any]) -> timedelta:
        own = task.visibility_timeout_sec
        if own is not None:
            with suppress(ValueError):  # A document may have been edited manually.
                return to_positive_timedelta(own)
        return self.settings.visibility_timeout

    # Inspect and administer

    def resolve_ids(self, task_ids: Iterable[Any]) -> Operation[list[Any]]:
        """Check ids; resolve those given as text, as in a URL, to the ids that exist."""
        asked = [possible_ids(check_id(one)) for one in task_ids]
        return (yield from lookup.first_existing(asked, self.settings))

    def get(self, task_id: Any) -> Operation[Task[PayloadT] | None]:
        """Perform :meth:`Queue.get`."""
        document = yield from lookup.find_first(possible_ids(check_id(task_id)), self.settings)
        return self.to_task(document) if document else None

    def peek(
        self,
        limit: int,
        status: TaskStatus | str | None,
        queue: str | None,
        *,
        all_queues: bool = False,
    ) -> Operation[list[Task[PayloadT]]]:
        """Perform :meth:`Queue.peek`."""
        chosen: str | list[str] = self.name if queue is None else check_name(queue)
        if all_queues and queue is not None:
            raise refused("queue", queue, "leave it out, or leave out all_queues")
        if all_queues:
            chosen = yield from diagnostics.every_queue(self.settings)
        documents = yield from lookup.peek(
            chosen,
            status=None if status is None else check_status(status),
            limit=check_count("limit", limit),
            settings=self.settings,
        )
        return [self.to_task(document) for document in documents]

    def stats(self, *, exact: bool) -> Operation[QueueStats]:
        """Perform :meth:`Queue.stats`."""
        now = yield from self.now()
        bounds = self.count_bounds(exact=exact)
        (found,) = yield from stats.queue_stats([self.name], now, self.settings, bounds=bounds)
        return found

    def workers(self) -> Operation[list[WorkerInfo]]:
        """Perform :meth:`Queue.workers`."""
        return (yield from workers.list_workers(self.collections.name))

    def purge(
        self, status: TaskStatus | str, older_than: Duration | None, *, dry_run: bool
    ) -> Operation[int]:
        """Perform :meth:`Queue.purge`."""
        chosen = check_status(status)
        if chosen is TaskStatus.PROCESSING:
            raise InvalidArgument(
                "status='processing' cannot be purged: workers hold these tasks",
                argument="status",
                value=status,
            )
        age = duration_argument("older_than", older_than)
        now = yield from self.now()
        before = None if age is None else now - age
        return (
            yield from administration.purge(
                self.name,
                status=chosen,
                before=before,
                now=now,
                settings=self.settings,
                dry_run=dry_run,
            )
        )

    def cancel(self, task_id: Any) -> Operation[Task[PayloadT]]:
        """Perform :meth:`Queue.cancel`."""
        (wanted,) = yield from self.resolve_ids([task_id])
        now = yield from self.now()
        document = yield from administration.cancel(wanted, now, self.settings)
        if self.settings.separate_dlq:
            yield from dlq_collection.move_out_by_id(wanted)
        return self.to_task(document)

    # Pause

    def pause(self, reason: str | None) -> Operation[Pause]:
        """Perform :meth:`Queue.pause`."""
        if reason is not None and not isinstance(reason, str):
            raise refused("reason", reason, "give a text")
        now = yield from self.now()
        pause = yield from pauses.pause(self.collections.name, self.name, reason=reason, now=now)
        self.remember_paused(paused=True)
        return pause

    def resume(self) -> Operation[bool]:
        """Perform :meth:`Queue.resume`."""
        was_paused = yield from pauses.resume(self.collections.name, self.name)
        self.remember_paused(paused=False)
        return was_paused

    def paused(self) -> Operation[Pause | None]:
        """Perform :meth:`Queue.paused`."""
        pause = yield from pauses.paused(self.collections.name, self.name)
        self.remember_paused(paused=pause is not None)
        return pause

    def remember_paused(self, *, paused: bool) -> None:
        """Remember what was just read or written, so that the next claim need not read it."""
        self._known_pause = (paused, time.monotonic())

    def _may_claim(self) -> Operation[bool]:
        """Return whether the queue is not paused, as of at most a second ago."""
        known = self._known_pause
        if known is not None and time.monotonic() - known[1] < REMEMBERED_SEC:
            return not known[0]
        return (yield from self.paused()) is None


class SyncCore(QueueCore[PayloadT]):
    """The core of a :class:`Queue`."""

    def run(self, operation: Operation[T]) -> T:
        """Run an operation on the queue's collections."""
        result: T = self._driver.run(operation)
        return result


class AsyncCore(QueueCore[PayloadT]):
    """The core of an :class:`AsyncQueue`."""

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation on the queue's collections."""
        result: T = await self._driver.run(operation)
        return result


CoreT_co = TypeVar("CoreT_co", bound=QueueCore[Any], covariant=True)


class HasCore(Protocol[CoreT_co]):
    """A queue, of either kind."""

    @property
    def _core(self) -> CoreT_co: ...


def core_of(queue: HasCore[CoreT_co]) -> CoreT_co:
    """Return the core of a queue: the one way for package code to reach its internals.

    Raises:
        InvalidArgument: It is not a queue.
    """
    core = getattr(queue, "_core", None)
    if not isinstance(core, QueueCore):
        raise refused("queue", queue, "give a Queue or an AsyncQueue")
    return core  # type: ignore[return-value]


def new_token() -> str:
    """Return the token of a new lease."""
    return secrets.token_hex(12)


def worker_name(given: str | None = None) -> str:
    """Return a unique id for one run of a worker: its name, or host and process id, and a suffix.

    If a restarted worker kept its id, its heartbeat would hide that the former one died, and the
    tasks that the former one held would not be reclaimed.
    """
    return f"{given or f'{_HOST}:{os.getpid()}'}:{secrets.token_hex(3)}"


def clearly_deliverable(document: Document) -> bool:
    """Return whether a task is certainly deliverable: a quick check that most tasks pass."""
    get, attempts, most = document.get, document["attempts"], document.get("max_attempts")
    return (
        type(attempts) is int
        and type(most) is int
        and attempts <= most
        and get("expires_at") is None
        and get("visibility_timeout_sec") is None
        and type(document["_id"]) is not dict
    )


def undeliverable(document: Document, now: datetime) -> Settlement | None:
    """Return how to settle a claimed task that must not run; ``None`` if it may run."""
    if reason := malformed(document):
        return settle.failed(now, settle.invalid_task(reason, now), delivered=False)
    task: Task[Any] = Task.from_document(document)
    if task.expires_at is not None and task.expires_at <= now:
        message, code = "not delivered before it expired", "expired"
    elif task.attempts > task.max_attempts:
        message, code = f"all {task.max_attempts} attempts are used up", "max_attempts"
    else:
        return None
    return settle.failed(now, TaskError(message=message, code=code, at=now), delivered=False)


def malformed(document: Document) -> str | None:
    """Return which field of a claimed task is malformed and why; ``None`` if none is."""
    attempts, expires_at = document["attempts"], document.get("expires_at")
    own_sec = document.get("visibility_timeout_sec")
    if isinstance(document["_id"], dict):
        return f"_id={shorten(document['_id'])} is not valid: {claim.GOOD_IDS}"
    if not isinstance(attempts, int | float) or not math.isfinite(attempts):
        return f"attempts={shorten(attempts)} is not valid: give a number"
    if expires_at is not None and not isinstance(expires_at, datetime):
        return f"expires_at={shorten(expires_at)} is not valid: give a date up to the year 9999"
    if own_sec is not None:
        try:
            to_positive_timedelta(own_sec)
        except ValueError as exc:
            return f"visibility_timeout_sec={shorten(own_sec)} is not valid: {exc}"
    return None
