"""Confirm: find out what a majority has, before a call reports that something is stored or gone.

A read shows what the primary has, and a failover may undo that: the next primary rolls back what
no majority had. So a read never confirms a write. Neither does an error such as a duplicate key,
which also reflects the primary's own data.

A write that changes nothing does confirm. MongoDB acknowledges it when a majority has everything
that came before it on that primary. That includes the state that its filter was compared with,
whether it matched or not. It honours the caller's write concern, and needs no replica set. If it
cannot be acknowledged, the driver raises, and nothing is confirmed. Every operation here is safe
to repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pymongo import ReturnDocument, UpdateOne

from microqueue.errors import ServerUnavailable
from microqueue.operations import filters
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.task_ids import id_key

NOTHING: Document = {"$setOnInsert": {"confirmed": True}}
"""An update that changes nothing, as it is never an upsert."""

ROUNDS = 5
"""How often documents are read again that changed before they were confirmed."""


def holds(selection: Document, *, target: Target = Target.TASKS) -> Operation[bool]:
    """Return whether a document matches; a majority has either answer."""
    result = yield Call("update_one", selection, NOTHING, target=target)
    return bool(result.matched_count)


def one(selection: Document, *, target: Target = Target.TASKS) -> Operation[Document | None]:
    """Return a document as a majority has it, or None if a majority has none."""
    # Without a projection, which a repeated findAndModify would drop.
    found: Document | None = yield Call(
        "find_one_and_update",
        selection,
        NOTHING,
        return_document=ReturnDocument.AFTER,
        target=target,
    )
    return found


def some(
    selection: Document,
    fields: Document | None = None,
    *,
    target: Target = Target.TASKS,
    **options: Any,
) -> Operation[list[Document]]:
    """Return the documents that match as a majority has them; absence is not confirmed."""
    for _ in range(ROUNDS):
        read = (selection,) if fields is None else (selection, fields)
        found: list[Document] = yield Call("find", *read, target=target, **options)
        if not found:
            return []
        these = {"$and": [filters.any_of(document["_id"] for document in found), selection]}
        result = yield Call("update_many", these, NOTHING, target=target)
        if result.matched_count == len(found):
            return found
    raise keeps_changing()


def all_hold(proofs: Sequence[Document], *, target: Target = Target.TASKS) -> Operation[bool]:
    """Return whether every proof matches a document that a majority has, with one write.

    A proof is a condition on one document, with its id as ``{"_id": {"$eq": ...}}``.
    """
    return (yield from _count(proofs, target)) == len(proofs)


def which(proofs: Sequence[Document], *, target: Target = Target.TASKS) -> Operation[list[bool]]:
    """Return for each proof whether it matches; a majority has either answer.

    A read predicts the answers. One write confirms those that match, and one those that do not.
    Where the prediction was wrong, the proofs are split in halves and confirmed again.
    """
    found = yield Call("find", {"$or": list(proofs)}, {"_id": 1}, target=target)
    seen = {id_key(document["_id"]) for document in found}
    expected = [id_key(proof["_id"]["$eq"]) in seen for proof in proofs]
    matching: set[int] = set()
    for guess in (True, False):
        places = [place for place, one in enumerate(expected) if one is guess]
        matching |= yield from _find_matching(proofs, places, target)
    return [place in matching for place in range(len(proofs))]


def _find_matching(
    proofs: Sequence[Document], places: Sequence[int], target: Target
) -> Operation[set[int]]:
    """Return those of these places whose proofs match."""
    matched = yield from _count([proofs[place] for place in places], target)
    if not matched:
        return set()
    if matched == len(places):
        return set(places)
    half = len(places) // 2
    first = yield from _find_matching(proofs, places[:half], target)
    return first | (yield from _find_matching(proofs, places[half:], target))


def _count(proofs: Sequence[Document], target: Target) -> Operation[int]:
    """Count the proofs that match, with one write."""
    if not proofs:
        return 0
    ids = {id_key(proof["_id"]["$eq"]): proof["_id"]["$eq"] for proof in proofs}
    if len(ids) == len(proofs) > 1 and all(
        {**one, "_id": 0} == {**proofs[0], "_id": 0} for one in proofs
    ):
        # All have the same condition, as the rows of a load do: this is a third of the work.
        result = yield Call(
            "update_many", {**proofs[0], **filters.any_of(ids.values())}, NOTHING, target=target
        )
        return int(result.matched_count)
    updates = [UpdateOne(proof, NOTHING) for proof in proofs]
    result = yield Call("bulk_write", updates, ordered=False, target=target)
    return int(result.matched_count)


class KeepsChanging(ServerUnavailable):
    """Documents changed each time before they were confirmed."""


def keeps_changing() -> KeepsChanging:
    """Return the error for documents that changed each time before they were confirmed."""
    return KeepsChanging(
        f"the stored tasks changed {ROUNDS} times while they were confirmed; try again"
    )
