"""Relocate: keep dead letters in ``tasks_dlq``, without ever losing or doubling one.

A letter moves in several writes, and the process may die or stall between any two. Four
rules keep that safe, without a transaction; and what decides about the next write is what a
majority has, or a failover between the two could take both away:

1. Moving out copies first and deletes second, so there is always a letter.
2. The copy in ``tasks_dlq`` decides. Whoever replays or discards a letter first changes the
   copy, by one write that only one of them can win.
3. A replay brings the task back as failed, then puts a tombstone in the copy's place, then
   makes the task pending. Whatever is in both places meanwhile is one and the same letter,
   and the sweeper finishes what a killed process began.
4. Versions only grow, and tombstones stay for a day: a process that stalled with an old
   letter in its hands can neither bring it back nor take a newer one away.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from pymongo.errors import DuplicateKeyError

from microqueue.operations import confirm, filters
from microqueue.operations.batches import Batches, Progress, not_after
from microqueue.operations.call import Call, Document, Operation, Target

ABANDONED_AFTER = timedelta(minutes=1)
STEP = 50
"""How many letters are read at a time, whole: each may have 15 MB."""

TRIES = 5
"""How often a letter is brought back while the task in its way comes and goes."""

UNTOUCHED: Document = {**filters.DEAD, "replaying": None}


def move_out(document: Document) -> Operation[bool]:
    """Move one failed task to ``tasks_dlq``; tell whether its letter is there now."""
    version = _version(document)
    here = {"_id": document["_id"]}
    if not (yield from confirm.holds(_unchanged(document))):
        # It changed since it was read; perhaps another has moved it.
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
            yield Call("delete_one", _unchanged(document))  # Discarded by one who died half way.
            return False
        if not (yield from _is_there({**same_task, "version": version})):
            return False  # It was replayed or discarded while this process stalled.
    yield Call("delete_one", _unchanged(document))
    return True


def move_out_by_id(task_id: Any) -> Operation[None]:
    """Move one task, if it is a dead letter that nobody is replaying."""
    document = yield Call("find_one", {"_id": task_id, **UNTOUCHED})
    if document:
        yield from move_out(document)


def move_all_out(
    now: datetime, queues: list[str] | None = None, progress: Progress | None = None
) -> Operation[None]:
    """Move every failed task that is still in ``tasks``."""
    progress = progress or Progress()
    # Tasks that fail from now on are moved by the next sweep.
    selection = {**_letters(queues), "replaying": None, **not_after("updated_at", now)}
    batches = Batches.of(selection, progress=progress)
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
    """Replay one letter, as it was read; tell whether this call has brought it back."""
    if "version" not in document and not (yield from move_out(document)):
        return False
    letter = {**document, "version": _version(document)}
    intent = {"at": now, "changes": changes}
    won = yield Call(
        "update_one",
        {**_copy(letter), "replaying": None},
        {"$set": {"replaying": intent}},
        target=Target.DEAD_LETTERS,
        repeatable=False,
    )
    if not won.matched_count:
        return False
    return (yield from _bring_back({**letter, "replaying": intent}, now))


def discard(document: Document, now: datetime) -> Operation[bool]:
    """Delete one letter, as it was read; tell whether this call did it."""
    if "version" not in document and not (yield from move_out(document)):
        return False
    letter = {**document, "version": _version(document)}
    buried = yield from _entomb(letter, {"replaying": None}, now)
    if buried or (yield from _is_buried(letter)):  # Perhaps by one who died half way.
        # A copy that a killed mover left behind in ``tasks``; stalled movers meet the tombstone.
        yield Call("delete_one", _unchanged(document))
    return buried


def finish_abandoned(
    now: datetime, queues: list[str] | None = None, progress: Progress | None = None
) -> Operation[int]:
    """Finish the replays whose process died half way; return how many."""
    abandoned = {**_letters(queues), "replaying.at": {"$lte": now - ABANDONED_AFTER}}
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


def _bring_back(letter: Document, now: datetime) -> Operation[bool]:
    """Put a letter that is being replayed into ``tasks`` as failed, then let go of the copy."""
    task = {name: value for name, value in letter.items() if name != "version"}
    mark = {"$set": {"replaying": letter["replaying"]}}
    for _ in range(TRIES):
        try:
            yield Call("insert_one", task, repeatable=False)
            break
        except DuplicateKeyError:
            # A mover may have left it here; or somebody finishes this replay already.
            marked = yield Call("update_one", _unchanged(letter), mark)
            if marked.matched_count:
                break
            here = {"_id": letter["_id"]}
            if (yield from confirm.holds({**here, "replaying.at": letter["replaying"]["at"]})):
                break
            if (yield from confirm.holds(here)):
                return False
    else:
        return False  # Another task stands in its way: one with the same dedupe key.
    return (yield from _finish_returned(task, now))


def _finish_returned(task: Document, now: datetime) -> Operation[bool]:
    """Entomb the copy of a task that is back as failed, and make the task pending."""
    replaying = task["replaying"]
    letter = {**task, "version": _version(task)}
    here = {"_id": task["_id"], **filters.DEAD, "replaying.at": replaying["at"]}
    if not (yield from _entomb(letter, {"replaying.at": replaying["at"]}, now)):
        grave = {"_id": task["_id"], "version": letter["version"] + 1, "completed": None}
        if not (yield from _is_there(grave)):
            # The replay was completed by another, long ago: this copy came too late.
            yield Call("delete_one", here)
            return False
    over = {"$unset": {"replaying": ""}}
    back = {**over, "$set": replaying["changes"], "$inc": {"moves": 1, "replays": 1}}
    try:
        result = yield Call("update_one", here, back, repeatable=False)
    except DuplicateKeyError:
        # A live task has its dedupe key: it stays a dead letter, and may be moved out again.
        stays = {**over, "$inc": {"moves": 1}}
        result = yield Call("update_one", here, stays, repeatable=False)
        yield from _complete(letter)
        return False
    yield from _complete(letter)
    return bool(result.modified_count)


def _entomb(letter: Document, condition: Document, now: datetime) -> Operation[bool]:
    """Put a tombstone in a copy's place, if the copy is still as the condition says."""
    version = letter["version"]
    result = yield Call(
        "replace_one",
        {**_copy(letter), **condition},
        {"_id": letter["_id"], **_life(letter), "version": version + 1, "retired_at": now},
        target=Target.DEAD_LETTERS,
        repeatable=False,
    )
    return bool(result.matched_count)


def _is_buried(letter: Document) -> Operation[bool]:
    """Tell whether the tombstone of this very letter is in the copy's place."""
    grave = {"_id": letter["_id"], **_life(letter), "version": letter["version"] + 1}
    return (yield from _is_there(grave))


def _is_there(selection: Document) -> Operation[bool]:
    """Tell whether a majority has this among the dead letters."""
    return (yield from confirm.holds(selection, target=Target.DEAD_LETTERS))


def _complete(letter: Document) -> Operation[None]:
    """Note in the tombstone that the replay is through, for those who come too late."""
    grave = {"_id": letter["_id"], "version": letter["version"] + 1}
    done = {"$set": {"completed": True}}
    yield Call("update_one", grave, done, target=Target.DEAD_LETTERS)


def _letters(queues: list[str] | None) -> Document:
    """Match the dead letters of some queues, or of all."""
    # A filter on the queue, true for all, lets the scan run on the index of dead letters.
    return {"queue": {"$gt": ""} if queues is None else {"$in": queues}, **filters.DEAD}


def _unchanged(document: Document) -> Document:
    """Match a letter in ``tasks`` that nobody has touched since it was read."""
    seen = {"updated_at": document.get("updated_at"), "moves": document.get("moves")}
    return {"_id": document["_id"], **UNTOUCHED, **seen}


def _copy(letter: Document) -> Document:
    """Match the copy of this very letter."""
    return {"_id": letter["_id"], **filters.DEAD, **_life(letter), "version": letter["version"]}


def _life(document: Document) -> Document:
    """Tell tasks apart that had the same id one after the other."""
    return {
        "created_at": document.get("created_at"),
        "insert_token": document.get("insert_token"),
    }


def _version(document: Document) -> int:
    """Number the copies of a task: even for a letter, odd for its tombstone."""
    return 2 * int(document.get("moves", 0))
