"""Call a plain function for a worker of coroutines."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from microqueue.queue import Queue
from microqueue.worker.context import Context
from microqueue.worker.handlers import Handler, close_unrun
from microqueue.worker.inflight import Held
from microqueue.worker.offload import run_in_thread


async def call_in_thread(
    handler: Handler, held: Held, queue: Queue[Any], expect: Callable[[float], None]
) -> Any:
    """Call the function in a thread; if it gives a coroutine, await that here."""
    # Nothing ends a thread: it is only told, and keeps its place until it returns.
    cancel, held.on_interrupt = held.on_interrupt, None
    result = await run_in_thread(
        handler.call, held.claimed.payload, lambda: Context(held, queue, expect)
    )
    if inspect.isawaitable(result):
        if held.cancelled:
            close_unrun(result)
            raise asyncio.CancelledError
        held.on_interrupt = cancel
        result = await result
    return result
