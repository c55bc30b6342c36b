"""The beginning of a payload as masked JSON, made of as little of it as that takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from bson import json_util

from microqueue.masking import MASK

LONGEST = 200
HEAD = 2000
"""Of a longer text only the beginning is looked at, unless there is something to mask in it."""
MOST_SHOWN = 50
"""So many names are longer than a preview, whatever they stand for."""


class Masking(Protocol):
    """What masks secrets."""

    def mask(self, value: Any) -> Any:
        """Give a value with what is secret in it masked."""


def preview(value: Any, masking: Masking, options: json_util.JSONOptions) -> str:
    """Write the first 200 characters of a value."""
    text = ""
    for piece in _Writer(masking, options).pieces(value):
        text += piece
        if len(text) > LONGEST:
            return f"{text[: LONGEST - 1]}…"
    return text


class _Writer:
    def __init__(self, masking: Masking, options: json_util.JSONOptions) -> None:
        self._mask = masking.mask
        self._options = options

    def pieces(self, value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            yield from self._of_mapping(value)
        elif isinstance(value, list | tuple):
            yield "["
            for place, item in enumerate(value):
                yield ", " if place else ""
                yield from self._of_item(item, _head(item), self._mask([_head(item)])[0])
            yield "]"
        else:
            yield from self._of_item(value, _head(value), self._mask(_head(value)))

    def _of_mapping(self, value: Mapping[Any, Any]) -> Iterator[str]:
        # What is masked may depend on what stands beside it.
        heads = {
            key: _head(item, HEAD if place < MOST_SHOWN else LONGEST)
            for place, (key, item) in enumerate(value.items())
        }
        shown = self._mask(heads)
        yield "{"
        for place, (key, item) in enumerate(value.items()):
            yield f"{', ' if place else ''}{json.dumps(key, ensure_ascii=False)}: "
            yield from self._of_item(item, heads[key], shown[key])
        yield "}"

    def _of_item(self, item: Any, head: Any, shown: Any) -> Iterator[str]:
        if isinstance(item, Mapping | list | tuple) and shown == head:
            if item:
                yield from self.pieces(item)
                return
        elif isinstance(item, str) and shown not in (head, MASK):
            shown = self._mask(item)  # What is masked may end far behind the beginning.
        plain = json.loads(json_util.dumps(shown, json_options=self._options))
        yield json.dumps(plain, ensure_ascii=False)


def _head(item: Any, longest: int = HEAD) -> Any:
    """Give the beginning of a text; of what holds others, that it is there."""
    if isinstance(item, Mapping):
        return {}
    if isinstance(item, list | tuple):
        return []
    if isinstance(item, bytes):
        return item if len(item) <= longest else item[:longest]
    if not isinstance(item, str) or len(item) <= longest:
        return item
    end = item.find("\n", longest)
    # The user of an address ends at the last such sign of a line.
    more = item.find("@", longest, end if end >= 0 else len(item)) >= 0
    return f"{item[:longest]}@" if more else item[:longest]
