"""Spans for OpenTelemetry, collected by its SDK."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from pymongo import AsyncMongoClient

from microqueue import AsyncQueue, BackoffPolicy, Hooks, Queue, Task
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.tracing import TracingHooks, inject, producer_span
from microqueue.worker import AsyncWorker, Fail, Snooze, Tasks, Worker
from tests.waiting import LEASE_SEC

KINDS = ["threads", "functions in asyncio", "coroutines"]


class Decided(Hooks):
    """Knows whether a task was retried or its lease lost, and so its span has ended."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def on_retry(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:
        self.event.set()

    def on_lease_lost(self, task: Task[Any]) -> None:
        self.event.set()


class Rig:
    """A provider whose spans are seen, and a worker of one kind."""

    def __init__(self, kind: str, uri: str, queue: Queue[Any]) -> None:
        self.kind = kind
        self.queue = queue
        self._uri = uri
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("tests")
        self.hooks = TracingHooks(self.provider)
        self.decided = Decided()

    def spans(self, kind: SpanKind) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.kind is kind]

    def consumer(self) -> ReadableSpan:
        (span,) = self.spans(SpanKind.CONSUMER)
        return span

    def run(self, handler: Callable[[Any], Any], **options: Any) -> None:
        """Call the handler, and outlast the outcome of the task if the payload says so."""

        def function(payload: Any) -> None:
            handler(payload)
            if payload.get("outlasts"):
                self.decided.event.wait(60)

        async def coroutine(payload: Any) -> None:
            handler(payload)
            if payload.get("outlasts"):
                await asyncio.sleep(60)  # It is cancelled.

        if self.kind == "threads":
            hooks = [self.hooks, self.decided]
            Worker(self.queue, function, hooks=hooks, **options).run(burst=True)
        else:
            chosen = coroutine if self.kind == "coroutines" else function
            asyncio.run(self._run(chosen, **options))

    async def _run(self, handler: Any, **options: Any) -> None:
        async with AsyncMongoClient[Any](self._uri) as client:
            database = client[core_of(self.queue).collections.database.name]
            queue: AsyncQueue[Any] = AsyncQueue(database, clock=self.queue.clock)
            hooks = [self.hooks, self.decided]
            await AsyncWorker(queue, handler, hooks=hooks, **options).run(burst=True)


@pytest.fixture(params=KINDS)
def rig(
    request: pytest.FixtureRequest, microqueue_server: EmbeddedServer, microqueue_queue: Queue[Any]
) -> Rig:
    return Rig(request.param, microqueue_server.uri, microqueue_queue)


@pytest.fixture
def errors_of_opentelemetry(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("opentelemetry") or "hook" in record.getMessage()
    ]


def test_handler_span_is_linked_to_the_producer_span_and_described(rig: Rig) -> None:
    with producer_span(rig.queue, headers={"mine": 1}, tracer_provider=rig.provider) as headers:
        task = rig.queue.enqueue({}, headers=headers)
    assert headers["mine"] == 1
    rig.run(lambda _payload: None, worker_id="w1")
    (produced,) = rig.spans(SpanKind.PRODUCER)
    consumed = rig.consumer()
    assert produced.name == "enqueue default"
    assert dict(produced.attributes or {}) == {
        "messaging.system": "microqueue",
        "messaging.destination.name": "default",
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "send",
    }
    assert consumed.name == "process default"
    assert dict(consumed.attributes or {}) == {
        "messaging.system": "microqueue",
        "messaging.destination.name": "default",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.message.id": str(task.id),
        "messaging.client.id": "w1",
        "microqueue.attempt": 1,
        "microqueue.outcome": "done",
    }
    (link,) = consumed.links
    assert link.context.span_id == produced.get_span_context().span_id  # type: ignore[union-attr]  # Spans of the SDK have one.
    assert link.context.trace_id == produced.get_span_context().trace_id  # type: ignore[union-attr]  # Spans of the SDK have one.
    assert consumed.parent is None
    assert consumed.status.status_code is StatusCode.UNSET


def test_named_task_carries_its_name_and_the_context(rig: Rig) -> None:
    tasks = Tasks()

    @tasks.task("send_email")
    def send(to: str) -> None:
        """Do nothing."""

    with rig.tracer.start_as_current_span("web request") as request:
        send.options(headers=inject()).enqueue(rig.queue, "a")
    Worker(rig.queue, tasks, hooks=[rig.hooks]).run(burst=True)
    span = rig.consumer()
    assert (span.attributes or {})["microqueue.task"] == "send_email"
    assert span.links[0].context.span_id == request.get_span_context().span_id


def test_span_and_baggage_are_current_inside_the_handler_and_nowhere_after(
    rig: Rig, errors_of_opentelemetry: Callable[[], list[str]]
) -> None:
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    rig.queue.enqueue({"n": 1}, headers=inject())
    context.detach(token)
    rig.queue.enqueue({"n": 2})
    seen: list[Any] = []

    def handler(_payload: Any) -> None:
        seen.append((trace.get_current_span().get_span_context().span_id, baggage.get_all()))
        with rig.tracer.start_as_current_span("inner"):
            pass

    rig.run(handler, concurrency=1)
    spans = rig.spans(SpanKind.CONSUMER)
    ids = [span.get_span_context().span_id for span in spans]  # type: ignore[union-attr]  # Spans of the SDK have one.
    assert seen == [(ids[0], {"tenant": "acme"}), (ids[1], {})]
    inner = rig.spans(SpanKind.INTERNAL)
    assert [span.parent.span_id for span in inner if span.parent] == ids
    assert not trace.get_current_span().get_span_context().is_valid
    assert errors_of_opentelemetry() == []


def test_span_that_starts_the_worker_is_not_the_parent(rig: Rig) -> None:
    rig.queue.enqueue({})
    with rig.tracer.start_as_current_span("main"):
        rig.run(lambda _payload: None)
    assert rig.consumer().parent is None


@pytest.mark.parametrize(
    ("error", "outcome", "status", "recorded"),
    [
        (ValueError("no"), "retried", StatusCode.ERROR, ["ValueError"]),
        (Fail("bad"), "failed", StatusCode.ERROR, ["Fail"]),
        (Snooze(60), "snoozed", StatusCode.UNSET, []),
    ],
)
def test_exception_and_outcome_are_recorded(
    rig: Rig, error: Exception, outcome: str, status: StatusCode, recorded: list[str]
) -> None:
    rig.queue.enqueue({}, backoff=BackoffPolicy(base_sec=60, jitter="none"))

    def handler(_payload: Any) -> None:
        raise error

    rig.run(handler)
    span = rig.consumer()
    attributes = span.attributes or {}
    assert (attributes["microqueue.outcome"], span.status.status_code) == (outcome, status)
    assert attributes.get("error.type") == (recorded[0] if recorded else None)
    types = [str((event.attributes or {})["exception.type"]) for event in span.events]
    assert [name.rpartition(".")[2] for name in types] == recorded


@pytest.mark.parametrize("provided", [True, False])
def test_timeout_ends_the_span_from_another_thread_and_does_not_affect_the_next(
    rig: Rig, errors_of_opentelemetry: Callable[[], list[str]], provided: bool
) -> None:
    if not provided:
        rig.hooks = TracingHooks()  # Without an SDK every span is the same.
    policy = BackoffPolicy(base_sec=60, jitter="none")
    rig.queue.enqueue_many([{"outlasts": True}, {}], backoff=policy)
    seen: list[Any] = []

    def handler(_payload: Any) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)

    rig.run(handler, concurrency=1, timeout=2)
    assert errors_of_opentelemetry() == []
    if provided:
        late, clean = rig.spans(SpanKind.CONSUMER)
        assert (late.attributes or {})["error.type"] == "TimeoutError"
        assert seen == [one.get_span_context().span_id for one in (late, clean)]  # type: ignore[union-attr]  # Spans of the SDK have one.
        assert clean.parent is None


def test_lost_lease_ends_the_span_as_an_error(
    rig: Rig, microqueue_database: Any, errors_of_opentelemetry: Callable[[], list[str]]
) -> None:
    rig.queue.enqueue({"outlasts": True}, visibility_timeout=LEASE_SEC)

    def handler(_payload: Any) -> None:
        microqueue_database.tasks.update_one({}, {"$set": {"lease_token": "another"}})

    rig.run(handler)
    span = rig.consumer()
    assert (span.attributes or {})["microqueue.outcome"] == "lease_lost"
    assert span.status.status_code is StatusCode.ERROR
    assert errors_of_opentelemetry() == []


def test_headers_without_context_make_a_span_without_a_link(
    rig: Rig, errors_of_opentelemetry: Callable[[], list[str]]
) -> None:
    rig.queue.enqueue({}, headers={"traceparent": 5, "tracestate": ["x"]})
    rig.queue.enqueue({}, headers={"traceparent": "garbage"})
    rig.run(lambda _payload: None)
    assert [list(span.links) for span in rig.spans(SpanKind.CONSUMER)] == [[], []]
    assert errors_of_opentelemetry() == []


def test_released_task_ends_its_span_without_an_error(rig: Rig) -> None:
    rig.queue.enqueue({})
    task = rig.queue.pop()
    assert task is not None
    rig.hooks.on_release(task)  # It has not started.
    rig.hooks.on_start(task)
    rig.hooks.on_release(task)
    assert (rig.consumer().attributes or {})["microqueue.outcome"] == "released"
    assert not trace.get_current_span().get_span_context().is_valid


def test_exception_while_enqueueing_is_recorded_in_the_producer_span(rig: Rig) -> None:
    with (
        pytest.raises(ValueError, match="priority"),
        producer_span(rig.queue, tracer_provider=rig.provider) as headers,
    ):
        rig.queue.enqueue({}, priority=-1, headers=headers)
    (span,) = rig.spans(SpanKind.PRODUCER)
    assert span.status.status_code is StatusCode.ERROR


def test_inject_does_not_change_its_argument(rig: Rig) -> None:
    given = {"mine": 1}
    with rig.tracer.start_as_current_span("x") as span:
        injected = inject(given)
    assert given == {"mine": 1}
    assert injected["mine"] == 1
    assert f"{span.get_span_context().trace_id:032x}" in injected["traceparent"]
