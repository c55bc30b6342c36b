"""Convert BSON values to JSON text and back.

Values that JSON has a type for stay plain. All others use MongoDB's Extended JSON, such as
``{"$date": ...}``.
"""

from __future__ import annotations

import json
from datetime import UTC
from typing import Any

from bson import json_util
from bson.binary import UuidRepresentation
from bson.json_util import JSONMode, JSONOptions

from microqueue.payload import finite_number


def _options(mode: int) -> JSONOptions:
    return JSONOptions(
        json_mode=mode,
        tz_aware=True,
        tzinfo=UTC,
        uuid_representation=UuidRepresentation.STANDARD,
    )


RELAXED = _options(JSONMode.RELAXED)
CANONICAL = _options(JSONMode.CANONICAL)
EXTENDED_MARKER = '"$'


def to_json(value: Any) -> str:
    """Return a value as readable JSON: numbers, strings, arrays and objects stay plain."""
    try:
        return json.dumps(value, default=_extended, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN or infinity.
        return json_util.dumps(value, json_options=RELAXED, ensure_ascii=False)


def to_canonical_json(value: Any) -> str:
    """Return a value as JSON that keeps its exact BSON type."""
    return json_util.dumps(value, json_options=CANONICAL)


def from_json(text: str) -> Any:
    """Parse plain or Extended JSON.

    Raises:
        ValueError: the text is not JSON, or a number in it is too large for a double.
    """
    if EXTENDED_MARKER not in text:
        return json.loads(text, parse_float=finite_number)
    return json_util.loads(text, json_options=RELAXED, parse_float=finite_number)


def _extended(value: Any) -> Any:
    return json_util.default(value, json_options=RELAXED)
