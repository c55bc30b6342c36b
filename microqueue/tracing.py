"""OpenTelemetry spans that link handlers to producers (extra ``tracing``).

    with producer_span(queue) as headers:
        queue.enqueue({"to": "a@b.c"}, headers=headers)

    Worker(queue, handler, hooks=[TracingHooks()])

The task's headers carry the context, as W3C ``traceparent`` unless the application sets another
propagator. Only the OpenTelemetry API is used: without an SDK, spans do nothing. Attributes follow
the semantic conventions for messaging.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

try:
    from opentelemetry import context, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
except ImportError as exc:
    raise ImportError(
        "microqueue.tracing needs opentelemetry-api: pip install 'microqueue[tracing]'"
    ) from exc

from microqueue.async_queue import AsyncQueue
from microqueue.hooks import Hooks
from microqueue.operations.filters import claim_of
from microqueue.queue import Queue
from microqueue.task import Outcome, Task
from microqueue.worker.outcomes import LEASE_LOST, redelivery_outcome

SYSTEM = "microqueue"


def inject(headers: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return headers for ``enqueue(headers=...)`` with the context of the current span.

    Args:
        headers: Other headers to include.
    """
    carrier = dict(headers or {})
    propagate.inject(carrier)
    return carrier


@contextmanager
def producer_span(
    queue: Queue[Any] | AsyncQueue[Any],
    *,
    headers: Mapping[str, Any] | None = None,
    tracer_provider: TracerProvider | None = None,
) -> Iterator[dict[str, Any]]:
    """Open a span around ``enqueue``, and yield the headers to enqueue with.

    An exception in the block is recorded in the span.

    Args:
        queue: The queue, synchronous or asynchronous.
        headers: Other headers to include.
        tracer_provider: The provider. Default: the global one.
    """
    tracer = trace.get_tracer(SYSTEM, tracer_provider=tracer_provider)
    attributes = {
        "messaging.system": SYSTEM,
        "messaging.destination.name": queue.name,
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "send",
    }
    with tracer.start_as_current_span(
        f"enqueue {queue.name}", kind=SpanKind.PRODUCER, attributes=attributes
    ):
        yield inject(headers)


class TracingHooks(Hooks):
    """Opens a span around each handler run. Several workers may share one instance.

    The span starts a new trace with a link to the producer's span, because a task may wait for
    days and run several times. The handler inherits the producer's baggage.

    The span is current inside the handler, in threads and in coroutines, also where
    ``AsyncWorker`` runs a plain function. It ends when the outcome of the task is decided. After
    a timeout or a lost lease, that is before a handler in a thread returns. Until then the ended
    span stays current, and its late result is not recorded. If the worker notices a lost lease
    only when it writes the result, the span has already ended and does not change.

    Args:
        tracer_provider: The provider. Default: the global one.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer(SYSTEM, tracer_provider=tracer_provider)
        self._running: dict[Any, tuple[Span, Context, Any]] = {}

    def on_start(self, task: Task[Any]) -> None:
        """Open the span, and make it current."""
        # An empty context, because the span that started the worker is not the cause.
        carrier = {key: text for key, text in task.headers.items() if isinstance(text, str)}
        producer = propagate.extract(carrier, context=Context())
        origin = trace.get_current_span(producer).get_span_context()
        span = self._tracer.start_span(
            f"process {task.queue}",
            context=Context(),
            kind=SpanKind.CONSUMER,
            attributes=describe(task),
            links=[Link(origin)] if origin.is_valid else [],
        )
        inside = trace.set_span_in_context(span, producer)
        self._running[claim_of(task)] = span, inside, context.attach(inside)

    def on_success(self, task: Task[Any], *, took_sec: float) -> None:  # noqa: ARG002 (a span has its own duration)
        """End the span."""
        self._end(task, Outcome.DONE)

    def on_retry(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:  # noqa: ARG002 (as above)
        """End the span with the exception, unless it was a snooze."""
        outcome = redelivery_outcome(error)
        self._end(task, outcome, None if outcome.is_refunded else error)

    def on_failure(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:  # noqa: ARG002 (as above)
        """End the span with the exception."""
        self._end(task, Outcome.FAILED, error)

    def on_cancel(self, task: Task[Any]) -> None:
        """End the span of a cancelled task."""
        self._end(task, Outcome.CANCELLED)

    def on_lease_lost(self, task: Task[Any]) -> None:
        """End the span as an error if the handler is running."""
        self._end(task, LEASE_LOST)

    def on_release(self, task: Task[Any]) -> None:
        """End the span: the worker stopped before the handler finished."""
        self._end(task, Outcome.RELEASED)

    def _end(self, task: Task[Any], outcome: str, error: BaseException | None = None) -> None:
        running = self._running.pop(claim_of(task), None)
        if running is None:
            return  # It never ran, or its span has already ended.
        span, inside, token = running
        span.set_attribute("microqueue.outcome", str(outcome))
        if error is not None:
            span.record_exception(error)
            span.set_attribute("error.type", type(error).__qualname__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        elif outcome == LEASE_LOST:
            span.set_attribute("error.type", LEASE_LOST)
            span.set_status(Status(StatusCode.ERROR, "the lease was lost"))
        span.end()
        # In another thread or coroutine the token is invalid. There is no need to detach it:
        # the next handler in the handler's thread starts with its own context.
        if context.get_current() is inside:
            context.detach(token)


def describe(task: Task[Any]) -> dict[str, str | int]:
    """Return the attributes of a task's span."""
    attributes: dict[str, str | int] = {
        "messaging.system": SYSTEM,
        "messaging.destination.name": task.queue,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.message.id": str(task.id),
        "microqueue.attempt": task.attempts,
    }
    if task.lease is not None:
        attributes["messaging.client.id"] = task.lease.worker_id
    if name := task.name:
        attributes["microqueue.task"] = name
    return attributes
