"""Dead letters: find failed tasks, page by page, and count them.

By default a dead letter is simply a task whose status is ``failed``. Where dead letters
have a collection of their own, a letter may for a moment be in both: it is then the same
letter, and every view counts it once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, Generic

from pydantic import Field, field_validator

from microqueue.arguments import is_encodable
from microqueue.durations import AwareDatetime
from microqueue.model import Model
from microqueue.operations import cursors, filters, gather, id_order
from microqueue.operations.call import Call, Document, Operation, Span, Target
from microqueue.operations.normalise import beginning
from microqueue.positions import microseconds
from microqueue.settings import QueueSettings
from microqueue.task import PayloadT, Task, TaskId

ORDER = [("updated_at", -1), ("_id", 1)]


class DeadLetterFilter(Model):
    """Which dead letters: by error code, text in the message, and time of failure.

    An empty filter means all of the queue. ``text`` is plain text, not a pattern, and upper
    and lower case are the same. ``code=""`` means those without a code; ``group`` is the
    message of a group of letters, as :mod:`microqueue.operations.normalise` writes it. With
    ``shown``, which masks secrets, both are looked for in what it leaves of a message.
    """

    code: str | None = None
    text: str | None = None
    group: str | None = None
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    shown: Callable[[str], str] | None = Field(default=None, exclude=True, repr=False)

    @field_validator("code", "text", "group")
    @classmethod
    def _can_be_asked(cls, value: str | None) -> str | None:
        if value is not None and not is_encodable(value):
            raise ValueError("MongoDB cannot hold such a text")
        return value

    @field_validator("text")
    @classmethod
    def _can_be_searched(cls, value: str | None) -> str | None:
        if value is not None and "\0" in value:
            raise ValueError("MongoDB cannot search for a null character")
        return value


class DeadLetterPage(Model, Generic[PayloadT]):
    """Some dead letters, newest first; ``next_cursor`` leads to the following page."""

    tasks: Sequence[Task[PayloadT]]
    next_cursor: str | None = None

    def __iter__(self) -> Iterator[Task[PayloadT]]:  # type: ignore[override]  # A page is its tasks.
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Task[PayloadT]:
        return self.tasks[index]


class DeadLetterStats(Model):
    """How many dead letters there are, and why.

    Above ``settings.count_limit`` the ``total`` is ``estimated``, and ``by_code`` counts the
    newest ``examined`` letters.
    """

    total: int
    by_code: dict[str, int]
    oldest_at: datetime | None
    newest_at: datetime | None
    estimated: bool = False
    examined: int = 0


class ReplayReport(Model):
    """What a replay did.

    Letters that were ``skipped`` stay dead: a live task has their dedupe key, or another caller
    replays them. ``missing`` are the ids that were given and that no task has.
    """

    matched: int
    replayed: int
    skipped: Sequence[TaskId] = ()
    missing: Sequence[TaskId] = ()
    dry_run: bool = False


def selection(queue: filters.Queues, which: DeadLetterFilter | Sequence[Any]) -> Document:
    """Write the filter for chosen ids, or for everything that a filter describes.

    ``queue`` is one, or several: each is then read on its part of the index.

    Of a group it matches all that begin like it, and of what is masked the server is not
    asked: :mod:`microqueue.operations.letter_search` looks at the messages.
    """
    query: Document = {**filters.of(queue), **filters.DEAD}
    if not isinstance(which, DeadLetterFilter):
        return {**query, **filters.any_of(which)}
    if which.code is not None:
        query["error.code"] = which.code or None
    messages = []
    if which.text is not None and which.shown is None:
        messages.append({"error.message": {"$regex": re.escape(which.text), "$options": "i"}})
    if which.shown is None and (start := beginning(which.group or "")):
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
    letters, _ = gather.merged(pages, place)
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
    return cursors.write(at if isinstance(at, datetime) else None, document["_id"])


def read_cursor(cursor: str | None) -> Document | None:
    """Write the filter for what comes after a cursor."""
    if cursor is None:
        return None
    at, last_id = cursors.read(cursor)
    later = id_order.beyond(last_id, ascending=True)
    return {"$or": [{"updated_at": {"$lt": at}}, {"updated_at": at, "$or": later}]}


def stats(queue: filters.Queues, settings: QueueSettings) -> Operation[DeadLetterStats]:
    """Count the letters by error code."""
    query = {**filters.of(queue), **filters.DEAD}
    if settings.letters_apart:
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
    if settings.letters_apart:
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
    if settings.letters_apart:
        return [Target.TASKS, Target.DEAD_LETTERS, Target.TASKS]
    return [Target.TASKS]
