"""Normalise error messages, so that those that differ only in numbers and names are one group.

``order 17 timed out`` and ``order 4 timed out`` both become ``order <n> timed out``. A message
belongs to a group if it normalises to the group's own.

These are not the rules of :mod:`microqueue.spark.pipelines.fingerprint`. A group here is made
anew at each look, and the dashboard must find its letters in MongoDB, by what a message begins
with: so all is one pass over the text, and what is plain stays where it was. A fingerprint is
kept and compared over months, and has to come out the same in Java.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import field_validator
from pymongo.errors import ExecutionTimeout

from microqueue.arguments import is_encodable
from microqueue.durations import AwareDatetime
from microqueue.model import Model
from microqueue.operations import dead_letters, filters, paging
from microqueue.operations.call import Document, Operation, Target
from microqueue.operations.dead_letters import DeadLetterFilter
from microqueue.operations.paging import (
    CREATED,
    DIED,
    MADE,
    Reader,
    View,
    Walk,
    read_cursor,
    write_cursor,
)
from microqueue.settings import QueueSettings

LONGEST_MESSAGE = 300
"""Longer messages are cut in a group; it stands for all that begin like it."""

KINDS = {
    "<uuid>": r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b",
    "<hex>": r"\b(?:0x[0-9a-fA-F]+|[0-9a-fA-F]{16,})\b",
    "<n>": r"[0-9]+",
    "<text>": r"(?:'[^'\n]*'|\"[^\"\n]*\")",
}
_ANY = re.compile("|".join(f"({pattern})" for pattern in KINDS.values()))
_PLACEHOLDER = re.compile("|".join(map(re.escape, KINDS)))
_LITERAL = re.compile(r"[^<\0]*")  # A null character cannot be asked for.


def normalise(message: str) -> str:
    """Replace numbers, ids and quoted texts by what they are, and cut what is long."""
    names = list(KINDS)
    text = _ANY.sub(lambda found: names[(found.lastindex or 1) - 1], message)
    return text if len(text) <= LONGEST_MESSAGE else text[: _cut(text)]


def beginning(group: str) -> str:
    """Give what the messages of a group begin with, all of them."""
    found = _LITERAL.match(group)
    return found.group() if found else ""


def _cut(text: str) -> int:
    """Say where to cut a text: not inside of a placeholder."""
    for found in _PLACEHOLDER.finditer(text, LONGEST_MESSAGE - max(map(len, KINDS))):
        if found.start() < LONGEST_MESSAGE < found.end():
            return found.start()
    return LONGEST_MESSAGE


LONGEST_TEXT = 200
"""So long a text a viewer may look for."""
PLAIN = re.compile(r"(?=.*[a-z])[a-z0-9 @._:/-]+")
"""Texts that a value's repr holds whenever its str does: a date, which differs, has no letter."""

State = Literal["pending", "ready", "delayed", "processing", "overdue", "done", "failed"]


class TaskFilter(Model):
    """Which tasks. ``text`` is plain text in the payload or the error, in any case.

    ``since`` and ``until`` bound when a task was created; for failed ones, when it failed.
    """

    queue: str | None = None
    status: State | None = None
    code: str | None = None
    text: str | None = None
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None

    @field_validator("queue", "code", "text")
    @classmethod
    def _can_be_asked(cls, value: str | None) -> str | None:
        if value is not None and (len(value) > LONGEST_TEXT or not is_encodable(value)):
            raise ValueError(f"give a text of at most {LONGEST_TEXT} characters")
        return value


def state_of(document: Mapping[str, Any], now: datetime) -> str:
    """Tell ready from delayed, and processing from overdue."""
    status = document.get("status", filters.PENDING)
    if status == filters.PENDING:
        return "ready" if document.get("next_retry_at") is None else "delayed"
    if status == filters.PROCESSING:
        expires_at = document.get("lease_expires_at")
        late = isinstance(expires_at, datetime) and expires_at <= now
        return "overdue" if late else "processing"
    return str(status)


class Matcher:
    """Looks at one document after the other."""

    def __init__(
        self, which: TaskFilter, now: datetime, shown: Callable[[Any], Any] | None = None
    ) -> None:
        self._which = which
        self._now = now
        self._text = which.text.lower() if which.text else None
        self._shown = shown or (lambda value: value)
        # Whole fields: the server picks them three times as fast as parts of them.
        names = ["status", "next_retry_at", "lease_expires_at", "error"]
        names += ["created_at", "updated_at"]  # The places of both views.
        if self._text:
            names.append("payload")
        self._plain = bool(self._text and PLAIN.fullmatch(self._text))
        self.fields: Document = dict.fromkeys(names, 1)

    def accepts(self, document: Document) -> bool:
        """Tell whether a document matches."""
        which = self._which
        if which.status is not None and not self._is_in(which.status, document):
            return False
        error = _error_of(document)
        if which.code is not None and error.get("code") != (which.code or None):
            return False
        if self._text is None:
            return True
        # What is stored is looked at first, as quick as can be: it may not match at all.
        told = f"{error.get('message')}\n{error.get('code')}"
        if self._text in told.lower() and self._holds(self._shown(told)):
            return True
        payload = document.get("payload")
        if self._plain and self._text not in repr(payload).lower():
            return False
        return self._holds(self._shown(payload))

    def _is_in(self, state: str, document: Document) -> bool:
        if state in {filters.PENDING, filters.PROCESSING}:
            return bool(document.get("status") == state)
        return state_of(document, self._now) == state

    def _holds(self, value: Any) -> bool:
        """Tell whether a value, or one inside of it, holds the text."""
        if isinstance(value, Mapping):
            return any(map(self._holds, value.values()))
        if isinstance(value, list):
            return any(map(self._holds, value))
        return (self._text or "") in str(value).lower()


class LetterMatcher:
    """Looks at one dead letter after the other; ``shown`` masks what its message must not tell."""

    fields: Document = dict.fromkeys(("error", "updated_at"), 1)

    def __init__(self, which: DeadLetterFilter, shown: Callable[[str], str] = str) -> None:
        self._which = which
        self._text = which.text.lower() if which.text else None
        self._shown = shown
        self.needed = self._text is not None or which.group is not None

    def accepts(self, document: Document) -> bool:
        """Tell whether a letter matches."""
        error = _error_of(document)
        code = self._which.code
        if code is not None and error.get("code") != (code or None):
            return False
        return not self.needed or self.accepts_message(str(error.get("message") or ""))

    def accepts_message(self, message: str) -> bool:
        """Tell whether a letter with this message, as it is stored, matches by its message."""
        # Masked in any case: how long a look takes must not tell what is masked.
        shown = self._shown(message)
        if self._text is not None and self._text not in shown.lower():
            return False
        return self._which.group is None or normalise(shown) == self._which.group


def _error_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    error = document.get("error")
    return error if isinstance(error, Mapping) else {}


QUICK_MS = 250
"""How long the server may look for what is not in the index, before the walk begins."""
PORTION = 50
"""So many documents found by a walk are read whole at once."""


@dataclass(frozen=True)
class Found:
    """One page of documents; not ``complete``: more may match beyond ``next_cursor``."""

    documents: Sequence[Any]
    next_cursor: str | None
    complete: bool


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
            Reader(view, dead_letters.targets(settings) if view is DIED else [Target.TASKS]),
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
    queue: filters.Queues,
    which: DeadLetterFilter,
    *,
    limit: int,
    cursor: str | None,
    settings: QueueSettings,
    shown: Callable[[str], str] = str,
    made: Callable[[Document], Any] = whole,
    enough: Callable[[], bool] = paging.never,
) -> Operation[Found]:
    """Read one page of the dead letters of some queues; ``shown`` masks what must not be found.

    ``made`` is what becomes of each, and ``enough`` may end the page after any.
    """
    matcher = LetterMatcher(which, shown)
    queues = [queue] if isinstance(queue, str) else queue
    return (
        yield from _page(
            Reader(DIED, dead_letters.targets(settings)),
            indexed=_indexed(DIED, queues, which),
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
    reader = Reader(DIED, dead_letters.targets(settings))
    found: list[Document] = []
    place: Document | None = None
    while True:
        each = paging.making(matcher.accepts)
        step, _ = yield from reader.read(query, place, paging.STEP, each, fields=matcher.fields)
        found += [
            {"_id": document["_id"], "updated_at": document["updated_at"]}
            for document in step
            if document[MADE]
        ]
        if len(step) < paging.STEP:
            return found
        place = reader.view.place(step[-1])


def _page(
    reader: Reader,
    *,
    indexed: Document,
    sieve: Document,
    matcher: Matcher | LetterMatcher,
    look: bool,
    limit: int,
    cursor: str | None,
    made: Callable[[Document], Any],
    enough: Callable[[], bool] = paging.never,
) -> Operation[Found]:
    """Let the server find a page if it can soon; else, or if told to look, walk the index."""
    place = None if cursor is None else read_cursor(cursor)
    if not look:
        try:
            found, ended = yield from reader.read(
                {**indexed, **sieve},
                place,
                limit + 1,
                paging.making(made, enough),
                max_time_ms=QUICK_MS if sieve else None,
            )
        except ExecutionTimeout:
            pass  # Matches are rare, and there is no index for them.
        else:
            page = found[:limit]
            more = page and (ended or len(found) > limit)
            following = write_cursor(reader.view.place(page[-1])) if more else None
            return Found([one[MADE] for one in page], following, complete=True)
    matches, following, complete = yield from Walk(reader, indexed, matcher, limit).run(place)
    documents: list[Any] = []
    for start in range(0, len(matches), PORTION):
        if start and enough():
            following = write_cursor(reader.view.place(matches[start - 1]))
            return Found(documents, following, complete=True)
        ids = [document["_id"] for document in matches[start : start + PORTION]]
        documents += yield from reader.of(ids, made)
    return Found(documents, following, complete)


def _indexed(view: View, queues: Sequence[str], which: TaskFilter | DeadLetterFilter) -> Document:
    """Write the part of the filter that the index holds."""
    indexed: Document = {"queue": {"$in": list(queues)}}
    if view is DIED:
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
