"""The Celery worker around the transport, if this process is one. Celery need not be installed."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kombu import Message
from kombu.exceptions import KombuError

from microqueue.contrib.kombu.broker import Broker
from microqueue.contrib.kombu.messages import task_eta, task_field

MOST_LISTED = 1000
LARGEST_SHOWN = 100_000
"""Up to how many bytes a body is decoded for the list. The reply must fit into one message."""
TIMER_PRIORITY = 6
"""The priority that delayed tasks have in Celery's timer."""
COMMANDS = ("scheduled", "dump_schedule")
"""The name of the command behind ``celery inspect scheduled``, and its alias."""


def is_stopping() -> bool:
    """Return whether this process is a Celery worker that shuts down."""
    state = sys.modules.get("celery.worker.state")
    flags = () if state is None else (state.should_stop, state.should_terminate)
    return any(flag is not None and flag is not False for flag in flags)


_pools: list[Any] = []
"""The pool of this worker, when it is ready."""


def follow_pool() -> None:
    """Remember the pool of the worker, so that :func:`cancel_waiting` finds it."""
    signals = sys.modules.get("celery.signals")
    if signals is not None:
        signals.worker_ready.connect(_remember_pool, weak=False, dispatch_uid=__name__)


def _remember_pool(sender: Any, **_: Any) -> None:
    _pools[:] = [getattr(sender, "pool", None)]


def cancel_waiting() -> None:
    """Let the worker's threads start nothing more. What waited for one is not referred to any more.

    Celery does the same, but only after it has waited for what runs. A pool of processes is stopped
    before that, and other pools have no tasks that wait.
    """
    for pool in _pools:
        executor = getattr(pool, "executor", None)
        if isinstance(executor, ThreadPoolExecutor):
            executor.shutdown(wait=False, cancel_futures=True)


def list_delayed_messages() -> None:
    """Let ``celery inspect scheduled`` list the delayed messages in the database, too.

    Celery's own command lists those in the memory of the worker, where this transport has none.
    """
    control = sys.modules.get("celery.worker.control")
    if control is None:
        return
    handlers = control.Panel.data
    if not isinstance(handlers[COMMANDS[0]], _Scheduled):
        handlers.update(dict.fromkeys(COMMANDS, _Scheduled(handlers[COMMANDS[0]])))


class _Scheduled:
    """The command of a Celery worker. It calls Celery's own one first."""

    def __init__(self, in_memory: Any) -> None:
        self._in_memory = in_memory

    def __call__(self, state: Any, **arguments: Any) -> list[dict[str, Any]]:
        """Return the delayed tasks of the queues that the worker consumes, the next ones first."""
        found: list[dict[str, Any]] = self._in_memory(state, **arguments)
        consumer = state.consumer.task_consumer
        broker = getattr(getattr(consumer, "channel", None), "broker", None)
        if not isinstance(broker, Broker):
            return found  # The worker is reconnecting, or uses another transport.
        names = [queue.name for queue in consumer.queues]
        for raw in broker.delayed(names, limit=MOST_LISTED):
            message = consumer.channel.Message(raw, channel=consumer.channel)
            message.accept = consumer.accept
            found.append(_entry(message, raw, state.hostname))
        return found


def _entry(message: Message, raw: dict[str, Any], hostname: str) -> dict[str, Any]:
    """Return a delayed message as Celery describes it."""
    eta = task_eta(raw)
    name = task_field(raw, "task")
    arguments = _arguments(message)
    info = message.delivery_info or {}
    return {
        "eta": eta and eta.isoformat(),
        "priority": TIMER_PRIORITY,
        "request": {
            "id": task_field(raw, "id"),
            "name": task_field(raw, "shadow") or name,
            "args": arguments[0],
            "kwargs": arguments[1],
            "type": name,
            "hostname": hostname,
            "time_start": None,
            "acknowledged": False,
            "delivery_info": {
                "exchange": info.get("exchange"),
                "routing_key": info.get("routing_key"),
                "priority": message.properties.get("priority"),
                "redelivered": info.get("redelivered"),
            },
            "worker_pid": None,
        },
    }


def _arguments(message: Message) -> tuple[Any, Any]:
    """Return the arguments, or how the publisher printed them.

    These are for content that the worker does not accept, that is compressed, or that is large.
    """
    is_small = len(message.body or b"") <= LARGEST_SHOWN and "compression" not in message.headers
    try:
        content = message.payload if is_small else None
    except KombuError:
        content = None
    if isinstance(content, dict):
        return content.get("args"), content.get("kwargs")
    if isinstance(content, list | tuple) and len(content) > 1:
        return content[0], content[1]
    return message.headers.get("argsrepr"), message.headers.get("kwargsrepr")
