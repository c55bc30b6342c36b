"""Parts of the command line without a separate process: rare answers, and what people see."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from microqueue import InvalidArgument, InvalidPayload, MicroqueueError, Queue, ServerUnavailable
from microqueue.cli import dashboard, formats, loading, queues, up, values
from microqueue.cli import exit as endings
from microqueue.cli.dashboard import NotInstalled
from microqueue.cli.dlq_detection import detect_dlq
from microqueue.cli.logs import LogFormat
from microqueue.cli.metrics import serve_sweep_metrics, serve_worker_metrics
from microqueue.cli.options import SharedOptions
from microqueue.cli.session import Session
from microqueue.cli.worker import StopForwarder, restart_on_change
from microqueue.core import core_of
from microqueue.operations import workers
from microqueue.reports import WorkerInfo
from microqueue.sweeper import Sweeper, SweepReport
from microqueue.testing import memory_queue
from tests.acceptance.command_line import Cli, bury
from tests.waiting import wait_for

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the output be that of a terminal, without colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")


def session(**options: Any) -> Session:
    return Session(SharedOptions(**options))


# Values


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (timedelta(minutes=1.5), 90.0),
        (b"ab", "YWI="),
        ([1, (2, {3})], [1, [2, [3]]]),
        (range(2), [0, 1]),
        (LogFormat.JSON, "json"),
        (float("inf"), "inf"),
        (NOW, "2026-05-01T12:00:00+00:00"),
    ],
)
def test_values_become_json(value: Any, written: Any) -> None:
    assert formats.jsonable(value) == written


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.0124, "12 ms"), (59.9, "60 s"), (60, "1 m"), (75, "1 m 15 s"), (7200, "2 h"),
     (3 * 86_400 + 4 * 3600 + 59, "3 d 4 h")],
)  # fmt: skip
def test_durations_are_told_in_two_units(seconds: float, told: str) -> None:
    assert formats.seconds(seconds) == told


def test_instants_are_told_relative_to_now() -> None:
    assert formats.relative(None, NOW) == formats.instant(None, NOW) == "-"
    assert formats.relative(NOW + timedelta(seconds=5), NOW) == "in 5 s"


def test_values_that_are_parsed_already_stay() -> None:
    assert values.read_instant(NOW) is NOW
    assert values.read_past(NOW) is NOW


def test_payload_that_is_nested_too_deeply_is_rejected() -> None:
    with pytest.raises(InvalidPayload) as caught:
        values.read_payload('{"a":' * 100_000)
    assert caught.value.argument == "payload"


@pytest.mark.parametrize("pair", ["mail", "mail=much", "other=1"])
def test_weight_of_no_queue_or_no_number_is_rejected(pair: str) -> None:
    assert values.read_weights(["mail=2", "bulk=0.5"], ["mail", "bulk"]) == {
        "mail": 2.0, "bulk": 0.5
    }  # fmt: skip
    with pytest.raises(InvalidArgument) as caught:
        values.read_weights([pair], ["mail"])
    assert (caught.value.argument, caught.value.value) == ("weight", pair)


class Stdin:
    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def read(self) -> str:
        return b"\xff".decode()


@pytest.mark.parametrize("terminal", [True, False])
def test_stdin_that_has_no_payload_is_rejected(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(terminal=terminal))
    with pytest.raises(InvalidArgument, match="PAYLOAD is missing" if terminal else "UTF-8"):
        values.read_stdin("PAYLOAD")


def test_reference_that_names_no_file_has_no_line() -> None:
    assert loading.raised_at(None, package="shop") is None


# Commands


def test_backoff_without_jitter_has_one_delay_and_none_at_all_no_bar(cli: Cli) -> None:
    fixed = cli("backoff", "--base-sec", "5", "--jitter", "none", "--attempts", "2")
    assert " 5 s " in fixed
    assert " to " not in fixed
    none = cli(
        "backoff", "--base-sec", "0", "--max-sec", "0", "--jitter", "none", "--attempts", "2"
    )
    assert "━" not in none


def test_resume_says_in_json_whether_the_queue_was_paused(cli: Cli, queue: Queue[Any]) -> None:
    queue.pause()
    assert cli.json("resume") == {"queue": "default", "was_paused": True}
    assert cli.json("resume") == {"queue": "default", "was_paused": False}


def test_peek_tells_when_a_delayed_task_is_due(cli: Cli, queue: Queue[Any]) -> None:
    queue.enqueue({}, delay=7200)
    assert "pending in 2 h" in cli("peek")


def test_stats_of_all_queues_tell_the_codes_of_the_newest_letters(
    cli: Cli, queue: Queue[Any], microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Queue[Any](microqueue_database, "other").enqueue({})
    for _ in range(4):
        bury(queue, code="timeout")
    monkeypatch.setenv("MICROQUEUE_COUNT_LIMIT", "2")
    assert "failed: of the newest 3: 3 timeout" in cli("stats")


def test_top_masks_progress_and_marks_workers_that_are_gone(cli: Cli, queue: Queue[Any]) -> None:
    queue.enqueue({})
    task = queue.pop(worker_id="w")
    assert task is not None
    progress = {"fraction": 0.5, "message": "password=hunter2", "at": queue.now()}
    core_of(queue).collections.tasks.update_one({"_id": task.id}, {"$set": {"progress": progress}})
    old = queue.now() - timedelta(hours=1)
    info = WorkerInfo(
        id="w", collection="tasks", host="h", pid=1, queues=["default"], concurrency=1, running=1,
        handled=0, started_at=old, heartbeat_at=old, heartbeat_sec=1.0,
    )  # fmt: skip
    core_of(queue).run(workers.beat(info))
    (running,) = cli.json("top")["running"]
    assert "hunter2" not in json.dumps(running)
    assert running["progress"]["fraction"] == 0.5
    assert running["progress"]["message"].startswith("password=")
    assert "(gone)" in cli("top")


@pytest.mark.parametrize("arguments", [[], ["-q", "default"], ["-q", "default", "--json"]])
@pytest.mark.usefixtures("terminal")
def test_watched_stats_are_refreshed_until_a_signal(
    cli: Cli, queue: Queue[Any], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    queue.enqueue({})
    name = "_read_stats" if arguments else "_read_all_stats"
    usual, calls = getattr(queues, name), list[int]()

    def read(*given: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return usual(*given, **options)

    monkeypatch.setattr(queues, name, read)
    shown = cli("stats", "--watch", "--every", "0.01", *arguments)
    assert len(calls) == 2
    if "--json" in arguments:
        assert [json.loads(line)["ready"] for line in shown.splitlines()] == [1, 1]
    else:
        assert "Press Ctrl-C to quit" in shown


# The ends of commands


def test_interrupt_ends_a_command_with_its_status() -> None:
    with pytest.raises(SystemExit) as ended, endings.exiting_cleanly():
        raise KeyboardInterrupt
    assert ended.value.code == endings.INTERRUPTED


def test_second_signal_interrupts_a_command_that_does_not_stop() -> None:
    with endings.stop_on_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_stop_that_comes_before_the_worker_reaches_it() -> None:
    expected: list[bool] = []
    stopped: list[bool] = []
    forwarder = StopForwarder(lambda *, immediately: expected.append(immediately))
    forwarder()
    forwarder.forward_to(lambda *, immediately: stopped.append(immediately))
    forwarder(immediately=True)
    assert (expected, stopped) == ([False, True], [False, True])


# Extras that are not installed


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("microqueue.metrics", lambda: serve_worker_metrics("127.0.0.1", 1).__enter__()),
        (
            "microqueue.metrics",
            lambda: serve_sweep_metrics("127.0.0.1", 1, memory_queue()).__enter__(),
        ),
        ("watchfiles", lambda: restart_on_change(lambda: None)),
    ],
)
def test_missing_extra_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, module: str, use: Callable[[], Any]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MicroqueueError, match="pip install"):
        use()


@pytest.mark.usefixtures("terminal")
def test_up_says_that_its_dashboard_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: Any, **_options: Any) -> Any:
        raise NotInstalled("pip install 'microqueue[dashboard]'")

    monkeypatch.setattr(up, "new_server", missing)
    assert up._dashboard(session(), memory_queue(), None) is None  # noqa: SLF001 (one step)
    assert "microqueue[dashboard]" in capsys.readouterr().err


# The dashboard


def test_up_takes_any_port_if_the_usual_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def new_server(_queue: Any, **options: Any) -> Any:
        tried.append(options)
        if not options:
            raise InvalidArgument("the port is taken")
        return "server"

    monkeypatch.setattr(up, "new_server", new_server)
    assert up._dashboard(session(), memory_queue(), None) == "server"  # type: ignore[comparison-overlap]  # noqa: SLF001
    assert tried == [{}, {"port": 0}]


def test_dashboard_is_announced_by_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    server: Any = SimpleNamespace(address="http://127.0.0.1:1/")
    dashboard.announce(session(), server)
    assert "Dashboard: http://127.0.0.1:1/" in capsys.readouterr().out
    dashboard.announce(session(as_json=True), server)
    assert json.loads(capsys.readouterr().out) == {"dashboard": "http://127.0.0.1:1/"}


def test_dashboard_shows_secrets_on_request(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def new_server(_queue: Any, **options: Any) -> Any:
        given.append(options)
        raise typer.Exit(0)

    monkeypatch.setattr(dashboard, "new_server", new_server)
    cli("dashboard")
    cli("dashboard", "--show-secrets")
    assert ["redact" in options for options in given] == [False, True]
    assert given[1]["redact"] is None


def test_letters_that_move_later_are_found_by_a_dashboard_that_runs(
    queue: Queue[Any], microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "DETECT_EVERY_SEC", 0.01)
    failures = [ServerUnavailable("no server")]
    calls: list[int] = []

    def detect(one: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise failures.pop()
        return detect_dlq(one)

    monkeypatch.setattr(dashboard, "detect_dlq", detect)
    stop = threading.Event()
    detecting = threading.Thread(
        target=dashboard._keep_detecting_dlq,  # noqa: SLF001 (its thread)
        args=(queue, stop),
    )
    detecting.start()
    try:
        wait_for(lambda: len(calls) > 2)
        assert not queue.settings.separate_dlq
        Queue[Any](
            microqueue_database,
            settings=queue.settings.model_copy(update={"dead_letters": "collection"}),
        ).ensure_indexes()
        detecting.join(60)
        assert not detecting.is_alive()
        assert queue.settings.separate_dlq
    finally:
        stop.set()
        detecting.join(60)


# The embedded server of ``up``


class Server:
    """Stands in for the embedded server."""

    def __init__(self, directory: Path, *, alive: int = 0) -> None:
        self.directory = directory
        self.uri = "mongodb://127.0.0.1:1/"
        self.reused = False
        self._alive = alive

    def is_alive(self) -> bool:
        self._alive -= 1
        return self._alive >= 0


def test_up_names_the_variables_that_other_commands_need(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def announced(directory: Path) -> str:
        server: Any = Server(directory)
        up._announce(session(), server, "6.0.5", None)  # noqa: SLF001 (what it prints)
        return capsys.readouterr().out

    assert f"export MICROQUEUE_HOME={tmp_path / 'x'}" in announced(tmp_path / "x")
    assert "export" not in announced(home.resolve())
    monkeypatch.setenv("MICROQUEUE_URI", "mongodb://elsewhere/")
    assert "unset MICROQUEUE_URI" in announced(home.resolve())


def test_sweep_that_fails_is_reported_while_the_server_of_up_is_alive(
    queue: Queue[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Sweeper):
        def run_once(self) -> SweepReport:
            raise ServerUnavailable("no answer")

    sweeper = Failing(queue)
    server: Any = Server(tmp_path, alive=3)  # Asked after the sweep, and while it waits.
    stop = threading.Event()
    with pytest.raises(MicroqueueError):
        up._sweep_until(stop, session(), server, queue, sweeper, pause=0.0)  # noqa: SLF001
    assert capsys.readouterr().err.count("no answer") == 2
