"""Gather: make something of each document as it is read, and stop when that is enough.

Ten documents may have a kilobyte or 150 megabytes. What is made of them is small, so whole
documents are held for no longer than it takes to make it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from bson import json_util
from bson.errors import BSONError

from microqueue.arguments import refused
from microqueue.extended_json import CANONICAL
from microqueue.operations import dead_letters, filters, id_order
from microqueue.operations.call import ENOUGH, Call, Document, Each, Operation, Span, Target
from microqueue.operations.matching import DeadLetterMatcher, TaskMatcher

PLACE = ("_id", "created_at", "updated_at")
MAPPED = "made"


def never_enough() -> bool:
    """Read on, whatever was read."""
    return False


def mapping_each(
    make: Callable[[Document], Any], enough: Callable[[], bool] = never_enough
) -> Each:
    """Keep of each document its place, and what is made of it.

    ``enough`` is asked before each document but the first, so that reading always gets on.
    """

    def begin() -> Callable[[Document], Any]:
        first = True

        def each(document: Document) -> Any:
            nonlocal first
            if not first and enough():
                return ENOUGH
            first = False
            return {**{name: document.get(name) for name in PLACE}, MAPPED: make(document)}

        return each

    return begin


def merge_replies(
    replies: Sequence[list[Any]], place: Callable[[Document], Any]
) -> tuple[list[Document], bool]:
    """Join what was read in several places, each document once; tell if reading ended early.

    What lies beyond the end of one that ended early is left out: there may be more before it.
    """
    ended = [reply for reply in replies if reply and reply[-1] is ENOUGH]
    edges = [place(reply[-2]) for reply in ended]
    several = len(replies) > 1
    found: dict[Any, Document] = {}
    whole = [reply[:-1] if reply and reply[-1] is ENOUGH else reply for reply in replies]
    for document in heapq.merge(*whole, key=place):
        if several and edges and place(document) > min(edges):
            break
        found.setdefault(id_order.key(document["_id"]), document)
    return list(found.values()), bool(ended)


EPOCH = datetime.fromtimestamp(0, UTC)


def format_cursor(at: Any, last_id: Any) -> str:
    """Name the place of a document; one without an instant is at the end, as MongoDB sorts."""
    return json_util.dumps({"at": at or EPOCH, "id": last_id}, json_options=CANONICAL)


def parse_cursor(cursor: str) -> tuple[datetime, Any]:
    """Read the instant and the id of a place; anything but an instant and a plain id is refused."""
    try:
        place = json_util.loads(cursor, json_options=CANONICAL)
        at, last_id = place["at"].astimezone(UTC), place["id"]
        id_order.beyond(last_id, ascending=True)  # It tells what is no id.
    except (ValueError, TypeError, KeyError, AttributeError, BSONError) as exc:
        raise refused("cursor", cursor, "give the next_cursor of a page") from exc
    return at, last_id


SCAN_SEC = 0.3
"""How long one request walks at most."""
LEAST_SEC = 0.1
"""How long a walk looks at what a slow server sent, before it says that its time is over."""
STEP = 2000

Order: TypeAlias = list[tuple[str, int]]


@dataclass(frozen=True)
class View:
    """An order that an index has: by an instant, then by id."""

    field: str
    id_order: int

    @property
    def order(self) -> Order:
        """How it is sorted."""
        return [(self.field, -1), ("_id", self.id_order)]

    def place(self, document: Document) -> Document:
        """Say where a document is."""
        return {"at": document.get(self.field), "id": document["_id"]}

    def after(self, place: Document) -> list[Document]:
        """Match what comes after a place: filters to be asked one after the other.

        Each is one range of the index. Together in one query they would make the server
        pass all keys of that instant, and one call may add thousands in an instant.
        """
        at, last_id = place["at"], place["id"]
        beyond = id_order.beyond(last_id, ascending=self.id_order > 0)
        same_instant = [{self.field: at, **one} for one in beyond]
        return [*same_instant, {self.field: {"$lt": at}}]


BY_CREATION = View("created_at", -1)
BY_FAILURE = View("updated_at", 1)


@dataclass(frozen=True)
class Reader:
    """Reads documents in a view's order, wherever they are kept."""

    view: View
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
                asked = {
                    **options,
                    "sort": order,
                    "limit": wanted,
                    "batch_size": wanted,
                    "span": Span.LONG,
                }
                replies = []
                for target in self.targets:
                    call = Call("find", selected, fields, target=target, each=each, **asked)
                    replies.append((yield call))
                found, ended = merge_replies(replies, dead_letters.place)
                documents += found[:wanted]
        return documents, ended

    def of(self, ids: Sequence[Any], made: Callable[[Document], Any]) -> Operation[list[Any]]:
        """Make something of whole documents, in the order of their ids."""
        found: dict[Any, Any] = {}
        for target in self.targets if ids else ():
            each = mapping_each(made)
            for one in (yield Call("find", filters.any_of(ids), target=target, each=each)):
                found[id_order.key(one["_id"])] = one[MAPPED]
        return [found[one] for one in map(id_order.key, ids) if one in found]


class Scan:
    """Looks at one document after the other until there are enough, or the time is over."""

    def __init__(
        self,
        reader: Reader,
        indexed: Document,
        matcher: TaskMatcher | DeadLetterMatcher,
        limit: int,
    ) -> None:
        self._reader = reader
        self._indexed = indexed
        self._matcher = matcher
        self._limit = limit
        self._matched = 0
        self._began: float | None = None
        self._deadline = time.monotonic() + SCAN_SEC

    def run(self, place: Document | None) -> Operation[tuple[list[Document], str | None, bool]]:
        """Give what matches, where to go on, and whether the page is as full as can be."""
        found: list[Document] = []
        while True:
            self._matched, self._began = len(found), None
            each = mapping_each(self._look, self._enough)
            step, ended = yield from self._reader.read(
                self._indexed, place, STEP, each, fields=self._matcher.fields
            )
            for document in step:
                if document[MAPPED]:
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


def write_cursor(place: Document) -> str:
    """Name a place, as text that can stand in an address."""
    return format_cursor(place["at"], place["id"])


def read_cursor(cursor: str) -> Document:
    """Read a place; anything else is refused."""
    at, last_id = parse_cursor(cursor)
    return {"at": at, "id": last_id}
