"""A whole service on three members, of which the primary steps down, is killed and is frozen.

A ledger outside of MongoDB holds what producers were told, and when handlers started. Everything
runs on one machine, so its clock is the servers' own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from pymongo import AsyncMongoClient, MongoClient, monitoring

from microqueue import (
    AsyncQueue,
    AsyncSweeper,
    BackoffPolicy,
    DuplicateTask,
    NewTask,
    Queue,
    QueueSettings,
    ServerUnavailable,
    Sweeper,
)
from microqueue.worker import Retry
from tests.integration.replica_set import ReplicaSet
from tests.integration.rig import KINDS, Rig
from tests.waiting import wait_for

LEASE_SEC = 10
NOTICED_SEC = 3
"""How long it takes at most to notice that a primary is lost: a heartbeat that is not answered."""
RETRY_SEC = 1.0
SETTINGS = QueueSettings(
    visibility_timeout=LEASE_SEC,
    retention=None,
    max_attempts=50,
    max_crashes=50,
    backoff=BackoffPolicy(base_sec=0, max_sec=0),
    call_timeout=3,
)
CLIENT: dict[str, Any] = {
    "serverSelectionTimeoutMS": 3000,
    "connectTimeoutMS": 2000,
    "heartbeatFrequencyMS": 1000,
}
DELAYS_SEC = (0.0, 0.0, 0.3, 1.0, 2.5)


class Stored(NamedTuple):
    """What a producer was told is stored, and when it may be handled at the earliest."""

    due: float


class Run(NamedTuple):
    """One start of a handler, and when it asked for a retry, if it did."""

    start: float
    retried_at: float | None


class Fault(NamedTuple):
    """From when to when something was wrong."""

    what: str
    begin: float
    end: float


@dataclass
class Ledger:
    """What happened, as the clients saw it."""

    stored: dict[str, Stored] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    started: int = 0

    def start(self, task_id: str) -> None:
        """Note that a handler starts; raise what it is to raise."""
        start = time.time()
        with self.lock:
            first = not self.runs[task_id]
            self.started += 1
            retry = first and task_id.endswith("7")
            self.runs[task_id].append(Run(start, time.time() if retry else None))
        if retry:
            raise Retry(delay=RETRY_SEC)

    @contextlib.contextmanager
    def fault(self, what: str) -> Iterator[None]:
        """Note a fault for as long as this takes, and check that the work continues."""
        begin = time.time()
        yield
        self.faults.append(Fault(what, begin, time.time()))
        self.progress(60)

    def progress(self, count: int) -> None:
        """Wait until so many more handlers have started."""
        before = self.started
        wait_for(lambda: self.started >= before + count, 90, what=f"{count} more tasks")


class Elections(monitoring.TopologyListener):
    """Notes each loss of a primary, whatever its cause: it is a fault, too."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def opened(self, event: monitoring.TopologyOpenedEvent) -> None:
        """Wait for the first description."""

    def closed(self, event: monitoring.TopologyClosedEvent) -> None:
        """It is over."""

    def description_changed(self, event: monitoring.TopologyDescriptionChangedEvent) -> None:
        before, after = (
            [address for address, one in which.server_descriptions().items() if one.is_writable]
            for which in (event.previous_description, event.new_description)
        )
        if before and before != after:
            now = time.time()
            self._ledger.faults.append(Fault("election", now - NOTICED_SEC, now))


class Producer:
    """Adds tasks, one call at a time, and repeats each until it knows that it is stored."""

    def __init__(self, name: str, uri: str, ledger: Ledger) -> None:
        self._name, self._uri, self._ledger = name, uri, ledger
        self._random = random.Random(name)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """End after the call that is under way."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with MongoClient[Any](self._uri, **CLIENT) as client:
            queue: Queue[Any] = Queue(client.test, settings=SETTINGS)
            number = 0
            while not self._stopping.is_set():
                count = self._random.choice([1, 1, 1, 5])
                ids = [f"{self._name}-{number + one}" for one in range(count)]
                number += count
                self._add(queue, ids, self._random.choice(DELAYS_SEC))
                self._stopping.wait(0.03)

    def _add(self, queue: Queue[Any], ids: list[str], delay_sec: float) -> None:
        first = time.time()
        while True:
            last = time.time()
            try:
                known = _enqueue(queue, ids, delay_sec)
                break
            except ServerUnavailable:
                continue
        with self._ledger.lock:
            for task_id in ids:
                # What is a duplicate now was stored by any of the calls before.
                called_at = first if task_id in known else last
                self._ledger.stored[task_id] = Stored(called_at + delay_sec)


def _enqueue(queue: Queue[Any], ids: list[str], delay_sec: float) -> set[str]:
    """Add tasks; return those that were there already."""
    news = [
        NewTask(payload={"id": one}, task_id=one, delay=timedelta(seconds=delay_sec)) for one in ids
    ]
    if len(news) > 1:
        return {str(one.task_id) for one in queue.enqueue_many(news).duplicates}
    try:
        queue.enqueue(news[0].payload, task_id=ids[0], delay=delay_sec)
    except DuplicateTask:
        return set(ids)
    return set()


@contextlib.contextmanager
def workers(uri: str, ledger: Ledger) -> Iterator[None]:
    """Run a worker of each kind."""

    def handle(payload: Any) -> None:
        ledger.start(payload["id"])

    async def handle_async(payload: Any) -> None:
        ledger.start(payload["id"])
        await asyncio.sleep(0)

    with MongoClient[Any](uri, **CLIENT) as client:
        rigs: list[tuple[Rig, threading.Thread]] = []
        for kind in KINDS:
            rig = Rig(kind, uri, client.test)
            rig.settings, rig.client_options = SETTINGS, CLIENT
            handler = handle if kind == "threads" else handle_async
            rigs.append((rig, rig.start(handler, concurrency=4, prefetch=20)))
        try:
            yield
        finally:
            for rig, _ in rigs:
                rig.stop()
            for _, thread in rigs:
                thread.join()


@contextlib.contextmanager
def sweepers(uri: str) -> Iterator[None]:
    """Run a sweeper of each kind."""
    loop_of: list[tuple[asyncio.AbstractEventLoop, AsyncSweeper]] = []

    async def sweep() -> None:
        async with AsyncMongoClient[Any](uri, **CLIENT) as client:
            sweeper = AsyncSweeper(AsyncQueue[Any](client.test, settings=SETTINGS))
            loop_of.append((asyncio.get_running_loop(), sweeper))
            await sweeper.run_forever(every=0.5)

    with MongoClient[Any](uri, **CLIENT) as client:
        sweeper = Sweeper(Queue[Any](client.test, settings=SETTINGS))
        threads = [
            threading.Thread(target=sweeper.run_forever, kwargs={"every": 0.5}),
            threading.Thread(target=lambda: asyncio.run(sweep())),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            sweeper.stop()
            loop, other = wait_for(lambda: loop_of)[0]
            loop.call_soon_threadsafe(other.stop)
            for thread in threads:
                thread.join()


def fault_run(trio: ReplicaSet, ledger: Ledger) -> None:
    """Let the primary step down, kill it, and freeze it, while all clients work."""
    ledger.progress(100)
    with ledger.fault("step-down"):
        trio.step_down(for_sec=10)
        ledger.progress(50)
        trio.heal()
    with ledger.fault("kill -9"):
        trio.primary().kill()
        ledger.progress(50)
        trio.heal()
    with ledger.fault("SIGSTOP"):
        frozen = trio.primary()
        frozen.stop()
        assert trio.primary() is not frozen
        ledger.progress(50)
        frozen.cont()
        trio.heal()


def unfinished(tasks: Any) -> dict[str, str]:
    return {one["_id"]: one["status"] for one in tasks.find({"status": {"$ne": "done"}})}


def is_explained(earlier: Run, later: Run, faults: list[Fault]) -> bool:
    """Return whether a run had to be repeated: it asked for it, or a fault was noted."""
    if earlier.retried_at is not None and later.start >= earlier.retried_at + RETRY_SEC:
        return True
    return any(one.begin <= later.start and earlier.start <= one.end for one in faults)


@pytest.mark.usefixtures("own_server")
@pytest.mark.timeout(600)  # Each of its waits may take long on a slow machine.
def test_nothing_is_lost_or_stuck_or_early_and_every_repeat_has_its_fault() -> None:
    ledger = Ledger()
    with ReplicaSet.started(election_timeout_sec=5) as trio, contextlib.ExitStack() as running:
        uri = trio.uri
        observer = running.enter_context(
            MongoClient[Any](uri, event_listeners=[Elections(ledger)], **CLIENT)
        )
        tasks = observer.test.tasks
        Queue[Any](observer.test, settings=SETTINGS).ensure_indexes()
        running.enter_context(sweepers(uri))
        running.enter_context(workers(uri, ledger))
        producers = [Producer(name, uri, ledger) for name in ("a", "b")]
        with contextlib.ExitStack() as producing:
            for producer in producers:
                producing.callback(producer.stop)
            fault_run(trio, ledger)
        left = dict[str, str]()

        def drained() -> bool:
            left.clear()
            left.update(unfinished(tasks))
            return not left

        with contextlib.suppress(AssertionError):  # What is stuck is named below.
            wait_for(drained, 120)
        assert left == {}, "stuck"
        done = {one["_id"] for one in tasks.find({"status": "done"})}
        faults = list(ledger.faults)  # To the observer, its own end looks like one.

    stored, runs = ledger.stored, ledger.runs
    assert set(stored) - done == set(), "lost"
    assert set(stored) - set(runs) == set(), "never handled"
    early = {
        task_id: run.start - stored[task_id].due
        for task_id, some in runs.items()
        for run in some[:1]
        if task_id in stored and run.start < stored[task_id].due
    }
    assert early == {}, "early"
    unexplained = {
        task_id: (earlier, later)
        for task_id, some in runs.items()
        for earlier, later in pairwise(some)
        if not is_explained(earlier, later, faults)
    }
    assert unexplained == {}, faults
    retries = [
        later.start - earlier.retried_at
        for some in runs.values()
        for earlier, later in pairwise(some)
        if earlier.retried_at is not None
    ]
    assert retries
    assert len(stored) > 200
