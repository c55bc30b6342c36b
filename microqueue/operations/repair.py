"""Repair: find documents that no healthy run makes, and mend them.

A rule names one thing that can be wrong with a document, as an expression of MongoDB, and the
change that mends it. ``repair_rules`` has those of tasks, dead letters and dedupe keys. A scan
reads the collection in parts by id, so that no call takes long, and the server returns only what a
rule matches. Each write repeats the expression of its rule, so a document that a worker or a
sweeper changed in between is left alone. Every write is safe to repeat, and a repair that was
interrupted can be run again: what was mended no longer matches.

Nothing is deleted. A waiting task that cannot be mended safely becomes a dead letter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from pymongo.errors import DuplicateKeyError, OperationFailure

from microqueue.error_codes import INVALID_TASK
from microqueue.operations import burials, filters, mongo_errors
from microqueue.operations.call import Buried, Call, Document, Operation, Span, Target
from microqueue.operations.export import BY_ID, LARGEST_SAMPLED_SHARE
from microqueue.settings import QueueSettings
from microqueue.task_ids import id_key

PART = 20_000
"""How many documents one call reads at most."""
SMALL = 5_000
"""A collection of no more documents is read whole, not sampled."""
ROUNDS = 3
"""How often a part is looked at again: mending one field may show what is wrong with another."""
MOST_IDS = 10
"""How many documents of a rule are named; all are counted."""
CONVERSION_FAILURE = 241
BLAMED = mongo_errors.DOCUMENT_REJECTED | {mongo_errors.DUPLICATE_KEY, CONVERSION_FAILURE}
"""The error codes of a write that fails because of one document."""
FOUND = "rules"
KEY_TAKEN = "a live task has its dedupe key"


@dataclass(frozen=True)
class Moment:
    """When a repair runs, and for which collection."""

    now: datetime
    settings: QueueSettings
    collection: str


Change: TypeAlias = Callable[[Moment], Document]
"""Returns the fields to set, as expressions."""


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong with a task, a dead letter or a dedupe key.

    Args:
        name: The name in reports.
        wrong: What is wrong.
        remedy: What a repair does.
        broken: The expression that is true for such a document.
        change: The fields to set. None: the document is only reported.
        statuses: The statuses that it applies to. None: any.
        places: The collections that it applies to.
        buried_as: The error code, if the change makes the task a dead letter.
    """

    name: str
    wrong: str
    remedy: str
    broken: Document
    change: Change | None
    statuses: Sequence[str] | None = None
    places: Sequence[Target] = (Target.TASKS,)
    buried_as: str | None = None

    @property
    def expression(self) -> Document:
        """The whole condition, with the statuses."""
        if self.statuses is None:
            return self.broken
        return {"$and": [{"$in": ["$status", list(self.statuses)]}, self.broken]}

    def update(self, moment: Moment) -> list[Document]:
        """Return the update that mends a document. Of a dead letter, the time of failure stays."""
        if self.change is None:
            raise ValueError(f"rule {self.name!r} only reports")
        changes = self.change(moment)
        if Target.TASKS in self.places:
            stamp = {"$cond": [{"$eq": ["$status", filters.FAILED]}, "$updated_at", moment.now]}
            changes = {"updated_at": stamp, **changes}
        return [{"$set": changes}]


def burial(message: str | Document, moment: Moment, code: str = INVALID_TASK) -> Document:
    """Return the changes that make a waiting task a dead letter."""
    return {
        "status": filters.FAILED,
        "updated_at": moment.now,
        "finished_at": moment.now,
        "deadline_at": None,
        "lease_token": None,
        # Merged from one: a plain document would be merged into the stored one.
        "error": {"$mergeObjects": [{"message": message, "code": code, "at": moment.now}]},
    }


@dataclass
class Finding:
    """What one rule found and mended."""

    found: int = 0
    mended: int = 0
    left: int = 0
    ids: list[Any] = field(default_factory=list)


@dataclass
class Findings:
    """What a part of a collection has: by rule, and how many documents."""

    by_rule: dict[str, Finding] = field(default_factory=dict)
    documents: int = 0
    left: int = 0

    def of(self, rule: str) -> Finding:
        """Return the finding of a rule."""
        return self.by_rule.setdefault(rule, Finding())

    def note(self, rule: str, document_id: Any) -> None:
        """Note a document that a rule found."""
        finding = self.of(rule)
        finding.found += 1
        if len(finding.ids) < MOST_IDS:
            finding.ids.append(document_id)

    def add(self, other: Findings) -> None:
        """Add the findings of another part."""
        self.documents += other.documents
        self.left += other.left
        for name, one in other.by_rule.items():
            finding = self.of(name)
            finding.found += one.found
            finding.mended += one.mended
            finding.left += one.left
            finding.ids += one.ids[: MOST_IDS - len(finding.ids)]


# Scan


def next_part(target: Target, start: Sequence[Any]) -> Operation[list[Any]]:
    """Return the id with which the next part begins, in a list; an empty one is the end.

    It reads keys of the index of ids only. ``start`` is the first id of this part, in a list.
    """
    options: Document = {"hint": BY_ID, "skip": PART, "limit": 1}
    if start:
        options["min"] = {"_id": start[0]}
    found = yield Call("find", {}, {"_id": 1}, target=target, span=Span.LONG, **options)
    return [one["_id"] for one in found]


def find_part(
    rules: Sequence[Rule],
    target: Target,
    start: Sequence[Any],
    end: Sequence[Any],
    scope: Document | None = None,
) -> Operation[list[Document]]:
    """Return the malformed documents of a part, each with the names of its rules."""
    options: Document = {"hint": BY_ID}
    if start:
        options["min"] = {"_id": start[0]}
    if end:
        options["max"] = {"_id": end[0]}
    found: list[Document] = yield Call(
        "find",
        {**(scope or {}), "$expr": any_rule(rules)},
        _projection(rules),
        target=target,
        span=Span.LONG,
        **options,
    )
    return found


def sample_size(total: int, most: int) -> int | None:
    """Return how many documents of a collection to sample; None means that it is read whole.

    Of too large a share, ``$sample`` would read and sort the whole collection.
    """
    if total <= min(SMALL, most):
        return None
    return max(min(most, int(total * LARGEST_SAMPLED_SHARE)), 1)


def find_in_sample(
    rules: Sequence[Rule],
    target: Target,
    size: int | None,
    limit: timedelta,
    scope: Document | None = None,
) -> Operation[list[Document]]:
    """Return the malformed documents of a random sample, or of a small collection.

    Raises:
        ExecutionTimeout: It took longer than the limit.
    """
    pipeline: list[Document] = [
        # The size of a collection is an estimate, so the number is limited.
        {"$limit": 2 * SMALL} if size is None else {"$sample": {"size": size}},
        {"$match": {**(scope or {}), "$expr": any_rule(rules)}},
        {"$project": _projection(rules)},
    ]
    limit_ms = max(int(limit / timedelta(milliseconds=1)), 1)
    found: list[Document] = yield Call("aggregate", pipeline, target=target, maxTimeMS=limit_ms)
    return found


def estimate_size(target: Target) -> Operation[int]:
    """Return about how many documents a collection has, from its metadata."""
    return int((yield Call("estimated_document_count", target=target)))


def any_rule(rules: Sequence[Rule]) -> Document:
    """Return the expression that is true if any rule matches: each status is compared once."""
    groups: dict[tuple[str, ...] | None, list[Document]] = {}
    for rule in rules:
        key = None if rule.statuses is None else tuple(rule.statuses)
        groups.setdefault(key, []).append(rule.broken)
    return {
        "$or": [
            {"$or": broken}
            if statuses is None
            else {"$and": [{"$in": ["$status", list(statuses)]}, {"$or": broken}]}
            for statuses, broken in groups.items()
        ]
    }


def _projection(rules: Sequence[Rule]) -> Document:
    names = [{"$cond": [rule.expression, rule.name, None]} for rule in rules]
    matching = {"$filter": {"input": names, "cond": {"$ne": ["$$this", None]}}}
    return {**burials.FIELDS, FOUND: matching}


# Mend


def survey(found: Iterable[Document], *, left: bool = False) -> Findings:
    """Count what a scan found; with ``left``, as what a repair cannot change."""
    findings = Findings()
    for document in found:
        findings.documents += 1
        findings.left += left
        for name in document[FOUND]:
            findings.note(name, document["_id"])
            findings.of(name).left += left
    return findings


def mend(
    rules: Sequence[Rule], target: Target, found: Sequence[Document], moment: Moment
) -> Operation[Findings]:
    """Mend what a scan found, rule by rule, and look whether anything is left."""
    findings, seen = survey(found), _seen(found)
    left = list(found)
    mending = _Mending(target, moment)
    for _ in range(ROUNDS):
        mended = 0
        for rule in rules:
            chosen = [one for one in left if rule.name in one[FOUND]]
            if chosen and rule.change is not None:
                count = yield from mending.change(rule, chosen)
                findings.of(rule.name).mended += count
                mended += count
        left = yield from _again(rules, target, found, moment)
        for document in left:  # What the first change has brought to light.
            for name in document[FOUND]:
                if (name, id_key(document["_id"])) not in seen:
                    seen.add((name, id_key(document["_id"])))
                    findings.note(name, document["_id"])
        if not left or not mended:
            break
    findings.left = len(left)
    for name, count in Counter(name for one in left for name in one[FOUND]).items():
        findings.of(name).left = count
    return findings


def _seen(found: Iterable[Document]) -> set[tuple[str, Any]]:
    return {(name, id_key(one["_id"])) for one in found for name in one[FOUND]}


def _again(
    rules: Sequence[Rule], target: Target, found: Sequence[Document], moment: Moment
) -> Operation[list[Document]]:
    """Return which of these documents are malformed now."""
    left: list[Document] = []
    for batch in batches(found, moment.settings.batch_size):
        these = {**_these(batch), "$expr": any_rule(rules)}
        left += yield Call("find", these, _projection(rules), target=target)
    return left


def batches(documents: Sequence[Document], size: int) -> Iterator[Sequence[Document]]:
    """Split documents, so that their ids fit into one filter."""
    for start in range(0, len(documents), size):
        yield documents[start : start + size]


def _these(documents: Iterable[Document]) -> Document:
    return filters.any_of(one["_id"] for one in documents)


class _Mending:
    """The repair of a part, and the dead letters that it has reported."""

    def __init__(self, target: Target, moment: Moment) -> None:
        self._target = target
        self._moment = moment
        self._reported: set[Any] = set()

    def change(self, rule: Rule, chosen: Sequence[Document]) -> Operation[int]:
        """Mend documents that a rule still matches; return how many were changed."""
        count = 0
        if rule.buried_as is not None:
            # An earlier rule may have buried a document that was chosen for this one, too.
            chosen = [one for one in chosen if id_key(one["_id"]) not in self._reported]
        for batch in batches(chosen, self._moment.settings.batch_size):
            still = {**_these(batch), "$expr": rule.expression}
            update = rule.update(self._moment)
            certain = False
            try:
                result = yield Call("update_many", still, update, target=self._target)
                changed = int(result.modified_count)
                certain = changed == len(batch)
            except OperationFailure as exc:
                if not _blames_document(exc):
                    raise
                # One of them stops the others. It has changed those before it.
                rest = yield Call("find", still, {**burials.FIELDS}, target=self._target)
                changed = len(batch) - len(rest)
                for one in rest:
                    changed += yield from self._change_one(rule, one)
            if rule.buried_as is not None:
                error = {"message": rule.wrong, "code": rule.buried_as, "at": self._moment.now}
                buried = yield from self._report(batch, error, certain=certain)
                changed = max(changed, buried)  # None was changed by a repeat after a lost reply.
            count += changed
        return count

    def _change_one(self, rule: Rule, document: Document) -> Operation[int]:
        """Mend one document; return 0 if it breaks a validation rule of the collection."""
        still = {"_id": {"$eq": document["_id"]}, "$expr": rule.expression}
        try:
            result = yield Call("update_one", still, rule.update(self._moment), target=self._target)
        except DuplicateKeyError:
            return (yield from self._bury_duplicate(still, document))
        except OperationFailure as exc:
            if not _blames_document(exc):
                raise
            return 0
        return int(result.modified_count)

    def _bury_duplicate(self, still: Document, document: Document) -> Operation[int]:
        """Make a waiting task a dead letter, because a live task has its dedupe key."""
        waits = {**still, "status": filters.PENDING}
        try:
            result = yield Call("update_one", waits, [{"$set": burial(KEY_TAKEN, self._moment)}])
        except OperationFailure as exc:
            if not _blames_document(exc):
                raise
            return 0
        error = {"message": KEY_TAKEN, "code": INVALID_TASK, "at": self._moment.now}
        certain = bool(result.modified_count)
        return (yield from self._report([document], error, certain=certain))

    def _report(
        self, batch: Sequence[Document], error: Document, *, certain: bool
    ) -> Operation[int]:
        """Report which documents a write made dead letters, each once; return how many.

        The errors are those that are stored. If it is ``certain`` that the write buried all of
        them, those that were moved or replayed since are reported with ``error``.
        """
        buried = {**filters.DEAD, "finished_at": error["at"], "error.code": error["code"]}
        stored = yield Call("find", {**_these(batch), **buried}, {**burials.FIELDS, "error": 1})
        letters = {id_key(one["_id"]): {**one, "error": error} for one in batch if certain}
        letters |= {id_key(one["_id"]): one for one in stored}
        fresh = [one for key, one in letters.items() if key not in self._reported]
        self._reported.update(letters)
        if fresh:
            yield Buried(
                [
                    burials.of_document(one, {name: one["error"].get(name) for name in error})
                    for one in fresh
                ]
            )
        return len(fresh)


def _blames_document(error: OperationFailure) -> bool:
    """Return whether the same write to another document may succeed."""
    return error.code in BLAMED
