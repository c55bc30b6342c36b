"""Errors about invalid values: they name the value, the reason and the remedy."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from microqueue.cli import app as cli_app
from microqueue.cli.spark_runner import check_master


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


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + "0" * 400 + ".0"])
def test_number_that_would_become_infinite_is_rejected(shell: Shell, number: str) -> None:
    said = shell.refuse("enqueue", f'{{"n": {number}}}')
    assert f"the payload is not JSON: {number:.40} is too large a number" in said
    said = shell.refuse("enqueue", "--many", stdin=f'{{"n": 1}}\n{{"n": [{number}]}}\n')
    assert "line 2 is not JSON" in said


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"n": 99999999999999999999}', "payload.n=99999999999999999999: "),
        ('{"a": [{"b": 1}, {"b": "\\ud800"}]}', "payload.a.1.b='\\ud800': "),
        ('{"a": {"b\\u0000": {"c": 1}}}', "payload.a.b\\x00={'c': 1}: "),
    ],
)
def test_value_that_cannot_be_stored_is_named_with_its_place_and_line(
    shell: Shell, line: str, told: str
) -> None:
    prefix = "MongoDB cannot store this task: "
    assert shell.refuse("enqueue", line).startswith(f"Error: {prefix}{told}")
    said = shell.refuse("enqueue", "--many", stdin=f'{{"n": 1}}\n\n{line}\n')
    assert said.startswith(f"Error: line 3: {prefix}{told}")


def test_value_that_no_option_allows_is_named_without_words_of_a_library(shell: Shell) -> None:
    said = shell.refuse("enqueue", "{}", "--id", "x", "--on-duplicate", "retrn", status=2)
    assert all(word in said for word in ("--on-duplicate", "'retrn'", "'return'"))
    assert "Value error" not in said


LAST_PORT = ["--metrics-port", "65535"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["worker", "json:loads", "--metrics-port", "99999"], "--metrics-port 99999 is not valid"),
        (["worker", "json:loads", "--metrics-port", "-1"], "--metrics-port -1 is not valid"),
        (["worker", "json:loads", *LAST_PORT, "--processes", "2"], "1 to 65534, because each of 2"),
        (["sweep", "--every", "1", "--metrics-port", "99999"], "--metrics-port 99999 is not valid"),
        (["up", "--port", "99999"], "port=99999 is not valid"),
        (["up", "--port", "-1"], "port=-1 is not valid"),
        (["dashboard", "--port", "99999"], "port=99999 is not valid"),
    ],
)
def test_port_that_does_not_exist_is_named(shell: Shell, arguments: list[str], told: str) -> None:
    assert told in shell.refuse(*arguments)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["enqueue", "{}", "--priority", "x"], "for '--priority': 'x' is not valid: Input should"),
        (["worker", "json:loads", "--processes", "0"], "for '--processes': '0' is not valid: "),
        (["dlq", "list", "--limit", "1.5"], "for '--limit' / '-n': '1.5' is not valid: "),
        (["pipeline", "triage", "--top", "few"], "for '--top': 'few' is not valid: "),
        (["enqueue", "{}", "--delay", "5x"], "'5x' is not a duration: give seconds"),
    ],
)
def test_wrong_usage_names_what_was_typed(shell: Shell, arguments: list[str], told: str) -> None:
    assert told in shell.refuse(*arguments, status=2)


@pytest.mark.parametrize(
    "master",
    ["nonsense", "", "local[0]", "local[]", "local[x]", "spark://", "spark://host", "mesos://h:1"],
)
def test_master_that_spark_does_not_know_is_rejected_before_spark_starts(
    shell: Shell, master: str
) -> None:
    said = shell.refuse("pipeline", "triage", "--master", master)
    assert said.startswith(f"Error: master={master!r} is not valid: give local[4] for four cores")


@pytest.mark.parametrize(
    "master",
    [
        *("local", "local[4]", "local[*]", "local[2,3]", "local[*, 3]", "local-cluster[2,1,1024]"),
        *("spark://host:7077", "spark://a:7077,b:7077", "spark://[::1]:7077", "yarn"),
        *("k8s://https://host:443", None),
    ],
)
def test_masters_that_spark_knows_are_taken(master: str | None) -> None:
    check_master(master)


def test_options_that_exclude_each_other_are_told_without_the_task(shell: Shell) -> None:
    said = shell.refuse("enqueue", '{"a": 1}', "--eta", "2100-01-01T00:00:00Z", "--delay", "5")
    assert said == "Error: give delay or eta, not both "


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["enqueue", "{}", "--expires-in", "0"], "expires_in=0 s"),
        (["worker", "json:loads", "--timeout", "0", "--burst"], "timeout=0 s"),
        (["sweep", "--every", "0"], "every=0 s"),
        (["top", "--every", "0"], "every=0 s"),
        (["up", "--every", "0"], "every=0 s"),
        (["stats", "--watch", "--every", "0s"], "every=0 s"),
    ],
)
def test_rejected_durations_are_shown_as_people_write_them(
    shell: Shell, arguments: list[str], told: str
) -> None:
    assert shell.refuse(*arguments).startswith(f"Error: {told} is not valid: give ")
