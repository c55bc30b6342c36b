"""The injector: performs the planned faults, and writes when each begins and ends.

Faults come in lanes. Those of connections come one after the other, and so do those of servers,
which recover in between. Those of processes may overlap.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pymongo.errors import PyMongoError

from tests.chaos.clocks import HOUR_SEC, clock_file
from tests.chaos.fleet import Fleet, Process, children_of
from tests.chaos.ledger import Ledger, now
from tests.chaos.plan import PlannedFault
from tests.chaos.profiles import Slot
from tests.chaos.servers import DISK_MB, Servers, resize, used_kb
from tests.chaos.setup import DATABASES, Setup
from tests.integration.replica_set import APP_NAME, Member
from tests.waiting import wait_for

HEAL_SEC = 120.0
BIRTH_SEC = 60.0
END_SEC = 60.0


KILL_EVERY_SEC = 0.3
SWEEPERS = 20
"""How many sweepers the fault ``twenty_sweepers`` starts for the collection of each database."""
FULL_SEC = 20.0
"""How long at least a server with a full disk may take to notice that."""
MOST_CHOICES = 3
"""How often a process is chosen, if the chosen one has just ended."""


class Skipped(Exception):
    """A fault that could not be performed, and why."""


def waiting_writes(member: Member) -> list[Any]:
    """Return the numbers of the writes of clients that wait for other members."""
    written = {"$or": [{f"command.{name}": {"$exists": True}} for name in ("insert", "update")]}
    waiting = {"active": True, "waitingForLock": False, "locks": {}, "appName": {"$ne": APP_NAME}}
    match = {**written, **waiting, "client": {"$exists": True}}
    found = member.client.admin.aggregate([{"$currentOp": {"allUsers": True}}, {"$match": match}])
    return [one["opid"] for one in found]


class JustEnded(Skipped):
    """The process that was chosen has ended: there will be another one."""


class Injector:
    """Performs the faults of a plan.

    Attributes:
        done: The faults that were performed.
        skipped: The others, with the reason.
        errors: What went wrong in the injector itself.
    """

    def __init__(
        self,
        setup: Setup,
        servers: Servers,
        fleet: Fleet,
        ledger: Ledger,
        say: Callable[[str], None],
    ) -> None:
        self._setup = setup
        self._servers = servers
        self._fleet = fleet
        self._ledger = ledger
        self._say = say
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.done: list[PlannedFault] = []
        self.skipped: list[tuple[PlannedFault, str]] = []
        self.errors: list[str] = []

    def start(self, planned: list[PlannedFault], began: float) -> None:
        """Perform the faults at their times, each lane in its own thread."""
        for lane in sorted({fault.lane for fault in planned}):
            faults = [fault for fault in planned if fault.lane == lane]
            self._run_in_thread(lambda faults=faults: self._perform_all(faults, began))  # type: ignore[misc]  # It is bound now.

    def stop(self, *, within_sec: float = HEAL_SEC) -> None:
        """End the faults that are under way, begin no other, and wait for their ends."""
        self._over.set()
        ends = now() + within_sec
        for thread in self._threads:
            with suppress(RuntimeError):  # An interrupt came before it had started.
                thread.join(max(ends - now(), 0.1))
            if thread.is_alive():
                self.errors.append(f"{thread.name} did not end")

    @property
    def busy(self) -> bool:
        """Whether faults are under way or to come."""
        return any(thread.is_alive() for thread in self._threads)

    def _run_in_thread(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=f"chaos-faults-{len(self._threads)}")
        self._threads.append(thread)
        thread.start()

    def _perform_all(self, faults: list[PlannedFault], began: float) -> None:
        for fault in faults:
            if self._over.wait(max(began + fault.at - now(), 0)):
                return
            if fault.lane == "processes" and fault.lasts:
                self._run_in_thread(lambda fault=fault: self._perform(fault))  # type: ignore[misc]  # As above.
            else:
                self._perform(fault)

    def _perform(self, fault: PlannedFault) -> None:
        try:
            for _ in range(MOST_CHOICES - 1):
                with suppress(JustEnded):
                    _FAULTS[fault.kind](self, fault)
                    break
            else:
                _FAULTS[fault.kind](self, fault)
            self.done.append(fault)
        except Skipped as exc:
            self.skipped.append((fault, str(exc)))
            self._say(f"skipped {fault.kind} of {fault.target}: {exc}")
        except Exception as exc:  # noqa: BLE001 (the run continues, and is no success)
            self.errors.append(f"{fault.kind} of {fault.target}: {exc!r}")
            self._say(f"could not perform {fault.kind} of {fault.target}: {exc!r}")

    @contextmanager
    def _noted(self, fault: PlannedFault, target: str, **detail: Any) -> Iterator[dict[str, Any]]:
        """Write the begin before, and the end after; one that is skipped is no fault.

        What the fault adds to ``detail`` is written with its end.
        """
        fields: dict[str, Any] = {"kind": fault.kind, "target": target, "detail": detail}
        self._ledger.write("fault", phase="begin", **fields)
        self._say(f"{fault.kind} {target}" + (f" {fault.lasts:g} s" if fault.lasts else ""))
        phase = "end"
        try:
            yield detail
        except Skipped:
            phase = "aborted"
            raise
        finally:
            self._ledger.write("fault", phase=phase, **fields)

    def _wait(self, seconds: float) -> None:
        self._over.wait(seconds)

    # Processes

    def _choose(self, fault: PlannedFault) -> Process:
        group = "supervisor" if fault.target == "supervised" else fault.target
        ends = now() + BIRTH_SEC  # One that was killed is replaced, and one that is stopped wakes.
        while not (living := self._fleet.living(group)):
            if now() > ends or self._over.wait(0.05):
                raise Skipped(f"there is no {group}")
        return living[fault.choice % len(living)]

    def _signal(self, fault: PlannedFault) -> None:
        number = {"sigkill": signal.SIGKILL, "sigterm": signal.SIGTERM}[fault.kind]
        process = self._choose(fault)
        if fault.target == "supervised":
            who, pid = self._choose_supervised(fault, process)
            with self._noted(fault, who):
                self._kill(who, pid, number)
            self._run_in_thread(lambda: self._note_death(who, pid, fault.kind))
            return
        with self._noted(fault, process.who):
            if not self._fleet.send(process, number, expect=fault.kind):
                raise JustEnded(f"{process.who} has just ended")

    def _choose_supervised(self, fault: PlannedFault, supervisor: Process) -> tuple[str, int]:
        def find() -> list[int]:
            return children_of(supervisor.pid)

        with suppress(AssertionError):
            wait_for(find, BIRTH_SEC)
        if not (children := find()):
            raise Skipped(f"{supervisor.who} has no process")
        pid = children[fault.choice % len(children)]
        return f"{supervisor.who}/{pid}", pid

    def _kill(self, who: str, pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            raise JustEnded(f"{who} has just ended") from None

    def _note_death(self, who: str, pid: int, reason: str) -> None:
        """Wait until a process that the fleet did not start has ended, and write that."""
        with suppress(AssertionError):
            wait_for(lambda: not Path(f"/proc/{pid}").exists(), END_SEC)
            self._ledger.write("died", target=who, reason=reason)

    def _suspend(self, fault: PlannedFault) -> None:
        process = self._choose(fault)
        if fault.target == "supervised":
            who, pid = self._choose_supervised(fault, process)
            with self._noted(fault, who):
                self._kill(who, pid, signal.SIGSTOP)
                self._wait(fault.lasts)
                with suppress(ProcessLookupError):  # It was killed since.
                    os.kill(pid, signal.SIGCONT)
            return
        with self._noted(fault, process.who):
            if not self._fleet.send(process, signal.SIGSTOP):
                raise JustEnded(f"{process.who} has just ended")
            self._wait(fault.lasts)
            self._fleet.send(process, signal.SIGCONT)

    def _set_clock(self, fault: PlannedFault) -> None:
        """Let a clock jump by an hour, and back again after a while."""
        process = self._choose(fault)
        offset = HOUR_SEC if fault.choice % 2 else -HOUR_SEC
        path = clock_file(self._setup.folder, process.who)
        with self._noted(fault, process.who, offset_sec=offset):
            path.write_text(f"{offset}", encoding="ascii")
            self._wait(fault.lasts)
            path.write_text("0", encoding="ascii")

    def _add_sweepers(self, fault: PlannedFault) -> None:
        arguments = {"databases": list(DATABASES), "count": SWEEPERS, "every": 0.2}
        slot = Slot("twenty", "twenty", "sweeper", arguments)
        with self._noted(fault, "sweepers"):
            who = self._fleet.start(slot)
            self._wait(fault.lasts)
            self._fleet.dismiss(who)

    # Connections

    def _disturb(self, fault: PlannedFault) -> None:
        proxies = self._servers.proxies
        proxy = proxies[fault.choice % len(proxies)]
        with self._noted(fault, f"proxy-{proxies.index(proxy)}"):
            if fault.kind == "cut":
                proxy.cut()
            elif fault.kind == "drop_replies":
                proxy.drop_replies()
                self._wait(fault.lasts)
                proxy.cut()
            elif fault.kind == "half_open":
                proxy.freeze(new=True)
                self._wait(fault.lasts)
                proxy.thaw()
            else:
                proxy.request_delay_sec = proxy.reply_delay_sec = 0.05 + fault.choice / 5000
                self._wait(fault.lasts)
                proxy.request_delay_sec = proxy.reply_delay_sec = 0.0

    # Servers

    def _kill_server(self, fault: PlannedFault) -> None:
        member = self._servers.members[fault.choice % len(self._servers.members)]
        self._restart(fault, self._servers.primary() if fault.kind == "primary_kill" else member)

    def _restart(self, fault: PlannedFault, member: Member) -> None:
        with self._noted(fault, f"mongod-{member.port}"):
            member.kill()
            self._wait(fault.lasts)
            member.start()
            self._servers.heal()

    def _freeze_server(self, fault: PlannedFault) -> None:
        member = self._servers.primary()
        with self._noted(fault, f"mongod-{member.port}"):
            member.stop()
            self._wait(fault.lasts)
            member.cont()
            self._servers.heal()

    def _step_down(self, fault: PlannedFault) -> None:
        trio = self._servers.trio
        assert trio is not None
        with self._noted(fault, f"mongod-{trio.primary().port}"):
            trio.step_down(for_sec=10)
            self._servers.heal()

    def _lose_majority(self, fault: PlannedFault) -> None:
        trio = self._servers.trio
        assert trio is not None
        lost = trio.secondaries()
        with self._noted(fault, "majority"):
            for member in lost:
                member.kill()
            self._wait(fault.lasts)
            for member in lost:
                member.start()
            self._servers.heal()

    def _roll_back(self, fault: PlannedFault) -> None:
        """Let the primary write what no other member has, and kill it: that is rolled back.

        Writes that wait for a majority are killed, as an operator would do: their clients are told
        that the write is made, and that it is not known whether it stays.
        """
        trio = self._servers.trio
        assert trio is not None
        with self._noted(fault, "majority", completed=False) as detail:
            # On a slow machine, an election may come in between: then the fault ends early.
            with suppress(PyMongoError), trio.without_replication() as primary:
                ends = now() + fault.lasts
                while now() < ends and not self._over.is_set():
                    for number in waiting_writes(primary):
                        primary.client.admin.command("killOp", op=number)
                    self._wait(KILL_EVERY_SEC)
                primary.kill()
                detail["completed"] = True
            trio.primary()  # Another one, before the old one is back.
            self._servers.heal()

    def _restart_all(self, fault: PlannedFault) -> None:
        trio = self._servers.trio
        assert trio is not None
        with self._noted(fault, "members"):
            for member in [*trio.secondaries(), trio.primary()]:
                with suppress(PyMongoError):  # It closes the connection instead of answering.
                    member.client.admin.command("shutdown", force=True, timeoutSecs=1)
                member.kill()
                member.start()
                self._servers.heal()

    def _fill_disk(self, fault: PlannedFault) -> None:
        disk = self._servers.disks[0]
        member = next(one for one in self._servers.members if one.place == disk)
        with self._noted(fault, f"mongod-{member.port}") as detail:
            if (problem := resize(disk, used_kb(disk) + 64)) is not None:
                raise Skipped(problem)
            try:
                # A server that cannot write to its journal ends itself.
                ends = now() + max(fault.lasts * 3, FULL_SEC)
                while now() < ends and member.alive and not self._over.is_set():
                    self._wait(0.1)
                died = detail["writes_failed"] = not member.alive
                self._wait(0 if died else fault.lasts)
            finally:
                resize(disk, DISK_MB * 1024)
                self._servers.heal()
            if not died:
                raise Skipped("no write failed")
            self._say(f"disk of mongod-{member.port} was full; it ended")


_FAULTS: dict[str, Callable[[Injector, PlannedFault], None]] = {
    "sigkill": Injector._signal,  # noqa: SLF001
    "sigterm": Injector._signal,  # noqa: SLF001
    "sigstop": Injector._suspend,  # noqa: SLF001
    "clock": Injector._set_clock,  # noqa: SLF001
    "twenty_sweepers": Injector._add_sweepers,  # noqa: SLF001
    "cut": Injector._disturb,  # noqa: SLF001
    "delay": Injector._disturb,  # noqa: SLF001
    "drop_replies": Injector._disturb,  # noqa: SLF001
    "half_open": Injector._disturb,  # noqa: SLF001
    "mongod_kill": Injector._kill_server,  # noqa: SLF001
    "primary_kill": Injector._kill_server,  # noqa: SLF001
    "mongod_freeze": Injector._freeze_server,  # noqa: SLF001
    "primary_freeze": Injector._freeze_server,  # noqa: SLF001
    "stepdown": Injector._step_down,  # noqa: SLF001
    "majority_lost": Injector._lose_majority,  # noqa: SLF001
    "rollback": Injector._roll_back,  # noqa: SLF001
    "rolling_restart": Injector._restart_all,  # noqa: SLF001
    "disk_full": Injector._fill_disk,  # noqa: SLF001
}
