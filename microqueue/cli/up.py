"""The ``up`` command: run the embedded server, its sweeper and the dashboard."""

from __future__ import annotations

import os
import shlex
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from microqueue.cli.dashboard import NotInstalled, new_server
from microqueue.cli.dlq_detection import detect_dlq
from microqueue.cli.exit import stop_on_signals
from microqueue.cli.options import DURATION, HooksReference
from microqueue.cli.session import Session
from microqueue.cli.sweep import print_sweep
from microqueue.core import core_of
from microqueue.drivers.connection import URI_VARIABLE
from microqueue.embedded import EmbeddedServer, default_directory
from microqueue.embedded.probe import check_port
from microqueue.errors import EmbeddedServerError, InvalidArgument, MicroqueueError
from microqueue.operations.diagnostics import server_version
from microqueue.queue import Queue
from microqueue.settings import DASHBOARD_PORT
from microqueue.sweeper import Sweeper, check_every, wait_for_next_sweep

if TYPE_CHECKING:
    from microqueue.dashboard.server import DashboardServer

CHECK_SEC = 1.0
"""How often to check that the server is still running."""
NEXT_STEPS = (
    ('microqueue enqueue \'{"hello": "world"}\'', "enqueue a task"),
    ("microqueue worker module:function", "process tasks"),
    ("microqueue stats --watch", "watch the queues"),
)


def up(
    session: Session,
    *,
    directory: Annotated[
        Path | None,
        typer.Option(
            help="Data directory of MongoDB. "
            "\\[default: $MICROQUEUE_HOME, or a directory in your home]"
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of MongoDB. \\[default: any free port]")
    ] = None,
    every: Annotated[
        timedelta,
        typer.Option(
            help="Time between two sweeps. \\[default: 5s]", show_default=False, **DURATION
        ),
    ] = timedelta(seconds=5),
    dashboard_port: Annotated[
        int | None,
        typer.Option(
            help=f"Port of the dashboard. \\[default: {DASHBOARD_PORT}, or any free port]"
        ),
    ] = None,
    with_dashboard: Annotated[
        bool, typer.Option("--dashboard/--no-dashboard", help="Serve the dashboard.")
    ] = True,
    hooks: HooksReference = None,
) -> None:
    """Run an embedded MongoDB, the sweeper and the dashboard until Ctrl-C or SIGTERM.

    Other commands use this server by default. The tasks are kept when it stops.
    """
    session.reject_queue("up runs a server for all queues")
    if session.options.uri is not None:
        raise InvalidArgument("up runs the embedded server; leave --uri out", argument="uri")
    pause = check_every(every)
    check_port(dashboard_port, "dashboard_port")
    session.load_hooks(hooks)
    home = directory or default_directory()
    with stop_on_signals() as stop, EmbeddedServer.start(home, port=port) as server:
        with (
            Queue[Any].from_uri(
                server.uri, collection=session.collection, hooks=session.hooks
            ) as queue,
            ExitStack() as stack,
        ):
            detect_dlq(queue)
            core = core_of(queue)
            core.run(core.prepare())
            page = _dashboard(session, queue, dashboard_port) if with_dashboard else None
            if page is not None:
                stack.enter_context(page.running())
            _announce(session, server, core.run(server_version()), page)
            report = partial(print_sweep, session, quiet=True, stream=True)
            sweeper = Sweeper(queue, on_report=report)
            _sweep_until(stop, session, server, queue, sweeper, pause=pause)
        session.out.print("Stopping ...")
    session.out.print("Stopped. The tasks are kept.")


def _dashboard(session: Session, queue: Queue[Any], port: int | None) -> DashboardServer | None:
    """Return the dashboard server, or None if its extra is not installed."""
    try:
        if port is not None:
            return new_server(queue, port=port)
        try:
            return new_server(queue)
        except InvalidArgument:
            return new_server(queue, port=0)
    except NotInstalled as exc:
        session.out.hint(str(exc))
        return None


def _sweep_until(
    stop: threading.Event,
    session: Session,
    server: EmbeddedServer,
    queue: Queue[Any],
    sweeper: Sweeper,
    *,
    pause: float,
) -> None:
    def failed(exc: MicroqueueError) -> None:
        if server.is_alive():  # Otherwise the wait raises.
            session.out.error(exc)

    wait = partial(_wait, stop, server)
    while not stop.is_set():
        try:
            detect_dlq(queue)
            sweeper.run_once()
        except MicroqueueError as exc:  # The next sweep may succeed.
            failed(exc)
        wait_for_next_sweep(sweeper, pause, stop, on_error=failed, wait=wait)


def _wait(stop: threading.Event, server: EmbeddedServer, seconds: float) -> None:
    """Wait, or until a stop.

    Raises:
        EmbeddedServerError: The server has stopped.
    """
    until = time.monotonic() + seconds
    while not stop.is_set():
        if not server.is_alive():
            raise EmbeddedServerError(
                f"MongoDB has stopped; see its log in {server.directory}. The tasks are kept: "
                "run `microqueue up` again",
                code="stopped",
            )
        if (left := until - time.monotonic()) <= 0:
            return
        stop.wait(min(left, CHECK_SEC))


def _announce(
    session: Session, server: EmbeddedServer, version: str, page: DashboardServer | None
) -> None:
    out = session.out
    if out.as_json:
        out.json(
            {
                "uri": server.uri,
                "directory": str(server.directory),
                "pid": server.pid,
                "version": version,
                "reused": server.reused,
                "dashboard": None if page is None else page.address,
            },
            stream=True,
        )
        return
    verb = "was already running" if server.reused else "is running"
    out.print(f"MongoDB {version} {verb}, with its data in {server.directory}")
    out.console.print(Text(f"  {server.uri}", style="bold green"), soft_wrap=True)
    if page is not None:
        line = Text("  Dashboard: ").append(page.address, style="bold green")
        out.console.print(line, soft_wrap=True)
    out.print("\nIn another terminal:")
    if server.directory != default_directory().resolve():
        out.print(f"  export MICROQUEUE_HOME={shlex.quote(str(server.directory))}", "cyan")
    elif os.environ.get(URI_VARIABLE):
        out.print(f"  unset {URI_VARIABLE}   # otherwise commands use that server", "cyan")
    steps = [(session.with_collection(command), purpose) for command, purpose in NEXT_STEPS]
    width = max(len(command) for command, _ in steps)
    for command, purpose in steps:
        line = Text(f"  {command:{width}}", style="cyan").append(f"   {purpose}", style="dim")
        out.console.print(line, soft_wrap=True)
    out.print("\nThe sweeper is running. Press Ctrl-C to stop everything; the tasks are kept.")
