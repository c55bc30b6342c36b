"""Every error that microqueue raises, under one base.

    MicroqueueError
    ├── InvalidArgument          a value is not valid; nothing was written
    │   └── InvalidPayload       BSON cannot encode it, it is too large, or its model rejects it
    ├── DuplicateTask            a live task has this dedupe key, or a task has this id
    ├── LeaseLost                the task was reclaimed: another worker may have it
    ├── TaskNotFound             no task has this id; nothing was changed
    ├── WrongStatus              the status of the task does not allow this
    ├── AlreadyRunning           the worker is running
    ├── IndexConflict            an index of another shape exists
    ├── DuplicatesStored         live tasks share a dedupe key, so its index cannot be built
    ├── OperationFailed          MongoDB rejected the operation; the cause is attached
    │   └── ServerUnavailable    MongoDB could not be reached in time; a later try may work
    ├── EmbeddedServerError      the embedded MongoDB could not be found or started
    ├── SchemaDrift              Spark read a value of another type than its column's
    └── JavaNotFound             Spark needs Java, which is not installed

Errors carry their data as attributes, so that code can act on them without reading
messages. A driver's error is always the ``__cause__`` of the one raised in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_NAMED = 10
"""How many ids a message names; the attribute has all of them."""


class MicroqueueError(Exception):
    """The base of every error raised by microqueue."""


class InvalidArgument(MicroqueueError, ValueError):
    """A value is not valid. Nothing was written.

    ``argument`` is the name of the argument or option, and ``value`` is the rejected value.
    """

    def __init__(self, message: str, *, argument: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.argument = argument
        self.value = value


class InvalidPayload(InvalidArgument):
    """A payload that BSON cannot encode, that is too large, or that its model rejects."""


class DuplicateTask(MicroqueueError):
    """The task was not added: a task has its id, or a live task has its dedupe key.

    ``existing_id`` is the id of the live task with the dedupe key, if it was found.
    """

    def __init__(
        self, *, queue: str, task_id: Any, dedupe_key: str | None, existing_id: Any | None
    ) -> None:
        self.queue = queue
        self.task_id = task_id
        self.dedupe_key = dedupe_key
        self.existing_id = existing_id
        key = f"dedupe key {dedupe_key!r}" if dedupe_key is not None else f"id {task_id!r}"
        holder = f" by task {existing_id!r}" if existing_id is not None else ""
        super().__init__(f"{key} is already taken in queue {queue!r}{holder}; nothing was added")


class LeaseLost(MicroqueueError):
    """The worker no longer has the lease. Nothing was changed."""

    def __init__(self, *, task_id: Any, worker_id: str | None, reason: str) -> None:
        self.task_id = task_id
        self.worker_id = worker_id
        self.reason = reason
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


class EmbeddedServerError(MicroqueueError):
    """The embedded MongoDB server could not be found, started or stopped."""


class SchemaDrift(MicroqueueError):
    """A stored value does not fit its column, in a strict read."""

    def __init__(self, *, task_id: Any, column: str, reason: str) -> None:
        self.task_id = task_id
        self.column = column
        self.reason = reason
        super().__init__(
            f"task {task_id!r} does not fit the schema: {column} {reason}; "
            "mode=permissive reads null instead and counts it in the column drifted"
        )


class JavaNotFound(MicroqueueError):
    """Spark cannot start without Java."""

    def __init__(self, *, java_home: str | None) -> None:
        self.java_home = java_home
        where = f"JAVA_HOME={java_home!r} has no bin/java" if java_home else "no java was found"
        super().__init__(
            f"Spark needs Java 17 or newer; {where}: "
            "install it, on Debian with `apt install openjdk-17-jre-headless`"
        )
