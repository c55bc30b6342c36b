"""The processes of a run: born from the nursery, and replaced when they die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import microqueue
from tests.chaos.ledger import Ledger
from tests.chaos.profiles import ENDING, Slot
from tests.chaos.setup import VARIABLE, Setup
from tests.waiting import wait_for

FIRST_SEC = 60.0
"""How long the nursery may take to import everything."""
REST_SEC = 10.0
"""How long the processes of a killed supervisor may take to end themselves."""


@dataclass
class Process:
    """A living process."""

    who: str
    pid: int
    slot: Slot
    expected: str | None = None
    """Why it will die, if that is known."""
    stopped: bool = False
    sent: list[int] = field(default_factory=list)
    """The signals that should end it."""


class Fleet:
    """Starts processes, knows who lives, and replaces the dead until that is switched off."""

    def __init__(self, setup: Setup, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.RLock()
        self._living: dict[str, Process] = {}
        self._ordered: dict[str, Slot] = {}
        self._numbers: dict[str, int] = {}
        self._dismissed: set[str] = set()
        self._closed_groups: set[str] = set()
        self._replacing = True
        self._mark = str(setup.write())
        environment = {**os.environ, VARIABLE: self._mark}
        environment["PYTHONPATH"] = str(Path(microqueue.__file__).parents[1])
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.roles.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, name="chaos-fleet", daemon=True)
        self._reader.start()

    def start(self, slot: Slot) -> str:
        """Ask for a process in a slot; return its name."""
        with self._lock:
            number = self._numbers[slot.name] = self._numbers.get(slot.name, 0) + 1
            who = f"{slot.name}-{number}"
            self._ordered[who] = slot
            order = {"role": slot.role, "who": who, "arguments": slot.arguments}
            assert self._nursery.stdin is not None
            self._nursery.stdin.write(json.dumps(order) + "\n")
            self._nursery.stdin.flush()
            return who

    def _read(self) -> None:
        assert self._nursery.stdout is not None
        for line in self._nursery.stdout:
            message = json.loads(line)
            with self._lock:
                if "born" in message:
                    self._note_birth(message["born"], message["pid"])
                else:
                    self._note_death(message["died"], message["status"])

    def _note_birth(self, who: str, pid: int) -> None:
        self._living[who] = Process(who, pid, self._ordered[who])
        self._ledger.write("born", target=who, of=pid)
        if self._living[who].slot.group in self._closed_groups:
            self.dismiss(who)

    def _note_death(self, who: str, status: int) -> None:
        process = self._living.pop(who)
        self._ordered.pop(who)
        group = process.slot.group
        reason = process.expected or _describe(status)
        fields: dict[str, Any] = {"status": status, "sent": process.sent, "ends": group in ENDING}
        self._ledger.write("died", target=who, reason=reason, **fields)
        transient = group in ENDING | self._closed_groups or who in self._dismissed
        if self._replacing and not transient:
            self.start(process.slot)

    def living(self, group: str | None = None) -> list[Process]:
        """Return the living processes of a group, oldest first; stopped ones are left out."""
        with self._lock:
            return [
                one
                for one in self._living.values()
                if not one.stopped and group in {None, one.slot.group}
            ]

    def count(self, group: str) -> int:
        """Return how many processes of a group were asked for, and have not died."""
        with self._lock:
            return sum(slot.group == group for slot in self._ordered.values())

    def send(self, process: Process, number: signal.Signals, *, expect: str | None = None) -> bool:
        """Send a signal; return whether the process was there to get it."""
        with self._lock:
            if process.who not in self._living:
                return False
            if expect is not None:
                process.expected = expect
            process.stopped = number is signal.SIGSTOP
            if number not in {signal.SIGSTOP, signal.SIGCONT}:
                process.sent.append(int(number))
                self._ledger.write("signal", target=process.who, number=int(number))
            os.kill(process.pid, number)
            return True

    def dismiss(self, who: str) -> None:
        """End a process by SIGTERM, and do not replace it."""
        with self._lock:
            if (process := self._living.get(who)) is not None:
                self._dismissed.add(who)
                self.send(process, signal.SIGTERM, expect="stopped")

    def dismiss_group(self, group: str) -> None:
        """End all processes of a group by SIGTERM, and start no other."""
        with self._lock:
            self._closed_groups.add(group)
            for process in self._living.values():
                if process.slot.group == group:
                    self.dismiss(process.who)

    def await_first(self, slots: Iterable[Slot]) -> None:
        """Wait until the first processes are born."""
        expected = len(list(slots))
        wait_for(lambda: len(self.living()) >= expected, FIRST_SEC, what="the fleet")

    def close(self, *, within_sec: float) -> list[str]:
        """End all processes with SIGTERM; return the names of those that had to be killed."""
        with self._lock:
            self._replacing = False
            for process in self._living.values():
                self.send(process, signal.SIGCONT)
                self.send(process, signal.SIGTERM, expect="stopped at the end")
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self._ordered, within_sec)
        stubborn = sorted(self._ordered)
        self.kill()
        return stubborn

    def kill(self) -> None:
        """End the nursery, which kills what is left."""
        self._replacing = False
        if self._nursery.stdin is not None and not self._nursery.stdin.closed:
            self._nursery.stdin.close()
        try:
            self._nursery.wait(10)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        self._reader.join(5)
        if self._nursery.stdout is not None:
            self._nursery.stdout.close()

    def kill_rest(self) -> None:
        """Kill what the processes have started, if it does not end with them."""
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not processes_of(self._mark), REST_SEC)
        for one in processes_of(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one["pid"], signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(one) for one in text.split()]


def processes_of(run: str) -> list[dict[str, Any]]:
    """Return the processes that carry the mark of a run, in whichever way they were started."""
    mark = f"{VARIABLE}={run}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            marked = mark in (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if marked:
            found.append({"pid": int(entry.name), "command": command.strip()[:200]})
    return found


def _describe(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit {status}"
