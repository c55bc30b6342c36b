"""Run a function in several processes that start at the same time."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.database import Database

Start = Callable[[], None]
POLL_SEC = 1.0


@dataclass(frozen=True)
class Run:
    """The results of the processes, and the time from the start to the end of the last one."""

    results: list[Any]
    took_sec: float


def run_processes(
    function: Callable[..., Any], count: int, database: Database, *arguments: Any
) -> Run:
    """Call ``function(database, start, *arguments)`` in ``count`` processes.

    Each process prepares itself and calls ``start()``, which returns in all at the same time.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count)
    replies: Any = context.Queue()
    processes = [
        context.Process(target=_run, args=(function, database, arguments, barrier, replies))
        for _ in range(count)
    ]
    for process in processes:
        process.start()
    outcomes = [_next_reply(replies, processes) for _ in processes]
    for process in processes:
        process.join()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    began = min(began for _, began, _ in outcomes)
    ended = max(ended for _, _, ended in outcomes)
    return Run([result for result, _, _ in outcomes], ended - began)


def _next_reply(replies: Any, processes: Sequence[BaseProcess]) -> Any:
    """Wait for a reply; raise an error if a process died without one."""
    while True:
        try:
            return replies.get(timeout=POLL_SEC)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
                raise RuntimeError("a benchmark process died; its error is above") from None


def _run(
    function: Callable[..., Any], database: Database, arguments: Any, barrier: Any, replies: Any
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
