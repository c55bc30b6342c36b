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
