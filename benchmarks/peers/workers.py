"""The worker processes of a peer, from their start to their end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.peers.notes import Notes
from benchmarks.peers.peer import Peer

START_SEC = 60.0
STOP_SEC = 10.0
POLL_SEC = 0.005
LOG_CHARACTERS = 2000


class Workers:
    """Running worker processes of a peer, each the leader of a process group."""

    def __init__(self, processes: list[BaseProcess], log: Path) -> None:
        self.processes = processes
        self._log = log

    def wait(self, condition: Callable[[], bool], what: str, limit_sec: float) -> None:
        """Wait until a condition holds.

        Raises:
            RuntimeError: A worker failed, or the time is over.
        """
        deadline = time.monotonic() + limit_sec
        while not condition():
            failed = any(process.exitcode for process in self.processes)
            ended = all(process.exitcode is not None for process in self.processes)
            if (failed or ended) and not condition():
                raise RuntimeError(f"{what}: a worker ended\n{self._log_end()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: not within {limit_sec:g} s\n{self._log_end()}")
            time.sleep(POLL_SEC)

    def _log_end(self) -> str:
        return self._log.read_text(errors="replace")[-LOG_CHARACTERS:]


@contextmanager
def running_workers(peer: Peer, address: Any, notes: Notes, *, drain: bool) -> Iterator[Workers]:
    """Start the workers of a peer, let them begin at the same time, and end them all."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="microqueue-peers-") as directory:
        log = Path(directory, "log")
        log.touch()
        processes: list[BaseProcess] = []
        workers = Workers(processes, log)
        try:
            for number in range(peer.worker_processes):
                options = {"drain": drain, "log": log}
                arguments = (peer, address, notes.path, number)
                process = context.Process(target=_work, args=arguments, kwargs=options)
                process.start()
                processes.append(process)
            count = len(processes)
            workers.wait(lambda: notes.ready() == count, f"{peer.name} starts", START_SEC)
            notes.go()
            yield workers
        finally:
            _end(processes)


def _work(peer: Peer, address: Any, notes: Path, number: int, *, drain: bool, log: Path) -> None:
    os.setsid()  # Its own group, to end what it starts; and Ctrl-C leaves that to the parent.
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    peer.work(address, Notes(notes, number), drain=drain)


def _end(processes: list[BaseProcess]) -> None:
    try:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + STOP_SEC
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
    finally:
        for process in processes:
            if process.pid is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # Also what it started.
            process.kill()
            process.join()
