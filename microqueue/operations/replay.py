"""Replay: send dead letters back to wait, or discard them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from pymongo.errors import DuplicateKeyError

from microqueue.operations import dead_letters, filters, id_order, relocate
from microqueue.operations.call import Call, Document, Operation
from microqueue.operations.dead_letters import ReplayReport
from microqueue.operations.produce import round_up
from microqueue.operations.sweep import WITHOUT_PAYLOAD
from microqueue.settings import QueueSettings
from microqueue.task import Task

SPREAD_STEPS = 200
"""Into how many instants a period is divided over which letters are spread."""


def replay(
    queries: Sequence[Document],
    *,
    now: datetime,
    position: int,
    reset_attempts: bool,
    delay: timedelta,
    limit: int | None,
    settings: QueueSettings,
    spread: timedelta = timedelta(0),
    edits: Document | None = None,
) -> Operation[ReplayReport]:
    """Send dead letters back to wait, the oldest failure first, behind those already waiting.

    They are those of one filter after the other. Safe to repeat: a letter that is back in the
    queue is no longer matched. A letter that cannot go back, because a live task has its dedupe
    key, stays and is reported. ``spread`` distributes them evenly over a period after the delay.
    ``edits`` are written with the move.
    """
    matched = replayed = 0
    skipped: list[Any] = []
    back = {
        "status": filters.PENDING,
        "finished_at": None,
        "updated_at": now,
        "expires_at": None,  # It did expire, or would at once.
        "position": position,
        **(edits or {}),
    }
    # What fails again while this runs is not replayed again.
    left = [{"$and": [query, {"updated_at": {"$lte": now}}]} for query in queries]
    step = _step(settings)
    expected = (yield from dead_letters.count_all(left, settings)) if spread else 1
    expected = expected if limit is None else min(expected, limit)
    while left and (limit is None or matched < limit):
        wanted = step if limit is None else min(step, limit - matched)
        letters = yield from _oldest(left[0], skipped, wanted, settings)
        etas = [
            _eta(now, delay, spread, place=(matched + index) / max(expected, 1))
            for index in range(len(letters))
        ]
        timed = list(zip(letters, etas, strict=True))
        for group, changes in _alike(timed, back, settings, reset_attempts=reset_attempts):
            count, stayed = yield from _replay_group(group, changes, now, settings)
            replayed += count
            skipped += stayed
        matched += len(letters)
        if len(letters) < wanted:
            left.pop(0)
    return ReplayReport(matched=matched, replayed=replayed, skipped=skipped)


def discard(
    queries: Sequence[Document], *, now: datetime, limit: int | None, settings: QueueSettings
) -> Operation[int]:
    """Delete the dead letters of some filters for good.

    Safe to repeat: what is gone is no longer matched.
    """
    discarded = 0
    step = _step(settings)
    left = list(queries)
    while left and (limit is None or discarded < limit):
        query = left[0]
        wanted = step if limit is None else min(step, limit - discarded)
        letters = yield from _oldest(query, (), wanted, settings)
        before = discarded
        if settings.letters_apart:
            for document in letters:
                discarded += yield from relocate.discard(document, now)
        elif letters:
            ids = filters.any_of(document["_id"] for document in letters)
            result = yield Call("delete_many", {"$and": [query, ids]})
            discarded += result.deleted_count
        if len(letters) < wanted or discarded == before:
            left.pop(0)
    return discarded


def _oldest(
    query: Document, skipped: Sequence[Any], limit: int, settings: QueueSettings
) -> Operation[list[Document]]:
    """Read the next letters, each once, the oldest failure first."""
    bounded = {"$and": [query, {"_id": {"$nin": list(skipped)}}]} if skipped else query
    letters: dict[Any, Document] = {}
    for target in dead_letters.targets(settings):
        order = [(field, -direction) for field, direction in dead_letters.ORDER]
        fields = None if settings.letters_apart else WITHOUT_PAYLOAD
        found = yield Call("find", bounded, fields, sort=order, limit=limit, target=target)
        for document in found:
            letters.setdefault(id_order.key(document["_id"]), document)
    return sorted(letters.values(), key=dead_letters.place, reverse=True)[:limit]


def _step(settings: QueueSettings) -> int:
    """Say how many letters to read at a time: whole ones are few, each may have 15 MB."""
    whole = settings.letters_apart
    return min(settings.batch_size, relocate.STEP) if whole else settings.batch_size


def _eta(now: datetime, delay: timedelta, spread: timedelta, *, place: float) -> datetime | None:
    """Say when a letter goes, by its place from 0 to 1; in steps, so that one write sends many."""
    step = int(min(place, 1.0) * SPREAD_STEPS)
    wait = delay + spread * step / SPREAD_STEPS
    return round_up(now + wait) if wait else None


def _alike(
    letters: Sequence[tuple[Document, datetime | None]],
    back: Document,
    settings: QueueSettings,
    *,
    reset_attempts: bool,
) -> Iterator[tuple[list[Document], Document]]:
    """Group letters that one write can send back: alike in what changes, with no dedupe key."""
    groups: dict[Any, tuple[list[Document], Document]] = {}
    for document, eta in letters:
        changes = {**back, "next_retry_at": eta}
        if reset_attempts:
            changes["attempts"] = 0
        else:
            # The count goes on, and there is always room for one more attempt.
            task: Task[Any] = Task.from_document(document)
            changes["max_attempts"] = max(task.max_attempts, task.attempts + 1)
        alone = settings.letters_apart or "dedupe_key" in document
        key = (
            id_order.key(document["_id"]) if alone else ("alike", changes.get("max_attempts"), eta)
        )
        groups.setdefault(key, ([], changes))[0].append(document)
    yield from groups.values()


def _replay_group(
    group: Sequence[Document], changes: Document, now: datetime, settings: QueueSettings
) -> Operation[tuple[int, list[Any]]]:
    """Send a group back; give how many went, and the ids of those that could not."""
    ids = [document["_id"] for document in group]
    if settings.letters_apart:
        went = yield from relocate.move_back(group[0], changes, now)
        return int(went), [] if went else ids
    update = {"$set": changes, "$inc": {"replays": 1}}
    try:
        result = yield Call("update_many", {**filters.any_of(ids), **filters.DEAD}, update)
    except DuplicateKeyError:
        return 0, ids
    return int(result.modified_count), []
