"""Named tasks: functions that are enqueued by calling them, and found by name in a worker.

The arguments of a task are checked by the function's annotations, and stored as a document.
"""

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
from microqueue.model import Model, unknown_option
from microqueue.new_task import EnqueueOptions, NewTask
from microqueue.payload import PayloadCodec
from microqueue.queue import Queue
from microqueue.task import NAME_HEADER, Task
from microqueue.worker.handlers import CONTEXT, AsyncContext, Context, Handler, unknown_task
from microqueue.worker.outcomes import ExceptionPolicy, Fail


class RunOptions(Model):
    """How a worker runs a named task."""

    timeout: PositiveDuration | None = None
    keep_result: bool = False
    fatal: tuple[type[BaseException], ...] = ()
    retryable: tuple[type[BaseException], ...] | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """The parameters of a function without ``context``: binds, stores and loads arguments."""

    function: str
    signature: inspect.Signature
    codec: PayloadCodec[Any]

    def dump(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the document to store: the given arguments by name, without defaults."""
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError as exc:
            raise InvalidArgument(f"{self.function}: {exc}") from exc
        return self.codec.dump(given)

    def load(self, stored: Any) -> dict[str, Any]:
        """Return the arguments in a stored document; raise :class:`Fail` if they are not valid."""
        try:
            return cast("dict[str, Any]", self.codec.load(stored))
        except InvalidPayload as exc:
            raise Fail(str(exc), code="invalid_payload") from exc


def check_function(function: Any) -> None:
    """Reject a callable that cannot run from its arguments alone."""
    if not inspect.isfunction(function):
        reason = "give a function; methods, classes and other callables are not supported"
    elif _is_in_class(function):
        reason = "it is a method, and has no instance to be called on; give a function"
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        reason = "it is a generator function: calling it would run nothing"
    else:
        return
    raise _refused(function, reason)


def _is_in_class(function: Callable[..., Any]) -> bool:
    home = function.__qualname__.rpartition(".")[0]
    return bool(home) and not home.endswith("<locals>")


def read_arguments(function: Callable[..., Any]) -> Arguments:
    """Read a function's signature and annotations."""
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
    # Only these: the annotations of context and result may exist for type checkers only.
    given = {one.name: Any if one.annotation is one.empty else one.annotation for one in parameters}
    namespace = getattr(inspect.unwrap(function), "__globals__", {})
    return get_type_hints(SimpleNamespace(__annotations__=given), namespace, include_extras=True)


def _document_type(name: str, parameters: list[inspect.Parameter], hints: Mapping[str, Any]) -> Any:
    """Return the type of the stored document; a parameter with a default may be missing.

    It is a ``TypedDict``: a model reserves some names, such as ``copy`` or ``json``.
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
    """Return the handler that loads the arguments and calls the function with them."""
    wants_context = CONTEXT in inspect.signature(function).parameters
    is_async = inspect.iscoroutinefunction(function)

    def call(payload: Any, context: Any) -> Any:
        if is_async and not isinstance(context, AsyncContext):
            # Registered after the worker was created. Not awaited, it would count as done.
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


class TaskOptions(TypedDict, total=False):
    """The options of :meth:`Tasks.task`.

    The first four are stored with each task, and :meth:`NamedTask.options` overrides them. The
    others apply where the task runs.
    """

    max_attempts: int | None
    """Deliveries in all, before the task is a dead letter. Default: the queue's setting."""
    backoff: BackoffPolicy | None
    """The waits between attempts. Default: the queue's setting."""
    priority: int
    """0 to 255; higher is delivered first. Default: 0."""
    visibility_timeout: Duration | None
    """The length of a lease. Default: the queue's setting."""
    timeout: Duration | None
    """How long one run may take. Default: the worker's option."""
    keep_result: bool
    """Store the return value."""
    fatal: tuple[type[BaseException], ...]
    """Exceptions that make the task a dead letter at once."""
    retryable: tuple[type[BaseException], ...] | None
    """If given, all exceptions but these make the task a dead letter at once."""


class NamedTask(Generic[CallP, P, R]):
    """A function that can be enqueued by name, created by :meth:`Tasks.task`.

    Calling it calls the function.
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
        """Return whether this is its name."""
        return name == self.name

    def handler_for(self, task: Task[Any]) -> Handler:
        """Return its handler: a worker may have a single named task instead of a registry."""
        if task.name != self.name:
            raise unknown_task(task.name, [self.name])
        return self.handler

    def check(self, name: str, payload: Any) -> None:
        """Check a payload as a worker would.

        Args:
            name: The name of the task; another task's payload is not checked.
            payload: The payload.

        Raises:
            InvalidPayload: A task with this payload could not run.
        """
        if name == self.name:
            self._arguments.codec.load(payload)

    def names(self) -> list[str]:
        """Return a list of its name."""
        return [self.name]

    def coroutines(self) -> list[str]:
        """Return a list of its name if only ``AsyncWorker`` can run it."""
        return [self.name] if self.handler.is_async else []

    def __call__(self, /, *args: CallP.args, **kwargs: CallP.kwargs) -> R:
        """Call the function."""
        return self._function(*args, **kwargs)

    def options(self, **options: Unpack[NamedTaskOptions]) -> NamedTask[CallP, P, R]:
        """Return the same task with other options for what it enqueues.

        Args:
            **options: The options of :meth:`Queue.enqueue`.

        Raises:
            InvalidArgument: An option is not valid.
        """
        return NamedTask(
            self.name,
            self._function,
            arguments=self._arguments,
            handler=self.handler,
            options=check_options({**self._options, **options}),
        )

    def new(self, /, *args: P.args, **kwargs: P.kwargs) -> NewTask[dict[str, Any]]:
        """Return an item for ``enqueue_many``, which takes the session.

        Args:
            *args: The arguments of the function, without ``context``.
            **kwargs: The same, by name.

        Raises:
            InvalidPayload: The arguments do not match the annotations.
        """
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
        """Add a task with these arguments; await the result if the queue is an ``AsyncQueue``.

        Args:
            queue: The queue.
            *args: The arguments of the function, without ``context``.
            **kwargs: The same, by name.

        Returns:
            The task.

        Raises:
            InvalidPayload: The arguments do not match the annotations; nothing is written.
        """
        payload = self._arguments.dump(args, kwargs)
        return queue.enqueue(payload, **self._named_options())

    def _named_options(self) -> NamedTaskOptions:
        headers = {**(self._options.get("headers") or {}), NAME_HEADER: self.name}
        return {**self._options, "headers": headers}


class TaskDecorator(Protocol):
    """What :meth:`Tasks.task` returns: a decorator that keeps the function's signature."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[ContextT, P], R], /
    ) -> NamedTask[Concatenate[ContextT, P], P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> NamedTask[P, P, R]: ...


class Tasks:
    """A registry of named tasks, to be used as the handler of a worker.

    A task whose name is not registered is retried after the backoff, because another worker may
    know it; its error has the code ``unknown_task``. A task without a name becomes a dead letter at
    once, with the same code. So does a task with an invalid payload, with ``invalid_payload``.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, NamedTask[..., ..., Any]] = {}

    def __repr__(self) -> str:
        return f"Tasks({', '.join(self._tasks)})"

    def task(
        self,
        name: str | None = None,
        **options: Unpack[TaskOptions],
    ) -> TaskDecorator:
        """Register a function.

        A parameter called ``context`` is filled in by the worker. If it comes first, type checkers
        know that ``enqueue`` does not take it.

        Args:
            name: The name of the task; by default, the name of the function.
            **options: The fields of :class:`TaskOptions`.

        Returns:
            The decorator, which returns a :class:`NamedTask`.

        Raises:
            InvalidArgument: An option is not valid, or the function cannot be a task.
        """
        if callable(name):
            raise InvalidArgument(
                "write @tasks.task(), with parentheses", argument="name", value=name
            )
        for option, value in options.items():
            if option not in TaskOptions.__annotations__:
                raise unknown_option("Tasks.task", option, TaskOptions.__annotations__, value)
        given: dict[str, Any] = dict(options)
        running = RunOptions(
            **{key: given.pop(key) for key in RunOptions.model_fields.keys() & given}
        )
        stored = check_options(cast("NamedTaskOptions", given))

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
                options=stored,
            )
            return self._tasks[chosen]

        return cast("TaskDecorator", register)

    def names(self) -> list[str]:
        """Return the registered names."""
        return list(self._tasks)

    def knows(self, name: str) -> bool:
        """Return whether a name is registered."""
        return name in self._tasks

    def check(self, name: str, payload: Any) -> None:
        """Check a payload as a worker would.

        Args:
            name: The name of the task; if it is not registered, nothing is checked.
            payload: The payload.

        Raises:
            InvalidPayload: A task with this payload could not run.
        """
        if name in self._tasks:
            self._tasks[name].check(name, payload)

    def coroutines(self) -> list[str]:
        """Return the names of the tasks that only ``AsyncWorker`` can run."""
        return [name for name, task in self._tasks.items() if task.handler.is_async]

    def handler_for(self, task: Task[Any]) -> Handler:
        """Return the handler of a task; raise :class:`Retry` or :class:`Fail` if there is none."""
        found = None if task.name is None else self._tasks.get(task.name)
        if found is None:
            raise unknown_task(task.name, self.names())
        return found.handler


def check_options(options: NamedTaskOptions) -> NamedTaskOptions:
    """Reject options that ``enqueue`` rejects, and a header that is reserved for the name."""
    stored: dict[str, Any] = {key: value for key, value in options.items() if key != "session"}
    headers = NewTask[Any](payload={}, **stored).headers
    if NAME_HEADER in headers:
        raise refused("headers", headers, f"{NAME_HEADER!r} holds the task's name")
    return options
