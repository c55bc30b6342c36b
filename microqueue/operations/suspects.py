"""Suspects: which of the tasks that a dead worker held may have taken it down.

Tasks start in the order in which they were claimed, and those that have ended are held until
their settlement is written. So of what a dead worker held, the first ones had ended, the next
ones ran, and the last ones waited; but it does not tell where one begins and the other ends.

A task that this may harm is handled with care. Either no more than can run at the same time
are between their start and their settlement together with it: then all that may have run are
among the first ones. Or it runs alone: then it is the one. Worker and sweeper read from the
document itself which care a task needs, so that they agree whatever their settings are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, IntEnum, auto
from math import inf
from typing import Any

from microqueue.task import read_count

CERTAIN_AFTER = 2
DEFAULT_MAX_ATTEMPTS = 10


class Care(IntEnum):
    """How a task is started; more is stricter."""

    NONE = auto()
    """With any number of others."""
    FEW = auto()
    """While no more are unsettled than can run at the same time."""
    ALONE = auto()
    """While nothing else is unsettled."""


class Verdict(Enum):
    """What a task had to do with the end of its worker."""

    SUSPECT = auto()
    """It may have been running."""
    STARTED = auto()
    """It may have been started, and most likely had ended, or waited."""
    WAITED = auto()
    """It was not started."""


def care_for(document: Mapping[str, Any]) -> Care:
    """Say how to start a claimed task.

    With care, if its worker was lost before, or if this is its last attempt, as it would be
    buried for the crash of another. Alone, if both, or if two workers died over it: the next
    crash must be its own.
    """
    get: Any = document.get
    attempts, most = get("attempts"), get("max_attempts", DEFAULT_MAX_ATTEMPTS)
    redelivered = get("redelivered")
    if not redelivered and type(attempts) is int and type(most) is int and attempts < most:
        return Care.NONE  # As most are.
    last = read_count(attempts, 0) >= read_count(most, DEFAULT_MAX_ATTEMPTS)
    if not redelivered:
        return Care.FEW if last else Care.NONE
    certain = last or read_count(get("crashes"), 0) >= CERTAIN_AFTER
    return Care.ALONE if certain else Care.FEW


def fewest(care: Care, concurrency: int) -> float:
    """Give how many must be unsettled so that nothing is started with this care, or beside it."""
    if care is Care.ALONE:
        return min(1, concurrency)
    return concurrency if care is Care.FEW else inf


def judge(held: Iterable[Mapping[str, Any]], concurrency: int) -> Iterator[Verdict]:
    """Judge what a dead worker held, in the order of its claims."""
    started, strictest = 0, Care.NONE
    for document in held:
        if not isinstance(document.get("position", 0), int | float):
            yield Verdict.STARTED  # A hand took it out of its place, and nobody can tell.
            continue
        # Nothing overtakes a task that needs care, so its care holds for what follows, too.
        strictest = max(strictest, care_for(document))
        if started >= fewest(strictest, concurrency):
            yield Verdict.WAITED
        else:
            started += 1
            yield Verdict.SUSPECT if started <= concurrency else Verdict.STARTED
