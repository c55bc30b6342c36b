"""Kill Celery workers while they run tasks: ``python -m benchmarks.celery_kills --tasks 2000``.

The tasks are acknowledged after they ran (``acks_late``). Every two seconds a worker is killed with
``SIGKILL``, with its pool, and another one is started. A ledger outside of the broker shows which
tasks were lost, which ran more than once, and whether a kill explains that.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import brokers
from benchmarks.brokers import Broker
from benchmarks.database import server

TRANSPORTS = {
    "microqueue": brokers.MICROQUEUE,
    "kombu-mongodb": brokers.KOMBU_MONGODB,
    "redis": brokers.KOMBU_REDIS,
}
VISIBILITY_SEC = 5.0
SWEEP_SEC = 1.0
SETTLE_SEC = 30.0
"""How long the workers run on after the last task was done, so that late redeliveries are seen."""
NO_PROGRESS_SEC = 60.0
"""After how long without the end of a task the others are lost."""
ACK_SEC = 1.0
"""How long before a kill a task may have ended whose acknowledgement was not written."""
POLL_SEC = 0.05


@dataclass(frozen=True)
class Kill:
    """A worker that was killed, with its pool."""

    worker: int
    at: float


@dataclass
class Run:
    """One run of a task, in a process of a worker's pool."""

    number: int
    worker: int
    started: float
    ended: float | None = None


@dataclass(frozen=True)
class Extra:
    """A run after the first one, and the kill that explains it."""

    run: Run
    former: Run
    kill: Kill | None

    @property
    def was_running(self) -> bool:
        """Whether the former run was under way when its worker was killed."""
        return self.kill is not None and self.former.ended is None


@dataclass
class Result:
    """What became of the tasks.

    Attributes:
        tasks: How many were published.
        lost: Those that never ended.
        extra: The runs after the first one of a task.
        kills: How many workers were killed.
        seconds: From the first worker's start to the last task's end.
    """

    tasks: int
    lost: list[int]
    extra: list[Extra]
    kills: int
    seconds: float

    @property
    def done(self) -> int:
        """How many tasks ended."""
        return self.tasks - len(self.lost)

    @property
    def unexplained(self) -> list[Extra]:
        """The extra runs that no kill explains."""
        return [one for one in self.extra if one.kill is None]

    def __str__(self) -> str:
        """Describe the result in one line."""
        running = sum(one.was_running for one in self.extra)
        unwritten = len(self.extra) - running - len(self.unexplained)
        return (
            f"{self.tasks} tasks, {self.kills} kills in {self.seconds:.0f} s: {self.done} done, "
            f"{len(self.lost)} lost, {len(self.extra)} extra runs: {running} ran when their worker "
            f"was killed, {unwritten} had ended less than {ACK_SEC:g} s before, "
            f"{len(self.unexplained)} unexplained"
        )


def read_runs(ledger: Path) -> list[Run]:
    """Return the runs that the ledger shows, by their start."""
    runs: list[Run] = []
    open_runs: dict[tuple[int, int], Run] = {}
    for line in ledger.read_bytes().splitlines() if ledger.exists() else ():
        noted = json.loads(line)
        key = noted["process"], noted["number"]
        if noted["what"] == "start":
            runs.append(Run(noted["number"], noted["worker"], noted["at"]))
            open_runs[key] = runs[-1]
        else:
            open_runs.pop(key).ended = noted["at"]
    return sorted(runs, key=lambda one: one.started)


def explain(runs: list[Run], kills: list[Kill]) -> list[Extra]:
    """Return the extra runs, each with the kill that explains it.

    A kill explains the run after one that it interrupted, or that ended so shortly before that the
    acknowledgement may not have been written.
    """
    killed_at = {kill.worker: kill for kill in kills}
    by_number: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_number[run.number].append(run)
    found: list[Extra] = []
    for same in by_number.values():
        for former, run in pairwise(same):
            kill = killed_at.get(former.worker)
            if kill is not None and former.ended is not None and former.ended < kill.at - ACK_SEC:
                kill = None
            if kill is not None and run.started < kill.at:
                kill = None  # It ran beside the former one.
            found.append(Extra(run, former, kill))
    return found


@dataclass
class Workers:
    """The workers of one broker: started, killed and replaced."""

    url: str
    transport_options: dict[str, Any]
    directory: Path
    kills: list[Kill] = field(default_factory=list)
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _started: int = 0

    @property
    def ledger(self) -> Path:
        """The file in which the tasks note their runs."""
        return self.directory / "ledger"

    def start(self) -> None:
        """Start one more worker."""
        self._started += 1
        name = f"worker-{self._started}@kills"
        command = [sys.executable, "-m", "benchmarks.celery_kills_worker", self.url]
        command += [json.dumps(self.transport_options), str(self.ledger), name]
        with (self.directory / "log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running.append(process)

    def kill_one(self) -> None:
        """Kill the worker that runs longest, and start another one."""
        process = self._running.pop(0)
        self.kills.append(Kill(process.pid, time.monotonic()))
        _kill(process)
        self.start()

    def end(self) -> None:
        """Kill all, without noting it."""
        for process in self._running:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _running(workers: Workers, count: int) -> Iterator[None]:
    try:
        for _ in range(count):
            workers.start()
        yield
    finally:
        workers.end()


def measure(
    broker: Broker,
    tasks: int,
    *,
    workers: int = 3,
    kill_sec: float = 2.0,
    visibility_sec: float = VISIBILITY_SEC,
    settle_sec: float = SETTLE_SEC,
    most_kills: int | None = None,
) -> Result:
    """Publish tasks, run them in workers that are killed, and compare with the ledger.

    Args:
        broker: The broker.
        tasks: How many tasks to publish.
        workers: How many workers run at the same time.
        kill_sec: How often one of them is killed.
        visibility_sec: The visibility timeout, for the brokers that have one.
        settle_sec: How long to wait for late redeliveries after the last task is done.
        most_kills: How many workers to kill at most.
    """
    options = transport_options(broker.name, visibility_sec)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="microqueue-kills-"))
        url = stack.enter_context(broker.fresh())
        app, task = celery_app(url, options)
        stack.callback(app.close)
        for number in range(tasks):
            task.delay(number)
        killed = Workers(url, options, Path(directory))
        began = time.monotonic()
        with _running(killed, workers):
            finished = _kill_until_done(killed, tasks, kill_sec=kill_sec, most_kills=most_kills)
            time.sleep(settle_sec)
        runs = read_runs(killed.ledger)
    ended = {run.number for run in runs if run.ended is not None}
    return Result(
        tasks,
        sorted(set(range(tasks)) - ended),
        explain(runs, killed.kills),
        len(killed.kills),
        finished - began,
    )


def _kill_until_done(
    workers: Workers, tasks: int, *, kill_sec: float, most_kills: int | None
) -> float:
    """Kill workers until every task is done or lost; return when the last one ended."""
    done: set[int] = set()
    progress = time.monotonic()
    next_kill: float | None = None
    while True:
        now = time.monotonic()
        runs = read_runs(workers.ledger)
        ended = {run.number for run in runs if run.ended is not None}
        if len(ended) > len(done):
            done, progress = ended, now
        if len(done) == tasks or now > progress + NO_PROGRESS_SEC:
            return progress
        if next_kill is None and runs:
            next_kill = now + kill_sec
        # What is not done after half of that time gets its chance in workers that live.
        may_kill = most_kills is None or len(workers.kills) < most_kills
        if next_kill is not None and now >= next_kill and may_kill:
            next_kill = now + kill_sec
            if now < progress + NO_PROGRESS_SEC / 2:
                workers.kill_one()
        time.sleep(POLL_SEC)


def celery_app(url: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return the app that publishes, and its task."""
    from benchmarks.celery_kills_worker import create_app  # noqa: PLC0415 (Celery is optional)

    return create_app(url, options)


def transport_options(name: str, visibility_sec: float) -> dict[str, Any]:
    """Return the options of a broker; Kombu's MongoDB transport has no visibility timeout."""
    if name == brokers.MICROQUEUE:
        return {"visibility_timeout": visibility_sec, "sweep_interval": SWEEP_SEC}
    if name == brokers.KOMBU_REDIS:
        return {"visibility_timeout": visibility_sec}
    return {}


def main() -> None:
    """Run one transport, or all that are installed, and print what became of the tasks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.celery_kills", description=__doc__)
    parser.add_argument("--transport", choices=[*TRANSPORTS, "all"], default="microqueue")
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kill-every", type=float, default=2.0, help="seconds")
    parser.add_argument("--visibility-timeout", type=float, default=VISIBILITY_SEC, help="seconds")
    parser.add_argument("--uri", help="the MongoDB server; default: an embedded one")
    arguments = parser.parse_args()
    if (reason := brokers.missing_celery()) is not None:
        sys.exit(f"{reason}. To install it: {brokers.INSTALL}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that no worker is left.
    wanted = {name for key, name in TRANSPORTS.items() if arguments.transport in {key, "all"}}
    with server(arguments.uri) as uri, brokers.brokers(uri) as found:
        print("\n".join(brokers.describe(uri)))
        chosen = [one for one in found if one.name in wanted]
        if not chosen:
            sys.exit(f"{brokers.KOMBU_REDIS} is not installed: {brokers.missing_redis()}")
        for broker in chosen:
            options = transport_options(broker.name, arguments.visibility_timeout)
            print(f"{broker.name}: {arguments.workers} workers, transport options {options}")
            result = measure(
                broker,
                arguments.tasks,
                workers=arguments.workers,
                kill_sec=arguments.kill_every,
                visibility_sec=arguments.visibility_timeout,
            )
            print(f"  {result}", flush=True)


if __name__ == "__main__":
    main()
