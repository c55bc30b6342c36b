"""Find retry storms in counts per minute. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

MINUTE = 60
GAP_MINUTES = 2
"""Storms that are so close are one."""


@dataclass(frozen=True)
class Minute:
    """The retries of a queue in one minute of the clock, and in its busiest second.

    ``busiest`` are those of the busiest sixty seconds that touch it: a storm does not begin
    when the clock's minute does.
    """

    queue: str
    minute: int
    retries: int
    busiest: int
    peak_per_sec: int


@dataclass(frozen=True)
class Found:
    """A storm: from its first second to its last, against what is usual in a minute."""

    queue: str
    start_sec: int
    end_sec: int
    retries: int
    peak_per_min: int
    peak_per_sec: int
    baseline_per_min: float
    synchrony: float


def find_storms(
    minutes: Iterable[Minute], *, first_minute: int, last_minute: int, factor: float, least: int
) -> list[Found]:
    """Find where a queue retries ``factor`` times as much in sixty seconds as is usual.

    Usual is the median of all minutes of the period, those without retries included. Fewer
    than ``least`` retries in sixty seconds are no storm, however unusual.
    """
    queues: defaultdict[str, list[Minute]] = defaultdict(list)
    for one in minutes:
        queues[one.queue].append(one)
    found = []
    for own in queues.values():
        quiet = max(last_minute - first_minute + 1 - len(own), 0)
        baseline = float(median([*(one.retries for one in own), *([0] * quiet)]))
        threshold = max(least, factor * baseline)
        stormy = sorted(
            (one for one in own if one.busiest >= threshold), key=lambda one: one.minute
        )
        found += [_storm(group, baseline) for group in _together(stormy)]
    return sorted(found, key=lambda storm: -storm.retries)


def _together(minutes: Sequence[Minute]) -> list[list[Minute]]:
    groups: list[list[Minute]] = []
    for one in minutes:
        if groups and one.minute - groups[-1][-1].minute <= GAP_MINUTES:
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _storm(minutes: Sequence[Minute], baseline: float) -> Found:
    """Describe a storm; ``synchrony`` is the share of the worst second in its sixty."""
    wildest = max(minutes, key=lambda one: one.peak_per_sec)
    return Found(
        queue=minutes[0].queue,
        start_sec=minutes[0].minute * MINUTE,
        end_sec=(minutes[-1].minute + 1) * MINUTE,
        retries=sum(one.retries for one in minutes),
        peak_per_min=max(one.busiest for one in minutes),
        peak_per_sec=wildest.peak_per_sec,
        baseline_per_min=baseline,
        synchrony=wildest.peak_per_sec / wildest.busiest,
    )
