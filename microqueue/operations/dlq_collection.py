"""The DLQ collection: keep dead letters in ``tasks_dlq``, without losing or doubling one.

A dead letter moves in several writes, and the process may die or stall between any two. Four
rules keep that safe without a transaction. Each write is decided by what a majority has, or a
failover between two writes could undo both:

1. Moving out copies first and deletes second, so the dead letter always exists.
2. The copy in ``tasks_dlq`` decides. A replay or a discard changes the copy first, by one write
   that only one of them can win.
3. A replay inserts the task as failed, then replaces the copy by a tombstone, then makes the task
   pending. While it is in both collections, it is one and the same dead letter. The sweeper
   finishes what a killed process began.
4. Versions only grow, and tombstones are kept for a day: a process that stalled with an old dead
   letter can neither bring it back nor delete a newer one.

A dead letter of a schedule's run stays in ``tasks`` for an hour: it proves there that the run was
added, for a process that read the schedule before and stalled. A discard takes that proof away, and
so does a replay until the task is back, as a discard and a purge do without this collection.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from pymongo.errors import DuplicateKeyError

from microqueue.operations import confirm, filters
from microqueue.operations.batches import Batches, SweepProgress, not_after
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.run_ids import PROOF_KEPT, is_run_id

ABANDONED_AFTER = timedelta(minutes=1)
STEP = 50
"""How many dead letters are read at a time, as whole documents of up to 15 MB each."""

TRIES = 5
"""How often the insert of a replayed task is tried while another task blocks it."""

UNTOUCHED: Document = {**filters.DEAD, "replaying": None}


def move_out(document: Document) -> Operation[bool]:
    """Move one failed task to ``tasks_dlq``; return whether its dead letter is there now.

    Each write matches only the version that was read. Safe to repeat: the same version is copied
    again, and the delete matches nothing.
    """
    version = _version(document)
    here = {"_id": document["_id"]}
    if not (yield from confirm.holds(_unchanged(document))):
        # It changed since it was read; another process may have moved it.
        return (yield from _is_there(_copy({**document, "version": version})))
    older = [
        {**_life(document), "version": {"$lt": version}},
        # The tombstone of an earlier task that had the same id.
        {
            "created_at": {"$lte": document.get("created_at")},
            "insert_token": {"$ne": document.get("insert_token")},
            "status": None,
        },
    ]
    try:
        yield Call(
            "replace_one",
            {**here, "$or": older},
            {**document, "version": version},
            upsert=True,
            target=Target.DEAD_LETTERS,
        )
    except DuplicateKeyError:
        same_task = {**here, **_life(document)}
        if (yield from _is_there({**same_task, "version": version + 1})):
            yield Call(
                "delete_one", _unchanged(document)
            )  # Discarded by a process that died half way.
            return False
        if not (yield from _is_there({**same_task, "version": version})):
            return False  # It was replayed or discarded while this process stalled.
    yield Call("delete_one", _unchanged(document))
    return True


def move_out_by_id(task_id: Any) -> Operation[None]:
    """Move one task, if it is a dead letter that is not being replayed, and not of a schedule."""
    if is_run_id(task_id):
        return  # A sweep moves it later.
    document = yield Call("find_one", {"_id": filters.equal(task_id), **UNTOUCHED})
    if document:
        yield from move_out(document)


def move_all_out(
    now: datetime, queues: list[str] | None = None, progress: SweepProgress | None = None
) -> Operation[None]:
    """Move every failed task that is still in ``tasks``, of a schedule an hour later.

    Safe to repeat.
    """
    progress = progress or SweepProgress()
    selection = {
        **_dead_letters(queues),
        "replaying": None,
        # Tasks that fail from now on are moved by the next sweep.
        "$nor": [*not_after("updated_at", now)["$nor"], filters.proof_of_run(now)],
    }
    # The index has the newest first. Without a range, each batch would read the runs that stay.
    settled = {**selection, "updated_at": {"$lte": now - PROOF_KEPT}}
    for chosen in (settled, selection):
        batches = Batches.of(chosen, progress=progress)
        while batch := (yield from batches.next(STEP)):
            moved = 0
            for document in batch:
                if not (yield from progress.proceed()):
                    return
                went = yield from move_out(document)
                moved += went
                progress.counts["moved"] += went
            batches.wrote(moved)


def move_back(document: Document, changes: Document, now: datetime) -> Operation[bool]:
    """Replay one dead letter as it was read; return whether this call did.

    The first write marks the copy, if it is unchanged and not being replayed. Not repeated after a
    lost reply: the sweeper finishes a replay that was marked.
    """
    if "version" not in document and not (yield from move_out(document)):
        return False
    dead_letter = {**document, "version": _version(document)}
    intent = {"at": now, "changes": changes}
    won = yield Call(
        "update_one",
        {**_copy(dead_letter), "replaying": None},
        {"$set": {"replaying": intent}},
        target=Target.DEAD_LETTERS,
        repeatable=False,
    )
    if not won.matched_count:
        return False
    return (yield from _bring_back({**dead_letter, "replaying": intent}, now))


def discard(document: Document, now: datetime) -> Operation[bool]:
    """Delete one dead letter as it was read; return whether this call did.

    The first write replaces the copy by a tombstone, if it is unchanged and not being replayed.
    """
    if "version" not in document and not (yield from move_out(document)):
        return False
    dead_letter = {**document, "version": _version(document)}
    discarded = yield from _replace_by_tombstone(dead_letter, {"replaying": None}, now)
    # A process that died half way may have left a tombstone, too.
    if discarded or (yield from _has_tombstone(dead_letter)):
        # A killed move may have left the task in ``tasks``; a stalled move meets the tombstone.
        yield Call("delete_one", _unchanged(document))
    return discarded


def finish_abandoned(
    now: datetime, queues: list[str] | None = None, progress: SweepProgress | None = None
) -> Operation[int]:
    """Finish replays whose process died half way; return how many. Safe to repeat."""
    abandoned = {**_dead_letters(queues), "replaying.at": {"$lte": now - ABANDONED_AFTER}}
    finished = 0
    for target, finish in ((Target.DEAD_LETTERS, _bring_back), (Target.TASKS, _finish_returned)):
        batches = Batches.of(abandoned, progress=progress, target=target)
        while batch := (yield from batches.next(STEP)):
            count = 0
            for document in batch:
                count += yield from finish(document, now)
            finished += count
            batches.wrote(count)
    return finished


def _bring_back(dead_letter: Document, now: datetime) -> Operation[bool]:
    """Insert a dead letter that is being replayed into ``tasks`` as failed, then finish it.

    Safe to repeat: if the task is there already, the replay continues from it.
    """
    task = {name: value for name, value in dead_letter.items() if name != "version"}
    mark = {"$set": {"replaying": dead_letter["replaying"]}}
    for _ in range(TRIES):
        try:
            yield Call("insert_one", task, repeatable=False)
            break
        except DuplicateKeyError:
            # A killed move may have left it here, or another process finishes this replay.
            marked = yield Call("update_one", _unchanged(dead_letter), mark)
            if marked.matched_count:
                break
            here = {"_id": dead_letter["_id"]}
            if (yield from confirm.holds({**here, "replaying.at": dead_letter["replaying"]["at"]})):
                break
            if (yield from confirm.holds(here)):
                return False
    else:
        return False  # Another task blocks it: one with the same dedupe key.
    return (yield from _finish_returned(task, now))


def _finish_returned(task: Document, now: datetime) -> Operation[bool]:
    """Replace the copy of a task that is back as failed by a tombstone, and make it pending."""
    replaying = task["replaying"]
    dead_letter = {**task, "version": _version(task)}
    here = {"_id": task["_id"], **filters.DEAD, "replaying.at": replaying["at"]}
    if not (yield from _replace_by_tombstone(dead_letter, {"replaying.at": replaying["at"]}, now)):
        tombstone = {"_id": task["_id"], "version": dead_letter["version"] + 1, "completed": None}
        if not (yield from _is_there(tombstone)):
            # Another process completed the replay before: this task was inserted too late.
            yield Call("delete_one", here)
            return False
    over = {"$unset": {"replaying": ""}}
    changes = {"deadline_at": replaying["changes"].get("next_retry_at"), **replaying["changes"]}
    back = {**over, "$set": changes, "$inc": {"moves": 1, "replays": 1}}
    try:
        result = yield Call("update_one", here, back, repeatable=False)
    except DuplicateKeyError:
        # A live task has its dedupe key. It stays a dead letter, and may be moved out again.
        stays = {**over, "$inc": {"moves": 1}}
        result = yield Call("update_one", here, stays, repeatable=False)
        yield from _complete(dead_letter)
        return False
    yield from _complete(dead_letter)
    return bool(result.modified_count)


def _replace_by_tombstone(
    dead_letter: Document, condition: Document, now: datetime
) -> Operation[bool]:
    """Replace a copy by a tombstone, if the copy still matches the condition."""
    version = dead_letter["version"]
    result = yield Call(
        "replace_one",
        {**_copy(dead_letter), **condition},
        {
            "_id": dead_letter["_id"],
            **_life(dead_letter),
            "version": version + 1,
            "retired_at": now,
        },
        target=Target.DEAD_LETTERS,
        repeatable=False,
    )
    return bool(result.matched_count)


def _has_tombstone(dead_letter: Document) -> Operation[bool]:
    """Return whether this very dead letter was replaced by its tombstone."""
    tombstone = {
        "_id": dead_letter["_id"],
        **_life(dead_letter),
        "version": dead_letter["version"] + 1,
    }
    return (yield from _is_there(tombstone))


def _is_there(selection: Document) -> Operation[bool]:
    """Return whether a majority has a match in ``tasks_dlq``."""
    return (yield from confirm.holds(selection, target=Target.DEAD_LETTERS))


def _complete(dead_letter: Document) -> Operation[None]:
    """Note in the tombstone that the replay is complete, for a process that stalled in it."""
    tombstone = {"_id": dead_letter["_id"], "version": dead_letter["version"] + 1}
    done = {"$set": {"completed": True}}
    yield Call("update_one", tombstone, done, target=Target.DEAD_LETTERS)


def _dead_letters(queues: list[str] | None) -> Document:
    """Match the dead letters of some queues, or of all queues."""
    # A filter on the queue, true for all, lets the scan run on the index of dead letters.
    return {"queue": {"$gt": ""} if queues is None else {"$in": queues}, **filters.DEAD}


def _unchanged(document: Document) -> Document:
    """Match a dead letter in ``tasks`` that is unchanged since it was read."""
    seen = {"updated_at": document.get("updated_at"), "moves": document.get("moves")}
    return {"_id": document["_id"], **UNTOUCHED, **seen}


def _copy(dead_letter: Document) -> Document:
    """Match the copy of this very dead letter."""
    return {
        "_id": dead_letter["_id"],
        **filters.DEAD,
        **_life(dead_letter),
        "version": dead_letter["version"],
    }


def _life(document: Document) -> Document:
    """Return the fields that distinguish tasks that had the same id one after the other."""
    return {
        "created_at": document.get("created_at"),
        "insert_token": document.get("insert_token"),
    }


def _version(document: Document) -> int:
    """Return the version of a task's copy; its tombstone has the next one."""
    return 2 * int(document.get("moves", 0))
