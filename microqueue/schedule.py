"""A schedule: when to add a task to a queue, and which one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict
from urllib.parse import quote

from pydantic import Field

from microqueue.backoff import BackoffPolicy
from microqueue.durations import Duration, NonNegativeDuration, PositiveDuration
from microqueue.errors import InvalidArgument
from microqueue.model import Model, invalid_argument, shorten
from microqueue.new_task import NewTask
from microqueue.task import TaskId, TaskStatus
from microqueue.timing import SHORTEST_PERIOD, Timing, check_cron, check_zone

CatchUp: TypeAlias = Literal["latest", "all", "skip"]
Overlap: TypeAlias = Literal["allow", "skip"]
Source: TypeAlias = Literal["api", "code"]

SKIP_GRACE = timedelta(minutes=1)
"""How late a run may be with ``catch_up="skip"``, unless ``grace`` says otherwise."""
SHORTEST_GRACE = timedelta(seconds=1)
MOST_RUNS = 100
"""How many missed runs of one schedule are added at a time."""
NO_TIMING = "no_timing"
TWO_TIMINGS = "two_timings"
"""The codes of errors about a schedule without a time, or with two."""
SCHEDULE_HEADER, INSTANT_HEADER = "schedule", "scheduled_at"
"""What the headers of a task say about its schedule."""
NOT_FOR_SCHEDULES = frozenset({"delay", "eta", "task_id", "dedupe_key"})
"""Options of a task that a schedule decides itself."""


class ScheduleOptions(TypedDict, total=False):
    """When a schedule is due, and what happens to runs that were missed."""

    timezone: str
    """The time zone of a cron expression, as ``Europe/Berlin``. Default: ``UTC``."""
    catch_up: CatchUp
    """After an outage run the latest missed run (the default), all of them, or none."""
    grace: Duration | None
    """How late a run may be: a second or more. Default: any time; with ``catch_up="skip"``, a
    minute.
    """
    overlap: Overlap
    """``skip`` leaves out a run while a task of the schedule is unfinished. Default: ``allow``."""
    jitter: Duration | None
    """Deliver each task later, by a part of this that depends on the schedule and the run."""


class Timetable(Model):
    """The options of a schedule that say when it runs, checked."""

    cron: str | None = None
    every: PositiveDuration | None = None
    timezone: str = "UTC"
    catch_up: CatchUp = "latest"
    grace: NonNegativeDuration | None = None
    overlap: Overlap = "allow"
    jitter: NonNegativeDuration | None = None


def check_timetable(
    cron: str | None, every: Duration | None, options: ScheduleOptions
) -> Timetable:
    """Check when a schedule runs; an error names the option, and the place in an expression."""
    if cron is None and every is None:
        reason = "a schedule needs cron or every; give one of them"
        raise InvalidArgument(reason, argument="cron", code=NO_TIMING)
    if cron is not None and every is not None:
        instead = f"every={shorten(every)} is given, too; give one of them"
        raise invalid_argument("cron", cron, instead, code=TWO_TIMINGS)
    timetable = Timetable(
        cron=None if cron is None else check_cron(cron),
        every=every,
        **{name: value for name, value in options.items() if value is not None},
    )
    check_zone(timetable.timezone)
    if timetable.grace is not None and timetable.grace < SHORTEST_GRACE:
        # A run is some milliseconds late even if a worker waits for it.
        raise invalid_argument("grace", timetable.grace, "give at least a second, or None")
    if timetable.every is None:
        return timetable
    if timetable.every < SHORTEST_PERIOD:
        raise invalid_argument("every", every, "give at least a second")
    if timetable.timezone != "UTC":
        raise invalid_argument("timezone", timetable.timezone, "a period has none; give cron")
    whole = timedelta(milliseconds=round(timetable.every / timedelta(milliseconds=1)))
    return timetable.model_copy(update={"every": whole})  # As precise as MongoDB's dates.


class ScheduleRun(Model):
    """A run of a schedule: the task that was added."""

    at: datetime
    """The instant of the schedule; of a triggered run, when it was triggered."""
    task_id: TaskId
    fired_at: datetime
    """When the task was added."""
    triggered: bool = False
    """Whether ``trigger`` added it."""
    status: TaskStatus | None = None
    """The status of the task now; ``None`` if it was deleted."""

    @property
    def late_sec(self) -> float:
        """How much later than planned the task was added, in seconds."""
        return max((self.fired_at - self.at).total_seconds(), 0.0)


class SkippedRun(Model):
    """A run that was left out: ``late`` after an outage, or ``overlap`` with an unfinished one."""

    at: datetime
    reason: Literal["late", "overlap"]


class Schedule(Timetable):
    """A schedule as it was when it was read; it never changes."""

    name: str
    queue: str
    payload: Any
    task: str | None = None
    """The name of each task."""
    priority: int = 0
    max_attempts: int = Field(ge=1)
    backoff: BackoffPolicy
    visibility_timeout: timedelta | None = None
    expires_in: timedelta | None = None
    headers: Mapping[str, Any] = Field(default_factory=dict)
    source: Source = "api"
    """``code`` if a worker declared it, ``api`` if it was made at run time."""
    app: str | None = None
    """The app whose code declared it."""
    paused: bool = False
    starts_at: datetime
    """The instant from which a period counts."""
    created_at: datetime
    updated_at: datetime
    next_at: datetime | None
    """The next run, in UTC; ``None`` while it is paused."""
    runs: int = 0
    """How many tasks were added so far."""
    last_run: ScheduleRun | None = None
    last_skipped: SkippedRun | None = None


class Declaration(NamedTuple):
    """A schedule in code: a named task, when it runs, and its queue, unless a worker chooses."""

    name: str
    cron: str | None
    every: Duration | None
    options: ScheduleOptions
    task: NewTask[Any]
    queue: str | None


class Plan(NamedTuple):
    """Which of the due runs to add, and the first run after them."""

    runs: list[datetime]
    next_at: datetime | None


def timing_of(schedule: Schedule) -> Timing:
    """Return the instants of a schedule."""
    return Timing(schedule.cron, schedule.every, schedule.timezone, schedule.starts_at)


def run_id(schedule: Schedule, instant: datetime) -> str:
    """Return the id of the task of one run: the same for everyone who adds it."""
    names = f"{quote(schedule.queue, safe='')}:{quote(schedule.name, safe='')}"
    return f"schedule:{names}:{write_instant(instant)}"


def jitter_at(schedule: Schedule, instant: datetime) -> timedelta:
    """Return how much later the task of a run is delivered: the same for everyone."""
    if not schedule.jitter:
        return timedelta(0)
    digest = hashlib.sha256(run_id(schedule, instant).encode()).digest()
    return schedule.jitter * (int.from_bytes(digest[:4], "big") / 2**32)


def plan_runs(schedule: Schedule, first: datetime, now: datetime) -> Plan:
    """Decide which of the runs from ``first`` until ``now`` to add, see ``catch_up``."""
    timing, grace = timing_of(schedule), schedule.grace
    if schedule.catch_up == "latest":
        last = timing.latest(first, now)
        runs = [last] if grace is None or last >= now - grace else []
        return Plan(runs, timing.after(last))
    if schedule.catch_up == "skip" and grace is None:
        grace = SKIP_GRACE
    start = first
    if grace is not None and first < now - grace:
        found = timing.after(now - grace - timedelta(milliseconds=1))
        if found is None or found > now:
            return Plan([], found)
        start = found
    runs = [start]
    for one in timing.between(start, now):
        if len(runs) == MOST_RUNS:
            return Plan(runs, one)
        runs.append(one)
    return Plan(runs, timing.after(runs[-1]))


def on_change_of_code(replaced: Schedule | None) -> str | None:
    """Return a warning if ``put`` replaced a schedule that code had declared."""
    if replaced is None or replaced.source != "code":
        return None
    return (
        f"the code of app {replaced.app!r} declared this schedule. It no longer changes it; "
        "to give it back to the code, remove it"
    )


def on_removal_of_code(removed: Schedule | None) -> str | None:
    """Return a warning if the schedule that was removed is one that code declares."""
    if removed is None or removed.source != "code":
        return None
    return (
        f"the code of app {removed.app!r} declares this schedule. Its next worker that starts adds "
        "it again; to stop it, pause it instead"
    )


def write_instant(instant: datetime) -> str:
    """Return an instant in UTC as text, with milliseconds only where it has some."""
    precision = "milliseconds" if instant.microsecond else "seconds"
    return instant.astimezone(UTC).replace(tzinfo=None).isoformat(timespec=precision) + "Z"
