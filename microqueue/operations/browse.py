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
from microqueue.operations import dead_letters, filters, task_ids
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.matching import Matcher, TaskFilter
from microqueue.settings import QueueSettings

QUICK_MS = 250
"""How long the server may look for what is not in the index, before the walk begins."""
WALK_SEC = 0.3
"""How long one request walks at most."""
STEP = 2000

Order: TypeAlias = list[tuple[str, int]]


@dataclass(frozen=True)
class Found:
    """One page of documents; not ``complete``: more may match beyond ``next_cursor``."""

    documents: Sequence[Document]
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


def page(
    which: TaskFilter,
    *,
    queues: Sequence[str],
    now: datetime,
    limit: int,
    cursor: str | None,
    settings: QueueSettings,
    shown: Callable[[Any], Any] | None = None,
) -> Operation[Found]:
    """Read one page. ``queues`` are all that there are, so that each is read on its index.

    ``shown`` masks what a text must not find in payloads and errors.
    """
    view = DIED if which.status == "failed" else CREATED
    reader = _Reader(view, dead_letters.targets(settings) if view is DIED else [Target.TASKS])
    place = None if cursor is None else read_cursor(cursor)
    indexed = _indexed(view, which, queues)
    sieve = _sieve(which, now)
    if not which.text:
        try:
            found = yield from reader.read(
                {**indexed, **sieve}, place, limit + 1, max_time_ms=QUICK_MS if sieve else None
            )
        except ExecutionTimeout:
            pass  # Matches are rare, and there is no index for them.
        else:
            more = len(found) > limit
            last = view.place(found[limit - 1]) if more else None
            return Found(found[:limit], write_cursor(last) if last else None, complete=True)
    matcher = Matcher(which, now, shown)
    return (yield from _walk(reader, indexed, place, matcher, limit))


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
        *,
        fields: Document | None = None,
        max_time_ms: int | None = None,
    ) -> Operation[list[Document]]:
        options: Document = {} if max_time_ms is None else {"max_time_ms": max_time_ms}
        stages = [{}] if place is None else self.view.after(place)
        documents: list[Document] = []
        for stage in stages:
            if wanted := limit - len(documents):
                selected = {"$and": [selection, stage]} if stage else selection
                # Of one instant, the order of ids is all that is asked for: with more, the
                # server would not merge the queues' ranges, but walk all ids.
                order = self.view.order[1:] if "_id" in stage else self.view.order
                found = self._read_stage(selected, order, wanted, {**options, "projection": fields})
                documents += yield from found
        return documents

    def _read_stage(
        self, selection: Document, order: Order, limit: int, options: Document
    ) -> Operation[list[Document]]:
        found: dict[Any, Document] = {}
        for target in self.targets:
            reply = yield Call(
                "find",
                selection,
                sort=order,
                limit=limit,
                batch_size=limit,
                target=target,
                **options,
            )
            found |= {task_ids.key(document["_id"]): document for document in reply}
        documents = list(found.values())
        if len(self.targets) > 1:
            documents.sort(key=dead_letters.place)
        return documents[:limit]

    def whole(self, ids: Sequence[Any]) -> Operation[list[Document]]:
        """Read whole documents, in the order of their ids."""
        found: dict[Any, Document] = {}
        for target in self.targets if ids else ():
            for document in (yield Call("find", filters.any_of(ids), target=target)):
                found[task_ids.key(document["_id"])] = document
        return [found[one] for one in map(task_ids.key, ids) if one in found]


def _walk(
    reader: _Reader, indexed: Document, place: Document | None, matcher: Matcher, limit: int
) -> Operation[Found]:
    """Look at one document after the other until there are enough, or the time is over."""
    deadline = time.monotonic() + WALK_SEC
    ids: list[Any] = []
    while True:
        step = yield from reader.read(indexed, place, STEP, fields=matcher.fields)
        for document in step:
            if matcher.accepts(document):
                ids.append(document["_id"])
                if len(ids) == limit:
                    documents = yield from reader.whole(ids)
                    following = write_cursor(reader.view.place(document))
                    return Found(documents, following, complete=True)
        over = len(step) < STEP
        if over or time.monotonic() > deadline:
            cursor = None if over else write_cursor(reader.view.place(step[-1]))
            documents = yield from reader.whole(ids)
            return Found(documents, cursor, complete=over)
        place = reader.view.place(step[-1])


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
