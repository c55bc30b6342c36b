"""``microqueue worker`` as people run it: in several processes, killed, and as PID 1."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.error import URLError
from uuid import uuid4

import pytest
from pymongo import MongoClient

import microqueue
from microqueue import Outcome, Queue, Sweeper, TaskStatus
from microqueue.core import core_of
from microqueue.testing import FakeClock
from microqueue.worker import supervisor as supervising
from microqueue.worker.supervisor import LIFELINE_VARIABLE, NAME_VARIABLE, Supervisor
from tests.ports import free_port
from tests.waiting import wait_for

PROGRAM = [sys.executable, "-m", "microqueue.cli"]

# Every start is written down; without the file "go" a handler waits for it.
HANDLER = """
import os, pathlib, subprocess, time
import microqueue

def note(*words):
    line = " ".join(str(word) for word in words) + "\\n"
    with open("ledger", "ab", buffering=0) as ledger:
        ledger.write(line.encode())

def handle(payload):
    note(os.getpid(), payload["n"])
    while not pathlib.Path("go").exists():
        time.sleep(0.02)

def fail(payload):
    if payload["n"] == 0:
        raise ValueError("nought")

def die_of_poison(payload):
    note(os.getpid(), payload["n"])
    if payload["n"] == 200:
        os.kill(os.getpid(), 9)

class Noting(microqueue.Hooks):
    def on_dead_letter(self, letter):
        with open("letters", "a") as letters:
            print(letter.id, letter.error.code, letter.source, file=letters)

def die_of_a_batch(tasks):
    for task in tasks:
        note(len(tasks), task.payload["n"])
    if any(task.payload["n"] == 20 for task in tasks):
        os.kill(os.getpid(), 9)

def stop_dead(payload):
    note(os.getpid(), payload["n"])
    os.kill(os.getpid(), 19)

def leave_an_orphan(payload):
    subprocess.run(["sh", "-c", "(sleep 0.1; touch orphan-ended) & true"], check=True)
    handle(payload)

def end_the_process(payload):
    if "exit" in payload:
        os._exit(payload["exit"])

def pass_the_environment_on(payload):
    subprocess.run(["sh", "-c", "env > environment"], check=True)
"""


class Program:
    """The command line in its own directory, with all the processes that it starts."""

    def __init__(self, directory: Path, uri: str) -> None:
        self._directory = directory
        self._uri = uri
        self._mark = f"MARK={uuid4().hex}"
        self._process: subprocess.Popen[str] | None = None
        (directory / "app.py").write_text(HANDLER, encoding="utf-8")

    def start(
        self, *arguments: str, program: Sequence[str] = PROGRAM, within: Sequence[str] = ()
    ) -> None:
        name, _, value = self._mark.partition("=")
        with (
            (self._directory / "stdout").open("wb") as output,
            (self._directory / "stderr").open("wb") as errors,
        ):
            self._process = subprocess.Popen(
                [*within, *program, *arguments, "--uri", self._uri],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                text=True,
                env={
                    **os.environ,
                    name: value,
                    "PYTHONPATH": str(Path(microqueue.__file__).parents[1]),
                    "PYTHONDONTWRITEBYTECODE": "1",
                    "MICROQUEUE_BACKOFF": '{"base_sec": 0, "max_sec": 0}',
                },
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def status(self) -> int:
        """Wait for its end."""
        assert self._process is not None
        return self._process.wait(90)

    def pids(self) -> list[int]:
        """Find all living processes that were started by it, or by those."""
        found = []
        for place in Path("/proc").iterdir():
            if place.name.isdigit():
                try:
                    if self._mark.encode() in (place / "environ").read_bytes():
                        found.append(int(place.name))
                except OSError:
                    continue  # It ended.
        return found

    def end(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait(90)

    def path(self, name: str) -> Path:
        return self._directory / name

    def go(self) -> None:
        """Let the handlers end."""
        self.path("go").touch()

    def said(self) -> str:
        return self.path("stdout").read_text(encoding="utf-8")

    def errors(self) -> list[str]:
        return self.path("stderr").read_text(encoding="utf-8").splitlines()

    def letters(self) -> list[str]:
        """Read the dead letters that hooks were told of."""
        return (self._directory / "letters").read_text(encoding="utf-8").splitlines()

    def started(self) -> list[tuple[int, int]]:
        """Return each start of a handler: the process, and the number of the task."""
        if not self.path("ledger").exists():
            return []
        # The last line may be half written.
        whole, _, _ = self.path("ledger").read_text(encoding="utf-8").rpartition("\n")
        lines = whole.splitlines()
        return [(int(pid), int(number)) for pid, number in (line.split() for line in lines)]


@pytest.fixture
def program(tmp_path: Path, database_uri: str) -> Iterator[Program]:
    one = Program(tmp_path, database_uri)
    yield one
    one.end()


@pytest.fixture
def queue(microqueue_database: Any) -> Queue[Any]:
    return Queue(microqueue_database)


def holders(queue: Queue[Any]) -> Counter[str]:
    """Count the tasks that each worker holds."""
    found = core_of(queue).collections.tasks.find({"status": "processing"}, {"worker_id": 1})
    return Counter(document["worker_id"] for document in found)


def fill(queue: Queue[Any], count: int = 12) -> None:
    queue.enqueue_many([{"n": n} for n in range(count)])


def start_two(
    one: Program, queue: Queue[Any], *options: str, program: Sequence[str] = PROGRAM
) -> None:
    """Start two processes that run two tasks each, and hold some more."""
    fill(queue)
    arguments = ("worker", "app:handle", "--processes", "2", "--concurrency", "2", *options)
    one.start(*arguments, program=program)
    wait_for(lambda: len(one.started()) == 4, 90)
    wait_for(lambda: len(holders(queue)) == 2 and min(holders(queue).values()) >= 3)
    wait_for(lambda: len(queue.workers()) == 2)


def assert_gone(program: Program, queue: Queue[Any]) -> None:
    """Check that no process and no registration is left, and no worker holds a task."""
    wait_for(lambda: not program.pids())
    assert queue.stats().processing == 0
    assert queue.workers() == []


def sweep_later(queue: Queue[Any]) -> None:
    """Sweep as if minutes had passed: a killed process is on the list until it was missed."""
    later = FakeClock(queue.now())
    sweeper = Sweeper(Queue[Any](core_of(queue).collections.database, clock=later))
    for _ in range(2):
        later.advance(60)
        sweeper.reclaim_orphaned()


# Several processes


def test_killed_process_gives_its_tasks_back_at_once_and_is_replaced(
    program: Program, queue: Queue[Any]
) -> None:
    start_two(program, queue, "--log-format", "json")
    victim, other = queue.workers()
    held = list(
        core_of(queue).collections.tasks.find({"worker_id": victim.id, "status": "processing"})
    )
    running = {number for pid, number in program.started() if pid == victim.pid}
    assert len(running) == 2

    os.kill(victim.pid, signal.SIGKILL)

    def crashed() -> list[Any]:
        tasks = [queue.get(document["_id"]) for document in held]
        return [task for task in tasks if task is not None and task.history]

    wait_for(lambda: len(crashed()) == len(held))  # Their leases would last ten minutes.
    for task in crashed():
        assert (task.history[0].outcome, task.history[0].worker_id) == (Outcome.CRASHED, victim.id)
        assert task.crashes == (task.payload["n"] in running)
    wait_for(lambda: len({pid for pid, _ in program.started()}) == 3)  # In its place.
    program.go()
    wait_for(lambda: queue.stats().done == 12)
    assert other.id in {worker.id for worker in queue.workers()}
    deliveries = Counter(number for _, number in program.started())
    assert {number for number, count in deliveries.items() if count > 1} == running
    program.signal(signal.SIGTERM)
    assert program.status() == 0
    sweep_later(queue)
    assert_gone(program, queue)
    told = [json.loads(line)["message"] for line in program.errors()]
    assert sum("SIGKILL" in message for message in told) == 1


@pytest.mark.measured
def test_poison_is_found_among_quick_tasks_and_harms_no_other(
    program: Program, queue: Queue[Any]
) -> None:
    tasks = queue.enqueue_many([{"n": n} for n in range(300)]).tasks
    poison = tasks[200]
    hasty = patched(MAX_RESTART_SEC=0.05)
    options = ("--processes", "2", "--concurrency", "4", "--hooks", "app:Noting")
    program.start("worker", "app:die_of_poison", *options, program=hasty)
    wait_for(lambda: queue.stats().failed >= 1, 90)
    wait_for(lambda: queue.stats().done == 299, 90)
    buried = queue.get(poison.id)
    assert buried is not None
    assert buried.error is not None
    assert (buried.error.code, buried.crashes) == ("poison", 3)
    deliveries = Counter(number for _, number in program.started())
    # Where it was not known at first what ran, there is one crash more than are allowed.
    assert deliveries[200] == buried.attempts <= 4
    for task in queue.peek(300, status="done"):
        assert task.attempts <= 4
        assert task.crashes <= 2
        assert task.attempts >= deliveries[task.payload["n"]]
    program.signal(signal.SIGTERM)
    assert program.status() == 0
    assert program.letters() == [f"{poison.id} poison supervisor"]


def test_poison_is_found_in_a_batch_and_harms_no_other(program: Program, queue: Queue[Any]) -> None:
    tasks = queue.enqueue_many([{"n": n} for n in range(60)]).tasks
    options = ("--processes", "2", "--concurrency", "1", "--batch", "8", "--batch-wait", "10ms")
    hasty = patched(MAX_RESTART_SEC=0.05)
    program.start("worker", "app:die_of_a_batch", *options, program=hasty)
    wait_for(lambda: queue.stats().failed >= 1, 90)
    wait_for(lambda: queue.stats().done == 59, 90)
    buried = queue.get(tasks[20].id)
    assert buried is not None
    assert buried.error is not None
    assert (buried.error.code, buried.crashes) == ("poison", 3)
    sizes = [size for size, number in program.started() if number == 20]
    assert sizes[0] > 1  # At first it was in a batch, and then
    assert set(sizes[1:]) == {1}  # alone.
    assert max(size for size, _ in program.started()) == 8
    program.signal(signal.SIGTERM)
    assert program.status() == 0


def test_claim_that_was_under_way_when_its_process_was_killed_is_found_too(
    program: Program, queue: Queue[Any], slow_claims: Callable[[], None]
) -> None:
    queue.ensure_indexes()
    program.start("worker", "app:handle", "--processes", "2", "--grace", "1s")
    wait_for(lambda: len(queue.workers()) == 2)
    slow_claims()
    task = queue.enqueue({"n": 1})
    wait_for(lambda: claims_under_way(queue))
    for worker in queue.workers():
        os.kill(worker.pid, signal.SIGKILL)

    def was_claimed() -> bool:
        found = queue.get(task.id)
        return found is not None and found.attempts > 0

    wait_for(was_claimed)  # Most often after its worker's tasks were reclaimed.
    program.signal(signal.SIGTERM)
    assert program.status() == 0
    sweep_later(queue)
    assert_gone(program, queue)
    assert queue.stats().pending == 1


@pytest.fixture
def slow_claims(
    microqueue_client: MongoClient[Any], microqueue_database: Any
) -> Iterator[Callable[[], None]]:
    """Have the server wait before it performs the next two claims."""
    point = ("configureFailPoint", "failCommand")
    data = {
        "failCommands": ["findAndModify", "update"],
        "namespace": f"{microqueue_database.name}.tasks",
        "blockConnection": True,
        "blockTimeMS": 4000,
    }

    def slow_down() -> None:
        microqueue_client.admin.command(*point, mode={"times": 2}, data=data)

    yield slow_down
    microqueue_client.admin.command(*point, mode="off")


def claims_under_way(queue: Queue[Any]) -> bool:
    """Return whether the server is at a claim, which has touched no collection yet."""
    tasks = core_of(queue).collections.tasks
    at_it = {"ns": f"{tasks.database.name}.$cmd", "active": True}
    found = tasks.database.client.admin.aggregate([{"$currentOp": {}}, {"$match": at_it}])
    commands = [one["command"] for one in found]
    return any(tasks.name in (one.get("findAndModify"), one.get("update")) for one in commands)


def test_sigterm_lets_handlers_finish_and_hands_the_rest_back(
    program: Program, queue: Queue[Any]
) -> None:
    start_two(program, queue)
    program.signal(signal.SIGTERM)
    wait_for(lambda: queue.stats().ready == 8)  # What had not started is back at once.
    assert queue.stats().processing == 4
    program.go()
    assert program.status() == 0
    assert_gone(program, queue)
    assert (queue.stats().done, queue.stats().ready) == (4, 8)
    assert {task.attempts for task in queue.peek(12, status="pending")} == {0}
    assert len(program.started()) == 4


@pytest.mark.parametrize(("grace", "signals"), [("5m", 2), ("300ms", 1)])
def test_handlers_that_outlast_the_grace_or_a_second_sigterm_lose_their_tasks_unharmed(
    program: Program, queue: Queue[Any], grace: str, signals: int
) -> None:
    start_two(program, queue, "--grace", grace, program=patched(KILL_AFTER_SEC=600.0))
    program.signal(signal.SIGTERM)
    if signals == 2:
        wait_for(lambda: queue.stats().ready == 8)
        program.signal(signal.SIGTERM)
    assert program.status() == 0
    assert_gone(program, queue)
    assert queue.stats().ready == 12
    assert {task.attempts for task in queue.peek(12)} == {0}


@pytest.mark.measured
def test_process_that_does_not_react_is_killed_in_the_end(
    program: Program, queue: Queue[Any]
) -> None:
    fill(queue, 2)
    impatient = patched(KILL_AFTER_SEC=3.0)  # A claim that is under way is over by then.
    options = ("--processes", "2", "--concurrency", "1", "--grace", "300ms")
    program.start("worker", "app:stop_dead", *options, program=impatient)
    wait_for(lambda: len(program.started()) >= 1)
    program.signal(signal.SIGTERM)
    assert program.status() == 0
    assert (queue.stats().ready, queue.stats().processing) == (2, 0)
    sweep_later(queue)
    assert_gone(program, queue)


def patched(**constants: float) -> list[str]:
    """Return the program with other constants in the supervisor."""
    code = (
        "import microqueue.worker.supervisor as supervisor\n"
        f"vars(supervisor).update({constants!r})\n"
        "from microqueue.cli import main\n"
        "main()\n"
    )
    return [sys.executable, "-c", code]


@pytest.mark.measured
def test_processes_end_by_themselves_when_their_supervisor_is_killed(
    program: Program, queue: Queue[Any]
) -> None:
    start_two(program, queue)
    program.signal(signal.SIGKILL)
    wait_for(lambda: queue.stats().ready == 8)
    assert len(program.pids()) == 2
    program.go()
    assert_gone(program, queue)
    assert (queue.stats().done, queue.stats().ready) == (4, 8)


def test_what_handlers_start_is_no_process_of_the_supervisor(
    program: Program, queue: Queue[Any]
) -> None:
    fill(queue, 1)
    options = ("--processes", "2", "--burst")
    program.start("worker", "app:pass_the_environment_on", *options)
    assert program.status() == 0
    assert queue.stats().done == 1
    environment = program.path("environment").read_text(encoding="utf-8")
    assert "MICROQUEUE_BACKOFF=" in environment  # Settings are for all.
    for name in (NAME_VARIABLE, LIFELINE_VARIABLE):
        assert name not in environment


# Failing to start


@pytest.mark.parametrize(
    ("code", "reason"),
    [(None, "No module named 'shop'"), ("import nowhere", "No module named 'nowhere'")],
)
def test_handler_that_cannot_be_imported_is_told_once(
    program: Program, code: str | None, reason: str
) -> None:
    if code is not None:
        program.path("shop.py").write_text(code, encoding="utf-8")
    program.start("worker", "shop:handle", "--processes", "2")
    assert program.status() == 1
    (line,) = program.errors()
    assert line.startswith("Error: handler='shop:handle' is not valid")
    assert reason in line
    assert program.said() == ""


@pytest.mark.measured
def test_supervisor_gives_up_on_processes_that_end_as_soon_as_they_start(
    program: Program, queue: Queue[Any]
) -> None:
    given = f"{NAME_VARIABLE!r} in open('/proc/self/environ').read()"
    code = f"import os\nif {given}:\n    os._exit(7)\n"
    with program.path("app.py").open("a", encoding="utf-8") as module:
        module.write(code)
    quick = patched(MAX_SHORT_LIVES=2, SHORT_LIFE_SEC=600.0, MAX_RESTART_SEC=0.05)
    program.start("worker", "app:handle", "--processes", "2", program=quick)
    assert program.status() == 1
    told = program.errors()
    assert sum("exit status 7" in line for line in told) in range(2, 5)
    assert "giving up" in told[-1]
    assert_gone(program, queue)


def supervised(
    code: str, *, lives: int, held: int | None = 0, **options: Any
) -> tuple[list[str], int]:
    """Run a program under a supervisor, and stop it after so many lives.

    It seems to have held so many tasks whenever it ended.
    """
    deaths: list[str] = []
    born: list[str] = []

    def take_back(name: str) -> int | None:
        deaths.append(name)
        return held

    program = [sys.executable, "-I", "-S", "-c", code]
    one = Supervisor(program, 1, name="w", on_death=take_back, grace_sec=1, **options)
    start = one._start  # noqa: SLF001 (to count the lives)

    def count(child: supervising.Child) -> None:
        start(child)
        born.append(child.name)

    one._start = count  # type: ignore[method-assign]  # noqa: SLF001 (as above)
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(one.run()))
    thread.start()
    wait_for(lambda: len(born) >= lives or statuses, 90)
    one.stop()
    thread.join(60)
    return deaths, statuses[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a supervisor look often, and wait for little; a slow start is a short life, too."""
    monkeypatch.setattr(supervising, "TICK_SEC", 0.01)
    monkeypatch.setattr(supervising, "SHORT_LIFE_SEC", 600.0)
    monkeypatch.setattr(supervising, "MAX_RESTART_SEC", 0.01)


STOPPED_TWICE = """
import pathlib, signal, sys, time
received = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: received.append(number))
pathlib.Path(sys.argv[1]).touch()
while len(received) < 2:
    time.sleep(0.05)
"""


def test_stalled_process_receives_both_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "KILL_AFTER_SEC", 600.0)
    ready, deaths = tmp_path / "ready", list[str]()
    command = [sys.executable, "-I", "-S", "-c", STOPPED_TWICE, str(ready)]
    one = Supervisor(command, 1, name="w", on_death=deaths.append, grace_sec=0)
    thread = threading.Thread(target=one.run)
    thread.start()
    wait_for(ready.exists)
    process = one._children[0].process  # noqa: SLF001 (to stall it)
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    one.stop()
    one.stop()
    wait_for(lambda: one._forwarded == 2)  # noqa: SLF001 (both are pending now)
    process.send_signal(signal.SIGCONT)
    try:
        wait_for(lambda: not thread.is_alive())
    finally:
        process.kill()
        thread.join(60)
    assert (process.returncode, deaths) == (0, [])


@pytest.mark.usefixtures("quick")
def test_process_that_lived_for_a_while_is_started_again_whatever_it_died_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervising, "SHORT_LIFE_SEC", 0.0)
    lives = supervising.MAX_SHORT_LIVES + 2
    deaths, status = supervised("raise SystemExit(7)", lives=lives)
    assert deaths[:3] == ["w.1.1", "w.1.2", "w.1.3"]
    assert (len(deaths) >= lives - 1, status) == (True, 0)


@pytest.mark.usefixtures("quick")
def test_process_that_is_killed_again_and_again_is_started_again() -> None:
    lives = supervising.MAX_SHORT_LIVES + 2
    deaths, status = supervised("import os; os.kill(os.getpid(), 9)", lives=lives)
    assert (len(deaths) >= lives - 1, status) == (True, 0)


@pytest.mark.usefixtures("quick")
def test_process_that_dies_by_a_signal_without_a_name_is_logged_and_restarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    number = signal.SIGRTMIN + 1
    deaths, status = supervised(f"import os; os.kill(os.getpid(), {number})", lives=2)
    assert (deaths[0], status) == ("w.1.1", 0)
    ended = [vars(one) for one in caplog.records if hasattr(one, "process_name")]
    assert (ended[0]["process_name"], ended[0]["status"]) == ("w.1.1", -number)
    assert str(number) in ended[0]["message"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("may_end", [True, False])
def test_only_in_a_burst_is_a_process_through_that_ends_without_an_error(
    tmp_path: Path, may_end: bool
) -> None:
    ledger = tmp_path / "ledger"
    # The last may be stopped before it has written anything.
    supervised(f"open({str(ledger)!r}, 'a').write('x')", lives=3, may_end=may_end)
    assert ledger.read_text() in (["x"] if may_end else ["xx", "xxx"])


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("held", [1, None], ids=["died", "unknown"])
def test_process_of_a_burst_that_ended_before_its_tasks_is_started_again(held: int | None) -> None:
    deaths, status = supervised("pass", lives=3, held=held, may_end=True)
    assert (deaths[:2], status) == (["w.1.1", "w.1.2"], 0)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("held", "gives_up"), [(0, True), (None, True), (1, False)])
def test_supervisor_gives_up_only_on_processes_that_ended_without_a_task(
    held: int | None, gives_up: bool
) -> None:
    lives = supervising.MAX_SHORT_LIVES + 2
    deaths, status = supervised("raise SystemExit(7)", lives=lives, held=held)
    assert (status == 1) == gives_up
    assert gives_up == (len(deaths) == supervising.MAX_SHORT_LIVES)


@pytest.mark.parametrize("status", [0, 1])
def test_burst_goes_on_until_the_task_that_ends_its_process_is_buried(
    program: Program, queue: Queue[Any], status: int
) -> None:
    poison = queue.enqueue({"exit": status})
    fill(queue, 10)
    options = ("--processes", "2", "--concurrency", "1", "--burst")
    program.start("worker", "app:end_the_process", *options, program=patched(MAX_RESTART_SEC=0.05))
    assert program.status() == 0
    found = queue.get(poison.id)
    assert found is not None
    assert found.error is not None
    assert found.error.code == "poison"
    stats = queue.stats()
    assert (stats.done, stats.failed, stats.processing) == (10, 1, 0)
    sweep_later(queue)
    assert_gone(program, queue)


# In a container


def unshare() -> list[str]:
    """Return the command that makes the next one PID 1, or skip the test."""
    for rights in ([], ["--user", "--map-root-user"]):
        command = ["unshare", *rights, "--pid", "--fork", "--mount-proc"]
        try:
            if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
                return command
        except FileNotFoundError:
            break
    pytest.skip("unshare is not there, or not permitted to make a namespace of processes")


def processes() -> Iterator[tuple[int, int, str]]:
    """Return every process with its parent and its state."""
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                fields = (place / "stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
            except OSError:
                continue
            yield int(place.name), int(fields[1]), fields[0]


def children(parent: int) -> dict[int, str]:
    """Return the processes of a parent, with their states."""
    return {pid: state for pid, owner, state in processes() if owner == parent}


@pytest.mark.measured
@pytest.mark.parametrize("count", [1, 2])
def test_first_process_of_a_container_reaps_orphans_and_hands_back_what_runs(
    program: Program, queue: Queue[Any], count: int
) -> None:
    fill(queue)
    options = ("--processes", str(count), "--concurrency", "2", "--grace", "300ms")
    program.start("worker", "app:leave_an_orphan", *options, within=unshare())
    wait_for(lambda: len(program.started()) == 2 * count)
    (first,) = children(program.pid)  # PID 1 in there.
    wait_for(program.path("orphan-ended").exists)
    wait_for(lambda: "Z" not in children(first).values())
    os.kill(first, signal.SIGTERM)
    assert program.status() == 0
    assert_gone(program, queue)
    assert {(task.status, task.attempts) for task in queue.peek(12)} == {(TaskStatus.PENDING, 0)}


# Options


@pytest.mark.measured
def test_burst_of_two_processes_drains_all_queues_and_logs_json(
    program: Program, microqueue_database: Any
) -> None:
    queues: list[Queue[Any]] = [Queue(microqueue_database, name) for name in ("a", "b")]
    for queue in queues:
        fill(queue, 40)
        queue.ensure_indexes()
    microqueue_database.tasks.update_many({"payload.n": 0}, {"$set": {"max_attempts": 1}})
    program.start(
        *("worker", "app:fail", "--processes", "2", "--burst", "--queue", "a", "--queue", "b"),
        *("--log-format", "json", "--log-level", "debug"),
    )
    assert program.status() == 0
    assert [(queue.stats().done, queue.stats().failed) for queue in queues] == [(39, 1)] * 2
    handled = [int(line.split()[1]) for line in program.said().splitlines() if "Handled" in line]
    assert (len(handled), sum(handled)) == (2, 80)
    lines = [json.loads(line) for line in program.errors()]
    about_tasks = {line["task_id"]: line for line in lines if "task_id" in line}
    stored = {str(one["_id"]): one for one in microqueue_database.tasks.find()}
    assert about_tasks.keys() == stored.keys()
    for task_id, line in about_tasks.items():
        task = stored[task_id]
        assert (line["queue"], line["attempt"]) == (task["queue"], 1)
        assert line["worker_id"] == task["worker_id"]
        assert line["level"] == ("warning" if task["payload"]["n"] == 0 else "debug")
        assert line["time"].endswith("+00:00")
    assert_gone(program, queues[0])


def test_processes_are_numbered_under_the_name_that_was_given(
    program: Program, queue: Queue[Any]
) -> None:
    program.start("worker", "app:handle", "--processes", "2", "--worker-id", "anna")
    wait_for(lambda: len(queue.workers()) == 2)
    found = [re.fullmatch(r"anna:([0-9a-f]{6})\.([12])\.1", one.id) for one in queue.workers()]
    names = [one.groups() for one in found if one is not None]
    assert {number for _, number in names} == {"1", "2"}
    assert len({life for life, _ in names}) == 1  # That of their supervisor.
    program.signal(signal.SIGTERM)
    assert program.status() == 0


def test_worker_that_is_started_again_under_its_name_does_not_hide_its_death(
    program: Program, queue: Queue[Any]
) -> None:
    task = queue.enqueue({"n": 1})
    command = ("worker", "app:handle", "--worker-id", "anna")
    program.start(*command)
    wait_for(lambda: len(program.started()) == 1 and queue.workers())
    (former,) = holders(queue)
    program.end()
    program.start(*command)
    wait_for(lambda: {one.id for one in queue.workers()} - {former})
    long_ago = queue.now() - timedelta(minutes=5)
    workers = core_of(queue).collections.database["microqueue_workers"]
    missed = workers.update_one(
        {"worker_id": former}, {"$set": {"gone_at": queue.now(), "missed_at": long_ago}}
    )
    assert missed.modified_count == 1  # The new one has its own registration.
    assert Sweeper(queue).reclaim_orphaned() == 1  # Its lease lasts ten minutes.
    found = queue.get(task.id)
    assert found is not None
    assert [(one.outcome, one.worker_id) for one in found.history] == [(Outcome.CRASHED, former)]
    (living,) = queue.workers()
    assert living.id != former
    assert {one.partition(":")[0] for one in (living.id, former)} == {"anna"}


def test_timeout_of_the_command_line_reaches_the_handler(
    program: Program, queue: Queue[Any]
) -> None:
    queue.enqueue({"n": 1}, max_attempts=1)
    program.start("worker", "app:handle", "--timeout", "300ms", "--grace", "100ms")
    wait_for(lambda: queue.stats().failed == 1)
    (task,) = queue.peek(1)
    assert task.error is not None
    assert "longer than 0.3 s" in task.error.message
    program.signal(signal.SIGTERM)
    assert program.status() == 0


@pytest.mark.measured
@pytest.mark.parametrize("weights", [(), ("--weight", "a=1", "--weight", "b=1")])
def test_weights_of_the_command_line_mix_the_queues(
    program: Program, microqueue_database: Any, weights: tuple[str, ...]
) -> None:
    for place, name in enumerate("ab"):
        queue: Queue[Any] = Queue(microqueue_database, name)
        queue.enqueue_many([{"n": 100 * place + n} for n in range(20)])
    program.go()
    options = ("--concurrency", "1", "--prefetch", "1", "--burst")
    program.start("worker", "app:handle", "--queue", "a", "--queue", "b", *weights, *options)
    assert program.status() == 0
    ledger = program.path("ledger").read_text(encoding="utf-8")
    order = [int(line.split()[1]) for line in ledger.splitlines()]
    assert len(order) == 40
    in_turns = order[:20] != list(range(20))
    assert in_turns == bool(weights)


def scrape(port: int, host: str = "127.0.0.1") -> str:
    """Read metrics as Prometheus would; nothing while no one answers."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as reply:
            text: str = reply.read().decode()
            return text
    except (URLError, ConnectionError):
        return ""


@pytest.mark.measured
def test_each_process_serves_its_metrics_on_a_port_of_its_own(
    program: Program, queue: Queue[Any]
) -> None:
    fill(queue, 2)
    port = free_port(2)
    options = ("--processes", "2", "--concurrency", "1", "--prefetch", "1")
    program.start("worker", "app:handle", *options, "--metrics-port", str(port))
    running = 'microqueue_tasks_in_progress{queue="default",task=""} 1.0'
    for number in range(2):
        wait_for(lambda number=number: running in scrape(port + number))  # type: ignore[misc]  # A lambda has no types.
    program.go()
    done = 'microqueue_tasks_total{outcome="done",queue="default",task=""} 1.0'
    for number in range(2):
        wait_for(lambda number=number: done in scrape(port + number))  # type: ignore[misc]  # A lambda has no types.
    program.signal(signal.SIGTERM)
    assert program.status() == 0


@pytest.mark.measured
def test_sweeper_serves_metrics_of_sweeps_and_of_the_queue(
    program: Program, queue: Queue[Any]
) -> None:
    fill(queue, 3)
    port = free_port()
    program.start("sweep", "--every", "0.1", "--metrics-port", str(port))
    wait_for(lambda: 'microqueue_sweeps_total{result="ok"}' in scrape(port))
    assert 'microqueue_queue_depth{queue="default",status="ready"} 3.0' in scrape(port)
    program.signal(signal.SIGTERM)
    assert program.status() == 0


@pytest.mark.parametrize("command", [("worker", "app:handle"), ("sweep", "--every", "0.1")])
def test_metrics_are_served_on_the_address_that_was_given(
    program: Program, command: tuple[str, ...]
) -> None:
    port = free_port()
    host = "127.0.0.2"  # Only the first of them is the one that is usual.
    program.start(*command, "--metrics-port", str(port), "--metrics-host", host)
    wait_for(lambda: scrape(port, host))
    assert scrape(port) == ""


@pytest.mark.measured
def test_metrics_host_that_cannot_be_used_is_told(program: Program) -> None:
    options = ("--metrics-port", str(free_port()), "--metrics-host", "192.0.2.1")
    program.start("worker", "app:handle", "--burst", *options)
    assert program.status() == 1
    (line,) = program.errors()
    assert "cannot be used on 192.0.2.1" in line


def test_metrics_port_that_is_taken_is_told(program: Program) -> None:
    with taken_port() as port:
        program.start("worker", "app:handle", "--burst", "--metrics-port", str(port))
        assert program.status() == 1
    (line,) = program.errors()
    assert line.startswith(f"Error: --metrics-port {port} cannot be used")


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        yield owner.getsockname()[1]


@pytest.mark.measured
def test_reload_starts_the_worker_anew_when_its_code_changes(
    program: Program, queue: Queue[Any]
) -> None:
    program.go()
    program.start("worker", "app:handle", "--reload", program=patched(MAX_SHORT_LIVES=1))
    fill(queue, 1)
    wait_for(lambda: queue.stats().done == 1)
    (former,) = {pid for pid, _ in program.started()}

    def write(code: str, *, until: Callable[[], bool]) -> None:
        """Write it again and again: it is not known from when on changes are noticed."""
        deadline = time.monotonic() + 120
        while not until():
            assert time.monotonic() < deadline, "nothing was reloaded"
            program.path("app.py").write_text(HANDLER + code, encoding="utf-8")
            again = time.monotonic() + 20  # Each change ends a process that is still starting.
            while time.monotonic() < again and not until():
                time.sleep(0.05)

    write("def handle(payload:", until=lambda: "exit status 1" in "".join(program.errors()))
    assert "SyntaxError" in "".join(program.errors())
    fill(queue, 1)
    new = "def handle(payload):\n    pathlib.Path('reloaded').write_text(str(os.getpid()))\n"
    write(new, until=lambda: queue.stats().done == 2)
    assert program.path("reloaded").read_text(encoding="utf-8") != str(former)
    program.signal(signal.SIGTERM)
    assert program.status() == 0
    assert_gone(program, queue)
