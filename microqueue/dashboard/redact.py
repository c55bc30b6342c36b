"""Keep secrets off the page: values of telling names are masked, and put back by an edit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from microqueue.arguments import refused
from microqueue.dashboard.extended import to_exact_json
from microqueue.dashboard.masking import mask_text
from microqueue.errors import InvalidArgument
from microqueue.redaction import MASK

TELLING_KEYS = (
    r"pass(word|wd|phrase|code|key)|secret(?!ar)|token(?!i[sz])"
    r"|(^|[-_]|(?-i:(?<=[a-z0-9])(?=[A-Z])))(pass|pwd|jwt)s?$"
    r"|(api|access|private|signing|encryption)[-_]?key|authorization|cookie|credential|^bearer$"
    r"|session[-_]?id|^cvv$|^cvc$|card[-_]?number|^pin$|^iban$|^ssn$"
)
"""Keys whose values are masked by default, in any case."""

NAMES = frozenset({"name", "key"})
"""Keys that tell what the ``value`` beside them is."""
MISSING = object()


class Redactor:
    """Masks the values of names that match a pattern; without one, shows everything."""

    def __init__(self, pattern: str | None) -> None:
        try:
            self._secret = None if pattern is None else re.compile(pattern, re.IGNORECASE)
        except re.error as exc:
            raise refused("redact", pattern, str(exc)) from exc

    def mask(self, value: Any) -> Any:
        """Give a value with what is secret in it masked, however deep."""
        if self._secret is None:
            return value
        if isinstance(value, Mapping):
            telling = self._is_telling_pair(value)
            return {
                key: MASK
                if self._secret.search(str(key)) or (telling and str(key).lower() == "value")
                else self.mask(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mask(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """Mask keys, users of addresses, and values that follow a telling name, in a text."""
        return text if self._secret is None else mask_text(text, self._secret)

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

    def _is_telling_pair(self, value: Mapping[Any, Any]) -> bool:
        """Tell whether it is like ``{"name": "Authorization", "value": ...}``."""
        return self._secret is not None and any(
            isinstance(item, str) and str(key).lower() in NAMES and self._secret.search(item)
            for key, item in value.items()
        )


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
