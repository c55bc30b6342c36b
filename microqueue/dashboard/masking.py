"""Mask secrets in texts: messages, notes, whatever somebody wrote or a program printed.

Each text is read from left to right once, so that a long one takes no longer than its length.
"""

from __future__ import annotations

import re

from microqueue.redaction import MASK, without_user

QUOTE = r"\\*+['\"]?"
SEPARATOR = r"\s*+(?:=>|==?|:)\s*+"
NAME = re.compile(
    rf"(?<![\w-])(?:(?:name|key){QUOTE}{SEPARATOR}{QUOTE}(?P<pair>[\w-]++){QUOTE}\s*+,\s*+{QUOTE}"
    rf"value|(?P<name>[\w-]++)){QUOTE}{SEPARATOR}",
    re.IGNORECASE,
)
"""A name in a text, up to its value: ``password=``, ``"token": ``, ``name="x", value=``."""
OPENING = re.compile(r"[bruf]{0,2}(\\*+)('''|\"\"\"|''(?=\w)|\"\"(?=\w)|'|\")", re.IGNORECASE)
"""The quote that a value begins with, maybe after a prefix, as in ``b'``, and escaped itself."""
BRACKET = re.compile(r"[\w.]*+[\[({]")
"""The bracket that a value begins with, as in ``['``, or ``SecretStr(``."""
INSIDE = re.compile(
    r"'(?:[^'\\]|\\.)*+(?:'|\Z)|\"(?:[^\"\\]|\\.)*+(?:\"|\Z)|[\[({]|[\])}]", re.DOTALL
)
TAIL = re.compile(r"[^\s'\",;&}\])]*+")
PLAIN = re.compile(
    r"(?:(?:bearer|basic|token|apikey|digest|!!?\w+)\s++)?[^\s'\",;&}]+", re.IGNORECASE
)
LINE = re.compile(r"[^\r\n]+")
HEADER = re.compile(r"authorization|cookie", re.IGNORECASE)
"""Names whose values have many words, up to the end of the line."""
KEY_BEGINS = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----")
KEY_ENDS = re.compile(r"-----END [A-Z0-9 ]{0,40}-----")


def mask_text(text: str, telling: re.Pattern[str]) -> str:
    """Mask private keys, users of addresses, and values that follow a telling name."""
    text = without_user(_without_keys(text), MASK)
    shown, position = [], 0
    for name in NAME.finditer(text):
        word = name["pair"] or name["name"]
        if name.start() < position or not telling.search(word):
            continue
        start, end = _value(text, name.end())
        if HEADER.search(word) and text[name.end(name.lastgroup or 0)] not in "'\"\\":
            start, end = name.end(), max(end, _end_of_line(text, name.end()))
        if end > start:
            shown += [text[position:start], MASK]
            position = end
    return "".join(shown) + text[position:]


def _without_keys(text: str) -> str:
    shown, position = [], 0
    while begin := KEY_BEGINS.search(text, position):
        shown += [text[position : begin.start()], MASK]
        end = KEY_ENDS.search(text, begin.end())
        position = end.end() if end else len(text)
    return "".join(shown) + text[position:]


def _value(text: str, start: int) -> tuple[int, int]:
    """Say where the value that begins here is; what has no end goes on to the end of its line."""
    if opening := OPENING.match(text, start):
        return opening.end(), _end_of_quoted(text, opening)
    if bracket := BRACKET.match(text, start):
        return start, _end_of_bracket(text, bracket.end())
    found = PLAIN.match(text, start)
    return start, found.end() if found else start


def _end_of_quoted(text: str, opening: re.Match[str]) -> int:
    slashes, quote = len(opening[1]), opening[2]
    for found in re.compile(rf"(?<!\\)(\\*+){quote}").finditer(text, opening.end()):
        # A quote inside of the value has more of them; so has what ends with such a character.
        if len(found[1]) % (2 * slashes + 2) == slashes:
            return found.end() - len(quote) - slashes
    return _end_of_line(text, opening.end())


def _end_of_bracket(text: str, start: int) -> int:
    depth = 1
    for found in INSIDE.finditer(text, start):
        depth += (found[0] in "[({") - (found[0] in "])}")
        if not depth:
            tail = TAIL.match(text, found.end())
            return tail.end() if tail else found.end()
    return len(text)


def _end_of_line(text: str, start: int) -> int:
    found = LINE.match(text, start)
    return found.end() if found else start
