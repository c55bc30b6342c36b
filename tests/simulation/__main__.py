"""Run the simulation from the command line."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from multiprocessing import get_context
from pathlib import Path

from tests.simulation.ledger import Violation
from tests.simulation.runs import STEPS, Failure, find_failure, simulate
from tests.simulation.totals import Simulated, simulate_all

BATCH = 10
"""How many seeds a process simulates at a time."""


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _batches(first: int) -> Iterable[range]:
    while True:
        yield range(first, first + BATCH)
        first += BATCH


def _run_all(first: int, steps: int, jobs: int) -> Simulated:
    """Simulate seeds until the steps are used up, or a promise is broken."""
    counts: Counter[str] = Counter()
    if jobs == 1:
        results: Iterable[Simulated] = map(simulate_all, _batches(first))
        return _add_up(results, steps, counts)
    with get_context("spawn").Pool(jobs) as pool:
        # Not all batches at once: there is no end of them.
        most = steps // (BATCH * STEPS) + jobs
        chosen = [range(first + BATCH * n, first + BATCH * (n + 1)) for n in range(most)]
        return _add_up(pool.imap(simulate_all, chosen), steps, counts)


def _add_up(results: Iterable[Simulated], steps: int, counts: Counter[str]) -> Simulated:
    for one in results:
        counts += one.counts
        if one.broken is not None:
            return Simulated(counts, one.broken)
        if counts["steps"] >= steps:
            break
    return Simulated(counts)


def _replay(file: Path, *, trace: bool) -> int:
    seed, steps = Failure.read(file)
    try:
        simulate(seed, steps, trace=_say if trace else None)
    except Violation as exc:
        _say(f"seed {seed}: {exc}")
        return 1
    _say(f"seed {seed}: no broken promise")
    return 0


def _explain(seed: int, reason: str) -> int:
    """Print a broken promise, and how to see it again."""
    _say(f"seed {seed}: {reason}")
    failure = find_failure(seed)
    if failure is None:
        _say("it holds when the seed is simulated again: report this")
        return 1
    file = Path(f"simulation-{seed}.json")
    failure.write(file)
    _say(f"smallest: {len(failure.steps)} steps, {len(failure.faults)} faults: {failure.violation}")
    for one in failure.faults:
        _say(f"  at {one.at_ms} ms, actor {one.actor}: {one.fault}")
    _say(f"replay: python -m tests.simulation --replay {file} --trace")
    _say(f"replay: python -m tests.simulation --seed {seed} --trace")
    return 1


def main(given: Sequence[str] | None = None) -> int:
    """Simulate seeds until the steps are used up; return 1 after a broken promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed (%(default)s)")
    parser.add_argument("--steps", type=int, default=1_000_000, help="in total (%(default)s)")
    cores = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=cores, help="processes (%(default)s)")
    parser.add_argument("--trace", action="store_true", help="print each step of one run")
    parser.add_argument("--replay", type=Path, help="the file of a run that broke a promise")
    options = parser.parse_args(given)
    if options.replay is not None:
        return _replay(options.replay, trace=options.trace)
    if options.trace:
        simulate(options.seed, trace=_say)
        return 0
    began = time.monotonic()
    counts, broken = _run_all(options.seed, options.steps, options.jobs)
    if broken is not None:
        return _explain(*broken)
    took, cpu_sec = time.monotonic() - began, counts.pop("cpu_ms") / 1000
    seeds = counts.pop("seeds")
    for kind, count in sorted(counts.items()):
        _say(f"{kind:>28} {count:>12,}")
    _say(
        f"seeds {options.seed} to {options.seed + seeds - 1}: no broken promise; {took:.0f} s with "
        f"{options.jobs} processes, {cpu_sec:.0f} s of processor time"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
