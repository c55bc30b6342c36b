"""Batches: change all that matches, a batch at a time, and keep account of it.

A batch is shared with others: workers claim, other sweepers promote. So fewer documents may be
changed than were read, which says nothing about how many are left. A loop ends when nothing is
left to read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

from microqueue.clock import LARGEST_SKEW, later
from microqueue.operations import id_order
from microqueue.operations.call import Call, Document, Operation, Span, Target

MOST_NAMED = 10
"""How many buried tasks are named per code; all are counted."""

Read: TypeAlias = Callable[[Sequence[Any], int], Operation[list[Document]]]
"""Reads the next documents: without those of the given ids, and at most so many."""


@dataclass
class Burial:
    """How many tasks were buried with one code, and the ids of the first ones."""

    count: int = 0
    ids: list[Any] = field(default_factory=list)


class Progress:
    """What a sweep has done so far, and whether it may go on.

    ``may_proceed`` is asked before each batch. Once it says no, every duty ends where it is.
    """

    def __init__(self, may_proceed: Callable[[], Operation[bool]] | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self.burials: dict[str, Burial] = {}
        self.stopped = False
        self.refused: Exception | None = None
        self._may_proceed = may_proceed

    def proceed(self) -> Operation[bool]:
        """Ask whether to go on."""
        if not self.stopped and self._may_proceed is not None:
            self.stopped = not (yield from self._may_proceed())
        return not self.stopped

    def bury(self, code: str, ids: Iterable[Any], count: int) -> None:
        """Note tasks that were buried."""
        if count:
            burial = self.burials.setdefault(code, Burial())
            burial.count += count
            burial.ids += list(ids)[: MOST_NAMED - len(burial.ids)]

    def check_refused(self) -> None:
        """Raise what MongoDB said of the first task that could not be changed at all."""
        refused, self.refused = self.refused, None
        if refused is not None:
            raise refused

    def wants_names(self, code: str) -> bool:
        """Return whether fewer tasks than may be are named so far."""
        return code not in self.burials or len(self.burials[code].ids) < MOST_NAMED


class Batches:
    """Reads batches of what is to be changed, until nothing is left.

    What is met again after a batch came back short cannot be changed: it is passed over, or the
    loop would read it for ever.
    """

    def __init__(self, read: Read, progress: Progress | None = None) -> None:
        self._read = read
        self._progress = progress or Progress()
        self._passed: dict[Hashable, Any] = {}
        self._batch: frozenset[Hashable] = frozenset()
        self._suspects: frozenset[Hashable] = frozenset()

    @classmethod
    def of(
        cls,
        selection: Document,
        fields: Document | None = None,
        *,
        progress: Progress | None = None,
        sort: Sequence[tuple[str, int]] | None = None,
        target: Target = Target.TASKS,
        span: Span | None = None,
    ) -> Batches:
        """Read what a filter matches; ``span`` says how long that may take."""
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
            keys = {id_order.key(document["_id"]): document for document in found}
            stuck = [key for key in keys if key in self._suspects and key not in self._passed]
            self.pass_over(keys[key]["_id"] for key in stuck)
            fresh = [document for key, document in keys.items() if key not in self._passed]
            if fresh or not stuck:
                self._batch = frozenset(map(id_order.key, (one["_id"] for one in fresh)))
                return fresh
        return []

    def wrote(self, count: int) -> None:
        """Learn how many of the batch were changed."""
        self._suspects = self._batch if count < len(self._batch) else frozenset()

    def pass_over(self, ids: Iterable[Any]) -> None:
        """Leave these out from now on."""
        self._passed.update((id_order.key(one), one) for one in ids)


def without(selection: Document, ids: Sequence[Any]) -> Document:
    """Match the same, but not these ids."""
    return {"$and": [selection, {"_id": {"$nin": list(ids)}}]} if ids else selection


def not_after(name: str, now: datetime) -> Document:
    """Match what has no later instant than now in a field, or none at all.

    A loop over what others keep adding ends by it. Clocks may differ a little.
    """
    return {"$nor": [{name: {"$gt": later(now, LARGEST_SKEW)}}]}
