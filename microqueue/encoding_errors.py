"""Encoding errors: find the value for which BSON rejects a document, so an error can name it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import bson
from bson.codec_options import CodecOptions
from bson.errors import BSONError

from microqueue.model import shorten

ENCODER_ERRORS = (BSONError, OverflowError, TypeError, ValueError, RecursionError)
"""What the encoder raises for values that it cannot write."""
DEEPEST = 200
"""In levels. A list that contains itself has no end."""
LONGEST_REASON = 200


def explain(document: Mapping[str, Any], codec_options: CodecOptions[Any], error: Exception) -> str:
    """Return which value cannot be stored, and why; if none is found, only why."""
    for path, part, value in _parts(document):
        try:
            bson.encode(part, codec_options=codec_options)
        except ENCODER_ERRORS as exc:
            return f"{path}={shorten(value)}: {_reason(exc)}"
    return _reason(error)


def _parts(
    container: Any, path: str = "", depth: int = 1
) -> Iterator[tuple[str, dict[Any, Any], Any]]:
    """Yield each value in order: its path, a document with only this value, and the value.

    For a value that contains others, the document has the key only, which may be the cause.
    """
    named = isinstance(container, Mapping)
    for key, value in container.items() if named else enumerate(container):
        place = f"{path}.{key}" if path else f"{key}"
        name = key if named else str(key)
        if isinstance(value, Mapping | list | tuple) and depth < DEEPEST:
            yield place, {name: None}, value
            yield from _parts(value, place, depth + 1)
        else:
            yield place, {name: value}, value


def _reason(exc: Exception) -> str:
    """Return the encoder's reason; for malformed text, with the characters at fault."""
    whole = isinstance(exc, UnicodeError) or not exc.args
    text = str(exc) if whole else str(exc.args[0])
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"
