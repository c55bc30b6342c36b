"""Cursors over raw BSON that make no object of each document.

pymongo unpacks the reply of a raw cursor twice: once with an object for each document, which is
thrown away and takes longer than all the rest, and once as raw bytes. Here it is done once. If
another version of pymongo has no such place to step in, its own way is taken.
"""

from __future__ import annotations

from typing import Any

import bson

try:
    from bson import _array_of_documents_to_buffer as _join_documents
    from bson.raw_bson import _RAW_ARRAY_BSON_OPTIONS as SHALLOW
except ImportError:  # pragma: no cover (they are pymongo's own, and may go)
    SHALLOW = None  # type: ignore[assignment]  # Replies are then unpacked as usual.

BATCHES = ("firstBatch", "nextBatch")


def unpack_once(cursor: Any) -> Any:
    """Have a raw cursor unpack its replies once, and give it back."""
    usual = getattr(cursor, "_unpack_response", None)
    if SHALLOW is None or usual is None:
        return cursor

    def unpack(response: Any, *arguments: Any, **options: Any) -> Any:
        reply = _reply(getattr(response, "payload_document", None))
        return usual(response, *arguments, **options) if reply is None else [reply]

    cursor._unpack_response = unpack  # noqa: SLF001 (there is no other way)
    return cursor


def _reply(payload: Any) -> dict[str, Any] | None:
    """Read a reply with a batch in it, and leave errors and all else to pymongo."""
    if payload is None:
        return None
    reply = dict(bson.decode(payload, SHALLOW))
    if "cursor" not in reply:
        return None
    cursor = dict(reply["cursor"])
    for name in BATCHES:
        if name in cursor:
            joined = _join_documents(cursor[name])
            cursor[name] = [joined] if joined else []
    return {**reply, "cursor": cursor}
