"""Payloads as JSON that keeps MongoDB's types: its relaxed extended JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bson import json_util
from bson.binary import UuidRepresentation
from bson.errors import BSONError

from microqueue.errors import InvalidArgument

EXTENDED = json_util.JSONOptions(
    json_mode=json_util.JSONMode.RELAXED,
    uuid_representation=UuidRepresentation.STANDARD,
    tz_aware=True,
)
LARGEST_EXACT = 2**53 - 1
"""Beyond it, a browser rounds integers."""


def to_json(value: Any) -> Any:
    """Write a value as relaxed extended JSON: plain where JSON has the type."""
    return json.loads(json_util.dumps(value, json_options=EXTENDED))


def to_exact_json(value: Any) -> Any:
    """Write a value so that a browser gives it back as it is.

    As :func:`to_json`, but numbers that it would round, or take for integers, are written out:
    ``{"$numberLong": "9007199254740993"}``, ``{"$numberDouble": "10.0"}``.
    """
    return to_json(_written_out(value))


def from_json(value: Any, *, name: str = "payload") -> Any:
    """Read extended JSON: ``{"$date": ...}`` becomes a date again."""
    try:
        return json_util.loads(json.dumps(value), json_options=EXTENDED)
    except (ValueError, TypeError, KeyError, BSONError, OverflowError, RecursionError) as exc:
        raise InvalidArgument(f"{name} is not valid extended JSON: {exc}", argument=name) from exc


def _written_out(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _written_out(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_written_out(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return {"$numberDouble": repr(value)}
    if isinstance(value, int) and abs(value) > LARGEST_EXACT:
        return {"$numberLong": str(int(value))}
    return value
