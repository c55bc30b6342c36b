"""Measure each peer in turn, several times: enqueue, drain and pick-up."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.database import payloads
from benchmarks.peers.notes import Notes
from benchmarks.peers.peer import Peer
from benchmarks.peers.workers import running_workers
from benchmarks.processes import Start, run_processes

LIMIT_SEC, MIN_RATE = 60.0, 50.0
"""What is slower than this rate, after so many seconds, is given up."""
PICK_UP_SEC = 60.0
EVERY_SEC = (0.03, 0.07)
"""The pause before each sample of the pick-up: random, between these."""
WARM_UP = 5
POLL_SEC = 0.001


@dataclass
class Rates:
    """Tasks per second in each round."""

    enqueue: list[float] = field(default_factory=list)
    drain: list[float] = field(default_factory=list)


def tasks_of(peer: Peer, size: int) -> int:
    """Return how many tasks of this size a peer gets."""
    return min(size, peer.max_tasks or size)


def measure_rates(peers: Sequence[Peer], size: int, rounds: int) -> dict[str, Rates]:
    """Fill a queue, then drain it with the workers; with each peer in turn, several times."""
    found = {peer.name: Rates() for peer in peers}
    for number in range(rounds):
        for peer in _rotated(peers, number):
            enqueue, drain = _fill_and_drain(peer, tasks_of(peer, size))
            found[peer.name].enqueue.append(enqueue)
            found[peer.name].drain.append(drain)
    return found


def _rotated(peers: Sequence[Peer], by: int) -> list[Peer]:
    """Return the peers in another order, so that each one comes after different ones."""
    first = by % len(peers)
    return [*peers[first:], *peers[:first]]


def _limit_sec(tasks: int) -> float:
    return LIMIT_SEC + tasks / MIN_RATE


def _fill_and_drain(peer: Peer, tasks: int) -> tuple[float, float]:
    """Return tasks per second of both."""
    with peer.fresh() as address, Notes.on(tasks) as notes:
        filled = run_processes(_fill, 1, address, peer, tasks, limit_sec=_limit_sec(tasks))
        with running_workers(peer, address, notes, drain=True) as workers:
            done = notes.settled if peer.acknowledges else notes.started
            workers.wait(lambda: done() >= tasks, f"{peer.name} drains", _limit_sec(tasks))
        return tasks / filled.results[0], tasks / notes.span_sec()


def _fill(address: Any, start: Start, peer: Peer, tasks: int) -> float:
    """Return the seconds that it takes."""
    given = payloads(tasks)
    with peer.producer(address) as producer:
        start()
        began = time.monotonic()
        producer.many(given)
        return time.monotonic() - began


def measure_pick_up(peers: Sequence[Peer], samples: int, rounds: int) -> dict[str, list[float]]:
    """Send single tasks to idle workers, of each peer in turn; return sorted milliseconds.

    The time is from the call that adds the task to the start of its handler.
    """
    found: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for number in range(rounds):
        for peer in _rotated(peers, number):
            found[peer.name] += _pick_up(peer, math.ceil(max(samples, 2) / rounds))
    return {name: sorted(waits) for name, waits in found.items()}


def _pick_up(peer: Peer, samples: int) -> list[float]:
    tasks = WARM_UP + samples
    with (
        peer.fresh() as address,
        Notes.on(tasks) as notes,
        running_workers(peer, address, notes, drain=False) as workers,
    ):
        sending = run_processes(_send, 1, address, peer, notes.path, limit_sec=_limit_sec(tasks))
        workers.wait(lambda: notes.started() == tasks, f"{peer.name} picks tasks up", PICK_UP_SEC)
        notes.span_sec()  # It checks that each task ran once.
        sent: list[float] = sending.results[0]
        return [
            ((notes.started_at(number) or 0.0) - sent[number]) * 1000
            for number in range(WARM_UP, tasks)
        ]


def _send(address: Any, start: Start, peer: Peer, path: Path) -> list[float]:
    """Send a task, wait until a worker has started it, and send the others; return the times."""
    notes = Notes(path)
    given = payloads(notes.tasks)
    sent = []
    with peer.producer(address) as producer:
        start()
        for payload in given:
            sent.append(time.monotonic())
            producer.one(payload)
            deadline = time.monotonic() + PICK_UP_SEC
            while notes.started_at(0) is None and time.monotonic() < deadline:
                time.sleep(POLL_SEC)
            time.sleep(random.uniform(*EVERY_SEC))
    return sent
