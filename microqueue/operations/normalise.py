"""Normalise error messages, so that those that differ only in numbers and names are one group.

``order 17 timed out`` and ``order 4 timed out`` both become ``order <n> timed out``. A group's
message is turned back into the pattern of all messages that it stands for.
"""

from __future__ import annotations

import re

from microqueue.redaction import MASK

LONGEST_MESSAGE = 300
"""Longer messages are cut in a group; it stands for all that begin like it."""

KINDS = {
    "<uuid>": r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b",
    "<hex>": r"\b(?:0x[0-9a-fA-F]+|[0-9a-fA-F]{16,})\b",
    "<n>": r"\d+",
    "<text>": r"(?:'[^'\n]*'|\"[^\"\n]*\")",
}
MASKED = {
    f"//{MASK}@": r"//.*@",
    f"'{MASK}": r"'[^'\n]+",
    f'"{MASK}': r'"[^"\n]+',
    MASK: r"(?:(?i:bearer|basic)\s+)?[^\s'\",;&}]+",
}
"""What a mask stands for, where messages were masked before they were normalised."""
_ANY = re.compile("|".join(f"({pattern})" for pattern in KINDS.values()))
_MEANINGS = {**KINDS, **MASKED}
_PLACEHOLDER = re.compile("|".join(re.escape(name) for name in _MEANINGS))


def normalise(message: str) -> str:
    """Replace numbers, ids and quoted texts by what they are, and cut what is long."""
    names = list(KINDS)
    text = _ANY.sub(lambda found: names[(found.lastindex or 1) - 1], message)
    return text[:LONGEST_MESSAGE]


def messages_like(group: str) -> str:
    """Write the pattern of the messages that normalise to ``group``."""
    pattern = ""
    position = 0
    for found in _PLACEHOLDER.finditer(group):
        name = found.group()  # It may also stand in the message as it is.
        pattern += re.escape(group[position : found.start()]) + f"(?:{_MEANINGS[name]}|{name})"
        position = found.end()
    pattern += re.escape(group[position:])
    return f"^{pattern}" if len(group) >= LONGEST_MESSAGE else f"^{pattern}$"
