"""The commands by name: the table of contents of the command line."""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Annotated, TypeAlias

import typer

import microqueue
from microqueue.cli import (
    backoff,
    dashboard,
    dead_letters,
    maintenance,
    pipelines,
    queues,
    tasks,
    top,
    up,
    worker,
)
from microqueue.cli.exit import telling_how_it_ends
from microqueue.cli.options import Command, SharedOptions, with_shared_options
from microqueue.cli.session import with_session
from microqueue.masking import without_fragments

HELP = """A task queue that lives in the MongoDB you already run.

The options of every command may stand before its name or after it. Durations are seconds,
or 30s, 5m, 2h, 1d. Times are ISO 8601 with a timezone. The exit status is 0, or 1 for an
error, or 2 for a wrong usage.
"""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # They would show local variables, and passwords.
    context_settings={"help_option_names": ["--help", "-h"]},
)
dlq_app = typer.Typer(help="List, show, replay and discard dead letters.", no_args_is_help=True)
pipeline_app = typer.Typer(
    help="Archive, load and understand tasks on Spark.", no_args_is_help=True
)

Commands: TypeAlias = dict[str, Callable[..., None]]

COMMANDS: dict[str, Commands] = {
    "Tasks": {
        "enqueue": tasks.enqueue,
        "peek": tasks.peek,
        "show": tasks.show,
        "cancel": tasks.cancel,
        "purge": tasks.purge,
    },
    "Running": {
        "up": up.up,
        "worker": worker.worker,
        "sweep": maintenance.sweep,
        "pause": queues.pause,
        "resume": queues.resume,
    },
    "Watching": {
        "stats": queues.stats,
        "top": top.top,
        "dashboard": dashboard.dashboard,
        "doctor": maintenance.doctor,
        "indexes": maintenance.indexes,
        "backoff": backoff.backoff,
    },
}
DEAD_LETTER_COMMANDS: Commands = {
    "list": dead_letters.list_letters,
    "show": dead_letters.show_letter,
    "replay": dead_letters.replay,
    "discard": dead_letters.discard,
}
PIPELINE_COMMANDS: Commands = {
    "archive": pipelines.archive,
    "ingest": pipelines.ingest,
    "report": pipelines.report,
    "triage": pipelines.triage,
    "replay": pipelines.replay,
    "storms": pipelines.storms,
    "simulate": pipelines.simulate,
}


def _show_version(wanted: bool) -> None:  # noqa: FBT001 (typer calls it so)
    if wanted:
        print(f"microqueue {microqueue.__version__}")  # noqa: T201 (it is the answer)
        raise typer.Exit


def _options(
    context: typer.Context,
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Declare the options that may stand before a command."""


def _keep(context: typer.Context, given: SharedOptions, **_: object) -> None:
    context.obj = given


app.callback(help=HELP)(with_shared_options(_keep, like=_options))
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        app.command(name, cls=Command, rich_help_panel=panel)(with_session(command))
for name, command in DEAD_LETTER_COMMANDS.items():
    dlq_app.command(name, cls=Command)(with_session(command))
app.add_typer(dlq_app, name="dlq", rich_help_panel="Tasks")
for name, command in PIPELINE_COMMANDS.items():
    pipeline_app.command(name, cls=Command)(with_session(command))
app.add_typer(pipeline_app, name="pipeline", rich_help_panel="Running")


def run() -> None:
    """Run the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # Not every terminal knows every character.
            stream.reconfigure(errors="backslashreplace")
    try:
        with telling_how_it_ends():
            app(prog_name="microqueue")
    finally:
        sys.excepthook = _tell_unexpected  # Not before: typer has put its own one there.


def _tell_unexpected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the traceback of what must not happen, without passwords."""
    lines = "".join(traceback.format_exception(kind, error, trace))
    sys.stderr.write(without_fragments(lines))
