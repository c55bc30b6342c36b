"""Gather: make something of each document as it is read, and stop when that is enough.

Ten documents may have a kilobyte or 150 megabytes. What is made of them is small, so whole
documents are held for no longer than it takes to make it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from microqueue.operations import id_order
from microqueue.operations.call import ENOUGH, Document, Each

PLACE = ("_id", "created_at", "updated_at")
MADE = "made"


def never() -> bool:
    """Read on, whatever was read."""
    return False


def making(make: Callable[[Document], Any], enough: Callable[[], bool] = never) -> Each:
    """Keep of each document its place, and what is made of it.

    ``enough`` is asked before each document but the first, so that reading always gets on.
    """

    def begin() -> Callable[[Document], Any]:
        first = True

        def each(document: Document) -> Any:
            nonlocal first
            if not first and enough():
                return ENOUGH
            first = False
            return {**{name: document.get(name) for name in PLACE}, MADE: make(document)}

        return each

    return begin


def merged(
    replies: Sequence[list[Any]], place: Callable[[Document], Any]
) -> tuple[list[Document], bool]:
    """Join what was read in several places, each document once; tell if reading ended early.

    What lies beyond the end of one that ended early is left out: there may be more before it.
    """
    ended = [reply for reply in replies if reply and reply[-1] is ENOUGH]
    edges = [place(reply[-2]) for reply in ended]
    several = len(replies) > 1
    found: dict[Any, Document] = {}
    whole = [reply[:-1] if reply and reply[-1] is ENOUGH else reply for reply in replies]
    for document in heapq.merge(*whole, key=place):
        if several and edges and place(document) > min(edges):
            break
        found.setdefault(id_order.key(document["_id"]), document)
    return list(found.values()), bool(ended)
