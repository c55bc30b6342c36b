"""The errors that microqueue raises, under one base.

    MicroqueueError
    ├── InvalidArgument          a value is not valid; nothing was written
    │   ├── InvalidPayload       BSON cannot encode it, it is too large, or its model rejects it
    │   ├── InvalidCron          a cron expression has a mistake, whose place is known
    │   └── RunConflict          a run of a pipeline was begun with other options
    ├── DuplicateTask            a live task has this dedupe key, or a task has this id
    ├── LeaseLost                the task was reclaimed: another worker may have it
    ├── TaskNotFound             no task has this id; nothing was changed
    │   └── TaskDeleted          it was deleted while it was waited for
    ├── TaskFailed               the task that was waited for failed
    ├── WaitTimeout              the task that was waited for is not finished yet
    ├── ScheduleNotFound         no schedule of the queue has this name; nothing was changed
    ├── WrongStatus              the status of the task does not allow this
    ├── AlreadyRunning           the worker is running
    ├── IndexConflict            an index of another shape exists
    ├── SchemaMismatch           the collection has another version of documents and indexes
    │   ├── SchemaTooNew         a newer version of microqueue wrote it
    │   └── SchemaTooOld         it has to be migrated first
    ├── TopicConflict            the collection of a topic is not a capped collection
    ├── MessagesLost             a subscriber fell behind, or its position is not known
    ├── DuplicatesStored         live tasks share a dedupe key, so its index cannot be built
    ├── OperationFailed          MongoDB rejected the operation; the cause is attached
    │   └── ServerUnavailable    MongoDB could not be reached in time; a later try may work
    ├── TransactionsUnsupported  the server has no transactions: it is no replica set
    ├── EmbeddedServerError      the embedded MongoDB could not be found or started
    ├── SchemaDrift              Spark read a value of another type than its column's
    ├── PipelineError            a pipeline cannot do its work
    └── JavaNotFound             Spark needs Java, which is not installed

Errors carry their data as attributes, so that code can act on them without reading
messages. A driver's error is always the ``__cause__`` of the one raised in its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeAlias

MOST_NAMED = 10
"""How many ids a message names; the attribute has all of them."""


class MicroqueueError(Exception):
    """The base of every error raised by microqueue."""


class InvalidArgument(MicroqueueError, ValueError):
    """A value is not valid. Nothing was written.

    ``argument`` is the name of the argument or option, and ``value`` is the rejected value.
    ``code`` says why, if the same argument can be rejected for several reasons. ``closest`` has the
    names that are most like an unknown one, best first.
    """

    def __init__(
        self,
        message: str,
        *,
        argument: str | None = None,
        value: Any = None,
        code: str | None = None,
        closest: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.argument = argument
        self.value = value
        self.code = code
        self.closest = list(closest)


class InvalidPayload(InvalidArgument):
    """A payload that BSON cannot encode, that is too large, or that its model rejects.

    ``code`` is ``not_a_document``, ``unencodable``, ``too_large``, ``too_deep``, ``lossy``,
    ``not_dumpable`` or ``rejected_by_model``, or that of an invalid row of Spark. ``field`` is the
    wrong field of the payload, as in ``address.street``, if it is known. ``key`` is the key of the
    row, if Spark wrote it.
    """

    def __init__(
        self,
        message: str,
        *,
        argument: str | None = None,
        value: Any = None,
        code: str | None = None,
        field: str | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(message, argument=argument, value=value, code=code)
        self.field = field
        self.key = key


class InvalidCron(InvalidArgument):
    """A cron expression has a mistake.

    ``position`` is the number of the wrong character, from 1, and ``field`` the name of its field,
    such as ``hour``; ``None`` if the number of fields is wrong.
    """

    def __init__(self, *, value: str, field: str | None, position: int, reason: str) -> None:
        self.field = field
        self.position = position
        where = f"character {position}" if field is None else f"character {position} ({field})"
        super().__init__(
            f"cron={value!r} is not valid: {reason}; see {where}", argument="cron", value=value
        )


class RunConflict(InvalidArgument):
    """A run of a pipeline has this name, and was begun with other options. Nothing was changed.

    ``before`` has the options that differ, as the run was begun with; ``given`` has them as they
    are now.
    """

    def __init__(self, *, run: str, before: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self.before = dict(before)
        self.given = dict(given)
        then, now = (
            ", ".join(f"{name}={value!r}" for name, value in options.items())
            for options in (before, given)
        )
        super().__init__(
            f"run {run!r} was begun with {then}, not with {now}; "
            "give the same options, or another name with --run",
            argument="run",
            value=run,
            code="other_options",
        )


DuplicateCode: TypeAlias = Literal["other_queue", "not_pending", "held", "other_key", "no_period"]


class DuplicateTask(MicroqueueError):
    """The task was not added: a task has its id, or a live task has its dedupe key.

    ``existing_id`` is the id of that task, and ``existing_queue`` its queue, if it was found.
    ``queue`` is the queue of the call. ``held_until`` is set if the key is taken for a period: that
    task may be finished or deleted.

    ``code`` is ``other_queue`` if that task is in another queue. The other codes say why it was not
    replaced. ``not_pending``: it is running or finished. ``held``: a Spark load holds it.
    ``other_key``: its key is taken for a period, and the new task has another one, or none.
    ``no_period``: the new task has ``dedupe_for``, and the key of that task is not taken for a
    period.
    """

    def __init__(
        self,
        *,
        queue: str,
        task_id: Any,
        dedupe_key: str | None,
        existing_id: Any | None,
        existing_queue: str | None = None,
        held_until: datetime | None = None,
        code: DuplicateCode | None = None,
        reason: str | None = None,
    ) -> None:
        elsewhere = existing_queue is not None and existing_queue != queue
        self.queue = queue
        self.task_id = task_id
        self.dedupe_key = dedupe_key
        self.existing_id = existing_id
        self.existing_queue = existing_queue
        self.held_until = held_until
        self.code: DuplicateCode | None = "other_queue" if elsewhere else code
        key = f"dedupe key {dedupe_key!r}" if dedupe_key is not None else f"id {task_id!r}"
        if dedupe_key is None:  # An id is unique in the whole collection.
            holder = "" if existing_queue is None else f": it is in queue {existing_queue!r}"
        else:
            by = "" if existing_id is None else f" by task {existing_id!r}"
            holder = f" in queue {queue!r}{by}"
        if held_until is not None:
            holder += f" until {held_until.isoformat(timespec='seconds')}"
        instead = "nothing was added" if reason is None else f"nothing was replaced: {reason}"
        super().__init__(f"{key} is already taken{holder}; {instead}")


class LeaseLost(MicroqueueError):
    """The worker no longer has the lease. Nothing was changed.

    ``status`` is the status of the task now; ``None`` if it is gone, or was never popped.
    ``holder`` is the worker that has it now, if there is one.
    """

    def __init__(
        self,
        *,
        task_id: Any,
        worker_id: str | None,
        reason: str,
        status: str | None = None,
        holder: str | None = None,
    ) -> None:
        self.task_id = task_id
        self.worker_id = worker_id
        self.reason = reason
        self.status = status
        self.holder = holder
        super().__init__(f"the lease of {worker_id!r} on task {task_id!r} is lost: {reason}")


class TaskNotFound(MicroqueueError):
    """There is no task with this id, or it is in another queue. Nothing was changed.

    ``task_ids`` are all ids that were not found, and ``task_id`` is the first of them.
    ``found_in`` is the queue of that task, if it is in another queue than ``queue``.
    """

    def __init__(
        self,
        *,
        task_id: Any = None,
        task_ids: Sequence[Any] = (),
        queue: str | None = None,
        found_in: str | None = None,
    ) -> None:
        self.task_ids = list(task_ids) or [task_id]
        self.task_id = self.task_ids[0]
        self.queue = queue
        self.found_in = found_in
        named = ", ".join(repr(one) for one in self.task_ids[:MOST_NAMED])
        more = len(self.task_ids) - MOST_NAMED
        are = "is no task" if len(self.task_ids) == 1 else "are no tasks"
        message = f"there {are} {named}" + (f" and {more:,} more" if more > 0 else "")
        if found_in is not None:
            which = "it" if len(self.task_ids) == 1 else "the first"
            message += f" in queue {queue!r}; {which} is in queue {found_in!r}"
        super().__init__(message)


class TaskDeleted(TaskNotFound):
    """The task was deleted while it was waited for. Its outcome is not known."""

    def __init__(self, *, task_id: Any) -> None:
        super().__init__(task_id=task_id)
        self.args = (
            f"task {task_id!r} was deleted before its result could be read; with retention=0 done "
            "tasks are deleted at once: keep them for some seconds to wait for results",
        )


class TaskFailed(MicroqueueError):
    """The task that was waited for failed.

    ``task`` is the :class:`Task`, ``error`` is its :class:`TaskError`, and ``code`` is the code of
    that: ``cancelled`` for a cancelled task, for example.
    """

    def __init__(self, task: Any) -> None:
        self.task = task
        self.error = task.error
        self.code: str | None = None if task.error is None else task.error.code
        message = "no error is stored" if task.error is None else task.error.message
        super().__init__(f"task {task.id!r} failed: {message}")


class WaitTimeout(MicroqueueError, TimeoutError):
    """The task was not finished within ``timeout_sec``. It is still in its queue, or running."""

    def __init__(self, *, task_id: Any, timeout_sec: float) -> None:
        self.task_id = task_id
        self.timeout_sec = timeout_sec
        super().__init__(f"task {task_id!r} is not finished after {timeout_sec:g} s")


class ScheduleNotFound(MicroqueueError):
    """The queue has no schedule with this name. Nothing was changed."""

    def __init__(self, *, name: str, queue: str) -> None:
        self.name = name
        self.queue = queue
        super().__init__(
            f"queue {queue!r} has no schedule {name!r}; `microqueue schedule list` shows them"
        )


class WrongStatus(MicroqueueError):
    """The status of the task does not allow the call. Nothing was changed."""

    def __init__(self, *, task_id: Any, status: str, needed: str) -> None:
        self.task_id = task_id
        self.status = status
        self.needed = needed
        super().__init__(f"task {task_id!r} is {status}; it must be {needed}")


class AlreadyRunning(MicroqueueError, RuntimeError):
    """The worker is already running."""

    def __init__(self, *, worker_id: str) -> None:
        self.worker_id = worker_id
        super().__init__(
            f"worker {worker_id!r} is already running; wait until it stops, or create another one"
        )


class IndexConflict(MicroqueueError):
    """An index of another shape exists where microqueue needs its own."""

    def __init__(self, *, index: str, collection: str, found: Any, expected: Any) -> None:
        self.index = index
        self.collection = collection
        self.found = found
        self.expected = expected
        super().__init__(
            f"collection {collection!r} has another index in place of {index!r}: "
            f"found {found}, expected {expected}; drop it and run ensure_indexes() again"
        )


class SchemaMismatch(MicroqueueError):
    """The collection has another version of documents and indexes. Nothing was changed.

    ``found`` is its version, and ``supported`` the one that this code works with.
    """

    def __init__(self, message: str, *, collection: str, found: int, supported: int) -> None:
        super().__init__(message)
        self.collection = collection
        self.found = found
        self.supported = supported


class SchemaTooNew(SchemaMismatch):
    """A newer version of microqueue wrote the collection."""

    def __init__(self, *, collection: str, found: int, supported: int) -> None:
        super().__init__(
            f"collection {collection!r} has schema version {found}, and this microqueue supports "
            f"{supported}: upgrade microqueue",
            collection=collection,
            found=found,
            supported=supported,
        )


class SchemaTooOld(SchemaMismatch):
    """The collection has to be migrated before this version of microqueue can use it."""

    def __init__(self, *, collection: str, found: int, supported: int) -> None:
        super().__init__(
            f"collection {collection!r} has schema version {found}, and this microqueue needs "
            f"{supported}: stop its workers and run `microqueue migrate`",
            collection=collection,
            found=found,
            supported=supported,
        )


class TopicConflict(MicroqueueError):
    """The collection of a topic exists, and is not a capped one."""

    def __init__(self, *, topic: str, collection: str) -> None:
        self.topic = topic
        self.collection = collection
        super().__init__(
            f"collection {collection!r} of topic {topic!r} is not capped; "
            "drop it, and microqueue creates it again"
        )


class MessagesLost(MicroqueueError):
    """A subscriber did not read messages of a topic before newer ones replaced them.

    ``after`` is the last position that was read, and ``first`` that of the next message that is
    still there. The subscription continues with it.
    """

    def __init__(self, *, topic: str, after: str, first: str) -> None:
        self.topic = topic
        self.after = after
        self.first = first
        super().__init__(
            f"topic {topic!r} no longer has the messages between {after} and {first}: "
            "the subscriber fell behind; read faster, or create the topic with more max_messages"
        )


class DuplicatesStored(MicroqueueError):
    """Live tasks share a dedupe key, because they were stored before the indexes existed."""

    def __init__(self, *, collection: str, key: Any) -> None:
        self.collection = collection
        self.key = key
        super().__init__(
            f"several live tasks in collection {collection!r} have the key {key}; the index "
            "'dedupe' allows one: cancel or delete the others, then run ensure_indexes() again"
        )


class OperationFailed(MicroqueueError):
    """MongoDB rejected an operation; the driver's error is the ``__cause__``."""


class ServerUnavailable(OperationFailed):
    """MongoDB could not be reached in time, or had no primary."""


class TransactionsUnsupported(MicroqueueError):
    """The server has no transactions. Nothing was written.

    ``server`` describes the server.
    """

    def __init__(self, *, server: str) -> None:
        self.server = server
        super().__init__(
            f"{server} has no transactions; use a replica set, of which one member is enough"
        )


class EmbeddedServerError(MicroqueueError):
    """The embedded MongoDB server could not be found, started or stopped.

    ``code`` is ``not_found``, ``not_executable``, ``not_started``, ``port_taken``, ``no_answer``,
    ``other_port``, ``no_replica_set``, ``failed`` or ``stopped``. ``port`` is set if the error is
    about a port: it is the one that the server has, or was to have.
    """

    def __init__(self, message: str, *, code: str, port: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.port = port


class SchemaDrift(MicroqueueError):
    """A stored value does not fit its column, in a strict read.

    ``code`` is ``wrong_type``, ``missing`` or ``unknown_field``. ``column`` is the path of the
    field, as in ``payload.address``, and ``value`` the value of a wrong type.
    """

    def __init__(
        self, *, task_id: Any, column: str, reason: str, code: str, value: Any = None
    ) -> None:
        self.task_id = task_id
        self.column = column
        self.reason = reason
        self.code = code
        self.value = value
        super().__init__(
            f"task {task_id!r} does not fit the schema: {column} {reason}; "
            "mode=permissive reads null instead and counts it in the column drifted"
        )


class PipelineError(MicroqueueError):
    """A pipeline cannot do its work.

    ``code`` says why. The others are set if the error is about one: ``path`` is an archive or a
    file, ``run`` the name of a run, ``place`` the collection of that run, and ``since`` an instant.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        path: str | None = None,
        run: str | None = None,
        place: str | None = None,
        since: datetime | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.path = path
        self.run = run
        self.place = place
        self.since = since


class JavaNotFound(MicroqueueError):
    """Spark cannot start without Java."""

    def __init__(self, *, java_home: str | None) -> None:
        self.java_home = java_home
        where = f"JAVA_HOME={java_home!r} has no bin/java" if java_home else "no java was found"
        super().__init__(
            f"Spark needs Java 17 or newer; {where}: "
            "install it, on Debian with `apt install openjdk-17-jre-headless`"
        )
