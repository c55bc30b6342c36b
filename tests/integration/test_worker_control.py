"""Workers that are steered from elsewhere: paused, cancelled, asked for their progress, shared."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from pymongo import MongoClient

from microqueue import InvalidArgument, Outcome, Queue, QueueSettings, TaskStatus
from microqueue.core import QueueCore, core_of
from microqueue.drivers import change_stream
from microqueue.embedded import EmbeddedServer
from microqueue.metrics import PrometheusHooks
from microqueue.tracing import TracingHooks
from microqueue.worker import Hooks, Worker, fetcher, lease_renewal
from tests.integration.rig import Rig, stored
from tests.waiting import wait_for

QUIET_SEC = 1.0


@pytest.fixture(autouse=True)
def quick_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers read their change stream in short turns, as they end after one."""
    monkeypatch.setattr(change_stream, "AWAIT_SEC", 0.1)


@pytest.fixture(params=["threads", "pymongo_async"])
def rig(
    request: pytest.FixtureRequest, microqueue_server: EmbeddedServer, microqueue_database: Any
) -> Rig:
    return Rig(request.param, microqueue_server.uri, microqueue_database)


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers look after their handlers more often than once a second."""
    monkeypatch.setattr(lease_renewal, "CHECK_EVERY_SEC", 0.1)


@pytest.fixture
def elsewhere(microqueue_server: EmbeddedServer, microqueue_database: Any) -> Iterator[Queue[Any]]:
    """The same queue through another client, as on another machine."""
    with MongoClient[Any](microqueue_server.uri) as client:
        yield Queue(client[microqueue_database.name])


@contextmanager
def working(rig: Rig, handler: Callable[..., Any], **options: Any) -> Iterator[None]:
    """Run a worker until the test has seen enough of it."""
    thread = rig.start(handler, **options)
    try:
        yield
    finally:
        rig.stop(immediately=True)
        thread.join(30)
    assert not thread.is_alive()


def named(queue: Queue[Any], name: str) -> Queue[Any]:
    return Queue(core_of(queue).collections.database, name, settings=queue.settings)


def claimed_last(queue: Queue[Any]) -> Any:
    """Return when the latest claim was, by the server's clock."""
    started = {"queue": queue.name, "started_at": {"$type": "date"}}
    found = core_of(queue).collections.tasks.find_one(started, sort=[("started_at", -1)])
    return found["started_at"] if found else None


def is_quiet(queue: Queue[Any]) -> bool:
    """Return whether nothing was claimed for a while, although there is something."""
    last = claimed_last(queue)
    return queue.stats().ready > 0 and last < queue.now() - timedelta(seconds=QUIET_SEC)


# Pause and resume


@pytest.mark.parametrize(
    ("kind", "poll_sec"), [("threads", 0.3), ("threads", 60), ("pymongo_async", 60), ("motor", 60)]
)
def test_pause_and_resume_reach_a_busy_worker(
    kind: str,
    poll_sec: float,
    microqueue_server: EmbeddedServer,
    elsewhere: Queue[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "microqueue.worker")
    rig = Rig(kind, microqueue_server.uri, core_of(elsewhere).collections.database)
    rig.queue.enqueue_many([{}] * 4000)  # More than a worker could handle in the time given.
    handled = 0

    def handler(_payload: Any) -> None:
        nonlocal handled
        handled += 1
        time.sleep(0.01)

    with working(rig, handler, concurrency=1, prefetch=1, poll_interval=poll_sec):
        wait_for(lambda: handled > 3)
        pause = elsewhere.pause(reason="the bank is closed")
        wait_for(lambda: is_quiet(elsewhere), 25)
        assert claimed_last(elsewhere) - pause.paused_at < timedelta(seconds=20)
        before = handled
        assert elsewhere.resume() is True
        wait_for(lambda: handled > before + 3, 25)
    noted = [vars(one) for one in caplog.records if hasattr(one, "paused")]
    assert [(one["queue"], one["paused"]) for one in noted] == [
        ("default", True),
        ("default", False),
    ]


def test_pause_reaches_a_worker_that_sleeps_before_the_next_task(
    rig: Rig, elsewhere: Queue[Any]
) -> None:
    seen: list[Any] = []
    with working(rig, lambda payload: seen.append(payload["n"]), poll_interval=0.3):
        elsewhere.enqueue({"n": 1})
        enqueued = 1
        wait_for(lambda: seen == [1])
        elsewhere.pause()
        # Whoever looked a moment ago may still take tasks for a second, but no longer.
        deadline = time.monotonic() + 25
        while elsewhere.stats().ready == 0:
            assert time.monotonic() < deadline, "a paused queue is worked off"
            elsewhere.enqueue({"n": 2})
            enqueued += 1
            time.sleep(QUIET_SEC)
        elsewhere.resume()
        wait_for(lambda: elsewhere.stats().done == enqueued)


def wait_for_length(seen: list[Any], length: int) -> None:
    wait_for(lambda: len(seen) == length)


def test_pause_of_one_queue_leaves_the_other_alone(rig: Rig, elsewhere: Queue[Any]) -> None:
    one, other = named(elsewhere, "one"), named(elsewhere, "other")
    one.enqueue_many([{"queue": "one"}] * 5)
    one.pause()
    seen: list[str] = []
    with working(
        rig,
        lambda payload: seen.append(payload["queue"]),
        names=("one", "other"),
        poll_interval=0.3,
    ):
        for number in range(1, 4):
            other.enqueue({"queue": "other"})
            wait_for_length(seen, number)
        assert seen == ["other"] * 3
        one.resume()
        wait_for(lambda: seen.count("one") == 5)


def test_pause_holds_in_a_worker_of_two_collections(
    microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls: list[str] = []
    poll = QueueCore.poll

    def counted(core: Any, names: Any) -> Any:
        polls.append(core.namespace)
        return poll(core, names)

    def await_polls(times: int) -> None:
        """Wait until the worker has polled both collections."""
        begun = len(polls)
        wait_for(lambda: min(Counter(polls[begun:]).values(), default=0) > times)
        assert len(set(polls[begun:])) == 2

    monkeypatch.setattr(QueueCore, "poll", counted)
    open_queue: Queue[Any] = Queue(microqueue_database.first, "open")
    paused: Queue[Any] = Queue(microqueue_database.second, "paused")
    same_name: Queue[Any] = Queue(microqueue_database.second, "open")
    paused.pause()
    paused.enqueue({})
    seen: list[Any] = []
    worker = Worker([open_queue, paused, same_name], seen.append, poll_interval=0.1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        for count in range(1, 6):
            open_queue.enqueue({"in": "open"})
            wait_for_length(seen, count)
            await_polls(1)
        assert seen == [{"in": "open"}] * 5
        open_queue.pause()  # Not the one of the same name in the other collection.
        wait_for(lambda: open_queue.paused() is not None)
        same_name.enqueue({"in": "same name"})
        wait_for(lambda: {"in": "same name"} in seen)
        await_polls(3)  # All that its first collection holds is paused now.
        assert paused.stats().ready == 1
    finally:
        worker.stop()
        thread.join(30)


def test_burst_ends_at_a_paused_queue_and_leaves_its_tasks(rig: Rig, elsewhere: Queue[Any]) -> None:
    one, other = named(elsewhere, "one"), named(elsewhere, "other")
    one.enqueue_many([{}] * 3)
    other.enqueue_many([{}] * 4)
    one.pause()
    assert rig.run(lambda _payload: None, names=("one",)) == 0
    assert rig.run(lambda _payload: None, names=("one", "other")) == 4
    assert (one.stats().ready, other.stats().done) == (3, 4)
    assert {task.attempts for task in one.peek()} == {0}
    one.resume()
    assert rig.run(lambda _payload: None, names=("one", "other")) == 3


def test_pause_reaches_what_a_worker_has_claimed_and_not_started(
    rig: Rig, elsewhere: Queue[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "microqueue.worker")
    rig.queue.enqueue_many([{}] * 2000)  # They would take twenty seconds.
    handled = 0

    def handler(_payload: Any) -> None:
        nonlocal handled
        handled += 1
        time.sleep(0.01)

    with working(rig, handler, concurrency=1, poll_interval=60):
        wait_for(lambda: handled > 3)
        wait_for(lambda: elsewhere.stats().processing > 2)  # One runs, the others wait.
        elsewhere.pause()
        # From then on it claims no more.
        wait_for(lambda: any(hasattr(one, "paused") for one in caplog.records))
        wait_for(lambda: elsewhere.stats().processing == 0)
        assert elsewhere.stats().ready == 2000 - handled > 100
        assert {task.attempts for task in elsewhere.peek(2000, status="pending")} == {0}
        elsewhere.resume()
        before = handled
        wait_for(lambda: handled > before + 3)


def test_what_has_waited_too_long_for_a_busy_worker_goes_to_others(
    rig: Rig, elsewhere: Queue[Any]
) -> None:
    rig.settings = QueueSettings(visibility_timeout=8)
    rig.queue.enqueue_many([{"n": n} for n in range(60)])
    busy, proceed = threading.Event(), threading.Event()

    def handler(payload: Any) -> None:
        if payload["n"] == 10:
            busy.set()
            proceed.wait(60)

    def gives_back() -> bool:
        """Return whether the worker has noticed that its handler is busy, and holds its task."""
        noticed = rig.worker._prefetch.blocked == 1  # noqa: SLF001 (from then on it claims no more)
        stats = elsewhere.stats()
        return noticed and (stats.ready, stats.processing) == (49, 1)

    with working(rig, handler, concurrency=1):
        assert busy.wait(30)
        wait_for(gives_back)  # A quarter of the lease, and a look.
        time.sleep(1.5)  # Nor are they claimed again, only to wait.
        assert (elsewhere.stats().ready, elsewhere.stats().processing) == (49, 1)
        for task in elsewhere.peek(60, status="pending"):
            assert (task.attempts, len(task.history) <= 2) == (0, True)
        proceed.set()
        wait_for(lambda: elsewhere.stats().done == 60)


# Cancel


class Recorder(Hooks):
    """Records its calls, and for which task."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_success(self, task: Any, *, took_sec: float) -> None:
        self.events.append(("success", task.id))

    def on_retry(self, task: Any, error: BaseException, *, took_sec: float) -> None:
        self.events.append(("retry", task.id))

    def on_failure(self, task: Any, error: BaseException, *, took_sec: float) -> None:
        self.events.append(("failure", task.id))

    def on_cancel(self, task: Any) -> None:
        self.events.append(("cancel", task.id))

    def on_lease_lost(self, task: Any) -> None:
        self.events.append(("lost", task.id))


class Call:
    """A handler that runs until it is stopped, and how it noticed."""

    def __init__(self, kind: str) -> None:
        self.running, self.told, self.proceed = (threading.Event() for _ in range(3))
        self.seen: list[Any] = []
        self.handler = self._coroutine if kind == "coroutine" else self._function

    def _function(self, payload: Any, context: Any) -> Any:
        self.seen.append(payload)
        if payload.get("long"):
            self.running.set()
            while not context.cancelled:
                time.sleep(0.01)
            self.told.set()
            self.proceed.wait(30)
        return "too late"

    async def _coroutine(self, payload: Any, context: Any) -> Any:
        self.seen.append(payload)
        if payload.get("long"):
            self.running.set()
            try:
                await asyncio.sleep(120)
            except asyncio.CancelledError:
                assert context.cancelled
                self.told.set()
            await asyncio.to_thread(self.proceed.wait, 30)  # It insists on giving a result.
        return "too late"


CANCELLABLE = [
    ("threads", "function", "status"),
    ("threads", "function", "collection"),
    ("pymongo_async", "function", "status"),
    ("pymongo_async", "coroutine", "collection"),
    ("motor", "coroutine", "status"),
]


@pytest.mark.parametrize(("kind", "handler", "place"), CANCELLABLE)
def test_cancel_from_another_client_reaches_a_running_handler(
    kind: str,
    handler: str,
    place: Any,
    microqueue_server: EmbeddedServer,
    elsewhere: Queue[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(kind, microqueue_server.uri, core_of(elsewhere).collections.database)
    rig.settings = QueueSettings(dead_letters=place)
    caplog.set_level("INFO", "microqueue.worker")
    call, recorder = Call(handler), Recorder()
    task = rig.queue.enqueue({"long": True})
    with working(rig, call.handler, hooks=[recorder], concurrency=1, keep_result=True):
        assert call.running.wait(30)
        cancelled = rig.queue.cancel(task.id)
        assert cancelled.error is not None
        assert (cancelled.status, cancelled.error.code) == (TaskStatus.FAILED, "cancelled")
        assert call.told.wait(30)  # Its lease, of ten minutes, had not run out.
        # The worker sets the flag; another thread logs it afterwards, and calls the hook last.
        wait_for(lambda: recorder.events)
        call.proceed.set()
        following = rig.queue.enqueue({})
        wait_for(lambda: stored(rig, following).status is TaskStatus.DONE)
    found = stored(rig, task)
    assert (found.status, found.error.code, found.result) == ("failed", "cancelled", None)
    assert [entry.outcome for entry in found.history] == [Outcome.CANCELLED]
    assert recorder.events == [("cancel", task.id), ("success", following.id)]
    about = [one for one in caplog.records if vars(one).get("task_id") == str(task.id)]
    assert [record.levelname for record in about] == ["INFO", "INFO"]
    assert [getattr(record, "cancelled", False) for record in about] == [True, False]
    assert [getattr(record, "discarded", False) for record in about] == [False, True]


def test_others_run_on_when_one_is_cancelled(
    rig: Rig, elsewhere: Queue[Any], quick_looks: None
) -> None:
    tasks = rig.queue.enqueue_many([{"n": n} for n in range(3)]).tasks
    running: set[int] = set()
    told: list[int] = []
    proceed = threading.Event()

    def handler(payload: Any, context: Any) -> None:
        running.add(payload["n"])
        while not (context.cancelled or proceed.is_set()):
            time.sleep(0.01)
        if context.cancelled:
            told.append(payload["n"])

    with working(rig, handler, concurrency=3):
        wait_for(lambda: len(running) == 3)
        elsewhere.cancel(tasks[1].id)
        wait_for(lambda: told)
        proceed.set()
        wait_for(lambda: elsewhere.stats().done == 2)
    assert told == [1]


def test_task_that_is_cancelled_while_it_waits_in_a_worker_is_not_recorded_as_done(
    rig: Rig, elsewhere: Queue[Any]
) -> None:
    first, waiting = rig.queue.enqueue_many([{"n": 1}, {"n": 2}]).tasks
    running, proceed = threading.Event(), threading.Event()

    def handler(payload: Any) -> None:
        running.set()
        proceed.wait(30)

    with working(rig, handler, concurrency=1, prefetch=10):
        assert running.wait(30)
        wait_for(lambda: stored(rig, waiting).status is TaskStatus.PROCESSING)
        elsewhere.cancel(waiting.id)
        proceed.set()
        wait_for(lambda: stored(rig, first).status is TaskStatus.DONE)
        wait_for(lambda: not any(info.running for info in elsewhere.workers()))
    found = stored(rig, waiting)
    assert (found.status, found.error.code) == (TaskStatus.FAILED, "cancelled")
    assert len(found.history) == 1


def test_task_that_is_cancelled_while_it_waits_in_a_worker_is_not_started(
    rig: Rig, elsewhere: Queue[Any], quick_looks: None
) -> None:
    _, waiting = rig.queue.enqueue_many([{"n": 1}, {"n": 2}]).tasks
    proceed, recorder = threading.Event(), Recorder()
    seen: list[int] = []

    def handler(payload: Any) -> None:
        seen.append(payload["n"])
        proceed.wait(30)

    with working(rig, handler, hooks=[recorder], concurrency=1, prefetch=10):
        wait_for(lambda: stored(rig, waiting).status is TaskStatus.PROCESSING and seen)
        elsewhere.cancel(waiting.id)
        wait_for(lambda: recorder.events == [("cancel", waiting.id)])
        proceed.set()
        following = rig.queue.enqueue({"n": 3})
        wait_for(lambda: stored(rig, following).status is TaskStatus.DONE)
    assert seen == [1, 3]


# Progress


def test_progress_is_seen_by_another_client_while_the_handler_runs(
    rig: Rig, elsewhere: Queue[Any], quick_looks: None
) -> None:
    task = rig.queue.enqueue({})
    enough = threading.Event()

    def handler(_payload: Any, context: Any) -> None:
        context.progress(0.1)
        context.progress(0.4, "four of ten")
        wait_for(lambda: stored_progress(elsewhere, task) == (0.4, "four of ten"))
        context.progress(1, "all")
        wait_for(lambda: stored_progress(elsewhere, task) == (1.0, "all"))
        enough.set()

    assert rig.run(handler) == 1
    assert enough.is_set()
    assert stored(rig, task).status is TaskStatus.DONE


def stored_progress(queue: Queue[Any], task: Any) -> tuple[float, str | None] | None:
    found = queue.get(task.id)
    assert found is not None
    assert found.status is TaskStatus.PROCESSING
    progress = found.progress
    return (progress.fraction, progress.message) if progress else None


MEANINGLESS: dict[str, tuple[Any, ...]] = {
    "fraction=1.01": (1.01,),
    "fraction=-0.1": (-0.1, "below"),
    "fraction=nan": (float("nan"),),
    "fraction='half'": ("half",),
    "fraction=None": (None,),
    "message=7": (0.5, 7),
}


def test_progress_that_means_nothing_is_rejected(microqueue_queue: Queue[Any]) -> None:
    task = microqueue_queue.enqueue({})
    refused: dict[str, str] = {}

    def handler(_payload: Any, context: Any) -> None:
        for says, arguments in MEANINGLESS.items():
            with pytest.raises(InvalidArgument) as caught:
                context.progress(*arguments)
            refused[says] = str(caught.value)

    assert Worker(microqueue_queue, handler).run(burst=True) == 1
    assert refused.keys() == MEANINGLESS.keys()
    assert all(says in text for says, text in refused.items())
    found = microqueue_queue.get(task.id)
    assert found is not None
    assert (found.status, found.progress) == (TaskStatus.DONE, None)


# Several queues


def fill(rig: Rig, **counts: int) -> None:
    for name, count in counts.items():
        named(rig.queue, name).enqueue_many([{"queue": name}] * count)


class Draws(random.Random):
    """Draws the same queues however often a worker polls in between, as each poll draws a wait."""

    def uniform(self, a: float, b: float) -> float:
        return b


@pytest.mark.parametrize("options", [{"prefetch": 1}, {"prefetch": 20}], ids=repr)
def test_full_queues_are_shared_by_weight(
    rig: Rig, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "_random", Draws(1))
    fill(rig, a=120, b=120)
    seen: list[str] = []
    enough = threading.Event()

    def handler(payload: Any) -> None:
        seen.append(payload["queue"])
        if len(seen) >= 100:
            enough.set()

    weights = {"a": 3, "b": 1}
    with working(rig, handler, names=("b", "a"), weights=weights, concurrency=1, **options):
        assert enough.wait(60)
    assert 68 <= Counter(seen[:100])["a"] <= 82


def test_share_of_an_empty_queue_goes_to_the_others(rig: Rig) -> None:
    fill(rig, b=60)
    seen: list[str] = []
    handled = rig.run(
        lambda payload: seen.append(payload["queue"]),
        names=("a", "b"),
        weights={"a": 1000, "b": 1},
        concurrency=2,
        prefetch=10,
    )
    assert (handled, set(seen)) == (60, {"b"})
    claims = rig.database.tasks.distinct("history.lease_token")
    assert len(claims) <= 30  # Its own share alone would be one task at a time.


def test_without_weights_a_new_task_of_the_first_queue_goes_before_all_of_the_second(
    rig: Rig,
) -> None:
    fill(rig, high=2, low=5)
    high = named(rig.queue, "high")
    seen: list[str] = []

    def handler(payload: Any) -> None:
        seen.append(payload["queue"])
        if len(seen) == 4:
            high.enqueue({"queue": "high"})

    rig.run(handler, names=("high", "low"), concurrency=1, prefetch=1)
    assert seen == ["high", "high", "low", "low", "high", "low", "low", "low"]


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"a": 3}, "['a', 'b']"),
        ({"a": 3, "b": 1, "c": 1}, "['a', 'b']"),
        ({}, "['a', 'b']"),
        ({"a": 3, "b": 0}, "'b'"),
        ({"a": -1, "b": 1}, "'a'"),
        ({"a": float("nan"), "b": 1}, "'a'"),
        ({"a": 1, "b": float("inf")}, "'b'"),
        ({"a": "many", "b": 1}, "weights"),
        ([3, 1], "weights"),
    ],
    ids=repr,
)
def test_bad_weights_are_rejected_by_name(
    microqueue_database: Any, weights: Any, says: str
) -> None:
    queues: list[Queue[Any]] = [Queue(microqueue_database, name) for name in ("a", "b")]
    with pytest.raises(InvalidArgument) as caught:
        Worker(queues, print, weights=weights)
    assert str(caught.value.argument).partition(".")[0] == "weights"
    assert says in str(caught.value)


# Metrics and tracing


def test_metrics_and_spans_tell_of_a_cancelled_task(
    rig: Rig, elsewhere: Queue[Any], quick_looks: None
) -> None:
    registry, exporter, provider = CollectorRegistry(), InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    task = rig.queue.enqueue({})
    running, told = threading.Event(), threading.Event()

    def handler(_payload: Any, context: Any) -> None:
        running.set()
        while not context.cancelled:
            time.sleep(0.01)
        told.set()

    hooks = [PrometheusHooks(registry), TracingHooks(provider)]
    with working(rig, handler, hooks=hooks):
        assert running.wait(30)
        in_progress = {"queue": "default", "task": ""}
        assert registry.get_sample_value("microqueue_tasks_in_progress", in_progress) == 1
        elsewhere.cancel(task.id)
        assert told.wait(30)
        wait_for(exporter.get_finished_spans)
    cancelled = {**in_progress, "outcome": "cancelled"}
    assert registry.get_sample_value("microqueue_tasks_total", cancelled) == 1
    assert registry.get_sample_value("microqueue_tasks_in_progress", in_progress) == 0
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["microqueue.outcome"] == "cancelled"
    assert span.attributes["messaging.message.id"] == str(task.id)
