"""Runs of the simulation: one seed, and the smallest run that still breaks the same promise."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from microqueue.backoff import BackoffPolicy
from microqueue.run_ids import is_run_id
from microqueue.settings import QueueSettings
from tests.simulation.ledger import Violation
from tests.simulation.roles import (
    BACKOFF,
    operator,
    producer,
    publisher,
    scheduler,
    sweeper,
    worker,
)
from tests.simulation.seeding import seeded
from tests.simulation.world import Role, Step, World

FAULTS = {
    "crash": 0.004,
    "failover": 0.003,
    "pause": 0.004,
    "clock_jump": 0.001,
    "lost_request": 0.01,
    "late_request": 0.02,
    "lost_reply": 0.02,
    "write_concern": 0.02,
    "partial": 0.02,
}
"""How likely each fault is per step, where it is possible."""
ROLES: dict[str, Role] = {
    **{f"producer{n}": producer for n in range(2)},
    **{f"worker{n}": worker for n in range(4)},
    **{f"sweeper{n}": sweeper for n in range(2)},
    "scheduler": scheduler,
    "publisher": publisher,
    "operator": operator,
}
LEASE_SEC = 2.0
STEPS = 3000
CALM_STEPS = 20_000
"""Enough for every task to end once there are no more faults."""
CALM_PART = 200
RETENTIONS = [timedelta(days=7), timedelta(0), timedelta(seconds=5)]
MOST_TRIES = 300
"""How many smaller runs are tried."""


@dataclass(frozen=True)
class Failure:
    """A broken promise, and the steps after which it is broken."""

    seed: int
    steps: tuple[Step, ...]
    violation: Violation

    @property
    def faults(self) -> list[Step]:
        """The steps with a fault."""
        return [one for one in self.steps if one.fault is not None]

    def write(self, file: Path) -> None:
        """Write the seed and the steps to a file."""
        file.write_text(json.dumps({"seed": self.seed, "steps": self.steps}))

    @staticmethod
    def read(file: Path) -> tuple[int, tuple[Step, ...]]:
        """Return the seed and the steps of a file."""
        found = json.loads(file.read_text())
        return found["seed"], tuple(Step(*one) for one in found["steps"])


def settings_of(seed: int) -> QueueSettings:
    """Return the settings of a seed: each combination of retention and place of dead letters."""
    return QueueSettings(
        visibility_timeout=timedelta(seconds=LEASE_SEC),
        backoff=BackoffPolicy(**BACKOFF, jitter="equal"),
        retention=RETENTIONS[seed % len(RETENTIONS)],
        dead_letters="collection" if seed // len(RETENTIONS) % 2 else "status",
        batch_size=4,
        ensure_indexes=False,
    )


def simulate(
    seed: int,
    steps: int | Sequence[Step] = STEPS,
    *,
    faults: Mapping[str, float] = FAULTS,
    trace: Callable[[str], object] | None = None,
) -> World:
    """Run a world for some steps with faults, then until every task has ended, and check it.

    ``steps`` are how many, or those of another run.

    Raises:
        Violation: A promise is broken.
    """
    world = World(seed, settings_of(seed), ROLES, faults=faults, trace=trace)
    with seeded(seed, world):
        _run(world, steps)
    return world


def _run(world: World, steps: int | Sequence[Step]) -> None:
    if isinstance(steps, int):
        world.run(steps)
    else:
        world.replay(steps)
    world.calm_down()
    for _ in range(CALM_STEPS // CALM_PART):
        if _is_over(world):
            break
        world.run(CALM_PART)
    world.ledger.check_end(
        world.tasks(), world.dead_letters(), faultless=not world.fault_counts.total()
    )


def _is_over(world: World) -> bool:
    """Return whether nothing happens any more: every task has ended, and is in its place."""
    if world.has_late or any("replaying" in one for one in world.dead_letters()):
        return False
    stored = world.server.collections.get("schedules")
    schedules = [] if stored is None else stored.documents.values()
    return all(one["paused"] for one in schedules) and all(
        one["status"] == "done"
        or (
            one["status"] == "failed" and (not world.settings.separate_dlq or is_run_id(one["_id"]))
        )
        for one in world.tasks()
    )


# Failures


def find_failure(
    seed: int, steps: int = STEPS, *, faults: Mapping[str, float] = FAULTS
) -> Failure | None:
    """Simulate a seed; return a small run that breaks the same promise, or None if all hold.

    Steps are left out, first many at once and then few, while the same promise stays broken.
    """
    first = _failure(seed, steps, faults)
    if first is None:
        return None
    tries = MOST_TRIES
    best = first
    size = len(best.steps) // 2
    while size and tries:
        start = len(best.steps)
        while start > 0 and tries:
            start = max(start - size, 0)
            fewer = best.steps[:start] + best.steps[start + size :]
            tries -= 1
            found = _failure(seed, fewer, faults)
            if found is not None and found.violation.kind == first.violation.kind:
                best = found
                start = min(start, len(best.steps))
        size //= 2
    return best


def _failure(seed: int, steps: int | Sequence[Step], faults: Mapping[str, float]) -> Failure | None:
    """Run; return the broken promise, with the steps made until then, without those of the end."""
    world = World(seed, settings_of(seed), ROLES, faults=faults)
    try:
        with seeded(seed, world):
            _run(world, steps)
    except Violation as exc:
        made = world.steps[: world.calm_from]
        return Failure(seed, tuple(made), exc)
    return None
