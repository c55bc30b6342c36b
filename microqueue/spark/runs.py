"""Runs that are done once: begun by a name, gone on with after a kill, and then over."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from microqueue.errors import InvalidArgument, MicroqueueError
from microqueue.operations import runs
from microqueue.operations.diagnostics import list_indexes
from microqueue.operations.indexes import retention_of
from microqueue.spark.location import location_of, server_now
from microqueue.spark.options import LocationOptions


@dataclass(frozen=True)
class Run:
    """A run as it was begun; ``report`` is there once it is over."""

    name: str
    begun_at: datetime
    resumed: bool
    report: dict[str, Any] | None


def begin_run(place: LocationOptions, name: str, details: dict[str, Any]) -> Run:
    """Begin a run, or go on with it. Refuse one that was something else, or is too old.

    Tasks of a run that are done are deleted after the retention: whoever goes on with it
    later could not tell any more what it has added.
    """
    here = location_of(place)
    now = server_now(place)
    note = here.run(runs.begin(name, details, now))
    _check_details(note, details)
    begun_at: datetime = note["begun_at"]
    retention = retention_of(here.run(list_indexes()), here.settings.retention)
    resumed = begun_at < now
    if note["finished_at"] is None and retention is not None and now - begun_at > retention:
        raise MicroqueueError(
            f"run {name!r} was begun at {begun_at:%Y-%m-%d %H:%M} UTC and not finished, and done "
            "tasks have been deleted since: it cannot go on without repeating some. "
            "Choose what is left, and give another name"
        )
    return Run(name, begun_at, resumed, note.get("report"))


def find_report(
    place: LocationOptions, name: str, details: dict[str, Any]
) -> dict[str, Any] | None:
    """Give the report of a run that is over; refuse one that was something else."""
    note = location_of(place).run(runs.find(name))
    if note is None:
        return None
    _check_details(note, details)
    report: dict[str, Any] | None = note.get("report")
    return report


def _check_details(note: dict[str, Any], details: dict[str, Any]) -> None:
    """Refuse to go on with a run under other options: half of it would be something else."""
    before, name = note["details"], note["_id"]
    other = [one for one in {**before, **details} if before.get(one) != details.get(one)]
    if other:
        then, now = (
            ", ".join(f"{one}={options.get(one)!r}" for one in other)
            for options in (before, details)
        )
        raise InvalidArgument(
            f"run {name!r} was begun with {then}, and not with {now}; "
            "give the same options, or another name with --run",
            argument="run",
            value=name,
        )


def finish_run(place: LocationOptions, run: Run, report: dict[str, Any]) -> None:
    """Note what a run did: from now on, starting it again does nothing."""
    location_of(place).run(runs.finish(run.name, report, server_now(place)))
