"""Every error that microqueue raises, under one base.

    MicroqueueError
    ├── InvalidArgument          a value that cannot be accepted; nothing was written
    │   └── InvalidPayload       BSON cannot hold it, it is too large, or its model refuses it
    ├── DuplicateTask            a live task has this dedupe key, or a task has this id
    ├── LeaseLost                the task was reclaimed, and is no longer this worker's
    ├── TaskNotFound             no task has this id; nothing was changed
    ├── WrongStatus              the task is in a status that does not allow this
    ├── AlreadyRunning           the worker is at work, and cannot be run a second time
    ├── IndexConflict            an index of another shape is in the way
    ├── DuplicatesStored         live tasks share a dedupe key, so its index cannot be built
    ├── OperationFailed          MongoDB refused; the cause is attached
    │   └── ServerUnavailable    MongoDB could not be reached in time; trying later may work
    ├── EmbeddedServerError      the embedded MongoDB could not be found or started
    ├── SchemaDrift              Spark read a value of another type than its column's
    └── JavaNotFound             Spark needs a Java that is not there

Errors carry their data as attributes, so that code can act on them without reading
messages. A driver's error is always the ``__cause__`` of the one raised in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_NAMED = 10
"""So many ids are named in a message; the attribute has them all."""


class MicroqueueError(Exception):
    """The base of every error raised by microqueue."""


class InvalidArgument(MicroqueueError, ValueError):
    """A value was refused before anything was written."""

    def __init__(self, message: str, *, argument: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.argument = argument
        self.value = value


class InvalidPayload(InvalidArgument):
    """A payload that BSON cannot encode, that is too large, or that its model refuses."""


class DuplicateTask(MicroqueueError):
    """The task was not added: its id, or its dedupe key among live tasks, is taken."""

    def __init__(
        self, *, queue: str, task_id: Any, dedupe_key: str | None, existing_id: Any | None
    ) -> None:
        self.queue = queue
        self.task_id = task_id
        self.dedupe_key = dedupe_key
        self.existing_id = existing_id
        taken = f"dedupe key {dedupe_key!r}" if dedupe_key is not None else f"id {task_id!r}"
        by = f" by task {existing_id!r}" if existing_id is not None else ""
        super().__init__(f"{taken} is already taken in queue {queue!r}{by}; nothing was added")


class LeaseLost(MicroqueueError):
    """The lease is not this worker's any more; nothing was changed."""

    def __init__(self, *, task_id: Any, worker_id: str | None, reason: str) -> None:
        self.task_id = task_id
        self.worker_id = worker_id
        self.reason = reason
        super().__init__(f"the lease of {worker_id!r} on task {task_id!r} is lost: {reason}")


class TaskNotFound(MicroqueueError):
    """No task has this id, or this queue has none with it; nothing was changed.

    ``task_ids`` are all ids that were not found, and ``task_id`` is the first of them.
    ``found_in`` is the queue in which that one is, if it is another than ``queue``.
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


class WrongStatus(MicroqueueError):
    """The task's status does not allow what was asked; nothing was changed."""

    def __init__(self, *, task_id: Any, status: str, needed: str) -> None:
        self.task_id = task_id
        self.status = status
        self.needed = needed
        super().__init__(f"task {task_id!r} is {status}, and must be {needed} for this")


class AlreadyRunning(MicroqueueError, RuntimeError):
    """The worker is at work already."""

    def __init__(self, *, worker_id: str) -> None:
        self.worker_id = worker_id
        super().__init__(
            f"worker {worker_id!r} runs already; make another one, or wait until it has ended"
        )


class IndexConflict(MicroqueueError):
    """An index that microqueue needs exists in another shape."""

    def __init__(self, *, index: str, collection: str, found: Any, expected: Any) -> None:
        self.index = index
        self.collection = collection
        self.found = found
        self.expected = expected
        super().__init__(
            f"collection {collection!r} has an index in the way of {index!r}: "
            f"found {found}, expected {expected}. Drop it and run ensure_indexes() again."
        )


class DuplicatesStored(MicroqueueError):
    """Live tasks share a dedupe key: they were stored before the indexes were there."""

    def __init__(self, *, collection: str, key: Any) -> None:
        self.collection = collection
        self.key = key
        super().__init__(
            f"several live tasks of collection {collection!r} have the key {key}, and the index "
            "'dedupe' allows one: cancel or delete the others, and run ensure_indexes() again"
        )


class OperationFailed(MicroqueueError):
    """MongoDB refused an operation; the driver's error is the cause."""


class ServerUnavailable(OperationFailed):
    """MongoDB could not be reached, or lost its primary, for longer than allowed."""


class EmbeddedServerError(MicroqueueError):
    """The embedded MongoDB server could not be found, started or stopped."""


class SchemaDrift(MicroqueueError):
    """A stored value does not fit its column, and the read was to be strict."""

    def __init__(self, *, task_id: Any, column: str, reason: str) -> None:
        self.task_id = task_id
        self.column = column
        self.reason = reason
        super().__init__(
            f"task {task_id!r} does not fit the schema: {column} {reason}; "
            "mode=permissive reads null instead, and counts it in the column drifted"
        )


class JavaNotFound(MicroqueueError):
    """Spark cannot start without Java."""

    def __init__(self, *, java_home: str | None) -> None:
        self.java_home = java_home
        where = f"JAVA_HOME={java_home!r} has no bin/java" if java_home else "there is no java"
        super().__init__(
            f"Spark needs Java 17 or newer, and {where}: "
            "install it, on Debian with `apt install openjdk-17-jre-headless`"
        )
