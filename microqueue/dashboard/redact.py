"""Keep secrets off the page: values of telling names are masked, and put back by an edit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from microqueue.errors import InvalidArgument
from microqueue.redaction import MASK, without_user

TELLING_KEYS = (
    r"pass(word|wd|phrase|code)|(^|[-_])(pass|pwd)$|secret|token|api[-_]?key|authorization|cookie"
    r"|credential|private[-_]?key|session[-_]?id|^cvv$|^cvc$|card[-_]?number|^pin$|^iban$|^ssn$"
)
"""Keys whose values are masked by default, in any case."""

NAME = re.compile(r"(?<![\w-])([\w-]+)\\?['\"]?\s*[=:]\s*\\?['\"]?")
"""A name in a text, up to its value: ``password=``, ``"token": "``."""
VALUE = re.compile(
    r"(?<=')[^'\n]+|(?<=\")[^\"\n]+|(?:(?:bearer|basic)\s+)?[^\s'\",;&}]+", re.IGNORECASE
)


class Redactor:
    """Masks the values of names that match a pattern; without one, shows everything."""

    def __init__(self, pattern: str | None) -> None:
        try:
            self._secret = None if pattern is None else re.compile(pattern, re.IGNORECASE)
        except re.error as exc:
            raise InvalidArgument(
                f"redact={pattern!r} is not valid: {exc}", argument="redact", value=pattern
            ) from exc

    def mask(self, value: Any) -> Any:
        """Give a value with what is secret in it masked, however deep."""
        if self._secret is None:
            return value
        if isinstance(value, Mapping):
            return {
                key: MASK if self._secret.search(str(key)) else self.mask(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mask(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """Mask users of addresses, and values that follow a telling name, in a text."""
        if self._secret is None:
            return text
        text = without_user(text, MASK)
        shown, position = "", 0
        for name in NAME.finditer(text):
            if name.start() < position or not self._secret.search(name[1]):
                continue
            if value := VALUE.match(text, name.end()):
                shown += text[position : value.start()] + MASK
                position = value.end()
        return shown + text[position:]

    def restore(self, edited: Any, stored: Any, *, path: str = "payload") -> Any:
        """Put back what was masked when a value was shown, and left as it was by the edit."""
        if self._secret is None:
            return edited
        if isinstance(edited, Mapping):
            known = stored if isinstance(stored, Mapping) else {}
            return {
                key: self.restore(item, known.get(key), path=f"{path}.{key}")
                for key, item in edited.items()
            }
        if isinstance(edited, list):
            items = stored if isinstance(stored, list) else []
            items = [*items, *[None] * (len(edited) - len(items))]
            return [
                self.restore(item, items[place], path=f"{path}.{place}")
                for place, item in enumerate(edited)
            ]
        if not isinstance(edited, str) or MASK not in edited:
            return edited
        if stored is None or edited not in (MASK, self.mask(stored)):
            raise InvalidArgument(
                f"{path} holds {MASK!r}, which stands for a stored value, and there is none; "
                "leave the text as it was shown, or write all of it",
                argument=path,
            )
        return stored
