"""Deliberate faults in the queue are found by the harness; ``scripts/chaos --mutants`` has all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.mutant_runs import run_mutant
from tests.chaos.mutants import MUTANTS
from tests.chaos.verifier import Verdict
from tests.simulation.mutants import MUTANTS as SIMULATED

QUICK = ("clock_ahead", "settlement_before_handler", "no_fence", "missing_refund")
SEEDS = (1, 2, 3)
LIMIT_SEC = 700
DOCUMENT = Path(__file__).parents[2] / "docs" / "testing.md"


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


def test_document_lists_all_mutants() -> None:
    """With the verdicts that catch each, and where it runs."""
    text = DOCUMENT.read_text(encoding="utf-8")
    table = re.search(r"^\| mutant \| .*\n\|(?:---\|)+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    rows = [line.strip("| ").split(" | ") for line in table[1].splitlines()]
    simulated = {re.sub("[ -]", "_", name.replace("the ", "")) for name in SIMULATED}
    expected = []
    for name, mutant in MUTANTS.items():
        verdicts = "; ".join(one for one in Verdict if one in mutant.breaks)
        places = {"suite": QUICK, "`--mutants`": MUTANTS, "simulation": simulated}
        where = ", ".join(place for place, names in places.items() if name in names)
        expected.append((f"`{name}`", verdicts, where))
    assert [(name, verdicts, where) for name, _, verdicts, where in rows] == expected
    assert all(broken for _, broken, _, _ in rows)
    assert f"# all {len(MUTANTS)}\n" in text
    assert f"each of the {len(MUTANTS)} was caught" in text
