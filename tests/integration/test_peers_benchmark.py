"""The benchmark of the peers counts every task once, and leaves no process behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import brokers
from benchmarks.database import payloads
from benchmarks.peers import postgresql, report, roster
from benchmarks.peers.measure import Rates, measure_pick_up, measure_rates
from benchmarks.peers.mongodb_peers import AsyncMicroqueue, BareCeiling, Microqueue, NaiveLoop
from benchmarks.peers.notes import Notes
from benchmarks.peers.peer import Peer
from benchmarks.peers.workers import Workers, running_workers
from benchmarks.processes import run_processes
from microqueue.embedded import EmbeddedServer
from tests.integration.fake_peers import Failing, Stuck, sleep
from tests.waiting import wait_for

ON_MONGODB = (Microqueue.name, AsyncMicroqueue.name, BareCeiling.name, NaiveLoop.name)
LIMIT_SEC = 60.0


@pytest.fixture(scope="module")
def peers(microqueue_server: EmbeddedServer) -> Iterator[dict[str, Peer]]:
    with roster.peers(microqueue_server.uri) as found:
        yield {peer.name: peer for peer in found}


@pytest.mark.parametrize("name", [*ON_MONGODB, *roster.OPTIONAL])
def test_a_peer_runs_every_task_once(name: str, peers: dict[str, Peer]) -> None:
    if name not in peers:
        pytest.skip(roster.missing()[name])
    peer, tasks = peers[name], 12
    with peer.fresh() as address, Notes.on(tasks) as notes:
        given = payloads(tasks)
        with peer.producer(address) as producer:
            producer.many(given[:-2])
            producer.one(given[-2])
        with running_workers(peer, address, notes, drain=False) as workers:
            workers.wait(lambda: notes.started() == tasks - 1, "the backlog", LIMIT_SEC)
            with peer.producer(address) as producer:
                producer.one(given[-1])
            workers.wait(lambda: notes.started() == tasks, "one task more", LIMIT_SEC)
        assert notes.span_sec() > 0


def test_rates_count_what_was_drained(peers: dict[str, Peer]) -> None:
    found = measure_rates([peers[Microqueue.name]], 30, rounds=1)[Microqueue.name]
    assert len(found.enqueue) == len(found.drain) == 1
    assert min(*found.enqueue, *found.drain) > 0


def test_pick_ups_are_measured_without_those_that_warm_up(peers: dict[str, Peer]) -> None:
    waits = measure_pick_up([peers[NaiveLoop.name]], samples=3, rounds=1)[NaiveLoop.name]
    assert len(waits) == 3
    assert 0 < waits[0] <= waits[-1]


def test_postgresql_runs_with_the_durability_that_is_stated(peers: dict[str, Peer]) -> None:
    if roster.PGQUEUER not in peers:
        pytest.skip(roster.missing()[roster.PGQUEUER])
    import asyncpg  # noqa: PLC0415 (optional)

    async def shown() -> dict[str, str]:
        connection = await asyncpg.connect(f"{peers[roster.PGQUEUER].server}/postgres")
        try:
            return {one: await connection.fetchval(f"SHOW {one}") for one in postgresql.DURABILITY}
        finally:
            await connection.close()

    assert asyncio.run(shown()) == postgresql.DURABILITY


# What can go wrong


def _left(workers: Workers) -> list[Any]:
    """Return the workers of which a process is left."""
    found = []
    for process in workers.processes:
        try:
            os.killpg(process.pid or 0, 0)
        except ProcessLookupError:
            continue
        found.append(process)
    return found


def test_workers_that_are_too_slow_are_reported_and_ended() -> None:
    with (
        pytest.raises(RuntimeError, match=r"the backlog: not within 0\.1 s"),
        Notes.on(1) as notes,
        running_workers(Stuck(""), None, notes, drain=True) as workers,
    ):
        assert len(_left(workers)) == 2
        workers.wait(lambda: notes.started() == 1, "the backlog", 0.1)
    wait_for(lambda: not _left(workers))


def test_the_error_of_a_worker_is_reported() -> None:
    with (
        pytest.raises(RuntimeError, match="no such queue"),
        Notes.on(1) as notes,
        running_workers(Failing(""), None, notes, drain=True),
    ):
        pass


def test_a_process_that_takes_too_long_is_ended() -> None:
    with pytest.raises(RuntimeError, match="too long"):
        run_processes(sleep, 1, None, limit_sec=0.0)


@pytest.mark.parametrize("runs", [(0, 1), (0, 1, 1, 2)])
def test_a_task_that_is_missing_or_ran_twice_is_an_error(runs: tuple[int, ...]) -> None:
    with Notes.on(3) as notes:
        for number in runs:
            notes.start(number)
        with pytest.raises(RuntimeError, match="missing or ran twice"):
            notes.span_sec()


def test_the_span_ends_with_the_last_acknowledgement_of_any_process() -> None:
    with Notes.on(2) as notes:
        notes.start(1)
        notes.start(0)
        started = notes.span_sec()
        other = Notes(notes.path, process=1)
        other.acknowledge()
        other.settle(2)
        other.close()
        assert notes.span_sec() > started
        assert notes.settled() == 2


# The figures


def test_ratios_are_those_of_microqueue_to_each_peer(peers: dict[str, Peer]) -> None:
    measured = [peers[name] for name in ON_MONGODB]
    rates = {
        2000: {
            Microqueue.name: Rates([10.0], [40.0, 10.0, 20.0]),
            AsyncMicroqueue.name: Rates([10.0], [15.0]),
            BareCeiling.name: Rates([10.0], [25.0]),
            NaiveLoop.name: Rates([10.0], [5.0]),
        }
    }
    waits = {peer.name: [2.0, 4.0] for peer in measured}
    found = {one.peer: one for one in report.figures(measured, rates, waits)[:4]}
    sync, other, naive = found[Microqueue.name], found[AsyncMicroqueue.name], found[NaiveLoop.name]
    assert (sync.value, sync.low, sync.high) == (20, 10, 40)
    assert (sync.sync_ratio, sync.async_ratio, sync.met) == (None, 0.75, False)
    assert other.sync_ratio == pytest.approx(20 / 15)
    assert (found[BareCeiling.name].sync_ratio, found[BareCeiling.name].met) == (0.8, True)
    assert (naive.sync_ratio, naive.async_ratio, naive.tasks) == (4, 3, NaiveLoop.max_tasks)


def test_a_missing_peer_is_named_with_the_way_to_install_it(
    peers: dict[str, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "installed_version", lambda name: None if name == "huey" else "1")
    monkeypatch.setattr(brokers, "installed_version", lambda _: "1")
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(postgresql, "DEBIAN", Path("nowhere"))
    assert [kind.name for kind in roster.kinds()] == list(ON_MONGODB)
    lines = roster.describe(peers[Microqueue.name].server)
    for name, lacks in {"huey": "huey", "Celery": "redis-server", "pgqueuer": "PostgreSQL"}.items():
        assert any(
            line.startswith(f"{name} is not measured") and lacks in line and brokers.INSTALL in line
            for line in lines
        )
