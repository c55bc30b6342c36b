"""Find and repair stored documents that no healthy run makes.

    from microqueue.repair import repair

    report = repair(queue)  # a dry run
    for one in report.rules:
        print(one.found, one.wrong, one.ids)
    repair(queue, apply=True)

``microqueue doctor --repair`` does the same. ``docs/repair.md`` lists the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from pymongo.errors import ExecutionTimeout, OperationFailure

from microqueue.arguments import check_callback
from microqueue.clock import Clock
from microqueue.core import core_of
from microqueue.model import Model
from microqueue.operations import repair as operations
from microqueue.operations import repair_records as records
from microqueue.operations import schema
from microqueue.operations.call import Document, Operation, Target, dlq_collection_name
from microqueue.operations.dedupe_keys import of_collection
from microqueue.operations.mongo_errors import UNAUTHORIZED
from microqueue.operations.repair import Findings, Moment, Rule
from microqueue.operations.repair_rules import find_unnameable, rules_for
from microqueue.operations.server_clock import read_clock
from microqueue.queue import Queue
from microqueue.settings import QueueSettings

__all__ = ["RepairReport", "RuleReport", "repair"]

T = TypeVar("T")

SCANNED = (Target.TASKS, Target.DEAD_LETTERS, Target.DEDUPE_KEYS)
SAMPLE = 10_000
"""How many documents of a collection ``doctor`` looks at, at most."""


class RuleReport(Model):
    """What one rule of a repair found: a document may be found by several rules."""

    rule: str
    collection: str
    wrong: str
    """What is wrong."""
    remedy: str
    """What a repair does about it."""
    found: int
    repaired: int = 0
    """How many documents this rule changed."""
    left: int = 0
    """How many still match after a repair: they can only be reported, or could not be changed."""
    ids: Sequence[Any] = ()
    """The ids of the first ones."""


class RepairReport(Model):
    """What a repair found and repaired, or would repair."""

    applied: bool
    """Whether it was no dry run."""
    documents: int
    """How many documents are malformed."""
    left: int
    """How many of them still are. In a dry run: all."""
    rules: Sequence[RuleReport] = ()
    """The rules that found something."""
    unread: Sequence[str] = ()
    """Collections that this user may not read, or not change; what was read is reported."""

    @property
    def clean(self) -> bool:
        """Whether nothing is malformed, or nothing is any more."""
        return not self.left


def repair(
    queue: Queue[Any],
    *,
    apply: bool = False,
    on_part: Callable[[str, int], None] | None = None,
) -> RepairReport:
    """Find documents that no healthy run makes, and repair them with ``apply``.

    It reads the whole collection, for all queues, in parts. It is safe beside workers and
    sweepers: each write repeats the condition that it was decided on. A repair that was
    interrupted can be run again. Nothing is deleted.

    Args:
        queue: A queue of the collection. All queues of the collection are repaired.
        apply: Repair them. Without it, nothing is changed.
        on_part: A function that is called after each part with the name of the collection, and
            the number of malformed documents in it so far.

    Returns:
        What was found, by rule.

    Raises:
        InvalidArgument: It is not a queue, or ``on_part`` is no function.
        SchemaTooOld: The collection has an older schema version; migrate it first.
        SchemaTooNew: A newer version of microqueue wrote the collection.
        ServerUnavailable: The server cannot be reached.
    """
    check_callback("on_part", on_part)
    core = core_of(queue)
    job = RepairJob(core.collections.name, core.settings, core.clock)
    return core.run(job.run(apply=apply, on_part=on_part))


def sample(queue: Queue[Any], size: int = SAMPLE) -> Sampled:
    """Count malformed documents without reading a whole collection. Read-only.

    Args:
        queue: A queue of the collection.
        size: How many documents to look at, of each collection, at most.

    Returns:
        How many there are, and whether that is all.
    """
    core = core_of(queue)
    job = RepairJob(core.collections.name, core.settings, core.clock)
    return core.run(job.sample(size))


class Sampled(NamedTuple):
    """How many malformed documents a sample has."""

    malformed: int
    size: int
    """How many documents of a collection were looked at, at most."""
    whole: bool
    """Whether the sample is everything."""
    late: Sequence[str] = ()
    """Collections that were not read, because that took too long."""


class RepairJob:
    """One repair of a collection. It performs no I/O: each method is an operation."""

    def __init__(self, collection: str, settings: QueueSettings, clock: Clock) -> None:
        self._collection = collection
        self._settings = settings
        self._clock = clock
        self._unread: list[str] = []
        self._reports: list[RuleReport] = []
        self._documents = self._left = 0

    def run(
        self, *, apply: bool, on_part: Callable[[str, int], None] | None = None
    ) -> Operation[RepairReport]:
        """Find what is malformed, and repair it with ``apply``."""
        yield from schema.check(self._collection, self._settings.retention)
        unnameable = (yield from self._allowed(Target.TASKS, find_unnameable())) or []
        for target in SCANNED:
            found, rules = Findings(), rules_for(target, unnameable)
            yield from self._allowed(target, self._scan(target, rules, found, apply, on_part))
            self._note(found, target, rules)
        found = Findings()
        yield from self._allowed(Target.DEAD_LETTERS, self._compare(found))
        self._note(found, Target.DEAD_LETTERS, [records.IN_BOTH])
        for rule in records.RECORD_RULES:
            found = Findings()
            yield from self._allowed(rule.target, self._check(rule, found, apply=apply))
            self._note(found, rule.target, [rule])
        return RepairReport(
            applied=apply,
            documents=self._documents,
            left=self._left if apply else self._documents,
            rules=self._reports,
            unread=self._unread,
        )

    def sample(self, size: int) -> Operation[Sampled]:
        """Count what is malformed in a sample of each large collection, and in all small ones."""
        count, sizes, late = Findings(), list[int](), list[str]()
        unnameable = (yield from self._allowed(Target.TASKS, find_unnameable())) or []
        for target in SCANNED:
            rules = rules_for(target, unnameable)
            look = self._look(target, rules, size, count)
            try:
                sampled = yield from self._allowed(target, look)
            except ExecutionTimeout:
                late.append(self._name(target))
            else:
                sizes += [] if sampled is None else [sampled]
        for rule in records.RECORD_RULES:
            yield from self._allowed(rule.target, self._check(rule, count, apply=False))
        return Sampled(count.documents, max(sizes, default=size), whole=not sizes, late=late)

    def _scan(
        self,
        target: Target,
        rules: Sequence[Rule],
        found: Findings,
        apply: bool,  # noqa: FBT001 (it is passed on)
        on_part: Callable[[str, int], None] | None,
    ) -> Operation[None]:
        scope = self._scope(target)
        start: list[Any] = []
        rejected = False  # Whether this user may read the collection, and not change it.
        while True:
            end = yield from operations.next_part(target, start)
            part = yield from operations.find_part(rules, target, start, end, scope)
            if apply and part and not rejected:
                moment = yield from self._moment()
                try:
                    found.add((yield from operations.mend(rules, target, part, moment)))
                except OperationFailure as exc:
                    if exc.code != UNAUTHORIZED:
                        raise
                    self._leave_out(target)
                    rejected = True
                    found.add(operations.survey(part, left=True))
            else:
                found.add(operations.survey(part, left=apply))
            if on_part is not None:
                on_part(self._name(target), found.documents)
            if not end:
                return
            start = end

    def _look(
        self,
        target: Target,
        rules: Sequence[Rule],
        size: int,
        found: Findings,
    ) -> Operation[int | None]:
        """Look at a sample; return its size, or None if that is the whole collection."""
        total = yield from operations.estimate_size(target)
        sampled = operations.sample_size(total, size)
        limit, scope = self._settings.long_call_timeout, self._scope(target)
        part = yield from operations.find_in_sample(rules, target, sampled, limit, scope)
        found.add(operations.survey(part))
        return sampled

    def _compare(self, found: Findings) -> Operation[None]:
        start: list[Any] = []
        while True:
            end = yield from operations.next_part(Target.DEAD_LETTERS, start)
            size = self._settings.batch_size
            found.add((yield from records.find_in_both(start, end, batch_size=size)))
            if not end:
                return
            start = end

    def _check(self, rule: records.RecordRule, found: Findings, *, apply: bool) -> Operation[None]:
        moment = yield from self._moment()
        try:
            findings = yield from records.check_records(rule, moment, apply=apply)
        except OperationFailure as exc:
            if not apply or exc.code != UNAUTHORIZED:
                raise
            self._leave_out(rule.target)
            findings = yield from records.check_records(rule, moment, apply=False)
        found.add(findings)

    def _moment(self) -> Operation[Moment]:
        now = yield from read_clock(self._clock)
        return Moment(now, self._settings, self._collection)

    def _allowed(self, target: Target, operation: Operation[T]) -> Operation[T | None]:
        """Run an operation; leave out a collection that this user has no right to."""
        try:
            return (yield from operation)
        except OperationFailure as exc:
            if exc.code != UNAUTHORIZED:
                raise
            self._leave_out(target)
            return None

    def _leave_out(self, target: Target) -> None:
        if (name := self._name(target)) not in self._unread:
            self._unread.append(name)

    def _note(
        self, found: Findings, target: Target, rules: Sequence[Rule | records.RecordRule]
    ) -> None:
        self._documents += found.documents
        self._left += found.left
        for rule in rules:
            if (finding := found.by_rule.get(rule.name)) is None:
                continue
            self._reports.append(
                RuleReport(
                    rule=rule.name,
                    collection=self._name(target),
                    wrong=rule.wrong,
                    remedy=rule.remedy,
                    found=finding.found,
                    repaired=finding.mended,
                    left=finding.left,
                    ids=finding.ids,
                )
            )

    def _scope(self, target: Target) -> Document:
        """Match the documents that belong to this collection of tasks."""
        return of_collection(self._collection) if target is Target.DEDUPE_KEYS else {}

    def _name(self, target: Target) -> str:
        if target is Target.TASKS:
            return self._collection
        if target is Target.DEAD_LETTERS:
            return dlq_collection_name(self._collection)
        return f"microqueue_{target}"
