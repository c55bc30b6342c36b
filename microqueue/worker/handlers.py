"""Handlers: the functions that process tasks, and how they are found."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Protocol

from microqueue import error_codes
from microqueue.arguments import invalid_argument
from microqueue.errors import InvalidArgument
from microqueue.hooks import Hooks
from microqueue.schedule import Declaration
from microqueue.task import Task
from microqueue.worker.outcomes import ExceptionPolicy, Fail, Retry

CONTEXT = "context"
"""The code of the error of a task that has no handler."""

# The codes of errors about a handler.
NOT_CALLABLE = "not_callable"
GENERATOR = "generator"
COROUTINE = "coroutine"
UNREADABLE = "unreadable"
WRONG_PARAMETERS = "wrong_parameters"
NO_REFERENCE = "no_reference"
IMPORT_FAILED = "import_failed"
NAME_MISSING = "name_missing"


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

    def call(self, given: Any, make_context: Callable[[], Any]) -> Any:
        """Call the function with a payload or a list of tasks, and with a context if it has one."""
        if self.wants_context:
            return self.function(given, context=make_context())
        return self.function(given)

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

    def declarations(self) -> tuple[str, Sequence[Declaration]] | None:
        """Return the app and its schedules, if it has a say in them."""


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

    def declarations(self) -> None:
        """Return nothing: there is no app."""


def router_for(handler: Any, *, batch: int | None = None) -> Router:
    """Return the router for a worker's handler: a function, or a router itself."""
    if (router := _router_of(handler)) is not None:
        if batch is not None:
            raise invalid_argument(
                "batch", batch, "named tasks are handled one by one; give a function as handler"
            )
        return router
    return SingleHandler(make_handler(handler, takes="payload" if batch is None else "tasks"))


def _router_of(handler: Any) -> Router | None:
    router = getattr(handler, "_router", handler)  # Of Tasks, and of a NamedTask.
    return router if hasattr(router, "handler_for") else None


def task_names(router: Router) -> list[str] | None:
    """Return the names of the tasks that a router serves; ``None``: any name."""
    return None if isinstance(router, SingleHandler) else router.names()


def make_handler(function: Any, *, takes: str = "payload", **options: Any) -> Handler:
    """Check a function's signature, before any task is claimed for it."""
    if not callable(function):
        raise invalid_argument(
            "handler",
            function,
            "give a function, a coroutine function or Tasks",
            code=NOT_CALLABLE,
        )
    if _is_any(function, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        raise InvalidArgument(
            f"handler={function!r} is a generator function: calling it would run nothing",
            argument="handler",
            value=function,
            code=GENERATOR,
        )
    try:
        signature = inspect.signature(function)
    except ValueError as exc:  # Some functions written in C have none.
        reason = "its parameters cannot be read; give a function that calls it"
        raise invalid_argument("handler", function, reason, code=UNREADABLE) from exc
    wants_context = CONTEXT in signature.parameters
    try:
        signature.bind(None, **({CONTEXT: None} if wants_context else {}))
    except TypeError as exc:
        reason = f"it must accept the {takes} as its only argument: {exc}"
        raise invalid_argument("handler", function, reason, code=WRONG_PARAMETERS) from exc
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
        reason = "the task has no name; enqueue it with name=... (--name NAME)"
        return Fail(f"{reason}; {listed}", code=error_codes.UNKNOWN_TASK)
    return Retry(f"no handler for task {name!r}; {listed}", code=error_codes.UNKNOWN_TASK)


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
    found = _load(reference, kind=kind, example=example)
    if not callable(found) and _router_of(found) is None:
        path = reference.partition(":")[2]
        raise invalid_argument(
            kind,
            reference,
            f"{path!r} is not callable: it is {type(found).__name__}",
            code=NOT_CALLABLE,
        )
    return found


def _load(reference: str, *, kind: str, example: str) -> Any:
    module_name, colon, path = reference.partition(":")
    if not (module_name and colon and path):
        raise invalid_argument(
            kind,
            reference,
            f"give module:name, for example shop.tasks:{example}",
            code=NO_REFERENCE,
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as exc:
        reason = f"importing {module_name!r} raised {type(exc).__name__}: {exc}"
        raise invalid_argument(kind, reference, reason, code=IMPORT_FAILED) from exc
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as exc:
            raise invalid_argument(
                kind, reference, f"{module_name!r} has no {path!r}", code=NAME_MISSING
            ) from exc
    return found


def load_model(reference: str) -> Any:
    """Import a payload model, ``module:Class``."""
    return load_handler(reference, kind="model", example="Mail")


def load_tasks(reference: str) -> Any:
    """Import a :class:`Tasks` registry, ``module:registry``."""
    return load_handler(reference, kind="tasks", example="tasks")


def load_hooks(reference: str) -> list[Hooks]:
    """Import hooks, ``module:name``: an instance or subclass of :class:`Hooks`, or a list."""
    found = _load(reference, kind="hooks", example="hooks")
    several = list(found) if isinstance(found, list | tuple) else [found]
    hooks = [one() if isinstance(one, type) and issubclass(one, Hooks) else one for one in several]
    for one in hooks:
        if not isinstance(one, Hooks):
            reason = f"it has {type(one).__name__}; give Hooks, or a list of them"
            raise invalid_argument("hooks", reference, reason)
    return hooks
