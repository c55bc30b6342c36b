"""Task ids: as text, as dictionary keys, and in MongoDB's order.

An id may be an ObjectId, a UUID, an integer or a string. As text, in URLs, on pages and on the
command line, a string may look like any of the others. Text in double quotes always means a string:
``17`` is first of all the integer, and ``"17"`` is the string.

A document that another program inserted may have any id that MongoDB stores, and must not hide the
others. So keys and order cover all types.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any
from uuid import UUID

from bson import Decimal128, ObjectId

from microqueue.task import TaskId

INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
LARGEST = 2**63


def candidate_ids(text: str) -> list[Any]:
    """Return all ids that a text may mean, the likeliest first."""
    candidates: list[Any] = []
    with suppress(ValueError):
        if text.startswith('"') and isinstance(quoted := json.loads(text), str):
            candidates.append(quoted)
    if ObjectId.is_valid(text):
        candidates.append(ObjectId(text))
    if INTEGER.fullmatch(text) and -LARGEST <= int(text) < LARGEST:
        candidates.append(int(text))
    candidates.append(text)
    with suppress(ValueError):
        read = UUID(text)
        # Written in another way, it is more likely a string.
        candidates.insert(-1 if str(read) == text else len(candidates), read)
    return [one for one in candidates if one != ""]


def possible_ids(task_id: TaskId) -> list[Any]:
    """Return the ids that a caller's id may mean: itself, or what it is the text of."""
    if not isinstance(task_id, str):
        return [task_id]
    return [task_id, *(one for one in candidate_ids(task_id) if not isinstance(one, str))]


def new_id(text: str) -> ObjectId | str:
    """Return the id of a new task: an ObjectId if the text looks like one, otherwise the text."""
    return ObjectId(text) if ObjectId.is_valid(text) else text


def reference(task_id: TaskId) -> str:
    """Return an id as text that :func:`candidate_ids` reads as this id first."""
    text = str(task_id)
    alone = not isinstance(task_id, str) or candidate_ids(text)[:1] == [task_id]
    return text if alone else json.dumps(text, ensure_ascii=False)


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
NAN_KEY = ("number", "nan")


def id_key(task_id: Any) -> Hashable:
    """Return a hashable key for an id: two keys are equal if MongoDB takes the ids for equal.

    Numbers are equal whatever their type, and ``True`` is no number.
    """
    if isinstance(task_id, COMPARABLE) and not isinstance(task_id, bool):
        # NaN is not equal to itself.
        return NAN_KEY if isinstance(task_id, float) and math.isnan(task_id) else task_id
    if isinstance(task_id, Decimal128):
        number = task_id.to_decimal()
        return NAN_KEY if number.is_nan() else number
    return type(task_id).__name__, repr(task_id)


def id_sort_key(task_id: Any) -> tuple[Any, ...]:
    """Return a sort key that orders ids as MongoDB does: by type first."""
    rank = id_rank(task_id)
    if isinstance(task_id, COMPARABLE):
        return rank, isinstance(task_id, UUID), task_id
    return rank, False, repr(task_id)


def id_rank(task_id: Any) -> int:
    """Return the place of an id's type in ``ID_TYPES``, or their number for what is no id."""
    names = [name for _, name in ID_TYPES]
    if isinstance(task_id, bool):  # To Python it is a number as well.
        return names.index("bool")
    fitting = (rank for rank, (kinds, _) in enumerate(ID_TYPES) if isinstance(task_id, kinds))
    return next(fitting, len(ID_TYPES))
