"""The benchmarks that show where the time goes: processor time, and the steps of a pick-up."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import anatomy, latency, processor, references
from benchmarks.__main__ import Drained, processor_times
from benchmarks.database import Database, fill
from benchmarks.processes import Start, run_processes
from microqueue.embedded import EmbeddedServer

BUSY_SEC = 0.2
HOT_POLL_PERIOD_SEC = 0.25
"""How long a worker looks for tasks itself after the last one, by default."""
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such clocks")


def be_busy(_database: None, start: Start) -> None:
    """Use the processor, but count only what comes after the start."""
    _use_processor()
    start()
    _use_processor()


def _use_processor() -> None:
    until = time.process_time() + BUSY_SEC
    while time.process_time() < until:
        pass


def test_the_processor_time_of_clients_is_added_up_from_the_start() -> None:
    run = run_processes(be_busy, 2, None)
    assert 2 * BUSY_SEC <= run.client_sec < 3 * BUSY_SEC
    assert run.server_sec is None


@linux
def test_the_processor_time_of_the_server_is_that_of_its_process(
    microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    pid = processor.server_pid(microqueue_server.uri)
    assert pid is not None
    before = processor.spent_sec(pid)
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    assert before == pytest.approx((int(user) + int(system)) / 100, abs=0.5)
    database = Database(microqueue_server.uri, microqueue_database.name)
    fill(database, 1000)
    references.copy_to_bare(database)
    run = run_processes(references.ceiling, 2, database, server_pid=pid)
    assert sum(run.results) == 1000
    assert run.server_sec is not None
    assert 0 < run.server_sec <= processor.spent_sec(pid) - before


def test_a_server_of_another_machine_or_name_has_no_processor_time(
    microqueue_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        assert processor.server_pid(microqueue_server.uri) is None
    monkeypatch.setattr(processor, "PROC", Path("nowhere"))
    assert processor.server_pid(microqueue_server.uri) is None


def test_processor_times_are_medians_and_left_out_if_unknown() -> None:
    ceiling = [Drained(1.0, 5.0, None)]
    found = processor_times("Worker", [Drained(1.0, value, None) for value in (9, 10, 99)], ceiling)
    assert [(one.name, one.value, one.ratio) for one in found] == [
        ("Worker, clients per task", 10, 2)
    ]


def test_each_build_of_the_anatomy_drains_its_tasks(microqueue_server: EmbeddedServer) -> None:
    found = anatomy.costs(microqueue_server.uri, 4)
    assert list(found) == [build.name for build in anatomy.builds()]
    for cost in found.values():
        assert cost.elapsed > 0
        assert (cost.server is not None) == (sys.platform == "linux")
        assert cost.server is None or cost.server > 0


@pytest.mark.parametrize("every_sec", [0.02, 0.5], ids=["warm", "cold"])
def test_the_steps_of_a_pick_up(
    every_sec: float, microqueue_server: EmbeddedServer, microqueue_database: Any
) -> None:
    database = Database(microqueue_server.uri, microqueue_database.name)
    steps = latency.measure_steps(database, count=4, every_sec=every_sec)
    assert min(steps.enqueue, steps.claim, steps.hand_over) > 0
    assert max(steps.until_claim, steps.claim, steps.hand_over) < steps.in_all
    if every_sec > HOT_POLL_PERIOD_SEC:
        assert steps.woken > 0
    assert (steps.wake_up is None) == (steps.woken == 0)
    assert steps.wake_up is None or 0 < steps.wake_up < steps.in_all
