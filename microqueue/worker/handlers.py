"""Handlers: the functions that process tasks, how they are found, and what they may see."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Protocol

from microqueue.arguments import refused
from microqueue.durations import Duration
from microqueue.errors import InvalidArgument
from microqueue.operations.settle import storable_text
from microqueue.task import Progress, Task
from microqueue.worker.in_flight import InFlightTask, lease_now
from microqueue.worker.outcomes import ExceptionPolicy, Fail, Retry


class _Context:
    """The task a handler works on, and whether its result is still wanted."""

    def __init__(
        self, task: InFlightTask, queue: Any, expect_renewal: Callable[[float], None]
    ) -> None:
        self._in_flight_task = task
        self._queue = queue
        self._expect_renewal = expect_renewal

    @property
    def task(self) -> Task[Any]:
        """The task as it was claimed."""
        return self._in_flight_task.task

    @property
    def attempt(self) -> int:
        """The number of this delivery, from 1."""
        return self._in_flight_task.task.attempts

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: lease lost, timed out, cancelled, or worker stopped."""
        return self._in_flight_task.cancelled

    def progress(self, fraction: float, message: str | None = None) -> None:
        """Report progress, to be seen in ``Task.progress``.

        The worker stores the latest report once a second; the call itself does no I/O.

        Args:
            fraction: From 0 to 1.
            message: What the handler is doing.
        """
        if not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise refused("fraction", fraction, "give a number from 0 to 1")
        if message is not None and not isinstance(message, str):
            raise refused("message", message, "give a text")
        now = self._in_flight_task.queue.clock.now()
        text = None if message is None else storable_text(message)
        self._in_flight_task.progress = Progress.trusted(
            fraction=float(fraction), message=text, at=now
        )

    def _touched(self, task: Task[Any], at: float) -> None:
        self._in_flight_task.touch(task, at)
        self._expect_renewal(self._in_flight_task.renewal_due)


class Context(_Context):
    """What a plain function gets as its ``context`` argument."""

    def touch(self, extend: Duration | None = None) -> None:
        """Renew the lease now; the worker renews it every third of its length.

        Args:
            extend: The length of the lease from now on. A longer one is kept; a shorter one is
                renewed in time.
        """
        at = lease_now()
        touch = self._queue.touch(self._in_flight_task.task, extend)
        self._touched(self._queue.run(touch), at)


class AsyncContext(_Context):
    """What a coroutine function gets as its ``context`` argument."""

    async def touch(self, extend: Duration | None = None) -> None:
        """Renew the lease now, as :meth:`Context.touch` does.

        Args:
            extend: The length of the lease from now on.
        """
        at = lease_now()
        touch = self._queue.touch(self._in_flight_task.task, extend)
        self._touched(await self._queue.run(touch), at)


CONTEXT = "context"
UNKNOWN_TASK = "unknown_task"


@dataclass(frozen=True, slots=True)
class Handler:
    """A function, and how to call it and treat its exceptions."""

    function: Callable[..., Any]
    wants_context: bool
    is_async: bool
    name: str = "the handler"
    timeout_sec: float | None = None
    keep_result: bool = False
    exception_policy: ExceptionPolicy = field(default_factory=ExceptionPolicy)

    def call(self, payload: Any, make_context: Callable[[], Any]) -> Any:
        """Call the function with the payload, and with a context if it has that parameter."""
        if self.wants_context:
            return self.function(payload, context=make_context())
        return self.function(payload)

    def check_ran(self, result: Any) -> None:
        """Reject a result that was not run: the task would count as done."""
        if inspect.isawaitable(result):
            close_unrun(result)
            reason = "a coroutine; declare it with async def, or use AsyncWorker, which awaits it"
        elif isinstance(result, GeneratorType | AsyncGeneratorType):
            reason = "a generator, which the worker does not run"
        else:
            return
        raise TypeError(f"{self.name} returned {reason}")


class Router(Protocol):
    """Finds the handler of a task; :class:`Tasks` is one."""

    def handler_for(self, task: Task[Any]) -> Handler:
        """Return the handler; raise :class:`Retry` or :class:`Fail` if there is none."""

    def names(self) -> list[str]:
        """Return the names of the handlers."""

    def coroutines(self) -> list[str]:
        """Return the names of the handlers that only ``AsyncWorker`` can run."""


@dataclass(frozen=True, slots=True)
class SingleHandler:
    """One function for every task."""

    handler: Handler

    def handler_for(self, task: Task[Any]) -> Handler:  # noqa: ARG002 (the same for all)
        """Return the handler."""
        return self.handler

    def names(self) -> list[str]:
        """Return the name of the function."""
        return [self.handler.name]

    def coroutines(self) -> list[str]:
        """Return the name of the function if it is a coroutine function."""
        return [repr(self.handler.function)] if self.handler.is_async else []


def router_for(handler: Any) -> Router:
    """Return the router for a worker's handler: a function, or a router itself."""
    if hasattr(handler, "handler_for"):
        router: Router = handler
        return router
    return SingleHandler(make_handler(handler))


def task_names(router: Router) -> list[str] | None:
    """Return the names of the tasks that a router serves; ``None``: any name."""
    return None if isinstance(router, SingleHandler) else router.names()


def make_handler(function: Any, **options: Any) -> Handler:
    """Check a function's signature, before any task is claimed for it."""
    if not callable(function):
        raise refused("handler", function, "give a function, a coroutine function or Tasks")
    if _is_any(function, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        raise InvalidArgument(
            f"handler={function!r} is a generator function: calling it would run nothing",
            argument="handler",
            value=function,
        )
    try:
        signature = inspect.signature(function)
    except ValueError as exc:  # Some functions written in C have none.
        reason = "its parameters cannot be read; give a function that calls it"
        raise refused("handler", function, reason) from exc
    wants_context = CONTEXT in signature.parameters
    try:
        signature.bind(None, **({CONTEXT: None} if wants_context else {}))
    except TypeError as exc:
        reason = f"it must accept the payload as its only argument: {exc}"
        raise refused("handler", function, reason) from exc
    return Handler(
        function=function,
        wants_context=wants_context,
        is_async=_is_any(function, inspect.iscoroutinefunction),
        name=getattr(function, "__qualname__", repr(function)),
        **options,
    )


def _is_any(function: Any, *kinds: Callable[[Any], bool]) -> bool:
    """Return whether a callable, without its partials, is of one of these kinds."""
    while isinstance(function, functools.partial):
        function = function.func
    called = getattr(function, "__call__", None)  # noqa: B004 (the method itself is needed)
    return any(kind(function) or kind(called) for kind in kinds)


def close_unrun(result: Any) -> None:
    """Close a coroutine that will not be awaited, so that Python does not warn."""
    if inspect.iscoroutine(result):
        result.close()


def unknown_task(name: str | None, known: list[str]) -> Fail | Retry:
    """Return the outcome of a task that no handler is registered for.

    It is retried if it has a name: another worker may know it, or the next release.
    """
    listed = f"registered: {', '.join(sorted(known)) or 'none'}"
    if name is None:
        reason = "the task has no name; set its header 'task' (--header task=NAME)"
        return Fail(f"{reason}; {listed}", code=UNKNOWN_TASK)
    return Retry(f"no handler for task {name!r}; {listed}", code=UNKNOWN_TASK)


def load_handler(reference: str, *, kind: str = "handler", example: str = "send_mail") -> Any:
    """Import a handler, also from modules in the current directory.

    Args:
        reference: ``module:function``, or ``module:registry``.
        kind: The argument that an error names.
        example: The name in an error's example.

    Returns:
        The function, or the :class:`Tasks` registry.

    Raises:
        InvalidArgument: It cannot be imported or called.
    """
    module_name, colon, path = reference.partition(":")
    if not (module_name and colon and path):
        raise refused(kind, reference, f"give module:name, for example shop.tasks:{example}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as exc:
        reason = f"importing {module_name!r} raised {type(exc).__name__}: {exc}"
        raise refused(kind, reference, reason) from exc
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as exc:
            raise refused(kind, reference, f"{module_name!r} has no {path!r}") from exc
    if not callable(found) and not hasattr(found, "handler_for"):
        raise refused(kind, reference, f"{path!r} is not callable: it is {type(found).__name__}")
    return found


def load_model(reference: str) -> Any:
    """Import a payload model, ``module:Class``."""
    return load_handler(reference, kind="model", example="Mail")
