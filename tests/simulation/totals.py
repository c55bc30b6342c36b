"""What many seeds did. Its own module, so that other processes can import it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from tests.simulation.ledger import Violation
from tests.simulation.runs import simulate


class Simulated(NamedTuple):
    """What some seeds did: counts, or the seed and the broken promise."""

    counts: Counter[str]
    broken: tuple[int, str] | None = None


def simulate_all(seeds: Sequence[int]) -> Simulated:
    """Simulate seeds, until one breaks a promise."""
    counts: Counter[str] = Counter()
    began = time.process_time()
    for seed in seeds:
        try:
            world = simulate(seed)
        except Violation as exc:
            return Simulated(counts, (seed, str(exc)))
        counts += world.fault_counts
        counts += Counter(
            {
                "writes undone by a failover": world.undone,
                "calls performed again": world.repeats,
                "steps": len(world.steps),
                "tasks": len(world.ledger.entries),
                "runs": world.ledger.starts,
                "seeds": 1,
            }
        )
    counts["cpu_ms"] += round((time.process_time() - began) * 1000)
    return Simulated(counts)
