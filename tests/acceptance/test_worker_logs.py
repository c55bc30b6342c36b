"""What an app logs under ``microqueue worker``: each line once, as ours are."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from microqueue import Queue
from microqueue.cli.logs import LIBRARIES, LogFormat, LogLevel, configure_logging
from tests.acceptance.command_line import Cli
from tests.acceptance.test_processes import Program

APP = """
import logging, sys
from rich.logging import RichHandler

log = logging.getLogger("shop.mails")

def handle(payload):
    log.debug("looked at ada")
    log.info("sent to ada", extra={"price": 7})
    log.warning("ada is slow")
    try:
        1 / 0
    except ZeroDivisionError:
        log.exception("ada is broken")
"""


@pytest.fixture
def program(tmp_path: Path, database_uri: str, queue: Queue[Any]) -> Iterator[Program]:
    queue.enqueue({})
    one = Program(tmp_path, database_uri)
    one.path("app.py").write_text(APP, encoding="utf-8")
    yield one
    one.end()


def logged(program: Program, *options: str) -> str:
    """Work the task off, and give all that was printed."""
    program.start("worker", "app:handle", "--burst", *options)
    assert program.status() == 0, program.errors()
    return "\n".join([program.said(), *program.errors()])


@pytest.mark.parametrize("processes", ["1", "2"])
def test_lines_of_the_app_are_json_like_ours(program: Program, processes: str) -> None:
    options = ("--processes", processes, "--log-level", "debug", "--log-format", "json")
    logged(program, *options)
    lines = [json.loads(line) for line in program.errors()]
    of_app = [line for line in lines if line["logger"] == "shop.mails"]
    told = [(line["level"], line["message"]) for line in of_app]
    assert told == [
        ("debug", "looked at ada"),
        ("info", "sent to ada"),
        ("warning", "ada is slow"),
        ("error", "ada is broken"),
    ]
    assert of_app[1]["price"] == 7
    assert "ZeroDivisionError" in of_app[3]["traceback"]
    assert {line["logger"].partition(".")[0] for line in lines} == {"shop", "microqueue"}


def test_worker_logs_from_info_on_unless_told_otherwise(
    program: Program, queue: Queue[Any]
) -> None:
    shown = logged(program)
    assert "INFO    sent to ada" in shown
    assert "looked at ada" not in shown
    assert "Traceback" in shown  # The app's own, which it asked for.
    queue.enqueue({})
    shown = logged(program, "--log-level", "warning")
    assert "WARNING ada is slow" in shown
    assert "sent to ada" not in shown


def test_help_names_the_default_level(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert "Lowest level to log to stderr. [default: info for worker, else warning]" in cli(
        "peek", "--help"
    )


def test_libraries_say_more_only_when_debugging(program: Program, queue: Queue[Any]) -> None:
    assert "Command started" not in logged(program, "--log-level", "debug")
    queue.enqueue({})
    assert "Command started" in logged(program, "--log-level", "debug", "--debug")


def test_file_that_the_app_logs_to_is_written(program: Program) -> None:
    setup = "logging.basicConfig(filename='app.log', level='INFO', format='mine: %(message)s')"
    program.path("app.py").write_text(f"{APP}\n{setup}\n", encoding="utf-8")
    assert logged(program).count("sent to ada") == 1
    assert "mine: sent to ada" in program.path("app.log").read_text(encoding="utf-8")


@pytest.mark.measured
@pytest.mark.parametrize(
    "setup",
    [
        "logging.basicConfig(level='DEBUG')",
        "logging.basicConfig(level='DEBUG', force=True)",
        "logging.basicConfig(level='DEBUG', force=True, stream=sys.stdout)",
        "logging.getLogger().addHandler(logging.StreamHandler())",
        "logging.getLogger().addHandler(logging.FileHandler('app.log'))",
        "logging.getLogger().addHandler(RichHandler())",
        "log.addHandler(logging.StreamHandler())",
        "log.addHandler(logging.StreamHandler()); log.propagate = False",
        "few = logging.StreamHandler(); few.setLevel(50); logging.getLogger().addHandler(few)",
    ],
)
def test_each_line_comes_once_however_the_app_sets_its_logging_up(
    program: Program, setup: str
) -> None:
    program.path("app.py").write_text(f"{APP}\n{setup}\n", encoding="utf-8")
    shown = logged(program, "--log-level", "debug")
    assert [shown.count(line) for line in ("sent to ada", "ada is slow", ": done")] == [1, 1, 1]


def test_level_above_warning_holds_for_libraries_too(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LogLevel.ERROR, LogFormat.TEXT, debug=False, of_app=True)
    for name in LIBRARIES:
        logging.getLogger(name).warning("a warning of %s", name)
        logging.getLogger(name).error("an error of %s", name)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[-1] for line in lines] == list(LIBRARIES)
    assert all("an error" in line for line in lines)


def test_command_after_a_worker_in_the_same_process_leaves_the_app_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(LogLevel.INFO, LogFormat.TEXT, debug=False, of_app=True)
    configure_logging(LogLevel.INFO, LogFormat.TEXT, debug=False)
    logging.getLogger("shop").error("of the app")
    logging.getLogger("microqueue.test").error("of ours")
    shown = capsys.readouterr().err
    assert "of the app" not in shown
    assert shown.count("of ours") == 1


@pytest.mark.parametrize("form", LogFormat)
def test_what_an_app_says_is_masked_only_in_addresses_of_mongodb(
    capsys: pytest.CaptureFixture[str], form: LogFormat
) -> None:
    configure_logging(LogLevel.INFO, form, debug=False, of_app=True)
    extra = {"to": "ada@example.org", "at": {(1, 2): float("nan")}}
    event = "from http://shop, to bob@example.org, in mongodb://anna:ses@me@host/shop"
    logging.getLogger("shop").info(event, extra=extra)
    shown = capsys.readouterr().err
    assert "from http://shop, to bob@example.org, in mongodb://***@host/shop" in shown
    if form is LogFormat.JSON:
        fields = json.loads(shown)
        assert (fields["to"], fields["at"]) == ("ada@example.org", {"(1, 2)": "nan"})


@pytest.mark.parametrize("form", ["text", "json"])
def test_traceback_of_a_handler_that_failed_is_shown(program: Program, form: str) -> None:
    program.path("app.py").write_text("def handle(payload):\n    payload['none']\n", "utf-8")
    shown = logged(program, "--log-format", form)
    assert "app.py" in shown
    assert "line 2, in handle" in shown
    assert "KeyError" in shown
