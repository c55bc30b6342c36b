"""Masking: keep secrets out of messages, pages and logs. The one home for it.

The ``without_...`` functions mask credentials in addresses, for errors and logs. A :class:`Masker`
masks the values of keys such as ``password`` in payloads, errors and whole tasks, for people.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from microqueue.errors import InvalidArgument
from microqueue.model import changed, shorten
from microqueue.task import Task, TaskError

MASK = "•••"
"""What is shown for a masked value."""
REDACTED_KEYS = (
    r"pass(word|wd|phrase|code|key)|secret(?!ar)|token(?!i[sz])"
    r"|(^|[-_]|(?-i:(?<=[a-z0-9])(?=[A-Z])))(pass|pwd|jwt)s?$"
    r"|(api|access|private|signing|encryption)[-_]?key|authorization|cookie|credential|^bearer$"
    r"|session[-_]?id|^cvv$|^cvc$|card[-_]?number|^pin$|^iban$|^ssn$"
)
"""Keys whose values are masked by default, in any case."""
NAMES = frozenset({"name", "key"})
"""Keys that name the ``value`` beside them."""
QUOTE = r"\\*+['\"]?"
SEPARATOR = r"\s*+(?:=>|==?|:)\s*+"
NAME = re.compile(
    rf"(?<![\w-])(?:(?:(?:name|key){QUOTE}{SEPARATOR}{QUOTE}(?P<pair>[\w-]++){QUOTE}\s*+,\s*+{QUOTE}"
    rf"value|-{{0,2}}+(?P<name>[\w-]++)){QUOTE}{SEPARATOR}"
    rf"|--(?P<option>[\w-]++)(?:(?P<space>[ \t]++)|{QUOTE}\s*+,\s*+)(?!{QUOTE}--))",
    re.IGNORECASE,
)
"""A name in a text, up to its value: ``password=``, ``"token": ``, ``name="x", value=``.

Or an option of a command line, as in ``--password x`` and ``['--password', 'x']``.
"""
WORD = re.compile(r"(?:\\{1,4}+ |[^\s'\"])++")
"""A word of a command line."""
OPENING = re.compile(r"[bruf]{0,2}(\\*+)('''|\"\"\"|''(?=\w)|\"\"(?=\w)|'|\")", re.IGNORECASE)
"""The quote that starts a value, perhaps escaped, and after a prefix, as in ``b'``."""
BRACKET = re.compile(r"[\w.]*+[\[({]")
"""The bracket that starts a value, as in ``['``, or ``SecretStr(``."""
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
FRAME = re.compile(r"^( *+)File \".*+(?:\n\1  .*+)*+", re.MULTILINE)
"""A frame of a traceback: where it is, and the lines of its source."""
HALF_USER = re.compile(r"//[^/:@\[]*+:(?!\d{1,5}(?:[/?#,;)\]}>]|\.?\Z))")
"""A user of an address whose ``@`` is missing: what follows the colon is not a port."""
WORD_ENDS = re.compile(r"[\s'\"]")
KEY_BEGINS = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----")
KEY_ENDS = re.compile(r"-----END [A-Z0-9 ]{0,40}-----")


# Credentials in addresses


def without_user(text: str, mask: str = "***") -> str:
    """Mask users and passwords of URIs in a text, in linear time.

    So is the beginning of a password at the end of the text, which may have been cut.
    """
    lines = [_line_without_user(line, mask) for line in text.split("\n")]
    word = max(map(lines[-1].rfind, " \t'\"")) + 1
    if half := HALF_USER.search(lines[-1], word):
        lines[-1] = f"{lines[-1][: half.start() + 2]}{mask}"
    return "\n".join(lines)


def _line_without_user(line: str, mask: str) -> str:
    # To the last @ of the line: an unescaped password may have any character.
    start, end = line.find("//"), line.rfind("@")
    return line if start < 0 or end < start + 2 else f"{line[: start + 2]}{mask}{line[end:]}"


def place_to_cut(text: str, most: int) -> int:
    """Return where to cut a text, at ``most`` or before.

    A user and password is left out rather than cut: without its ``@``, it would not be masked.
    """
    word = max((found.end() for found in WORD_ENDS.finditer(text, 0, most)), default=0)
    slashes = text.find("//", word, most)
    if slashes < 0:
        return most
    following = WORD_ENDS.search(text, most)
    at = text.find("@", most, following.start() if following else len(text))
    return most if at < 0 else slashes + 2


def without_password(text: str) -> str:
    """Mask users, passwords and tokens of URIs in a text, for a page or log."""
    text = without_user(text)
    return re.sub(r"(?i)(pass(?:word|phrase)=|session_token:)[^&,\s'\"]*", r"\1***", text)


def without_mongodb_user(text: str) -> str:
    """Mask users and passwords in addresses of MongoDB only."""
    return re.sub(r"(mongodb(?:\+srv)?://)[^\s'\"]*@", r"\1***@", text)


def without_fragments(text: str) -> str:
    """Mask also what is before any ``@``: the driver may quote half of a malformed URI."""
    return re.sub(r"[^\s'\"]+@", "***@", without_password(text))


# Secrets in values, texts and tasks


class Masker:
    """Masks the values of names that match a pattern; without one, shows everything."""

    def __init__(self, pattern: str | None = REDACTED_KEYS) -> None:
        try:
            self._secret = None if pattern is None else re.compile(pattern, re.IGNORECASE)
        except re.error as exc:
            raise InvalidArgument(
                f"redact={shorten(pattern)} is not valid: {exc}", argument="redact", value=pattern
            ) from exc

    def mask(self, value: Any) -> Any:
        """Return a value with its secrets masked, at any depth."""
        if self._secret is None:
            return value
        if isinstance(value, Mapping):
            secret = self._names_a_secret(value)
            return {
                key: MASK
                if self._secret.search(str(key)) or (secret and str(key).lower() == "value")
                else self.mask(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mask(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """Mask private keys, users of addresses, and values after a secret name, in a text."""
        return text if self._secret is None else mask_text(text, self._secret)

    def task(self, task: Task[Any]) -> Task[Any]:
        """Return a task with its secrets masked.

        They are in its payload, headers, result, progress and errors. Its lease token is one.
        """
        if self._secret is None:
            return task
        lease, progress = task.lease, task.progress
        return changed(
            task,
            payload=self.mask(task.payload),
            headers=self.mask(task.headers),
            result=self.mask(task.result),
            error=self._error(task.error),
            history=tuple(changed(one, error=self._error(one.error)) for one in task.history),
            lease=None if lease is None else changed(lease, token=MASK),
            progress=None
            if progress is None
            else changed(progress, message=self.mask(progress.message)),
        )

    def _error(self, error: TaskError | None) -> TaskError | None:
        if error is None:
            return None
        # The message is null where a document was edited manually.
        message = None if error.message is None else self.text(str(error.message))
        traceback = None if error.traceback is None else self.traceback(str(error.traceback))
        return changed(error, message=message, traceback=traceback)

    def traceback(self, text: str) -> str:
        """Mask secrets in a traceback, frame by frame.

        A bracket that the source line of a frame does not close must not hide what follows.
        """
        shown, position = [], 0
        for frame in FRAME.finditer(text):
            shown += [self.text(text[position : frame.start()]), self.text(frame[0])]
            position = frame.end()
        return "".join([*shown, self.text(text[position:])])

    def _names_a_secret(self, value: Mapping[Any, Any]) -> bool:
        """Return whether it is like ``{"name": "Authorization", "value": ...}``."""
        return self._secret is not None and any(
            isinstance(item, str) and str(key).lower() in NAMES and self._secret.search(item)
            for key, item in value.items()
        )


def mask_text(text: str, secret: re.Pattern[str]) -> str:
    """Mask private keys, users of addresses, and values after a name that matches.

    A short option, such as ``-u``, is no name: its value is not masked.
    """
    text = without_user(_without_keys(text), MASK)
    shown, position = [], 0
    for name in NAME.finditer(text):
        group = "pair" if name["pair"] else "name" if name["name"] else "option"
        word = name[group]
        if name.start() < position or not secret.search(word):
            continue
        start, end = _value(text, name.end(), WORD if name["space"] else None)
        if HEADER.search(word) and text[name.end(group)] not in "'\"\\":
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


def _value(text: str, start: int, word: re.Pattern[str] | None = None) -> tuple[int, int]:
    """Return the start and end of the value here; without an end, it is the rest of the line.

    With ``word``, a value that is not quoted is such a word.
    """
    if opening := OPENING.match(text, start):
        return opening.end(), _end_of_quoted(text, opening)
    if word is not None:
        found = word.match(text, start)
        return start, found.end() if found else start
    if bracket := BRACKET.match(text, start):
        return start, _end_of_bracket(text, bracket.end())
    found = PLAIN.match(text, start)
    return start, found.end() if found else start


def _end_of_quoted(text: str, opening: re.Match[str]) -> int:
    slashes, quote = len(opening[1]), opening[2]
    for found in re.compile(rf"(?<!\\)(\\*+){quote}").finditer(text, opening.end()):
        # A quote inside the value has more backslashes, and so has a value that ends with one.
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
