"""Come in between a queue and the operations that it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from microqueue import AsyncQueue, Queue
from microqueue.core import core_of


def tap(queue: Queue[Any] | AsyncQueue[Any], run: Callable[..., Any]) -> None:
    """Let ``run(usual, operation)`` run all operations of a queue; ``usual`` would run them."""
    core = core_of(queue)
    usual = core.run
    core.run = lambda operation: run(usual, operation)  # type: ignore[method-assign]
