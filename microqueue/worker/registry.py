"""A function as a handler: its arguments, typed by its annotations, to and from a document."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import (
    Any,
    Concatenate,
    Generic,
    NotRequired,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    cast,
    get_type_hints,
    overload,
)

from pydantic import ConfigDict
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict

from microqueue.arguments import check_name, refused
from microqueue.async_queue import AsyncQueue
from microqueue.backoff import BackoffPolicy
from microqueue.durations import Duration, PositiveDuration
from microqueue.errors import InvalidArgument, InvalidPayload
from microqueue.model import Model
from microqueue.new_task import EnqueueOptions, NewTask
from microqueue.payload import PayloadCodec
from microqueue.queue import Queue
from microqueue.task import NAME_HEADER, Task
from microqueue.worker.handlers import CONTEXT, AsyncContext, Context, Handler, unknown_task
from microqueue.worker.outcomes import ExceptionPolicy, Fail


class RunOptions(Model):
    """How a named task is run and judged."""

    timeout: PositiveDuration | None = None
    keep_result: bool = False
    fatal: tuple[type[BaseException], ...] = ()
    retryable: tuple[type[BaseException], ...] | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a function, ``context`` aside: bound, and to and from a document."""

    function: str
    signature: inspect.Signature
    codec: PayloadCodec[Any]

    def dump(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Give the document to store: what was given, by name, without the defaults."""
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError as exc:
            raise InvalidArgument(f"{self.function}: {exc}") from exc
        return self.codec.dump(given)

    def load(self, stored: Any) -> dict[str, Any]:
        """Read a stored document, or raise :class:`Fail`: no other attempt would help."""
        try:
            return cast("dict[str, Any]", self.codec.load(stored))
        except InvalidPayload as exc:
            raise Fail(str(exc), code="invalid_payload") from exc


def check_function(function: Any) -> None:
    """Refuse what cannot be run from its arguments alone."""
    if not inspect.isfunction(function):
        reason = "give a function; methods, classes and other callables are not supported"
    elif _is_in_class(function):
        reason = "it is a method, and there would be no instance to call it on; give a function"
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        reason = "it is a generator function, and calling it would run nothing"
    else:
        return
    raise _refused(function, reason)


def _is_in_class(function: Callable[..., Any]) -> bool:
    home = function.__qualname__.rpartition(".")[0]
    return bool(home) and not home.endswith("<locals>")


def read_arguments(function: Callable[..., Any]) -> Arguments:
    """Read a function's signature into what checks its arguments."""
    signature = inspect.signature(function)
    for one in signature.parameters.values():
        if one.kind in {one.POSITIONAL_ONLY, one.VAR_POSITIONAL, one.VAR_KEYWORD}:
            raise _refused(function, f"every argument needs a name to be stored under, not {one}")
    parameters = [one for one in signature.parameters.values() if one.name != CONTEXT]
    try:
        hints = _read_hints(function, parameters)
        codec = PayloadCodec(_document_type(function.__name__, parameters, hints))
    except (AttributeError, NameError, SyntaxError, TypeError, PydanticUserError) as exc:
        raise _refused(function, f"its annotations cannot be read: {exc}") from exc
    for name, hint in hints.items():
        if hint is Context or hint is AsyncContext:
            raise _refused(function, f"the parameter for the context is {CONTEXT!r}, not {name!r}")
    return Arguments(function.__name__, signature.replace(parameters=parameters), codec)


def _read_hints(
    function: Callable[..., Any], parameters: list[inspect.Parameter]
) -> dict[str, Any]:
    # Only these: what annotates the context and the result may exist for type checkers alone.
    given = {one.name: Any if one.annotation is one.empty else one.annotation for one in parameters}
    namespace = getattr(inspect.unwrap(function), "__globals__", {})
    return get_type_hints(SimpleNamespace(__annotations__=given), namespace, include_extras=True)


def _document_type(name: str, parameters: list[inspect.Parameter], hints: Mapping[str, Any]) -> Any:
    """Describe the stored document to pydantic; what has a default may be left out.

    As a ``TypedDict``: in a model some names would be taken, such as ``copy`` or ``json``.
    """
    fields = {
        one.name: hints[one.name] if one.default is one.empty else NotRequired[hints[one.name]]
        for one in parameters
    }
    make_type: Any = TypedDict
    document = make_type(name, fields)
    document.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return document


def make_task_handler(
    function: Callable[..., Any], arguments: Arguments, running: RunOptions
) -> Handler:
    """Make the handler that reads the arguments, and calls the function with them."""
    wants_context = CONTEXT in inspect.signature(function).parameters
    is_async = inspect.iscoroutinefunction(function)

    def call(payload: Any, context: Any) -> Any:
        if is_async and not isinstance(context, AsyncContext):
            # Registered after the worker had looked. Not awaited, it would pass for done.
            raise TypeError(f"{function.__name__} is a coroutine function; use AsyncWorker")
        loaded = arguments.load(payload)
        return function(**loaded, context=context) if wants_context else function(**loaded)

    return Handler(
        function=call,
        wants_context=True,
        is_async=is_async,
        name=function.__name__,
        timeout_sec=running.timeout.total_seconds() if running.timeout else None,
        keep_result=running.keep_result,
        exception_policy=ExceptionPolicy(fatal=running.fatal, retryable=running.retryable),
    )


def _refused(function: Any, reason: str) -> InvalidArgument:
    name = getattr(function, "__qualname__", repr(function))
    return InvalidArgument(
        f"{name} cannot be a task: {reason}", argument="function", value=function
    )


CallP = ParamSpec("CallP")
P = ParamSpec("P")
R = TypeVar("R")
ContextT = TypeVar("ContextT", Context, AsyncContext)


class NamedTaskOptions(EnqueueOptions, total=False):
    """The options of a named task: those of ``Queue.enqueue``."""

    session: Any
    """A session of the queue's client, to join the caller's transaction."""


class NamedTask(Generic[CallP, P, R]):
    """A function with a name, to be enqueued or called. Made by :meth:`Tasks.task`.

    Called, it is the plain function.
    """

    __name__: str

    def __init__(
        self,
        name: str,
        function: Callable[CallP, R],
        *,
        arguments: Arguments,
        handler: Handler,
        options: NamedTaskOptions,
    ) -> None:
        functools.update_wrapper(self, function)
        self.name = name
        self.handler = handler
        self._function = function
        self._arguments = arguments
        self._options = options

    def __repr__(self) -> str:
        return f"NamedTask({self.name!r})"

    def knows(self, name: str) -> bool:
        """Tell whether this is its name."""
        return name == self.name

    def handler_for(self, task: Task[Any]) -> Handler:
        """Serve this task alone: a worker may be given it instead of its registry."""
        if task.name != self.name:
            raise unknown_task(task.name, [self.name])
        return self.handler

    def check(self, name: str, payload: Any) -> None:
        """Raise :class:`InvalidPayload` if a task of its name could not be run with this payload.

        It is read as a worker would read it. A task of another name is not checked.
        """
        if name == self.name:
            self._arguments.codec.load(payload)

    def names(self) -> list[str]:
        """Give its name, as all that a worker of it knows."""
        return [self.name]

    def coroutines(self) -> list[str]:
        """Give its name, if only ``AsyncWorker`` can run it."""
        return [self.name] if self.handler.is_async else []

    def __call__(self, /, *args: CallP.args, **kwargs: CallP.kwargs) -> R:
        """Call the plain function, here and now."""
        return self._function(*args, **kwargs)

    def options(self, **options: Unpack[NamedTaskOptions]) -> NamedTask[CallP, P, R]:
        """Give the same task with these options for what is enqueued through it."""
        return NamedTask(
            self.name,
            self._function,
            arguments=self._arguments,
            handler=self.handler,
            options=check_options({**self._options, **options}),
        )

    def new(self, /, *args: P.args, **kwargs: P.kwargs) -> NewTask[dict[str, Any]]:
        """Make an item for ``enqueue_many``; a session is given there."""
        options: dict[str, Any] = dict(self._named_options())
        if "session" in options:
            raise InvalidArgument(
                "session cannot be part of an item: give it to enqueue_many", argument="session"
            )
        return NewTask(payload=self._arguments.dump(args, kwargs), **options)

    @overload
    def enqueue(
        self, queue: Queue[Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> Task[dict[str, Any]]: ...

    @overload
    def enqueue(
        self, queue: AsyncQueue[Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, Task[dict[str, Any]]]: ...

    def enqueue(
        self, queue: Queue[Any] | AsyncQueue[Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        """Add a task with these arguments; await it if the queue is an ``AsyncQueue``.

        Arguments that do not fit the annotations are refused before anything is written.
        """
        payload = self._arguments.dump(args, kwargs)
        return queue.enqueue(payload, **self._named_options())

    def _named_options(self) -> NamedTaskOptions:
        headers = {**(self._options.get("headers") or {}), NAME_HEADER: self.name}
        return {**self._options, "headers": headers}


class TaskDecorator(Protocol):
    """What :meth:`Tasks.task` gives: a decorator that keeps the function's signature."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[ContextT, P], R], /
    ) -> NamedTask[Concatenate[ContextT, P], P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> NamedTask[P, P, R]: ...


class Tasks:
    """A registry of named tasks, and the handler of a worker.

    A task whose name is not registered is tried again after the backoff, as another worker may
    know it; its error has the code ``unknown_task``. One without a name is a dead letter at once,
    with the same code; one whose payload does not fit, with code ``invalid_payload``.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, NamedTask[..., ..., Any]] = {}

    def __repr__(self) -> str:
        return f"Tasks({', '.join(self._tasks)})"

    def task(
        self,
        name: str | None = None,
        *,
        max_attempts: int | None = None,
        backoff: BackoffPolicy | None = None,
        priority: int = 0,
        visibility_timeout: Duration | None = None,
        timeout: Duration | None = None,
        keep_result: bool = False,
        fatal: tuple[type[BaseException], ...] = (),
        retryable: tuple[type[BaseException], ...] | None = None,
    ) -> TaskDecorator:
        """Register a function under ``name``, or under its own.

        The first four are stored with each task that is enqueued, and may be overridden by
        :meth:`NamedTask.options`. The others hold where the task runs: ``timeout`` limits
        one run, ``fatal`` exceptions bury the task at once, and if ``retryable`` is given,
        all exceptions but these do.

        A parameter called ``context`` is filled in by the worker. Put it first, and type
        checkers know that ``enqueue`` does not take it.
        """
        if callable(name):
            raise InvalidArgument(
                "write @tasks.task(), with parentheses", argument="name", value=name
            )
        running = RunOptions(
            timeout=timeout, keep_result=keep_result, fatal=fatal, retryable=retryable
        )
        options = check_options(
            {
                "max_attempts": max_attempts,
                "backoff": backoff,
                "priority": priority,
                "visibility_timeout": visibility_timeout,
            }
        )

        def register(function: Callable[..., Any], /) -> NamedTask[..., ..., Any]:
            check_function(function)
            chosen = check_name(function.__name__ if name is None else name)
            if chosen in self._tasks:
                raise InvalidArgument(
                    f"name={chosen!r} is taken by another task", argument="name", value=chosen
                )
            arguments = read_arguments(function)
            self._tasks[chosen] = NamedTask(
                chosen,
                function,
                arguments=arguments,
                handler=make_task_handler(function, arguments, running),
                options=options,
            )
            return self._tasks[chosen]

        return cast("TaskDecorator", register)

    def names(self) -> list[str]:
        """Give the names that are registered."""
        return list(self._tasks)

    def knows(self, name: str) -> bool:
        """Tell whether a name is registered."""
        return name in self._tasks

    def check(self, name: str, payload: Any) -> None:
        """Raise :class:`InvalidPayload` if the task of this name could not run with this payload.

        It is read as a worker would read it. A task that is not registered is not checked.
        """
        if name in self._tasks:
            self._tasks[name].check(name, payload)

    def coroutines(self) -> list[str]:
        """Give the names of the tasks that only ``AsyncWorker`` can run."""
        return [name for name, task in self._tasks.items() if task.handler.is_async]

    def handler_for(self, task: Task[Any]) -> Handler:
        """Find the handler by the task's name, or say that there is none."""
        found = None if task.name is None else self._tasks.get(task.name)
        if found is None:
            raise unknown_task(task.name, self.names())
        return found.handler


def check_options(options: NamedTaskOptions) -> NamedTaskOptions:
    """Refuse options that ``enqueue`` would refuse, and a header in the name's place."""
    stored: dict[str, Any] = {key: value for key, value in options.items() if key != "session"}
    headers = NewTask[Any](payload={}, **stored).headers
    if NAME_HEADER in headers:
        raise refused("headers", headers, f"{NAME_HEADER!r} holds the task's name")
    return options
