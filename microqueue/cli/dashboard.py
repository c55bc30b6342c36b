"""The ``dashboard`` command: serve the dashboard."""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer
from rich.text import Text

from microqueue.cli.dlq_detection import detect_dlq
from microqueue.cli.exit import stop_on_signals
from microqueue.cli.loading import load
from microqueue.cli.options import HooksReference
from microqueue.cli.session import Session
from microqueue.errors import MicroqueueError, ServerUnavailable
from microqueue.queue import Queue
from microqueue.settings import DASHBOARD_PORT
from microqueue.worker.daemon_threads import DaemonThread
from microqueue.worker.handlers import load_tasks
from microqueue.worker.waiting import await_server

if TYPE_CHECKING:
    from microqueue.dashboard.options import DashboardServerOptionsDict
    from microqueue.dashboard.server import DashboardServer

TOKEN_BYTES = 32
DETECT_EVERY_SEC = 5.0
TOKEN_VARIABLE = "MICROQUEUE_DASHBOARD_TOKEN"  # noqa: S105 (a name)


class NotInstalled(MicroqueueError):
    """The ``dashboard`` extra is not installed."""


def dashboard(
    session: Session,
    *,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 for any free port.")
    ] = DASHBOARD_PORT,
    read_only: Annotated[bool, typer.Option("--read-only", help="Disable all actions.")] = False,
    token: Annotated[
        str | None,
        typer.Option(
            envvar=TOKEN_VARIABLE,
            help="Token that users log in with. Required on an address that other hosts can reach.",
            show_envvar=True,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow access without a token from other hosts.")
    ] = False,
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trust-proxy",
            metavar="ADDRESS",
            help="Address or network of a proxy whose X-Forwarded-For header is trusted; "
            "repeatable.",
        ),
    ] = None,
    manual_actions: Annotated[
        bool,
        typer.Option(
            "--manual-actions",
            help="Allow marking tasks as done or failed without a worker.",
        ),
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Tasks registry, as in shop.tasks:tasks; validates what users enqueue.",
        ),
    ] = None,
    hooks: HooksReference = None,
    show_secrets: Annotated[
        bool,
        typer.Option("--show-secrets", help="Show passwords, tokens and other secrets unmasked."),
    ] = False,
    new_token: Annotated[
        bool, typer.Option("--new-token", help="Print a new random token and exit.")
    ] = False,
) -> None:
    """Serve the dashboard until Ctrl-C or SIGTERM."""
    if new_token:
        _print_token(session)
        return
    server = _serving()
    server.check_token(token)
    server.check_reach(host, protected=bool(token), insecure=insecure)
    options: DashboardServerOptionsDict = {
        "host": host,
        "port": port,
        "insecure": insecure,
        "read_only": read_only,
        "manual_actions": manual_actions,
        "token": token,
        "proxies": trust_proxy or (),
    }
    if tasks is not None:
        options["tasks"] = load(tasks, by=load_tasks)
    if show_secrets:
        options["redact"] = None
    session.reject_queue("the dashboard shows all queues")
    session.load_hooks(hooks)
    with session.open() as queue:
        with suppress(ServerUnavailable):  # The page shows that, and reconnects.
            detect_dlq(queue)
        server = new_server(queue, **options)
        with stop_on_signals() as stop, server.running():
            announce(session, server)
            DaemonThread(
                partial(_keep_detecting_dlq, queue, stop), name="microqueue-dlq-detection"
            ).start()
            stop.wait()


def _print_token(session: Session) -> None:
    token = secrets.token_urlsafe(TOKEN_BYTES)
    if session.out.as_json:
        session.out.json({"token": token})
    else:
        typer.echo(token)


def _keep_detecting_dlq(queue: Queue[Any], stop: threading.Event) -> None:
    """Detect a DLQ collection that appears later: the server or a service may start after us."""
    await_server(partial(detect_dlq, queue), who="dashboard", stopping=stop.is_set)
    while "dead_letters" not in queue.settings.model_fields_set and not stop.wait(DETECT_EVERY_SEC):
        with suppress(MicroqueueError):  # The next attempt may succeed.
            detect_dlq(queue)


def new_server(queue: Queue[Any], **options: Unpack[DashboardServerOptionsDict]) -> DashboardServer:
    """Return a dashboard server.

    Raises:
        NotInstalled: The extra is missing.
    """
    server: DashboardServer = _serving().DashboardServer(queue, **options)
    return server


def _serving() -> Any:
    try:
        from microqueue.dashboard import server  # noqa: PLC0415 (an optional extra)
    except ImportError as exc:
        raise NotInstalled(str(exc)) from exc
    return server


def announce(session: Session, server: DashboardServer) -> None:
    """Print the address of the dashboard."""
    if session.out.as_json:
        session.out.json({"dashboard": server.address}, stream=True)
        return
    line = Text("Dashboard: ").append(server.address, style="bold green")
    session.out.console.print(line, soft_wrap=True)
    session.out.print("Press Ctrl-C to stop.")
