"""Bindings: which messages of a topic become tasks of a queue, and with which options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, TypeAlias, TypedDict
from uuid import UUID

from bson import Decimal128, ObjectId
from pydantic import Field

from microqueue.arguments import invalid_argument
from microqueue.backoff import BackoffPolicy
from microqueue.clock import as_utc, whole_milliseconds
from microqueue.durations import Duration
from microqueue.model import Model, shorten

MessageFilter: TypeAlias = str | Mapping[str, Any] | None
"""A pattern of keys, or the values of some fields; ``None`` accepts every message."""

LONGEST_PATTERN = 255
MOST_CONDITIONS = 20
LONGEST_VALUE = 255
ONE_WORD, ANY_WORDS = "*", "#"
SCALARS = (str, bool, int, float, datetime, ObjectId, UUID, Decimal128, type(None))


class BindingOptions(TypedDict, total=False):
    """The options of the tasks of a binding; they mean the same as in :meth:`Queue.enqueue`."""

    priority: int
    """0 to 255; higher is delivered first. Default: 0."""
    delay: Duration | None
    """Deliver the tasks this much later, at the earliest."""
    max_attempts: int | None
    """Deliveries in all, before a task is a dead letter. Default: the queue's setting."""
    backoff: BackoffPolicy | None
    """The waits between attempts. Default: the queue's setting."""
    visibility_timeout: Duration | None
    """The length of a lease. Default: the queue's setting."""
    expires_in: Duration | None
    """Fail a task, with code ``expired``, if it is waiting after this time."""


class Binding(Model):
    """Messages of a topic that become tasks of a queue."""

    topic: str
    queue: str
    filter: str | Mapping[str, Any] | None = None
    """A pattern of keys, or the values of some fields; ``None``: every message."""
    bound_at: datetime
    max_attempts: int = Field(ge=1)
    backoff: BackoffPolicy
    priority: int = 0
    delay: timedelta | None = None
    visibility_timeout: timedelta | None = None
    expires_in: timedelta | None = None

    def accepts(self, key: str, body: Any) -> bool:
        """Decide whether a message becomes a task of the queue.

        Args:
            key: The routing key of the message.
            body: Its body, as it is stored.

        Returns:
            Whether it does.
        """
        if isinstance(self.filter, Mapping):
            return all(_has(body, path, value) for path, value in self.filter.items())
        return self.filter is None or key_matches(self.filter, key)


def check_filter(given: Any) -> MessageFilter:
    """Reject a filter that could never match, or that looks like an operator of MongoDB."""
    if given is None:
        return None
    if isinstance(given, str):
        return _check_pattern(given)
    if not isinstance(given, Mapping) or not 0 < len(given) <= MOST_CONDITIONS:
        instead = (
            f"give a pattern of keys such as 'shop.*', or a dict of 1 to {MOST_CONDITIONS} fields "
            "and their values"
        )
        raise invalid_argument("filter", given, instead)
    for path, value in given.items():
        _check_condition(given, path, value)
    return {path: _as_stored(value) for path, value in given.items()}


def _check_pattern(pattern: str) -> str:
    words = pattern.split(".")
    whole = all(word in {ONE_WORD, ANY_WORDS} or not {*"*#"} & {*word} for word in words)
    if len(pattern) > LONGEST_PATTERN or not whole:
        instead = (
            f"give at most {LONGEST_PATTERN} characters: words with dots between them, '*' for any "
            "one word, '#' for any number of words"
        )
        raise invalid_argument("filter", pattern, instead)
    return pattern


def _check_condition(given: Mapping[Any, Any], path: Any, value: Any) -> None:
    parts = path.split(".") if isinstance(path, str) else [""]
    if not all(parts) or len(path) > LONGEST_PATTERN or any(part[0] == "$" for part in parts):
        instead = f"{shorten(path)} is no field of a message: give names such as 'order.country'"
        raise invalid_argument("filter", given, instead)
    short = not isinstance(value, str) or len(value) <= LONGEST_VALUE
    # A number that equals nothing, or that BSON has no type for.
    impossible = (isinstance(value, float) and math.isnan(value)) or (
        isinstance(value, int) and not -(2**63) <= value < 2**63
    )
    if type(value) not in SCALARS or not short or impossible:
        instead = (
            f"{path} is compared with one value: a string of at most {LONGEST_VALUE} characters, "
            "a number, a boolean, a date, an id or None"
        )
        raise invalid_argument("filter", given, instead)


def _as_stored(value: Any) -> Any:
    return whole_milliseconds(as_utc(value)) if isinstance(value, datetime) else value


def key_matches(pattern: str, key: str) -> bool:
    """Return whether a key matches a pattern: ``*`` is one word, ``#`` any number of words."""
    words = key.split(".") if key else []
    # How many words of the key the pattern may have matched so far.
    reached = {0}
    for word in pattern.split(".") if pattern else []:
        if word == ANY_WORDS:
            reached = set(range(min(reached), len(words) + 1)) if reached else reached
        else:
            reached = {n + 1 for n in reached if n < len(words) and word in {ONE_WORD, words[n]}}
    return len(words) in reached


def _has(body: Any, path: str, value: Any) -> bool:
    """Return whether a body has a value in a field, which must exist."""
    for part in path.split("."):
        if not isinstance(body, Mapping) or part not in body:
            return False
        body = body[part]
    # True is no 1 in MongoDB.
    return isinstance(body, bool) is isinstance(value, bool) and bool(body == value)
