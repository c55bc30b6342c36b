"""Run the same function in several processes, from a common start."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.place import Place

Start = Callable[[], None]
LOOK_SEC = 1.0


@dataclass(frozen=True)
class Run:
    """What the processes gave, and how long it took from the start to the end of the last."""

    results: list[Any]
    took_sec: float


def run_processes(function: Callable[..., Any], count: int, place: Place, *arguments: Any) -> Run:
    """Call ``function(place, start, *arguments)`` in ``count`` processes.

    Each prepares itself, then calls ``start()``, which returns in all of them at once.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count)
    replies: Any = context.Queue()
    processes = [
        context.Process(target=_run, args=(function, place, arguments, barrier, replies))
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
    """Wait for a reply, but not for that of a process which died without one."""
    while True:
        try:
            return replies.get(timeout=LOOK_SEC)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
                raise RuntimeError("a process of the benchmark died; see above") from None


def _run(
    function: Callable[..., Any], place: Place, arguments: Any, barrier: Any, replies: Any
) -> None:
    began = time.monotonic()

    def start() -> None:
        nonlocal began
        barrier.wait()
        began = time.monotonic()  # One clock for all processes of a machine.

    try:
        result = function(place, start, *arguments)
    except Exception as exc:  # noqa: BLE001 (the parent raises it)
        barrier.abort()
        replies.put(exc)
        return
    replies.put((result, began, time.monotonic()))
