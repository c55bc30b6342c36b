"""Simulated seeds keep every promise, and deliberate faults in the queue are found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.__main__ import main
from tests.simulation.ledger import PROMISES, Violation
from tests.simulation.mutants import MUTANTS
from tests.simulation.runs import Failure, find_failure, simulate
from tests.simulation.world import FAULT_KINDS

SEEDS = range(1, 13)
TRIED_SEEDS = 60
MUTANT_STEPS = 1500


def test_every_promise_holds_and_every_fault_happens() -> None:
    faults: Counter[str] = Counter()
    for seed in SEEDS:
        world = simulate(seed)
        faults += world.fault_counts
        faults["undone"] += world.undone
        faults["repeated"] += world.repeats
        assert world.ledger.starts > 20
    assert set(faults) == {*FAULT_KINDS, "undone", "repeated"}, faults


def test_every_promise_holds_without_faults() -> None:
    for seed in SEEDS[:6]:
        assert not simulate(seed, faults={}).fault_counts


def test_seed_decides_everything() -> None:
    first: list[str] = []
    second: list[str] = []
    simulate(3, MUTANT_STEPS, trace=first.append)
    world = simulate(3, MUTANT_STEPS, trace=second.append)
    assert first == second, "ids and tokens, too"
    assert len(first) > 500
    again: list[str] = []
    simulate(3, world.steps[: world.calm_from], trace=again.append)
    assert again[:500] == first[:500], "so do its steps"


@pytest.mark.parametrize("name", MUTANTS)
def test_deliberate_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    seeds = range(mutant.first_seed, mutant.first_seed + TRIED_SEEDS)
    found = (_broken_by(seed, mutant.faults) for seed in seeds)
    assert next((kind for kind in found if kind is not None), "nothing") in mutant.breaks


def _broken_by(seed: int, faults: dict[str, float]) -> str | None:
    try:
        simulate(seed, MUTANT_STEPS, faults=faults)
    except Violation as exc:
        return exc.kind
    return None


def test_every_promise_has_a_fault_that_breaks_it() -> None:
    assert set().union(*(one.breaks for one in MUTANTS.values())) == set(PROMISES)


@pytest.fixture
def failure(monkeypatch: pytest.MonkeyPatch) -> Failure:
    MUTANTS["clock ahead"].apply(monkeypatch)
    found = (find_failure(seed, 600) for seed in range(1, TRIED_SEEDS))
    return next(one for one in found if one is not None)


def test_failing_run_shrinks_and_can_be_replayed(failure: Failure, tmp_path: Path) -> None:
    assert len(failure.steps) < 300
    assert len(failure.faults) < 5
    with pytest.raises(Violation) as again:
        simulate(failure.seed, failure.steps)
    assert str(again.value) == str(failure.violation)
    file = tmp_path / "failure.json"
    failure.write(file)
    assert Failure.read(file) == (failure.seed, failure.steps)


def test_command_prints_how_to_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--steps", "1000", "--seed", "2", "--jobs", "1"]) == 0
    MUTANTS["ignored delay"].apply(monkeypatch)
    assert main(["--steps", "1000", "--seed", "2", "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert "python -m tests.simulation --replay simulation-2.json" in printed
    assert main(["--replay", "simulation-2.json"]) == 1
    assert "early" in capsys.readouterr().out
