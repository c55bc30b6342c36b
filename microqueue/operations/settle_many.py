"""Settle many: one write for all tasks that end the same way.

The fences are those of single settlements, and so is the proof that makes a repeat safe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any, TypeAlias

from pymongo import UpdateOne

from microqueue.errors import LeaseLost
from microqueue.operations import filters, relocate, settle
from microqueue.operations.call import Call, Operation
from microqueue.operations.settle import Settlement
from microqueue.settings import QueueSettings
from microqueue.task import Claim, Task

Ending: TypeAlias = tuple[Task[Any], Settlement]


def settle_batch(
    plain: Sequence[Claim],
    others: Sequence[Ending],
    *,
    now: datetime,
    settings: QueueSettings,
) -> Operation[list[LeaseLost]]:
    """Write settlements of any kind, with as few writes as there can be.

    ``plain`` are done and nothing more. Returns the leases that were lost; all others are
    settled.
    """
    lost = yield from mark_all_done(plain, now=now, settings=settings)
    if others:
        limit = settings.history_limit
        updates = [
            UpdateOne(
                filters.claimed(task),
                settle.settlement_update(task, settlement, now=now, history_limit=limit),
            )
            for task, settlement in others
        ]
        result = yield Call("bulk_write", updates, ordered=False)
        if result.matched_count != len(others):
            lost += yield from _find_lost(others)
        if settings.dead_letters == "collection":
            for task, settlement in others:
                if settlement.changes["status"] == filters.FAILED:
                    yield from relocate.move_out_by_id(task.id)
    return lost


def mark_all_done(
    tasks: Sequence[Claim], *, now: datetime, settings: QueueSettings
) -> Operation[list[LeaseLost]]:
    """Mark many tasks done: one write for those claimed together, one for all claimed singly.

    Returns the leases that were lost; the others are done.
    """
    groups: dict[tuple[Any, ...], list[Claim]] = defaultdict(list)
    for task in tasks:
        # The history entry is the same for every task of a group, so one update serves all.
        token = task.lease.token if task.lease else None
        groups[(token, task.attempts)].append(task)
    settlement = settle.done(now)
    singly: list[UpdateOne] = []
    matched = 0
    for group in groups.values():
        fence = {**filters.claimed(group[0]), **filters.any_of({task.id: None for task in group})}
        update = settle.settlement_update(
            group[0], settlement, now=now, history_limit=settings.history_limit
        )
        if len(group) == 1:
            singly.append(UpdateOne(fence, update))
        else:
            matched += (yield Call("update_many", fence, update)).matched_count
    if singly:
        matched += (yield Call("bulk_write", singly, ordered=False)).matched_count
    if matched == len({(task.id, task.lease and task.lease.token) for task in tasks}):
        return []
    return (yield from _find_lost([(task, settlement) for task in tasks]))


def _find_lost(endings: Sequence[tuple[Claim, Settlement]]) -> Operation[list[LeaseLost]]:
    """Find the settlements that are in no history: they were refused."""
    ids = filters.any_of({task.id: None for task, _ in endings})
    stored = yield Call("find", ids, {"history": 1})
    documents = {document["_id"]: document for document in stored}
    lost = []
    for task, settlement in endings:
        document = documents.get(task.id, {})
        if not settle.settled_as(task, settlement.outcome, document):
            lost.append((yield from settle.explain_loss(task)))
    return lost
