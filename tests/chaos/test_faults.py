"""The injector: what it could not perform is no fault."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos import ledger
from tests.chaos.faults import Injector
from tests.chaos.fleet import Process
from tests.chaos.handlers import Participant
from tests.chaos.history import read_history
from tests.chaos.plan import PlannedFault
from tests.chaos.profiles import PROFILES, Slot
from tests.chaos.roles import sweepers
from tests.chaos.servers import DISK_MB
from tests.chaos.setup import DATABASES
from tests.waiting import wait_for

WORKER = Process("w-1", 1, Slot("w", "worker", "threads", {}))


class Gone:
    """A fleet whose process ends before the signal comes."""

    def living(self, _group: str) -> list[Process]:
        return [WORKER]

    def send(self, *_: Any, **__: Any) -> bool:
        return False


class Starting:
    """A fleet that starts what it is asked for."""

    def __init__(self) -> None:
        self.started: list[Slot] = []

    def start(self, slot: Slot) -> str:
        self.started.append(slot)
        return f"{slot.name}-1"

    def dismiss(self, _who: str) -> None:
        pass


def perform(
    folder: Path, kind: str, target: str, *, fleet: Any = None, servers: Any = None
) -> tuple[Injector, list[str]]:
    lines = ledger.Ledger(folder, "harness")
    nothing: Any = None
    given: Any = fleet or Gone()
    injector = Injector(nothing, servers, given, lines, lambda _: None)
    planned = PlannedFault(at=0, lane="processes", kind=kind, target=target, choice=0, lasts=0)
    injector.start([planned], ledger.now())
    wait_for(lambda: not injector.busy)
    lines.close()
    return injector, [one.kind for one in read_history(ledger.read_lines(folder)).faults]


@pytest.mark.parametrize("target", ["worker", "supervised"])
@pytest.mark.parametrize("kind", ["sigkill", "sigterm", "sigstop"])
def test_signal_that_was_not_sent_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, target: str
) -> None:
    def kill(_pid: int, _number: int) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr("tests.chaos.faults.children_of", lambda _: [2])
    injector, faults = perform(tmp_path, kind, target)
    assert faults == []
    assert [fault.kind for fault, _ in injector.skipped] == [kind]
    assert not injector.done
    assert not injector.errors


def test_signal_that_was_sent_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def send(_fleet: Gone, _process: Process, number: int, **_: Any) -> bool:
        sent.append(number)
        return True

    monkeypatch.setattr(Gone, "send", send)
    injector, faults = perform(tmp_path, "sigkill", "worker")
    assert faults == ["sigkill"]
    assert sent == [signal.SIGKILL]
    assert injector.skipped == []


def test_twenty_sweepers_for_each_collection(tmp_path: Path) -> None:
    fleet = Starting()
    _, faults = perform(tmp_path, "twenty_sweepers", "processes", fleet=fleet)
    assert faults == ["twenty_sweepers"]
    (slot,) = fleet.started
    assert slot.arguments["databases"] == [*DATABASES]
    assert slot.arguments["count"] == 20


def test_process_sweeps_each_database_with_as_many_sweepers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[str] = []

    class OneSweeper:
        def __init__(self, queue: Any) -> None:
            self._queue = queue

        def run_forever(self, *, every: float) -> None:
            assert every == 0.2
            swept.append(self._queue.name)

        def stop(self) -> None:
            pass

    def opened(name: str, **_: Any) -> Any:
        return SimpleNamespace(name=name, close=lambda: None)

    monkeypatch.setattr(sweepers, "Sweeper", OneSweeper)
    monkeypatch.setattr(sweepers, "Queue", {Any: SimpleNamespace(from_uri=opened)})
    monkeypatch.setattr(signal, "signal", lambda _number, stop: stop())
    setup: Any = SimpleNamespace(address=lambda name: name, settings=lambda _name: None)
    me = Participant(setup, ledger.Ledger(tmp_path, "twenty-1"))
    sweepers.run_sweepers(me, [*DATABASES], count=20, every=0.2)
    assert Counter(swept) == dict.fromkeys(DATABASES, 20)


@pytest.mark.parametrize("alive", [True, False])
def test_full_disk_that_makes_no_write_fail_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr("tests.chaos.faults.FULL_SEC", 0.0)
    monkeypatch.setattr("tests.chaos.faults.used_kb", lambda _: 0)
    monkeypatch.setattr("tests.chaos.faults.resize", lambda _, size: sizes.append(size))
    member = SimpleNamespace(place=tmp_path, port=1, alive=alive)
    servers = SimpleNamespace(disks=[tmp_path], members=[member], heal=lambda: None)
    injector, faults = perform(tmp_path, "disk_full", "server", servers=servers)
    assert injector.errors == []
    assert faults == ([] if alive else ["disk_full"])
    assert [why for _, why in injector.skipped] == (["no write failed"] if alive else [])
    assert sizes[-1] == DISK_MB * 1024


def test_profile_of_another_time_needs_as_much_in_a_minute() -> None:
    profile = PROFILES["standard"]
    assert (profile.least, profile.least_faults, profile.least_kinds) == (100_000, 150, 12)
    half = profile.lasting(profile.minutes / 2)
    assert (half.least, half.least_faults, half.least_kinds) == (50_000, 75, 6)
    double = profile.lasting(profile.minutes * 2)
    assert (double.least, double.least_faults, double.least_kinds) == (200_000, 300, 12)


@pytest.mark.parametrize(
    ("tasks", "least"), [(540_000, 500_000), (500_000, 500_000), (5750, 5000), (0, 0)]
)
def test_number_of_tasks_needs_no_more_than_the_profile(tasks: int, least: int) -> None:
    profile = PROFILES["soak"]
    chosen = profile.lasting(25).with_tasks(tasks, profile.least)
    assert (chosen.tasks, chosen.minutes) == (tasks, 25)
    assert chosen.least == pytest.approx(least, abs=1)
