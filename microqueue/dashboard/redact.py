"""Keep secrets off the page: values of telling names are masked, and put back by an edit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from microqueue.dashboard.extended import to_exact_json
from microqueue.errors import InvalidArgument
from microqueue.masking import MASK, TELLING_KEYS, Masker

__all__ = ["TELLING_KEYS", "Redactor"]

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
