"""Make cursors over raw BSON faster.

pymongo unpacks each reply of a raw cursor twice: once with an object per document, which it
discards and which takes longer than all the rest, and once as raw bytes. :func:`unpack_once`
skips the first. With a version of pymongo that lacks the internals it needs, it does nothing.
"""

from __future__ import annotations

from typing import Any

import bson

try:
    from bson import _array_of_documents_to_buffer as _join_documents
    from bson.raw_bson import _RAW_ARRAY_BSON_OPTIONS as SHALLOW
except ImportError:  # pragma: no cover (private names of pymongo, which may go)
    SHALLOW = None  # type: ignore[assignment]  # pymongo unpacks replies as usual.

BATCHES = ("firstBatch", "nextBatch")


def unpack_once(cursor: Any) -> Any:
    """Make a raw cursor unpack each reply once, and return the cursor."""
    usual = getattr(cursor, "_unpack_response", None)
    if SHALLOW is None or usual is None:
        return cursor

    def unpack(response: Any, *arguments: Any, **options: Any) -> Any:
        reply = _reply(getattr(response, "payload_document", None))
        return usual(response, *arguments, **options) if reply is None else [reply]

    cursor._unpack_response = unpack  # noqa: SLF001 (no public hook exists)
    return cursor


def _reply(payload: Any) -> dict[str, Any] | None:
    """Unpack a reply with a batch; return None for errors and others, which pymongo handles."""
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
