"""A program of processes that fire schedules, and are killed between their two writes.

``python -m tests.integration.firing URI PROCESSES KILLS`` starts workers of both kinds, and
sweepers. Each kills itself with SIGKILL after it has inserted the task of a run, before it advances
the schedule. Another one of its kind takes its place. It ends after so many kills of each kind.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from typing import Any

from pymongo.monitoring import CommandListener, CommandStartedEvent

from microqueue import AsyncQueue, AsyncWorker, Queue, Sweeper, Worker

MOST_RUNS = 3


class Killer(CommandListener):
    """Kills this process when it is about to advance a schedule for the nth time."""

    def __init__(self, left: int) -> None:
        self._left = left

    def started(self, event: CommandStartedEvent) -> None:
        if event.command.get("update") == "microqueue_schedules":
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)

    def succeeded(self, event: Any) -> None: ...

    def failed(self, event: Any) -> None: ...


def work(uri: str, killer: Killer) -> None:
    Worker(Queue.from_uri(uri, event_listeners=[killer]), lambda payload: None).run()


def work_async(uri: str, killer: Killer) -> None:
    async def handler(payload: Any) -> None: ...

    async def run() -> None:
        await AsyncWorker(AsyncQueue.from_uri(uri, event_listeners=[killer]), handler).run()

    asyncio.run(run())


def sweep(uri: str, killer: Killer) -> None:
    Sweeper(Queue.from_uri(uri, event_listeners=[killer])).run_forever(every=1)


KINDS = [work, work_async, sweep]


def main(uri: str, processes: int, kills: int) -> None:
    rng = random.Random(5)
    kinds: dict[int, Any] = {}

    def start(kind: Any) -> None:
        left = rng.randint(1, MOST_RUNS)
        process = os.fork()  # Before any client: only the first process imports the modules.
        if not process:
            kind(uri, Killer(left))
            os._exit(1)
        kinds[process] = kind

    for place in range(processes):
        start(KINDS[place % len(KINDS)])
    killed = Counter[Any]()
    while min(killed[kind] for kind in KINDS) < kills:
        process, status = os.wait()
        if not os.WIFSIGNALED(status):
            sys.exit(f"a process ended by itself: {status}")
        kind = kinds.pop(process)
        killed[kind] += 1
        start(kind)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
