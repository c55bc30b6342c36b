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

Start = Callable[[], None]
POLL_SEC = 1.0


@dataclass(frozen=True)
class Run:
    """The results of the processes, and the time from the start to the end of the last one."""

    results: list[Any]
    took_sec: float


def run_processes(
    function: Callable[..., Any],
    count: int,
    database: Any,
    *arguments: Any,
    limit_sec: float = math.inf,
) -> Run:
    """Call ``function(database, start, *arguments)`` in ``count`` processes.

    Each process prepares itself and calls ``start()``, which returns in all at the same time.

    Raises:
        RuntimeError: A process died, or the time is over. None is left.
    """
    deadline = time.monotonic() + limit_sec
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count)
    replies: Any = context.Queue()
    processes = [
        context.Process(target=_run, args=(function, database, arguments, barrier, replies))
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
    began = min(began for _, began, _ in outcomes)
    ended = max(ended for _, _, ended in outcomes)
    return Run([result for result, _, _ in outcomes], ended - began)


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


def _run(
    function: Callable[..., Any], database: Any, arguments: Any, barrier: Any, replies: Any
) -> None:
    began = time.monotonic()

    def start() -> None:
        nonlocal began
        barrier.wait()
        began = time.monotonic()  # All processes of a machine share this clock.

    try:
        result = function(database, start, *arguments)
    except Exception as exc:  # noqa: BLE001 (the parent raises it)
        barrier.abort()
        replies.put(exc)
        return
    replies.put((result, began, time.monotonic()))
