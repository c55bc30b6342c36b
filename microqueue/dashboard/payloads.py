"""Payloads on the page: as extended JSON, masked, shortened, and restored after an edit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bson import json_util
from bson.errors import BSONError

from microqueue.errors import InvalidArgument
from microqueue.extended_json import RELAXED
from microqueue.masking import MASK, Masker

MAX_SAFE_INTEGER = 2**53 - 1
"""Browsers round larger integers."""
PREVIEW_LENGTH = 200
HEAD_LENGTH = 2000
"""How much of a long text is searched for secrets, unless it contains one."""
MAX_PREVIEW_KEYS = 50
"""So many keys fill a preview, whatever their values."""


def to_extended_json(value: Any) -> Any:
    """Convert a value to relaxed extended JSON, which is plain JSON where JSON has the type."""
    return json.loads(json_util.dumps(value, json_options=RELAXED))


def to_browser_json(value: Any) -> Any:
    """Convert a value to extended JSON that survives a round trip through a browser.

    As :func:`to_extended_json`, but numbers that a browser would round or turn into integers are
    typed: ``{"$numberLong": "9007199254740993"}``, ``{"$numberDouble": "10.0"}``.
    """
    return to_extended_json(_with_typed_numbers(value))


def from_extended_json(value: Any, *, name: str = "payload") -> Any:
    """Convert extended JSON to values: ``{"$date": ...}`` becomes a date."""
    try:
        return json_util.loads(json.dumps(value), json_options=RELAXED)
    except (ValueError, TypeError, KeyError, BSONError, OverflowError, RecursionError) as exc:
        raise InvalidArgument(f"{name} is not valid extended JSON: {exc}", argument=name) from exc


def _with_typed_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_typed_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_typed_numbers(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return {"$numberDouble": repr(value)}
    if isinstance(value, int) and abs(value) > MAX_SAFE_INTEGER:
        return {"$numberLong": str(int(value))}
    return value


MISSING = object()


class Redactor(Masker):
    """A masker that can restore masked values after an edit."""

    def restore(self, edited: Any, stored: Any, *, name: str = "payload") -> Any:
        """Return an edited value, called ``name``, with its masks replaced by what is stored.

        Raises:
            InvalidArgument: It is ambiguous which value a mask stands for.
        """
        if self._secret is None:
            return edited
        return self._restored(edited, stored, self.mask(stored), name)

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
                # Under another key the value would no longer be masked.
                if isinstance(item, str) and MASK in item and masked[key] != item:
                    raise _ambiguous_mask(f"{path}.{key}")
            return restored
        if isinstance(edited, list):
            return self._restored_list(edited, stored, shown, path)
        if not isinstance(edited, str) or MASK not in edited:
            return edited
        if edited != shown:
            raise _ambiguous_mask(path)
        return stored

    def _restored_list(self, edited: list[Any], stored: Any, shown: Any, path: str) -> list[Any]:
        if not _holds_mask(edited):
            return edited
        if not isinstance(shown, list) or len(edited) != len(shown):
            raise _ambiguous_mask(path)
        restored = []
        for place, (item, before, was) in enumerate(zip(edited, stored, shown, strict=True)):
            if _holds_mask(item) and not _same_but_for_masks(
                to_browser_json(item), to_browser_json(was)
            ):
                raise _ambiguous_mask(f"{path}.{place}")
            restored.append(self._restored(item, before, was, f"{path}.{place}"))
        return restored


def _holds_mask(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_mask, value.values()))
    if isinstance(value, list):
        return any(map(_holds_mask, value))
    return isinstance(value, str) and MASK in value


def _same_but_for_masks(edited: Any, shown: Any) -> bool:
    """Return whether nothing but masked values differs."""
    if isinstance(shown, str) and MASK in shown:
        return True
    if isinstance(shown, dict):
        same = isinstance(edited, dict) and edited.keys() == shown.keys()
        return same and all(_same_but_for_masks(edited[key], item) for key, item in shown.items())
    if isinstance(shown, list):
        same = isinstance(edited, list) and len(edited) == len(shown)
        return same and all(map(_same_but_for_masks, edited, shown))
    return bool(edited == shown)


def _ambiguous_mask(path: str) -> InvalidArgument:
    return InvalidArgument(
        f"{path} contains {MASK!r}, and it is ambiguous which stored value that stands for: "
        "leave it and the other items of its list unchanged, or enter the value",
        argument=path,
    )


def preview(value: Any, masker: Masker) -> str:
    """Return the first 200 characters of a value as masked JSON, reading no more than needed."""
    text = ""
    for chunk in _PreviewWriter(masker).write(value):
        text += chunk
        if len(text) > PREVIEW_LENGTH:
            return f"{text[: PREVIEW_LENGTH - 1]}…"
    return text


class _PreviewWriter:
    """Writes masked JSON in chunks, so that the caller can stop early."""

    def __init__(self, masker: Masker) -> None:
        self._mask = masker.mask

    def write(self, value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            yield from self._write_mapping(value)
        elif isinstance(value, list | tuple):
            yield "["
            for index, item in enumerate(value):
                yield ", " if index else ""
                yield from self._write_item(item, _head(item), self._mask([_head(item)])[0])
            yield "]"
        else:
            yield from self._write_item(value, _head(value), self._mask(_head(value)))

    def _write_mapping(self, value: Mapping[Any, Any]) -> Iterator[str]:
        # Whether a value is masked may depend on the other keys.
        heads = {
            key: _head(item, HEAD_LENGTH if index < MAX_PREVIEW_KEYS else PREVIEW_LENGTH)
            for index, (key, item) in enumerate(value.items())
        }
        shown = self._mask(heads)
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield f"{', ' if index else ''}{json.dumps(key, ensure_ascii=False)}: "
            yield from self._write_item(item, heads[key], shown[key])
        yield "}"

    def _write_item(self, item: Any, head: Any, shown: Any) -> Iterator[str]:
        if isinstance(item, Mapping | list | tuple) and shown == head:
            if item:
                yield from self.write(item)
                return
        elif isinstance(item, str) and shown not in (head, MASK):
            shown = self._mask(item)  # A secret may end far beyond the head.
        yield json.dumps(to_extended_json(shown), ensure_ascii=False)


def _head(item: Any, length: int = HEAD_LENGTH) -> Any:
    """Return the beginning of a text; an empty container for a container."""
    if isinstance(item, Mapping):
        return {}
    if isinstance(item, list | tuple):
        return []
    if isinstance(item, bytes):
        return item if len(item) <= length else item[:length]
    if not isinstance(item, str) or len(item) <= length:
        return item
    end = item.find("\n", length)
    # The user in a URL ends at the last @ of the line, so the head must show that there is one.
    more = item.find("@", length, end if end >= 0 else len(item)) >= 0
    return f"{item[:length]}@" if more else item[:length]
