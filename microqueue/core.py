"""The core of a queue: its operations, shared by :class:`Queue` and :class:`AsyncQueue`.

A queue has a core and performs its operations. Code inside the package reaches the core with
:func:`core_of`::

    core = core_of(queue)
    core.collections.name              # where the tasks are
    core.run(core.promote_due())       # awaited for an AsyncQueue

The core performs no I/O itself: each operation is a generator that ``run`` drives.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from microqueue import error_codes
from microqueue.arguments import (
    check_code,
    check_count,
    check_id,
    check_name,
    check_popped,
    check_session,
    check_several,
    check_status,
    check_stored_id,
    invalid_argument,
)
from microqueue.clock import LARGEST_SKEW, TICK, Clock, later
from microqueue.durations import Duration, duration_argument, to_positive_timedelta
from microqueue.errors import (
    InvalidArgument,
    InvalidPayload,
    LeaseLost,
    TaskDeleted,
    TaskFailed,
    TaskNotFound,
)
from microqueue.hooks import Hooks, check_hooks, dead_letter_report
from microqueue.model import changed, reject_unknown, trusted
from microqueue.new_task import (
    ENQUEUE_OPTIONS,
    AddedTask,
    AddedTasks,
    Duplicate,
    EnqueueOptions,
    EnqueueReport,
    NewTask,
)
from microqueue.operations import (
    administration,
    claim,
    dedupe_keys,
    diagnostics,
    dlq_collection,
    duplicates,
    enqueue,
    indexes,
    lookup,
    maintenance,
    pauses,
    poll,
    results,
    schema,
    settle,
    stats,
    workers,
)
from microqueue.operations.call import (
    DEDUPE_KEYS_COLLECTION,
    Document,
    Operation,
    Report,
    Target,
    dlq_collection_name,
    reporting,
    resume,
)
from microqueue.operations.claim import Spread
from microqueue.operations.poll import PollResult
from microqueue.operations.schema import Schema
from microqueue.operations.server_clock import read_clock
from microqueue.operations.settle import Settlement
from microqueue.operations.stats import Bounds, KnownSamples
from microqueue.payload import PayloadCodec, check_encodable, codec_of, encode_all
from microqueue.positions import Positions
from microqueue.reports import Pause, QueueStats, WorkerInfo
from microqueue.run_ids import is_run_id
from microqueue.settings import QueueSettings
from microqueue.task import (
    Claimed,
    Lease,
    PayloadT,
    Task,
    TaskError,
    TaskStatus,
    is_text,
    read_task,
)
from microqueue.task_ids import possible_ids

if TYPE_CHECKING:
    from microqueue.drivers.collections import Collections
    from microqueue.drivers.driver import AsyncDriver, SyncDriver

__all__ = ["AsyncCore", "HasCore", "QueueCore", "SyncCore", "core_of", "new_worker_id"]

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
        hooks: Iterable[Hooks] = (),
    ) -> None:
        self._driver: Any = driver
        self.attach(hooks)
        self.name = check_name(name)
        self.settings = settings
        self.lease_sec = settings.visibility_timeout.total_seconds()
        self.clock = clock
        self.collections = collections
        self.payload_model = payload_model
        self._codec: PayloadCodec[PayloadT] = codec_of(payload_model)
        self._positions = Positions()
        self._spread = Spread()
        self._samples = KnownSamples()
        self._indexed = not settings.ensure_indexes
        self._dedupes = False  # Whether the index of dedupe keys is known to exist.
        self._keeps_keys = False  # The same for the index of keys that last for a period.
        self._schema: Schema | None = None
        self._known_pause: tuple[bool, float] | None = None

    def attach(self, hooks: Iterable[Hooks], *, source: str = "queue") -> None:
        """Let :meth:`run` report the dead letters that operations make to these hooks."""
        self.hooks = check_hooks(hooks)
        self._source = source
        self._report = dead_letter_report(self.hooks, source)

    def attach_as(self, other: QueueCore[Any]) -> None:
        """Let :meth:`run` report dead letters as the other queue does."""
        self.attach(other.hooks, source=other._source)

    def report_to(
        self,
        hooks: Iterable[Hooks],
        *,
        source: str,
        submit: Callable[[Callable[[], None]], None] | None = None,
    ) -> Report | None:
        """Return what ``reporting`` needs, so that these hooks and the queue's get the reports."""
        return dead_letter_report([*self.hooks, *hooks], source, submit)

    def run(self, operation: Operation[Any]) -> Any:
        """Run an operation on the queue's collections; of an ``AsyncQueue``, await it.

        The first call opens the collection, after the operation's own checks.
        """
        raise NotImplementedError

    def run_on_any_version(self, operation: Operation[Any]) -> Any:
        """Run an operation without opening the collection; of an ``AsyncQueue``, await it."""
        raise NotImplementedError

    def _opening(self, operation: Operation[T]) -> Operation[T]:
        """Return the same operation; before its first call, open the collection, once."""
        return operation if self._schema is not None else self._open_before(operation)

    def _open_before(self, operation: Operation[T]) -> Operation[T]:
        """Run the operation up to its first call, then open the collection, then continue.

        So the operation's own checks come first: a wrong argument is reported without a server.
        """
        try:
            call = next(operation)
        except StopIteration as stop:
            result: T = stop.value
            return result
        try:
            if not isinstance(call, schema.SchemaCheck):
                yield from self.open()
            return (yield from resume(operation, call))
        finally:
            operation.close()

    @property
    def namespace(self) -> str:
        """The names of the database and the collection."""
        return f"{self.collections.database.name}.{self.collections.name}"

    def open(self) -> Operation[Schema]:
        """Check the version of the collection and read its retention, once.

        Raises:
            SchemaMismatch: This code cannot work with the collection.
        """
        if self._schema is None:
            name, retention = self.collections.name, self.settings.retention
            self._schema = yield from schema.check(name, retention)
        return self._schema

    @property
    def keeps_done(self) -> bool:
        """Whether the collection keeps done tasks; without a retention it deletes them."""
        found = self._schema
        retention = self.settings.retention if found is None else found.retention
        return retention is None or bool(retention)

    def keeps(self, task_id: Any) -> bool:
        """Return whether a task is kept when it is done: a run of a schedule always is."""
        return self.keeps_done or is_run_id(task_id)

    def now(self) -> Operation[datetime]:
        """Return the server's time. The first call opens the collection."""
        if self._schema is None:
            yield from self.open()
        # Read from the server about once a minute, extrapolated in between.
        return (yield from read_clock(self.clock)) if self.clock.stale else self.clock.now()

    def count_bounds(self, *, exact: bool) -> Bounds:
        """Return how far to count: in memory, without a limit."""
        unbounded = exact or self.collections.in_memory
        limit = None if unbounded else self.settings.count_limit
        return Bounds(self.collections.name, limit, self._samples)

    def ensure_indexes(self, *, adjust: bool, dedupe: bool = True) -> Operation[list[str]]:
        """Perform :meth:`Queue.ensure_indexes`; without ``dedupe``, not for dedupe keys."""
        tasks = self.collections.name
        retention = self.settings.retention
        created, self._schema = yield from schema.prepare_collection(
            tasks, retention, adjust=adjust, dedupe=dedupe
        )
        self._dedupes = self._dedupes or dedupe
        if dedupe:
            created += yield from self._ensure_key_index()
        if self.settings.separate_dlq:
            created += yield from indexes.ensure_indexes(
                indexes.dead_letter_indexes(),
                dlq_collection_name(tasks),
                target=Target.DEAD_LETTERS,
            )
        self._indexed = True
        return created

    def prepare(self) -> Operation[list[str]]:
        """Create missing indexes that every collection needs, as the first write does.

        Only ensure_indexes() changes the retention of an existing collection. mongomock cannot
        create the index of dedupe keys later: it would count tasks without a key.
        """
        return (yield from self.ensure_indexes(adjust=False, dedupe=self.collections.in_memory))

    def begin(self, session: Any = None) -> Operation[datetime]:
        """Create missing indexes before the first write, and return the server's time.

        In a caller's transaction no index is created: an index build cannot join it.
        """
        if not self._indexed and session is None:
            yield from self.prepare()
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
        return read_task(document, self._payload_of(document))

    def _payload_of(self, document: Document) -> PayloadT | None:
        try:
            return self._codec.load(document.get("payload"))
        except InvalidPayload:
            return None

    # Produce

    def accept_payload(self, payload: Any) -> tuple[PayloadT, Document]:
        """Return a payload as its model, and the document to store."""
        return self._codec.accept(payload)

    def add_for(
        self, queue: str, new: NewTask[Any], payload: Document, now: datetime, *, token: str | None
    ) -> Operation[Document]:
        """Add a task to any queue of the collection; return its document.

        ``token`` identifies the insert for every process that derives the same.
        """
        document = enqueue.new_document(
            new,
            queue=queue,
            payload=payload,
            settings=self.settings,
            now=now,
            position=self._positions.take(now),
            insert_token=token,
        )
        (encoded,) = self._encoded([document])
        yield from enqueue.enqueue(document, encoded=encoded, settings=self.settings)
        return document

    def enqueue(self, new: NewTask[PayloadT], session: Any) -> Operation[Task[PayloadT]]:
        """Perform :meth:`Queue.enqueue`."""
        given, payload = self._codec.accept(new.payload)
        now = yield from self._begin_adding([new], session)
        (document,) = self._documents([new], [payload], now)
        if new.on_duplicate == "raise" and new.dedupe_for is None:
            (encoded,) = self._encoded([document])
            yield from enqueue.enqueue(
                document, encoded=encoded, settings=self.settings, session=session
            )
            return read_task(document, given)
        inserter = duplicates.Inserter(self.collections.name, self.settings, session)
        (encoded,) = self._encoded([inserter.stored(document)])
        existing = yield from duplicates.add(
            document, encoded=encoded, on_duplicate=new.on_duplicate, inserter=inserter
        )
        if existing is None:
            return read_task(document, given)
        return read_task(existing, self._payload_of(existing), is_duplicate=True)

    def enqueue_many(
        self, items: Iterable[Any], options: EnqueueOptions, session: Any
    ) -> Operation[EnqueueReport[PayloadT]]:
        """Perform :meth:`Queue.enqueue_many`; all items are checked before any is written."""
        if "payload" in options:
            raise invalid_argument(
                "payload", cast("Any", options)["payload"], "the items are the payloads"
            )
        reject_unknown("enqueue_many", options, ENQUEUE_OPTIONS)
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
        inserter = duplicates.Inserter(self.collections.name, self.settings, session)
        encoded = self._encoded([inserter.stored(document) for document in documents])
        left_out: set[int] = set()
        existing: dict[int, Document] = {}
        for start in range(0, len(documents), self.settings.batch_size):
            chunk = slice(start, start + self.settings.batch_size)
            rejected, found = yield from duplicates.add_many(
                documents[chunk],
                encoded=encoded[chunk],
                on_duplicate=[new.on_duplicate for new in news[chunk]],
                inserter=inserter,
            )
            left_out |= {start + index for index in rejected}
            existing |= {start + index: document for index, document in found.items()}
        return EnqueueReport.model_construct(
            tasks=AddedTasks(
                [
                    self._existing(existing[index])
                    if index in existing
                    else AddedTask(document, payload)
                    for index, (document, (payload, _)) in enumerate(
                        zip(documents, accepted, strict=True)
                    )
                    if index not in left_out
                ]
            ),
            duplicates=[
                Duplicate(
                    index=index,
                    task_id=documents[index]["_id"],
                    dedupe_key=documents[index].get("dedupe_key"),
                )
                for index in sorted(left_out)
            ],
        )

    def _existing(self, document: Document) -> AddedTask:
        """Return a task that existed, for the report."""
        return AddedTask(document, self._payload_of(document), is_duplicate=True)

    def _begin_adding(self, news: Sequence[NewTask[Any]], session: Any) -> Operation[datetime]:
        """Return the server's time; before the first dedupe key, create the index of the keys.

        The insert waits until the index is built, so no process adds a second task with a key. A
        transaction cannot wait for it.
        """
        check_session(session, self.collections.client)
        now = yield from self.begin(session)
        if (
            self.settings.ensure_indexes
            and not self._keeps_keys
            and any(new.dedupe_for is not None for new in news)
        ):
            yield from self._ensure_key_index()
        keys = (new.dedupe_key for new in news if new.dedupe_key is not None)
        if self._dedupes or not self.settings.ensure_indexes or (key := next(keys, None)) is None:
            return now
        if session is None:
            yield from indexes.ensure_dedupe(self.collections.name)
        elif (yield from indexes.missing_indexes([indexes.dedupe_index()])):
            instead = "call ensure_indexes() before the first transaction"
            raise invalid_argument("dedupe_key", key, instead, code="no_index")
        self._dedupes = True
        return now

    def _ensure_key_index(self) -> Operation[list[str]]:
        """Create the index that deletes dedupe keys after their period.

        Also during a caller's transaction, which has not used that collection yet.
        """
        created = yield from indexes.ensure_indexes(
            [indexes.dedupe_key_index()],
            DEDUPE_KEYS_COLLECTION,
            target=Target.DEDUPE_KEYS,
            adjust=False,
        )
        self._keeps_keys = True
        return created

    def _documents(
        self, news: Sequence[NewTask[Any]], payloads: Sequence[Document], now: datetime
    ) -> list[Document]:
        first = self._positions.take(now, len(news))
        documents: list[Document] = []
        latest: NewTask[Any] | None = None  # Of the last document that was built in full.
        for position, (new, payload) in enumerate(zip(news, payloads, strict=True), first):
            if new is latest and new.task_id is None:
                documents.append(
                    enqueue.another_document(documents[-1], payload=payload, position=position)
                )
                continue
            latest = new
            documents.append(
                enqueue.new_document(
                    new,
                    queue=self.name,
                    payload=payload,
                    settings=self.settings,
                    now=now,
                    position=position,
                )
            )
        return documents

    def _encoded(self, documents: Sequence[Document]) -> Sequence[Any]:
        """Encode documents, so that one that cannot be stored is rejected before any write."""
        encoded = encode_all(documents, self.collections.codec_options)
        return documents if self.collections.in_memory else encoded

    # Claim

    def pop(self, worker_id: str | None) -> Operation[list[Task[PayloadT]]]:
        """Claim the next task; the list is empty if there is none.

        A list, as of :meth:`pop_many`, so that ``AsyncQueue`` can release what a cancelled caller
        claimed.
        """
        return (yield from self.pop_many(1, worker_id))

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

    def claim_batch(self, limit: int, worker_id: str | None = None) -> Operation[list[Claimed]]:
        """Claim up to ``limit`` ready tasks, without checking for due tasks or pauses."""
        claimed: list[Claimed] | None = None
        while claimed is None:
            lease = yield from self.new_lease(worker_id)
            claimed = yield from self.claim_under(lease, limit)
        return claimed

    def claim_under(
        self,
        lease: Lease,
        limit: int,
        *,
        one_reply: bool = False,
        before_write: Callable[[], object] | None = None,
    ) -> Operation[list[Claimed] | None]:
        """Claim up to ``limit`` ready tasks under a new lease; ``None``: claim again.

        Then the claim took only tasks that must not run, and ended them. With ``one_reply`` it
        takes no more than 16 MB. ``before_write`` is called before each write that claims. If one
        fails, :meth:`recover_claim` recovers what it took.
        """
        documents = yield from claim.pop_many(
            self.name,
            lease,
            limit=limit,
            spread=self._spread,
            one_reply=one_reply,
            before_write=before_write,
        )
        claimed = yield from self._deliver(documents, lease)
        if claimed or not documents:
            return claimed
        # They had probably expired. Others at the front may have expired, too.
        yield from maintenance.expire_undelivered(lease.started_at, self.settings, [self.name])
        return None

    def recover_claim(self, token: str, worker_id: str) -> Operation[list[Claimed]]:
        """Recover what a failed claim took under ``token``, with the leases renewed."""
        now = yield from self.begin()
        expires_at = later(now, self.settings.visibility_timeout)
        documents = yield from claim.recover_claim(token, expires_at)
        if not documents:
            return []
        started_at = documents[0]["started_at"]
        lease = trusted(
            Lease, token=token, worker_id=worker_id, started_at=started_at, expires_at=expires_at
        )
        return (yield from self._deliver(documents, lease))

    def new_lease(
        self, worker_id: str | None, *, after: datetime | None = None
    ) -> Operation[Lease]:
        """Return the lease of a claim that begins now, later than ``after``."""
        now = yield from self.begin()
        started_at = now
        # If the clock went back by more, it was wrong before.
        if after is not None and now <= after < now + LARGEST_SKEW:
            started_at = after + TICK
        return trusted(
            Lease,
            token=new_token(),
            worker_id=worker_id or f"{_HOST}:{os.getpid()}",
            started_at=started_at,
            expires_at=later(now, self.settings.visibility_timeout),
        )

    def _deliver(self, documents: list[Document], lease: Lease) -> Operation[list[Claimed]]:
        """Return the tasks that may run; fail the expired, exhausted and invalid ones."""
        now = lease.started_at
        deliverable: list[Claimed] = []
        for document in documents:
            settlement = claim.settlement_if_undeliverable(document, now)
            if settlement is None:
                try:
                    payload = self._codec.load(document.get("payload"))
                    deliverable.append(Claimed(document, lease, payload))
                except InvalidPayload as exc:
                    error = TaskError(message=str(exc), code=error_codes.INVALID_PAYLOAD, at=now)
                    settlement = settle.failed(now, error)
            if settlement is not None:
                task = Claimed(document, lease, document.get("payload")).task
                with suppress(LeaseLost):  # Another worker has the task now.
                    yield from self._settle(task, settlement, now)
        if own := [one for one in deliverable if one.own_timeout_sec is not None]:
            granted_at = lease.expires_at - self.settings.visibility_timeout
            yield from claim.apply_own_timeouts([one.document for one in own], lease, granted_at)
            for one in own:
                expires_at = one.document["deadline_at"]
                one.lease = changed(lease, expires_at=expires_at)
        return deliverable

    def next_poll_sec(self) -> Operation[float | None]:
        """Return after how many seconds a waiting pop polls again without news from the stream.

        The next delayed task is due then, or the pause must be read again: the change stream
        does not report a resume. ``None``: there is no such time.
        """
        if not (yield from self._may_claim()):
            return REMEMBERED_SEC
        now = yield from self.now()
        due_at = yield from poll.next_due(self.name)
        return None if due_at is None else max((due_at - now).total_seconds(), 0.0)

    # Settle

    def _settle(
        self, task: Task[Any], settlement: Settlement, now: datetime, session: Any = None
    ) -> Operation[None]:
        yield from settle.settle(task, settlement, now=now, settings=self.settings, session=session)
        if self.settings.separate_dlq and settlement.status is TaskStatus.FAILED:
            yield from dlq_collection.move_out_by_id(task.id)

    def mark_done(self, task: Task[Any], result: Any, session: Any) -> Operation[None]:
        """Perform :meth:`Queue.mark_done`."""
        check_session(session, self.collections.client)
        check_popped(task, self.collections.codec_options)
        if result is not None:
            check_encodable({"result": result}, self.collections.codec_options)
        now = yield from self.now()
        settlement = settle.done(now, result=result, keep=self.keeps(task.id))
        yield from self._settle(task, settlement, now, session)

    def mark_done_many(self, tasks: Iterable[Task[Any]]) -> Operation[list[LeaseLost]]:
        """Perform :meth:`Queue.mark_done_many`."""
        popped: list[Task[Any]] = []
        lost: list[LeaseLost] = []
        for task in check_several("tasks", tasks, "give a list of the Tasks that pop returned"):
            try:
                popped.append(check_popped(task, self.collections.codec_options))
            except LeaseLost as exc:
                lost.append(exc)
        now = yield from self.now()
        lost += yield from settle.mark_all_done(
            popped, now=now, settings=self.settings, keep=self.keeps_done
        )
        return lost

    def mark_retry(
        self, task: Task[Any], error: object, code: str | None, delay: Duration | None
    ) -> Operation[TaskStatus]:
        """Perform :meth:`Queue.mark_retry`."""
        check_popped(task, self.collections.codec_options)
        check_code(code)
        given = duration_argument("delay", delay)
        now = yield from self.now()
        delay_sec = (
            settle.backoff_sec(task, self.settings) if given is None else given.total_seconds()
        )
        otherwise = "the handler asked for a retry"
        reason = settle.describe_error(
            error, code, now, otherwise=otherwise, settings=self.settings
        )
        settlement = settle.retried(task, now, reason, delay_sec=delay_sec)
        yield from self._settle(task, settlement, now)
        return settlement.status

    def mark_failure(self, task: Task[Any], message: object, code: str | None) -> Operation[None]:
        """Perform :meth:`Queue.mark_failure`."""
        check_popped(task, self.collections.codec_options)
        check_code(code)
        now = yield from self.now()
        error = settle.describe_error(
            message, code, now, otherwise="failed", settings=self.settings
        )
        yield from self._settle(task, settle.failed(now, error), now)

    def release(self, task: Task[Any], *, front: bool) -> Operation[None]:
        """Perform :meth:`Queue.release`."""
        check_popped(task, self.collections.codec_options)
        now = yield from self.now()
        yield from self._settle(task, settle.released(task, now, front=front), now)

    def touch(self, task: Task[PayloadT], extend: Duration | None) -> Operation[Task[PayloadT]]:
        """Perform :meth:`Queue.touch`."""
        lease = check_popped(task, self.collections.codec_options).lease
        given = duration_argument("extend", extend)
        now = yield from self.now()
        expires_at = later(now, given if given is not None else self._lease_length(task))
        yield from settle.touch(task, expires_at, now)
        renewed = changed(lease, expires_at=expires_at) if lease else None
        return changed(task, lease=renewed, updated_at=now)

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
        wanted = possible_ids(check_id(task_id))
        yield from self.open()
        document = yield from lookup.find_first(wanted, self.settings)
        return self.to_task(document) if document else None

    # Wait

    def begin_wait(self, task: Any) -> Operation[tuple[Any, Document | None]]:
        """Return the id of a task to wait for, given as task or id, and the task if it is finished.

        Raises:
            TaskNotFound: No task has this id.
        """
        if isinstance(task, Task):
            task_id = task.id
            wanted = [check_stored_id(task_id, self.collections.codec_options)]
        else:
            task_id = task
            wanted = possible_ids(check_id(task_id))
        yield from self.open()
        document = yield from lookup.find_first(wanted, self.settings)
        if document is None:
            raise TaskNotFound(task_id=task_id)
        if document.get("status") not in {TaskStatus.DONE, TaskStatus.FAILED}:
            return document["_id"], None
        return document["_id"], (yield from self.finished(document["_id"]))

    def finished(self, task_id: Any) -> Operation[Document | None]:
        """Return a task that existed, if it is finished.

        Raises:
            TaskDeleted: It no longer exists.
        """
        checked = yield from results.check([task_id], self.settings)
        if checked.missing:
            raise TaskDeleted(task_id=task_id)
        return checked.finished[0] if checked.finished else None

    def to_done_task(self, document: Document) -> Task[PayloadT]:
        """Return a finished task.

        Raises:
            TaskFailed: It failed.
        """
        task = self.to_task(document)
        if task.status is TaskStatus.FAILED:
            raise TaskFailed(task)
        return task

    def peek(
        self,
        limit: int,
        status: TaskStatus | str | None,
        queue: str | None,
        *,
        name: str | None = None,
        all_queues: bool = False,
    ) -> Operation[list[Task[PayloadT]]]:
        """Perform :meth:`Queue.peek`."""
        chosen: str | list[str] = self.name if queue is None else check_name(queue)
        if all_queues and queue is not None:
            raise invalid_argument("queue", queue, "leave it out, or leave out all_queues")
        wanted = None if status is None else check_status(status)
        most = check_count("limit", limit)
        if name is not None and name != "":
            check_name(name)
        yield from self.open()
        if all_queues:
            chosen = yield from diagnostics.every_queue(self.settings)
        documents = yield from lookup.peek(
            chosen, status=wanted, name=name, limit=most, settings=self.settings
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
        if document.get("dedupe_until") is not None:
            yield from dedupe_keys.forget(document, self.collections.name)
        if self.settings.separate_dlq:
            yield from dlq_collection.move_out_by_id(wanted)
        return self.to_task(document)

    # Pause

    def pause(self, reason: str | None) -> Operation[Pause]:
        """Perform :meth:`Queue.pause`."""
        if reason is not None and not is_text(reason):
            raise invalid_argument("reason", reason, "give a text")
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
        return self.run_on_any_version(self._opening(operation))

    def run_on_any_version(self, operation: Operation[T]) -> T:
        """Run an operation without opening the collection."""
        result: T = self._driver.run(reporting(operation, self._report))
        return result


class AsyncCore(QueueCore[PayloadT]):
    """The core of an :class:`AsyncQueue`."""

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation on the queue's collections."""
        return await self.run_on_any_version(self._opening(operation))

    async def run_on_any_version(self, operation: Operation[T]) -> T:
        """Run an operation without opening the collection."""
        result: T = await self._driver.run(reporting(operation, self._report))
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
        raise invalid_argument("queue", queue, "give a Queue or an AsyncQueue")
    return core  # type: ignore[return-value]


def new_token() -> str:
    """Return the token of a new lease."""
    return secrets.token_hex(12)


def new_worker_id(given: str | None = None) -> str:
    """Return a unique id for one run of a worker: its name, or host and process id, and a suffix.

    If a restarted worker kept its id, its heartbeat would hide that the former one died, and the
    tasks that the former one held would not be reclaimed.
    """
    return f"{given or f'{_HOST}:{os.getpid()}'}:{secrets.token_hex(3)}"
