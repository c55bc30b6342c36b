"""Group dead letters by error code and normalised message: what died, how often, since when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from pymongo.errors import ExecutionTimeout

from microqueue.model import Model
from microqueue.operations import dead_letters, filters
from microqueue.operations.call import Call, Document, Operation
from microqueue.operations.dead_letters import DeadLetterFilter, selection
from microqueue.operations.matching import LetterMatcher
from microqueue.operations.normalise import normalise
from microqueue.settings import QueueSettings
from microqueue.task import TaskId

MOST_LETTERS = 50_000
"""Groups are made of the newest letters; older ones are not looked at."""
LONGEST_MS = 5000
QUICK_MS = 1000
NEWEST: list[Document] = [{"$sort": dict(dead_letters.ORDER)}, {"$limit": MOST_LETTERS}]
COUNT: Document = {
    "$group": {
        "_id": {"code": "$error.code", "message": "$error.message"},
        "count": {"$sum": 1},
        "first_at": {"$min": "$updated_at"},
        "last_at": {"$max": "$updated_at"},
        "latest_id": {"$first": "$_id"},
    }
}


class LetterGroup(Model):
    """Dead letters with one error code whose messages differ only in numbers and names."""

    code: str | None
    message: str
    sample: str
    count: int
    first_at: datetime | None
    last_at: datetime | None
    latest_id: TaskId


class LetterGroups(Model):
    """The groups, the largest first; ``truncated``: there are letters older than those counted."""

    total: int
    truncated: bool
    groups: Sequence[LetterGroup]


def groups(
    queue: filters.Queues,
    which: DeadLetterFilter,
    settings: QueueSettings,
    *,
    shown: Callable[[str], str] = str,
) -> Operation[LetterGroups]:
    """Count equal messages on the server, then join those that normalise to the same.

    ``shown`` masks what must not be told of a message.
    """
    found, all_seen = yield from _equal_messages(queue, which, settings)
    matcher = LetterMatcher(which, shown)
    if matcher.needed:
        found = [one for one in found if matcher.accepts_message(_message_of(one))]
    return LetterGroups(
        total=sum(one["count"] for one in found),
        truncated=not all_seen,
        groups=_joined(found, shown),
    )


def _equal_messages(
    queue: filters.Queues, which: DeadLetterFilter, settings: QueueSettings
) -> Operation[tuple[list[Document], bool]]:
    """Count the newest letters by code and message, and tell whether those were all.

    A code is in no index. If it takes long to find the newest letters that have it, those
    of them that are among the newest of all have to do.
    """
    here = selection(queue, which.model_copy(update={"code": None, "text": None, "group": None}))
    code = {} if which.code is None else {"error.code": which.code or None}
    pipeline = [{"$match": {**here, **code}}, *NEWEST, COUNT]
    try:
        found = yield from _aggregate(pipeline, settings, QUICK_MS if code else LONGEST_MS)
    except ExecutionTimeout:
        if not code:
            raise
        pipeline = [{"$match": here}, *NEWEST, {"$match": code}, COUNT]
        return (yield from _aggregate(pipeline, settings, LONGEST_MS)), False
    return found, sum(one["count"] for one in found) < MOST_LETTERS


def _aggregate(
    pipeline: list[Document], settings: QueueSettings, most_ms: int
) -> Operation[list[Document]]:
    found: list[Document] = []
    for target in dict.fromkeys(dead_letters.targets(settings)):
        found += yield Call("aggregate", pipeline, target=target, maxTimeMS=most_ms)
    return found


def _message_of(found: Document) -> str:
    return str(found["_id"].get("message") or "")


def _joined(found: Sequence[Document], shown: Callable[[str], str]) -> list[LetterGroup]:
    joined: dict[tuple[str | None, str], dict[str, Any]] = {}
    for one in found:
        message = shown(_message_of(one))
        code = one["_id"].get("code")
        code = None if code is None else str(code)
        group = joined.setdefault(
            (code, normalise(message)),
            {"count": 0, "first_at": None, "last_at": None, "sample": message},
        )
        group["count"] += one["count"]
        if group["first_at"] is None or _earlier(one["first_at"], group["first_at"]):
            group["first_at"] = one["first_at"]
        if group["last_at"] is None or _earlier(group["last_at"], one["last_at"]):
            group |= {
                "last_at": one["last_at"], "latest_id": one["latest_id"], "sample": message,
            }  # fmt: skip
        group.setdefault("latest_id", one["latest_id"])
    ordered = sorted(joined.items(), key=lambda item: -item[1]["count"])
    return [
        LetterGroup.trusted(code=code, message=message, **values)
        for (code, message), values in ordered
    ]


def _earlier(one: datetime | None, other: datetime | None) -> bool:
    return one is not None and other is not None and one < other
