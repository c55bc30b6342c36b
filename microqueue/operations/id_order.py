"""Ids of tasks: in MongoDB's order, and as dictionary keys, whatever their type.

microqueue accepts ids of four types. A document that another program inserted may have any id
that MongoDB stores, and must not hide the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from bson import ObjectId

from microqueue.operations.call import Document

ID_TYPES: list[tuple[tuple[type, ...], str]] = [
    ((int, float), "number"),
    ((str,), "string"),
    ((Mapping,), "object"),
    ((UUID, bytes), "binData"),
    ((ObjectId,), "objectId"),
    ((bool,), "bool"),
    ((datetime,), "date"),
]
"""The types of ids in the order in which MongoDB sorts them."""
COMPARABLE = (ObjectId, UUID, str, int, float)


def key(task_id: Any) -> Hashable:
    """Return a hashable key for an id: two ids have two keys."""
    if isinstance(task_id, COMPARABLE) and not isinstance(task_id, bool):
        return task_id
    return type(task_id).__name__, repr(task_id)


def place(task_id: Any) -> tuple[Any, ...]:
    """Return a sort key that orders ids as MongoDB does: by type first."""
    rank = _rank(task_id)
    if isinstance(task_id, COMPARABLE):
        return rank, isinstance(task_id, UUID), task_id
    return rank, False, repr(task_id)


def beyond(last_id: Any, *, ascending: bool) -> list[Document]:
    """Return filters for the ids that sort after one, or before it.

    MongoDB compares ids of one type only, so each type behind it has its own filter.

    Raises:
        ValueError: It is no id.
    """
    rank = _rank(last_id)
    operators = isinstance(last_id, Mapping) and any(name.startswith("$") for name in last_id)
    if rank == len(ID_TYPES) or operators:
        raise ValueError(f"{last_id!r} is not an id")
    behind = ID_TYPES[rank + 1 :] if ascending else ID_TYPES[:rank][::-1]
    nearest = {"_id": {"$gt" if ascending else "$lt": last_id}}
    return [nearest, *({"_id": {"$type": name}} for _, name in behind)]


def _rank(task_id: Any) -> int:
    names = [name for _, name in ID_TYPES]
    if isinstance(task_id, bool):  # To Python it is a number as well.
        return names.index("bool")
    fitting = (rank for rank, (kinds, _) in enumerate(ID_TYPES) if isinstance(task_id, kinds))
    return next(fitting, len(ID_TYPES))
