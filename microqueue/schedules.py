"""``queue.schedules``: tasks that are added at given times.

:class:`Firer` adds the tasks of the schedules that are due. Sweepers and workers have one.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import pairwise
from math import inf
from typing import Any, Generic, NamedTuple, Unpack

from microqueue.arguments import check_count, check_name, invalid_argument
from microqueue.clock import Instant
from microqueue.core import AsyncCore, QueueCore, SyncCore
from microqueue.durations import Duration
from microqueue.errors import DuplicateTask, OperationFailed, ServerUnavailable
from microqueue.model import reject_unknown
from microqueue.new_task import CommonOptions, NewTask
from microqueue.operations import schedules
from microqueue.operations.call import Document, Operation
from microqueue.operations.schedules import Place
from microqueue.payload import check_encodable
from microqueue.schedule import (
    INSTANT_HEADER,
    NOT_FOR_SCHEDULES,
    SCHEDULE_HEADER,
    CatchUp,
    Declaration,
    Overlap,
    Schedule,
    ScheduleOptions,
    ScheduleRun,
    SkippedRun,
    Source,
    check_timetable,
    jitter_at,
    plan_runs,
    run_id,
    timing_of,
)
from microqueue.task import PayloadT, Task, name_in
from microqueue.task_ids import id_key
from microqueue.timing import zone_of

__all__ = ["AsyncSchedules", "Schedules"]

MOST_NEXT_RUNS = 1000
BATCH = 100
"""How many due schedules are read at a time."""
RETRY_SEC = 10.0
"""After how many seconds a schedule that could not be fired is tried again."""
SECOND = timedelta(seconds=1)
PUT_OPTIONS = (
    *("cron", "every", "payload", "task", *ScheduleOptions.__annotations__, "paused"),
    *CommonOptions.__annotations__,
)

logger = logging.getLogger("microqueue.schedules")


class ScheduleOperations(Generic[PayloadT]):
    """The operations on the schedules of one queue."""

    def __init__(self, core: QueueCore[PayloadT]) -> None:
        self._core = core
        self._prepared = not core.settings.ensure_indexes

    @property
    def _tasks(self) -> str:
        return self._core.collections.name

    def put(
        self,
        name: str,
        *,
        cron: str | None,
        every: Duration | None,
        payload: Any,
        task: str | None,
        timetable: ScheduleOptions,
        paused: bool | None,
        options: CommonOptions,
    ) -> Operation[Schedule]:
        """Perform :meth:`Schedules.put`."""
        stored = yield from self.store(
            name,
            cron=cron,
            every=every,
            payload=payload,
            task=task,
            timetable=timetable,
            paused=paused,
            options=options,
        )
        return (yield from self._read_one(stored))

    def store(
        self,
        name: str,
        *,
        cron: str | None,
        every: Duration | None,
        payload: Any,
        task: str | None,
        timetable: ScheduleOptions,
        paused: bool | None,
        options: CommonOptions,
        source: Source = "api",
        app: str | None = None,
        queue: str | None = None,
        former: Document | None = None,
    ) -> Operation[Document]:
        """Put a schedule, and return the stored document.

        That of another owner is not changed, and may be malformed. ``former`` is the schedule in
        its former queue.
        """
        others = {one: value for one, value in options.items() if one not in NOT_FOR_SCHEDULES}
        reject_unknown("schedules.put", others, PUT_OPTIONS)
        check_name(name)
        if paused is not None and not isinstance(paused, bool):
            raise invalid_argument("paused", paused, "give True, False or None")
        checked = check_timetable(cron, every, timetable)
        new = self._new_task(payload, task, options)
        _, document = self._core.accept_payload(new.payload)
        check_encodable(
            {"payload": document, "headers": new.headers}, self._core.collections.codec_options
        )
        now = yield from self._core.begin()
        if not self._prepared:
            yield from schedules.prepare()
            self._prepared = True
        settings = self._core.settings
        schedule = Schedule(
            **checked.model_dump(),
            name=name,
            queue=queue or self._core.name,
            payload=document,
            priority=new.priority,
            max_attempts=new.max_attempts or settings.max_attempts,
            backoff=new.backoff or settings.backoff,
            visibility_timeout=new.visibility_timeout,
            expires_in=new.expires_in,
            headers=new.headers,
            task=new.name or name_in(new.headers),
            source=source,
            app=app,
            starts_at=_whole_second(now),
            created_at=now,
            updated_at=now,
            next_at=None,
        )
        return (
            yield from schedules.put(self._tasks, schedule, paused=paused, now=now, former=former)
        )

    def _new_task(self, payload: Any, task: str | None, options: CommonOptions) -> NewTask[Any]:
        """Return the task that each run adds, with options that a schedule may have."""
        if isinstance(payload, NewTask):
            given = {**options, **({} if task is None else {"task": task})}
            for name, value in given.items():
                raise invalid_argument(name, value, "the NewTask has the options")
            new: NewTask[Any] = payload
        else:
            if task is not None:
                check_name(task, "task")
            new = NewTask(payload={} if payload is None else payload, name=task, **options)
        for name in sorted(NOT_FOR_SCHEDULES):
            value = getattr(new, name)
            if value is not None:
                raise invalid_argument(name, value, "the schedule decides it; leave it out")
        return new

    def get(self, name: str) -> Operation[Schedule | None]:
        """Perform :meth:`Schedules.get`."""
        found = yield from schedules.find(self._tasks, self._core.name, check_name(name))
        return None if found is None else (yield from self._read_one(found))

    def list(self, *, all_queues: bool) -> Operation[list[Schedule]]:
        """Perform :meth:`Schedules.list`. Malformed documents are left out, and logged."""
        queue = None if all_queues else self._core.name
        found = yield from schedules.find_all(self._tasks, queue)
        statuses = yield from schedules.statuses(found, self._core.settings)
        read: list[Schedule] = []
        for one in found:
            try:
                read.append(_with_status(one, statuses))
            except OperationFailed as exc:
                logger.error("%s", exc)  # noqa: TRY400 (a traceback would not help)
        return read

    def pause(self, name: str) -> Operation[Schedule]:
        """Perform :meth:`Schedules.pause`."""
        check_name(name)
        now = yield from self._core.now()
        stored = yield from schedules.pause(self._tasks, self._core.name, name, now)
        return (yield from self._read_one(stored))

    def resume(self, name: str) -> Operation[Schedule]:
        """Perform :meth:`Schedules.resume`."""
        check_name(name)
        now = yield from self._core.now()
        stored = yield from schedules.resume(self._tasks, self._core.name, name, now)
        return (yield from self._read_one(stored))

    def trigger(self, name: str) -> Operation[Task[PayloadT]]:
        """Perform :meth:`Schedules.trigger`."""
        stored = yield from schedules.require(self._tasks, self._core.name, check_name(name))
        schedule = schedules.read(stored)
        now = yield from self._core.begin()
        stored = yield from schedules.mend(stored, schedule)
        task = yield from _add(self._core, schedule, None, now)
        run = ScheduleRun(at=now, task_id=task["_id"], fired_at=now, triggered=True)
        yield from schedules.note_triggered(stored, run)
        return self._core.to_task(task)

    def remove(self, name: str) -> Operation[bool]:
        """Perform :meth:`Schedules.remove`."""
        return (yield from schedules.remove(self._tasks, self._core.name, check_name(name)))

    def next_runs(self, name: str, n: int) -> Operation[Sequence[datetime]]:
        """Perform :meth:`Schedules.next_runs`."""
        if check_count("n", n) > MOST_NEXT_RUNS:
            raise invalid_argument("n", n, f"give at most {MOST_NEXT_RUNS}")
        stored = yield from schedules.require(self._tasks, self._core.name, check_name(name))
        schedule = schedules.read(stored)
        now = yield from self._core.now()
        zone = zone_of(schedule.timezone)
        found: list[datetime] = []
        with suppress(OverflowError):  # A run after the year 9999 is none.
            first = schedule.next_at or timing_of(schedule).after(now)
            while first is not None and len(found) < n:
                found.append(first.astimezone(zone))
                first = timing_of(schedule).after(first)
        return found

    def _read_one(self, document: Document) -> Operation[Schedule]:
        statuses = yield from schedules.statuses([document], self._core.settings)
        return _with_status(document, statuses)


def _with_status(document: Document, statuses: dict[Any, Any]) -> Schedule:
    last = schedules.last_of(document) or {}
    return schedules.read(document, statuses.get(id_key(last.get("task_id"))))


def _whole_second(now: datetime) -> datetime:
    """Return the first whole second from now on."""
    plain = now.plain if isinstance(now, Instant) else now
    cut = plain.replace(microsecond=0)
    return cut if cut == plain else cut + SECOND


# Declare


def declare(core: QueueCore[Any], app: str, declared: Sequence[Declaration]) -> Operation[None]:
    """Store the schedules that the code of an app has, and remove those that it has no longer.

    Schedules of other apps, and those that were made at run time, stay. A schedule stays in its
    queue, unless the code names another one; it keeps its state there. A new one is put into the
    worker's first queue. If two workers did so in two queues, both keep the same one.

    A schedule that cannot be stored is logged, and stops neither the others nor the worker.

    Args:
        core: The first queue of the worker.
        app: The name of the app.
        declared: Its schedules.

    Raises:
        ServerUnavailable: MongoDB could not be reached in time.
    """
    tasks = core.collections.name
    operations = ScheduleOperations(core)
    found = yield from schedules.declared_by(tasks, app)
    failed: set[str] = set()
    for one in declared:
        try:
            yield from _declare_one(core, app, one, found, operations)
        except ServerUnavailable:
            raise
        except Exception as exc:  # noqa: BLE001 (one must not stop the worker)
            failed.add(one.name)
            logger.error("schedule %r of app %r cannot be stored: %s", one.name, app, exc)  # noqa: TRY400 (a traceback would not help)
    if not found and not declared:
        return
    found = yield from schedules.declared_by(tasks, app)
    homes = {one.name: _home(one, found) for one in declared}
    for place, document in found.items():
        gone = place.name not in failed and homes.get(place.name) != place.queue
        if gone and (yield from schedules.remove_declared(document, app)):
            logger.info("schedule %r removed: app %r no longer declares it", place.name, app)


def _declare_one(
    core: QueueCore[Any],
    app: str,
    declaration: Declaration,
    found: Mapping[Place, Document],
    operations: ScheduleOperations[Any],
) -> Operation[None]:
    """Store one schedule of the code of an app; ``found`` are those that it had."""
    home = _home(declaration, found) or core.name
    former = None
    elsewhere = {place.queue: one for place, one in found.items() if place.name == declaration.name}
    if elsewhere and home not in elsewhere:
        former = yield from _hold(core, elsewhere[min(elsewhere)], app)
    stored = yield from operations.store(
        declaration.name,
        cron=declaration.cron,
        every=declaration.every,
        payload=declaration.task,
        task=None,
        timetable=declaration.options,
        paused=None,
        options={},
        source="code",
        app=app,
        queue=home,
        former=former,
    )
    source, other = schedules.owner(stored)
    if (source, other) != ("code", app):
        owner = f"is of app {other!r}" if source == "code" else "was made at run time"
        logger.warning("schedule %r of the code is not used: another %s", declaration.name, owner)


def _hold(core: QueueCore[Any], document: Document, app: str) -> Operation[Document | None]:
    """Stop a schedule that moves to another queue, and return it."""
    try:
        schedule = schedules.read(document)
    except OperationFailed as exc:
        logger.error("%s", exc)  # noqa: TRY400 (a traceback would not help)
        return None
    if schedule.next_at is not None:
        # The task of the next run is there if a process was killed after it added it. In the
        # other queue, it would have another id.
        now = yield from core.begin()
        document = yield from schedules.mend(document, schedule)
        run = yield from schedules.find_run(schedule, schedule.next_at, now)
        if run is not None:
            next_at = timing_of(schedule).after(run.at)
            yield from _advance(document, next_at, run)
    return (yield from schedules.hold(document, app))


def _home(declaration: Declaration, found: Iterable[Place]) -> str | None:
    """Return the queue of a schedule: that of the code, or the one that has it."""
    queues = [one.queue for one in found if one.name == declaration.name]
    return declaration.queue or min(queues, default=None)


# Fire


class Firing(NamedTuple):
    """What happened when due schedules were fired, and when the next one is due."""

    added: int
    """How many tasks were added."""
    now: datetime
    """Until when schedules were due."""
    next_at: datetime | None
    """The next run of a schedule that was fired, or is not due."""
    failed: bool = False
    """Whether a schedule could not be fired."""

    @property
    def due_sec(self) -> float:
        """When to fire again, in seconds; infinity if there is no schedule."""
        due_sec = inf if self.next_at is None else (self.next_at - self.now).total_seconds()
        return min(due_sec, RETRY_SEC) if self.failed else due_sec


class Firer:
    """Fires the schedules of a collection.

    Any number of processes may do so at once, see :mod:`microqueue.operations.schedules`. A
    schedule that cannot be fired does not stop the others, and is logged once.

    Args:
        core: A queue of the collection.
        queues: Only schedules of these queues. Default: all.
    """

    def __init__(self, core: QueueCore[Any], queues: Sequence[str] | None = None) -> None:
        self._core = core
        self._queues = queues
        self._logged: dict[Any, Any] = {}
        """The revision of each schedule that could not be fired the last time."""

    def fire(self, until: datetime | None = None) -> Operation[Firing]:
        """Add the tasks of the schedules that are due.

        Args:
            until: Leave out those that are due later, and no more than due. Default: now.
        """
        now = yield from self._core.begin()
        horizon = now if until is None else min(now, until)
        tasks, added = self._core.collections.name, 0
        unfired: list[Document] = []
        while True:
            without = [one["_id"] for one in unfired]
            found = yield from schedules.due(
                tasks, horizon, queues=self._queues, without=without, limit=BATCH
            )
            # Processes that fire the same schedules begin with different ones.
            for document in random.sample(found, len(found)):
                try:
                    if len(found) == 1 or (yield from schedules.is_current(document)):
                        added += yield from _fire(self._core, document, horizon, now)
                except ServerUnavailable:
                    raise
                except Exception as exc:  # noqa: BLE001 (one must not stop the others)
                    self._log(document, exc)
                    unfired.append(document)
            if len(found) < BATCH:
                break
        self._logged = {id_key(one["_id"]): one.get("revision") for one in unfired}
        without = [one["_id"] for one in unfired]
        next_at = yield from schedules.next_due(tasks, self._queues, without=without)
        return Firing(added, now, next_at, failed=bool(unfired))

    def _log(self, document: Document, error: Exception) -> None:
        key, revision = id_key(document["_id"]), document.get("revision")
        known = key in self._logged and self._logged[key] == revision
        level = logging.DEBUG if known else logging.ERROR
        logger.log(level, "schedule %r was not fired: %s", document.get("name"), error)


def _fire(
    core: QueueCore[Any], document: Document, horizon: datetime, now: datetime
) -> Operation[int]:
    """Add the runs of one schedule that are due until ``horizon``; return how many.

    Each task that is added is that of ``next_at``. So a process that finds the schedule finds
    what a killed one has added.
    """
    schedule = schedules.read(document)
    document = yield from schedules.mend(document, schedule)
    current: Document | None = document
    plan = plan_runs(schedule, document["next_at"], horizon)
    coming = [*plan.runs, plan.next_at]
    added = 0
    if coming[0] != document["next_at"]:
        current, added = yield from _pass_over(schedule, document, coming[0], now)
    for run_at, next_at in pairwise(coming):
        if current is None or run_at is None:  # Another process fires this schedule.
            break
        if schedule.overlap == "skip":
            current, overlapping = yield from schedules.overlaps(current, schedule)
            if overlapping:
                skipped = SkippedRun(at=run_at, reason="overlap")
                current = yield from schedules.advance(current, next_at, run=None, skipped=skipped)
                continue
        yield from _add_once(core, schedule, run_at, now)
        run = ScheduleRun(at=run_at, task_id=run_id(schedule, run_at), fired_at=now)
        current, noted = yield from _advance(current, next_at, run)
        added += _note(schedule, run, noted=noted)
    return added


def _advance(
    document: Document,
    next_at: datetime | None,
    run: ScheduleRun,
    skipped: SkippedRun | None = None,
) -> Operation[tuple[Document | None, bool]]:
    """Set the next run, and note one that was added, whether or not the first is possible.

    Returns the schedule, or None if another process fires it; and whether we noted the run.
    """
    current = yield from schedules.advance(document, next_at, run=run, skipped=skipped)
    return current, current is not None or (yield from schedules.note(document, run))


def _pass_over(
    schedule: Schedule, document: Document, until: datetime | None, now: datetime
) -> Operation[tuple[Document | None, int]]:
    """Leave out the runs before ``until``; return the schedule, and how many had been added."""
    first: datetime | None = document["next_at"]
    run = yield from schedules.find_run(schedule, document["next_at"], now)
    if run is not None:
        first = timing_of(schedule).after(run.at)
    skipped = None
    if first is not None and first != until:
        skipped = SkippedRun(at=first, reason="late")
    if run is None:
        return (yield from schedules.advance(document, until, run=None, skipped=skipped)), 0
    current, noted = yield from _advance(document, until, run, skipped)
    return current, _note(schedule, run, noted=noted)


def _note(schedule: Schedule, run: ScheduleRun, *, noted: bool) -> int:
    """Log a run, unless another process has noted it; return how many were added."""
    if noted:
        logger.info(
            "schedule %r fired: task %s, %.3f s late",
            schedule.name,
            run.task_id,
            run.late_sec,
            extra={"schedule": schedule.name, "queue": schedule.queue, "late_sec": run.late_sec},
        )
    return int(noted)


def _add_once(
    core: QueueCore[Any], schedule: Schedule, instant: datetime, now: datetime
) -> Operation[None]:
    """Add the task of a run, unless another process has added it."""
    try:
        yield from _add(core, schedule, instant, now)
    except DuplicateTask as exc:
        logger.warning("schedule %r: %s", schedule.name, exc)


def _add(
    core: QueueCore[Any], schedule: Schedule, instant: datetime | None, now: datetime
) -> Operation[Document]:
    """Add a task; that of a run has an id and an insert token that everyone derives alike."""
    headers = {**schedule.headers, SCHEDULE_HEADER: schedule.name}
    task_id, eta, expires_in = None, None, schedule.expires_in
    if instant is not None:
        task_id, eta = run_id(schedule, instant), instant + jitter_at(schedule, instant)
        headers[INSTANT_HEADER] = instant
        if expires_in is not None and eta > now:  # It counts from the delivery.
            expires_in += eta - now
    new: NewTask[Any] = NewTask(
        payload=None,
        task_id=task_id,
        eta=eta,
        priority=schedule.priority,
        max_attempts=schedule.max_attempts,
        backoff=schedule.backoff,
        visibility_timeout=schedule.visibility_timeout,
        expires_in=expires_in,
        headers=headers,
        name=schedule.task,
    )
    return (yield from core.add_for(schedule.queue, new, schedule.payload, now, token=task_id))


class Schedules(Generic[PayloadT]):
    """The schedules of a :class:`Queue`: tasks that are added at given times."""

    def __init__(self, core: SyncCore[PayloadT]) -> None:
        self._core = core
        self._operations = ScheduleOperations(core)

    def put(
        self,
        name: str,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        payload: PayloadT | NewTask[PayloadT] | None = None,
        task: str | None = None,
        timezone: str = "UTC",
        catch_up: CatchUp = "latest",
        grace: Duration | None = None,
        overlap: Overlap = "allow",
        jitter: Duration | None = None,
        paused: bool | None = None,
        **options: Unpack[CommonOptions],
    ) -> Schedule:
        """Add a schedule, or change the one with this name.

        While ``cron``, ``every`` and ``timezone`` stay the same, so does the next run. So a
        program may put its schedules at each start.

        Args:
            name: The name, unique in the queue.
            cron: A cron expression of five fields, or six with seconds first; or ``@hourly``,
                ``@daily``, ``@weekly``, ``@monthly``, ``@yearly``.
            every: A period instead, of a second or more. The first run is one period from now.
            payload: The payload of each task, or a :class:`NewTask`, which has the options, too.
                Default: an empty dict.
            task: The name of each task, by which a worker with ``Tasks`` finds its function.
            timezone: The time zone of ``cron``, as ``Europe/Berlin``.
            catch_up: After an outage, run the ``latest`` missed run, ``all`` of them, or none
                (``skip``).
            grace: Leave out runs that are later than this: a second or more. Default: none; with
                ``catch_up="skip"``, those later than a minute.
            overlap: ``skip`` leaves out a run while a task of the schedule is unfinished.
            jitter: Deliver each task up to this much later, to spread load. The delay depends on
                the schedule and the run.
            paused: Whether it is paused. Default: as it is; a new one is not.
            **options: Options of each task, as in :meth:`Queue.enqueue`: ``priority``,
                ``max_attempts``, ``backoff``, ``visibility_timeout``, ``expires_in``, ``headers``.

        Returns:
            The schedule.

        Raises:
            InvalidCron: The expression has a mistake; ``field`` and ``position`` say where.
            InvalidArgument: The time zone is unknown, or another argument is not valid.
            InvalidPayload: The payload cannot be stored, or does not fit ``payload_model``.
        """
        return self._core.run(
            self._operations.put(
                name,
                cron=cron,
                every=every,
                payload=payload,
                task=task,
                timetable={
                    "timezone": timezone,
                    "catch_up": catch_up,
                    "grace": grace,
                    "overlap": overlap,
                    "jitter": jitter,
                },
                paused=paused,
                options=options,
            )
        )

    def get(self, name: str) -> Schedule | None:
        """Return a schedule.

        Args:
            name: Its name.

        Returns:
            The schedule, with the status of its last task; ``None`` if there is none.
        """
        return self._core.run(self._operations.get(name))

    def list(self, *, all_queues: bool = False) -> list[Schedule]:
        """Return the schedules of the queue, by name.

        Args:
            all_queues: Those of all queues of the collection.

        Returns:
            The schedules, each with the status of its last task.
        """
        return self._core.run(self._operations.list(all_queues=all_queues))

    def pause(self, name: str) -> Schedule:
        """Pause a schedule: nothing runs until :meth:`resume`. Safe to repeat.

        Args:
            name: Its name.

        Returns:
            The schedule.

        Raises:
            ScheduleNotFound: There is none with this name.
        """
        return self._core.run(self._operations.pause(name))

    def resume(self, name: str) -> Schedule:
        """Resume a paused schedule, from its next run on. Safe to repeat.

        Args:
            name: Its name.

        Returns:
            The schedule, with its next run.

        Raises:
            ScheduleNotFound: There is none with this name.
        """
        return self._core.run(self._operations.resume(name))

    def trigger(self, name: str) -> Task[PayloadT]:
        """Run a schedule now, paused or not. Its next run stays as it is.

        Args:
            name: Its name.

        Returns:
            The task that was added.

        Raises:
            ScheduleNotFound: There is none with this name.
        """
        return self._core.run(self._operations.trigger(name))

    def remove(self, name: str) -> bool:
        """Remove a schedule. Tasks that it added stay. Safe to repeat.

        Args:
            name: Its name.

        Returns:
            Whether there was one.
        """
        return self._core.run(self._operations.remove(name))

    def next_runs(self, name: str, n: int = 5) -> Sequence[datetime]:
        """Return the next runs of a schedule, as if it were not paused.

        Args:
            name: Its name.
            n: How many.

        Returns:
            The instants, in the time zone of the schedule.

        Raises:
            ScheduleNotFound: There is none with this name.
        """
        return self._core.run(self._operations.next_runs(name, n))


class AsyncSchedules(Generic[PayloadT]):
    """The schedules of an :class:`AsyncQueue`: tasks that are added at given times."""

    def __init__(self, core: AsyncCore[PayloadT]) -> None:
        self._core = core
        self._operations = ScheduleOperations(core)

    async def put(
        self,
        name: str,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        payload: PayloadT | NewTask[PayloadT] | None = None,
        task: str | None = None,
        timezone: str = "UTC",
        catch_up: CatchUp = "latest",
        grace: Duration | None = None,
        overlap: Overlap = "allow",
        jitter: Duration | None = None,
        paused: bool | None = None,
        **options: Unpack[CommonOptions],
    ) -> Schedule:
        """Add a schedule, or change the one with this name.

        While ``cron``, ``every`` and ``timezone`` stay the same, so does the next run. So a
        program may put its schedules at each start.

        Args:
            name: The name, unique in the queue.
            cron: A cron expression of five fields, or six with seconds first; or ``@hourly``,
                ``@daily``, ``@weekly``, ``@monthly``, ``@yearly``.
            every: A period instead, of a second or more. The first run is one period from now.
            payload: The payload of each task, or a :class:`NewTask`, which has the options, too.
                Default: an empty dict.
            task: The name of each task, by which a worker with ``Tasks`` finds its function.
            timezone: The time zone of ``cron``, as ``Europe/Berlin``.
            catch_up: After an outage, run the ``latest`` missed run, ``all`` of them, or none
                (``skip``).
            grace: Leave out runs that are later than this: a second or more. Default: none; with
                ``catch_up="skip"``, those later than a minute.
            overlap: ``skip`` leaves out a run while a task of the schedule is unfinished.
            jitter: Deliver each task up to this much later, to spread load. The delay depends on
                the schedule and the run.
            paused: Whether it is paused. Default: as it is; a new one is not.
            **options: Options of each task, as in :meth:`Queue.enqueue`: ``priority``,
                ``max_attempts``, ``backoff``, ``visibility_timeout``, ``expires_in``, ``headers``.

        Returns:
            The schedule.

        Raises:
            InvalidCron: The expression has a mistake; ``field`` and ``position`` say where.
            InvalidArgument: The time zone is unknown, or another argument is not valid.
            InvalidPayload: The payload cannot be stored, or does not fit ``payload_model``.
        """
        return await self._core.run(
            self._operations.put(
                name,
                cron=cron,
                every=every,
                payload=payload,
                task=task,
                timetable={
                    "timezone": timezone,
                    "catch_up": catch_up,
                    "grace": grace,
                    "overlap": overlap,
                    "jitter": jitter,
                },
                paused=paused,
                options=options,
            )
        )

    async def get(self, name: str) -> Schedule | None:
        """Return a schedule.

        Args:
            name: Its name.

        Returns:
            The schedule, with the status of its last task; ``None`` if there is none.
        """
        return await self._core.run(self._operations.get(name))

    async def list(self, *, all_queues: bool = False) -> list[Schedule]:
        """Return the schedules of the queue, by name.

        Args:
            all_queues: Those of all queues of the collection.

        Returns:
            The schedules, each with the status of its last task.
        """
        return await self._core.run(self._operations.list(all_queues=all_queues))

    async def pause(self, name: str) -> Schedule:
        """Pause a schedule: nothing runs until :meth:`resume`. Safe to repeat.

        Args:
            name: Its name.

        Returns:
            The schedule.

        Raises:
            ScheduleNotFound: There is none with this name.
        """
        return await self._core.run(self._operations.pause(name))

    async def resume(self, name: str) -> Schedule:
        """Resume a paused schedule, from its next run on. Safe to repeat.

        Args:
            name: Its name.

        Returns:
            The schedule, with its next run.

        Raises:
            ScheduleNotFound: There is none with this name.
        """
        return await self._core.run(self._operations.resume(name))

    async def trigger(self, name: str) -> Task[PayloadT]:
        """Run a schedule now, paused or not. Its next run stays as it is.

        Args:
            name: Its name.

        Returns:
            The task that was added.

        Raises:
            ScheduleNotFound: There is none with this name.
        """
        return await self._core.run(self._operations.trigger(name))

    async def remove(self, name: str) -> bool:
        """Remove a schedule. Tasks that it added stay. Safe to repeat.

        Args:
            name: Its name.

        Returns:
            Whether there was one.
        """
        return await self._core.run(self._operations.remove(name))

    async def next_runs(self, name: str, n: int = 5) -> Sequence[datetime]:
        """Return the next runs of a schedule, as if it were not paused.

        Args:
            name: Its name.
            n: How many.

        Returns:
            The instants, in the time zone of the schedule.

        Raises:
            ScheduleNotFound: There is none with this name.
        """
        return await self._core.run(self._operations.next_runs(name, n))
