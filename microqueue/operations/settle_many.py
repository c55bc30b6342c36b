"""Settle many: one write for all tasks that end the same way.

The fences are those of single settlements, and so is the proof that makes a repeat safe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pymongo.errors import OperationFailure

from microqueue.errors import LeaseLost
from microqueue.operations import confirm, endings, filters, refusals, relocate, settle
from microqueue.operations.call import Call, Operation
from microqueue.operations.endings import Ending
from microqueue.operations.settle import Settlement
from microqueue.settings import QueueSettings
from microqueue.task import Claim, Task


def settle_batch(
    plain: Sequence[Claim],
    others: Sequence[tuple[Task[Any], Settlement]],
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
        ended = [Ending(task, settlement, filters.claimed(task)) for task, settlement in others]
        if (yield from endings.write(ended, now=now, settings=settings)) != len(others):
            lost += yield from _find_lost(others, settings)
        if settings.letters_apart:
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
    singly: list[Claim] = []
    matched = 0
    for group in groups.values():
        if len(group) == 1:
            singly += group
            continue
        fence = {**filters.claimed(group[0]), **filters.any_of({task.id: None for task in group})}
        update = settle.settlement_update(
            group[0], settlement, now=now, history_limit=settings.history_limit
        )
        try:
            matched += (yield Call("update_many", fence, update)).matched_count
        except OperationFailure as exc:
            if exc.code not in refusals.BROKEN:
                raise
            singly += group  # It ended at a broken one; those before it are found as done.
    ended = [Ending(task, settlement, filters.claimed(task)) for task in singly]
    matched += yield from endings.write(ended, now=now, settings=settings)
    if matched == len({(task.id, task.lease and task.lease.token) for task in tasks}):
        return []
    return (yield from _find_lost([(task, settlement) for task in tasks], settings))


def _find_lost(
    settled: Sequence[tuple[Claim, Settlement]], settings: QueueSettings
) -> Operation[list[LeaseLost]]:
    """Find the settlements that are in no history that a majority has: they were refused."""
    unproven = list(settled)
    for target in settle.places(settings):
        if unproven:
            proofs = [settle.settled_as(task, one.outcome) for task, one in unproven]
            proven = yield from confirm.which(proofs, target=target)
            unproven = [one for one, sure in zip(unproven, proven, strict=True) if not sure]
    lost = []
    for task, _ in unproven:
        lost.append((yield from settle.explain_loss(task)))
    return lost
