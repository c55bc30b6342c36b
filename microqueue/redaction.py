"""Keep passwords out of messages, screens and logs."""

from __future__ import annotations

import re

MASK = "•••"
"""What stands for a value that is not shown."""


def without_user(text: str, mask: str = "***") -> str:
    """Mask users and passwords of URIs in a text, in a time that grows with its length only."""
    return "\n".join(_line_without_user(line, mask) for line in text.split("\n"))


def _line_without_user(line: str, mask: str) -> str:
    # To the last @ of the line: a password that was not escaped may hold any character.
    start, end = line.find("//"), line.rfind("@")
    return line if start < 0 or end < start + 2 else f"{line[: start + 2]}{mask}{line[end:]}"


def without_password(text: str) -> str:
    """Mask users, passwords and tokens of URIs in a text: they must not reach a screen or log."""
    text = without_user(text)
    return re.sub(r"(?i)(pass(?:word|phrase)=|session_token:)[^&,\s'\"]*", r"\1***", text)


def without_mongodb_user(text: str) -> str:
    """Mask users and passwords in addresses of MongoDB alone, and leave all else as it is."""
    return re.sub(r"(mongodb(?:\+srv)?://)[^\s'\"]*@", r"\1***@", text)


def without_fragments(text: str) -> str:
    """Mask also what stands before any ``@``: the driver may quote half of a broken URI."""
    return re.sub(r"[^\s'\"]+@", "***@", without_password(text))
