"""A model of MongoDB: collections, calls and majority write concern, as documented.

A write is applied to the primary at once, and is committed when its reply is sent: a majority has
it, and everything before it. A failover undoes what is not committed.
``test_model.py`` compares the model with a real server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from bson import decode
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import DeleteOne, ReturnDocument, UpdateOne
from pymongo.errors import BulkWriteError, DuplicateKeyError, OperationFailure

from microqueue.operations.call import Call, Target, apply_each
from tests.simulation.documents import (
    MISSING,
    Document,
    compiled,
    in_order,
    key_of,
    passes,
    project,
    stored,
    updated,
)

DUPLICATE_KEY = 11000
NAMESPACE_EXISTS = 48
CODEC: CodecOptions[Any] = CodecOptions(tz_aware=True, tzinfo=UTC)
READS = frozenset({"find", "find_one", "index_information", "count_documents", "command"})
MULTIPLE = frozenset({"update_many", "delete_many", "bulk_write", "insert_many"})
"""Writes to several documents, one after the other."""


class Interrupted(Exception):
    """The primary stepped down in the middle of a write to several documents."""


class Collection:
    """The documents of a collection by the keys of their ids, and by status and dedupe key."""

    def __init__(self, *, is_tasks: bool = False) -> None:
        self.documents: dict[Any, Document] = {}
        self.by_status: dict[Any, dict[Any, Document]] = {}
        self.live_keys: dict[Any, Any] = {}
        self._is_tasks = is_tasks

    def put(self, key: Any, document: Document) -> Document | None:
        """Store a document; return the one before, or raise for a second live dedupe key."""
        live = self._live_key(document) if self._is_tasks else None
        if live is not None and self.live_keys.get(live, key) != key:
            raise DuplicateKeyError("E11000 duplicate key", DUPLICATE_KEY)
        before = self.documents.get(key)
        if before is not None:
            self._forget(key, before)
        self._remember(key, document, live)
        return before

    def remove(self, key: Any) -> Document:
        """Delete a document, and return it."""
        before = self.documents.pop(key)
        self._forget(key, before)
        return before

    def restore(self, key: Any, before: Document | None) -> None:
        """Undo a write: the document was as given before."""
        if key in self.documents:
            self._forget(key, self.documents[key])
        if before is None:
            self.documents.pop(key, None)
        else:
            self._remember(key, before, self._live_key(before) if self._is_tasks else None)

    def _remember(self, key: Any, document: Document, live: Any) -> None:
        self.documents[key] = document
        status = document.get("status")
        try:
            self.by_status[status][key] = document
        except KeyError:
            self.by_status[status] = {key: document}
        if live is not None:
            self.live_keys[live] = key

    def _forget(self, key: Any, document: Document) -> None:
        del self.by_status[document.get("status")][key]
        if self._is_tasks and (live := self._live_key(document)) is not None:
            self.live_keys.pop(live, None)

    def _live_key(self, document: Document) -> Any:
        """Return the key of the unique index on dedupe keys, if the document is in it."""
        name = document.get("dedupe_key")
        if isinstance(name, str) and document.get("finished_at") is None:
            return document["queue"], name
        return None

    def matching(self, selection: Mapping[str, Any], most: int = 0) -> list[Document]:
        """Return the documents that a filter matches, at most so many."""
        candidates = self._candidates(selection)
        if candidates is None:
            candidates = self.documents.values()
        elif not candidates:
            return []
        tests = compiled(selection)
        found: list[Document] = []
        for document in candidates:
            if passes(document, tests):
                found.append(document)
                if len(found) == most:
                    break
        return found

    def _candidates(self, selection: Mapping[str, Any]) -> Iterable[Document] | None:
        """Return all that a filter can match, by an index; None if there is none."""
        wanted = selection.get("_id", MISSING)
        if wanted is not MISSING:
            ids = self._ids(wanted)
            if ids is not None:
                get = self.documents.get
                found = (get(key_of(one)) for one in ids)
                return list({id(one): one for one in found if one is not None}.values())
        status = selection.get("status", MISSING)
        if type(status) is str:
            return list(self.by_status.get(status, {}).values())
        if self._is_tasks and "dedupe_key" in selection and selection.get("finished_at", 0) is None:
            names = self._ids(selection["dedupe_key"])
            if names is not None and type(selection.get("queue")) is str:
                keys = (self.live_keys.get((selection["queue"], one)) for one in names)
                return [self.documents[one] for one in dict.fromkeys(keys) if one is not None]
        if "$and" in selection:
            parts = [self._candidates(one) for one in selection["$and"]]
            return next((one for one in parts if one is not None), None)
        if "$or" in selection:
            parts = [self._candidates(one) for one in selection["$or"]]
            if None not in parts:
                every = [one for part in parts for one in part or ()]
                return list({id(one): one for one in every}.values())
        return None

    def _ids(self, condition: Any) -> Sequence[Any] | None:
        if type(condition) is not dict:
            return [condition]
        if "$eq" in condition:
            return [condition["$eq"]]
        if "$in" in condition:
            return list(condition["$in"])
        first = next(iter(condition), "$")
        return None if first[:1] == "$" else [condition]


class Server:
    """A replica set, seen by its clients as one primary.

    Args:
        now: Returns the server's time.
        check: Called with each document that is written to ``tasks``.
    """

    def __init__(
        self, now: Callable[[], datetime], check: Callable[[Document], object] = bool
    ) -> None:
        self._now = now
        self._check = check
        self.tasks = Collection(is_tasks=True)
        self.dead_letters = Collection()
        self.collections: dict[str, Collection] = {
            Target.TASKS: self.tasks,
            Target.CLAIMS: self.tasks,
            Target.DEAD_LETTERS: self.dead_letters,
        }
        self._log: list[tuple[int, Collection, Any, Document | None]] = []
        self._writes = 0
        self._committed = 0
        self._in_transaction = False
        self._left = -1

    def perform(self, call: Call, most: int = -1) -> tuple[Any, int]:
        """Apply a call on the primary; return the reply, and the number of the last write.

        The reply must not be sent before :meth:`commit` with that number.

        Args:
            call: The call.
            most: Step down after so many documents are written; below zero: do not.

        Raises:
            Interrupted: ``most`` documents were written.
        """
        collection = self.collections.get(call.target)
        if collection is None:
            collection = self.collections[call.target] = Collection()
        self._left = most
        if call.atomic:
            return self._perform_atomically(collection, call), self._writes
        reply = getattr(self, f"_{call.method}")(collection, *call.arguments, **call.options)
        if call.target is Target.CLAIMS:
            reply = [_without_zones(one) for one in reply]
        if call.each is not None:
            reply = apply_each(reply, call.each())
        # A write that changes nothing still waits for all that came before it; a read does not.
        return reply, 0 if call.method in READS else self._writes

    def _perform_atomically(self, collection: Collection, call: Call) -> Any:
        """Perform a call as a transaction: all of it is one write, or it is undone."""
        self._writes += 1
        self._in_transaction = True
        before = len(self._log)
        try:
            return getattr(self, f"_{call.method}")(collection, *call.arguments, **call.options)
        except BaseException:
            for _, place, key, document in reversed(self._log[before:]):
                place.restore(key, document)
            del self._log[before:]
            raise
        finally:
            self._in_transaction = False

    def commit(self, write: int) -> None:
        """Replicate to a majority up to a write, by its number."""
        if write > self._committed:
            self._committed = write
            log = self._log
            if log and log[-1][0] <= write:
                log.clear()
            else:
                self._log = [one for one in log if one[0] > write]

    @property
    def last_write(self) -> int:
        """The number of the last write."""
        return self._writes

    @property
    def uncommitted(self) -> int:
        """How many writes no majority has."""
        return self._writes - self._committed

    def fail_over(self, replicated: int = 0) -> tuple[int, int]:
        """Elect a primary that has only what is committed.

        Args:
            replicated: How many of the writes that were not acknowledged a majority has.

        Returns:
            The last committed write, and how many writes were undone.
        """
        self.commit(self._committed + min(replicated, self.uncommitted))
        undone = len({one[0] for one in self._log})
        for _, collection, key, before in reversed(self._log):
            collection.restore(key, before)
        self._log.clear()
        # Numbers are not used again: a call that was undone has a number that is not committed.
        committed, self._committed = self._committed, self._writes
        return committed, undone

    # Reads

    def _find(
        self,
        collection: Collection,
        selection: Mapping[str, Any],
        fields: Mapping[str, int] | None = None,
        *,
        sort: Sequence[tuple[str, int]] = (),
        limit: int = 0,
        batch_size: int = 0,
    ) -> list[Document]:
        del batch_size
        limit = abs(limit)
        found = collection.matching(selection, 0 if sort else limit)
        if sort and len(found) > 1:
            in_order(found, sort)
        return [project(one, fields) for one in (found[:limit] if limit else found)]

    def _find_one(
        self,
        collection: Collection,
        selection: Mapping[str, Any],
        fields: Mapping[str, int] | None = None,
        **options: Any,
    ) -> Document | None:
        found = self._find(collection, selection, fields, limit=1, **options)
        return found[0] if found else None

    def _count_documents(self, collection: Collection, selection: Mapping[str, Any]) -> int:
        return len(collection.matching(selection))

    def _index_information(self, _collection: Collection) -> Document:
        return {}

    def _command(self, _collection: Collection, command: Any) -> Document:
        if command != "hello":
            raise NotImplementedError(str(command))
        return {"localTime": self._now()}

    # Writes

    def _insert_one(self, collection: Collection, document: Any) -> Any:
        new = _decoded(document)
        self._insert(collection, new)
        return SimpleNamespace(inserted_id=new["_id"])

    def _insert_many(
        self, collection: Collection, documents: Sequence[Any], *, ordered: bool
    ) -> Any:
        if ordered:
            raise NotImplementedError("ordered=True")
        errors = []
        inserted = []
        for index, one in enumerate(documents):
            new = _decoded(one)
            try:
                self._insert(collection, new)
            except DuplicateKeyError as exc:
                errors.append({"index": index, "code": DUPLICATE_KEY, "errmsg": str(exc)})
                if self._in_transaction:  # It aborts the transaction.
                    break
            else:
                inserted.append(new["_id"])
        if errors:
            raise _bulk_error(errors, nInserted=len(inserted))
        return SimpleNamespace(inserted_ids=inserted)

    def _insert(self, collection: Collection, new: Document) -> None:
        if key_of(new["_id"]) in collection.documents:
            raise DuplicateKeyError("E11000 duplicate key", DUPLICATE_KEY)
        self._put(collection, new)

    def _update_one(
        self,
        collection: Collection,
        selection: Mapping[str, Any],
        update: Document,
        *,
        upsert: bool = False,
    ) -> Any:
        found = collection.matching(selection, 1)
        if not found and upsert:
            self._upsert(collection, selection, update)
            return SimpleNamespace(matched_count=0, modified_count=0)
        return self._change(collection, found, selection, update)

    def _update_many(
        self, collection: Collection, selection: Mapping[str, Any], update: Document
    ) -> Any:
        return self._change(collection, collection.matching(selection), selection, update)

    def _replace_one(
        self,
        collection: Collection,
        selection: Mapping[str, Any],
        document: Document,
        *,
        upsert: bool = False,
    ) -> Any:
        found = collection.matching(selection, 1)
        new = stored(document)
        if found:
            changed = found[0] != new
            if changed:
                self._put(collection, {**new, "_id": found[0]["_id"]})
            return SimpleNamespace(matched_count=1, modified_count=int(changed))
        if upsert:
            self._insert(collection, new)
        return SimpleNamespace(matched_count=0, modified_count=0)

    def _find_one_and_update(
        self,
        collection: Collection,
        selection: Mapping[str, Any],
        update: Document,
        *,
        sort: Sequence[tuple[str, int]] = (),
        upsert: bool = False,
        return_document: bool = ReturnDocument.BEFORE,
    ) -> Document | None:
        if return_document is not ReturnDocument.AFTER:
            raise NotImplementedError(f"return_document={return_document}")
        found = collection.matching(selection, 0 if sort else 1)
        if not found:
            return self._upsert(collection, selection, update).copy() if upsert else None
        first = in_order(found, sort)[0]
        self._change(collection, [first], selection, update)
        return collection.documents[key_of(first["_id"])].copy()

    def _delete_one(self, collection: Collection, selection: Mapping[str, Any]) -> Any:
        return self._delete(collection, collection.matching(selection, 1))

    def _delete_many(self, collection: Collection, selection: Mapping[str, Any]) -> Any:
        return self._delete(collection, collection.matching(selection))

    def _bulk_write(self, collection: Collection, requests: Sequence[Any], *, ordered: bool) -> Any:
        if ordered:
            raise NotImplementedError("ordered=True")
        matched = modified = deleted = 0
        errors = []
        for index, one in enumerate(requests):
            try:
                if type(one) is UpdateOne:
                    reply = self._update_one(collection, one._filter, one._doc)  # type: ignore[arg-type]  # noqa: SLF001
                    matched += reply.matched_count
                    modified += reply.modified_count
                elif type(one) is DeleteOne:
                    deleted += self._delete_one(collection, one._filter).deleted_count  # noqa: SLF001
                else:
                    raise NotImplementedError(type(one).__name__)
            except OperationFailure as exc:
                errors.append({"index": index, "code": exc.code, "errmsg": str(exc)})
        if errors:
            raise _bulk_error(errors, nMatched=matched, nModified=modified, nRemoved=deleted)
        return SimpleNamespace(
            matched_count=matched, modified_count=modified, deleted_count=deleted
        )

    def _change(
        self,
        collection: Collection,
        found: Iterable[Document],
        selection: Mapping[str, Any],
        update: Document,
    ) -> Any:
        matched = modified = 0
        now = self._now()
        for document in found:
            matched += 1
            changed = updated(document, update, now, selection=selection)
            if changed is not None:
                self._put(collection, changed)
                modified += 1
        return SimpleNamespace(matched_count=matched, modified_count=modified)

    def _upsert(
        self, collection: Collection, selection: Mapping[str, Any], update: Document
    ) -> Document:
        plain = {
            name: value
            for name, value in selection.items()
            if name[0] != "$" and "." not in name and not isinstance(value, dict)
        }
        after = updated(plain, update, self._now(), selection=selection, inserting=True) or plain
        self._insert(collection, after)
        return after

    def _delete(self, collection: Collection, found: Iterable[Document]) -> Any:
        count = 0
        for document in found:
            key = key_of(document["_id"])
            self._step()
            self._note(collection, key, collection.remove(key))
            count += 1
        return SimpleNamespace(deleted_count=count)

    def _put(self, collection: Collection, document: Document) -> None:
        self._step()
        key = key_of(document["_id"])
        before = collection.put(key, document)
        self._note(collection, key, before)
        if collection is self.tasks:
            self._check(document)

    def _step(self) -> None:
        if self._left == 0:
            raise Interrupted
        self._left -= 1

    def _note(self, collection: Collection, key: Any, before: Document | None) -> None:
        if not self._in_transaction:
            self._writes += 1
        self._log.append((self._writes, collection, key, before))


def _decoded(document: Any) -> Document:
    """Return a document to insert as it is stored."""
    if isinstance(document, RawBSONDocument):
        return dict(decode(document.raw, CODEC))
    return dict(stored(document))


def _without_zones(value: Any) -> Any:
    """Return a value as a driver returns it that leaves out timezones."""
    kind = type(value)
    if kind is datetime:
        return value.replace(tzinfo=None)
    if kind is dict:
        return {name: _without_zones(one) for name, one in value.items()}
    if kind is list and value:
        return [_without_zones(one) for one in value]
    return value


def _bulk_error(errors: Sequence[Document], **counts: int) -> BulkWriteError:
    none = {"nInserted": 0, "nMatched": 0, "nModified": 0, "nRemoved": 0}
    return BulkWriteError({"writeErrors": list(errors), "writeConcernErrors": [], **none, **counts})
