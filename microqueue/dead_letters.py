"""``queue.dead_letters``: list, replay and discard failed tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, TypeAlias

from microqueue.arguments import check_count, invalid_argument
from microqueue.core import AsyncCore, QueueCore, SyncCore
from microqueue.dead_letter_models import (
    DeadLetterFilter,
    DeadLetterGroups,
    DeadLetterPage,
    DeadLetterStats,
    ReplayReport,
    check_dead_letter_filter,
)
from microqueue.durations import Duration, duration_argument
from microqueue.errors import TaskNotFound
from microqueue.operations import dead_letters, diagnostics, lookup, replay, stats
from microqueue.operations.call import Document, Operation
from microqueue.operations.paging import check_cursor
from microqueue.payload import check_encodable
from microqueue.task import PayloadT, Task, TaskId
from microqueue.task_ids import id_key

__all__ = ["AsyncDeadLetters", "DeadLetters"]

Chosen: TypeAlias = TaskId | Task[Any] | Iterable[TaskId | Task[Any]] | DeadLetterFilter
"""A task or its id, several of them, or a filter."""


class DeadLetterOperations(Generic[PayloadT]):
    """The operations on the dead letters of one queue, or of all queues of its collection."""

    def __init__(self, core: QueueCore[PayloadT], *, everywhere: bool = False) -> None:
        self._core = core
        self._everywhere = everywhere

    def _queues(self) -> Operation[str | list[str]]:
        """Return the name of the queue, or of all queues."""
        if not self._everywhere:
            return self._core.name
        return (yield from diagnostics.every_queue(self._core.settings))

    def page(
        self, which: DeadLetterFilter, limit: int, cursor: str | None
    ) -> Operation[DeadLetterPage[PayloadT]]:
        """Perform :meth:`DeadLetters.list`."""
        check_count("limit", limit)
        check_cursor(cursor)
        documents, next_cursor = yield from dead_letters.page(
            (yield from self._queues()),
            which,
            limit=limit,
            cursor=cursor,
            settings=self._core.settings,
        )
        tasks = [self._core.to_task(document) for document in documents]
        return DeadLetterPage.model_construct(tasks=tasks, next_cursor=next_cursor)

    def replay(
        self,
        which: Chosen,
        *,
        reset_attempts: bool,
        delay: Duration | None,
        limit: int | None,
        dry_run: bool,
        missing_ok: bool,
        spread: Duration | None = None,
    ) -> Operation[ReplayReport]:
        """Perform :meth:`DeadLetters.replay`."""
        wait = duration_argument("delay", delay)
        period = duration_argument("spread", spread)
        at_most = None if limit is None else check_count("limit", limit)
        queries, missing = yield from self._choose(which, missing_ok=missing_ok)
        if dry_run:
            matched = yield from dead_letters.count_all(queries, self._core.settings)
            matched = matched if at_most is None else min(matched, at_most)
            return ReplayReport(matched=matched, replayed=0, missing=missing, dry_run=True)
        now, position = yield from self._core.next_position()
        report = yield from replay.replay(
            queries,
            now=now,
            position=position,
            reset_attempts=reset_attempts,
            delay=wait or timedelta(0),
            limit=at_most,
            settings=self._core.settings,
            spread=period or timedelta(0),
        )
        return report.model_copy(update={"missing": missing})

    def edit_and_replay(
        self, task_id: TaskId, payload: Any, delay: Duration | None
    ) -> Operation[ReplayReport]:
        """Perform :meth:`DeadLetters.edit_and_replay`."""
        wait = duration_argument("delay", delay)
        if not isinstance(payload, Mapping):
            raise invalid_argument("payload", payload, "give a dict")
        check_encodable({"payload": payload}, self._core.collections.codec_options)
        queries, _ = yield from self._choose(task_id, missing_ok=False)
        now, position = yield from self._core.next_position()
        return (
            yield from replay.replay(
                queries,
                now=now,
                position=position,
                reset_attempts=True,
                delay=wait or timedelta(0),
                limit=1,
                settings=self._core.settings,
                edits={"payload": payload},
            )
        )

    def missing(self, which: Chosen) -> Operation[list[TaskId]]:
        """Perform :meth:`DeadLetters.missing`."""
        _, missing = yield from self._choose(which, missing_ok=True)
        return missing

    def count(self, which: Chosen) -> Operation[int]:
        """Perform :meth:`DeadLetters.count`."""
        queries, _ = yield from self._choose(which, missing_ok=True)
        return (yield from dead_letters.count_all(queries, self._core.settings))

    def groups(self, which: DeadLetterFilter) -> Operation[DeadLetterGroups]:
        """Perform :meth:`DeadLetters.groups`."""
        which = check_dead_letter_filter(which)
        queues = yield from self._queues()
        return (yield from dead_letters.groups(queues, which, self._core.settings))

    def discard(self, which: Chosen, limit: int | None, *, missing_ok: bool) -> Operation[int]:
        """Perform :meth:`DeadLetters.discard`."""
        at_most = None if limit is None else check_count("limit", limit)
        queries, _ = yield from self._choose(which, missing_ok=missing_ok)
        now = yield from self._core.begin()
        return (
            yield from replay.discard(queries, now=now, limit=at_most, settings=self._core.settings)
        )

    def stats(self, *, exact: bool) -> Operation[DeadLetterStats]:
        """Perform :meth:`DeadLetters.stats`."""
        core = self._core
        now = yield from core.now()
        bounds = core.count_bounds(exact=exact)
        queues = yield from self._queues()
        return (yield from stats.dead_letter_stats(queues, now, core.settings, bounds=bounds))

    def _choose(
        self, which: Chosen, *, missing_ok: bool
    ) -> Operation[tuple[list[Document], list[TaskId]]]:
        """Return the MongoDB filters of the chosen tasks, and the ids that do not exist.

        Raises:
            TaskNotFound: An id does not exist, and ``missing_ok`` is false.
        """
        settings = self._core.settings
        if isinstance(which, DeadLetterFilter):
            which = check_dead_letter_filter(which)
            queues = yield from self._queues()
            return (yield from dead_letters.queries(queues, which, settings)), []
        several = isinstance(which, Iterable) and not isinstance(
            which, str | bytes | Task | Mapping
        )
        chosen: Any = which if several else [which]
        ids = yield from self._core.resolve_ids(
            one.id if isinstance(one, Task) else one for one in chosen
        )
        found = yield from lookup.queues_of(ids, settings)
        places = [(one, found.get(id_key(one))) for one in ids]
        missing = [(one, place) for one, place in places if not self._is_here(place)]
        if missing and not missing_ok:
            name, found_in = self._core.name, missing[0][1]
            raise TaskNotFound(task_ids=[one for one, _ in missing], queue=name, found_in=found_in)
        here = [one for one, place in places if self._is_here(place)]
        names = {found[id_key(one)] for one in here}
        queues = sorted(names) if self._everywhere else self._core.name
        return [dead_letters.selection(queues, here)], [one for one, _ in missing]

    def _is_here(self, queue: str | None) -> bool:
        return queue is not None and (self._everywhere or queue == self._core.name)


class DeadLetters(Generic[PayloadT]):
    """The dead letters of a queue: ``queue.dead_letters``.

    A dead letter is a task with status ``failed``. ``which`` is a task or its id, several of them,
    or a :class:`DeadLetterFilter`.
    """

    def __init__(self, core: SyncCore[PayloadT], *, everywhere: bool = False) -> None:
        self._core = core
        self._operations = DeadLetterOperations(core, everywhere=everywhere)

    @property
    def all_queues(self) -> DeadLetters[PayloadT]:
        """The dead letters of all queues of the collection, with the same methods."""
        return DeadLetters(self._core, everywhere=True)

    def list(
        self,
        *,
        name: str | None = None,
        code: str | None = None,
        text: str | None = None,
        group: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> DeadLetterPage[PayloadT]:
        """Return a page of dead letters, newest first.

        Args:
            name: Only those with this name; the empty string: those without a name.
            code: Only those with this error code.
            text: Only those whose error message contains this text.
            group: Only those of the group of :meth:`groups` with this message.
            since: Only those that failed at this instant or later.
            until: Only those that failed before this instant.
            limit: The largest number of dead letters in the page.
            cursor: The ``next_cursor`` of the page before. Default: the first page.

        Returns:
            The page, with the cursor of the next one.

        Raises:
            InvalidArgument: An argument is not valid.
        """
        which = DeadLetterFilter(
            name=name, code=code, text=text, group=group, since=since, until=until
        )
        return self._core.run(self._operations.page(which, limit, cursor))

    def replay(
        self,
        which: Chosen,
        *,
        reset_attempts: bool = True,
        delay: Duration | None = None,
        spread: Duration | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        missing_ok: bool = False,
    ) -> ReplayReport:
        """Send dead letters back to their queue. Safe to repeat: only dead letters are replayed.

        The oldest failures come first, behind the tasks that are waiting. The history is kept, and
        ``replays`` is incremented.

        Args:
            which: The dead letters.
            reset_attempts: Start again with no attempts used. If false, the attempts are kept, with
                room for at least one more.
            delay: Deliver them this much later, at the earliest.
            spread: Spread them evenly over this period, to avoid another storm.
            limit: The largest number of dead letters to replay.
            dry_run: Only count them.
            missing_ok: Replay the others if there are no tasks with some of the ids. The report
                names the ``missing`` ones.

        Returns:
            How many matched and how many were replayed.

        Raises:
            TaskNotFound: The queue has no task with one of the ids; nothing was replayed.
            InvalidArgument: An argument is not valid.
        """
        return self._core.run(
            self._operations.replay(
                which,
                reset_attempts=reset_attempts,
                delay=delay,
                spread=spread,
                limit=limit,
                dry_run=dry_run,
                missing_ok=missing_ok,
            )
        )

    def edit_and_replay(
        self, task_id: TaskId, payload: Any, *, delay: Duration | None = None
    ) -> ReplayReport:
        """Replay one dead letter with another payload, in a single write.

        Args:
            task_id: The id of the dead letter.
            payload: The new payload, a dict.
            delay: Deliver it this much later, at the earliest.

        Returns:
            How many were replayed: 0 if the task is not a dead letter.

        Raises:
            TaskNotFound: The queue has no task with this id.
            InvalidArgument: An argument is not valid.
        """
        return self._core.run(self._operations.edit_and_replay(task_id, payload, delay))

    def groups(self, which: DeadLetterFilter | None = None) -> DeadLetterGroups:
        """Group the dead letters by error code and normalised message, the largest group first.

        Args:
            which: Only those that the filter matches. Default: all.

        Returns:
            The groups.
        """
        return self._core.run(
            self._operations.groups(DeadLetterFilter() if which is None else which)
        )

    def count(self, which: Chosen) -> int:
        """Count dead letters.

        Args:
            which: The dead letters.

        Returns:
            How many of them are dead letters.
        """
        return self._core.run(self._operations.count(which))

    def missing(self, which: Chosen) -> Sequence[TaskId]:
        """Return the ids with which the queue has no task, dead letter or not.

        Args:
            which: The ids to look for.

        Returns:
            The ids that were not found.
        """
        return self._core.run(self._operations.missing(which))

    def discard(self, which: Chosen, *, limit: int | None = None, missing_ok: bool = False) -> int:
        """Delete dead letters. Other tasks are left alone.

        Args:
            which: The dead letters.
            limit: The largest number of dead letters to delete.
            missing_ok: Delete the others if there are no tasks with some of the ids, so that the
                call is safe to repeat.

        Returns:
            How many were deleted.

        Raises:
            TaskNotFound: The queue has no task with one of the ids; nothing was deleted.
            InvalidArgument: An argument is not valid.
        """
        return self._core.run(self._operations.discard(which, limit, missing_ok=missing_ok))

    def stats(self, *, exact: bool = False) -> DeadLetterStats:
        """Count the dead letters in total and by error code.

        Above ``settings.count_limit`` the total is an estimate, and codes are counted among the
        newest dead letters.

        Args:
            exact: Count everything.

        Returns:
            The counts.
        """
        return self._core.run(self._operations.stats(exact=exact))


class AsyncDeadLetters(Generic[PayloadT]):
    """The dead letters of a queue: ``queue.dead_letters``.

    A dead letter is a task with status ``failed``. ``which`` is a task or its id, several of them,
    or a :class:`DeadLetterFilter`.
    """

    def __init__(self, core: AsyncCore[PayloadT], *, everywhere: bool = False) -> None:
        self._core = core
        self._operations = DeadLetterOperations(core, everywhere=everywhere)

    @property
    def all_queues(self) -> AsyncDeadLetters[PayloadT]:
        """The dead letters of all queues of the collection, with the same methods."""
        return AsyncDeadLetters(self._core, everywhere=True)

    async def list(
        self,
        *,
        name: str | None = None,
        code: str | None = None,
        text: str | None = None,
        group: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> DeadLetterPage[PayloadT]:
        """Return a page of dead letters, newest first.

        Args:
            name: Only those with this name; the empty string: those without a name.
            code: Only those with this error code.
            text: Only those whose error message contains this text.
            group: Only those of the group of :meth:`groups` with this message.
            since: Only those that failed at this instant or later.
            until: Only those that failed before this instant.
            limit: The largest number of dead letters in the page.
            cursor: The ``next_cursor`` of the page before. Default: the first page.

        Returns:
            The page, with the cursor of the next one.

        Raises:
            InvalidArgument: An argument is not valid.
        """
        which = DeadLetterFilter(
            name=name, code=code, text=text, group=group, since=since, until=until
        )
        return await self._core.run(self._operations.page(which, limit, cursor))

    async def replay(
        self,
        which: Chosen,
        *,
        reset_attempts: bool = True,
        delay: Duration | None = None,
        spread: Duration | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        missing_ok: bool = False,
    ) -> ReplayReport:
        """Send dead letters back to their queue. Safe to repeat: only dead letters are replayed.

        The oldest failures come first, behind the tasks that are waiting. The history is kept, and
        ``replays`` is incremented.

        Args:
            which: The dead letters.
            reset_attempts: Start again with no attempts used. If false, the attempts are kept, with
                room for at least one more.
            delay: Deliver them this much later, at the earliest.
            spread: Spread them evenly over this period, to avoid another storm.
            limit: The largest number of dead letters to replay.
            dry_run: Only count them.
            missing_ok: Replay the others if there are no tasks with some of the ids. The report
                names the ``missing`` ones.

        Returns:
            How many matched and how many were replayed.

        Raises:
            TaskNotFound: The queue has no task with one of the ids; nothing was replayed.
            InvalidArgument: An argument is not valid.
        """
        return await self._core.run(
            self._operations.replay(
                which,
                reset_attempts=reset_attempts,
                delay=delay,
                spread=spread,
                limit=limit,
                dry_run=dry_run,
                missing_ok=missing_ok,
            )
        )

    async def edit_and_replay(
        self, task_id: TaskId, payload: Any, *, delay: Duration | None = None
    ) -> ReplayReport:
        """Replay one dead letter with another payload, in a single write.

        Args:
            task_id: The id of the dead letter.
            payload: The new payload, a dict.
            delay: Deliver it this much later, at the earliest.

        Returns:
            How many were replayed: 0 if the task is not a dead letter.

        Raises:
            TaskNotFound: The queue has no task with this id.
            InvalidArgument: An argument is not valid.
        """
        return await self._core.run(self._operations.edit_and_replay(task_id, payload, delay))

    async def groups(self, which: DeadLetterFilter | None = None) -> DeadLetterGroups:
        """Group the dead letters by error code and normalised message, the largest group first.

        Args:
            which: Only those that the filter matches. Default: all.

        Returns:
            The groups.
        """
        return await self._core.run(
            self._operations.groups(DeadLetterFilter() if which is None else which)
        )

    async def count(self, which: Chosen) -> int:
        """Count dead letters.

        Args:
            which: The dead letters.

        Returns:
            How many of them are dead letters.
        """
        return await self._core.run(self._operations.count(which))

    async def missing(self, which: Chosen) -> Sequence[TaskId]:
        """Return the ids with which the queue has no task, dead letter or not.

        Args:
            which: The ids to look for.

        Returns:
            The ids that were not found.
        """
        return await self._core.run(self._operations.missing(which))

    async def discard(
        self, which: Chosen, *, limit: int | None = None, missing_ok: bool = False
    ) -> int:
        """Delete dead letters. Other tasks are left alone.

        Args:
            which: The dead letters.
            limit: The largest number of dead letters to delete.
            missing_ok: Delete the others if there are no tasks with some of the ids, so that the
                call is safe to repeat.

        Returns:
            How many were deleted.

        Raises:
            TaskNotFound: The queue has no task with one of the ids; nothing was deleted.
            InvalidArgument: An argument is not valid.
        """
        return await self._core.run(self._operations.discard(which, limit, missing_ok=missing_ok))

    async def stats(self, *, exact: bool = False) -> DeadLetterStats:
        """Count the dead letters in total and by error code.

        Above ``settings.count_limit`` the total is an estimate, and codes are counted among the
        newest dead letters.

        Args:
            exact: Count everything.

        Returns:
            The counts.
        """
        return await self._core.run(self._operations.stats(exact=exact))
