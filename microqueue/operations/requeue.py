"""Requeue: send dead letters back at times of their own, once per run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError

from microqueue.clock import round_up
from microqueue.operations import confirm, filters, produce, relocate
from microqueue.operations.call import Call, Document, Operation
from microqueue.settings import QueueSettings
from microqueue.task import DEFAULT_QUEUE


@dataclass(frozen=True)
class Return:
    """A dead letter as it was read, and when it may be delivered again."""

    letter: Document
    eta: datetime


def requeue(
    returns: Sequence[Return],
    *,
    run: str,
    queue: str | None,
    position: int,
    now: datetime,
    settings: QueueSettings,
) -> Operation[int]:
    """Make letters pending again that are still as they were read; give how many.

    Safe to repeat: a letter that this run has sent back before carries its name, and is left
    alone, even if it failed again. So is one whose dedupe key a live task has.
    """
    fresh = [one for one in returns if one.letter.get("replay_run") != run]
    if settings.letters_apart:
        went = 0
        for one in fresh:
            changes = _changes(one, run, queue, position, now)
            went += yield from relocate.move_back(one.letter, changes, now)
        return went
    went = 0
    for _ in range(confirm.ROUNDS):
        if not fresh:
            break
        updates = [
            UpdateOne(
                _unchanged(one.letter, run),
                {"$set": _changes(one, run, queue, position, now), "$inc": {"replays": 1}},
            )
            for one in fresh
        ]
        try:
            result = yield Call("bulk_write", updates, ordered=False)
        except BulkWriteError as exc:
            refused = produce.only_duplicates(exc)
            went += int((exc.details or {})["nModified"])
            left = []
            for place in refused:
                one = fresh[place]
                name = _changes(one, run, queue, position, now)["queue"]
                # A majority may not have what is in the way; then it is tried again.
                if not (yield from produce.key_is_taken(name, one.letter.get("dedupe_key"))):
                    left.append(one)
            fresh = left
        else:
            return went + int(result.modified_count)
    return went


def _unchanged(letter: Document, run: str) -> Document:
    seen = {"_id": letter["_id"], "updated_at": letter.get("updated_at")}
    return {**seen, **filters.DEAD, "replay_run": {"$ne": run}}


def _changes(one: Return, run: str, queue: str | None, position: int, now: datetime) -> Document:
    return {
        "status": filters.PENDING,
        "queue": queue or one.letter.get("queue") or DEFAULT_QUEUE,
        "attempts": 0,
        "finished_at": None,
        "expires_at": None,  # It did expire, or would at once.
        "updated_at": now,
        "next_retry_at": round_up(one.eta) if one.eta > now else None,
        "position": position,
        "replay_run": run,
    }
