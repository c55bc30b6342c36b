"""Named runs, which are done once: a killed run is resumed, a finished one is not repeated."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from microqueue.errors import PipelineError, RunConflict
from microqueue.operations import runs
from microqueue.operations.schema import read_retention
from microqueue.spark import error_codes
from microqueue.spark.location import LocationOptions, location_of, server_now


@dataclass(frozen=True)
class NamedRun:
    """A run; ``report`` is set once it has finished."""

    name: str
    begun_at: datetime
    resumed: bool
    report: dict[str, Any] | None


def begin_run(location: LocationOptions, name: str, details: dict[str, Any]) -> NamedRun:
    """Begin a run, or resume it.

    Done tasks are deleted after the retention. A run that is resumed later could not know which
    tasks it has added.

    Raises:
        RunConflict: The run was begun with other options.
        PipelineError: The run is too old to be resumed.
    """
    connected = location_of(location)
    now = server_now(location)
    note = connected.run(runs.begin(name, details, now))
    _check_details(note, details)
    begun_at: datetime = note["begun_at"]
    retention = connected.run(
        read_retention(connected.collections.name, connected.settings.retention)
    )
    resumed = begun_at < now
    if note["finished_at"] is None and retention is not None and now - begun_at > retention:
        raise PipelineError(
            f"run {name!r} was begun at {begun_at:%Y-%m-%d %H:%M} UTC and not finished, and done "
            "tasks have been deleted since: it cannot be resumed without repeating some. "
            "Select what is left, and give another name with --run",
            code=error_codes.RUN_TOO_OLD,
            run=name,
        )
    return NamedRun(name, begun_at, resumed, note.get("report"))


def find_report(
    location: LocationOptions, name: str, details: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the report of a finished run; raise if it was begun with other options."""
    note = location_of(location).run(runs.find(name))
    if note is None:
        return None
    _check_details(note, details)
    report: dict[str, Any] | None = note.get("report")
    return report


def _check_details(note: dict[str, Any], details: dict[str, Any]) -> None:
    """Raise if a run was begun with other options."""
    before, name = note["details"], note["_id"]
    other = [one for one in {**before, **details} if before.get(one) != details.get(one)]
    if other:
        then, now = ({one: options.get(one) for one in other} for options in (before, details))
        raise RunConflict(run=name, before=then, given=now)


def finish_run(location: LocationOptions, run: NamedRun, report: dict[str, Any]) -> None:
    """Record what a run did; from now on, starting it again does nothing."""
    location_of(location).run(runs.finish(run.name, report, server_now(location)))
