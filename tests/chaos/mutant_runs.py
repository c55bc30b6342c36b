"""Short runs with a deliberate fault in the queue: each must end with a finding that it causes.

``scripts/chaos --mutants`` runs all of them, and prints which verdict has caught each, and how many
findings the same run has without the mutant.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from tests.chaos.mutants import MUTANTS, Mutant
from tests.chaos.profiles import Profile, Slot, fleet
from tests.chaos.run import Options, Run
from tests.chaos.verifier import Verification, verify

TASK_KINDS = {
    "ok": 66.0,
    "slow": 20.0,
    "fail": 4.0,
    "flaky": 3.0,
    "retry": 3.0,
    "long": 2.5,
    "snooze": 1.5,
}
"""Handlers that run for longer than usual: a fault meets tasks that run, and others that wait."""


def profile_of(name: str, mutant: Mutant) -> Profile:
    """Return the short run that reveals a mutant."""
    # The faults hit the worker whose handlers are slow: others are idle most of the time.
    slots = [
        one if one.name == "threads" or one.group != "worker" else replace(one, group="others")
        for one in fleet(full=False)
        if _takes_part(one) and (mutant.operators or one.role != "operator")
    ]
    slots.append(replace(next(one for one in slots if one.role == "sweeper"), name="sweeper-b"))
    process = tuple(one for one in mutant.faults if one != "rollback")
    server = tuple(one for one in mutant.faults if one == "rollback")
    return Profile(
        name=f"mutant {name}",
        minutes=mutant.minutes,
        tasks=int((4000 if server else 2000) * mutant.minutes),
        producers=4 if server else 1,
        chunk=200,
        process_faults=len(process),
        network_faults=0,
        server_faults=len(server),
        server=mutant.server,
        calm_sec=2.0,
        drain_sec=mutant.drain_sec,
        fleet=tuple(slots),
        process_kinds=process,
        server_kinds=server,
        databases=("chaos",),
        planners=False,
        call_timeout_sec=mutant.call_timeout_sec,
        kinds=None if server else TASK_KINDS | dict(mutant.kinds),
    )


def _takes_part(slot: Slot) -> bool:
    """Return whether a process is in these runs: one of each kind, for one database."""
    others = ("-dlq", "motor", "supervisor")
    return not slot.name.endswith(others)


def run_mutant(
    name: str, *, seed: int, folder: Path, say: Callable[[str], None], healthy: bool = False
) -> Verification:
    """Run with a mutant, or the same run without it, and judge it."""
    profile = profile_of(name, MUTANTS[name])
    options = Options(profile, seed, profile.server, folder, None if healthy else name)
    Run(options, say).perform()
    return verify(folder)


Row: TypeAlias = tuple[str, Counter[str], int]
"""A mutant, what was found, and how many findings the same run has without the mutant."""


def run_all(names: Iterable[str], *, seed: int, say: Callable[[str], None]) -> bool:
    """Run several mutants, each with a control, and print the table.

    Returns:
        Whether each mutant was caught as what it breaks, and no control had a finding.
    """
    rows: list[Row] = []
    for name in names:
        say(f"mutant {name}")
        found = _findings(name, seed=seed, healthy=False)
        rows.append((name, found, _findings(name, seed=seed, healthy=True).total()))
        say(f"mutant {name}: {_verdicts(found)}; without it: {rows[-1][2]}")
    say("\n" + "\n".join(table(rows)))
    return all(MUTANTS[name].breaks & found.keys() and not control for name, found, control in rows)


def _findings(name: str, *, seed: int, healthy: bool) -> Counter[str]:
    with tempfile.TemporaryDirectory(
        prefix="microqueue-chaos-mutant-", ignore_cleanup_errors=True
    ) as folder:
        result = run_mutant(
            name, seed=seed, folder=Path(folder), say=lambda _text: None, healthy=healthy
        )
    return Counter(one.verdict.value for one in result.findings)


def table(rows: Iterable[Row]) -> list[str]:
    """Return the rows of a Markdown table."""
    lines = ["| mutant | caught by | findings without it |", "|---|---|---|"]
    return lines + [f"| {name} | {_verdicts(found)} | {clean} |" for name, found, clean in rows]


def _verdicts(found: Counter[str]) -> str:
    return ", ".join(f"{verdict} ({count})" for verdict, count in found.most_common()) or "nothing"
