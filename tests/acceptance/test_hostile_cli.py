"""Hostile text for each argument and option of each command: a value, or an error in one line.

Commands and their options are found in the command tree. A new command fails here until it has
usual arguments; a new option gets hostile text at once.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, get_args, get_type_hints

import pytest
import typer.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pymongo import MongoClient
from typer.main import get_command

from microqueue import MicroqueueError, Queue, Topic
from microqueue.cli import app as cli_app
from microqueue.cli.exit import INTERRUPTED
from microqueue.cli.options import SHARED_NAMES
from microqueue.cli.spark_runner import check_master
from microqueue.embedded import probe
from microqueue.testing.fixtures import temporary_database
from tests.hostile import EXAMPLES, INNER, MARK, PLANTS, TEXTS, CommandRecorder, planted, texts

OWN, OTHER = "own", "other"
"""The queue that commands are about, and the one whose tasks no command may change."""
STATUSES = {0, 1, 2, 3, 4, INTERRUPTED}
"""Those that the help and the documents name."""
STARTED = "started by a test"
SCHEDULES = "microqueue_schedules"


def tree(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Return all commands by name, those of groups included."""
    for name, one in getattr(command, "commands", {}).items():
        yield from tree(one, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), command


ROOT: Any = get_command(cli_app.app)
COMMANDS: dict[str, Any] = dict(tree(ROOT))
FUNCTIONS: dict[str, Callable[..., None]] = {
    f"{group}{name}": function
    for group, commands in [
        *(("", commands) for commands in cli_app.COMMANDS.values()),
        ("dlq ", cli_app.DLQ_COMMANDS),
        ("schedule ", cli_app.SCHEDULE_COMMANDS),
        ("pipeline ", cli_app.PIPELINE_COMMANDS),
    ]
    for name, (function, _) in commands.items()
}
TOPIC, TASK, SCHEDULE = {"topic": OWN}, {"task_id": "first"}, {"name": "nightly", "queue": OWN}
USUAL: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("doctor", "indexes", "migrate", "names", "peek", "stats", "topics")},
    **{name: {"queue": OWN} for name in ("pause", "resume", "schedule list", "dlq list")},
    **dict.fromkeys(("show", "cancel", "dlq show"), TASK),
    **{f"schedule {name}": SCHEDULE for name in ("show", "next", "pause", "resume", "trigger")},
    **{f"pipeline {name}": {} for name in ("report", "triage", "storms", "simulate")},
    "backoff": {},
    "bind": {**TOPIC, "queue_name": OWN},
    "dashboard": {"port": "0"},
    "dlq discard": {"queue": OWN, "code": "none", "yes": True},
    "dlq replay": {"queue": OWN, "code": "none", "yes": True},
    "enqueue": {"payload": "{}", "queue": OWN},
    "pipeline archive": {"path": "archive", "queue": OWN},
    "pipeline ingest": {"source": "rows.csv", "queue": OWN},
    "pipeline replay": {"where": "true", "queue": OWN},
    "publish": {**TOPIC, "message": "{}"},
    "purge": {"queue": OWN, "status": "done", "yes": True},
    "schedule put": {"name": "new", "payload": "{}", "every": "1h", "queue": OWN},
    "schedule remove": {"name": "gone", "queue": OWN},
    "subscribe": {**TOPIC, "timeout": "0.001s"},
    "sweep": {"queue": OWN},
    "top": {"once": True},
    "unbind": {**TOPIC, "queue_name": "gone"},
    "up": {},
    "wait": {**TASK, "timeout": "0.01s"},
    "worker": {"handler": f"{__name__}:handle", "queues": OWN, "burst": True},
}
"""The other arguments of each command."""
ALSO: dict[tuple[str, str], dict[str, Any]] = {
    ("worker", "metrics_host"): {"metrics_port": "0"},
    ("worker", "batch_wait"): {"batch": "2"},
    ("enqueue", "timeout"): {"wait_for_result": True},
    ("enqueue", "dedupe_for"): {"dedupe_key": "key"},
    ("schedule put", "cron"): {"every": None},
    ("schedule put", "timezone"): {"every": None, "cron": "0 3 * * *"},
    ("dlq replay", "ids"): {"queue": None, "code": None},
    ("dlq discard", "ids"): {"queue": None, "code": None},
}
"""What an option needs beside it; None: what it excludes."""
JSON = [
    f'{{"a": {{"$ne": "{INNER}"}}, "${MARK}": 1, "b.c": [{{"$where": "{INNER}"}}]}}',
    f'{{"$oid": "{INNER}"}}',
    '{"a": "\\ud800\\u0000"}',
    "[" * 100_000,
]
PAIRS = [f"{MARK}.b={{}}", f"${MARK}=$ne", f'a={{"$ne": "{INNER}"}}', f"a=\udcff{MARK}"]
PARTLY: dict[str, list[str]] = {
    "payload": JSON,
    "message": JSON,
    **dict.fromkeys(("backoff", "header", "where", "option", "weight", "policy"), PAIRS),
    **{key: [f"os:{MARK}", f"{__name__}:"] for key in ("handler", "hooks", "model", "tasks")},
}
"""Text that an argument gets beside that of all others, because it has a form."""
ALL = [TEXTS[0], TEXTS[2], f"\udcff{MARK}", TEXTS[12], "", "-1", "9" * 400]
"""What each argument and option gets."""
SHARED = [TEXTS[0], f"{MARK}\x00"]
"""What the options of every command get, at each of them."""
COLLECTIONS = ["$cmd", "system.users", "a\x00b", "\udcffa", ".a", "a$b", "", "a" * 300]
"""What no collection can be called."""


def handle(_payload: Any) -> None:
    """Do nothing, as the handler of a worker."""


def parameters(name: str) -> dict[str, Any]:
    """Return the arguments and options of a command that take a value."""
    return {one.name: one for one in COMMANDS[name].params if not getattr(one, "is_flag", False)}


def is_typed(name: str, parameter: str) -> bool:
    """Return whether an option is a number, a duration or an instant."""
    hint = get_type_hints(FUNCTIONS[name]).get(parameter, str)
    return not {int, float, timedelta, datetime}.isdisjoint({hint, *get_args(hint)})


def command_line(name: str, parameter: str, text: str) -> list[str]:
    """Return the arguments of a command, with a text for one of them."""
    values = {**USUAL[name], **ALSO.get((name, parameter), {}), parameter: text}
    options: list[str] = []
    positional: list[str] = []
    for one in COMMANDS[name].params:
        value = values.get(one.name)
        if value is None:
            continue
        if one.param_type_name == "argument":
            positional.append(value)
        else:
            options.append(one.opts[0] if value is True else f"{one.opts[0]}={value}")
    return [*name.split(), *options, "--", *positional]


class Started(MicroqueueError):
    """A command would have started what a test cannot wait for."""


def start(*_: Any, **__: Any) -> Any:
    raise Started(STARTED)


class Terminal:
    """The command line in this process, whose commands to MongoDB are recorded."""

    def __init__(self, uri: str, database: Any) -> None:
        self.commands = CommandRecorder()
        self.uri, self.database = uri, database
        self.client = MongoClient[Any](uri, event_listeners=[self.commands])
        for name in (OWN, OTHER):
            queue: Queue[Any] = Queue(database, name)
            queue.enqueue_many([{"n": 1}, {"n": 2}, {"n": 3}])
            dead, done = queue.pop_many(2)
            queue.mark_failure(dead, "broken", code="Broken")
            queue.mark_done(done)
            queue.schedules.put("nightly", every=3600)
            Topic(queue, name).bind(name)
        self.untouched = self.others()
        self.first = {name: database[name].distinct("_id") for name in ("tasks", SCHEDULES)}

    def reset(self) -> None:
        """Remove the tasks and schedules that earlier commands have added."""
        for name, ids in self.first.items():
            self.database[name].delete_many({"_id": {"$nin": ids}})

    def others(self) -> list[Any]:
        """Return what belongs to the other queue."""
        names = ("tasks", SCHEDULES, "microqueue_bindings", "microqueue_pauses")
        return [list(self.database[one].find({"queue": OTHER}, sort=[("_id", 1)])) for one in names]

    def connect(self, address: str, **options: Any) -> Any:
        """Return a client: the one that is recorded, which stays open; none waits for a server."""
        if address == self.uri:
            return self.client
        return MongoClient[Any](address, **{**options, "serverSelectionTimeoutMS": 1})

    def run(self, arguments: list[str]) -> Any:
        """Run a command; check its end, and what MongoDB got."""
        with self.commands.checked():
            result = typer.testing.CliRunner().invoke(cli_app.app, arguments)
        expected = result.exception is None or isinstance(result.exception, SystemExit)
        assert expected, (arguments, result.exception)
        assert result.exit_code in STATUSES, arguments
        assert "Traceback" not in result.output, arguments
        assert result.exit_code == 0 or result.stderr or result.stdout, arguments
        if self.commands.wrote:
            assert self.others() == self.untouched, arguments
        return result


@pytest.fixture(scope="module")
def terminal(
    replica_set: None, microqueue_server: Any, microqueue_client: MongoClient[Any]
) -> Iterator[Terminal]:
    with (
        temporary_database(microqueue_client) as database,
        pytest.MonkeyPatch.context() as patch,
    ):
        uri = microqueue_server.uri.replace("/?", f"/{database.name}?")
        terminal = Terminal(uri, database)
        patch.setattr(terminal.client, "close", lambda: None)
        patch.setattr("microqueue.queue.MongoClient", terminal.connect)
        patch.setattr(typer.testing, "_get_command", lambda _: ROOT)  # Otherwise made each time.
        patch.setenv("MICROQUEUE_URI", uri)
        without_processes(patch)
        yield terminal
        patch.undo()
        terminal.client.close()


def without_processes(patch: pytest.MonkeyPatch) -> None:
    """Let commands check everything, but start no server, process or endless loop."""

    def start_spark(_session: Any, master: str | None, **_: Any) -> Any:
        check_master(master)
        start()

    def start_server(_directory: Any, *, port: int | None) -> Any:
        probe.check_port(port)
        start()

    @contextmanager
    def stopped() -> Iterator[threading.Event]:
        stop = threading.Event()
        stop.set()
        yield stop

    def resolve(host: Any, port: Any, *_: Any, **__: Any) -> Any:
        return system(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)

    system = socket.getaddrinfo
    patch.setattr(socket, "getaddrinfo", resolve)  # No name is looked up in a network.
    patch.setattr("microqueue.cli.pipelines.running", start_spark)
    patch.setattr("microqueue.cli.worker.Supervisor", start)
    patch.setattr("microqueue.cli.up.EmbeddedServer.start", start_server)
    patch.setattr("microqueue.dashboard.server.DashboardServer.running", stop_listening)
    for module in ("dashboard", "sweep", "top", "topics", "up"):
        patch.setattr(f"microqueue.cli.{module}.stop_on_signals", stopped)


def stop_listening(server: Any) -> Any:
    server._socket.close()  # noqa: SLF001 (it listens since it was made)
    start()


# Commands


def test_each_command_has_usual_arguments() -> None:
    assert set(USUAL) == set(COMMANDS) == set(FUNCTIONS)
    for name, usual in USUAL.items():
        assert set(usual) <= {one.name for one in COMMANDS[name].params}
    for name, parameter in ALSO:
        assert parameter in parameters(name)
    assert set(PARTLY) <= {one for name in COMMANDS for one in parameters(name)}


@pytest.mark.parametrize("name", USUAL)
def test_usual_arguments_are_valid(terminal: Terminal, name: str) -> None:
    result = terminal.run(command_line(name, "", ""))
    assert result.exit_code != 2, result.output


@pytest.mark.parametrize("name", USUAL)
def test_hostile_text_is_a_value_or_an_error_in_one_line(terminal: Terminal, name: str) -> None:
    terminal.reset()
    own = [one for one in parameters(name) if one not in SHARED_NAMES]

    def check_text(parameter: str, text: str) -> None:
        result = terminal.run(command_line(name, parameter, text))
        if MARK in text and is_typed(name, parameter):
            assert result.exit_code == 2, (parameter, text)
            assert not terminal.commands.seen

    for parameter in own:
        for text in [*ALL, *PARTLY.get(parameter, ())]:
            check_text(parameter, text)
    for parameter in {*parameters(name)} & {*SHARED_NAMES} - {"collection"}:
        for text in SHARED:
            check_text(parameter, text)
    if own:
        limit = settings(max_examples=EXAMPLES * 2, suppress_health_check=list(HealthCheck))
        limit(given(parameter=st.sampled_from(own), text=texts)(check_text))()


@pytest.mark.parametrize("name", USUAL)
def test_name_that_no_collection_can_have_reaches_no_server(terminal: Terminal, name: str) -> None:
    for text in COLLECTIONS:
        terminal.run(command_line(name, "collection", text))
        assert not terminal.commands.seen, text


@pytest.mark.parametrize(
    "arguments",
    [
        *(["worker", f"--{name}=0"] for name in ("concurrency", "processes", "batch")),
        *(["worker", f"--{name}=-1"] for name in ("prefetch", "timeout", "grace", "metrics-port")),
        *(["worker", "--batch=2", "--batch-wait=NaN"], ["worker", "--queue=", "--weight=a=0"]),
        *(["up", f"--{name}=-1"] for name in ("port", "every", "dashboard-port")),
        *(["up", "--dashboard-port=70000"], ["up", "--every=0"], ["up", f"--queue={MARK}"]),
        *(["dashboard", f"--{name}=-1"] for name in ("port", "trust-proxy")),
        *(["dashboard", "--host=0.0.0.0"], ["dashboard", f"--host={MARK}"]),
        *(["top", "--every=0"], ["sweep", "--every=0"], ["sweep", f"--job={MARK}"]),
        *(["sweep", "--lock-ttl=-1"], ["sweep", "--metrics-port=-1", "--every=5s"]),
        *(["subscribe", OWN, "--max=0"], ["subscribe", OWN, "--from="]),
        *(["subscribe", OWN, "--timeout=-1"], ["pipeline", "report", f"--master={MARK}"]),
        *(["pipeline", "archive", "a", f"--older-than={MARK}", "--all-queues"],),
    ],
    ids=" ".join,
)
def test_bad_option_ends_a_command_before_it_starts(
    terminal: Terminal, arguments: list[str]
) -> None:
    handler = [USUAL["worker"]["handler"]] if arguments[0] == "worker" else []
    result = terminal.run([*arguments, *handler])
    assert result.exit_code in {1, 2}
    assert STARTED not in result.output
    assert not terminal.commands.wrote


@pytest.mark.parametrize("name", PLANTS)
def test_command_that_interprets_a_value_is_found(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with planted(name, monkeypatch) as code:
        terminal.run(["dlq", "list", f"--code={code}"])
