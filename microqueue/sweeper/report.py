"""What a sweep consists of, and what it reports."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeAlias
from uuid import UUID

from bson import ObjectId
from pydantic import Field
from pymongo.errors import ExecutionTimeout, NetworkTimeout, WTimeoutError

from microqueue.arguments import check_several, refused
from microqueue.durations import Duration, duration_argument
from microqueue.errors import MicroqueueError, ServerUnavailable
from microqueue.model import Model
from microqueue.operations.batches import Burial, Progress
from microqueue.task import TaskId
from microqueue.task_ids import reference

JOBS = (
    "reclaim_stuck",
    "reclaim_orphaned",
    "promote_due",
    "bury_exhausted",
    "expire_undelivered",
    "purge_finished",
    "move_dead_letters",
)
COUNTERS = ("reclaimed", "promoted", "buried", "expired", "purged", "moved")
"""The fields of a report that count tasks."""

LONGEST_ID = 100
"""How many characters of an id are logged."""

logger = logging.getLogger("microqueue.sweeper")

Counts: TypeAlias = dict[str, int]


class BuriedTasks(Model):
    """Tasks that a sweep buried with one code: how many, and the ids of the first ten."""

    count: int
    ids: Sequence[TaskId]


class SweepReport(Model):
    """What one sweep did.

    ``skipped``: another sweeper was at it. ``taken_over``: another sweeper took the lock over
    after this one had stalled, and does the rest. ``errors``: by job. ``buried_tasks``: by code.
    """

    sweeper_id: str
    at: datetime
    took_sec: float = 0.0
    reclaimed: int = 0
    promoted: int = 0
    buried: int = 0
    expired: int = 0
    purged: int = 0
    moved: int = 0
    skipped: bool = False
    taken_over: bool = False
    buried_tasks: Mapping[str, BuriedTasks] = Field(default_factory=dict)
    errors: Mapping[str, str] = Field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Whether it moved anything, or something went wrong."""
        return bool(self.errors) or any(getattr(self, name) for name in COUNTERS)

    @property
    def ok(self) -> bool:
        """Whether every job went through."""
        return not self.errors


class Tally:
    """Makes a report of the progress of one sweep."""

    def __init__(self, sweeper_id: str, at: datetime, progress: Progress) -> None:
        self._sweeper_id, self._at = sweeper_id, at
        self._progress = progress
        self._errors: dict[str, str] = {}
        self._started = time.monotonic()

    def failed(self, job: str, error: Exception) -> None:
        """Note that a job failed, with a traceback if it should not have."""
        logger.error("sweep job %s failed: %s", job, error, exc_info=_if_unexpected(error))
        self._errors[job] = str(error) or repr(error)

    def report(self, *, skipped: bool = False) -> SweepReport:
        """Report what was done so far."""
        progress = self._progress
        return SweepReport(
            sweeper_id=self._sweeper_id,
            at=self._at,
            took_sec=round(time.monotonic() - self._started, 6),
            errors=self._errors,
            skipped=skipped,
            taken_over=progress.stopped,
            buried_tasks={
                code: BuriedTasks(count=burial.count, ids=[_plain_id(one) for one in burial.ids])
                for code, burial in progress.burials.items()
            },
            **{name: progress.counts[name] for name in COUNTERS},
        )


def _plain_id(task_id: Any) -> TaskId:
    """Return an id of a type that tasks have; others, which were inserted manually, as text."""
    known = isinstance(task_id, ObjectId | UUID | str | int) and not isinstance(task_id, bool)
    return task_id if known else str(task_id)


def describe_burials(burials: Mapping[str, Burial | BuriedTasks]) -> list[str]:
    """Name buried tasks, a line per code, as commands take their ids."""
    return [
        f"buried {one.count:,} as {code}: {_named(one)}" for code, one in sorted(burials.items())
    ]


def _named(burial: Burial | BuriedTasks) -> str:
    named = [_one_line(reference(one)) for one in burial.ids]
    more = burial.count - len(named)
    return ", ".join([*named, *([f"{more:,} more"] if more > 0 else [])])


def _one_line(text: str) -> str:
    shown = text if text.isprintable() else json.dumps(text)
    return shown if len(shown) <= LONGEST_ID else f"{shown[: LONGEST_ID - 1]}…"


def is_away(error: Exception) -> bool:
    """Tell a server that is not there from one that takes too long for a job."""
    late = isinstance(error.__cause__, ExecutionTimeout | NetworkTimeout | WTimeoutError)
    return isinstance(error, ServerUnavailable) and not late


def log_failure(error: Exception, pause_sec: float) -> None:
    """Say that a sweep failed, and when the next one is."""
    event = "sweep failed; the next one is in %g s: %s"
    logger.error(event, pause_sec, error, exc_info=_if_unexpected(error))


def _if_unexpected(error: Exception) -> Exception | None:
    """Give an error whose traceback is worth a look."""
    return None if isinstance(error, MicroqueueError) else error


def check_jobs(jobs: Iterable[str]) -> tuple[str, ...]:
    """Refuse unknown jobs; give the known ones in the order in which they run."""
    instead = f"give some of {', '.join(JOBS)}"
    chosen = list(check_several("jobs", jobs, instead))
    if unknown := [job for job in chosen if job not in JOBS]:
        raise refused("jobs", unknown, instead)
    return tuple(job for job in JOBS if job in chosen)


def check_every(every: Duration) -> float:
    """Refuse a period that would sweep without a pause."""
    pause = duration_argument("every", every)
    if not pause:
        raise refused("every", every, "give more than 0 seconds")
    return pause.total_seconds()
