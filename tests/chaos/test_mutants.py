"""Deliberate faults in the queue are found by the harness; ``scripts/chaos --mutants`` has all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.mutant_runs import run_mutant
from tests.chaos.mutants import MUTANTS

QUICK = ("clock_ahead", "settlement_before_handler", "no_fence", "missing_refund")
SEEDS = (1, 2, 3)
LIMIT_SEC = 700


@pytest.mark.timeout(LIMIT_SEC)
@pytest.mark.parametrize("name", QUICK)
def test_deliberate_fault_is_found(name: str, tmp_path: Path) -> None:
    """Whether one run finds it depends on what happens at the same time, so there are several."""

    def found(seed: int) -> bool:
        folder = tmp_path / str(seed)
        result = run_mutant(name, seed=seed, folder=folder, say=lambda _text: None)
        return bool(MUTANTS[name].breaks & {finding.verdict for finding in result.findings})

    assert any(found(seed) for seed in SEEDS)


@pytest.mark.timeout(LIMIT_SEC)
def test_the_same_run_without_a_mutant_has_no_finding(tmp_path: Path) -> None:
    result = run_mutant(
        "settlement_before_handler", seed=1, folder=tmp_path, say=lambda _text: None, healthy=True
    )
    assert result.findings == []


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_replaces_something_that_exists(name: str) -> None:
    replaced: list[tuple[object, object]] = []
    MUTANTS[name].apply(lambda where, what, new: replaced.append((getattr(where, what), new)))
    assert replaced
    assert all(before is not new for before, new in replaced)
