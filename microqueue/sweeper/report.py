"""What a sweep consists of, and what it reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, TypeAlias

from pydantic import Field
from pymongo.errors import ExecutionTimeout, NetworkTimeout, WTimeoutError

from microqueue.arguments import check_several, refused
from microqueue.durations import Duration, duration_argument
from microqueue.errors import MicroqueueError, ServerUnavailable
from microqueue.model import Model

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

logger = logging.getLogger("microqueue.sweeper")

Counts: TypeAlias = dict[str, int]


class SweepReport(Model):
    """What one sweep did. ``skipped``: another sweeper was at it. ``errors``: by job."""

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
    """Adds up the counts of the jobs of one sweep."""

    def __init__(self, sweeper_id: str, at: datetime) -> None:
        self._values: dict[str, Any] = {"sweeper_id": sweeper_id, "at": at}
        self._errors: dict[str, str] = {}
        self._started = time.monotonic()

    def add(self, counts: Counts) -> None:
        """Count what a job did."""
        for name, count in counts.items():
            self._values[name] = self._values.get(name, 0) + count

    def failed(self, job: str, error: Exception) -> None:
        """Note that a job failed, with a traceback if it should not have."""
        logger.error("sweep job %s failed: %s", job, error, exc_info=_if_unexpected(error))
        self._errors[job] = str(error) or repr(error)

    def report(self, *, skipped: bool = False) -> SweepReport:
        """Give the report of all that was added."""
        took_sec = round(time.monotonic() - self._started, 6)
        return SweepReport(**self._values, took_sec=took_sec, errors=self._errors, skipped=skipped)


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
