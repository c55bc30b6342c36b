"""Workers of every kind, and consumers that call the queue themselves."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from microqueue import AsyncQueue, LeaseLost, MicroqueueError, Queue
from microqueue.worker import AsyncWorker, Fail, Retry, Worker, stopping_by_signal
from tests.chaos.handlers import (
    RETRY_SEC,
    Participant,
    exception_of,
    handle,
    handle_async,
    handle_batch,
)
from tests.chaos.history import WORKER_GRACE_SEC
from tests.chaos.ledger import now
from tests.chaos.observing import LeaseNotes
from tests.chaos.setup import BACKOFF, ORDERED

MEMORY_BYTES = 4 * 1024**3
"""How much more address space a worker may use whose handlers exhaust it."""
AWAY_SEC = 0.5
COMMAND = [sys.executable, "-m", "tests.chaos.roles.command", "microqueue"]


def _options(me: Participant, **more: Any) -> dict[str, Any]:
    return {
        "worker_id": me.ledger.who,
        "hooks": [LeaseNotes(me.ledger)],
        "heartbeat": 1,
        "grace": WORKER_GRACE_SEC,
        "timeout": me.setup.timeout_sec,
        "keep_result": True,
        "prefetch": 100,
        **more,
    }


def run_threads(me: Participant, database: str, queues: list[str], **options: Any) -> None:
    """Run a ``Worker``; with ``batch``, its handler takes lists; ``memory`` limits its memory."""
    if options.pop("memory", False):
        used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")  # noqa: PTH123, SIM115
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    settings = me.setup.settings(database)
    with Queue[Any].from_uri(me.setup.address(database), queues[0], settings=settings) as first:
        names = queues[1:]
        others = [_beside(first, name) for name in names]
        handler = handle_batch if "batch" in options else handle
        worker = Worker([first, *others], handler, **_options(me, **options))
        with stopping_by_signal(worker.stop):
            worker.run()


def _beside(queue: Queue[Any], name: str) -> Queue[Any]:
    client = queue._connection.client  # type: ignore[union-attr]  # noqa: SLF001
    return Queue(client.get_default_database(), name, settings=queue.settings)


def run_coroutines(
    me: Participant, database: str, queues: list[str], *, driver: str, **options: Any
) -> None:
    """Run an ``AsyncWorker`` on one of the async drivers."""
    asyncio.run(_run_coroutines(me, database, queues, driver=driver, **options))


async def _run_coroutines(
    me: Participant, database: str, queues: list[str], *, driver: str, **options: Any
) -> None:
    client_class: Any = AsyncIOMotorClient if driver == "motor" else AsyncMongoClient
    limits = {"serverSelectionTimeoutMS": 5000, "connectTimeoutMS": 5000}
    client = client_class(me.setup.address(database), **limits)
    try:
        settings = me.setup.settings(database)
        opened = [AsyncQueue[Any](client[database], name, settings=settings) for name in queues]
        worker = AsyncWorker(opened, handle_async, **_options(me, **options))
        with stopping_by_signal(worker.stop):
            await worker.run()
    finally:
        closing = client.close()
        if inspect.isawaitable(closing):
            await closing


def run_supervisor(me: Participant, database: str, queues: list[str]) -> None:
    """Become ``microqueue worker --processes 2``; its processes import the handlers."""
    environment = {**os.environ, "CHAOS_WHO": me.ledger.who}
    for name, value in me.setup.queue_settings(database).items():
        if name != "backoff":
            environment[f"MICROQUEUE_{name.upper()}"] = str(value)
    environment["MICROQUEUE_BACKOFF"] = json.dumps(BACKOFF)
    command = [*COMMAND, "--uri", me.setup.address(database), "worker"]
    command += ["tests.chaos.handlers:handle", "--processes", "2", "--concurrency", "4"]
    command += [
        "--grace",
        f"{WORKER_GRACE_SEC:g}s",
        "--timeout",
        f"{me.setup.timeout_sec:g}s",
        "--keep-result",
    ]
    command += ["--worker-id", me.ledger.who, "--hooks", "tests.chaos.handlers:lease_notes"]
    for name in queues:
        command += ["--queue", name]
    os.execve(sys.executable, command, environment)


def run_dashboard(me: Participant, database: str, *, port: int) -> None:
    """Become ``microqueue dashboard``."""
    command = [*COMMAND, "--uri", me.setup.address(database)]
    command += ["dashboard", "--port", str(port)]
    os.execve(sys.executable, command, {**os.environ, "CHAOS_WHO": me.ledger.who})


def run_consumer(me: Participant, database: str, *, queue: str = ORDERED, many: int = 1) -> None:
    """Pop tasks and settle them by calls, one by one or several at once."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    settings = me.setup.settings(database)
    with Queue[Any].from_uri(me.setup.address(database), queue, settings=settings) as source:
        while not stopping.is_set():
            asked = now()
            try:
                if many > 1:
                    tasks = source.pop_many(many, worker_id=me.ledger.who)
                else:
                    task = source.pop(worker_id=me.ledger.who)
                    tasks = [] if task is None else [task]
                if not tasks:
                    stopping.wait(0.05)
                    continue
                _consume(me, source, tasks, asked)
            except MicroqueueError:
                stopping.wait(AWAY_SEC)


def _consume(me: Participant, source: Queue[Any], tasks: list[Any], asked: float) -> None:
    """Handle tasks, and settle each by its outcome; several that are done, together."""
    me.ledger.write_all([me.started(task, asked=asked) for task in tasks])
    time.sleep(max(float(task.payload.get("sec", 0.0)) for task in tasks))
    errors = [exception_of(task) for task in tasks]
    me.ledger.write_all([me.finished(*one) for one in zip(tasks, errors, strict=True)])
    done = [task for task, error in zip(tasks, errors, strict=True) if error is None]
    if len(done) > 1:
        refused = {str(one.task_id) for one in source.mark_done_many(done)}
        for task in done:
            _note(me, task, "lost" if str(task.id) in refused else "settled", "done")
    for task, error in zip(tasks, errors, strict=True):
        if error is not None or len(done) == 1:
            _settle(me, source, task, error)


def _settle(me: Participant, source: Queue[Any], task: Any, error: Exception | None) -> None:
    try:
        if error is None:
            source.mark_done(task)
            _note(me, task, "settled", "done")
        elif isinstance(error, Fail):
            source.mark_failure(task, error)
            _note(me, task, "settled", "failed")
        else:
            delay = RETRY_SEC if isinstance(error, Retry) else None
            status = source.mark_retry(task, error, delay=delay)
            _note(me, task, "settled", "failed" if status == "failed" else "retried")
    except LeaseLost:
        _note(me, task, "lost", None)


def _note(me: Participant, task: Any, event: str, outcome: str | None) -> None:
    line = {"event": event, "key": task.payload["key"], "token": task.lease.token}
    me.ledger.write_all([line if outcome is None else {**line, "outcome": outcome}])
