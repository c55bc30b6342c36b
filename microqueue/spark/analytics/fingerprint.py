"""Fold error messages that say the same: numbers, ids, paths and quoted text are masked.

The rules are written once, in the syntax that Python and Spark share, so that a message has
the same pattern and the same fingerprint wherever it is computed.

They mask more than those of :mod:`microqueue.operations.search`, which serve to find the
letters of a group in MongoDB by what their messages begin with. These only have to tell kinds
of errors apart, for good: fingerprints are kept in files, so another rule makes other kinds.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column

LONGEST_MESSAGE = 1000
LONGEST_PATTERN = 300
FINGERPRINT_LENGTH = 12

# No \b, which Java reads otherwise, and no repeated groups, which overflow Java's stack.
START, END = r"(?<![A-Za-z0-9_])", r"(?![A-Za-z0-9_])"
RULES: tuple[tuple[str, str], ...] = (
    (r'"[^"]*"', "<text>"),
    (r"(?<![A-Za-z0-9])'[^']*'(?![A-Za-z0-9])", "<text>"),
    (r"`[^`]*`", "<text>"),
    (START + r"[A-Za-z][A-Za-z0-9+.-]*://[^\s,;)>\]]+", "<url>"),
    (r"[A-Za-z0-9_.+-]+@[A-Za-z0-9-]+\.[A-Za-z0-9.-]*[A-Za-z0-9]", "<email>"),
    (START + r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}[0-9:.]*[+Z]?[0-9:]*", "<time>"),
    (
        START
        + r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
        + END,
        "<id>",
    ),
    (r"(?<![A-Za-z0-9_<])[A-Za-z]:\\[^\s:*?\"<>|,;]+", "<path>"),
    (r"(?<![A-Za-z0-9_/<>])[~.]{0,2}/[A-Za-z0-9_.@%+~/=-]+", "<path>"),
    (START + r"0[xX][0-9a-fA-F]+" + END, "<hex>"),
    (START + r"(?=[0-9a-fA-F]*[0-9])(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,}" + END, "<hex>"),
    (
        START
        + r"(?=[A-Za-z0-9_-]*[0-9][A-Za-z0-9_-]*[0-9][A-Za-z0-9_-]*[0-9])"
        + r"(?=[A-Za-z0-9_-]*[A-Za-z])[A-Za-z0-9_-]{12,}"
        + END,
        "<id>",
    ),
    (START + r"[0-9](?:[0-9.,:]*[0-9])?(?:[eE][+-]?[0-9]+)?", "<n>"),
    (r"[0-9]{3,}|(?<![A-Za-z0-9])[0-9]+", "<n>"),
    (r"\s+", " "),
)
_COMPILED = [(re.compile(pattern, re.ASCII), mask) for pattern, mask in RULES]


def normalise(message: str | None) -> str:
    """Mask what differs between two errors of one kind.

    >>> normalise("order 1234 of 'ada' not found in /var/data/7.csv after 30s")
    'order <n> of <text> not found in <path> after <n>s'
    """
    text = (message or "")[:LONGEST_MESSAGE]
    for pattern, mask in _COMPILED:
        text = pattern.sub(mask, text)
    return text.strip(" ")[:LONGEST_PATTERN]


def fingerprint(queue: str | None, code: str | None, message: str | None) -> str:
    """Name a kind of error in a queue by a few characters that stay the same."""
    kind = "\n".join([queue or "", code or "", normalise(message)])
    return hashlib.sha256(kind.encode()).hexdigest()[:FINGERPRINT_LENGTH]


def normalised(message: Column) -> Column:
    """Do what :func:`normalise` does, as a Spark expression."""
    from pyspark.sql import functions as f  # noqa: PLC0415 (the pure half needs no Spark)

    text: Any = f.substring(f.coalesce(message, f.lit("")), 1, LONGEST_MESSAGE)
    for pattern, mask in RULES:
        text = f.regexp_replace(text, pattern, mask)
    return f.substring(f.trim(text), 1, LONGEST_PATTERN)


def fingerprinted(queue: Column, code: Column, message: Column) -> Column:
    """Do what :func:`fingerprint` does, as a Spark expression."""
    from pyspark.sql import functions as f  # noqa: PLC0415 (as above)

    parts = [f.coalesce(queue, f.lit("")), f.coalesce(code, f.lit("")), normalised(message)]
    kind = f.concat_ws("\n", *parts)
    return f.substring(f.sha2(kind.cast("binary"), 256), 1, FINGERPRINT_LENGTH)


def literals(pattern: str) -> list[str]:
    """Give the pieces of a pattern that stand in every message of its kind, the longest first.

    >>> literals("order <n> of <text> not found")
    ['not found', 'order', 'of']
    """
    pieces = [piece.strip() for piece in re.split(r"<[a-z]+>", pattern)]
    return sorted((piece for piece in pieces if piece), key=len, reverse=True)
