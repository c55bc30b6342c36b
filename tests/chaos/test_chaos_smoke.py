"""The smoke profile of the chaos harness: every planned fault happens, and nothing is found."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import ledger
from tests.chaos.__main__ import INTERRUPTED
from tests.chaos.clocks import HOUR_SEC, first_offset
from tests.chaos.fleet import processes_of
from tests.chaos.history import read_history
from tests.chaos.plan import faults_of, tasks_of_chunk
from tests.chaos.profiles import PROFILES
from tests.chaos.report import REPORT
from tests.chaos.setup import FILE

SEED = 1
SMOKE = PROFILES["smoke"]
LIMIT_SEC = 540
"""Of the whole run, on a machine that does much else: alone it takes about two minutes."""
ROOT = Path(__file__).parents[2]
FAULTS_OF_ONE_SERVER = ["mongod_kill", "mongod_freeze"]


@pytest.mark.timeout(LIMIT_SEC + 60)
def test_nothing_is_lost_early_or_unexplained(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "tests.chaos", "--profile", "smoke", "--seed", str(SEED)]
    done = subprocess.run(
        [*command, "--keep", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_SEC,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    verdict = ledger.read_json(folder, REPORT)
    assert verdict["passed"]
    assert verdict["findings"] == []
    assert verdict["counts"]["acknowledged"] > SMOKE.tasks / 4

    assert ledger.read_json(folder, ledger.RUN)["skipped"] == []
    planned = Counter(one.kind for one in faults_of(SMOKE, SEED, FAULTS_OF_ONE_SERVER))
    history = read_history(ledger.read_lines(folder))
    happened = Counter(fault.kind for fault in history.faults)
    assert {kind: happened[kind] for kind in planned} == planned
    assert verdict["counts"]["wrong clocks"] > 0


@pytest.mark.timeout(LIMIT_SEC + 60)
def test_interrupt_ends_everything(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "tests.chaos", "--profile", "smoke", "--keep", str(folder)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes) as run:
        assert run.stdout is not None
        said = []
        for line in run.stdout:
            said.append(line)
            if "faults in" in line:
                run.send_signal(signal.SIGINT)
        assert run.wait(LIMIT_SEC / 2) == INTERRUPTED, said
    assert processes_of(str(folder / FILE)) == []


def test_share_of_the_processes_starts_with_a_wrong_clock() -> None:
    offsets = Counter(first_offset(SEED, f"threads-{n}", "threads") for n in range(1000))
    assert offsets.keys() == {0.0, HOUR_SEC, -HOUR_SEC}
    assert 650 < offsets[0.0] < 850
    assert min(offsets.values()) > 50
    assert {first_offset(SEED, f"celery-{n}", "celery-worker") for n in range(1000)} == {0.0}


def test_plan_follows_from_the_seed() -> None:
    def plan(seed: int) -> list[object]:
        chunk = tasks_of_chunk(
            seed, 1, 500, database="chaos", lease_sec=SMOKE.lease_sec, transactions=True
        )
        return [*faults_of(SMOKE, seed, FAULTS_OF_ONE_SERVER), *chunk]

    assert plan(1) == plan(1)
    assert plan(1) != plan(2)


@pytest.mark.parametrize("name", PROFILES)
def test_profile_performs_each_of_its_kinds_of_faults(name: str) -> None:
    profile = PROFILES[name]
    planned = {one.kind for one in faults_of(profile, SEED, ["mongod_kill"])}
    assert planned >= {kind.partition(" ")[0] for kind in profile.process_kinds}
    assert planned >= {"cut", "delay", "drop_replies", "half_open", "mongod_kill"}


@pytest.mark.parametrize("arguments", [["--profile", "none"], ["--minutes", "0"], ["--seed", "x"]])
def test_wrong_arguments_are_no_findings(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *arguments],
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
