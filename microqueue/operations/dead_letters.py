"""Dead letters: find failed tasks, page by page, and count them.

By default a dead letter is simply a task whose status is ``failed``. Where dead letters
have a collection of their own, a letter may for a moment be in both: it is then the same
letter, and every view counts it once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from pymongo.errors import ExecutionTimeout

from microqueue.dlq import DeadLetterFilter, DeadLetterStats, LetterGroup, LetterGroups
from microqueue.operations import filters, id_order, paging, search
from microqueue.operations.call import Call, Document, Operation, Span, Target
from microqueue.operations.matching import DeadLetterMatcher, literal_prefix, normalise
from microqueue.positions import microseconds
from microqueue.settings import QueueSettings

ORDER = [("updated_at", -1), ("_id", 1)]


def selection(queue: filters.Queues, which: DeadLetterFilter | Sequence[Any]) -> Document:
    """Write the filter for chosen ids, or for everything that a filter describes.

    ``queue`` is one, or several: each is then read on its part of the index.

    Of a group it matches all that begin like it, and of what is masked the server is not
    asked: :mod:`microqueue.operations.dead_letters` looks at the messages.
    """
    query: Document = {**filters.of(queue), **filters.DEAD}
    if not isinstance(which, DeadLetterFilter):
        return {**query, **filters.any_of(which)}
    if which.code is not None:
        query["error.code"] = which.code or None
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


def page(
    query: Document, *, limit: int, cursor: str | None, settings: QueueSettings
) -> Operation[tuple[list[Document], str | None]]:
    """Read one page, newest first, and the cursor of the next."""
    after = read_cursor(cursor)
    bounded = query if after is None else {"$and": [query, after]}
    pages = []
    for target in targets(settings):
        options: Document = {"sort": ORDER, "limit": limit + 1, "target": target, "span": Span.LONG}
        pages.append((yield Call("find", bounded, **options)))
    letters, _ = paging.merge_replies(pages, place)
    shown = letters[:limit]
    return shown, write_cursor(shown[-1]) if len(letters) > limit else None


def place(document: Document) -> tuple[Any, ...]:
    """Order letters as MongoDB does, newest first, ids of different types included."""
    failed_at = document.get("updated_at")
    newest_first = -microseconds(failed_at) if isinstance(failed_at, datetime) else 0
    return newest_first, *id_order.place(document["_id"])


def write_cursor(document: Document) -> str:
    """Name the place after a letter."""
    at = document.get("updated_at")
    return paging.format_cursor(at if isinstance(at, datetime) else None, document["_id"])


def read_cursor(cursor: str | None) -> Document | None:
    """Write the filter for what comes after a cursor."""
    if cursor is None:
        return None
    at, last_id = paging.parse_cursor(cursor)
    later = id_order.beyond(last_id, ascending=True)
    return {"$or": [{"updated_at": {"$lt": at}}, {"updated_at": at, "$or": later}]}


def stats(queue: filters.Queues, settings: QueueSettings) -> Operation[DeadLetterStats]:
    """Count the letters by error code."""
    query = {**filters.of(queue), **filters.DEAD}
    if settings.separate_dlq:
        letters = yield from each_once(query, {"error.code": 1, "updated_at": 1}, settings)
        groups: list[Document] = [
            {"_id": (one.get("error") or {}).get("code"), "count": 1, "oldest": at, "newest": at}
            for one in letters.values()
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
    """Count the letters that a filter matches, each once."""
    if settings.separate_dlq:
        return len((yield from each_once(query, {"_id": 1}, settings)))
    total: int = yield Call("count_documents", query)
    return total


def count_all(queries: Sequence[Document], settings: QueueSettings) -> Operation[int]:
    """Count the letters of several filters that have none in common."""
    total = 0
    for query in queries:
        total += yield from count(query, settings)
    return total


def each_once(
    query: Document, fields: Document, settings: QueueSettings
) -> Operation[dict[Any, Document]]:
    """Read some fields of the letters in both places, by id."""
    letters: dict[Any, Document] = {}
    for target in targets(settings):
        for document in (yield Call("find", query, fields, target=target, span=Span.LONG)):
            letters[id_order.key(document["_id"])] = document
    return letters


def targets(settings: QueueSettings) -> list[Target]:
    """Say where to look, and in which order: a letter that moves meanwhile is not missed."""
    if settings.separate_dlq:
        return [Target.TASKS, Target.DEAD_LETTERS, Target.TASKS]
    return [Target.TASKS]


IDS_AT_ONCE = 5000


def search_page(
    queue: filters.Queues,
    which: DeadLetterFilter,
    *,
    limit: int,
    cursor: str | None,
    settings: QueueSettings,
) -> Operation[tuple[list[Document], str | None]]:
    """Read one page, newest first, and the cursor of the next; search until there is one."""
    if not _must_look(which):
        query = selection(queue, which)
        return (yield from page(query, limit=limit, cursor=cursor, settings=settings))
    found: list[Document] = []
    while True:
        part = yield from search.dead_letter_page(
            queue,
            which,
            limit=limit + 1 - len(found),
            cursor=cursor,
            settings=settings,
            shown=which.shown or str,
        )
        found += part.documents
        cursor = part.next_cursor
        if len(found) > limit:
            return found[:limit], write_cursor(found[limit - 1])
        if cursor is None:
            return found, None


def queries(
    queue: filters.Queues, which: DeadLetterFilter, settings: QueueSettings
) -> Operation[list[Document]]:
    """Write the filters of the letters that match and of no others, the oldest letters first."""
    query = selection(queue, which)
    if not _must_look(which):
        return [query]
    matcher = DeadLetterMatcher(which, which.shown or str)
    found = yield from search.all_dead_letters(query, matcher, settings)
    found.reverse()
    return [
        {"$and": [query, _those(found[start : start + IDS_AT_ONCE])]}
        for start in range(0, len(found), IDS_AT_ONCE)
    ]


def _must_look(which: DeadLetterFilter) -> bool:
    return which.group is not None or (which.shown is not None and bool(which.text))


def _those(letters: list[Document]) -> Document:
    """Match these letters, but none that was replayed and failed again since it was looked at."""
    first, last = letters[0].get("updated_at"), letters[-1].get("updated_at")
    # A letter of another hand may lack the instant; such ones are the oldest.
    since = {} if first is None else {"$gte": first}
    until = {} if last is None else {"$lte": last}
    seen = {"updated_at": {**since, **until}} if since or until else {}
    return {**filters.any_of(letter["_id"] for letter in letters), **seen}


MOST_LETTERS = 50_000
"""Groups are made of the newest letters; older ones are not looked at."""
LONGEST_MS = 5000
QUICK_MS = 1000
NEWEST: list[Document] = [{"$sort": dict(ORDER)}, {"$limit": MOST_LETTERS}]
COUNT: Document = {
    "$group": {
        "_id": {"code": "$error.code", "message": "$error.message"},
        "count": {"$sum": 1},
        "first_at": {"$min": "$updated_at"},
        "last_at": {"$max": "$updated_at"},
        "latest_id": {"$first": "$_id"},
    }
}


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
    matcher = DeadLetterMatcher(which, shown)
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
    for target in dict.fromkeys(targets(settings)):
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


def read_errors(
    queue: str, which: DeadLetterFilter, *, limit: int, settings: QueueSettings
) -> Operation[list[Document]]:
    """Read the queue and the error of the letters that a filter matches, each once."""
    query = selection(queue, which)
    letters: dict[Any, Document] = {}
    for target in targets(settings):
        fields = {"queue": 1, "error": 1}
        found = yield Call("find", query, fields, limit=limit, target=target, span=Span.LONG)
        for letter in found:
            letters[id_order.key(letter["_id"])] = letter
    return list(letters.values())
