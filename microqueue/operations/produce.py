"""Produce: add tasks to a queue."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from bson import ObjectId
from pymongo.errors import BulkWriteError, DuplicateKeyError

from microqueue.backoff import BackoffPolicy
from microqueue.clock import whole_milliseconds
from microqueue.errors import DuplicateTask
from microqueue.new_task import NewTask
from microqueue.operations import filters
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.refusals import DUPLICATE_KEY
from microqueue.settings import QueueSettings

ONE_MILLISECOND = timedelta(milliseconds=1)
DEFAULT_POLICY = BackoffPolicy()


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
    """Write the document of a new task. What is not set is left out, or the queue's.

    ``insert_token`` is for who must know an insert again that another process made.
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
        # An id of the caller's own does not tell our insert from another's; this does.
        document["insert_token"] = insert_token or secrets.token_hex(8)
    policy = settings.backoff if new.backoff is None else new.backoff
    if new.backoff is not None or policy != DEFAULT_POLICY:
        # The sweeper serves all queues of the collection, and has settings of its own.
        document["backoff_policy"] = policy.model_dump()
    if new.visibility_timeout is not None:
        document["visibility_timeout_sec"] = new.visibility_timeout.total_seconds()
    if new.dedupe_key is not None:
        document["dedupe_key"] = new.dedupe_key
    if new.expires_in is not None:
        document["expires_at"] = round_up(now + new.expires_in)
    if new.headers:
        document["headers"] = new.headers
    return document


def like(document: Document, *, payload: Document, position: int) -> Document:
    """Write the document of another new task with the same options, and an id of its own."""
    return {**document, "_id": ObjectId(), "payload": payload, "position": position}


def not_before(new: NewTask[Any], now: datetime) -> datetime | None:
    """Give the first instant at which the task may run, or nothing if that is now."""
    eta = now + new.delay if new.delay is not None else new.eta
    return round_up(eta) if eta is not None and eta > now else None


def round_up(instant: datetime) -> datetime:
    """Round to the millisecond that MongoDB stores, upwards: a delayed task is never early."""
    exact = instant.astimezone(UTC)  # Python compares some instants of two zones wrongly.
    cut = whole_milliseconds(exact)
    return cut if cut == exact else cut + ONE_MILLISECOND


def enqueue(
    document: Document, *, stored: Any, settings: QueueSettings, session: Any = None
) -> Operation[None]:
    """Insert one task, ``stored`` being the document as it is encoded.

    Safe to repeat: the id is fixed before, and tells our own insert.
    """
    if (yield from taken_by_letters([document], settings, session)):
        raise _duplicate(document, existing_id=document["_id"])
    try:
        yield Call("insert_one", stored, session=session)
    except DuplicateKeyError as exc:
        dedupe_key = document.get("dedupe_key")
        existing_id = None
        # A duplicate aborts the caller's transaction, in which nothing can be read any more.
        if session is None:
            found = yield Call("find_one", {"_id": document["_id"]}, IDENTITY)
            if found and _same_insert(found, document):
                return
            if found:
                dedupe_key, existing_id = None, found["_id"]
            else:
                holder = yield Call("find_one", _live_with_key(document), {"_id": 1})
                existing_id = holder["_id"] if holder else None
        raise _duplicate(document, existing_id=existing_id, dedupe_key=dedupe_key) from exc


def enqueue_many(
    documents: Sequence[Document],
    *,
    stored: Sequence[Any],
    settings: QueueSettings,
    session: Any = None,
) -> Operation[set[int]]:
    """Insert one chunk, ``stored`` being the documents as they are encoded.

    Gives the places of those left out as duplicates.

    Safe to repeat for the same reason as :func:`enqueue`. Inside a transaction a duplicate
    is an error, because it aborts the transaction.
    """
    taken = yield from taken_by_letters(documents, settings, session)
    places: Sequence[int] = range(len(documents))
    chunk, left_out = stored, set[int]()
    if taken:
        places = [place for place in places if documents[place]["_id"] not in taken]
        chunk = [stored[place] for place in places]
        left_out = set(range(len(documents))) - set(places)
    if session is not None and left_out:
        raise _duplicate(documents[min(left_out)], existing_id=documents[min(left_out)]["_id"])
    if not places:
        return left_out
    try:
        yield Call("insert_many", chunk, ordered=False, session=session)
    except BulkWriteError as exc:
        errors = exc.details["writeErrors"] if exc.details else []
        if not errors or any(error["code"] != DUPLICATE_KEY for error in errors):
            raise
        refused = [places[error["index"]] for error in errors]
        if session is not None:
            first = documents[refused[0]]
            raise _duplicate(first, dedupe_key=first.get("dedupe_key")) from exc
        ids = [documents[index]["_id"] for index in refused]
        found = yield Call("find", filters.any_of(ids), IDENTITY)
        present = {document["_id"]: document for document in found}
        left_out |= {
            index
            for index in refused
            if not _same_insert(present.get(documents[index]["_id"], {}), documents[index])
        }
    return left_out


def taken_by_letters(
    documents: Sequence[Document], settings: QueueSettings, session: Any = None
) -> Operation[set[Any]]:
    """Find ids of the caller's own that dead letters have, in their own collection."""
    if not settings.letters_apart:
        return set()
    own = [document["_id"] for document in documents if "insert_token" in document]
    if not own:
        return set()
    letters = {**filters.any_of(own), **filters.DEAD}
    found = yield Call("find", letters, {"_id": 1}, target=Target.DEAD_LETTERS, session=session)
    return {document["_id"] for document in found}


def _duplicate(
    document: Document, *, existing_id: Any = None, dedupe_key: str | None = None
) -> DuplicateTask:
    return DuplicateTask(
        queue=document["queue"],
        task_id=document["_id"],
        dedupe_key=dedupe_key,
        existing_id=existing_id,
    )


IDENTITY = {"insert_token": 1}


def _same_insert(stored: Document, document: Document) -> bool:
    """Tell whether a stored task is this insert, made just before the connection was lost.

    An id that we made ourselves is proof enough, an id of the caller's own needs the token.
    """
    token = document.get("insert_token")
    return stored.get("_id") == document["_id"] and stored.get("insert_token") == token


def _live_with_key(document: Document) -> Document:
    return _live_with_keys(document["queue"], {"$eq": document.get("dedupe_key")})


def _live_with_keys(queue: str, condition: Document) -> Document:
    key = {**condition, **filters.DEDUPED["dedupe_key"]}
    return {"queue": queue, **filters.DEDUPED, "dedupe_key": key}


def in_the_way(documents: Sequence[Document]) -> Document:
    """Match the tasks for which the server refuses these: by their ids, or by dedupe keys."""
    keys: dict[str, list[str]] = {}
    for document in documents:
        if "dedupe_key" in document:
            keys.setdefault(document["queue"], []).append(document["dedupe_key"])
    ids = filters.any_of(document["_id"] for document in documents)
    return {"$or": [ids, *(_live_with_keys(queue, {"$in": some}) for queue, some in keys.items())]}
