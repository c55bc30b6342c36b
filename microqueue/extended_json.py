"""BSON values as JSON text and back: plain JSON where it has a word for them, else extended."""

from __future__ import annotations

import json
from datetime import UTC
from typing import Any

from bson import json_util
from bson.binary import UuidRepresentation
from bson.json_util import JSONMode, JSONOptions

from microqueue.payload import finite_number

RELAXED: JSONOptions = JSONOptions(
    json_mode=JSONMode.RELAXED,
    tz_aware=True,
    tzinfo=UTC,
    uuid_representation=UuidRepresentation.STANDARD,
)
CANONICAL: JSONOptions = JSONOptions(
    json_mode=JSONMode.CANONICAL,
    tz_aware=True,
    tzinfo=UTC,
    uuid_representation=UuidRepresentation.STANDARD,
)
EXTENDED_MARKER = '"$'


def to_json(value: Any) -> str:
    """Write a value for people and programs: numbers, texts, lists and objects are plain."""
    try:
        return json.dumps(value, default=_extended, ensure_ascii=False, allow_nan=False)
    except ValueError:  # Not a number, or infinite.
        return json_util.dumps(value, json_options=RELAXED, ensure_ascii=False)


def to_canonical_json(value: Any) -> str:
    """Write a value so that it comes back as the very type that it is."""
    return json_util.dumps(value, json_options=CANONICAL)


def from_json(text: str) -> Any:
    """Read either of them, or any other JSON; a number that is too large is a ValueError."""
    if EXTENDED_MARKER not in text:
        return json.loads(text, parse_float=finite_number)
    return json_util.loads(text, json_options=RELAXED, parse_float=finite_number)


def _extended(value: Any) -> Any:
    return json_util.default(value, json_options=RELAXED)
