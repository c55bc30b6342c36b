"""Convert task ids to text and back, and derive the id of a task from its key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

from bson import ObjectId

from microqueue.arguments import invalid_argument

OBJECT_ID = "objectId"
STRING = "string"
INTEGER = "int"
BINARY_UUID = "uuid"


def id_type(task_id: Any) -> str | None:
    """Return the name of an id's type; None for a type that microqueue does not create."""
    if isinstance(task_id, ObjectId):
        return OBJECT_ID
    if isinstance(task_id, str):
        return STRING
    if isinstance(task_id, int) and not isinstance(task_id, bool):
        return INTEGER
    return BINARY_UUID if isinstance(task_id, UUID) else None


def typed_id(text: str, kind: str) -> Any:
    """Convert values of the columns ``id`` and ``id_type`` to an id.

    Args:
        text: The column ``id``.
        kind: The column ``id_type``: ``objectId``, ``string``, ``int`` or ``uuid``.

    Returns:
        The ``_id`` of the task.

    Raises:
        InvalidArgument: ``kind`` is none of these.
    """
    match kind:
        case "objectId":
            return ObjectId(text)
        case "string":
            return text
        case "int":
            return int(text)
        case "uuid":
            return UUID(text)
    raise invalid_argument("id_type", kind, "give objectId, string, int or uuid")


def key_id(queue: str, key: str) -> ObjectId:
    """Compute the id of the task that the sink creates for a key. It is always the same.

    It is a 96-bit hash of queue and key. Among 10^9 tasks, two collide with a probability of
    about 10^-11.

    Args:
        queue: The queue's name.
        key: The key as text; for a key of several columns, their values as a JSON array.

    Returns:
        The ``_id`` of the task.
    """
    return ObjectId(hashlib.blake2b(_queue_prefix(queue) + key.encode(), digest_size=12).digest())


def key_ids(queue: str, keys: Iterable[str]) -> Iterator[ObjectId]:
    """Return the ids for several keys of one queue."""
    return map(ObjectId, key_digests(queue, (key.encode() for key in keys)))


def key_digests(queue: str, keys: Iterable[bytes]) -> Iterator[bytes]:
    """Return the ids as bytes for several keys, which are UTF-8."""
    prefix = hashlib.blake2b(_queue_prefix(queue), digest_size=12)
    for key in keys:
        hasher = prefix.copy()
        hasher.update(key)
        yield hasher.digest()


def _queue_prefix(queue: str) -> bytes:
    """Return the queue's name with its length, so that no two pairs of queue and key are equal."""
    name = queue.encode()
    return len(name).to_bytes(4) + name
