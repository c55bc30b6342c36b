"""Checks of arguments. Each error names the rejected value and what to pass instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from pydantic import BaseModel

from microqueue.clock import Clock, ServerClock
from microqueue.errors import InvalidArgument, LeaseLost
from microqueue.model import shorten
from microqueue.new_task import NewTask
from microqueue.settings import QueueSettings
from microqueue.task import LARGEST_COUNT, LONGEST_NAME, Task, TaskStatus

LONGEST_LABEL = 200


def refused(argument: str, value: Any, instead: str) -> InvalidArgument:
    """Return the error for a value that is not valid, with what to pass instead."""
    return InvalidArgument(
        f"{argument}={shorten(value)} is not valid: {instead}", argument=argument, value=value
    )


def check_name(name: Any) -> str:
    """Reject a queue name that is not a short, printable string."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise refused("name", name, f"give a printable string of at most {LONGEST_NAME} characters")
    return name


def check_names(argument: str, names: Any) -> list[str]:
    """Reject anything but a list of queue names; a string would be read letter by letter."""
    several = check_several(argument, names, "give a list of queue names")
    try:
        return [check_name(name) for name in several]
    except InvalidArgument as exc:
        raise refused(argument, names, str(exc)) from exc


def check_id(task_id: Any) -> Any:
    """Reject an id that could be taken for a filter."""
    NewTask(payload={}, task_id=task_id)
    if task_id is None:
        raise InvalidArgument("task_id=None is not an id", argument="task_id", value=None)
    return task_id


def check_status(status: Any) -> TaskStatus:
    """Return the status with this name."""
    try:
        return TaskStatus(status)
    except ValueError:
        names = ", ".join(member.value for member in TaskStatus)
        raise refused("status", status, f"give one of {names}") from None


def check_count(argument: str, value: Any) -> int:
    """Reject a count that is not a positive integer, or too large for MongoDB."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refused(argument, value, "give an integer of 1 or more")
    if value > LARGEST_COUNT:
        raise refused(argument, value, f"give an integer of at most {LARGEST_COUNT}")
    return value


def check_several(argument: str, value: Any, instead: str) -> Iterable[Any]:
    """Reject anything but a collection of items, such as a string, a dict or one task."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping | BaseModel):
        raise refused(argument, value, instead)
    return value


def check_worker_id(worker_id: Any) -> str | None:
    """Reject a worker id that is not a short, printable string."""
    named = isinstance(worker_id, str) and 0 < len(worker_id) <= LONGEST_LABEL
    if worker_id is not None and not (named and worker_id.isprintable()):
        raise refused(
            "worker_id", worker_id, f"give a printable string of 1 to {LONGEST_LABEL} characters"
        )
    return cast("str | None", worker_id)


def check_code(code: Any) -> str | None:
    """Reject an error code that cannot be stored or searched for."""
    named = isinstance(code, str) and 0 < len(code) <= LONGEST_LABEL
    if code is not None and not (named and is_encodable(code)):
        raise refused("code", code, f"give a string of 1 to {LONGEST_LABEL} characters")
    return cast("str | None", code)


def check_session(session: Any, client: Any) -> Any:
    """Reject anything but a session of this client."""
    if session is None:
        return None
    # On the type: a database returns a collection for any attribute.
    is_session = hasattr(type(session), "in_transaction")
    if not is_session or getattr(session, "client", client) is not client:
        raise refused("session", session, "give a session of the queue's own client")
    return session


def check_settings(settings: Any) -> QueueSettings:
    """Reject anything but settings; for ``None``, read the environment."""
    if settings is None:
        return QueueSettings.from_environment()
    if not isinstance(settings, QueueSettings):
        raise refused("settings", settings, "give QueueSettings(...)")
    return settings


def check_clock(clock: Any) -> Clock:
    """Reject anything but a :class:`Clock`; for ``None``, return the server's clock."""
    if clock is None:
        return ServerClock()
    methods = (getattr(clock, name, None) for name in ("now", "observe", "forget"))
    if isinstance(clock, type) or not hasattr(clock, "stale") or not all(map(callable, methods)):
        raise refused("clock", clock, "give an object with the methods of Clock")
    return cast("Clock", clock)


def check_uri(uri: Any) -> None:
    """Reject an address that is not text, or empty, as a variable that was not set."""
    if uri is not None and not (isinstance(uri, str) and uri):
        raise refused("uri", uri, "give a string, as in 'mongodb://localhost:27017'")


def check_collection(name: Any) -> None:
    """Reject a name that MongoDB does not allow for a collection."""
    if name is None:
        return
    named = isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and name.isprintable()
    if not named or "$" in name or not all(name.split(".")) or name.startswith("system."):
        raise refused("collection", name, "give the name of a collection, as in 'tasks'")


def is_encodable(text: str) -> bool:
    """Return whether text can be stored; half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_popped(task: Any) -> Task[Any]:
    """Reject anything but a task that pop returned."""
    if not isinstance(task, Task):
        raise refused("task", task, "give the Task that pop returned")
    if task.lease is None:
        raise LeaseLost(
            task_id=task.id, worker_id=None, reason="it was not popped; give the Task of pop"
        )
    return task
