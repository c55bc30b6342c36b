"""Metrics for Prometheus, read back as Prometheus would."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pymongo import AsyncMongoClient, MongoClient
from pymongo.monitoring import CommandListener

from microqueue import AsyncQueue, BackoffPolicy, InvalidArgument, Queue, QueueSettings, Sweeper
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.metrics import (
    PrometheusHooks,
    QueueCollector,
    ScheduleCollector,
    SweepMetrics,
)
from microqueue.testing import FakeClock
from microqueue.worker import AsyncWorker, Fail, Snooze, Tasks, Worker
from tests.rejection import rejecting
from tests.waiting import LEASE_SEC


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture(params=["threads", "asyncio"])
def run(
    request: pytest.FixtureRequest, microqueue_server: EmbeddedServer, microqueue_queue: Queue[Any]
) -> Callable[..., Any]:
    """Run a worker of either kind on the queue until nothing is ready."""

    def run_threads(handler: Any, **options: Any) -> None:
        Worker(microqueue_queue, handler, **options).run(burst=True)

    async def run_asyncio(handler: Any, **options: Any) -> None:
        async with AsyncMongoClient[Any](microqueue_server.uri) as client:
            database = client[core_of(microqueue_queue).collections.database.name]
            queue: AsyncQueue[Any] = AsyncQueue(
                database, settings=microqueue_queue.settings, clock=microqueue_queue.clock
            )
            await AsyncWorker(queue, handler, **options).run(burst=True)

    def run_loop(handler: Any, **options: Any) -> None:
        asyncio.run(run_asyncio(handler, **options))

    return run_threads if request.param == "threads" else run_loop


def scrape(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    """Read the samples of one name, by the values of their labels in the order of their names."""
    text = generate_latest(registry).decode()
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_tasks_are_counted_by_queue_name_and_outcome(
    run: Callable[..., Any], microqueue_queue: Queue[Any], registry: CollectorRegistry
) -> None:
    tasks = Tasks()

    @tasks.task(backoff=BackoffPolicy(base_sec=60, jitter="none"))
    def act(how: str) -> None:
        if how == "raise":
            raise ValueError(how)
        if how == "fail":
            raise Fail(how)
        if how == "snooze":
            raise Snooze(60)

    for how in ("return", "return", "raise", "fail", "snooze"):
        act.enqueue(microqueue_queue, how)
    microqueue_queue.enqueue({})  # It has no name.
    run(tasks, hooks=[PrometheusHooks(registry)])
    assert scrape(registry, "microqueue_tasks_total") == {
        # Outcome, queue, task.
        ("done", "default", "act"): 2,
        ("retried", "default", "act"): 1,
        ("failed", "default", "act"): 1,
        ("snoozed", "default", "act"): 1,
        ("failed", "default", ""): 1,
    }
    assert scrape(registry, "microqueue_task_wait_seconds_count") == {
        ("default", "act"): 5, ("default", ""): 1,
    }  # fmt: skip
    assert scrape(registry, "microqueue_task_run_seconds_count") == {
        ("default", "act"): 5,
        ("default", ""): 1,
    }


def test_unregistered_names_are_no_labels(
    run: Callable[..., Any], microqueue_queue: Queue[Any], registry: CollectorRegistry
) -> None:
    tasks = Tasks()

    @tasks.task()
    def known() -> None:
        """Do nothing."""

    known.enqueue(microqueue_queue)
    for number in range(5):
        microqueue_queue.enqueue({}, headers={"task": f"stray-{number}"})
    run(tasks, hooks=[PrometheusHooks(registry)])
    assert scrape(registry, "microqueue_tasks_total") == {
        ("done", "default", "known"): 1,
        ("retried", "default", ""): 5,
    }


def test_header_of_a_plain_functions_task_is_no_label(
    run: Callable[..., Any], microqueue_queue: Queue[Any], registry: CollectorRegistry
) -> None:
    for number in range(5):
        microqueue_queue.enqueue({}, headers={"task": f"order-{number}"})
    run(lambda _payload: None, hooks=[PrometheusHooks(registry)])
    assert scrape(registry, "microqueue_tasks_total") == {("done", "default", ""): 5}
    assert scrape(registry, "microqueue_tasks_in_progress") == {("default", ""): 0}


def test_so_many_other_names_are_labels_as_was_asked_for(
    run: Callable[..., Any], microqueue_queue: Queue[Any], registry: CollectorRegistry
) -> None:
    for name in ("pay", "ship", "pay", "bill", "audit", None):
        microqueue_queue.enqueue({}, name=name)
    run(lambda _payload: None, hooks=[PrometheusHooks(registry, names=2)], concurrency=1)
    assert scrape(registry, "microqueue_tasks_total") == {
        ("done", "default", "pay"): 2,
        ("done", "default", "ship"): 1,
        ("done", "default", "other"): 2,
        ("done", "default", ""): 1,
    }


def test_collector_counts_tasks_by_name_up_to_so_many_names(
    microqueue_queue: Queue[Any], registry: CollectorRegistry
) -> None:
    registry.register(QueueCollector(microqueue_queue, cache=0, names=2))
    assert scrape(registry, "microqueue_name_tasks") == {}
    queue = microqueue_queue
    queue.enqueue_many([{}] * 3, name="pay", priority=9)
    for settle in (queue.mark_done, lambda task: queue.mark_failure(task, "no"), lambda task: task):
        task = queue.pop()
        assert task is not None
        assert task.name == "pay"
        settle(task)
    for name, number in (("pay", 1), ("ship", 2), ("bill", 1), ("audit", 1), (None, 1)):
        queue.enqueue_many([{}] * number, name=name)
    found = scrape(registry, "microqueue_name_tasks")
    statuses = ("waiting", "running", "done", "failed")
    assert {name: tuple(found[name, "default", one] for one in statuses)
            for name in ("pay", "ship", "other", "")} == {
        "pay": (1, 1, 1, 1),
        "ship": (2, 0, 0, 0),
        "other": (2, 0, 0, 0),
        "": (1, 0, 0, 0),
    }  # fmt: skip
    assert len(found) == 4 * len(statuses)


def test_metrics_by_name_are_read_on_request_only(
    microqueue_queue: Queue[Any], registry: CollectorRegistry
) -> None:
    microqueue_queue.enqueue({}, name="pay")
    registry.register(QueueCollector(microqueue_queue))
    assert scrape(registry, "microqueue_name_tasks") == {}
    for bad in (-1, 1.5, "many"):
        with pytest.raises(InvalidArgument):
            QueueCollector(microqueue_queue, names=bad)  # type: ignore[arg-type]  # That is the point.
        with pytest.raises(InvalidArgument):
            PrometheusHooks(registry, names=bad)  # type: ignore[arg-type]  # As above.


def test_worker_of_one_named_task_labels_it(
    run: Callable[..., Any], microqueue_queue: Queue[Any], registry: CollectorRegistry
) -> None:
    tasks = Tasks()

    @tasks.task()
    def alone() -> None:
        """Do nothing."""

    alone.enqueue(microqueue_queue)
    run(alone, hooks=[PrometheusHooks(registry)])
    assert scrape(registry, "microqueue_tasks_total") == {("done", "default", "alone"): 1}


def test_gauge_counts_running_handlers_and_returns_to_zero(
    run: Callable[..., Any], microqueue_queue: Queue[Any], registry: CollectorRegistry
) -> None:
    microqueue_queue.enqueue_many([{}] * 3)
    seen: list[Any] = []
    lock = threading.Lock()

    def handler(_payload: Any) -> None:
        with lock:
            seen.append(scrape(registry, "microqueue_tasks_in_progress")["default", ""])
        raise Fail("no")

    run(handler, hooks=[PrometheusHooks(registry)], concurrency=1)
    assert seen == [1, 1, 1]
    assert scrape(registry, "microqueue_tasks_in_progress") == {("default", ""): 0}


def test_run_time_is_that_of_the_handler(
    run: Callable[..., Any], microqueue_queue: Queue[Any], registry: CollectorRegistry
) -> None:
    microqueue_queue.enqueue({})
    run(lambda _payload: threading.Event().wait(0.2), hooks=[PrometheusHooks(registry)])
    (took_sec,) = scrape(registry, "microqueue_task_run_seconds_sum").values()
    assert 0.2 <= took_sec < 60


def test_wait_is_from_enqueue_to_the_first_claim_only(
    run: Callable[..., Any],
    microqueue_queue: Queue[Any],
    microqueue_clock: FakeClock,
    registry: CollectorRegistry,
) -> None:
    hooks = PrometheusHooks(registry)
    task = microqueue_queue.enqueue(
        {}, max_attempts=2, backoff=BackoffPolicy(base_sec=60, jitter="none")
    )

    def handler(_payload: Any) -> None:
        raise ValueError("no")

    for _ in range(2):
        microqueue_clock.advance(100)
        run(handler, hooks=[hooks])
    microqueue_queue.dead_letters.replay(task.id)
    microqueue_clock.advance(1000)
    run(handler, hooks=[hooks])
    assert scrape(registry, "microqueue_tasks_total")["retried", "default", ""] >= 1
    assert scrape(registry, "microqueue_task_wait_seconds_count") == {("default", ""): 1}
    assert scrape(registry, "microqueue_task_wait_seconds_sum") == {("default", ""): 100}


def test_lost_lease_is_counted_and_ends_the_run_of_its_handler(
    run: Callable[..., Any],
    microqueue_database: Any,
    microqueue_queue: Queue[Any],
    registry: CollectorRegistry,
) -> None:
    microqueue_queue.enqueue({}, visibility_timeout=LEASE_SEC)

    def handler(_payload: Any, context: Any) -> None:
        microqueue_database.tasks.update_one({}, {"$set": {"lease_token": "another"}})
        while not context.cancelled:
            threading.Event().wait(0.01)

    run(handler, hooks=[PrometheusHooks(registry)])
    assert scrape(registry, "microqueue_tasks_total") == {("lease_lost", "default", ""): 1}
    assert scrape(registry, "microqueue_tasks_in_progress") == {("default", ""): 0}


def test_lease_found_lost_only_when_settling_is_counted_beside_the_outcome(
    run: Callable[..., Any],
    microqueue_database: Any,
    microqueue_queue: Queue[Any],
    registry: CollectorRegistry,
) -> None:
    microqueue_queue.enqueue({})

    def handler(_payload: Any) -> None:
        microqueue_database.tasks.update_one({}, {"$set": {"lease_token": "another"}})

    run(handler, hooks=[PrometheusHooks(registry)])
    assert scrape(registry, "microqueue_tasks_total") == {
        ("done", "default", ""): 1,
        ("lease_lost", "default", ""): 1,
    }
    assert scrape(registry, "microqueue_tasks_in_progress") == {("default", ""): 0}


def test_released_task_is_counted_only_if_its_handler_ran(
    microqueue_queue: Queue[Any], registry: CollectorRegistry
) -> None:
    hooks = PrometheusHooks(registry)
    microqueue_queue.enqueue_many([{}] * 2)
    started, waiting = microqueue_queue.pop_many(2)
    hooks.on_start(started)
    hooks.on_release(started)
    hooks.on_release(waiting)
    assert scrape(registry, "microqueue_tasks_total") == {("released", "default", ""): 1}
    assert scrape(registry, "microqueue_tasks_in_progress") == {("default", ""): 0}


# Queues


def test_collector_reports_depth_by_status_and_age_of_each_queue(
    microqueue_database: Any, microqueue_clock: FakeClock, registry: CollectorRegistry
) -> None:
    settings = QueueSettings(visibility_timeout=10)
    first, second = (
        Queue[Any](microqueue_database, name, clock=microqueue_clock, settings=settings)
        for name in ("first", "second")
    )
    first.enqueue_many([{}] * 6)
    first.enqueue({}, delay=600)
    done, failed, _held = first.pop_many(3)
    first.mark_done(done)
    first.mark_failure(failed, "no")
    microqueue_clock.advance(42)
    registry.register(QueueCollector(first, second))
    depth = scrape(registry, "microqueue_queue_depth")
    assert {status: depth["first", status] for _, status in depth} == {
        "ready": 3, "delayed": 1, "processing": 1, "done": 1, "failed": 1,
    }  # fmt: skip
    assert {value for (queue, _), value in depth.items() if queue == "second"} == {0}
    assert scrape(registry, "microqueue_queue_oldest_ready_seconds") == {
        ("first",): 42, ("second",): 0,
    }  # fmt: skip
    assert scrape(registry, "microqueue_queue_overdue") == {("first",): 1, ("second",): 0}


def test_queues_of_one_collection_are_read_together(
    microqueue_server: EmbeddedServer, microqueue_database: Any, registry: CollectorRegistry
) -> None:
    commands = Commands()
    with MongoClient[Any](microqueue_server.uri, event_listeners=[commands]) as client:
        database = client[microqueue_database.name]
        queues = [Queue[Any](database, f"q{n}") for n in range(10)]
        for queue in queues:
            queue.enqueue({})
        queues.append(Queue(database.elsewhere, "q0"))
        registry.register(QueueCollector(*queues[:-1]))
        scrape(registry, "microqueue_queue_depth")  # The clock is read.
        queues[-1].now()  # Its collection is opened.
        commands.count = 0
        collector = QueueCollector(*queues)
        depth, overdue, _oldest, _estimated = collector.collect()
        assert commands.count <= 2 * 6
    ready = [one.value for one in depth.samples if one.labels["status"] == "ready"]
    assert ready == [1] * 10 + [0]
    assert len(overdue.samples) == 11


def test_collector_reads_schedules(
    microqueue_queue: Queue[Any], microqueue_clock: FakeClock, registry: CollectorRegistry
) -> None:
    queue = microqueue_queue
    registry.register(ScheduleCollector(queue, cache=0))
    assert scrape(registry, "microqueue_schedules") == {}
    queue.schedules.put("fired", every=60)
    queue.schedules.put("due", every=62)
    queue.schedules.put("paused", every=60, paused=True)
    microqueue_clock.advance(61.5)
    sweeper = Sweeper(queue)
    assert sweeper.fire_schedules() == 1
    microqueue_clock.advance(10)
    assert scrape(registry, "microqueue_schedules") == {
        ("default", "active"): 2, ("default", "paused"): 1,
    }  # fmt: skip
    runs = scrape(registry, "microqueue_schedule_runs_total")
    assert runs == {("default", "fired"): 1, ("default", "due"): 0, ("default", "paused"): 0}
    (late,) = scrape(registry, "microqueue_schedule_late_seconds").items()
    assert late[0] == ("default", "fired")
    assert 0.5 <= late[1] <= 1.5
    overdue = scrape(registry, "microqueue_schedule_overdue_seconds")
    assert overdue["default", "fired"] == 0
    assert 8.5 <= overdue["default", "due"] <= 9.5
    assert len(overdue) == 2
    upcoming = scrape(registry, "microqueue_schedule_next_run_timestamp_seconds")
    found = queue.schedules.get("fired")
    assert found is not None
    assert found.next_at is not None
    assert upcoming["default", "fired"] == found.next_at.timestamp()
    assert ("default", "paused") not in upcoming
    queue.schedules.trigger("fired")
    assert scrape(registry, "microqueue_schedule_runs_total")["default", "fired"] == 2
    assert scrape(registry, "microqueue_schedule_late_seconds") == {}


def test_schedules_of_an_unavailable_server_do_not_affect_other_metrics(
    registry: CollectorRegistry,
) -> None:
    with MongoClient[Any]("mongodb://localhost:1", serverSelectionTimeoutMS=50) as client:
        settings = QueueSettings(retry_deadline=0)
        registry.register(ScheduleCollector(Queue(client.nowhere, settings=settings)))
        assert scrape(registry, "microqueue_schedules") == {}
    with pytest.raises(InvalidArgument):
        ScheduleCollector(object())  # type: ignore[arg-type]


class Commands(CommandListener):
    """Counts the commands that a client sends."""

    count = 0

    def started(self, event: Any) -> None:
        # On a slow machine, a ping checks a connection that was idle for some time.
        self.count += event.command_name != "ping"

    def succeeded(self, event: Any) -> None: ...

    def failed(self, event: Any) -> None: ...


@pytest.mark.parametrize(("cache", "seen"), [(0, 1), (600, 0)])
def test_collector_reads_again_when_its_cache_is_too_old(
    microqueue_queue: Queue[Any], registry: CollectorRegistry, cache: float, seen: int
) -> None:
    registry.register(QueueCollector(microqueue_queue, cache=cache))
    assert scrape(registry, "microqueue_queue_depth")["default", "ready"] == 0
    microqueue_queue.enqueue({})
    assert scrape(registry, "microqueue_queue_depth")["default", "ready"] == seen


def test_queue_whose_server_is_unavailable_does_not_affect_other_metrics(
    microqueue_queue: Queue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry(auto_describe=True)  # As the default one is.
    with MongoClient[Any]("mongodb://127.0.0.1:1", serverSelectionTimeoutMS=100) as client:
        away: Queue[Any] = Queue(client.test, "away", settings=QueueSettings(retry_deadline=0.1))
        registry.register(QueueCollector(away, microqueue_queue))
        assert not caplog.records  # Registering sends nothing to a server.
        assert {queue for queue, _ in scrape(registry, "microqueue_queue_depth")} == {"default"}
    [warning] = [one for one in caplog.records if one.name == "microqueue.metrics"]
    assert (warning.levelname, vars(warning)["queue"]) == ("WARNING", "away")


def test_collector_rejects_an_async_queue(
    microqueue_server: EmbeddedServer,
) -> None:
    queue: Any = AsyncQueue(AsyncMongoClient[Any](microqueue_server.uri, connect=False).test)
    with rejecting("queue", queue):
        QueueCollector(queue)


# Sweeps


def test_sweeps_are_counted_by_action(
    microqueue_queue: Queue[Any], microqueue_clock: FakeClock, registry: CollectorRegistry
) -> None:
    sweeper = Sweeper(microqueue_queue, on_report=SweepMetrics(registry))
    microqueue_queue.enqueue({}, delay=5)
    microqueue_queue.enqueue({}, expires_in=5)
    microqueue_clock.advance(10)
    sweeper.run_once()
    sweeper.run_once()
    swept = scrape(registry, "microqueue_swept_tasks_total")
    assert {action: count for (action,), count in swept.items() if count} == {
        "promoted": 1, "expired": 1,
    }  # fmt: skip
    assert scrape(registry, "microqueue_sweeps_total") == {("ok",): 2}
    assert scrape(registry, "microqueue_sweep_seconds_count") == {(): 2}


def test_failed_and_skipped_sweeps_are_counted_separately(
    microqueue_queue: Queue[Any], microqueue_database: Any, registry: CollectorRegistry
) -> None:
    metrics = SweepMetrics(registry)
    report = Sweeper(microqueue_queue).run_once()
    metrics(report.model_copy(update={"errors": {"promote_due": "no"}}))
    metrics(report.model_copy(update={"skipped": True}))
    assert scrape(registry, "microqueue_sweeps_total") == {("failed",): 1, ("skipped",): 1}
    assert scrape(registry, "microqueue_sweep_errors_total") == {("promote_due",): 1}
    assert scrape(registry, "microqueue_sweep_seconds_count") == {(): 1}


@pytest.mark.parametrize(
    ("module", "library"),
    [("microqueue.metrics", "prometheus_client"), ("microqueue.tracing", "opentelemetry")],
)
def test_missing_extra_is_named_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, module: str, library: str
) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == library:
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=rf"pip install 'microqueue\[{module[11:]}\]'"):
        importlib.import_module(module)
