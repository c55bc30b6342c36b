"""Ids as text for Spark, and back; and the id that a key gives a task."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

from bson import ObjectId

from microqueue.arguments import refused

OBJECT_ID = "objectId"
STRING = "string"
INTEGER = "int"
BINARY_UUID = "uuid"


def id_type(task_id: Any) -> str | None:
    """Name the type of an id; nothing for one that microqueue does not make."""
    if isinstance(task_id, ObjectId):
        return OBJECT_ID
    if isinstance(task_id, str):
        return STRING
    if isinstance(task_id, int) and not isinstance(task_id, bool):
        return INTEGER
    return BINARY_UUID if isinstance(task_id, UUID) else None


def typed_id(text: str, kind: str) -> Any:
    """Give the ``_id`` that the columns ``id`` and ``id_type`` stand for."""
    match kind:
        case "objectId":
            return ObjectId(text)
        case "string":
            return text
        case "int":
            return int(text)
        case "uuid":
            return UUID(text)
    raise refused("id_type", kind, "give objectId, string, int or uuid")


def key_id(queue: str, key: str) -> ObjectId:
    """Give the id of the task that the sink makes of a key: the same one, whenever it is asked.

    It is a hash of both, so that no name and key together look like another pair. Of a
    thousand million tasks, two share one with a chance of one in a hundred thousand million.
    """
    return ObjectId(hashlib.blake2b(_named(queue) + key.encode(), digest_size=12).digest())


def key_ids(queue: str, keys: Iterable[str]) -> Iterator[ObjectId]:
    """Give the ids of many keys of one queue."""
    return map(ObjectId, key_digests(queue, (key.encode() for key in keys)))


def key_digests(queue: str, keys: Iterable[bytes]) -> Iterator[bytes]:
    """Give the bytes of the ids of many keys, which are text as it is encoded."""
    begun = hashlib.blake2b(_named(queue), digest_size=12)
    for key in keys:
        hasher = begun.copy()
        hasher.update(key)
        yield hasher.digest()


def _named(queue: str) -> bytes:
    name = queue.encode()
    return len(name).to_bytes(4) + name
