"""Browse: find tasks by queue, status, code, text and time, page by page, newest first.

A page is read in the order of an index. What matches rarely, and a text, is looked for by
walking that index for a bounded time; the next request goes on from there. So rare matches
in a large collection take more requests, never a long one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from bson import json_util
from bson.errors import BSONError
from pymongo.errors import ExecutionTimeout

from microqueue.arguments import refused
from microqueue.operations import dead_letters, filters, gather, id_order
from microqueue.operations.call import Call, Document, Each, Operation, Target
from microqueue.operations.dead_letters import DeadLetterFilter
from microqueue.operations.gather import MADE
from microqueue.operations.matching import LetterMatcher, Matcher, TaskFilter
from microqueue.settings import QueueSettings

QUICK_MS = 250
"""How long the server may look for what is not in the index, before the walk begins."""
WALK_SEC = 0.3
"""How long one request walks at most."""
LEAST_SEC = 0.1
"""How long a walk looks at what a slow server sent, before it says that its time is over."""
STEP = 2000
PORTION = 50
"""So many documents found by a walk are read whole at once."""

Order: TypeAlias = list[tuple[str, int]]


@dataclass(frozen=True)
class Found:
    """One page of documents; not ``complete``: more may match beyond ``next_cursor``."""

    documents: Sequence[Any]
    next_cursor: str | None
    complete: bool


@dataclass(frozen=True)
class _View:
    """An order that an index has: by an instant, then by id."""

    field: str
    id_order: int

    @property
    def order(self) -> Order:
        return [(self.field, -1), ("_id", self.id_order)]

    def place(self, document: Document) -> Document:
        return {"at": document.get(self.field), "id": document["_id"]}

    def after(self, place: Document) -> list[Document]:
        """Match what comes after a place: filters to be asked one after the other.

        Each is one range of the index. Together in one query they would make the server
        pass all keys of that instant, and one call may add thousands in an instant.
        """
        at, last_id = place["at"], place["id"]
        nearest, *others = id_order.beyond(last_id, ascending=self.id_order > 0)
        same_instant = [{self.field: at, **one} for one in ([nearest, *others])]
        return [*same_instant, {self.field: {"$lt": at}}]


CREATED = _View("created_at", -1)
DIED = _View("updated_at", 1)


def whole(document: Document) -> Document:
    """Leave a document as it is."""
    return document


def page(
    which: TaskFilter,
    *,
    queues: Sequence[str],
    now: datetime,
    limit: int,
    cursor: str | None,
    settings: QueueSettings,
    shown: Callable[[Any], Any] | None = None,
    made: Callable[[Document], Any] = whole,
) -> Operation[Found]:
    """Read one page. ``queues`` are all that there are, so that each is read on its index.

    ``shown`` masks what a text must not find in payloads and errors. ``made`` is what becomes
    of each document of the page.
    """
    view = DIED if which.status == "failed" else CREATED
    names = list(queues) if which.queue is None else [which.queue]
    return (
        yield from _page(
            _Reader(view, dead_letters.targets(settings) if view is DIED else [Target.TASKS]),
            indexed=_indexed(view, names, which),
            sieve=_sieve(which, now),
            matcher=Matcher(which, now, shown),
            look=bool(which.text),
            limit=limit,
            cursor=cursor,
            made=made,
        )
    )


def letters(
    queue: str,
    which: DeadLetterFilter,
    *,
    limit: int,
    cursor: str | None,
    settings: QueueSettings,
    shown: Callable[[str], str] = str,
    made: Callable[[Document], Any] = whole,
    enough: Callable[[], bool] = gather.never,
) -> Operation[Found]:
    """Read one page of a queue's dead letters; ``shown`` masks what must not be found.

    ``made`` is what becomes of each, and ``enough`` may end the page after any.
    """
    matcher = LetterMatcher(which, shown)
    return (
        yield from _page(
            _Reader(DIED, dead_letters.targets(settings)),
            indexed=_indexed(DIED, [queue], which),
            sieve={} if which.code is None else {"error.code": which.code or None},
            matcher=matcher,
            look=matcher.needed,
            limit=limit,
            cursor=cursor,
            made=made,
            enough=enough,
        )
    )


def every_letter(
    query: Document, matcher: LetterMatcher, settings: QueueSettings
) -> Operation[list[Document]]:
    """Look at all letters of a query, and give id and instant of those that match."""
    reader = _Reader(DIED, dead_letters.targets(settings))
    found: list[Document] = []
    place: Document | None = None
    while True:
        each = gather.making(matcher.accepts)
        step, _ = yield from reader.read(query, place, STEP, each, fields=matcher.fields)
        found += [
            {"_id": document["_id"], "updated_at": document["updated_at"]}
            for document in step
            if document[MADE]
        ]
        if len(step) < STEP:
            return found
        place = reader.view.place(step[-1])


def _page(
    reader: _Reader,
    *,
    indexed: Document,
    sieve: Document,
    matcher: Matcher | LetterMatcher,
    look: bool,
    limit: int,
    cursor: str | None,
    made: Callable[[Document], Any],
    enough: Callable[[], bool] = gather.never,
) -> Operation[Found]:
    """Let the server find a page if it can soon; else, or if told to look, walk the index."""
    place = None if cursor is None else read_cursor(cursor)
    if not look:
        try:
            found, ended = yield from reader.read(
                {**indexed, **sieve},
                place,
                limit + 1,
                gather.making(made, enough),
                max_time_ms=QUICK_MS if sieve else None,
            )
        except ExecutionTimeout:
            pass  # Matches are rare, and there is no index for them.
        else:
            page = found[:limit]
            more = page and (ended or len(found) > limit)
            following = write_cursor(reader.view.place(page[-1])) if more else None
            return Found([one[MADE] for one in page], following, complete=True)
    matches, following, complete = yield from _Walk(reader, indexed, matcher, limit).run(place)
    documents: list[Any] = []
    for start in range(0, len(matches), PORTION):
        if start and enough():
            following = write_cursor(reader.view.place(matches[start - 1]))
            return Found(documents, following, complete=True)
        ids = [document["_id"] for document in matches[start : start + PORTION]]
        documents += yield from reader.of(ids, made)
    return Found(documents, following, complete)


@dataclass(frozen=True)
class _Reader:
    """Reads documents in a view's order, wherever they are kept."""

    view: _View
    targets: Sequence[Target]

    def read(
        self,
        selection: Document,
        place: Document | None,
        limit: int,
        each: Each,
        *,
        fields: Document | None = None,
        max_time_ms: int | None = None,
    ) -> Operation[tuple[list[Document], bool]]:
        """Read up to ``limit`` documents; tell if ``each`` ended it before that."""
        options: Document = {} if max_time_ms is None else {"max_time_ms": max_time_ms}
        stages = [{}] if place is None else self.view.after(place)
        documents: list[Document] = []
        ended = False
        for stage in stages:
            if (wanted := limit - len(documents)) and not ended:
                selected = {"$and": [selection, stage]} if stage else selection
                # Of one instant, the order of ids is all that is asked for: with more, the
                # server would not merge the queues' ranges, but walk all ids.
                order = self.view.order[1:] if "_id" in stage else self.view.order
                asked = {**options, "sort": order, "limit": wanted, "batch_size": wanted}
                replies = []
                for target in self.targets:
                    call = Call("find", selected, fields, target=target, each=each, **asked)
                    replies.append((yield call))
                found, ended = gather.merged(replies, dead_letters.place)
                documents += found[:wanted]
        return documents, ended

    def of(self, ids: Sequence[Any], made: Callable[[Document], Any]) -> Operation[list[Any]]:
        """Make something of whole documents, in the order of their ids."""
        found: dict[Any, Any] = {}
        for target in self.targets if ids else ():
            each = gather.making(made)
            for one in (yield Call("find", filters.any_of(ids), target=target, each=each)):
                found[id_order.key(one["_id"])] = one[MADE]
        return [found[one] for one in map(id_order.key, ids) if one in found]


class _Walk:
    """Looks at one document after the other until there are enough, or the time is over."""

    def __init__(
        self, reader: _Reader, indexed: Document, matcher: Matcher | LetterMatcher, limit: int
    ) -> None:
        self._reader = reader
        self._indexed = indexed
        self._matcher = matcher
        self._limit = limit
        self._matched = 0
        self._began: float | None = None
        self._deadline = time.monotonic() + WALK_SEC

    def run(self, place: Document | None) -> Operation[tuple[list[Document], str | None, bool]]:
        """Give what matches, where to go on, and whether the page is as full as can be."""
        found: list[Document] = []
        while True:
            self._matched, self._began = len(found), None
            each = gather.making(self._look, self._enough)
            step, ended = yield from self._reader.read(
                self._indexed, place, STEP, each, fields=self._matcher.fields
            )
            for document in step:
                if document[MADE]:
                    found.append(document)
                    if len(found) == self._limit:
                        return found, write_cursor(self._reader.view.place(document)), True
            if len(step) < STEP and not ended:
                return found, None, True
            place = self._reader.view.place(step[-1])
            if self._late():
                return found, write_cursor(place), False

    def _look(self, document: Document) -> bool:
        self._began = self._began or time.monotonic()
        accepted = self._matcher.accepts(document)
        self._matched += accepted
        return accepted

    def _enough(self) -> bool:
        looked_sec = time.monotonic() - (self._began or time.monotonic())
        return self._matched >= self._limit or (self._late() and looked_sec > LEAST_SEC)

    def _late(self) -> bool:
        return time.monotonic() > self._deadline


def _indexed(view: _View, queues: Sequence[str], which: TaskFilter | DeadLetterFilter) -> Document:
    """Write the part of the filter that the index holds."""
    indexed: Document = {"queue": {"$in": list(queues)}}
    if view is DIED:
        indexed |= filters.DEAD
    bounds = {"$gte": which.since, "$lt": which.until}
    if given := {operator: instant for operator, instant in bounds.items() if instant}:
        indexed[view.field] = given
    return indexed


def _sieve(which: TaskFilter, now: datetime) -> Document:
    """Write the filters that the index does not hold."""
    sieve: Document = {}
    if which.status is not None:
        sieve |= _in_state(which.status, now)
    if which.code is not None:
        sieve["error.code"] = which.code or None
    return sieve if which.status != "failed" or which.code is not None else {}


def _in_state(state: str, now: datetime) -> Document:
    return {
        "pending": {"status": filters.PENDING},
        "ready": filters.READY,
        "delayed": filters.DELAYED,
        "processing": filters.LEASED,
        "overdue": filters.lease_expired(now),
        "done": filters.FINISHED,
        "failed": filters.DEAD,
    }[state]


def write_cursor(place: Document) -> str:
    """Name a place, as text that can stand in an address."""
    at = place["at"] or datetime.fromtimestamp(0, UTC)
    return json_util.dumps({"at": at, "id": place["id"]}, json_options=dead_letters.CURSOR_JSON)


def read_cursor(cursor: str) -> Document:
    """Read a place; anything but an instant and a plain id is refused."""
    try:
        place = json_util.loads(cursor, json_options=dead_letters.CURSOR_JSON)
        at, last_id = place["at"].astimezone(UTC), place["id"]
        id_order.beyond(last_id, ascending=True)
    except (ValueError, TypeError, KeyError, AttributeError, BSONError) as exc:
        raise refused("cursor", cursor, "give the next_cursor of a page") from exc
    return {"at": at, "id": last_id}
