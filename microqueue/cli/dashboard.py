"""The command that serves the dashboard."""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from microqueue.cli.dlq_detection import adopt
from microqueue.cli.exit import stop_on_signals
from microqueue.cli.session import Session
from microqueue.errors import MicroqueueError, ServerUnavailable
from microqueue.queue import Queue
from microqueue.settings import DASHBOARD_PORT
from microqueue.worker.handlers import load_handler
from microqueue.worker.threads import DaemonThread
from microqueue.worker.waiting import await_server

if TYPE_CHECKING:
    from microqueue.dashboard.server import DashboardServer

TOKEN_BYTES = 32
ADOPT_EVERY_SEC = 5.0
TOKEN_VARIABLE = "MICROQUEUE_DASHBOARD_TOKEN"  # noqa: S105 (a name)


class NotInstalled(MicroqueueError):
    """The extra that serves the dashboard is missing."""


def dashboard(
    session: Session,
    *,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = DASHBOARD_PORT,
    read_only: Annotated[bool, typer.Option("--read-only", help="Look, but do not act.")] = False,
    token: Annotated[
        str | None,
        typer.Option(
            envvar=TOKEN_VARIABLE,
            help="What viewers have to give; needed for an address that others can reach.",
            show_envvar=True,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let everybody in who can reach the address.")
    ] = False,
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trust-proxy",
            metavar="ADDRESS",
            help="A proxy, or a network of proxies, whose X-Forwarded-For names the client. "
            "May be repeated.",
        ),
    ] = None,
    manual_actions: Annotated[
        bool,
        typer.Option(
            "--manual-actions",
            help="Let viewers mark tasks as done or failed that no worker ran.",
        ),
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Your named tasks, as in shop.tasks:tasks. What viewers enqueue is checked "
            "against them.",
        ),
    ] = None,
    show_secrets: Annotated[
        bool, typer.Option("--show-secrets", help="Do not mask passwords, tokens and the like.")
    ] = False,
    new_token: Annotated[
        bool, typer.Option("--new-token", help="Print a new random token and exit.")
    ] = False,
) -> None:
    """Serve the dashboard until Ctrl-C: see the queues, and deal with the dead letters."""
    if new_token:
        _print_token(session)
        return
    server = _serving()
    server.check_token(token)
    server.check_reach(host, protected=bool(token), insecure=insecure)
    options: dict[str, Any] = {
        "read_only": read_only,
        "manual_actions": manual_actions,
        "token": token,
        "proxies": trust_proxy or (),
    }
    if tasks is not None:
        options["tasks"] = load_handler(tasks, kind="tasks", example="tasks")
    if show_secrets:
        options["redact"] = None
    session.refuse_queue("the dashboard shows all queues")
    with session.open() as queue:
        with suppress(ServerUnavailable):  # The page tells that, and when the server is back.
            adopt(queue)
        server = new_server(queue, host=host, port=port, insecure=insecure, **options)
        with stop_on_signals() as stop, server.running():
            announce(session, server)
            DaemonThread(partial(_go_on_adopting, queue, stop), name="microqueue-adopt").start()
            stop.wait()


def _print_token(session: Session) -> None:
    token = secrets.token_urlsafe(TOKEN_BYTES)
    if session.out.as_json:
        session.out.json({"token": token})
    else:
        typer.echo(token)


def _go_on_adopting(queue: Queue[Any], stop: threading.Event) -> None:
    """Find dead letters that are kept apart from now on: server or service may start later."""
    await_server(partial(adopt, queue), who="dashboard", stopping=stop.is_set)
    while "dead_letters" not in queue.settings.model_fields_set and not stop.wait(ADOPT_EVERY_SEC):
        with suppress(MicroqueueError):  # The next look may do.
            adopt(queue)


def new_server(queue: Queue[Any], **options: Any) -> DashboardServer:
    """Make a server, or say in one sentence what it lacks."""
    server: DashboardServer = _serving().DashboardServer(queue, **options)
    return server


def _serving() -> Any:
    try:
        from microqueue.dashboard import server  # noqa: PLC0415 (an optional extra)
    except ImportError as exc:
        raise NotInstalled(str(exc)) from exc
    return server


def announce(session: Session, server: DashboardServer) -> None:
    """Say where the dashboard is."""
    if session.out.as_json:
        session.out.json({"dashboard": server.address}, stream=True)
        return
    line = Text("The dashboard is at ").append(server.address, style="bold green")
    session.out.console.print(line, soft_wrap=True)
    session.out.say("Ctrl-C ends it.")
