"""A function as a handler: its arguments, typed by its annotations, to and from a document."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NotRequired, cast, get_type_hints

from pydantic import ConfigDict
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict

from microqueue.durations import PositiveDuration
from microqueue.errors import InvalidArgument, InvalidPayload
from microqueue.model import Model
from microqueue.payload import PayloadCodec
from microqueue.worker.context import AsyncContext, Context
from microqueue.worker.handlers import CONTEXT, Handler
from microqueue.worker.outcomes import Fail, Judgement


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
        judgement=Judgement(fatal=running.fatal, retryable=running.retryable),
    )


def _refused(function: Any, reason: str) -> InvalidArgument:
    name = getattr(function, "__qualname__", repr(function))
    return InvalidArgument(
        f"{name} cannot be a task: {reason}", argument="function", value=function
    )
