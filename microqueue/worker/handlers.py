"""Handlers: the functions that do the work, and what is known about each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from microqueue.errors import InvalidArgument
from microqueue.task import Task
from microqueue.worker.outcomes import Fail, Judgement

CONTEXT = "context"


@dataclass(frozen=True, slots=True)
class Handler:
    """A function, and how it wants to be called and judged."""

    function: Callable[..., Any]
    wants_context: bool
    is_async: bool
    timeout_sec: float | None = None
    keep_result: bool = False
    judgement: Judgement = field(default_factory=Judgement)

    def call(self, payload: Any, make_context: Callable[[], Any]) -> Any:
        """Call the function with the payload, and with its context if it asks for it."""
        if self.wants_context:
            return self.function(payload, context=make_context())
        return self.function(payload)


class Router(Protocol):
    """Finds the handler of a task; the registry of named tasks is one."""

    def handler_for(self, task: Task[Any]) -> Handler:
        """Give the handler, or raise :class:`Fail` if there is none."""

    def coroutines(self) -> list[str]:
        """Name the handlers that only ``AsyncWorker`` can run."""


@dataclass(frozen=True, slots=True)
class SingleHandler:
    """One function for every task."""

    handler: Handler

    def handler_for(self, task: Task[Any]) -> Handler:  # noqa: ARG002 (the same for all)
        """Give the one handler that there is."""
        return self.handler

    def coroutines(self) -> list[str]:
        """Name the function, if it is a coroutine function."""
        return [repr(self.handler.function)] if self.handler.is_async else []


def router_for(handler: Any) -> Router:
    """Take a function, or anything that routes, as a worker's handler."""
    if hasattr(handler, "handler_for"):
        router: Router = handler
        return router
    return SingleHandler(make_handler(handler))


def make_handler(function: Any, **options: Any) -> Handler:
    """Look at a function's signature once, before any task is claimed for it."""
    if not callable(function):
        raise InvalidArgument(
            f"handler={function!r} is not valid: give a function, a coroutine function or Tasks",
            argument="handler",
            value=function,
        )
    parameters = inspect.signature(function).parameters
    target = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    return Handler(
        function=function,
        wants_context=CONTEXT in parameters,
        is_async=inspect.iscoroutinefunction(target),
        **options,
    )


def unknown_task(name: str | None, known: list[str]) -> Fail:
    """Make the failure of a task that no handler is registered for."""
    listed = ", ".join(sorted(known)) or "none"
    return Fail(f"no handler for task {name!r}; registered: {listed}", code="unknown_task")
