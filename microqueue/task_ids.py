"""Ids as text: in an address, on a page, in what people type.

An id may be an ObjectId, a UUID, an integer or a string, and a string may look like any of the
others. Text in double quotes always means a string: ``17`` is first of all the integer, and
``"17"`` is the string.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any
from uuid import UUID

from bson import ObjectId

from microqueue.task import TaskId

INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
LARGEST = 2**63


def candidate_ids(text: str) -> list[Any]:
    """Read an id that came as text: all that it may stand for, the likeliest first."""
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
    """Give what an id may stand for that a program has: itself, or what it is the text of."""
    if not isinstance(task_id, str):
        return [task_id]
    return [task_id, *(one for one in candidate_ids(task_id) if not isinstance(one, str))]


def new_id(text: str) -> ObjectId | str:
    """Read the id that a new task shall have: an ObjectId if it looks like one, else text."""
    return ObjectId(text) if ObjectId.is_valid(text) else text


def reference(task_id: TaskId) -> str:
    """Write an id as text that is read as this very one before any other."""
    text = str(task_id)
    alone = not isinstance(task_id, str) or candidate_ids(text)[:1] == [task_id]
    return text if alone else json.dumps(text, ensure_ascii=False)
