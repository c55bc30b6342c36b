"""The command: its exit status, what takes part in a run, and what its profiles plan."""

from __future__ import annotations

import inspect
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mongomock
import pytest

from tests.chaos import __main__ as command
from tests.chaos import ledger, mutant_runs
from tests.chaos.clocks import RIGHT_ROLES
from tests.chaos.plan import BATCH_KINDS, HOSTILE_KINDS, SIZES, WAYS, faults_of
from tests.chaos.profiles import PLANNER_KINDS, PROFILES
from tests.chaos.roles.guests import run_celery_sender
from tests.chaos.roles.nursery import ROLES
from tests.chaos.roles.planners import BOUND, PERIOD, run_publisher
from tests.chaos.run import (
    HarnessTrouble,
    Options,
    Run,
    parts_of,
    unfinished,
    without_absent,
)
from tests.chaos.setup import Setup

LEAST_FAILURES = 0.05


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (True, 0),
        (False, 1),
        (HarnessTrouble("the servers did not start"), 2),
        (ValueError("a bug"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_status_of_mutants(monkeypatch: pytest.MonkeyPatch, result: Any, status: int) -> None:
    def run_all(*_: Any, **__: Any) -> Any:
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(mutant_runs, "run_all", run_all)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert command.main(["--mutants"]) == status


def test_process_that_becomes_a_command_has_the_right_clock() -> None:
    """A wrong one would be in the ledger, and not in the process."""
    replaced = {
        role for role, run in ROLES.items() if {"execve", "_become"} & {*run.__code__.co_names}
    }
    assert {"supervisor", "dashboard"} <= replaced <= RIGHT_ROLES


def test_standalone_server_has_no_planners() -> None:
    profile, absent = without_absent(PROFILES["smoke"], "standalone")
    assert absent == ["the schedule and the topic: a standalone server has no transactions"]
    assert parts_of(profile) == []
    planned = {f"{one.kind} {one.target}" for one in faults_of(profile, 1, ["mongod_kill"])}
    assert "sigkill worker" in planned
    assert not planned & {*PLANNER_KINDS}


def test_run_says_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any, **__: Any) -> Any:
        raise HarnessTrouble("no servers in this test")

    said: list[str] = []
    monkeypatch.setattr("tests.chaos.run.started", started)
    with pytest.raises(HarnessTrouble):
        Run(Options(PROFILES["smoke"], 1, "standalone", tmp_path), said.append).perform()
    assert "skipped the schedule and the topic: a standalone server has no transactions" in said


def test_run_notes_what_takes_part(tmp_path: Path) -> None:
    client = SimpleNamespace(server_info=lambda: {"version": "8.0.0"})
    servers: Any = SimpleNamespace(primary=lambda: SimpleNamespace(client=client))
    setup = Setup(str(tmp_path), "", 0.0, 3.0, 7.5, 25, transactions=True)
    run = Run(Options(PROFILES["smoke"], 1, "single", tmp_path), lambda _: None)
    run._describe(servers, setup)  # noqa: SLF001 (it needs no server)
    assert ledger.read_json(tmp_path, ledger.RUN)["parts"] == ["schedule", "topic"]


def test_other_servers_have_planners() -> None:
    profile, absent = without_absent(PROFILES["smoke"], "single")
    assert absent == []
    assert profile == PROFILES["smoke"]
    assert parts_of(profile) == ["schedule", "topic"]


def test_profile_knows_all_of_its_parts() -> None:
    assert parts_of(PROFILES["standard"]) == ["schedule", "topic", "celery", "archive"]


def test_soak_plans_failures_of_each_twentieth_task() -> None:
    """Those that fail for good suffice, though tasks that never fail come from elsewhere, too."""
    profile, others = PROFILES["soak"], {"batched": BATCH_KINDS, "popped": BATCH_KINDS}
    others |= {"hostile": HOSTILE_KINDS, "ordered": {"ok": 1.0}}
    failing = drawn = 0.0
    for way, weight in WAYS.items():
        kinds = others.get(way, profile.kinds or {})
        tasks = weight * sum(SIZES[way]) / 2
        drawn += tasks
        lasting = kinds.get("fail", 0.0) + kinds.get("raise", 0.0)
        failing += tasks * lasting / sum(kinds.values())
    per_sec = _rate(run_celery_sender) + _rate(run_publisher) * len(BOUND)
    per_sec += 1 / PERIOD.total_seconds()
    planned = profile.tasks + per_sec * profile.minutes * 60
    assert profile.tasks * failing / drawn / planned >= LEAST_FAILURES


def _rate(role: Any) -> float:
    return float(inspect.signature(role).parameters["rate"].default)


def test_run_waits_for_tasks_and_for_replays_that_have_begun() -> None:
    database: Any = mongomock.MongoClient().chaos
    begun = {"status": "failed", "replaying": {"changes": {}}}
    for status in ("pending", "processing", "failed", "done"):
        database.tasks.insert_one({"status": status})
    assert unfinished(database) == 2
    database.tasks.insert_one({"_id": 1, **begun})
    database.tasks_dlq.insert_many([{"_id": 1, **begun}, {"_id": 2, "status": "failed"}])
    assert unfinished(database) == 4
