"""Batches: change all that matches, a batch at a time, and count what was done.

Workers and other sweepers change the same documents. So a batch may change fewer documents than
it read, which says nothing about how many are left. A loop ends when nothing is left to read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from microqueue.clock import LARGEST_SKEW, later
from microqueue.operations.call import Call, Document, Operation, Span, Target
from microqueue.task_ids import id_key

MOST_NAMED = 10
"""How many new dead letters are named per code; all are counted."""

Read: TypeAlias = Callable[[Sequence[Any], int], Operation[list[Document]]]
"""Reads the next documents: without the given ids, up to a limit."""


@dataclass
class BurialCount:
    """How many tasks became dead letters with one code, and the ids of the first ones."""

    count: int = 0
    ids: list[Any] = field(default_factory=list)


class SweepProgress:
    """What a sweep has done so far, and whether it may continue.

    ``may_proceed`` is asked before each batch. Once it returns false, every job stops.
    """

    def __init__(self, may_proceed: Callable[[], Operation[bool]] | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.burials: dict[str, BurialCount] = {}
        self.stopped = False
        self.rejection: Exception | None = None
        self._may_proceed = may_proceed

    def proceed(self) -> Operation[bool]:
        """Return whether to continue."""
        if not self.stopped and self._may_proceed is not None:
            self.stopped = not (yield from self._may_proceed())
        return not self.stopped

    def bury(self, code: str, ids: Iterable[Any], count: int) -> None:
        """Note tasks that became dead letters."""
        if count:
            burial = self.burials.setdefault(code, BurialCount())
            burial.count += count
            burial.ids += list(ids)[: MOST_NAMED - len(burial.ids)]

    def raise_rejection(self) -> None:
        """Raise the error of the first task that could not be changed at all."""
        rejection, self.rejection = self.rejection, None
        if rejection is not None:
            raise rejection


class Batches:
    """Reads batches of documents to change, until nothing is left.

    A document that is read again after a batch changed fewer than it read cannot be changed. It is
    skipped, or the loop would never end.
    """

    def __init__(self, read: Read, progress: SweepProgress | None = None) -> None:
        self._read = read
        self._progress = progress or SweepProgress()
        self._passed: dict[Hashable, Any] = {}
        self._batch: frozenset[Hashable] = frozenset()
        self._unchanged: frozenset[Hashable] = frozenset()

    @classmethod
    def of(
        cls,
        selection: Document,
        fields: Document | None = None,
        *,
        progress: SweepProgress | None = None,
        sort: Sequence[tuple[str, int]] | None = None,
        target: Target = Target.TASKS,
        span: Span | None = None,
    ) -> Batches:
        """Read what a filter matches; ``span`` is how long that may take."""
        order: Document = {} if sort is None else {"sort": list(sort)}

        def read(passed: Sequence[Any], limit: int) -> Operation[list[Document]]:
            query = without(selection, passed)
            found: list[Document] = yield Call(
                "find", query, fields, limit=limit, target=target, span=span, **order
            )
            return found

        return cls(read, progress)

    def next(self, limit: int) -> Operation[list[Document]]:
        """Read the next batch; an empty one is the end."""
        while (yield from self._progress.proceed()):
            found = yield from self._read(list(self._passed.values()), limit)
            keys = {id_key(document["_id"]): document for document in found}
            stuck = [key for key in keys if key in self._unchanged and key not in self._passed]
            self.pass_over(keys[key]["_id"] for key in stuck)
            fresh = [document for key, document in keys.items() if key not in self._passed]
            if fresh or not stuck:
                self._batch = frozenset(map(id_key, (one["_id"] for one in fresh)))
                return fresh
        return []

    def wrote(self, count: int) -> None:
        """Note how many of the batch were changed."""
        self._unchanged = self._batch if count < len(self._batch) else frozenset()

    def pass_over(self, ids: Iterable[Any]) -> None:
        """Skip these ids from now on."""
        self._passed.update((id_key(one), one) for one in ids)


def without(selection: Document, ids: Sequence[Any]) -> Document:
    """Match the same selection without these ids."""
    return {"$and": [selection, {"_id": {"$nin": list(ids)}}]} if ids else selection


def not_after(name: str, now: datetime, *, skew: timedelta = LARGEST_SKEW) -> Document:
    """Match documents whose instant in a field is not after now, is missing, or is no date.

    It ends a loop over what others keep adding. Clocks may differ by ``skew``.
    """
    return {"$nor": [{name: {"$gt": later(now, skew)}}]}
