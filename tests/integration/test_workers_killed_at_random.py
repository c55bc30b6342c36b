"""Workers that are killed and suspended all the time: nothing is lost, nothing is unexplained.

Every handler writes the start of its work to a ledger outside of the queue. What is in there
twice was delivered twice, whatever the queue says.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pymongo import MongoClient

import microqueue
from microqueue import BackoffPolicy, Outcome, Queue, QueueSettings, Sweeper, TaskStatus
from microqueue.embedded import EmbeddedServer
from microqueue.task import read_task
from microqueue.worker import Worker
from tests.integration.rig import KINDS, Rig
from tests.servers import fail_command
from tests.waiting import wait_for

AT_ONCE = QueueSettings(backoff=BackoffPolicy(base_sec=0, max_sec=0))


@contextmanager
def running(program: str, *arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a program on the very package that is tested here; end it with all that it started."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(microqueue.__file__).parents[1])},
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


# Killed every second

TASKS = 20_000
WORKERS = 4
MOST_KILLS = 60
"""So that a slow machine, which needs long to replace the dead, finishes, too."""
CONCURRENCY = 8

# Forks a worker for each name that it reads: that is fast, so the dead are replaced at once.
NURSERY = """
import os, signal, sys, time
from microqueue import Queue
from microqueue.worker import Worker

uri, path, concurrency = sys.argv[1:]
ledger = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # They need no burial.

def work(name):
    def handler(payload):
        os.write(ledger, f"{payload['n']} {name} {time.monotonic()}\\n".encode())
        time.sleep(0.015)

    with Queue.from_uri(uri) as queue:
        worker = Worker(queue, handler, worker_id=name, concurrency=int(concurrency))
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
        worker.run()

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            work(line.strip())
        finally:
            os._exit(0)
    print(child, flush=True)
"""


class Delivery(NamedTuple):
    """The start of a handler, as the ledger has it."""

    worker_id: str
    at: float


class Fleet:
    """Workers, a process each, some of which are killed."""

    def __init__(self, nursery: subprocess.Popen[str], ledger: Path) -> None:
        self._nursery = nursery
        self._ledger = ledger
        self._alive: dict[str, int] = {}
        self._born = 0
        self.killed: dict[str, float] = {}

    def add(self) -> None:
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._born += 1
        name = f"worker-{self._born}"
        self._nursery.stdin.write(f"{name}\n")
        self._nursery.stdin.flush()
        self._alive[name] = int(self._nursery.stdout.readline())

    def kill_the_oldest(self) -> None:
        name = next(iter(self._alive))
        self.killed[name] = time.monotonic()  # Before the signal: it may run for a moment longer.
        os.kill(self._alive.pop(name), signal.SIGKILL)

    def terminate(self) -> None:
        """Stop the survivors."""
        for pid in self._alive.values():
            os.kill(pid, signal.SIGTERM)

    def deliveries(self) -> dict[int, list[Delivery]]:
        """Read who started which task, in the order of time."""
        found: dict[int, list[Delivery]] = defaultdict(list)
        for line in self._ledger.read_text(encoding="ascii").splitlines():
            number, worker_id, at = line.split()
            found[int(number)].append(Delivery(worker_id, float(at)))
        return {number: sorted(some, key=lambda one: one.at) for number, some in found.items()}


@contextmanager
def sweeping(queue: Queue[Any]) -> Iterator[None]:
    """Sweep again and again, as ``microqueue sweep --every`` does."""
    over = threading.Event()
    problems: list[str] = []

    def sweep() -> None:
        while not over.wait(0.3):
            problems.extend(Sweeper(queue).run_once().errors.values())

    thread = threading.Thread(target=sweep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)
    assert problems == []


@pytest.mark.timeout(400)  # Each of its waits may take long on a slow machine.
def test_no_task_is_lost_or_doubled_without_a_reason_while_workers_are_killed(
    database_uri: str, microqueue_database: Any, tmp_path: Path
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=AT_ONCE)
    queue.enqueue_many([{"n": n} for n in range(TASKS)])
    ledger = tmp_path / "ledger"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with running(NURSERY, database_uri, str(ledger), str(CONCURRENCY), **pipes) as nursery:
        fleet = Fleet(nursery, ledger)
        for _ in range(WORKERS):
            fleet.add()
        with sweeping(queue):
            wait_for(lambda: queue.stats(exact=True).done > 0, 60)
            while queue.stats(exact=True).done < 0.85 * TASKS and len(fleet.killed) < MOST_KILLS:
                fleet.kill_the_oldest()
                fleet.add()
                time.sleep(1)
            wait_for(lambda: queue.stats(exact=True).done == TASKS, 100)
            fleet.terminate()
            wait_for(lambda: queue.workers() == [], 60)

    assert len(fleet.killed) >= 5
    stats = queue.stats(exact=True)
    assert (stats.pending, stats.processing, stats.failed, stats.done) == (0, 0, 0, TASKS)

    deliveries = fleet.deliveries()
    assert deliveries.keys() == set(range(TASKS))
    for number, several in deliveries.items():
        for earlier, later in pairwise(several):
            assert earlier.worker_id in fleet.killed, (number, several)
            assert fleet.killed[earlier.worker_id] < later.at, (number, several)

    crashes = 0
    for document in microqueue_database.tasks.find():
        task = read_task(document)
        *former, last = task.history
        assert last.outcome is Outcome.DONE
        assert {entry.outcome for entry in former} <= {Outcome.CRASHED, Outcome.RELEASED}
        assert {entry.worker_id for entry in former} <= fleet.killed.keys()
        counted = [entry for entry in former if entry.outcome is Outcome.CRASHED]
        assert task.attempts == len(counted) + 1
        crashes += task.crashes
    # Only those that could have been running are suspected.
    assert 0 < crashes <= len(fleet.killed) * CONCURRENCY


# Suspended past the lease

SLEEPER = """
import asyncio, logging, os, signal, sys, time
from pymongo import AsyncMongoClient, MongoClient
from microqueue import AsyncQueue, Queue, QueueSettings
from microqueue.worker import AsyncWorker, Hooks, Worker

uri, kind, ending, directory = sys.argv[1:]
logging.basicConfig(level="WARNING", format="%(levelname)s %(message)s")
os.chdir(directory)
settings = QueueSettings(visibility_timeout=5)

def note(name, text):
    with open(name, "ab", buffering=0) as file:
        file.write(f"{text}\\n".encode())

class Lost(Hooks):
    def on_lease_lost(self, task):
        note("lost", task.payload["n"])

options = dict(hooks=[Lost()], worker_id="sleeper", concurrency=1, keep_result=True, prefetch=1)

def is_over(payload, context):
    if payload["n"] != 1:
        return True
    return context.cancelled if ending == "when told" else os.path.exists("go")

def function(payload, context):
    note("ledger", f"{payload['n']} sleeper")
    while not is_over(payload, context):
        time.sleep(0.01)
    return "by the sleeper"

async def coroutine(payload, context):
    note("ledger", f"{payload['n']} sleeper")
    while not is_over(payload, context):
        await asyncio.sleep(0.01)
    return "by the sleeper"

async def work():
    async with AsyncMongoClient(uri) as client:
        queue = AsyncQueue(client.get_default_database(), settings=settings)
        worker = AsyncWorker(queue, coroutine, **options)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        await worker.run()

if kind == "threads":
    with MongoClient(uri) as client:
        queue = Queue(client.get_default_database(), settings=settings)
        worker = Worker(queue, function, **options)
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
        worker.run()
else:
    asyncio.run(work())
"""


@pytest.mark.parametrize(
    ("kind", "ending", "in_between"),
    [
        ("threads", "at once", "held"),
        ("threads", "when told", "finished"),
        ("coroutines", "at once", "held"),
    ],
)
def test_worker_that_was_suspended_past_its_lease_discards_its_result_and_goes_on(
    kind: str,
    ending: str,
    in_between: str,
    database_uri: str,
    microqueue_database: Any,
    tmp_path: Path,
) -> None:
    queue: Queue[Any] = Queue(microqueue_database, settings=AT_ONCE)
    task = queue.enqueue({"n": 1})
    ledger = tmp_path / "ledger"
    with (
        (tmp_path / "log").open("wb") as log,
        running(SLEEPER, database_uri, kind, ending, str(tmp_path), stderr=log) as sleeper,
    ):
        # Suspended between creating the file and writing to it, it would write later.
        wait_for(lambda: ledger.exists() and "sleeper" in ledger.read_text(encoding="ascii"), 60)
        sleeper.send_signal(signal.SIGSTOP)
        wait_for(lambda: Sweeper(queue).reclaim_stuck() == 1, 60)

        proceed = threading.Event()

        def handler(payload: Any) -> str:
            with ledger.open("a", encoding="ascii") as file:
                file.write(f"{payload['n']} another\n")
            proceed.wait(60)
            return "in time"

        another = Worker(queue, handler, worker_id="another", keep_result=True)
        thread = threading.Thread(target=lambda: another.run(burst=True))
        thread.start()
        wait_for(lambda: "another" in ledger.read_text(encoding="ascii"), 60)
        if in_between == "finished":
            proceed.set()
            thread.join(60)
        (tmp_path / "go").touch()
        sleeper.send_signal(signal.SIGCONT)
        wait_for((tmp_path / "lost").exists, 60)
        proceed.set()
        thread.join(60)
        following = queue.enqueue({"n": 2})
        wait_for(lambda: found(queue, following).status is TaskStatus.DONE, 60)
        sleeper.terminate()
        assert sleeper.wait(30) == 0

    stored = found(queue, task)
    assert (stored.status, stored.result) == (TaskStatus.DONE, "in time")
    assert [(entry.worker_id, entry.outcome) for entry in stored.history] == [
        ("sleeper", Outcome.LEASE_EXPIRED),
        ("another", Outcome.DONE),
    ]
    assert ledger.read_text().splitlines() == ["1 sleeper", "1 another", "2 sleeper"]
    assert (tmp_path / "lost").read_text() == "1\n"
    told = (tmp_path / "log").read_text().splitlines()
    assert len([line for line in told if str(task.id) in line]) == 1, told
    assert found(queue, following).result == "by the sleeper"


def found(queue: Queue[Any], task: Any) -> Any:
    stored = queue.get(task.id)
    assert stored is not None
    return stored


# Killed in the first moment


@pytest.mark.parametrize("kind", KINDS)
def test_worker_is_registered_before_it_claims_so_that_its_death_is_noticed(
    kind: str,
    microqueue_server: EmbeddedServer,
    microqueue_client: MongoClient[Any],
    microqueue_database: Any,
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.enqueue({})
    registered: list[Any] = []
    slowly: dict[str, Any] = {
        "failCommands": ["update"],
        "namespace": f"{microqueue_database.name}.microqueue_workers",
        "blockConnection": True,
        "blockTimeMS": 700,
    }
    with fail_command(microqueue_client, {"times": 1}, **slowly):
        rig = Rig(kind, microqueue_server.uri, microqueue_database)
        rig.run(lambda _payload: registered.extend(queue.workers()), worker_id="w")
    assert [worker.id for worker in registered] == ["w"]
