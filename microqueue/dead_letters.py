"""``queue.dead_letters``: look at failed tasks, replay them, discard them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from microqueue.arguments import check_count, refused
from microqueue.core import QueueCore
from microqueue.durations import Duration, duration_argument
from microqueue.operations import dead_letters, letter_groups, letter_search, replay
from microqueue.operations.call import Document, Operation
from microqueue.operations.dead_letters import (
    DeadLetterFilter,
    DeadLetterPage,
    DeadLetterStats,
    ReplayReport,
)
from microqueue.operations.letter_groups import LetterGroups
from microqueue.payload import check_encodable
from microqueue.task import PayloadT, Task, TaskId

T = TypeVar("T")

Chosen: TypeAlias = TaskId | Task[Any] | Iterable[TaskId | Task[Any]] | DeadLetterFilter
"""A task or its id, several of them, or a filter."""


class Run(Protocol):
    """Runs an operation: what a queue lends to its dead letters."""

    def __call__(self, operation: Operation[T], /) -> T:
        """Drive the operation to its result."""


class AsyncRun(Protocol):
    """Runs an operation, awaited."""

    async def __call__(self, operation: Operation[T], /) -> T:
        """Drive the operation to its result."""


class _DeadLetterOperations(Generic[PayloadT]):
    """The operations, composed for a queue's name and settings."""

    def __init__(self, core: QueueCore[PayloadT]) -> None:
        self._core = core

    def _page(
        self, which: DeadLetterFilter, limit: int, cursor: str | None
    ) -> Operation[DeadLetterPage[PayloadT]]:
        documents, next_cursor = yield from letter_search.page(
            self._core.name,
            which,
            limit=check_count("limit", limit),
            cursor=cursor,
            settings=self._core.settings,
        )
        tasks = [self._core.view(document) for document in documents]
        return DeadLetterPage.model_construct(tasks=tasks, next_cursor=next_cursor)

    def _replay(
        self,
        which: Chosen,
        *,
        reset_attempts: bool,
        delay: Duration | None,
        limit: int | None,
        dry_run: bool,
        spread: Duration | None = None,
    ) -> Operation[ReplayReport]:
        wait = duration_argument("delay", delay)
        period = duration_argument("spread", spread)
        at_most = None if limit is None else check_count("limit", limit)
        queries = yield from self._queries(which)
        if dry_run:
            matched = yield from dead_letters.count_all(queries, self._core.settings)
            matched = matched if at_most is None else min(matched, at_most)
            return ReplayReport(matched=matched, replayed=0, dry_run=True)
        now, position = yield from self._core.next_position()
        return (
            yield from replay.replay(
                queries,
                now=now,
                position=position,
                reset_attempts=reset_attempts,
                delay=wait or timedelta(0),
                limit=at_most,
                settings=self._core.settings,
                spread=period or timedelta(0),
            )
        )

    def _edit_and_replay(
        self, task_id: TaskId, payload: Any, delay: Duration | None
    ) -> Operation[ReplayReport]:
        wait = duration_argument("delay", delay)
        if not isinstance(payload, Mapping):
            raise refused("payload", payload, "give a dict")
        check_encodable({"payload": payload}, self._core.collections.codec_options)
        now, position = yield from self._core.next_position()
        return (
            yield from replay.replay(
                (yield from self._queries(task_id)),
                now=now,
                position=position,
                reset_attempts=True,
                delay=wait or timedelta(0),
                limit=1,
                settings=self._core.settings,
                edits={"payload": payload},
            )
        )

    def _count(self, which: Chosen) -> Operation[int]:
        queries = yield from self._queries(which)
        return (yield from dead_letters.count_all(queries, self._core.settings))

    def _groups(self, which: DeadLetterFilter) -> Operation[LetterGroups]:
        return (yield from letter_groups.groups(self._core.name, which, self._core.settings))

    def _discard(self, which: Chosen, limit: int | None) -> Operation[int]:
        at_most = None if limit is None else check_count("limit", limit)
        queries = yield from self._queries(which)
        now, _ = yield from self._core.next_position()
        return (
            yield from replay.discard(queries, now=now, limit=at_most, settings=self._core.settings)
        )

    def _stats(self) -> Operation[DeadLetterStats]:
        return (yield from dead_letters.stats(self._core.name, self._core.settings))

    def _queries(self, which: Chosen) -> Operation[list[Document]]:
        """Write the filters of what was chosen."""
        if isinstance(which, DeadLetterFilter):
            return (yield from letter_search.queries(self._core.name, which, self._core.settings))
        several = isinstance(which, Iterable) and not isinstance(
            which, str | bytes | Task | Mapping
        )
        chosen: Any = which if several else [which]
        ids = yield from self._core.identify(
            one.id if isinstance(one, Task) else one for one in chosen
        )
        return [dead_letters.selection(self._core.name, ids)]


class DeadLetters(_DeadLetterOperations[PayloadT]):
    """The dead letters of a :class:`Queue`."""

    def __init__(self, core: QueueCore[PayloadT], run: Run) -> None:
        super().__init__(core)
        self._run = run

    def list(
        self,
        *,
        code: str | None = None,
        text: str | None = None,
        group: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> DeadLetterPage[PayloadT]:
        """Read a page, newest first; give ``cursor=page.next_cursor`` for the next one.

        ``text`` is searched in the error message; ``since`` and ``until`` bound the failure;
        ``group`` is the message of one of :meth:`groups`.
        """
        which = DeadLetterFilter(code=code, text=text, group=group, since=since, until=until)
        return self._run(self._page(which, limit, cursor))

    def replay(
        self,
        which: Chosen,
        *,
        reset_attempts: bool = True,
        delay: Duration | None = None,
        spread: Duration | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> ReplayReport:
        """Send dead letters back to wait: ids, tasks, or all that a ``DeadLetterFilter`` matches.

        The oldest failures go first, behind what already waits. The history is kept and
        ``replays`` counted. Without ``reset_attempts`` the count of attempts goes on, with
        room for at least one more. ``spread`` distributes them evenly over a period, so that
        a replay is not a new storm. A dry run only counts. Safe to repeat.
        """
        return self._run(
            self._replay(
                which,
                reset_attempts=reset_attempts,
                delay=delay,
                spread=spread,
                limit=limit,
                dry_run=dry_run,
            )
        )

    def edit_and_replay(
        self, task_id: TaskId, payload: Any, *, delay: Duration | None = None
    ) -> ReplayReport:
        """Send one dead letter back with another payload, both in one write."""
        return self._run(self._edit_and_replay(task_id, payload, delay))

    def groups(self, which: DeadLetterFilter | None = None) -> LetterGroups:
        """Group the dead letters by error code and normalised message, the largest first."""
        return self._run(self._groups(which or DeadLetterFilter()))

    def count(self, which: Chosen) -> int:
        """Count the dead letters that were chosen, or that a filter matches."""
        return self._run(self._count(which))

    def discard(self, which: Chosen, *, limit: int | None = None) -> int:
        """Delete dead letters for good, and give how many. Safe to repeat."""
        return self._run(self._discard(which, limit))

    def stats(self) -> DeadLetterStats:
        """Count the dead letters in all and by error code."""
        return self._run(self._stats())


class AsyncDeadLetters(_DeadLetterOperations[PayloadT]):
    """The dead letters of an :class:`AsyncQueue`: as :class:`DeadLetters`, awaited."""

    def __init__(self, core: QueueCore[PayloadT], run: AsyncRun) -> None:
        super().__init__(core)
        self._run = run

    async def list(
        self,
        *,
        code: str | None = None,
        text: str | None = None,
        group: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> DeadLetterPage[PayloadT]:
        """See :meth:`DeadLetters.list`."""
        which = DeadLetterFilter(code=code, text=text, group=group, since=since, until=until)
        return await self._run(self._page(which, limit, cursor))

    async def replay(
        self,
        which: Chosen,
        *,
        reset_attempts: bool = True,
        delay: Duration | None = None,
        spread: Duration | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> ReplayReport:
        """See :meth:`DeadLetters.replay`."""
        return await self._run(
            self._replay(
                which,
                reset_attempts=reset_attempts,
                delay=delay,
                spread=spread,
                limit=limit,
                dry_run=dry_run,
            )
        )

    async def edit_and_replay(
        self, task_id: TaskId, payload: Any, *, delay: Duration | None = None
    ) -> ReplayReport:
        """See :meth:`DeadLetters.edit_and_replay`."""
        return await self._run(self._edit_and_replay(task_id, payload, delay))

    async def groups(self, which: DeadLetterFilter | None = None) -> LetterGroups:
        """See :meth:`DeadLetters.groups`."""
        return await self._run(self._groups(which or DeadLetterFilter()))

    async def count(self, which: Chosen) -> int:
        """See :meth:`DeadLetters.count`."""
        return await self._run(self._count(which))

    async def discard(self, which: Chosen, *, limit: int | None = None) -> int:
        """See :meth:`DeadLetters.discard`."""
        return await self._run(self._discard(which, limit))

    async def stats(self) -> DeadLetterStats:
        """See :meth:`DeadLetters.stats`."""
        return await self._run(self._stats())
