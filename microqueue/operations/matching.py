"""Matching: compare documents with a filter on the client, and normalise error messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from microqueue.dead_letter_models import DeadLetterFilter
from microqueue.operations import filters
from microqueue.operations.call import Document
from microqueue.task import name_of
from microqueue.task_filter import TaskFilter

LONGEST_MESSAGE = 300
"""A longer message is cut; its group has all messages with the same beginning."""


NAME_FIELDS = ("name", "headers")
"""The fields that a task's name is in."""

KINDS = {
    "<uuid>": r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b",
    "<hex>": r"\b(?:0x[0-9a-fA-F]+|[0-9a-fA-F]{16,})\b",
    "<n>": r"[0-9]+",
    "<text>": r"(?:'[^'\n]*'|\"[^\"\n]*\")",
}


_ANY = re.compile("|".join(f"({pattern})" for pattern in KINDS.values()))


_PLACEHOLDER = re.compile("|".join(map(re.escape, KINDS)))


_LITERAL = re.compile(r"[^<\0]*")  # A regular expression of MongoDB cannot have a null character.
PLAIN = re.compile(r"(?=.*[a-z])[a-z0-9 @._:/-]+")
"""Texts that are in a value's repr whenever they are in its str. (A date differs, but has no
letter.)"""


def normalise(message: str) -> str:
    """Replace numbers, ids and quoted texts in a message by placeholders, and cut it."""
    names = list(KINDS)
    text = _ANY.sub(lambda found: names[(found.lastindex or 1) - 1], message)
    return text if len(text) <= LONGEST_MESSAGE else text[: _cut(text)]


def literal_prefix(group: str) -> str:
    """Return the text with which all messages of a group begin."""
    found = _LITERAL.match(group)
    return found.group() if found else ""


def _cut(text: str) -> int:
    """Return where to cut a text: not inside a placeholder."""
    for found in _PLACEHOLDER.finditer(text, LONGEST_MESSAGE - max(map(len, KINDS))):
        if found.start() < LONGEST_MESSAGE < found.end():
            return found.start()
    return LONGEST_MESSAGE


def state_of(document: Mapping[str, Any], now: datetime) -> str:
    """Return the state of a task: its status, but ready or delayed, and overdue if it is."""
    status = document.get("status", filters.PENDING)
    if status == filters.PENDING:
        return "ready" if document.get("next_retry_at") is None else "delayed"
    if status == filters.PROCESSING:
        expires_at = document.get("deadline_at")
        late = isinstance(expires_at, datetime) and expires_at <= now
        return "overdue" if late else "processing"
    return str(status)


class TaskMatcher:
    """Matches tasks; ``shown`` masks payloads and errors before their text is compared."""

    def __init__(
        self, which: TaskFilter, now: datetime, shown: Callable[[Any], Any] | None = None
    ) -> None:
        self._which = which
        self._now = now
        self._text = which.text.lower() if which.text else None
        self._shown = shown or (lambda value: value)
        # Whole fields: the server projects them three times as fast as parts of them.
        names = ["status", "next_retry_at", "deadline_at", "error"]
        names += ["created_at", "updated_at"]  # The cursors of both views.
        if self._text:
            names.append("payload")
        if which.name is not None:
            names += NAME_FIELDS
        self._plain = bool(self._text and PLAIN.fullmatch(self._text))
        self.fields: Document = dict.fromkeys(names, 1)

    def accepts(self, document: Document) -> bool:
        """Return whether a task matches."""
        which = self._which
        if which.status is not None and not self._is_in(which.status, document):
            return False
        if not _has_name(document, which.name):
            return False
        error = _error_of(document)
        if which.code is not None and error.get("code") != (which.code or None):
            return False
        return self._text is None or self._has_text(document, error)

    def _has_text(self, document: Document, error: Mapping[str, Any]) -> bool:
        # The stored text first, because that is fast: most documents do not match at all.
        stored = f"{error.get('message')}\n{error.get('code')}"
        text = self._text or ""
        if text in stored.lower() and self._contains(self._shown(stored)):
            return True
        payload = document.get("payload")
        if self._plain and text not in repr(payload).lower():
            return False
        return self._contains(self._shown(payload))

    def _is_in(self, state: str, document: Document) -> bool:
        if state in {filters.PENDING, filters.PROCESSING}:
            return bool(document.get("status") == state)
        return state_of(document, self._now) == state

    def _contains(self, value: Any) -> bool:
        """Return whether a value, or one inside it, contains the text."""
        if isinstance(value, Mapping):
            return any(map(self._contains, value.values()))
        if isinstance(value, list):
            return any(map(self._contains, value))
        return (self._text or "") in str(value).lower()


class DeadLetterMatcher:
    """Matches dead letters; ``shown`` masks messages before they are compared."""

    def __init__(self, which: DeadLetterFilter, shown: Callable[[str], str] = str) -> None:
        self._which = which
        self._text = which.text.lower() if which.text else None
        self._shown = shown
        self.needed = self._text is not None or which.group is not None
        names = ["error", "updated_at", *(() if which.name is None else NAME_FIELDS)]
        self.fields: Document = dict.fromkeys(names, 1)

    def accepts(self, document: Document) -> bool:
        """Return whether a dead letter matches."""
        error = _error_of(document)
        code = self._which.code
        if code is not None and error.get("code") != (code or None):
            return False
        if not _has_name(document, self._which.name):
            return False
        return not self.needed or self.accepts_message(str(error.get("message") or ""))

    def accepts_message(self, message: str) -> bool:
        """Return whether a stored message matches."""
        # Masked in any case: the time that this takes must not reveal what is masked.
        shown = self._shown(message)
        if self._text is not None and self._text not in shown.lower():
            return False
        return self._which.group is None or normalise(shown) == self._which.group


def _has_name(document: Mapping[str, Any], name: str | None) -> bool:
    """Return whether a task has this name, for the empty string none; as ``filters.named``."""
    return name is None or name_of(document) == (name or None)


def _error_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    error = document.get("error")
    return error if isinstance(error, Mapping) else {}
