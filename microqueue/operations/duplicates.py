"""Duplicates: return or replace the task that has the id or the dedupe key of a new one.

The insert itself decides whether there is a duplicate. What it met may have changed before it is
read: then the insert is tried again, up to ``confirm.ROUNDS`` times. So there are never two tasks,
and the caller never gets none.

A replacement is one write that matches a waiting task only. A claim and a replacement exclude each
other: either the worker gets the new payload, or the caller an error.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from microqueue.errors import DuplicateCode, DuplicateTask
from microqueue.new_task import OnDuplicate
from microqueue.operations import confirm, dedupe_keys, enqueue, filters, lookup
from microqueue.operations.call import Call, Document, Operation, Target
from microqueue.operations.dedupe_keys import Name
from microqueue.operations.paging import dead_letter_targets
from microqueue.settings import QueueSettings
from microqueue.task_ids import id_key

KEPT = frozenset(
    ["_id", "queue", "status", "position", "created_at", "updated_at", "finished_at", "history",
     "insert_token", "dedupe_until"]
)  # fmt: skip
"""What a replaced task keeps. The time of the change is the server's at the write."""
OPTIONAL = frozenset(
    ["headers", "name", "backoff_policy", "visibility_timeout_sec", "dedupe_key", "expires_at"]
)
OF_ATTEMPTS = frozenset(["error", "backoff_sec", "crashes", "redelivered", "progress"])
"""What earlier attempts left, except the history."""


class Inserter(NamedTuple):
    """Where and how new tasks are inserted."""

    collection: str
    settings: QueueSettings
    session: Any = None

    def stored(self, document: Document) -> Document:
        """Return the document to encode: that of a task whose key lasts is reserved at first.

        In a transaction it need not be: no one sees the task before its key.
        """
        if self.session is not None or not dedupe_keys.has_period(document):
            return document
        return dedupe_keys.reserved(document, self.collection)

    def insert(self, document: Document, encoded: Any) -> Operation[None]:
        """Insert one task, or raise :class:`DuplicateTask`; ``encoded`` is what is stored."""
        if not dedupe_keys.has_period(document):
            return (yield from self._insert(document, encoded))
        for _ in range(confirm.ROUNDS):
            holders = yield from self._find_holders([document])
            if key := holders.get(dedupe_keys.name_of(document)):
                if dedupe_keys.is_key_of(key, document):
                    return None  # Another producer has completed our task.
                raise _duplicate_of_key(key, document)
            if self.session is not None:
                yield from self._take_key(document)
                return (yield from self._insert(document, encoded))
            task = self.stored(document)
            try:
                yield from self._insert(task, encoded)
            except confirm.KeepsChanging:
                continue  # Many producers reserve tasks and withdraw them: one has the key by now.
            if not (yield from self._complete([task])):
                return None
        raise confirm.keeps_changing()

    def insert_many(
        self, documents: Sequence[Document], encoded: Sequence[Any]
    ) -> Operation[set[int]]:
        """Insert one chunk outside of a transaction; return the indexes of the duplicates."""
        with_period = [i for i, one in enumerate(documents) if dedupe_keys.has_period(one)]
        if not with_period:
            return (
                yield from enqueue.enqueue_many(documents, encoded=encoded, settings=self.settings)
            )
        holders = yield from self._find_holders([documents[index] for index in with_period])
        left_out = {i for i in with_period if dedupe_keys.name_of(documents[i]) in holders}
        indexes = [index for index in range(len(documents)) if index not in left_out]
        tasks = {index: self.stored(documents[index]) for index in indexes}
        try:
            rejected = yield from enqueue.enqueue_many(
                list(tasks.values()),
                encoded=[encoded[index] for index in indexes],
                settings=self.settings,
            )
        except confirm.KeepsChanging:
            return left_out | (yield from self._insert_singly(documents, encoded, indexes))
        left_out |= {indexes[i] for i in rejected}
        reserved = [
            index
            for index, task in tasks.items()
            if index not in left_out and dedupe_keys.has_period(task)
        ]
        without_key = yield from self._complete([tasks[index] for index in reserved])
        return left_out | {reserved[i] for i in without_key}

    def _insert_singly(
        self, documents: Sequence[Document], encoded: Sequence[Any], indexes: Sequence[int]
    ) -> Operation[set[int]]:
        """Insert tasks one by one, of which some may be stored; return the duplicates."""
        left_out: set[int] = set()
        for index in indexes:
            try:
                yield from self.insert(documents[index], encoded[index])
            except DuplicateTask:
                left_out.add(index)
        return left_out

    def _insert(self, document: Document, encoded: Any) -> Operation[None]:
        yield from enqueue.enqueue(
            document, encoded=encoded, settings=self.settings, session=self.session
        )

    def _find_holders(self, documents: Sequence[Document]) -> Operation[dict[Name, Document]]:
        return (
            yield from dedupe_keys.find_holders(
                self.collection,
                map(dedupe_keys.name_of, documents),
                now=documents[0]["created_at"],
                settings=self.settings,
                session=self.session,
            )
        )

    def _take_key(self, document: Document) -> Operation[None]:
        key = dedupe_keys.key_document(document, self.collection)
        try:
            yield Call("insert_one", key, target=Target.DEDUPE_KEYS, session=self.session)
        except DuplicateKeyError as exc:
            raise DuplicateTask(
                queue=document["queue"],
                task_id=document["_id"],
                dedupe_key=document["dedupe_key"],
                existing_id=None,
            ) from exc

    def _complete(self, tasks: Sequence[Document]) -> Operation[set[int]]:
        """Release our reserved tasks; delete those that did not get their key, and return them."""
        if not tasks:
            return set()
        now = tasks[0]["created_at"]
        holders = yield from dedupe_keys.complete(tasks, now=now, settings=self.settings)
        rejected: set[int] = set()
        for index, (task, key) in enumerate(zip(tasks, holders, strict=True)):
            if key is not None and (yield from dedupe_keys.withdraw(task)):
                rejected.add(index)
        return rejected


def add(
    document: Document, *, encoded: Any, on_duplicate: OnDuplicate, inserter: Inserter
) -> Operation[Document | None]:
    """Insert a task and return None, or return the task that existed, replaced if asked for.

    Safe to repeat: an insert recognises its own task, and a replacement has a token.

    Raises:
        DuplicateTask: The other task is in another queue, is deleted, or cannot be replaced.
    """
    if on_duplicate == "raise":
        yield from inserter.insert(document, encoded)
        return None
    token = secrets.token_hex(8)
    settings, session = inserter.settings, inserter.session
    if session is not None:
        found = yield from _find_blocking_in(session, document, settings)
        if found is not None:
            duplicate = _duplicate_of(found, document)
            return (
                yield from _resolve(
                    found, document, token, on_duplicate, duplicate, inserter=inserter
                )
            )
    rounds = confirm.ROUNDS
    while True:
        try:
            yield from inserter.insert(document, encoded)
        except DuplicateTask as exc:
            rounds -= 1
            if exc.existing_id is None:
                raise
            found = yield from lookup.get(exc.existing_id, settings, session)
            by_key = exc.dedupe_key is not None and exc.held_until is None
            ended = by_key and found is not None and found.get("finished_at") is not None
            if found is not None and not ended:
                existing = yield from _resolve(
                    found, document, token, on_duplicate, exc, inserter=inserter
                )
                if existing is not None:
                    return existing
            # It ended, was deleted or was claimed since: the insert decides again.
            if not rounds or (found is None and exc.held_until is not None):
                raise
        else:
            return None


def add_many(
    documents: Sequence[Document],
    *,
    encoded: Sequence[Any],
    on_duplicate: Sequence[OnDuplicate],
    inserter: Inserter,
) -> Operation[tuple[set[int], dict[int, Document]]]:
    """Insert one chunk; return the indexes of the duplicates, and the tasks that existed, by index.

    A task that was returned or replaced is no duplicate. In a transaction, a duplicate raises.
    """
    existing: dict[int, Document] = {}
    if inserter.session is not None:
        return set(), (yield from _add_in_transaction(documents, encoded, on_duplicate, inserter))
    left_out = yield from inserter.insert_many(documents, encoded)
    for index in sorted(left_out):
        if on_duplicate[index] == "raise":
            continue
        try:
            found = yield from add(
                documents[index],
                encoded=encoded[index],
                on_duplicate=on_duplicate[index],
                inserter=inserter,
            )
        except DuplicateTask:
            continue
        left_out.discard(index)
        if found is not None:
            existing[index] = found
    return left_out, existing


def _add_in_transaction(
    documents: Sequence[Document],
    encoded: Sequence[Any],
    on_duplicate: Sequence[OnDuplicate],
    inserter: Inserter,
) -> Operation[dict[int, Document]]:
    """Insert at once what raises for a duplicate, as that aborts the transaction, and then others.

    Returns the tasks that existed, by index.
    """
    singly = [
        index
        for index, (action, document) in enumerate(zip(on_duplicate, documents, strict=True))
        if action != "raise" or dedupe_keys.has_period(document)
    ]
    at_once = sorted(set(range(len(documents))).difference(singly))
    yield from enqueue.enqueue_many(
        [documents[index] for index in at_once],
        encoded=[encoded[index] for index in at_once],
        settings=inserter.settings,
        session=inserter.session,
    )
    existing: dict[int, Document] = {}
    for index in singly:
        found = yield from add(
            documents[index],
            encoded=encoded[index],
            on_duplicate=on_duplicate[index],
            inserter=inserter,
        )
        if found is not None:
            existing[index] = found
    return existing


def _duplicate_of_key(key: Document, document: Document) -> DuplicateTask:
    return DuplicateTask(
        queue=document["queue"],
        task_id=document["_id"],
        dedupe_key=document["dedupe_key"],
        existing_id=key["task_id"],
        held_until=key["until"],
    )


def _duplicate_of(
    found: Document,
    document: Document,
    *,
    code: DuplicateCode | None = None,
    reason: str | None = None,
) -> DuplicateTask:
    same_id = id_key(found["_id"]) == id_key(document["_id"])
    return DuplicateTask(
        queue=document["queue"],
        task_id=document["_id"],
        dedupe_key=None if same_id else document.get("dedupe_key"),
        existing_id=found["_id"],
        existing_queue=found.get("queue"),
        code=code,
        reason=reason,
    )


def _not_replaced(
    found: Document, duplicate: DuplicateTask, code: DuplicateCode, reason: str
) -> DuplicateTask:
    return DuplicateTask(
        queue=duplicate.queue,
        task_id=duplicate.task_id,
        dedupe_key=duplicate.dedupe_key,
        existing_id=duplicate.existing_id,
        existing_queue=found.get("queue"),
        held_until=duplicate.held_until,
        code=code,
        reason=reason,
    )


def _find_blocking_in(
    session: Any, document: Document, settings: QueueSettings
) -> Operation[Document | None]:
    """Return the task that blocks a new one, as the caller's transaction sees it."""
    found: list[Document] = yield Call("find", enqueue.blocking([document]), session=session)
    by_id = [one for one in found if id_key(one["_id"]) == id_key(document["_id"])]
    if not by_id and settings.separate_dlq and "insert_token" in document:
        dead = {"_id": {"$eq": document["_id"]}, **filters.DEAD}
        by_id = yield Call("find", dead, target=Target.DEAD_LETTERS, session=session)
    return next(iter([*by_id, *found]), None)


def _resolve(
    found: Document,
    document: Document,
    token: str,
    on_duplicate: OnDuplicate,
    duplicate: DuplicateTask,
    *,
    inserter: Inserter,
) -> Operation[Document | None]:
    """Return the task that was found, replaced if asked for; None if it was claimed or deleted.

    A replacement that is repeated after a lost reply does not match its own task. That task is
    returned, though a worker may have claimed or finished it since.
    """
    if found.get("queue") != document["queue"]:
        raise duplicate
    if on_duplicate == "return":
        return found
    if not _replaceable(found):
        # Our own replacement, if it was performed late and a worker has claimed it since.
        if found.get("replace_token") == token:
            return (yield from _find_replaced(found["_id"], token, inserter.settings))
        if found.get("status") == filters.PENDING:
            reason = "it is held, for example by a Spark load; try again later"
            raise _not_replaced(found, duplicate, "held", reason)
        reason = f"it is {found.get('status')}; only a pending task is replaced"
        raise _not_replaced(found, duplicate, "not_pending", reason)
    _check_key(found, document)
    # Another replacement may have given it another key since.
    same_key = {name: {"$eq": found.get(name)} for name in ("dedupe_key", "dedupe_until")}
    unchanged = {"_id": {"$eq": found["_id"]}, **REPLACEABLE, **same_key}
    try:
        replaced: Document | None = yield Call(
            "find_one_and_update",
            {**unchanged, "replace_token": {"$ne": token}},
            _replacement(document, token),
            return_document=ReturnDocument.AFTER,
            session=inserter.session,
        )
    except DuplicateKeyError as exc:  # A third task has the dedupe key.
        raise DuplicateTask(
            queue=document["queue"],
            task_id=document["_id"],
            dedupe_key=document.get("dedupe_key"),
            existing_id=None,
        ) from exc
    if replaced is not None:
        return replaced
    if inserter.session is not None:
        raise duplicate
    return (yield from _find_replaced(found["_id"], token, inserter.settings))


def _check_key(found: Document, document: Document) -> None:
    """Reject a replacement that changes which key is taken for a period: only an insert takes it.

    The document of the key would have to change together with the task.
    """
    until, key = found.get("dedupe_until"), found.get("dedupe_key")
    code: DuplicateCode = "other_key"
    if until is not None and key != document.get("dedupe_key"):
        reason = f"that task keeps its dedupe key; give dedupe_key={key!r}, or cancel it before"
    elif until is None and dedupe_keys.has_period(document):
        code = "no_period"
        reason = "that task has no dedupe_for; leave it out, or cancel that task before"
    else:
        return
    raise _duplicate_of(found, document, code=code, reason=reason)


def _find_replaced(task_id: Any, token: str, settings: QueueSettings) -> Operation[Document | None]:
    """Return the task that our own replacement changed, as a majority has it, or None."""
    ours = {"_id": {"$eq": task_id}, "replace_token": token}
    for target in dead_letter_targets(settings):
        replaced = yield from confirm.one(ours, target=target)
        if replaced is not None:
            return replaced
    return None


# A held task is not replaced: its release would undo that.
REPLACEABLE: Document = {"status": filters.PENDING, "next_retry_at": {"$ne": filters.FAR}}


def _replaceable(document: Document) -> bool:
    is_held = document.get("next_retry_at") == filters.FAR
    return document.get("status") == filters.PENDING and not is_held


def _replacement(document: Document, token: str) -> Document:
    """Return the update that gives a waiting task another payload and other options.

    It keeps its id, its place in the queue and its history, and starts to count attempts at zero.
    ``updated_at`` is the server's time at the write, not before: a claim that has read the former
    payload recognises by it that the task changed.
    """
    changes = {name: value for name, value in document.items() if name not in KEPT}
    gone = (OPTIONAL | OF_ATTEMPTS) - changes.keys()
    return {
        "$set": {"deadline_at": None, **changes, "replace_token": token},
        "$unset": dict.fromkeys(sorted(gone), ""),
        "$currentDate": {"updated_at": True},
    }
