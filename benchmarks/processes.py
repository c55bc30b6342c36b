"""Run a function in several processes that start at the same time."""

from __future__ import annotations

import math
import multiprocessing
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.processor import spent_sec

Start = Callable[[], None]
POLL_SEC = 1.0


@dataclass(frozen=True)
class Run:
    """What the processes returned and took, from the start to the end.

    Attributes:
        results: What the functions returned.
        took_sec: The time from the start to the end of the last process.
        client_sec: The processor time of the processes, added up.
        server_sec: The processor time of the server meanwhile; None if it is not known.
    """

    results: list[Any]
    took_sec: float
    client_sec: float
    server_sec: float | None


def run_processes(
    function: Callable[..., Any],
    count: int,
    database: Any,
    *arguments: Any,
    limit_sec: float = math.inf,
    server_pid: int | None = None,
) -> Run:
    """Call ``function(database, start, *arguments)`` in ``count`` processes.

    Each process prepares itself and calls ``start()``, which returns in all at the same time.
    ``server_pid`` is the process of the server, whose processor time is measured too.

    Raises:
        RuntimeError: A process died, or the time is over. None is left.
    """
    deadline = time.monotonic() + limit_sec
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count)
    replies: Any = context.Queue()
    shared = _Shared(barrier, replies, server_pid)
    processes = [
        context.Process(target=_run, args=(function, database, arguments, shared))
        for _ in range(count)
    ]
    try:
        for process in processes:
            process.start()
        outcomes = [_next_reply(replies, processes, deadline) for _ in processes]
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    began = min(began.at for _, began, _ in outcomes)
    ended = max(ended.at for _, _, ended in outcomes)
    server_sec = None
    if server_pid is not None:
        first = min(began.server_sec for _, began, _ in outcomes)
        server_sec = max(ended.server_sec for _, _, ended in outcomes) - first
    return Run(
        [result for result, _, _ in outcomes],
        ended - began,
        sum(ended.client_sec - began.client_sec for _, began, ended in outcomes),
        server_sec,
    )


def _next_reply(replies: Any, processes: Sequence[BaseProcess], deadline: float) -> Any:
    """Wait for a reply; raise an error if a process died without one, or none came in time."""
    while True:
        try:
            return replies.get(timeout=POLL_SEC)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise RuntimeError("a benchmark process died; its error is above") from None
            if time.monotonic() > deadline:
                raise RuntimeError("a benchmark process took too long") from None


@dataclass(frozen=True)
class _Clocks:
    """The clocks of one moment: the time, and the processor time until then."""

    at: float
    client_sec: float
    server_sec: float | None

    @classmethod
    def read(cls, server_pid: int | None) -> _Clocks:
        server_sec = None if server_pid is None else spent_sec(server_pid)
        # All processes of a machine share the monotonic clock.
        return cls(time.monotonic(), time.process_time(), server_sec)


@dataclass(frozen=True)
class _Shared:
    """What all processes have."""

    barrier: Any
    replies: Any
    server_pid: int | None


def _run(
    function: Callable[..., Any], database: Any, arguments: Sequence[Any], shared: _Shared
) -> None:
    began = _Clocks.read(shared.server_pid)

    def start() -> None:
        nonlocal began
        shared.barrier.wait()
        began = _Clocks.read(shared.server_pid)

    try:
        result = function(database, start, *arguments)
    except Exception as exc:  # noqa: BLE001 (the parent raises it)
        shared.barrier.abort()
        shared.replies.put(exc)
        return
    shared.replies.put((result, began, _Clocks.read(shared.server_pid)))
