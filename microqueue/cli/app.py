"""All commands by name: the table of contents of the command line.

To add a command, write a function that takes a :class:`~microqueue.cli.session.Session` and its
own options, and add it to a table below with the queues that it uses.
"""

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
    doctor,
    indexes,
    migrate,
    names,
    pipelines,
    queues,
    schedules,
    sweep,
    tasks,
    top,
    topics,
    up,
    worker,
)
from microqueue.cli.exit import exiting_cleanly
from microqueue.cli.options import CliCommand, QueueScope, SharedOptions, with_shared_options
from microqueue.cli.session import with_session
from microqueue.masking import without_fragments

HELP = """A task queue in the MongoDB you already run.

Options of every command may stand before or after its name. A DURATION is a number of seconds,
or has units: 30s, 5m, 2h, 1d. A TIME is ISO 8601 with a timezone. Exit status: 0 for success,
1 for an error, 2 for wrong usage; `wait` has more.
"""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # They would print local variables, and so passwords.
    context_settings={"help_option_names": ["--help", "-h"]},
)
dlq_app = typer.Typer(help="List, show, replay and discard dead letters.", no_args_is_help=True)
schedule_app = typer.Typer(help="Add, list, pause, run and remove schedules.", no_args_is_help=True)
pipeline_app = typer.Typer(
    help="Archive, ingest, replay and analyse tasks with Spark.", no_args_is_help=True
)

Commands: TypeAlias = dict[str, tuple[Callable[..., None], QueueScope]]

COMMANDS: dict[str, Commands] = {
    "Tasks": {
        "enqueue": (tasks.enqueue, QueueScope.DEFAULT),
        "peek": (tasks.peek, QueueScope.ALL),
        "show": (tasks.show, QueueScope.OF_TASK),
        "wait": (tasks.wait, QueueScope.OF_TASK),
        "cancel": (tasks.cancel, QueueScope.OF_TASK),
        "purge": (tasks.purge, QueueScope.REQUIRED),
    },
    "Topics": {
        "publish": (topics.publish, QueueScope.NONE),
        "subscribe": (topics.subscribe, QueueScope.NONE),
        "topics": (topics.topics, QueueScope.NONE),
        "bind": (topics.bind, QueueScope.NONE),
        "unbind": (topics.unbind, QueueScope.NONE),
    },
    "Running": {
        "up": (up.up, QueueScope.NONE),
        "worker": (worker.worker, QueueScope.SEVERAL),
        "sweep": (sweep.sweep, QueueScope.ALL),
        "pause": (queues.pause, QueueScope.DEFAULT),
        "resume": (queues.resume, QueueScope.DEFAULT),
    },
    "Monitoring": {
        "stats": (queues.stats, QueueScope.ALL),
        "names": (names.names, QueueScope.ALL),
        "top": (top.top, QueueScope.ALL),
        "dashboard": (dashboard.dashboard, QueueScope.NONE),
        "doctor": (doctor.doctor, QueueScope.DEFAULT),
        "indexes": (indexes.indexes, QueueScope.DEFAULT),
        "migrate": (migrate.migrate, QueueScope.NONE),
        "backoff": (backoff.backoff, QueueScope.NONE),
    },
}
DLQ_COMMANDS: Commands = {
    "list": (dead_letters.list_dead_letters, QueueScope.ALL),
    "show": (dead_letters.show, QueueScope.OF_TASK),
    "replay": (dead_letters.replay, QueueScope.REQUIRED_UNLESS_IDS),
    "discard": (dead_letters.discard, QueueScope.REQUIRED_UNLESS_IDS),
}
SCHEDULE_COMMANDS: Commands = {
    "list": (schedules.list_schedules, QueueScope.ALL),
    "put": (schedules.put, QueueScope.DEFAULT),
    "show": (schedules.show, QueueScope.DEFAULT),
    "next": (schedules.next_runs, QueueScope.DEFAULT),
    "pause": (schedules.pause, QueueScope.DEFAULT),
    "resume": (schedules.resume, QueueScope.DEFAULT),
    "trigger": (schedules.trigger, QueueScope.DEFAULT),
    "remove": (schedules.remove, QueueScope.DEFAULT),
}
PIPELINE_COMMANDS: Commands = {
    "archive": (pipelines.archive, QueueScope.REQUIRED),
    "ingest": (pipelines.ingest, QueueScope.DEFAULT),
    "replay": (pipelines.replay, QueueScope.REQUIRED),
    "report": (pipelines.report, QueueScope.ALL),
    "triage": (pipelines.triage, QueueScope.ALL),
    "storms": (pipelines.storms, QueueScope.ALL),
    "simulate": (pipelines.simulate, QueueScope.ALL),
}


def _print_version(wanted: bool) -> None:  # noqa: FBT001 (typer calls it so)
    if wanted:
        print(f"microqueue {microqueue.__version__}")  # noqa: T201 (it is the result)
        raise typer.Exit


def _global_options(
    context: typer.Context,
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Declare the options that may stand before a command."""


def _keep_options(context: typer.Context, given: SharedOptions, **_: object) -> None:
    context.obj = given


def _register(group: typer.Typer, commands: Commands, panel: str | None = None) -> None:
    for name, (function, scope) in commands.items():
        group.command(name, cls=CliCommand, rich_help_panel=panel)(with_session(function, scope))


app.callback(help=HELP)(with_shared_options(_keep_options, like=_global_options))
for panel, commands in COMMANDS.items():
    _register(app, commands, panel)
_register(dlq_app, DLQ_COMMANDS)
_register(schedule_app, SCHEDULE_COMMANDS)
_register(pipeline_app, PIPELINE_COMMANDS)
app.add_typer(dlq_app, name="dlq", rich_help_panel="Tasks")
app.add_typer(schedule_app, name="schedule", rich_help_panel="Tasks")
app.add_typer(pipeline_app, name="pipeline", rich_help_panel="Running")


def run() -> None:
    """Run the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # Not every terminal can encode everything.
            stream.reconfigure(errors="backslashreplace")
    try:
        with exiting_cleanly():
            app(prog_name="microqueue")
    finally:
        sys.excepthook = print_unexpected  # Not earlier: typer installs its own hook.


def print_unexpected(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the traceback of an unexpected error, without passwords."""
    lines = "".join(traceback.format_exception(kind, error, trace))
    sys.stderr.write(without_fragments(lines))
