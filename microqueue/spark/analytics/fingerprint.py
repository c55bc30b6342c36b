"""Group error messages of the same kind: mask numbers, ids, paths and quoted text.

The rules use only syntax that Python and Java share, so a message has the same pattern and the
same fingerprint wherever it is computed.

They differ from those of :mod:`microqueue.operations.matching` on purpose: those must let MongoDB
find a group by the beginning of its messages, while these are stored in triage files and commands
as fingerprints, which must never change.
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

# No \b, which differs in Java, and no repeated groups, which overflow the stack of Java.
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
    """Return a message with everything masked that varies within a kind.

    >>> normalise("order 1234 of 'ada' not found in /var/data/7.csv after 30s")
    'order <n> of <text> not found in <path> after <n>s'
    """
    text = (message or "")[:LONGEST_MESSAGE]
    for pattern, mask in _COMPILED:
        text = pattern.sub(mask, text)
    return text.strip(" ")[:LONGEST_PATTERN]


def fingerprint(queue: str | None, code: str | None, message: str | None) -> str:
    """Return the short, stable name of a kind of error in a queue."""
    kind = "\n".join([queue or "", code or "", normalise(message)])
    return hashlib.sha256(kind.encode()).hexdigest()[:FINGERPRINT_LENGTH]


def normalised_column(message: Column) -> Column:
    """Return :func:`normalise` as a Spark expression."""
    from pyspark.sql import functions as f  # noqa: PLC0415 (the functions above need no Spark)

    text: Any = f.substring(f.coalesce(message, f.lit("")), 1, LONGEST_MESSAGE)
    for pattern, mask in RULES:
        text = f.regexp_replace(text, pattern, mask)
    return f.substring(f.trim(text), 1, LONGEST_PATTERN)


def fingerprint_column(queue: Column, code: Column, message: Column) -> Column:
    """Return :func:`fingerprint` as a Spark expression."""
    from pyspark.sql import functions as f  # noqa: PLC0415 (as above)

    parts = [f.coalesce(queue, f.lit("")), f.coalesce(code, f.lit("")), normalised_column(message)]
    kind = f.concat_ws("\n", *parts)
    return f.substring(f.sha2(kind.cast("binary"), 256), 1, FINGERPRINT_LENGTH)


def literals(pattern: str) -> list[str]:
    """Return the parts of a pattern that are in every message of its kind, the longest first.

    >>> literals("order <n> of <text> not found")
    ['not found', 'order', 'of']
    """
    pieces = [piece.strip() for piece in re.split(r"<[a-z]+>", pattern)]
    return sorted((piece for piece in pieces if piece), key=len, reverse=True)
