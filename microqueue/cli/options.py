"""Options that several commands share, and the command class that parses them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeAlias

import typer
from pydantic import ValidationError
from typer.core import TyperCommand

from microqueue.cli import values
from microqueue.cli.logs import LogFormat, LogLevel
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.drivers.connection import DEFAULT_DATABASE
from microqueue.model import reason_of, shorten
from microqueue.task import DEFAULT_QUEUE

DURATION = {"parser": values.read_duration, "metavar": "DURATION"}


EXACT_HELP = "Count everything, which takes seconds with a million tasks."


INSTANT = {"parser": values.read_instant, "metavar": "TIME"}


Reveal: TypeAlias = Annotated[
    bool, typer.Option("--reveal", help="Show passwords, tokens and the like, instead of masks.")
]


PAST: dict[str, Any] = {"parser": values.read_past, "metavar": "TIME"}


AllQueues: TypeAlias = Annotated[
    bool, typer.Option("--all-queues", help="Act on all queues; else give --queue.")
]


PANEL = "Options of every command"


POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


KEYWORD = inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True)
class SharedOptions:
    """What was given before the command, or after it."""

    uri: Annotated[
        str | None,
        typer.Option(
            "--uri",
            metavar="URI",
            help="The MongoDB to use. Else that of $MICROQUEUE_URI, else the embedded server. "
            f"Its path names the database, as in mongodb://host/shop; else {DEFAULT_DATABASE}.",
            rich_help_panel=PANEL,
        ),
    ] = None
    collection: Annotated[
        str | None,
        typer.Option(
            "--collection",
            metavar="NAME",
            help=f"The collection of the tasks. Else {DEFAULT_COLLECTION}.",
            rich_help_panel=PANEL,
        ),
    ] = None
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue",
            "-q",
            metavar="NAME",
            help="The queue. Without it, commands that read use all queues, those that delete or "
            f"replay ask for it or --all-queues, and the others use {DEFAULT_QUEUE!r}.",
            rich_help_panel=PANEL,
        ),
    ] = None
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON for programs.", rich_help_panel=PANEL),
    ] = False
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            "--log-level",
            help="What to log to stderr. Else warning, and info for a worker.",
            rich_help_panel=PANEL,
        ),
    ] = None
    log_format: Annotated[
        LogFormat | None,
        typer.Option("--log-format", help="How log lines look.", rich_help_panel=PANEL),
    ] = None
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=PANEL),
    ] = False

    def over(self, earlier: SharedOptions | None) -> SharedOptions:
        """Take what was given here, and for the rest what was given earlier."""
        if earlier is None:
            return self
        given = {name: getattr(self, name) for name in NAMES}
        chosen = {name: value for name, value in given.items() if value not in {None, False}}
        return replace(earlier, **chosen)


NAMES = tuple(field.name for field in fields(SharedOptions))


def with_shared_options(
    function: Callable[..., None], *, like: Callable[..., None]
) -> Callable[..., None]:
    """Give typer a function with the options of ``like``, without its first, and the shared ones.

    A command that takes several queues declares ``queues`` itself.
    ``function`` gets the context, the shared options, and then the others by name.
    """
    signature = inspect.signature(like, eval_str=True)
    shared = inspect.signature(SharedOptions, eval_str=True)
    parameters = [
        inspect.Parameter("context", POSITIONAL, annotation=typer.Context),
        *list(signature.parameters.values())[1:],
        *(
            one.replace(kind=KEYWORD)
            for one in shared.parameters.values()
            if not (one.name == "queue" and "queues" in signature.parameters)
        ),
    ]

    @functools.wraps(like)
    def wrapper(context: typer.Context, **values: Any) -> None:
        given = SharedOptions(**{name: values.pop(name) for name in NAMES if name in values})
        function(context, given, **values)

    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it.
    wrapper.__annotations__ = {one.name: one.annotation for one in parameters}
    return wrapper


class Command(TyperCommand):
    """A command of typer's, which leaves the value out of what pydantic says about it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; name the one that is refused by what was typed."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as exc:
            cause = exc.__cause__
            if isinstance(cause, ValidationError):
                value = shorten(cause.errors(include_url=False)[0]["input"])
                if value not in exc.message:
                    exc.message = f"{value} is not valid: {reason_of(cause)}."
            raise
