"""Named tasks: functions that are enqueued by calling them, and found by name in a worker.

The arguments of a task are checked by the function's annotations, and stored as a document.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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

from microqueue import error_codes
from microqueue.arguments import check_name, invalid_argument
from microqueue.async_queue import AsyncQueue
from microqueue.backoff import BackoffPolicy
from microqueue.durations import Duration, PositiveDuration
from microqueue.errors import InvalidArgument, InvalidPayload
from microqueue.model import Model, reject_unknown
from microqueue.new_task import EnqueueOptions, NewTask
from microqueue.payload import PayloadCodec
from microqueue.queue import Queue
from microqueue.schedule import (
    Declaration,
    ScheduleOptions,
    check_timetable,
)
from microqueue.task import NAME_HEADER, Task, is_text
from microqueue.worker.context import AsyncContext, Context
from microqueue.worker.enqueued_task import AsyncEnqueuedTask, EnqueuedTask, with_queue
from microqueue.worker.handlers import (
    CONTEXT,
    GENERATOR,
    UNREADABLE,
    WRONG_PARAMETERS,
    Handler,
    unknown_task,
)
from microqueue.worker.outcomes import ExceptionPolicy, Fail

# The codes of errors about a function, besides those about a handler.
NO_FUNCTION = "no_function"
METHOD = "method"
CONTEXT_NAME = "context_name"


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
            raise InvalidArgument(
                f"{self.function}: {exc}", argument=self._mismatch(args, kwargs)
            ) from exc
        return self.codec.dump(given)

    def _mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return the first argument that the function does not have, or that is missing."""
        names = list(self.signature.parameters)
        given = {*names[: len(args)], *kwargs}
        unknown = [name for name in kwargs if name not in names]
        missing = [
            name
            for name, one in self.signature.parameters.items()
            if one.default is one.empty and name not in given
        ]
        return next(iter([*unknown, *missing]), None)

    def load(self, stored: Any) -> dict[str, Any]:
        """Return the arguments in a stored document; raise :class:`Fail` if they are not valid."""
        try:
            return cast("dict[str, Any]", self.codec.load(stored))
        except InvalidPayload as exc:
            raise Fail(str(exc), code=error_codes.INVALID_PAYLOAD) from exc


def check_function(function: Any) -> None:
    """Reject a callable that cannot run from its arguments alone."""
    if not inspect.isfunction(function):
        code = NO_FUNCTION
        reason = "give a function; methods, classes and other callables are not supported"
    elif _is_in_class(function):
        code = METHOD
        reason = "it is a method, and has no instance to be called on; give a function"
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        code = GENERATOR
        reason = "it is a generator function: calling it would run nothing"
    else:
        return
    raise _unusable(function, reason, code)


def _is_in_class(function: Callable[..., Any]) -> bool:
    home = function.__qualname__.rpartition(".")[0]
    return bool(home) and not home.endswith("<locals>")


def read_arguments(function: Callable[..., Any]) -> Arguments:
    """Read a function's signature and annotations."""
    signature = inspect.signature(function)
    for one in signature.parameters.values():
        if one.kind in {one.POSITIONAL_ONLY, one.VAR_POSITIONAL, one.VAR_KEYWORD}:
            reason = f"every argument needs a name to be stored under, not {one}"
            raise _unusable(function, reason, WRONG_PARAMETERS)
    parameters = [one for one in signature.parameters.values() if one.name != CONTEXT]
    try:
        hints = _read_hints(function, parameters)
        codec = PayloadCodec(_document_type(function.__name__, parameters, hints))
    except (AttributeError, NameError, SyntaxError, TypeError, PydanticUserError) as exc:
        reason = f"its annotations cannot be read: {exc}"
        raise _unusable(function, reason, UNREADABLE) from exc
    for name, hint in hints.items():
        if hint is Context or hint is AsyncContext:
            reason = f"the parameter for the context is {CONTEXT!r}, not {name!r}"
            raise _unusable(function, reason, CONTEXT_NAME)
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


def _unusable(function: Any, reason: str, code: str) -> InvalidArgument:
    name = getattr(function, "__qualname__", repr(function))
    return InvalidArgument(
        f"{name} cannot be a task: {reason}", argument="function", value=function, code=code
    )


CallP = ParamSpec("CallP")
P = ParamSpec("P")
R = TypeVar("R")
ContextT = TypeVar("ContextT", Context, AsyncContext)


class NamedTaskOptions(EnqueueOptions, total=False):
    """The options of a named task: those of ``Queue.enqueue``."""

    session: Any
    """A session of the queue's client, to join the caller's transaction."""


class TaskOptions(ScheduleOptions, total=False):
    """The options of :meth:`Tasks.task`.

    The first six are stored with each task, and :meth:`NamedTask.options` overrides them. The
    next four apply where the task runs. The others are about its schedule, see
    :meth:`Schedules.put`.
    """

    max_attempts: int | None
    """Deliveries in all, before the task is a dead letter. Default: the queue's setting."""
    backoff: BackoffPolicy | None
    """The waits between attempts. Default: the queue's setting."""
    priority: int
    """0 to 255; higher is delivered first. Default: 0."""
    visibility_timeout: Duration | None
    """The length of a lease. Default: the queue's setting."""
    expires_in: Duration | None
    """A task that waits longer is a dead letter. Default: none does."""
    headers: Mapping[str, Any]
    """Headers of each task."""
    timeout: Duration | None
    """How long one run may take. Default: the worker's option."""
    keep_result: bool
    """Store the return value."""
    fatal: tuple[type[BaseException], ...]
    """Exceptions that make the task a dead letter at once."""
    retryable: tuple[type[BaseException], ...] | None
    """If given, all exceptions but these make the task a dead letter at once."""
    schedule: str | None
    """A cron expression: a worker declares the schedule when it starts."""
    every: Duration | None
    """A period instead."""
    arguments: Mapping[str, Any] | None
    """The arguments of each run, by name. Default: those of the function."""
    queue: str | None
    """The queue of the schedule. Default: the one it is in, or the worker's first."""


SCHEDULE_OPTIONS = ("arguments", "queue", *ScheduleOptions.__annotations__)
"""Options that only a task with ``schedule`` or ``every`` may have."""


class NamedTask(Generic[CallP, P, R]):
    """A function that can be enqueued by name, created by :meth:`Tasks.task`.

    Calling it calls the function.
    """

    __name__: str
    name: str
    """The name of its tasks."""
    handler: Handler
    """What a worker runs."""

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

    @property
    def _router(self) -> TaskRouter:
        """What a worker uses that has this task alone, without its schedule."""
        return TaskRouter({self.name: self})

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
        """List its name, as :meth:`Tasks.names` does.

        Returns:
            A list of one name.
        """
        return [self.name]

    def __call__(self, /, *args: CallP.args, **kwargs: CallP.kwargs) -> R:
        """Call the function."""
        return self._function(*args, **kwargs)

    def options(self, **options: Unpack[NamedTaskOptions]) -> NamedTask[CallP, P, R]:
        """Change the options of what the task enqueues.

        Args:
            **options: The options of :meth:`Queue.enqueue`.

        Returns:
            A new named task. This one keeps its options.

        Raises:
            InvalidArgument: An option is not valid.
        """
        reject_unknown("NamedTask.options", options, NamedTaskOptions.__annotations__)
        return NamedTask(
            self.name,
            self._function,
            arguments=self._arguments,
            handler=self.handler,
            options=check_options({**self._options, **options}),
        )

    def new(self, /, *args: P.args, **kwargs: P.kwargs) -> NewTask[dict[str, Any]]:
        """Make a task to add: for ``enqueue`` of a queue or context, or for ``enqueue_many``.

        Args:
            *args: The arguments of the function, without ``context``.
            **kwargs: The same, by name.

        Returns:
            The task to add, with the options of this one.

        Raises:
            InvalidPayload: The arguments do not match the annotations.
        """
        options: dict[str, Any] = dict(self._named_options())
        if "session" in options:
            raise InvalidArgument(
                "session cannot be part of a NewTask: give it to the call that adds it",
                argument="session",
            )
        return NewTask(payload=self._arguments.dump(args, kwargs), **options)

    @overload
    def enqueue(self, queue: Queue[Any], /, *args: P.args, **kwargs: P.kwargs) -> EnqueuedTask: ...

    @overload
    def enqueue(
        self, queue: AsyncQueue[Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, AsyncEnqueuedTask]: ...

    def enqueue(
        self, queue: Queue[Any] | AsyncQueue[Any], /, *args: P.args, **kwargs: P.kwargs
    ) -> Any:
        """Add a task with these arguments; await the result if the queue is an ``AsyncQueue``.

        Args:
            queue: The queue.
            *args: The arguments of the function, without ``context``.
            **kwargs: The same, by name.

        Returns:
            The task; its ``wait()`` returns the result.

        Raises:
            InvalidArgument: It is not a queue, or an argument is unknown or missing.
            InvalidPayload: The arguments do not match the annotations; nothing is written.
        """
        if not isinstance(queue, Queue | AsyncQueue):
            raise invalid_argument("queue", queue, "give a Queue or an AsyncQueue")
        payload = self._arguments.dump(args, kwargs)
        if isinstance(queue, AsyncQueue):
            return self._enqueue_async(queue, payload)
        return with_queue(
            EnqueuedTask, vars(queue.enqueue(payload, **self._named_options())), queue
        )

    async def _enqueue_async(
        self, queue: AsyncQueue[Any], payload: dict[str, Any]
    ) -> AsyncEnqueuedTask:
        task = await queue.enqueue(payload, **self._named_options())
        return with_queue(AsyncEnqueuedTask, vars(task), queue)

    def _named_options(self) -> NamedTaskOptions:
        return {**self._options, "name": self.name}


class TaskDecorator(Protocol):
    """What :meth:`Tasks.task` returns: a decorator that keeps the function's signature."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[ContextT, P], R], /
    ) -> NamedTask[Concatenate[ContextT, P], P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> NamedTask[P, P, R]: ...


class TaskRouter:
    """Finds the handlers of named tasks, and their schedules, for a worker."""

    def __init__(
        self,
        tasks: Mapping[str, NamedTask[..., ..., Any]],
        declarations: Mapping[str, Declaration] | None = None,
        *,
        app: str | None = None,
    ) -> None:
        self._tasks = tasks
        self._declarations = declarations
        self._app = app

    def names(self) -> list[str]:
        """Return the registered names."""
        return list(self._tasks)

    def knows(self, name: str) -> bool:
        """Return whether a name is registered."""
        return is_text(name) and name in self._tasks

    def declarations(self) -> tuple[str, Sequence[Declaration]] | None:
        """Return the name of the app and its schedules, which a worker declares."""
        if self._declarations is None:  # Only the registry knows all schedules of the app.
            return None
        app = self._app
        if app is None:
            packages = self.packages()
            app = packages.pop() if len(packages) == 1 else None
        return None if app is None else (app, list(self._declarations.values()))

    def packages(self) -> set[str]:
        """Return the packages of the functions."""
        return {package_of(task.__module__) for task in self._tasks.values()}

    def coroutines(self) -> list[str]:
        """Return the names of the tasks that only ``AsyncWorker`` can run."""
        return [name for name, task in self._tasks.items() if task.handler.is_async]

    def handler_for(self, task: Task[Any]) -> Handler:
        """Return the handler that is registered under the name of a task, as it was claimed.

        Raises:
            Retry: There is none, and a worker with newer code may have one.
            Fail: The task has no name.
        """
        found = None if task.name is None else self._tasks.get(task.name)
        if found is None:
            raise unknown_task(task.name, self.names())
        return found.handler


class Tasks:
    """A registry of named tasks, to be used as the handler of a worker.

    A task whose name is not registered is retried after the backoff, because another worker may
    know it; its error has the code ``unknown_task``. A task without a name becomes a dead letter at
    once, with the same code. So does a task with an invalid payload, with ``invalid_payload``.

    Args:
        app: The name of the app, for its schedules: a worker that starts removes those that the
            code of the same app no longer has. Default: the package of the functions, if they
            are all of one.
    """

    def __init__(self, app: str | None = None) -> None:
        self._app = None if app is None else check_name(app)
        self._tasks: dict[str, NamedTask[..., ..., Any]] = {}
        self._declarations: dict[str, Declaration] = {}

    def __repr__(self) -> str:
        return f"Tasks({', '.join(self._tasks)})"

    @property
    def _router(self) -> TaskRouter:
        """What a worker uses, see :func:`~microqueue.worker.handlers.router_for`."""
        return TaskRouter(self._tasks, self._declarations, app=self._app)

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
            InvalidArgument: An option is not valid, or the function cannot be a task. Or there are
                functions of several packages, one of which has a schedule, and no ``app``.
        """
        if callable(name):
            raise InvalidArgument(
                "write @tasks.task(), with parentheses",
                argument="name",
                value=name,
                code="no_parentheses",
            )
        reject_unknown("Tasks.task", options, TaskOptions.__annotations__, function=Tasks.task)
        given: dict[str, Any] = dict(options)
        running = RunOptions(
            **{key: given.pop(key) for key in RunOptions.model_fields.keys() & given}
        )
        timing = {key: given.pop(key, None) for key in ("schedule", "every", *SCHEDULE_OPTIONS)}
        timetable = _check_schedule(timing)
        stored = check_options(cast("NamedTaskOptions", given))

        def register(function: Callable[..., Any], /) -> NamedTask[..., ..., Any]:
            check_function(function)
            chosen = check_name(function.__name__ if name is None else name)
            if chosen in self._tasks:
                raise InvalidArgument(
                    f"name={chosen!r} is taken by another task",
                    argument="name",
                    value=chosen,
                    code="taken",
                )
            self._check_app(function, scheduled=timetable is not None)
            arguments = read_arguments(function)
            self._tasks[chosen] = NamedTask(
                chosen,
                function,
                arguments=arguments,
                handler=make_task_handler(function, arguments, running),
                options=stored,
            )
            if timetable is not None:
                try:
                    run = self._tasks[chosen].new(**(timing["arguments"] or {}))
                except InvalidArgument:
                    del self._tasks[chosen]
                    raise
                self._declarations[chosen] = Declaration(
                    chosen, timing["schedule"], timing["every"], timetable, run, timing["queue"]
                )
            return self._tasks[chosen]

        return cast("TaskDecorator", register)

    def names(self) -> list[str]:
        """List the registered names.

        Returns:
            The names, in the order of their registration.
        """
        return list(self._tasks)

    def check(self, name: str, payload: Any) -> None:
        """Check a payload as a worker would.

        Args:
            name: The name of the task; if it is not registered, nothing is checked.
            payload: The payload.

        Raises:
            InvalidPayload: A task with this payload could not run.
        """
        if self._router.knows(name):
            self._tasks[name].check(name, payload)

    def _check_app(self, function: Callable[..., Any], *, scheduled: bool) -> None:
        """Reject schedules whose app would depend on the order of imports."""
        if self._app is not None or not (scheduled or self._declarations):
            return
        packages = sorted({*self._router.packages(), package_of(function.__module__)})
        if len(packages) > 1:
            raise InvalidArgument(
                f"functions of several packages ({', '.join(packages)}) share schedules: name "
                "their app, as in Tasks(app='billing')",
                argument="app",
                code="no_app",
            )


def _check_schedule(timing: Mapping[str, Any]) -> ScheduleOptions | None:
    """Return the options of a schedule, checked; ``None`` if the task has none."""
    given = {key: value for key in SCHEDULE_OPTIONS if (value := timing[key]) is not None}
    if timing["schedule"] is None and timing["every"] is None:
        for key, value in given.items():
            raise invalid_argument(key, value, "give schedule or every, too")
        return None
    arguments, queue = given.pop("arguments", None), given.pop("queue", None)
    if arguments is not None and not isinstance(arguments, Mapping):
        raise invalid_argument("arguments", arguments, "give a dict")
    if queue is not None:
        check_name(queue)
    options = cast("ScheduleOptions", given)
    check_timetable(timing["schedule"], timing["every"], options)
    return options


def package_of(module: str | None) -> str:
    """Return the top-level package of a module; of a script, the name of its file."""
    module = module or "__main__"  # A function that ``exec`` made may have none.
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if module == "__main__" and spec is not None:  # It runs with ``python -m``.
        module = spec.name
    if module != "__main__":
        return module.partition(".")[0]
    script = getattr(main, "__file__", None)
    return Path(script).stem if script else module


def check_options(options: NamedTaskOptions) -> NamedTaskOptions:
    """Reject options that ``enqueue`` rejects, and another name for the task."""
    stored: dict[str, Any] = {key: value for key, value in options.items() if key != "session"}
    new = NewTask[Any](payload={}, **stored)
    if new.name is not None:
        raise invalid_argument("name", new.name, "leave it out: the task has the name it was given")
    if NAME_HEADER in new.headers:
        raise invalid_argument("headers", new.headers, f"{NAME_HEADER!r} names the task")
    return options
