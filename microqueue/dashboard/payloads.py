"""Payloads as JSON that keeps MongoDB's types: its relaxed extended JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from bson import json_util
from bson.errors import BSONError

from microqueue.errors import InvalidArgument
from microqueue.extended_json import RELAXED
from microqueue.masking import MASK, Masker

LARGEST_EXACT = 2**53 - 1
"""Beyond it, a browser rounds integers."""


def to_json(value: Any) -> Any:
    """Write a value as relaxed extended JSON: plain where JSON has the type."""
    return json.loads(json_util.dumps(value, json_options=RELAXED))


def to_exact_json(value: Any) -> Any:
    """Write a value so that a browser gives it back as it is.

    As :func:`to_json`, but numbers that it would round, or take for integers, are written out:
    ``{"$numberLong": "9007199254740993"}``, ``{"$numberDouble": "10.0"}``.
    """
    return to_json(_written_out(value))


def from_json(value: Any, *, name: str = "payload") -> Any:
    """Read extended JSON: ``{"$date": ...}`` becomes a date again."""
    try:
        return json_util.loads(json.dumps(value), json_options=RELAXED)
    except (ValueError, TypeError, KeyError, BSONError, OverflowError, RecursionError) as exc:
        raise InvalidArgument(f"{name} is not valid extended JSON: {exc}", argument=name) from exc


def _written_out(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _written_out(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_written_out(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return {"$numberDouble": repr(value)}
    if isinstance(value, int) and abs(value) > LARGEST_EXACT:
        return {"$numberLong": str(int(value))}
    return value


__all__ = ["Redactor"]

MISSING = object()


class Redactor(Masker):
    """A masker that can put back what it masked, after an edit."""

    def restore(self, edited: Any, stored: Any) -> Any:
        """Put back what was masked when a value was shown, and left as it was by the edit.

        A mask is refused where it cannot be told which value it stands for.
        """
        if self._secret is None:
            return edited
        return self._restored(edited, stored, self.mask(stored), "payload")

    def _restored(self, edited: Any, stored: Any, shown: Any, path: str) -> Any:
        if isinstance(edited, Mapping):
            known = stored if isinstance(stored, Mapping) and isinstance(shown, Mapping) else {}
            restored = {
                key: self._restored(
                    item,
                    known.get(key, MISSING),
                    shown[key] if key in known else MISSING,
                    f"{path}.{key}",
                )
                for key, item in edited.items()
            }
            masked = self.mask(restored)
            for key, item in edited.items():
                # Under another name the value would no longer be masked.
                if isinstance(item, str) and MASK in item and masked[key] != item:
                    raise _refused(f"{path}.{key}")
            return restored
        if isinstance(edited, list):
            return self._restored_list(edited, stored, shown, path)
        if not isinstance(edited, str) or MASK not in edited:
            return edited
        if edited != shown:
            raise _refused(path)
        return stored

    def _restored_list(self, edited: list[Any], stored: Any, shown: Any, path: str) -> list[Any]:
        if not _holds_mask(edited):
            return edited
        if not isinstance(shown, list) or len(edited) != len(shown):
            raise _refused(path)
        restored = []
        for place, (item, before, was) in enumerate(zip(edited, stored, shown, strict=True)):
            if _holds_mask(item) and not _alike(to_exact_json(item), to_exact_json(was)):
                raise _refused(f"{path}.{place}")
            restored.append(self._restored(item, before, was, f"{path}.{place}"))
        return restored


def _holds_mask(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_mask, value.values()))
    if isinstance(value, list):
        return any(map(_holds_mask, value))
    return isinstance(value, str) and MASK in value


def _alike(edited: Any, shown: Any) -> bool:
    """Tell whether nothing but masked values was changed."""
    if isinstance(shown, str) and MASK in shown:
        return True
    if isinstance(shown, dict):
        same = isinstance(edited, dict) and edited.keys() == shown.keys()
        return same and all(_alike(edited[key], item) for key, item in shown.items())
    if isinstance(shown, list):
        same = isinstance(edited, list) and len(edited) == len(shown)
        return same and all(map(_alike, edited, shown))
    return bool(edited == shown)


def _refused(path: str) -> InvalidArgument:
    return InvalidArgument(
        f"{path} holds {MASK!r}, which stands for a stored value, and it cannot be told for "
        "which; leave it and what is beside it in a list as it was shown, or write the value",
        argument=path,
    )


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
