"""Peers of the benchmark without a server. Their processes start fast: they import little."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.peers.notes import Notes
from benchmarks.peers.peer import Peer, Producer, Server
from benchmarks.processes import Start


class Stuck(Peer):
    """A peer that never starts a task."""

    name = "fake"
    runs_on = Server.MONGODB
    settings = ""

    @contextmanager
    def fresh(self) -> Iterator[None]:
        yield

    @contextmanager
    def producer(self, address: None) -> Iterator[Producer]:
        raise NotImplementedError
        yield

    def work(self, address: None, notes: Notes, *, drain: bool) -> None:
        """Start a process that would outlive this one, and wait."""
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        notes.await_go()
        time.sleep(600)


class Failing(Stuck):
    """A peer whose workers fail."""

    def work(self, address: None, notes: Notes, *, drain: bool) -> None:
        raise ValueError("no such queue")


def sleep(_database: None, start: Start) -> None:
    """Take longer than any limit."""
    start()
    time.sleep(600)
