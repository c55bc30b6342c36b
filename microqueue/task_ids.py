"""Task ids as text: in URLs, on pages, and on the command line.

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
