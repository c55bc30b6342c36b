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
from microqueue.operations import dead_letters, filters, gather, task_ids
from microqueue.operations.call import Call, Document, Each, Operation, Target
from microqueue.operations.gather import MADE
from microqueue.operations.matching import Matcher, TaskFilter
from microqueue.settings import QueueSettings

QUICK_MS = 250
"""How long the server may look for what is not in the index, before the walk begins."""
WALK_SEC = 0.3
"""How long one request walks at most."""
LEAST_SEC = 0.1
"""How long a walk looks at what a slow server sent, before it says that its time is over."""
STEP = 2000

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
        nearest, *others = task_ids.beyond(last_id, ascending=self.id_order > 0)
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
    reader = _Reader(view, dead_letters.targets(settings) if view is DIED else [Target.TASKS])
    place = None if cursor is None else read_cursor(cursor)
    indexed = _indexed(view, which, queues)
    sieve = _sieve(which, now)
    if not which.text:
        try:
            found, _ = yield from reader.read(
                {**indexed, **sieve},
                place,
                limit + 1,
                gather.making(made),
                max_time_ms=QUICK_MS if sieve else None,
            )
        except ExecutionTimeout:
            pass  # Matches are rare, and there is no index for them.
        else:
            more = len(found) > limit
            last = view.place(found[limit - 1]) if more else None
            page = [one[MADE] for one in found[:limit]]
            return Found(page, write_cursor(last) if last else None, complete=True)
    matcher = Matcher(which, now, shown)
    walk = _Walk(reader, indexed, matcher, limit)
    ids, following, complete = yield from walk.run(place)
    return Found((yield from reader.of(ids, made)), following, complete)


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
                found[task_ids.key(one["_id"])] = one[MADE]
        return [found[one] for one in map(task_ids.key, ids) if one in found]


class _Walk:
    """Looks at one document after the other until there are enough, or the time is over."""

    def __init__(self, reader: _Reader, indexed: Document, matcher: Matcher, limit: int) -> None:
        self._reader = reader
        self._indexed = indexed
        self._matcher = matcher
        self._limit = limit
        self._matched = 0
        self._began: float | None = None
        self._deadline = time.monotonic() + WALK_SEC

    def run(self, place: Document | None) -> Operation[tuple[list[Any], str | None, bool]]:
        """Give the ids that match, where to go on, and whether the page is as full as can be."""
        ids: list[Any] = []
        while True:
            self._matched, self._began = len(ids), None
            each = gather.making(self._look, self._enough)
            step, ended = yield from self._reader.read(
                self._indexed, place, STEP, each, fields=self._matcher.fields
            )
            for document in step:
                if document[MADE]:
                    ids.append(document["_id"])
                    if len(ids) == self._limit:
                        return ids, write_cursor(self._reader.view.place(document)), True
            if len(step) < STEP and not ended:
                return ids, None, True
            place = self._reader.view.place(step[-1])
            if self._late():
                return ids, write_cursor(place), False

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


def _indexed(view: _View, which: TaskFilter, queues: Sequence[str]) -> Document:
    """Write the part of the filter that the index holds."""
    names = list(queues) if which.queue is None else [which.queue]
    indexed: Document = {"queue": {"$in": names}}
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
        task_ids.beyond(last_id, ascending=True)
    except (ValueError, TypeError, KeyError, AttributeError, BSONError) as exc:
        raise refused("cursor", cursor, "give the next_cursor of a page") from exc
    return {"at": at, "id": last_id}
