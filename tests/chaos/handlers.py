"""What the handlers of a run do, and what becomes of their tasks.

A handler writes a line when it starts and when it ends. Functions and coroutines share one script,
a generator that yields the seconds to sleep, or :data:`COMMIT`.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import mmap
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from microqueue import Outcome, Task
from microqueue.worker import AsyncContext, BatchContext, Context, Fail, Retry, Snooze
from tests.chaos import clocks
from tests.chaos.history import HANDLER_STATUS
from tests.chaos.leaving import leave_at_exit
from tests.chaos.ledger import Ledger, now
from tests.chaos.observing import LeaseNotes, key_of, observe_calls, observe_workers
from tests.chaos.setup import VARIABLE, Setup

COMMIT = "commit"
FINAL_STATUS = {
    "ok": "done",
    "slow": "done",
    "long": "done",
    "flaky": "done",
    "raise": "failed",
    "fail": "failed",
    "retry": "done",
    "snooze": "done",
    "hang": "done",
    "exit": "done",
    "fork": "done",
    "memory": "done",
    "unstorable": "failed",
    "transaction": "done",
}
"""The kinds of handlers, and the final status of their tasks."""
CHUNK_BYTES = 16 * 1024 * 1024
MOST_CHUNKS = 1024
FORKED_SEC = 0.2
LOOK_SEC = 0.05
RETRY_SEC = 0.3
SNOOZE_SEC = 0.5


class Trouble(Exception):
    """What a handler raises that has no particular meaning."""


class Participant:
    """A process of the run that handles tasks."""

    def __init__(self, setup: Setup, ledger: Ledger) -> None:
        self.setup = setup
        self.ledger = ledger

    def started(self, task: Task[Any], *, asked: float | None = None) -> dict[str, Any]:
        """Return the line of a handler that starts."""
        assert task.lease is not None
        return {
            "event": "start",
            "key": key_of(task),
            "token": task.lease.token,
            "attempt": task.attempts,
            "lease_until": self.setup.monotonic(task.lease.expires_at.timestamp()),
            "asked": asked,
            "due_at": self._scheduled(task),
        }

    def _scheduled(self, task: Task[Any]) -> float | None:
        """Return when the run of a schedule is due; None for other tasks."""
        instant = task.headers.get("scheduled_at")
        if not isinstance(instant, str):
            return None
        return self.setup.monotonic(datetime.fromisoformat(instant).timestamp())

    def finished(self, task: Task[Any], error: BaseException | str | None) -> dict[str, Any]:
        """Return the line of a handler that ends: what it raised, or what it did otherwise."""
        assert task.lease is not None
        outcome = _ending(task, error)
        delay = {"retry": RETRY_SEC, "snooze": SNOOZE_SEC}.get(outcome)
        return {
            "event": "finish",
            "key": key_of(task),
            "token": task.lease.token,
            "outcome": outcome,
            "retry_at": None if delay is None else now() + delay,
        }


@functools.cache
def participant() -> Participant:
    """Return this process, if it was started by a command rather than by the nursery."""
    setup = Setup.read()
    parent = os.environ["CHAOS_WHO"]
    ledger = Ledger(setup.folder, f"{parent}/{os.getpid()}")
    ledger.write("born", target=ledger.who, parent=parent)
    _use_mutant(setup)
    observe_workers(ledger)
    observe_calls(ledger)
    clocks.watch(setup.folder, ledger)
    leave_at_exit(ledger)
    return Participant(setup, ledger)


_current: list[Participant] = []


def become(one: Participant) -> None:
    """Make this process a participant that the nursery has forked."""
    _use_mutant(one.setup)
    observe_workers(one.ledger)
    observe_calls(one.ledger)
    _current.append(one)


def _use_mutant(setup: Setup) -> None:
    if setup.mutant is not None:
        importlib.import_module("tests.chaos.mutants").apply(setup.mutant)


def me() -> Participant:
    """Return this process."""
    return _current[0] if _current else participant()


Script = Generator[float | str, None, Any]


def script(task: Task[Any], is_cancelled: Callable[[], bool]) -> Script:
    """Do what the payload says: sleep, raise, or worse; return the result."""
    payload, attempt = task.payload, task.attempts
    kind, first = payload["kind"], task.attempts == 1
    yield float(payload.get("sec", 0.0))
    if kind == "raise" or (kind == "flaky" and attempt <= payload.get("times", 1)):
        raise Trouble(f"attempt {attempt}")
    if kind == "fail":
        raise Fail("as planned", code="planned")
    if kind == "retry" and first:
        raise Retry("as planned", delay=RETRY_SEC)
    if kind == "snooze" and all(one.outcome is not Outcome.SNOOZED for one in task.history):
        raise Snooze(SNOOZE_SEC)
    if kind == "hang" and first:
        yield from _hang(is_cancelled)
    if kind == "exit" and first:
        me().ledger.write("fault", kind="handler_exit", target=me().ledger.who, phase="begin")
        me().ledger.write_all([me().finished(task, "exit")])
        os._exit(HANDLER_STATUS)
    if kind == "fork":
        yield from _fork()
    if kind == "memory" and first:
        fault: dict[str, Any] = {"kind": "handler_memory", "target": me().ledger.who}
        me().ledger.write("fault", phase="begin", **fault)
        try:
            _exhaust_memory()
        finally:
            me().ledger.write("fault", phase="end", **fault)
    if kind == "transaction":
        yield COMMIT
    if kind == "unstorable":
        return {"what": object()}
    return {"attempt": attempt}


def _hang(is_cancelled: Callable[[], bool]) -> Script:
    ends = now() + 4 * me().setup.timeout_sec
    while now() < ends and not is_cancelled():
        yield LOOK_SEC
    raise Trouble("it was told to stop")


def _fork() -> Script:
    child = os.fork()
    if child == 0:
        time.sleep(FORKED_SEC)  # It has the sockets of its parent, and uses none.
        os._exit(0)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        yield LOOK_SEC


def _exhaust_memory() -> None:
    """Reserve all the address space of this process for a moment, and then ask for more."""
    chunks: list[mmap.mmap] = []
    try:
        with suppress(OSError):
            while len(chunks) < MOST_CHUNKS:
                chunks.append(mmap.mmap(-1, CHUNK_BYTES))
        time.sleep(LOOK_SEC)
        bytearray(MOST_CHUNKS * CHUNK_BYTES)
    finally:
        for chunk in chunks:
            chunk.close()


def _ending(task: Task[Any], error: BaseException | str | None) -> str:
    if isinstance(error, str):
        return error
    if error is None:
        return "unstorable" if task.payload["kind"] == "unstorable" else "done"
    names = {Fail: "fail", Retry: "retry", Snooze: "snooze", asyncio.CancelledError: "cancelled"}
    return next((name for kind, name in names.items() if isinstance(error, kind)), "raise")


class _Noted:
    """The lines of one run of a handler."""

    def __init__(self, task: Task[Any]) -> None:
        self._task = task

    def __enter__(self) -> None:
        me().ledger.write_all([me().started(self._task)])

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        me().ledger.write_all([me().finished(self._task, error)])


def handle(payload: Any, context: Context) -> Any:
    """Handle a task in a thread."""
    with _Noted(context.task):
        steps = script(context.task, lambda: context.cancelled)
        try:
            while True:
                step = next(steps)
                if step == COMMIT:
                    with _Child(context.task) as child:
                        context.transaction(lambda session: _write(context, session, child))
                elif step:
                    time.sleep(float(step))
        except StopIteration as end:
            return end.value


async def handle_async(payload: Any, context: AsyncContext) -> Any:
    """Handle a task in a coroutine."""
    with _Noted(context.task):
        steps = script(context.task, lambda: context.cancelled)
        try:
            while True:
                step = next(steps)
                if step == COMMIT:
                    with _Child(context.task) as child:
                        await context.transaction(
                            lambda session: _write_async(context, session, child)
                        )
                elif step:
                    await asyncio.sleep(float(step))
        except StopIteration as end:
            return end.value


class _Child:
    """A task that a handler enqueues in the transaction that settles its own task."""

    def __init__(self, task: Task[Any]) -> None:
        assert task.lease is not None
        self.key = f"{task.payload['key']}/{task.lease.token[:12]}"
        self._queue = task.queue

    def __enter__(self) -> dict[str, Any]:
        plan: dict[str, Any] = {"queue": self._queue, "due_at": None, "priority": 0, "kind": "ok"}
        plan |= {"expect": "done"}
        me().ledger.write("plan", key=self.key, max_attempts=me().setup.max_attempts, **plan)
        return {"key": self.key, "kind": "ok"}

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None:
            me().ledger.write("stored", key=self.key)
        else:
            me().ledger.write("uncertain", key=self.key, error=repr(error)[:200])


def _write(context: Context, session: Any, child: dict[str, Any]) -> None:
    effects = session.client[_database(context)].effects
    effects.insert_one({"key": context.task.payload["key"]}, session=session)
    context.enqueue(child)


async def _write_async(context: AsyncContext, session: Any, child: dict[str, Any]) -> None:
    effects = session.client[_database(context)].effects
    await effects.insert_one({"key": context.task.payload["key"]}, session=session)
    await context.enqueue(child)


def _database(context: Context | AsyncContext) -> str:
    return str(context.task.payload["database"])


def handle_batch(tasks: Sequence[Task[Any]], context: BatchContext) -> list[Exception | None]:
    """Handle several tasks in one call; each has its own outcome."""
    me().ledger.write_all([me().started(task) for task in tasks])
    time.sleep(max(float(task.payload.get("sec", 0.0)) for task in tasks))
    outcomes = [exception_of(task) for task in tasks]
    me().ledger.write_all(
        [me().finished(task, outcome) for task, outcome in zip(tasks, outcomes, strict=True)]
    )
    return outcomes


def exception_of(task: Task[Any]) -> Exception | None:
    """Do what the payload says, without its sleep; return what a handler would raise."""
    try:
        for _ in script(task, lambda: False):
            pass
    except (Trouble, Fail, Retry, Snooze) as exc:
        return exc
    return None


if VARIABLE in os.environ and "CHAOS_WHO" in os.environ:
    # A worker of the command line imports this module, and is observed from then on.
    lease_notes = LeaseNotes(participant().ledger)
