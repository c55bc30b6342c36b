"""Options that several commands share, and the command class that parses them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import typer
from pydantic import ValidationError
from typer.core import TyperCommand

from microqueue.cli import values
from microqueue.cli.logs import LogFormat, LogLevel
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.drivers.connection import DEFAULT_DATABASE, URI_VARIABLE
from microqueue.model import reason_of, shorten
from microqueue.task import DEFAULT_QUEUE

HOOKS_VARIABLE = "MICROQUEUE_HOOKS"
DURATION: dict[str, Any] = {"parser": values.read_duration, "metavar": "DURATION"}
TIME: dict[str, Any] = {"parser": values.read_instant, "metavar": "TIME"}
PAST: dict[str, Any] = {"parser": values.read_past, "metavar": "TIME"}

Backoff: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY",
        help="Waits between attempts, as in base=5,factor=2,max=1800,jitter=full; parts that are "
        "left out are as in this one. \\[default: $MICROQUEUE_BACKOFF]",
    ),
]
VisibilityTimeout: TypeAlias = Annotated[
    timedelta | None,
    typer.Option(
        help="Length of a lease. \\[default: the setting of the worker]",
        **DURATION,
    ),
]
Reveal: TypeAlias = Annotated[
    bool, typer.Option("--reveal", help="Show passwords, tokens and other secrets unmasked.")
]
Exact: TypeAlias = Annotated[
    bool,
    typer.Option("--exact", help="Count every task. Takes seconds with a million tasks."),
]
TaskName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="Only tasks with this name; '' for those without one."
    ),
]
AllQueues: TypeAlias = Annotated[
    bool, typer.Option("--all-queues", help="Act on all queues, instead of one --queue.")
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Count the matching tasks, and change nothing.")
]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
MetricsHost: TypeAlias = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Address to serve metrics on.")
]

HooksReference: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--hooks",
        metavar="MODULE:NAME",
        envvar=HOOKS_VARIABLE,
        show_envvar=True,
        help="Hooks to call for each dead letter: an instance or subclass of Hooks, or a list.",
    ),
]

SHARED_PANEL = "Options of every command"


class QueueScope(StrEnum):
    """Which queues a command uses; the value is the help text of its ``--queue``.

    A scope only sets the help, and the command checks it: with ``NONE`` by
    ``session.reject_queue``, with ``REQUIRED`` by ``all_queues: AllQueues`` and
    ``session.check_scope``.
    """

    DEFAULT = f"Queue to use. \\[default: {DEFAULT_QUEUE}]"
    ALL = "Use only this queue. \\[default: all queues]"
    REQUIRED = "Act on this queue only. Required, unless --all-queues is given."
    REQUIRED_UNLESS_IDS = (
        "Act on this queue only. Required, unless --all-queues or task ids are given."
    )
    OF_TASK = "Queue that the task must be in. \\[default: any queue]"
    SEVERAL = ""  # The command declares --queue itself.
    NONE = "This command takes no queue."


ANY_COMMAND_QUEUE = "Queue to use. The help of each command states its default."


@dataclass(frozen=True)
class SharedOptions:
    """The options that every command accepts, before its name or after it."""

    uri: Annotated[
        str | None,
        typer.Option(
            "--uri",
            metavar="URI",
            help="MongoDB to connect to. The path names the database, as in mongodb://host/shop; "
            f"without a path, it is {DEFAULT_DATABASE}. "
            f"\\[default: ${URI_VARIABLE}, or the embedded server]",
            rich_help_panel=SHARED_PANEL,
        ),
    ] = None
    collection: Annotated[
        str | None,
        typer.Option(
            "--collection",
            metavar="NAME",
            help=f"Collection that holds the tasks. \\[default: {DEFAULT_COLLECTION}]",
            rich_help_panel=SHARED_PANEL,
        ),
    ] = None
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue", "-q", metavar="NAME", help=ANY_COMMAND_QUEUE, rich_help_panel=SHARED_PANEL
        ),
    ] = None
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the result as JSON.", rich_help_panel=SHARED_PANEL),
    ] = False
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            "--log-level",
            help="Lowest level to log to stderr. \\[default: info for worker, else warning]",
            rich_help_panel=SHARED_PANEL,
        ),
    ] = None
    log_format: Annotated[
        LogFormat | None,
        typer.Option(
            "--log-format",
            help="Format of log lines. \\[default: text]",
            rich_help_panel=SHARED_PANEL,
        ),
    ] = None
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Print the traceback of an error.", rich_help_panel=SHARED_PANEL
        ),
    ] = False

    def over(self, earlier: SharedOptions) -> SharedOptions:
        """Return these options, completed by those given before the command."""
        given = {name: getattr(self, name) for name in SHARED_NAMES}
        chosen = {name: value for name, value in given.items() if value not in {None, False}}
        return replace(earlier, **chosen)


SHARED_NAMES = tuple(field.name for field in fields(SharedOptions))


def with_shared_options(
    function: Callable[..., None],
    *,
    like: Callable[..., None],
    scope: QueueScope | None = None,
) -> Callable[..., None]:
    """Return a function for typer with the options of ``like`` and the shared options.

    Args:
        function: Called with the context, the shared options, and the other options by name.
        like: Declares the other options. Its first parameter is dropped.
        scope: Which queues the command uses; None before a command.
    """
    signature = inspect.signature(like, eval_str=True)
    shared = inspect.signature(SharedOptions, eval_str=True).parameters
    parameters = [
        inspect.Parameter(
            "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        ),
        *list(signature.parameters.values())[1:],
        *(
            _queue_parameter(one, scope) if one.name == "queue" and scope is not None else one
            for one in (one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in shared.values())
            if not (one.name == "queue" and scope is QueueScope.SEVERAL)
        ),
    ]

    @functools.wraps(like)
    def wrapper(context: typer.Context, **values: Any) -> None:
        given = SharedOptions(**{name: values.pop(name) for name in SHARED_NAMES if name in values})
        function(context, given, **values)

    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it.
    wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
    return wrapper


def _queue_parameter(shared: inspect.Parameter, scope: QueueScope) -> inspect.Parameter:
    """Declare ``--queue`` with the help text of one command; hide it where it has no effect."""
    option = typer.Option(
        "--queue",
        "-q",
        metavar="NAME",
        help=scope.value,
        hidden=scope is QueueScope.NONE,
        rich_help_panel=SHARED_PANEL,
    )
    return shared.replace(annotation=Annotated[str | None, option])


def renamed(old: str, new: str, **settings: Any) -> Any:
    """Declare the former name of an option: hidden, with a note on stderr when it is used."""

    def note(value: Any) -> Any:
        if value is not None:
            typer.echo(f"Warning: {old} is deprecated; use {new}.", err=True)
        return value

    return typer.Option(old, hidden=True, callback=note, **settings)


class CliCommand(TyperCommand):
    """A typer command whose usage errors name the value that was typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; replace pydantic's message by one with the rejected value."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as exc:
            cause = exc.__cause__
            if isinstance(cause, ValidationError):
                value, reason = shorten(cause.errors()[0]["input"]), reason_of(cause)
                exc.message = reason if value in reason else f"{value} is not valid: {reason}."
            raise
