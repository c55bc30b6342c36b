"""Enqueue: build the documents of new tasks, and insert them once.

An insert is identified by the task's id and, if the caller chose the id, an insert token. Both are
fixed before the first attempt. So a repeated insert recognises its own task, and any other task
with the id or the dedupe key is a duplicate.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from bson import ObjectId
from pymongo.errors import BulkWriteError, DuplicateKeyError

from microqueue.backoff import BackoffPolicy
from microqueue.clock import later, round_up
from microqueue.errors import DuplicateTask
from microqueue.new_task import NewTask
from microqueue.operations import confirm, filters, id_order
from microqueue.operations.call import Call, Document, Operation, RepeatDue, Target
from microqueue.operations.mongo_errors import DUPLICATE_KEY
from microqueue.settings import QueueSettings

DEFAULT_POLICY = BackoffPolicy()
_OURS: Document = {"ours": True}
"""Stands for the very task that was to be inserted: it is stored."""
IDENTITY = dict.fromkeys(["insert_token", "queue", "dedupe_key", "finished_at"], 1)


def new_document(
    new: NewTask[Any],
    *,
    queue: str,
    payload: Document,
    settings: QueueSettings,
    now: datetime,
    position: int,
    insert_token: str | None = None,
) -> Document:
    """Return the document of a new task. Options that are not set are the queue's, or left out.

    ``insert_token`` is given by a caller that must recognise an insert of another process.
    """
    document: Document = {
        "_id": ObjectId() if new.task_id is None else new.task_id,
        "queue": queue,
        "payload": payload,
        "status": filters.PENDING,
        "priority": new.priority,
        "position": position,
        "created_at": now,
        "updated_at": now,
        "attempts": 0,
        "max_attempts": new.max_attempts or settings.max_attempts,
        "next_retry_at": not_before(new, now),
        "finished_at": None,
        "history": [],
    }
    if new.task_id is not None:
        # An id that the caller chose does not identify our insert; the token does.
        document["insert_token"] = insert_token or secrets.token_hex(8)
    policy = settings.backoff if new.backoff is None else new.backoff
    if new.backoff is not None or policy != DEFAULT_POLICY:
        # The sweeper serves all queues of the collection, with other settings.
        document["backoff_policy"] = policy.model_dump()
    if new.visibility_timeout is not None:
        document["visibility_timeout_sec"] = new.visibility_timeout.total_seconds()
    if new.dedupe_key is not None:
        document["dedupe_key"] = new.dedupe_key
    if new.expires_in is not None:
        document["expires_at"] = later(now, new.expires_in)
    if new.headers:
        document["headers"] = new.headers
    return document


def like(document: Document, *, payload: Document, position: int) -> Document:
    """Return the document of another new task with the same options and a new id."""
    return {**document, "_id": ObjectId(), "payload": payload, "position": position}


def not_before(new: NewTask[Any], now: datetime) -> datetime | None:
    """Return the first instant at which the task may run, or None if that is now."""
    if new.delay is not None:
        return later(now, new.delay) if new.delay else None
    return round_up(new.eta) if new.eta is not None and new.eta > now else None


def enqueue(
    document: Document, *, stored: Any, settings: QueueSettings, session: Any = None
) -> Operation[None]:
    """Insert one task, or raise :class:`DuplicateTask`. ``stored`` is the encoded document.

    Safe to repeat: the id and the insert token identify our own insert. With a separate DLQ
    collection the task may fail and move there before a repeat, so both collections are checked
    before each repeat. A duplicate is reported only if a majority has it: if what blocked the
    insert was rolled back or has ended, the insert is tried again, up to ``confirm.ROUNDS`` times.
    """
    repeat: RepeatDue | None = None
    rounds = confirm.ROUNDS
    while True:
        untried = repeat is None and rounds == confirm.ROUNDS
        known = yield from _find_known([document], settings, session, untried=untried)
        if known.is_ours(document):
            return
        if document["_id"] in known.taken:
            raise _duplicate(document, existing_id=document["_id"])
        try:
            yield Call(
                "insert_one", stored, session=session, recheck=settings.separate_dlq, after=repeat
            )
        except RepeatDue as exc:
            repeat = exc
        except DuplicateKeyError as exc:
            # A duplicate aborts the caller's transaction, so nothing more can be read in it.
            if session is not None:
                raise _duplicate(document, dedupe_key=document.get("dedupe_key")) from exc
            (found,) = yield from _find_blocking([document])
            if found is _OURS:
                return
            if found is not None:
                by_id = found["_id"] == document["_id"]
                dedupe_key = None if by_id else document.get("dedupe_key")
                existing_id = found["_id"]
                raise _duplicate(document, existing_id=existing_id, dedupe_key=dedupe_key) from exc
            rounds, repeat = rounds - 1, None
            if not rounds:
                raise
        else:
            return


def enqueue_many(
    documents: Sequence[Document],
    *,
    stored: Sequence[Any],
    settings: QueueSettings,
    session: Any = None,
) -> Operation[set[int]]:
    """Insert one chunk; return the places of the duplicates, which are left out.

    ``stored`` are the encoded documents. Safe to repeat for the same reasons as :func:`enqueue`.
    Inside a transaction a duplicate raises, because it aborts the transaction.
    """
    places: Sequence[int] = range(len(documents))
    left_out: set[int] = set()
    repeat: RepeatDue | None = None
    rounds = confirm.ROUNDS
    while True:
        whole = len(places) == len(documents)
        left = documents if whole else [documents[place] for place in places]
        untried = repeat is None and rounds == confirm.ROUNDS
        known = yield from _find_known(left, settings, session, untried=untried)
        if known.ours or known.letters:
            places = [place for place in places if not known.is_ours(documents[place])]
            taken = known.taken
            left_out |= {place for place in places if documents[place]["_id"] in taken}
            places = [place for place in places if place not in left_out]
        if session is not None and left_out:
            first = documents[min(left_out)]
            raise _duplicate(first, existing_id=first["_id"])
        if not places:
            break
        whole = len(places) == len(documents)
        chunk = stored if whole else [stored[place] for place in places]
        try:
            yield Call(
                "insert_many",
                chunk,
                ordered=False,
                session=session,
                recheck=settings.separate_dlq,
                after=repeat,
            )
            break
        except RepeatDue as exc:
            repeat = exc
        except BulkWriteError as exc:
            rejected = [places[place] for place in only_duplicates(exc)]
            if session is not None:
                first = documents[rejected[0]]
                raise _duplicate(first, dedupe_key=first.get("dedupe_key")) from exc
            found = yield from _find_blocking([documents[place] for place in rejected])
            blocked_by = dict(zip(rejected, found, strict=True))
            left_out |= {place for place, one in blocked_by.items() if one is not _OURS and one}
            places = [place for place, one in blocked_by.items() if one is None]
            rounds, repeat = rounds - 1, None
            if places and not rounds:
                raise
    return left_out


def only_duplicates(error: BulkWriteError) -> list[int]:
    """Return the places of the duplicates; raise the error if it has any other cause.

    A failed write concern concerns the whole chunk: no insert of it is certain.
    """
    details: Any = error.details or {}
    errors = details.get("writeErrors") or []
    foreign = any(one["code"] != DUPLICATE_KEY for one in errors)
    if not errors or foreign or details.get("writeConcernErrors"):
        raise error
    return [one["index"] for one in errors]


def _find_blocking(documents: Sequence[Document]) -> Operation[list[Document | None]]:
    """Return what blocks each of these tasks, as a majority has it.

    ``_OURS`` is the task itself, inserted just before the connection was lost. None means that
    nothing blocks it any more.
    """
    selection = blocking(documents)
    for _ in range(confirm.ROUNDS):
        found = yield Call("find", selection, IDENTITY)
        by_id = {id_order.key(one["_id"]): one for one in found}
        by_key = {
            (one.get("queue"), one["dedupe_key"]): one
            for one in found
            if "dedupe_key" in one and one.get("finished_at") is None
        }
        blocked_by: list[Document | None] = []
        fences: list[Document] = []
        for document in documents:
            same_id = by_id.get(id_order.key(document["_id"]))
            key = document.get("dedupe_key")
            holder = by_key.get((document["queue"], key)) if key is not None else None
            one = same_id or holder
            blocked_by.append(
                _OURS if same_id and _identity(same_id) == _identity(document) else one
            )
            if one is not None:
                fence = _fence(one)
                fences.append(fence if same_id else {**fence, **_live_with_key(document)})
        if (yield from confirm.all_hold(fences)):
            return blocked_by
    raise confirm.keeps_changing()


def key_is_taken(queue: Any, dedupe_key: Any) -> Operation[bool]:
    """Return whether a majority has a live task with a dedupe key."""
    return (yield from confirm.holds(_live_with_keys(queue, {"$eq": dedupe_key})))


class Known(NamedTuple):
    """Which new tasks are stored already: by our own insert, or under an id of a dead letter."""

    ours: frozenset[tuple[Any, Any]] = frozenset()
    """The id and the insert token of each: one call may have an id twice."""
    letters: frozenset[Any] = frozenset()

    def is_ours(self, document: Document) -> bool:
        """Return whether our own insert stored this task."""
        return _identity(document) in self.ours

    @property
    def taken(self) -> frozenset[Any]:
        """The ids under which no other task may be inserted."""
        return self.letters.union(task_id for task_id, _ in self.ours)


def _find_known(
    documents: Sequence[Document], settings: QueueSettings, session: Any, *, untried: bool
) -> Operation[Known]:
    """Return which of these tasks need not, or must not, be inserted.

    Without a separate DLQ collection the insert itself decides. Before the first insert
    (``untried``), only ids that the caller chose can be stored. After it, our own task may be in
    ``tasks``, may have moved to ``tasks_dlq``, or may have left a tombstone there. ``tasks`` is
    read first, so that a task that moves in between is seen in one of the two.
    """
    if not settings.separate_dlq:
        return Known()
    stored = Known()
    if not untried:
        stored = yield from _find_stored(documents, Target.TASKS)
    known = yield from find_dead_letters(documents, settings, session, every_id=not untried)
    return known._replace(ours=known.ours | stored.ours)


def find_dead_letters(
    documents: Sequence[Document],
    settings: QueueSettings,
    session: Any = None,
    *,
    every_id: bool = False,
) -> Operation[Known]:
    """Return which of these tasks are in the DLQ collection.

    Ids that were generated here are looked for only with ``every_id``.
    """
    own = [document for document in documents if every_id or "insert_token" in document]
    if not own or not settings.separate_dlq:
        return Known()
    return (yield from _find_stored(own, Target.DEAD_LETTERS, session))


def _find_stored(
    documents: Sequence[Document], target: Target, session: Any = None
) -> Operation[Known]:
    """Return which of these tasks a collection has, as a majority has them.

    Another task may take an id after the read. So the confirming write compares everything that
    the answer depends on. Absence is not confirmed. Inside a transaction nothing is.
    """
    selection = filters.any_of(document["_id"] for document in documents)
    new = frozenset(map(_identity, documents))
    for _ in range(confirm.ROUNDS):
        found = yield Call(
            "find", selection, {"insert_token": 1, "status": 1}, session=session, target=target
        )
        ours, letters, fences = set(), set(), []
        for one in found:
            is_ours = _identity(one) in new
            # The tombstone of another task, which had this id, does not take it.
            is_letter = target is Target.DEAD_LETTERS and one.get("status") == filters.FAILED
            if is_ours:
                ours.add(_identity(one))
            if is_letter:
                letters.add(one["_id"])
            if is_ours or is_letter:
                fences.append({**_fence(one), **(filters.DEAD if is_letter else {})})
        if session is not None or (yield from confirm.all_hold(fences, target=target)):
            return Known(frozenset(ours), frozenset(letters))
    raise confirm.keeps_changing()


def _fence(stored: Document) -> Document:
    """Match a stored task only while it is the same insert."""
    return {"_id": {"$eq": stored["_id"]}, "insert_token": stored.get("insert_token")}


def _duplicate(
    document: Document, *, existing_id: Any = None, dedupe_key: str | None = None
) -> DuplicateTask:
    return DuplicateTask(
        queue=document["queue"],
        task_id=document["_id"],
        dedupe_key=dedupe_key,
        existing_id=existing_id,
    )


def _identity(document: Document) -> tuple[Any, Any]:
    """Return what identifies one insert: the id, and the token if the caller chose the id.

    A stored task with the identity of a new one is that very insert, whose reply was lost.
    """
    return document["_id"], document.get("insert_token")


def _live_with_key(document: Document) -> Document:
    return _live_with_keys(document["queue"], {"$eq": document.get("dedupe_key")})


def _live_with_keys(queue: str, condition: Document) -> Document:
    key = {**condition, **filters.DEDUPED["dedupe_key"]}
    return {"queue": queue, **filters.DEDUPED, "dedupe_key": key}


def blocking(documents: Sequence[Document]) -> Document:
    """Match the tasks that block the insert of these, by their ids or dedupe keys."""
    keys: dict[str, list[str]] = {}
    for document in documents:
        if "dedupe_key" in document:
            keys.setdefault(document["queue"], []).append(document["dedupe_key"])
    ids = filters.any_of(document["_id"] for document in documents)
    return {"$or": [ids, *(_live_with_keys(queue, {"$in": some}) for queue, some in keys.items())]}
