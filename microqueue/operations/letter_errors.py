"""Errors of dead letters, as a replay with the same filter would meet them."""

from __future__ import annotations

from typing import Any

from microqueue.operations import id_order
from microqueue.operations.call import Call, Document, Operation, Span
from microqueue.operations.dead_letters import DeadLetterFilter, selection, targets
from microqueue.settings import QueueSettings


def read_errors(
    queue: str, which: DeadLetterFilter, *, limit: int, settings: QueueSettings
) -> Operation[list[Document]]:
    """Read the queue and the error of the letters that a filter matches, each once."""
    query = selection(queue, which)
    letters: dict[Any, Document] = {}
    for target in targets(settings):
        fields = {"queue": 1, "error": 1}
        found = yield Call("find", query, fields, limit=limit, target=target, span=Span.LONG)
        for letter in found:
            letters[id_order.key(letter["_id"])] = letter
    return list(letters.values())
