"""How many tasks a worker claims ahead of its handlers."""

from __future__ import annotations

from typing import Any

import mongomock
import pytest
from bson.codec_options import CodecOptions

from microqueue import Queue
from microqueue.core import core_of
from microqueue.worker.effects import RunOperation
from microqueue.worker.fetcher import Claimer
from microqueue.worker.in_flight import InFlight
from microqueue.worker.prefetch import PrefetchController

PLAIN = CodecOptions[dict[str, object]]()


@pytest.mark.parametrize(
    ("prefetch", "took_sec", "most"),
    [
        (1, 0.001, 4),  # Nothing beyond what runs.
        (500, None, 8),  # Without experience: one more for each.
        (500, 0.001, 504),
        (500, 0.25, 20),  # A second: four each, of a quarter.
        (500, 1.0, 8),
        (500, 1000.0, 4),
    ],
)
def test_the_prefetch_is_what_can_start_within_a_second(
    prefetch: int, took_sec: float | None, most: int
) -> None:
    controller = PrefetchController(concurrency=4, prefetch=prefetch, lease_sec=60)
    if took_sec is not None:
        for _ in range(250):
            controller.record_run(took_sec)
    assert controller.limit() == most


def test_the_prefetch_is_what_can_start_within_a_quarter_of_a_short_lease() -> None:
    controller = PrefetchController(concurrency=4, prefetch=500, lease_sec=2)
    for _ in range(250):
        controller.record_run(0.25)
    assert controller.limit() == 4 + 8


def test_one_fast_task_does_not_raise_the_prefetch_limit_far() -> None:
    controller = PrefetchController(concurrency=4, prefetch=500, lease_sec=600)
    controller.record_run(0.0001)
    assert controller.limit() == 4 + 2
    for _ in range(500):
        controller.record_run(0.0001)
    assert controller.limit() == 504
    for _ in range(4):
        controller.record_run(1.0)
    assert controller.limit() < 4 + 6


@pytest.mark.parametrize(("busy", "most"), [(0, 20), (1, 16), (4, 4)])
def test_blocked_handlers_lower_the_limit(busy: int, most: int) -> None:
    controller = PrefetchController(concurrency=4, prefetch=500, lease_sec=60)
    for _ in range(250):
        controller.record_run(0.25)
    controller.blocked = busy
    assert controller.limit() == most


@pytest.mark.parametrize(("size", "waiting"), [(250, 500), (1_000_000, 64), (15_000_000, 4)])
def test_no_more_wait_than_fit_in_memory(size: int, waiting: int) -> None:
    controller = PrefetchController(concurrency=4, prefetch=500, lease_sec=60)
    for _ in range(250):
        controller.record_run(0.001)
    controller.measure_size({"payload": b"x" * (size - 30)}, PLAIN)
    assert controller.limit() == 4 + waiting
    assert controller.max_in_memory >= waiting


def test_a_large_task_changes_the_limit_faster_than_a_small_one() -> None:
    controller = PrefetchController(concurrency=4, prefetch=500, lease_sec=60)
    controller.measure_size({"payload": b"x" * 10_000_000}, PLAIN)
    controller.measure_size({}, PLAIN)
    assert 6 < controller.max_in_memory < 7
    controller.measure_size({"payload": b"x" * 15_000_000}, PLAIN)
    assert controller.max_in_memory < 6


def test_task_of_unknown_size_changes_nothing() -> None:
    controller = PrefetchController(concurrency=4, prefetch=500, lease_sec=60)
    controller.measure_size({"payload": object()}, PLAIN)
    assert controller.max_in_memory == float("inf")


@pytest.mark.parametrize("sizes", [(100_000, 10, 10), (10, 10, 100_000), (100_000,)], ids=repr)
def test_a_claim_with_a_large_task_at_either_end_lowers_the_limit(sizes: tuple[int, ...]) -> None:
    queue = Queue[Any](mongomock.MongoClient().db)
    queue.enqueue_many([{"text": "x" * size} for size in sizes])
    core = core_of(queue)
    controller = PrefetchController(concurrency=1, prefetch=500, lease_sec=60)
    claimer = Claimer([core], worker_id="worker", in_flight=InFlight(), prefetch=controller)
    claiming = claimer.claim(core, 10)
    effect = next(claiming)
    assert isinstance(effect, RunOperation)
    with pytest.raises(StopIteration) as ended:
        claiming.send(core.run(effect.operation))
    assert len(ended.value.value) == len(sizes)
    # Half of the large size at least, and not twice the large one.
    largest = PrefetchController.MAX_BYTES / 100_000
    assert largest * 0.9 < controller.max_in_memory < largest * 2.1
