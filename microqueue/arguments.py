"""Checks of arguments. Each error names the rejected value and what to pass instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import bson
from bson import CodecOptions, ObjectId, Regex
from pydantic import BaseModel

from microqueue.clock import Clock, ServerClock
from microqueue.encoding_errors import ENCODER_ERRORS
from microqueue.errors import InvalidArgument, LeaseLost
from microqueue.model import invalid_argument as invalid_argument  # noqa: PLC0414 (re-exported)
from microqueue.new_task import NewTask
from microqueue.settings import QueueSettings
from microqueue.task import LARGEST_COUNT, LONGEST_NAME, Lease, Task, TaskStatus, is_name, is_text

LONGEST_LABEL = 200


def check_name(name: Any, argument: str = "name") -> str:
    """Reject a name of a queue or task that is not a short, printable string."""
    if not is_name(name):
        raise invalid_argument(
            argument, name, f"give a printable string of at most {LONGEST_NAME} characters"
        )
    return cast("str", name)


def check_names(argument: str, names: Any) -> list[str]:
    """Reject anything but a list of queue names; a string would be read letter by letter."""
    several = check_several(argument, names, "give a list of queue names")
    try:
        return [check_name(name) for name in several]
    except InvalidArgument as exc:
        raise invalid_argument(argument, names, str(exc)) from exc


def check_id(task_id: Any) -> Any:
    """Reject an id that could be taken for a filter."""
    NewTask(payload={}, task_id=task_id)
    if task_id is None:
        raise InvalidArgument("task_id=None is not an id", argument="task_id", value=None)
    return task_id


def check_stored_id(task_id: Any, codec_options: CodecOptions[Any]) -> Any:
    """Reject the id of a task that no document can have; another program may use any other."""
    if isinstance(task_id, ObjectId):
        return task_id
    if task_id is None or isinstance(task_id, re.Pattern | Regex | list):
        raise invalid_argument("task.id", task_id, "give a task that the queue returned")
    try:
        bson.encode({"_id": task_id}, codec_options=codec_options)
    except ENCODER_ERRORS as exc:
        raise invalid_argument("task.id", task_id, str(exc)) from exc
    return task_id


def check_status(status: Any) -> TaskStatus:
    """Return the status with this name."""
    try:
        return TaskStatus(status)
    except ValueError:
        names = ", ".join(member.value for member in TaskStatus)
        raise invalid_argument("status", status, f"give one of {names}") from None


def check_count(argument: str, value: Any) -> int:
    """Reject a count that is not a positive integer, or too large for MongoDB."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise invalid_argument(argument, value, "give an integer of 1 or more")
    if value > LARGEST_COUNT:
        raise invalid_argument(argument, value, f"give an integer of at most {LARGEST_COUNT}")
    return value


def check_several(argument: str, value: Any, instead: str) -> Iterable[Any]:
    """Reject anything but a collection of items, such as a string, a dict or one task."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping | BaseModel):
        raise invalid_argument(argument, value, instead)
    return value


def check_queue(queue: Any) -> str | None:
    """Reject anything but the name of a queue, or ``None`` for all queues."""
    if queue is None or is_name(queue):
        return cast("str | None", queue)
    raise invalid_argument("queue", queue, "give the name of a queue, or None")


def check_text(argument: str, value: Any) -> str:
    """Reject anything but text that can be searched for."""
    if is_text(value) and is_encodable(value):
        return value
    raise invalid_argument(argument, value, "give a string")


def check_callback(argument: str, value: Any) -> None:
    """Reject anything but a function, or ``None``."""
    if value is not None and not callable(value):
        raise invalid_argument(argument, value, "give a function")


def check_function(argument: str, value: Any) -> None:
    """Reject anything but a function."""
    if not callable(value):
        raise invalid_argument(argument, value, "give a function")


def check_worker_id(worker_id: Any) -> str | None:
    """Reject a worker id that is not a short, printable string."""
    named = is_text(worker_id) and 0 < len(worker_id) <= LONGEST_LABEL
    if worker_id is not None and not (named and worker_id.isprintable()):
        raise invalid_argument(
            "worker_id", worker_id, f"give a printable string of 1 to {LONGEST_LABEL} characters"
        )
    return cast("str | None", worker_id)


def check_code(code: Any) -> str | None:
    """Reject an error code that cannot be stored or searched for."""
    named = is_text(code) and 0 < len(code) <= LONGEST_LABEL
    if code is not None and not (named and is_encodable(code)):
        raise invalid_argument("code", code, f"give a string of 1 to {LONGEST_LABEL} characters")
    return cast("str | None", code)


def check_session(session: Any, client: Any) -> Any:
    """Reject anything but a session of this client."""
    if session is None:
        return None
    # On the type: a database returns a collection for any attribute.
    is_session = hasattr(type(session), "in_transaction")
    if not is_session or getattr(session, "client", client) is not client:
        raise invalid_argument("session", session, "give a session of the queue's own client")
    return session


def check_settings(settings: Any) -> QueueSettings:
    """Reject anything but settings; for ``None``, read the environment."""
    if settings is None:
        return QueueSettings.from_environment()
    if not isinstance(settings, QueueSettings):
        raise invalid_argument("settings", settings, "give QueueSettings(...)")
    return settings


def clock_argument(clock: Any) -> Clock:
    """Reject anything but a :class:`Clock`; for ``None``, return the server's clock."""
    if clock is None:
        return ServerClock()
    methods = (getattr(clock, name, None) for name in ("now", "observe", "forget"))
    if isinstance(clock, type) or not hasattr(clock, "stale") or not all(map(callable, methods)):
        raise invalid_argument("clock", clock, "give an object with the methods of Clock")
    return cast("Clock", clock)


def check_uri(uri: Any) -> None:
    """Reject an address that is not text, or empty, as a variable that was not set."""
    if uri is not None and not (isinstance(uri, str) and uri):
        raise invalid_argument("uri", uri, "give a string, as in 'mongodb://localhost:27017'")


def check_collection(name: Any) -> None:
    """Reject a name that MongoDB does not allow for a collection."""
    if name is None:
        return
    if not is_name(name) or "$" in name or not all(name.split(".")) or name.startswith("system."):
        raise invalid_argument("collection", name, "give the name of a collection, as in 'tasks'")


def is_encodable(text: str) -> bool:
    """Return whether text can be stored; half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_popped(task: Any, codec_options: CodecOptions[Any]) -> Task[Any]:
    """Reject anything but a task that pop returned."""
    if not isinstance(task, Task):
        raise invalid_argument("task", task, "give the Task that pop returned")
    if task.lease is None:
        raise LeaseLost(
            task_id=task.id, worker_id=None, reason="it was not popped; give the Task of pop"
        )
    check_stored_id(task.id, codec_options)
    # A copy may have any values, and ``model_construct`` validates none.
    token = task.lease.token if isinstance(task.lease, Lease) else None
    if not is_text(token) or not is_encodable(token):
        raise invalid_argument("task.lease", task.lease, "give the Task that pop returned")
    return task
