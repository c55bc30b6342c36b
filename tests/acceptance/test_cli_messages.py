"""What the command line says about values that it cannot take: which one, why, what instead."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from microqueue.cli import app as cli_app


class Shell:
    """Runs commands in this process, and gives what they complain about."""

    def refuse(self, *arguments: str, status: int = 1, stdin: str | None = None) -> str:
        result = CliRunner().invoke(cli_app.app, list(arguments), input=stdin)
        assert result.exit_code == status, (result.output, result.exception)
        assert result.stdout == ""
        if status == 1:
            assert re.fullmatch(r"Error: .*\n", result.stderr)
        return re.sub(r"[\s│]+", " ", result.stderr)


@pytest.fixture
def shell(database_uri: str, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.setenv("MICROQUEUE_URI", database_uri)
    return Shell()


LAST_PORT = ["--metrics-port", "65535"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["worker", "json:loads", "--metrics-port", "99999"], "--metrics-port 99999 cannot"),
        (["worker", "json:loads", "--metrics-port", "-1"], "--metrics-port -1 cannot"),
        (["worker", "json:loads", *LAST_PORT, "--processes", "2"], "1 to 65534, for each of 2"),
        (["sweep", "--every", "1", "--metrics-port", "99999"], "--metrics-port 99999 cannot"),
        (["up", "--port", "99999"], "port=99999 is not valid"),
        (["up", "--port", "-1"], "port=-1 is not valid"),
        (["dashboard", "--port", "99999"], "port=99999 is not valid"),
    ],
)
def test_port_that_does_not_exist_is_named(shell: Shell, arguments: list[str], told: str) -> None:
    assert told in shell.refuse(*arguments)


def test_options_that_exclude_each_other_are_told_without_the_task(shell: Shell) -> None:
    said = shell.refuse("enqueue", '{"a": 1}', "--eta", "2100-01-01T00:00:00Z", "--delay", "5")
    assert said == "Error: give delay or eta, not both "


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["enqueue", "{}", "--expires-in", "0"], "expires_in=0 s"),
        (["worker", "json:loads", "--timeout", "0", "--burst"], "timeout=0 s"),
        (["sweep", "--every", "0"], "every=0 s"),
        (["top", "--interval", "0"], "interval=0 s"),
        (["up", "--every", "0"], "every=0 s"),
        (["indexes", "--retention", "0"], "retention=0 s"),
        (["stats", "--every", "0s"], "every=0 s"),
    ],
)
def test_refused_durations_are_told_as_people_write_them(
    shell: Shell, arguments: list[str], told: str
) -> None:
    assert shell.refuse(*arguments).startswith(f"Error: {told} is not valid: give ")
