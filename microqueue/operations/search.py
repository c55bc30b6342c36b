"""Search: find tasks by queue, status, code, text and time, page by page, newest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pymongo.errors import ExecutionTimeout

from microqueue.dlq import DeadLetterFilter
from microqueue.operations import dead_letters, filters, paging
from microqueue.operations.call import Document, Operation, Target
from microqueue.operations.matching import DeadLetterMatcher, TaskMatcher
from microqueue.operations.paging import (
    BY_CREATION,
    BY_FAILURE,
    MAPPED,
    Reader,
    Scan,
    View,
    read_cursor,
    write_cursor,
)
from microqueue.settings import QueueSettings
from microqueue.task_filter import TaskFilter

QUICK_MS = 250
"""How long the server may look for what is not in the index, before the walk begins."""
PORTION = 50
"""So many documents found by a walk are read whole at once."""


@dataclass(frozen=True)
class SearchPage:
    """One page of documents; not ``complete``: more may match beyond ``next_cursor``."""

    documents: Sequence[Any]
    next_cursor: str | None
    complete: bool


def as_stored(document: Document) -> Document:
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
    made: Callable[[Document], Any] = as_stored,
) -> Operation[SearchPage]:
    """Read one page. ``queues`` are all that there are, so that each is read on its index.

    ``shown`` masks what a text must not find in payloads and errors. ``made`` is what becomes
    of each document of the page.
    """
    view = BY_FAILURE if which.status == "failed" else BY_CREATION
    names = list(queues) if which.queue is None else [which.queue]
    return (
        yield from _page(
            Reader(view, dead_letters.targets(settings) if view is BY_FAILURE else [Target.TASKS]),
            indexed=_indexed(view, names, which),
            sieve=_sieve(which, now),
            matcher=TaskMatcher(which, now, shown),
            look=bool(which.text),
            limit=limit,
            cursor=cursor,
            made=made,
        )
    )


def dead_letter_page(
    queue: filters.Queues,
    which: DeadLetterFilter,
    *,
    limit: int,
    cursor: str | None,
    settings: QueueSettings,
    shown: Callable[[str], str] = str,
    made: Callable[[Document], Any] = as_stored,
    enough: Callable[[], bool] = paging.never_enough,
) -> Operation[SearchPage]:
    """Read one page of the dead letters of some queues; ``shown`` masks what must not be found.

    ``made`` is what becomes of each, and ``enough`` may end the page after any.
    """
    matcher = DeadLetterMatcher(which, shown)
    queues = [queue] if isinstance(queue, str) else queue
    return (
        yield from _page(
            Reader(BY_FAILURE, dead_letters.targets(settings)),
            indexed=_indexed(BY_FAILURE, queues, which),
            sieve={} if which.code is None else {"error.code": which.code or None},
            matcher=matcher,
            look=matcher.needed,
            limit=limit,
            cursor=cursor,
            made=made,
            enough=enough,
        )
    )


def all_dead_letters(
    query: Document, matcher: DeadLetterMatcher, settings: QueueSettings
) -> Operation[list[Document]]:
    """Look at all letters of a query, and give id and instant of those that match."""
    reader = Reader(BY_FAILURE, dead_letters.targets(settings))
    found: list[Document] = []
    place: Document | None = None
    while True:
        each = paging.mapping_each(matcher.accepts)
        step, _ = yield from reader.read(query, place, paging.STEP, each, fields=matcher.fields)
        found += [
            {"_id": document["_id"], "updated_at": document["updated_at"]}
            for document in step
            if document[MAPPED]
        ]
        if len(step) < paging.STEP:
            return found
        place = reader.view.place(step[-1])


def _page(
    reader: Reader,
    *,
    indexed: Document,
    sieve: Document,
    matcher: TaskMatcher | DeadLetterMatcher,
    look: bool,
    limit: int,
    cursor: str | None,
    made: Callable[[Document], Any],
    enough: Callable[[], bool] = paging.never_enough,
) -> Operation[SearchPage]:
    """Let the server find a page if it can soon; else, or if told to look, walk the index."""
    place = None if cursor is None else read_cursor(cursor)
    if not look:
        try:
            found, ended = yield from reader.read(
                {**indexed, **sieve},
                place,
                limit + 1,
                paging.mapping_each(made, enough),
                max_time_ms=QUICK_MS if sieve else None,
            )
        except ExecutionTimeout:
            pass  # Matches are rare, and there is no index for them.
        else:
            page = found[:limit]
            more = page and (ended or len(found) > limit)
            following = write_cursor(reader.view.place(page[-1])) if more else None
            return SearchPage([one[MAPPED] for one in page], following, complete=True)
    matches, following, complete = yield from Scan(reader, indexed, matcher, limit).run(place)
    documents: list[Any] = []
    for start in range(0, len(matches), PORTION):
        if start and enough():
            following = write_cursor(reader.view.place(matches[start - 1]))
            return SearchPage(documents, following, complete=True)
        ids = [document["_id"] for document in matches[start : start + PORTION]]
        documents += yield from reader.of(ids, made)
    return SearchPage(documents, following, complete)


def _indexed(view: View, queues: Sequence[str], which: TaskFilter | DeadLetterFilter) -> Document:
    """Write the part of the filter that the index holds."""
    indexed: Document = {"queue": {"$in": list(queues)}}
    if view is BY_FAILURE:
        indexed |= filters.DEAD
    if window := filters.between(which.since, which.until):
        indexed[view.field] = window
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
