"""Replay dead letters, or discard them.

:func:`replay` replays what a query matches, for a person. :func:`requeue` replays the dead letters
that a named run has read, each at its own time; a repeated run replays none of them twice. Both
write the same fields, and a dead letter whose dedupe key a live task has stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError, DuplicateKeyError

from microqueue.clock import later, round_up
from microqueue.dead_letter_models import ReplayReport
from microqueue.operations import confirm, dead_letters, dlq_collection, enqueue, filters, paging
from microqueue.operations.batches import Batches, not_after, without
from microqueue.operations.call import Call, Document, Operation, Span
from microqueue.operations.maintenance import WITHOUT_PAYLOAD
from microqueue.operations.mongo_errors import only_duplicates
from microqueue.settings import QueueSettings
from microqueue.task import DEFAULT_QUEUE, read_task
from microqueue.task_ids import id_key

SPREAD_STEPS = 200
"""Into how many instants a ``spread`` is divided, so that one write replays many."""


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
    """Replay the dead letters of some queries, the oldest failure first, behind waiting tasks.

    Each write matches only tasks that are still dead letters. Safe to repeat: a replayed task no
    longer matches. One whose dedupe key a live task has stays, and is reported as skipped.

    Args:
        queries: What to replay, one query after the other.
        now: The server's time.
        position: The place in the queue of all replayed tasks.
        reset_attempts: Start to count attempts at zero.
        delay: How long they wait before they are ready.
        limit: How many to replay at most.
        settings: The settings of the queue.
        spread: Distribute them evenly over this period after the delay.
        edits: Other fields to set.
    """
    matched = replayed = 0
    skipped: list[Any] = []
    back = {**_pending(now, position), **(edits or {})}
    # What fails again while this runs is not replayed again.
    begun = not_after("updated_at", now, skew=timedelta(0))
    left = [{"$and": [query, begun]} for query in queries]
    step = _step(settings)
    expected = (yield from dead_letters.count_all(left, settings)) if spread else 1
    expected = expected if limit is None else min(expected, limit)
    for query in left:
        batches = _batches(query, settings)
        while batch := (yield from batches.next(_wanted(step, limit, matched))):
            etas = [
                _eta(now, delay, spread, place=(matched + index) / max(expected, 1))
                for index in range(len(batch))
            ]
            timed = list(zip(batch, etas, strict=True))
            before = replayed
            for group, changes in _grouped(timed, back, settings, reset_attempts=reset_attempts):
                count, stayed = yield from _replay_group(group, changes, now, settings)
                replayed += count
                skipped += stayed
                batches.pass_over(stayed)
            matched += len(batch)
            batches.wrote(replayed - before)
            if matched == limit:
                return ReplayReport(matched=matched, replayed=replayed, skipped=skipped)
    return ReplayReport(matched=matched, replayed=replayed, skipped=skipped)


def discard(
    queries: Sequence[Document], *, now: datetime, limit: int | None, settings: QueueSettings
) -> Operation[int]:
    """Delete the dead letters of some queries; return how many.

    Safe to repeat: what is deleted no longer matches.
    """
    discarded = 0
    step = _step(settings)
    for query in queries:
        # What fails while this runs is not discarded, unless it was chosen by its id.
        chosen = query if "_id" in query else {"$and": [query, not_after("updated_at", now)]}
        batches = _batches(chosen, settings)
        while batch := (yield from batches.next(_wanted(step, limit, discarded))):
            count = 0
            if settings.separate_dlq:
                for document in batch:
                    count += yield from dlq_collection.discard(document, now)
            else:
                ids = filters.any_of(document["_id"] for document in batch)
                result = yield Call("delete_many", {"$and": [chosen, ids]})
                count = int(result.deleted_count)
            discarded += count
            batches.wrote(count)
            if discarded == limit:
                return discarded
    return discarded


def _batches(query: Document, settings: QueueSettings) -> Batches:
    """Read the dead letters of a query, the oldest failure first."""

    def read(passed: Sequence[Any], limit: int) -> Operation[list[Document]]:
        return (yield from _oldest(without(query, passed), limit, settings))

    return Batches(read)


def _wanted(step: int, limit: int | None, so_far: int) -> int:
    return step if limit is None else min(step, limit - so_far)


def _oldest(query: Document, limit: int, settings: QueueSettings) -> Operation[list[Document]]:
    """Return the next dead letters, each once, the oldest failure first."""
    batch: dict[Any, Document] = {}
    for target in paging.dead_letter_targets(settings):
        order = [(field, -direction) for field, direction in paging.BY_FAILURE.order]
        fields = None if settings.separate_dlq else WITHOUT_PAYLOAD
        found = yield Call(
            "find", query, fields, sort=order, limit=limit, target=target, span=Span.LONG
        )
        for document in found:
            batch.setdefault(id_key(document["_id"]), document)
    return sorted(batch.values(), key=paging.failure_key, reverse=True)[:limit]


def _step(settings: QueueSettings) -> int:
    """Return how many dead letters to read at a time: few if whole, as each may have 15 MB."""
    whole = settings.separate_dlq
    return min(settings.batch_size, dlq_collection.STEP) if whole else settings.batch_size


def _eta(now: datetime, delay: timedelta, spread: timedelta, *, place: float) -> datetime | None:
    """Return when a dead letter is ready, by its place from 0 to 1, in steps."""
    step = int(min(place, 1.0) * SPREAD_STEPS)
    wait = delay + spread * step / SPREAD_STEPS
    return later(now, wait) if wait else None


def _grouped(
    batch: Sequence[tuple[Document, datetime | None]],
    back: Document,
    settings: QueueSettings,
    *,
    reset_attempts: bool,
) -> Iterator[tuple[list[Document], Document]]:
    """Group dead letters that one write can replay: with equal changes and no dedupe key."""
    groups: dict[Any, tuple[list[Document], Document]] = {}
    for document, eta in batch:
        changes = {**back, "next_retry_at": eta, "deadline_at": eta}
        if reset_attempts:
            changes["attempts"] = 0
        else:
            # The count continues, and there is always room for one more attempt.
            task = read_task(document)
            changes["max_attempts"] = max(task.max_attempts, task.attempts + 1)
        alone = settings.separate_dlq or "dedupe_key" in document
        key = id_key(document["_id"]) if alone else ("group", changes.get("max_attempts"), eta)
        groups.setdefault(key, ([], changes))[0].append(document)
    yield from groups.values()


def _replay_group(
    group: Sequence[Document], changes: Document, now: datetime, settings: QueueSettings
) -> Operation[tuple[int, list[Any]]]:
    """Replay a group; return how many were replayed, and the ids of those that could not be."""
    ids = [document["_id"] for document in group]
    if settings.separate_dlq:
        done = yield from dlq_collection.move_back(group[0], changes, now)
        return int(done), [] if done else ids
    update = {"$set": changes, "$inc": {"replays": 1}}
    for _ in range(confirm.ROUNDS):
        try:
            result = yield Call("update_many", {**filters.any_of(ids), **filters.DEAD}, update)
        except DuplicateKeyError:
            if (yield from _key_is_taken(group[0], changes)):
                return 0, ids
        else:
            count = int(result.modified_count)
            if count < len(ids):
                count = yield from _count_replayed(ids, {"position": changes["position"]})
            return count, []
    return 0, ids


def _count_replayed(ids: Sequence[Any], ours: Document) -> Operation[int]:
    """Count the tasks that this call has replayed, also by a write whose reply was lost.

    A replay writes its own position, which a task keeps while it is delivered and retried.
    """
    result = yield Call("update_many", {**filters.any_of(ids), **ours}, confirm.NOTHING)
    return int(result.matched_count)


def _key_is_taken(dead_letter: Document, changes: Document) -> Operation[bool]:
    queue = changes.get("queue", dead_letter.get("queue"))
    key = changes.get("dedupe_key", dead_letter.get("dedupe_key"))
    return (yield from enqueue.key_is_taken(queue, key))


@dataclass(frozen=True)
class PlannedReplay:
    """A dead letter as it was read, and when it is delivered again."""

    dead_letter: Document
    eta: datetime


def requeue(
    planned: Sequence[PlannedReplay],
    *,
    run: str,
    queue: str | None,
    position: int,
    now: datetime,
    settings: QueueSettings,
) -> Operation[int]:
    """Replay dead letters that are unchanged since they were read; return how many.

    Safe to repeat: a task that this run replayed has its name, and is left alone even if it failed
    again. So is one whose dedupe key a live task has.
    """
    fresh = [one for one in planned if one.dead_letter.get("replay_run") != run]
    done = 0
    if settings.separate_dlq:
        for one in fresh:
            changes = _changes(one, run, queue, position, now)
            done += yield from dlq_collection.move_back(one.dead_letter, changes, now)
        return done
    left = fresh
    for _ in range(confirm.ROUNDS):
        if not left:
            break
        updates = [
            UpdateOne(
                _unchanged(one.dead_letter, run),
                {"$set": _changes(one, run, queue, position, now), "$inc": {"replays": 1}},
            )
            for one in left
        ]
        try:
            result = yield Call("bulk_write", updates, ordered=False)
        except BulkWriteError as exc:
            blocked = [left[place] for place in only_duplicates(exc)]
            done += int((exc.details or {})["nModified"])
            left = []
            for one in blocked:
                name = _changes(one, run, queue, position, now)["queue"]
                # If no majority has the task that blocks it, it is tried again.
                if not (yield from enqueue.key_is_taken(name, one.dead_letter.get("dedupe_key"))):
                    left.append(one)
        else:
            done += int(result.modified_count)
            break
    if done < len(fresh):
        ids = [one.dead_letter["_id"] for one in fresh]
        done = yield from _count_replayed(ids, {"position": position, "replay_run": run})
    return done


def _unchanged(dead_letter: Document, run: str) -> Document:
    seen = {"_id": dead_letter["_id"], "updated_at": dead_letter.get("updated_at")}
    return {**seen, **filters.DEAD, "replay_run": {"$ne": run}}


def _changes(
    one: PlannedReplay, run: str, queue: str | None, position: int, now: datetime
) -> Document:
    eta = round_up(one.eta) if one.eta > now else None
    return {
        **_pending(now, position),
        "queue": queue or one.dead_letter.get("queue") or DEFAULT_QUEUE,
        "attempts": 0,
        "next_retry_at": eta,
        "deadline_at": eta,
        "replay_run": run,
    }


def _pending(now: datetime, position: int) -> Document:
    """Return the fields of a dead letter that waits again."""
    return {
        "status": filters.PENDING,
        "finished_at": None,
        "updated_at": now,
        "expires_at": None,  # It did expire, or would at once.
        "position": position,
    }
