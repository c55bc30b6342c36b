"""Enqueue: build the documents of new tasks, and insert them once.

An insert is identified by the task's id and, if the caller chose the id, an insert token. Both are
fixed before the first attempt. So a repeated insert recognises its own task, and any other task
with the id or the dedupe key is a duplicate.
"""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from bson import ObjectId
from pymongo.errors import BulkWriteError, DuplicateKeyError

from microqueue.backoff import BackoffPolicy
from microqueue.clock import later, round_up
from microqueue.errors import DuplicateTask
from microqueue.new_task import NewTask
from microqueue.operations import confirm, dedupe_keys, filters
from microqueue.operations.call import Call, Document, Operation, RepeatDue, Target
from microqueue.operations.mongo_errors import only_duplicates
from microqueue.settings import QueueSettings
from microqueue.task import is_name, name_in
from microqueue.task_ids import id_key

V = TypeVar("V")

DEFAULT_POLICY = BackoffPolicy()
_OURS: Document = {"ours": True}
"""Stands for the very task that was to be inserted: it is stored."""
IDENTITY = {
    **dict.fromkeys(["insert_token", "queue", "dedupe_key", "finished_at"], 1),
    **dedupe_keys.RESERVED_FIELDS,
}


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
    next_retry_at = not_before(new, now)
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
        "next_retry_at": next_retry_at,
        "finished_at": None,
        "history": [],
    }
    if new.task_id is not None or new.dedupe_for is not None:
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
    if new.dedupe_for is not None:
        document["dedupe_until"] = later(now, new.dedupe_for)
    if new.expires_in is not None:
        document["expires_at"] = later(now, new.expires_in)
    deadline = filters.waiting_deadline(next_retry_at, document.get("expires_at"))
    if deadline is not None:
        document["deadline_at"] = deadline
    if new.headers:
        document["headers"] = new.headers
    name = name_in(new.headers) if new.name is None else new.name
    if is_name(name):
        document["name"] = name
    return document


def another_document(document: Document, *, payload: Document, position: int) -> Document:
    """Return the document of another new task with the same options and a new id."""
    return {**document, "_id": ObjectId(), "payload": payload, "position": position}


def not_before(new: NewTask[Any], now: datetime) -> datetime | None:
    """Return the first instant at which the task may run, or None if that is now."""
    if new.delay is not None:
        return later(now, new.delay) if new.delay else None
    return round_up(new.eta) if new.eta is not None and new.eta > now else None


def enqueue(
    document: Document, *, encoded: Any, settings: QueueSettings, session: Any = None
) -> Operation[None]:
    """Insert one task, or raise :class:`DuplicateTask`. ``encoded`` is the document in BSON.

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
        if id_key(document["_id"]) in known.taken:
            queue = known.dead_letters.get(id_key(document["_id"]))
            raise _duplicate(document, existing_id=document["_id"], existing_queue=queue)
        try:
            yield Call(
                "insert_one", encoded, session=session, recheck=settings.separate_dlq, after=repeat
            )
        except RepeatDue as exc:
            repeat = exc
        except DuplicateKeyError as exc:
            # A duplicate aborts the caller's transaction, so nothing more can be read in it.
            if session is not None:
                raise _duplicate(document, dedupe_key=document.get("dedupe_key")) from exc
            (found,) = yield from _find_blocking([document], settings)
            if found is _OURS:
                return
            if found is not None:
                by_id = id_key(found["_id"]) == id_key(document["_id"])
                dedupe_key = None if by_id else document.get("dedupe_key")
                raise _duplicate(
                    document,
                    existing_id=found["_id"],
                    existing_queue=found.get("queue"),
                    dedupe_key=dedupe_key,
                ) from exc
            rounds, repeat = rounds - 1, None
            if not rounds:
                raise
        else:
            return


def enqueue_many(
    documents: Sequence[Document],
    *,
    encoded: Sequence[Any],
    settings: QueueSettings,
    session: Any = None,
    atomic: bool = False,
) -> Operation[set[int]]:
    """Insert one chunk; return the indexes of the duplicates, which are left out.

    ``encoded`` are the documents in BSON. Safe to repeat for the same reasons as :func:`enqueue`.
    Inside a transaction a duplicate raises, because it aborts the transaction. With ``atomic``,
    all that are no duplicates are inserted, or none, where the server has transactions.
    """
    left: Sequence[int] = range(len(documents))
    duplicates: set[int] = set()
    repeat: RepeatDue | None = None
    rounds = confirm.ROUNDS
    while True:
        untried = repeat is None and rounds == confirm.ROUNDS
        known = yield from _find_known(_chosen(documents, left), settings, session, untried=untried)
        left, taken = _without_known(documents, left, known)
        duplicates |= taken
        if session is not None and duplicates:
            first = documents[min(duplicates)]
            raise _duplicate(first, existing_id=first["_id"])
        if not left:
            return duplicates
        try:
            yield Call(
                "insert_many",
                _chosen(encoded, left),
                ordered=False,
                session=session,
                atomic=atomic and len(left) > 1,
                recheck=settings.separate_dlq,
                after=repeat,
            )
        except RepeatDue as exc:
            repeat = exc
        except BulkWriteError as exc:
            rejected = [left[position] for position in only_duplicates(exc)]
            if session is not None:
                first = documents[rejected[0]]
                raise _duplicate(first, dedupe_key=first.get("dedupe_key")) from exc
            if atomic:  # One duplicate aborts the transaction, so none was inserted.
                rejected = list(left)
            left, blocked = yield from _find_blocked(documents, rejected, settings)
            duplicates |= blocked
            rounds, repeat = rounds - 1, None
            if left and not rounds:
                raise
        else:
            return duplicates


def _chosen(values: Sequence[V], indexes: Sequence[int]) -> Sequence[V]:
    """Return the values with these indexes. A sequence that makes each on demand stays whole."""
    return values if len(indexes) == len(values) else [values[index] for index in indexes]


def _without_known(
    documents: Sequence[Document], indexes: Sequence[int], known: Known
) -> tuple[Sequence[int], set[int]]:
    """Return the indexes of the tasks to insert, and of those whose ids are taken."""
    if not known.ours and not known.dead_letters:
        return indexes, set()
    new = [index for index in indexes if not known.is_ours(documents[index])]
    ids = known.taken
    taken = {index for index in new if id_key(documents[index]["_id"]) in ids}
    return [index for index in new if index not in taken], taken


def _find_blocked(
    documents: Sequence[Document], rejected: Sequence[int], settings: QueueSettings
) -> Operation[tuple[Sequence[int], set[int]]]:
    """Return the indexes of rejected tasks that nothing blocks any more, and of duplicates.

    The others are stored: our own insert was repeated.
    """
    found = yield from _find_blocking([documents[index] for index in rejected], settings)
    blocked_by = dict(zip(rejected, found, strict=True))
    duplicates = {
        index for index, one in blocked_by.items() if one is not None and one is not _OURS
    }
    return [index for index, one in blocked_by.items() if one is None], duplicates


def _find_blocking(
    documents: Sequence[Document], settings: QueueSettings
) -> Operation[list[Document | None]]:
    """Return what blocks each of these tasks, as a majority has it.

    ``_OURS`` is the task itself, inserted just before the connection was lost. None means that
    nothing blocks it any more. A reserved task that blocks one is completed: its producer may have
    died.
    """
    selection = blocking(documents)
    new = frozenset(map(_identity, documents))
    for _ in range(confirm.ROUNDS):
        found = yield Call("find", selection, IDENTITY)
        by_id = {id_key(one["_id"]): one for one in found}
        by_key = {
            (one.get("queue"), one["dedupe_key"]): one
            for one in found
            if "dedupe_key" in one and one.get("finished_at") is None
        }
        blocked_by: list[Document | None] = []
        proofs: list[Document] = []
        for document in documents:
            same_id = by_id.get(id_key(document["_id"]))
            key = document.get("dedupe_key")
            holder = by_key.get((document["queue"], key)) if key is not None else None
            one = same_id or holder
            blocked_by.append(
                _OURS if same_id and _identity(same_id) == _identity(document) else one
            )
            if one is not None:
                proof = _same_insert(one)
                proofs.append(proof if same_id else {**proof, **_live_with_key(document)})
        waiting = [
            one
            for one in found
            if dedupe_keys.is_reserved(one)
            and one.get("status") == filters.PENDING
            and _identity(one) not in new
        ]
        if waiting:
            now = documents[0]["created_at"]
            yield from dedupe_keys.complete(waiting, now=now, settings=settings)
        if (yield from confirm.all_hold(proofs)):
            return blocked_by
    raise confirm.keeps_changing()


def key_is_taken(queue: Any, dedupe_key: Any) -> Operation[bool]:
    """Return whether a majority has a live task with a dedupe key."""
    return (yield from confirm.holds(_live_with_keys(queue, {"$eq": dedupe_key})))


class Known(NamedTuple):
    """Which new tasks are stored already: by our own insert, or under an id of a dead letter."""

    ours: frozenset[tuple[Hashable, Any]] = frozenset()
    """The key of the id, and the insert token of each: one call may have an id twice."""
    dead_letters: Mapping[Hashable, Any] = MappingProxyType({})
    """Their queues, by the keys of the ids."""

    def is_ours(self, document: Document) -> bool:
        """Return whether our own insert stored this task."""
        return _identity(document) in self.ours

    @property
    def taken(self) -> frozenset[Hashable]:
        """The keys of the ids under which no other task may be inserted."""
        return frozenset(self.dead_letters).union(key for key, _ in self.ours)


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
        stored = yield from find_stored(documents, Target.TASKS)
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
    return (yield from find_stored(own, Target.DEAD_LETTERS, session))


def find_stored(
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
            "find",
            selection,
            {"insert_token": 1, "status": 1, "queue": 1},
            session=session,
            target=target,
        )
        ours, dead_letters, proofs = set(), {}, []
        for one in found:
            is_ours = _identity(one) in new
            # The tombstone of another task, which had this id, does not take it.
            is_dead_letter = target is Target.DEAD_LETTERS and one.get("status") == filters.FAILED
            if is_ours:
                ours.add(_identity(one))
            if is_dead_letter:
                dead_letters[id_key(one["_id"])] = one.get("queue")
            if is_ours or is_dead_letter:
                proofs.append({**_same_insert(one), **(filters.DEAD if is_dead_letter else {})})
        if session is not None or (yield from confirm.all_hold(proofs, target=target)):
            return Known(frozenset(ours), dead_letters)
    raise confirm.keeps_changing()


def _same_insert(stored: Document) -> Document:
    """Match a stored task only while it is the same insert."""
    return {"_id": {"$eq": stored["_id"]}, "insert_token": stored.get("insert_token")}


def _duplicate(
    document: Document,
    *,
    existing_id: Any = None,
    existing_queue: Any = None,
    dedupe_key: str | None = None,
) -> DuplicateTask:
    return DuplicateTask(
        queue=document["queue"],
        task_id=document["_id"],
        dedupe_key=dedupe_key,
        existing_id=existing_id,
        existing_queue=existing_queue,
    )


def _identity(document: Document) -> tuple[Hashable, Any]:
    """Return what identifies one insert: the id, and the token if the caller chose the id.

    A stored task with the identity of a new one is that very insert, whose reply was lost.
    """
    return id_key(document["_id"]), document.get("insert_token")


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
