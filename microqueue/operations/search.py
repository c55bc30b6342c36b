"""Search: find tasks and dead letters by queue, name, status, code, text and time, newest first.

The server finds a page by its index if it can do so quickly. Otherwise the index is scanned, and
each document is matched here. A scan has a time limit: a page may be incomplete, and its cursor
continues it. Everything here is read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pymongo.errors import ExecutionTimeout

from microqueue.dead_letter_models import DeadLetterFilter
from microqueue.operations import filters, paging
from microqueue.operations.call import Document, Operation, Target
from microqueue.operations.matching import DeadLetterMatcher, TaskMatcher
from microqueue.operations.paging import (
    BY_CREATION,
    BY_FAILURE,
    MAPPED,
    Cursor,
    Reader,
    Scan,
    View,
    dead_letter_targets,
)
from microqueue.settings import QueueSettings
from microqueue.task_filter import TaskFilter

QUICK_MS = 250
"""How long the server may look for what is not in the index, before a scan begins."""
PORTION = 50
"""How many documents found by a scan are read whole at a time."""


@dataclass(frozen=True)
class SearchPage:
    """One page. If it is not ``complete``, the time was over: continue at ``next_cursor``."""

    documents: Sequence[Any]
    next_cursor: str | None
    complete: bool


def as_stored(document: Document) -> Document:
    """Return a document as it is."""
    return document


def page(
    which: TaskFilter,
    *,
    queues: Sequence[str],
    now: datetime,
    limit: int,
    cursor: str | None,
    settings: QueueSettings,
    mask: Callable[[Any], Any] | None = None,
    convert: Callable[[Document], Any] = as_stored,
) -> Operation[SearchPage]:
    """Return one page of tasks.

    Args:
        which: What to search for.
        queues: All queues of the collection, so that each is read on its index.
        now: The server's time.
        limit: How many tasks a page has at most.
        cursor: The ``next_cursor`` of the page before.
        settings: The settings of the queue.
        mask: Masks payloads and errors, so that a search does not find what is masked.
        convert: Maps each document of the page.
    """
    view = BY_FAILURE if which.status == "failed" else BY_CREATION
    names = list(queues) if which.queue is None else [which.queue]
    return (
        yield from _page(
            Reader(view, dead_letter_targets(settings) if view is BY_FAILURE else [Target.TASKS]),
            indexed=_indexed(view, names, which),
            unindexed=_unindexed(which, now),
            matcher=TaskMatcher(which, now, mask),
            scan=bool(which.text),
            limit=limit,
            cursor=cursor,
            convert=convert,
        )
    )


def dead_letter_page(
    queue: filters.Queues,
    which: DeadLetterFilter,
    *,
    limit: int,
    cursor: str | None,
    settings: QueueSettings,
    mask: Callable[[str], str] = str,
    convert: Callable[[Document], Any] = as_stored,
    enough: Callable[[], bool] = paging.never_enough,
) -> Operation[SearchPage]:
    """Return one page of the dead letters of some queues.

    ``mask`` hides what must not be found, ``convert`` maps each document, ``enough`` may end the
    page after any of them.
    """
    matcher = DeadLetterMatcher(which, mask)
    queues = [queue] if isinstance(queue, str) else queue
    return (
        yield from _page(
            Reader(BY_FAILURE, dead_letter_targets(settings)),
            indexed=_indexed(BY_FAILURE, queues, which),
            unindexed=filters.with_code(which.code) | filters.named(which.name),
            matcher=matcher,
            scan=matcher.needed,
            limit=limit,
            cursor=cursor,
            convert=convert,
            enough=enough,
        )
    )


def all_dead_letters(
    query: Document, matcher: DeadLetterMatcher, settings: QueueSettings
) -> Operation[list[Document]]:
    """Return the id and the instant of every dead letter of a query that matches."""
    reader = Reader(BY_FAILURE, dead_letter_targets(settings))
    found: list[Document] = []
    cursor: Cursor | None = None
    while True:
        each = paging.mapping_each(matcher.accepts)
        step, _ = yield from reader.read(query, cursor, paging.STEP, each, fields=matcher.fields)
        found += [
            {"_id": document["_id"], "updated_at": document["updated_at"]}
            for document in step
            if document[MAPPED]
        ]
        if len(step) < paging.STEP:
            return found
        cursor = reader.view.cursor(step[-1])


def _page(
    reader: Reader,
    *,
    indexed: Document,
    unindexed: Document,
    matcher: TaskMatcher | DeadLetterMatcher,
    scan: bool,
    limit: int,
    cursor: str | None,
    convert: Callable[[Document], Any],
    enough: Callable[[], bool] = paging.never_enough,
) -> Operation[SearchPage]:
    """Let the server find a page if it can do so quickly; otherwise scan the index."""
    start = None if cursor is None else Cursor.parse(cursor)
    if not scan:
        try:
            found, ended = yield from reader.read(
                {**indexed, **unindexed},
                start,
                limit + 1,
                paging.mapping_each(convert, enough),
                max_time_ms=QUICK_MS if unindexed else None,
            )
        except ExecutionTimeout:
            pass  # Matches are rare, and there is no index for them.
        else:
            page = found[:limit]
            more = page and (ended or len(found) > limit)
            following = reader.view.cursor(page[-1]) if more else None
            return SearchPage([one[MAPPED] for one in page], _text(following), complete=True)
    matches, following, complete = yield from Scan(reader, indexed, matcher, limit).run(start)
    documents: list[Any] = []
    for first in range(0, len(matches), PORTION):
        if first and enough():
            following = reader.view.cursor(matches[first - 1])
            return SearchPage(documents, _text(following), complete=True)
        ids = [document["_id"] for document in matches[first : first + PORTION]]
        documents += yield from reader.of(ids, convert)
    return SearchPage(documents, _text(following), complete)


def _text(cursor: Cursor | None) -> str | None:
    return None if cursor is None else str(cursor)


def _indexed(view: View, queues: Sequence[str], which: TaskFilter | DeadLetterFilter) -> Document:
    """Return the part of the filter that the index has."""
    indexed: Document = {"queue": {"$in": list(queues)}}
    if view is BY_FAILURE:
        indexed |= filters.DEAD
    if window := filters.between(which.since, which.until):
        indexed[view.field] = window
    return indexed


def _unindexed(which: TaskFilter, now: datetime) -> Document:
    """Return the part of the filter that the index does not have."""
    unindexed: Document = {}
    if which.status is not None:
        unindexed |= _in_state(which.status, now)
    described = filters.with_code(which.code) | filters.named(which.name)
    return unindexed | described if which.status != "failed" or described else {}


def _in_state(state: str, now: datetime) -> Document:
    return {
        "pending": {"status": filters.PENDING},
        "ready": filters.READY,
        "delayed": {"status": filters.PENDING, "next_retry_at": filters.IS_DATE},
        "processing": filters.LEASED,
        "overdue": filters.lease_expired(now),
        "done": {"status": filters.DONE},
        "failed": filters.DEAD,
    }[state]
