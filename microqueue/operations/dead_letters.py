"""Dead letters: list, count and group failed tasks. Everything here is read-only.

By default a dead letter is a task whose status is ``failed``. With a separate DLQ collection, a
dead letter may be in both collections for a moment: it is the same one, and counts once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from pymongo.errors import ExecutionTimeout

from microqueue.dead_letter_models import (
    DeadLetterFilter,
    DeadLetterGroup,
    DeadLetterGroups,
    DeadLetterStats,
)
from microqueue.model import trusted
from microqueue.operations import filters, paging, search
from microqueue.operations.batches import not_after
from microqueue.operations.call import Call, Document, Operation, Span
from microqueue.operations.matching import DeadLetterMatcher, literal_prefix, normalise
from microqueue.operations.paging import (
    BY_FAILURE,
    Cursor,
    dead_letter_targets,
)
from microqueue.settings import QueueSettings
from microqueue.task_ids import id_key

IDS_AT_ONCE = 5000
MOST_GROUPED = 50_000
"""Only the newest dead letters are grouped."""
LONGEST_MS = 5000
QUICK_MS = 1000
NEWEST: list[Document] = [{"$sort": dict(BY_FAILURE.order)}, {"$limit": MOST_GROUPED}]
COUNT: Document = {
    "$group": {
        "_id": {"code": "$error.code", "message": "$error.message"},
        "count": {"$sum": 1},
        "first_at": {"$min": "$updated_at"},
        "last_at": {"$max": "$updated_at"},
        "latest_id": {"$first": "$_id"},
    }
}


def selection(queue: filters.Queues, which: DeadLetterFilter | Sequence[Any]) -> Document:
    """Return the query for chosen ids, or for a filter, in one queue or in several.

    For a group it matches all messages with the same prefix. What is masked is not in the query.
    The messages are matched afterwards, see :func:`queries`.
    """
    query: Document = {**filters.of(queue), **filters.DEAD}
    if not isinstance(which, DeadLetterFilter):
        return {**query, **filters.any_of(which)}
    query |= filters.with_code(which.code) | filters.named(which.name)
    messages = []
    if which.text is not None and which.shown is None:
        messages.append({"error.message": {"$regex": re.escape(which.text), "$options": "i"}})
    if which.shown is None and (start := literal_prefix(which.group or "")):
        messages.append({"error.message": {"$regex": f"^{re.escape(start)}"}})
    if messages:
        query["$and"] = messages
    if window := filters.between(which.since, which.until):
        query["updated_at"] = window
    return query


def _query_page(
    query: Document, *, limit: int, cursor: str | None, settings: QueueSettings
) -> Operation[tuple[list[Document], str | None]]:
    """Return one page of what the server finds, newest first, and the cursor of the next."""
    start = None if cursor is None else Cursor.parse(cursor)
    reader = paging.Reader(BY_FAILURE, dead_letter_targets(settings))
    documents, _ = yield from reader.read(query, start, limit + 1)
    shown = documents[:limit]
    return shown, str(BY_FAILURE.cursor(shown[-1])) if len(documents) > limit else None


def stats(queue: filters.Queues, settings: QueueSettings) -> Operation[DeadLetterStats]:
    """Count the dead letters by error code."""
    query = {**filters.of(queue), **filters.DEAD}
    if settings.separate_dlq:
        documents = yield from each_once(query, {"error.code": 1, "updated_at": 1}, settings)
        groups: list[Document] = [
            {"_id": (one.get("error") or {}).get("code"), "count": 1, "oldest": at, "newest": at}
            for one in documents.values()
            for at in [one.get("updated_at")]
        ]
    else:
        group = {
            "_id": "$error.code",
            "count": {"$sum": 1},
            "oldest": {"$min": "$updated_at"},
            "newest": {"$max": "$updated_at"},
        }
        groups = yield Call("aggregate", [{"$match": query}, {"$group": group}])
    oldest = [found["oldest"] for found in groups if isinstance(found["oldest"], datetime)]
    newest = [found["newest"] for found in groups if isinstance(found["newest"], datetime)]
    by_code: Counter[str] = Counter()
    for found in groups:
        by_code[str(found["_id"] or "none")] += found["count"]
    return DeadLetterStats(
        total=by_code.total(),
        by_code=dict(by_code.most_common()),
        oldest_at=min(oldest, default=None),
        newest_at=max(newest, default=None),
        examined=by_code.total(),
    )


def count(query: Document, settings: QueueSettings) -> Operation[int]:
    """Count the dead letters that a query matches, each once."""
    if settings.separate_dlq:
        return len((yield from each_once(query, {"_id": 1}, settings)))
    total: int = yield Call("count_documents", query)
    return total


def count_all(queries: Sequence[Document], settings: QueueSettings) -> Operation[int]:
    """Count the dead letters of several queries that have none in common."""
    total = 0
    for query in queries:
        total += yield from count(query, settings)
    return total


def each_once(
    query: Document, fields: Document, settings: QueueSettings, *, limit: int = 0
) -> Operation[dict[Any, Document]]:
    """Return some fields of the dead letters in both collections, by the key of their id.

    ``limit`` is per collection; 0 means none.
    """
    documents: dict[Any, Document] = {}
    for target in dead_letter_targets(settings):
        options: Document = {"target": target, "span": Span.LONG, "limit": limit}
        for document in (yield Call("find", query, fields, **options)):
            documents[id_key(document["_id"])] = document
    return documents


def page(
    queue: filters.Queues,
    which: DeadLetterFilter,
    *,
    limit: int,
    cursor: str | None,
    settings: QueueSettings,
) -> Operation[tuple[list[Document], str | None]]:
    """Return one page of what a filter matches, newest first, and the cursor of the next.

    It searches until the page is full, however long that takes.
    """
    if not _must_scan(which):
        query = selection(queue, which)
        return (yield from _query_page(query, limit=limit, cursor=cursor, settings=settings))
    found: list[Document] = []
    while True:
        part = yield from search.dead_letter_page(
            queue,
            which,
            limit=limit + 1 - len(found),
            cursor=cursor,
            settings=settings,
            mask=which.shown or str,
        )
        found += part.documents
        cursor = part.next_cursor
        if len(found) > limit:
            return found[:limit], str(BY_FAILURE.cursor(found[limit - 1]))
        if cursor is None:
            return found, None


def queries(
    queue: filters.Queues, which: DeadLetterFilter, settings: QueueSettings
) -> Operation[list[Document]]:
    """Return queries that match exactly what a filter does, the oldest dead letters first."""
    query = selection(queue, which)
    if not _must_scan(which):
        return [query]
    matcher = DeadLetterMatcher(which, which.shown or str)
    found = yield from search.all_dead_letters(query, matcher, settings)
    found.reverse()
    return [
        {"$and": [query, _those(found[start : start + IDS_AT_ONCE])]}
        for start in range(0, len(found), IDS_AT_ONCE)
    ]


def _must_scan(which: DeadLetterFilter) -> bool:
    return which.group is not None or (which.shown is not None and bool(which.text))


def _those(documents: list[Document]) -> Document:
    """Match these dead letters, but none that was replayed and failed again since."""
    times = (dead_letter.get("updated_at") for dead_letter in documents)
    # A manually inserted dead letter may lack the instant.
    last = max((at for at in times if isinstance(at, datetime)), default=None)
    seen = {} if last is None else not_after("updated_at", last, skew=timedelta(0))
    return {**filters.any_of(dead_letter["_id"] for dead_letter in documents), **seen}


def groups(
    queue: filters.Queues,
    which: DeadLetterFilter,
    settings: QueueSettings,
    *,
    shown: Callable[[str], str] = str,
) -> Operation[DeadLetterGroups]:
    """Group dead letters by code and message, where numbers, ids and quoted texts do not count.

    The server counts equal messages; those that normalise to the same text are joined here.
    ``shown`` masks messages.
    """
    found, all_seen = yield from _equal_messages(queue, which, settings)
    matcher = DeadLetterMatcher(which, shown)
    if matcher.needed:
        found = [one for one in found if matcher.accepts_message(_message_of(one))]
    return DeadLetterGroups(
        total=sum(one["count"] for one in found),
        truncated=not all_seen,
        groups=_joined(found, shown),
    )


def _equal_messages(
    queue: filters.Queues, which: DeadLetterFilter, settings: QueueSettings
) -> Operation[tuple[list[Document], bool]]:
    """Count the newest dead letters by code and message; also return whether those were all.

    No index has the code or the name. If the server does not find the newest dead letters with
    them in time, those with them among the newest of all are counted.
    """
    here = selection(queue, DeadLetterFilter(since=which.since, until=which.until))
    unindexed = filters.with_code(which.code) | filters.named(which.name)
    pipeline = [{"$match": {**here, **unindexed}}, *NEWEST, COUNT]
    try:
        found = yield from _aggregate(pipeline, settings, QUICK_MS if unindexed else LONGEST_MS)
    except ExecutionTimeout:
        if not unindexed:
            raise
        pipeline = [{"$match": here}, *NEWEST, {"$match": unindexed}, COUNT]
        return (yield from _aggregate(pipeline, settings, LONGEST_MS)), False
    return found, sum(one["count"] for one in found) < MOST_GROUPED


def _aggregate(
    pipeline: list[Document], settings: QueueSettings, most_ms: int
) -> Operation[list[Document]]:
    found: list[Document] = []
    for target in dict.fromkeys(dead_letter_targets(settings)):
        found += yield Call("aggregate", pipeline, target=target, maxTimeMS=most_ms)
    return found


def _message_of(found: Document) -> str:
    return str(found["_id"].get("message") or "")


def _joined(found: Sequence[Document], shown: Callable[[str], str]) -> list[DeadLetterGroup]:
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
        trusted(DeadLetterGroup, code=code, message=message, **values)
        for (code, message), values in ordered
    ]


def _earlier(one: datetime | None, other: datetime | None) -> bool:
    return one is not None and other is not None and one < other


def read_errors(
    queue: str, which: DeadLetterFilter, *, limit: int, settings: QueueSettings
) -> Operation[list[Document]]:
    """Return the queue and the error of the dead letters that a filter matches, each once."""
    fields = {"queue": 1, "error": 1}
    found = yield from each_once(selection(queue, which), fields, settings, limit=limit)
    return list(found.values())
