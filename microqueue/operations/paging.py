"""Paging: read documents in the order of an index, page by page, with cursors.

A page may be of ten documents, and each may have a kilobyte or 15 MB. So a document is mapped to
something small as it is read, and reading can stop before the page is full. A :class:`View` is the
order, a :class:`Reader` reads pages of it, and a :class:`Scan` looks for matches that no index has.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self, TypeAlias

from bson import json_util
from bson.errors import BSONError

from microqueue.arguments import invalid_argument
from microqueue.extended_json import CANONICAL
from microqueue.operations import filters
from microqueue.operations.call import ENOUGH, Call, Document, Each, Operation, Span, Target
from microqueue.operations.matching import DeadLetterMatcher, TaskMatcher
from microqueue.positions import microseconds
from microqueue.settings import QueueSettings
from microqueue.task_ids import ID_TYPES, id_key, id_rank, id_sort_key

KEPT = ("_id", "created_at", "updated_at")
"""The fields that are kept of a document that was mapped: those of all views."""
MAPPED = "mapped"
SCAN_SEC = 0.3
"""How long one request scans at most."""
LEAST_SEC = 0.1
"""How long a scan looks at what a slow server sent, before it ends for lack of time."""
STEP = 2000

EPOCH = datetime.fromtimestamp(0, UTC)

Order: TypeAlias = list[tuple[str, int]]


def never_enough() -> bool:
    """Return that reading continues."""
    return False


def mapping_each(
    make: Callable[[Document], Any], enough: Callable[[], bool] = never_enough
) -> Each:
    """Keep the cursor fields of each document, and what ``make`` returns for it.

    ``enough`` is asked before each document but the first, so that every page makes progress.
    """

    def begin() -> Callable[[Document], Any]:
        first = True

        def each(document: Document) -> Any:
            nonlocal first
            if not first and enough():
                return ENOUGH
            first = False
            return {**{name: document.get(name) for name in KEPT}, MAPPED: make(document)}

        return each

    return begin


def merge_replies(
    replies: Sequence[list[Any]], key: Callable[[Document], Any]
) -> tuple[list[Document], bool]:
    """Merge what several collections replied, each document once.

    Also returns whether reading ended early. Documents beyond the end of a reply that ended early
    are left out: that collection may have more before them.
    """
    ended = [reply for reply in replies if reply and reply[-1] is ENOUGH]
    edges = [key(reply[-2]) for reply in ended]
    several = len(replies) > 1
    found: dict[Any, Document] = {}
    documents = [reply[:-1] if reply and reply[-1] is ENOUGH else reply for reply in replies]
    for document in heapq.merge(*documents, key=key):
        if several and edges and key(document) > min(edges):
            break
        found.setdefault(id_key(document["_id"]), document)
    return list(found.values()), bool(ended)


def ids_beyond(last_id: Any, *, ascending: bool) -> list[Document]:
    """Return filters for the ids that sort after one, or before it.

    MongoDB compares ids of one type only, so each type behind it has its own filter.

    Raises:
        ValueError: It is no id.
    """
    rank = id_rank(last_id)
    operators = isinstance(last_id, Mapping) and any(name.startswith("$") for name in last_id)
    if rank == len(ID_TYPES) or operators:
        raise ValueError(f"{last_id!r} is not an id")
    behind = ID_TYPES[rank + 1 :] if ascending else ID_TYPES[:rank][::-1]
    nearest = {"_id": {"$gt" if ascending else "$lt": last_id}}
    return [nearest, *({"_id": {"$type": name}} for _, name in behind)]


class Cursor(NamedTuple):
    """The place of a document in a view: its instant and its id."""

    at: Any
    id: Any

    def __str__(self) -> str:
        """Return it as text. A document without an instant is at the end, as MongoDB sorts."""
        at = self.at if isinstance(self.at, datetime) else EPOCH
        return json_util.dumps({"at": at, "id": self.id}, json_options=CANONICAL)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a cursor from text; reject anything but an instant and a plain id."""
        try:
            found = json_util.loads(text, json_options=CANONICAL)
            at, last_id = found["at"].astimezone(UTC), found["id"]
            ids_beyond(last_id, ascending=True)  # It raises for what is no id.
        except (ValueError, TypeError, KeyError, AttributeError, BSONError) as exc:
            raise invalid_argument("cursor", text, "give the next_cursor of a page") from exc
        return cls(at, last_id)


def check_cursor(cursor: Any) -> None:
    """Reject anything but the cursor of a page, or ``None``."""
    if cursor is not None:
        Cursor.parse(cursor)


@dataclass(frozen=True)
class View:
    """An order that an index has: by an instant, newest first, then by id."""

    field: str
    id_order: int

    @property
    def order(self) -> Order:
        """The sort order."""
        return [(self.field, -1), ("_id", self.id_order)]

    def cursor(self, document: Document) -> Cursor:
        """Return the place of a document."""
        return Cursor(document.get(self.field), document["_id"])

    def after(self, cursor: Cursor) -> list[Document]:
        """Return filters for what comes after a cursor, to be read one after the other.

        Each is one range of the index. Joined in one query, they would make the server pass all
        keys of that instant, and one call may add thousands in an instant.
        """
        beyond = ids_beyond(cursor.id, ascending=self.id_order > 0)
        same_instant = [{self.field: cursor.at, **one} for one in beyond]
        return [*same_instant, {self.field: {"$lt": cursor.at}}]


BY_CREATION = View("created_at", -1)
BY_FAILURE = View("updated_at", 1)


def dead_letter_targets(settings: QueueSettings) -> list[Target]:
    """Return where to read dead letters, in an order that misses none that moves in between."""
    if settings.separate_dlq:
        return [Target.TASKS, Target.DEAD_LETTERS, Target.TASKS]
    return [Target.TASKS]


def failure_key(document: Document) -> tuple[Any, ...]:
    """Return a sort key that orders dead letters as MongoDB does, ids of all types included."""
    failed_at = document.get("updated_at")
    newest_first = -microseconds(failed_at) if isinstance(failed_at, datetime) else 0
    return newest_first, *id_sort_key(document["_id"])


@dataclass(frozen=True)
class Reader:
    """Reads documents in the order of a view, from one collection or several.

    Only dead letters are in several collections.
    """

    view: View
    targets: Sequence[Target]

    def read(
        self,
        selection: Document,
        cursor: Cursor | None,
        limit: int,
        each: Each | None = None,
        *,
        fields: Document | None = None,
        max_time_ms: int | None = None,
    ) -> Operation[tuple[list[Document], bool]]:
        """Read up to ``limit`` documents; also return whether ``each`` ended it before that.

        Without ``each``, the documents are read whole.
        """
        options: Document = {} if max_time_ms is None else {"max_time_ms": max_time_ms}
        stages = [{}] if cursor is None else self.view.after(cursor)
        documents: list[Document] = []
        ended = False
        for stage in stages:
            if (wanted := limit - len(documents)) and not ended:
                selected = {"$and": [selection, stage]} if stage else selection
                # Within one instant only the ids need an order. With the full order, the server
                # would not merge the ranges of the queues, but read all ids.
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
                found, ended = merge_replies(replies, failure_key)
                documents += found[:wanted]
        return documents, ended

    def of(self, ids: Sequence[Any], made: Callable[[Document], Any]) -> Operation[list[Any]]:
        """Read whole documents by id, and return what ``made`` makes of them, in that order."""
        found: dict[Any, Any] = {}
        for target in self.targets if ids else ():
            each = mapping_each(made)
            for one in (yield Call("find", filters.any_of(ids), target=target, each=each)):
                found[id_key(one["_id"])] = one[MAPPED]
        return [found[one] for one in map(id_key, ids) if one in found]


class Scan:
    """Matches one document after the other, until the page is full or the time is over."""

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

    def run(self, cursor: Cursor | None) -> Operation[tuple[list[Document], Cursor | None, bool]]:
        """Return the matches, the next cursor, and whether the page is complete.

        It is not complete if the time was over first.
        """
        found: list[Document] = []
        while True:
            self._matched, self._began = len(found), None
            each = mapping_each(self._accepts, self._enough)
            step, ended = yield from self._reader.read(
                self._indexed, cursor, STEP, each, fields=self._matcher.fields
            )
            for document in step:
                if document[MAPPED]:
                    found.append(document)
                    if len(found) == self._limit:
                        return found, self._reader.view.cursor(document), True
            if len(step) < STEP and not ended:
                return found, None, True
            cursor = self._reader.view.cursor(step[-1])
            if self._late():
                return found, cursor, False

    def _accepts(self, document: Document) -> bool:
        self._began = self._began or time.monotonic()
        accepted = self._matcher.accepts(document)
        self._matched += accepted
        return accepted

    def _enough(self) -> bool:
        elapsed_sec = time.monotonic() - (self._began or time.monotonic())
        return self._matched >= self._limit or (self._late() and elapsed_sec > LEAST_SEC)

    def _late(self) -> bool:
        return time.monotonic() > self._deadline
