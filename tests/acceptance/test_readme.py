"""The documents are true: Python blocks run on a real server, commands take what they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from typer.core import TyperGroup
from typer.main import get_command

from microqueue import Queue, QueueSettings
from microqueue.cli.app import app
from microqueue.embedded import EmbeddedServer
from microqueue.worker import WorkerOptions

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_every_python_block_runs(
    microqueue_server: EmbeddedServer,
    microqueue_client: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    microqueue_client.drop_database("shop")
    uri = microqueue_server.uri.replace("/?", "/readme?")
    monkeypatch.setenv("MICROQUEUE_URI", uri)
    namespace: dict[str, Any] = {}
    found = blocks("python")
    assert len(found) >= 8
    opened = []
    for number, block in [*enumerate(found)] * 2:  # Once more, on what the first time has left.
        exec(compile(block, f"README block {number}", "exec"), namespace)
        opened += [value for value in namespace.values() if isinstance(value, Queue | MongoClient)]
    said = capsys.readouterr().out
    assert "sending to ada@example.org" in said
    assert "'worker-2' holds the task now" in said
    for one in opened:
        one.close()


def test_every_python_block_about_workers_runs(
    microqueue_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROQUEUE_URI", microqueue_server.uri.replace("/?", "/workers?"))
    namespace: dict[str, Any] = {}
    text = (ROOT / "docs" / "workers.md").read_text()
    found = blocks("python", text)
    assert len(found) >= 3
    for number, block in enumerate(found):
        exec(compile(block, f"workers.md block {number}", "exec"), namespace)
    assert namespace["urgent"].stats().done == namespace["bulk"].stats().done == 1
    for one in [value for value in namespace.values() if isinstance(value, Queue)]:
        one.close()


def documented_commands() -> list[str]:
    """Give every call of ``microqueue`` in the documents, without what stands before it."""
    found = [block for one in DOCUMENTS for block in blocks("console", one.read_text())]
    lines = "".join(found).replace("\\\n", " ").splitlines()
    calls = [re.search(r"(?:^| )microqueue ([^#]+)", line) for line in lines]
    return [call[1].strip() for call in calls if call and "pip install" not in call.string]


@pytest.mark.parametrize("call", documented_commands())
def test_every_documented_command_takes_its_arguments(call: str) -> None:
    command: Any = get_command(app)
    context, arguments = None, shlex.split(re.sub(r"\$\(.*?\)", "today", call))
    while isinstance(command, TyperGroup):
        context = command.make_context(command.name, arguments[:1], parent=context)
        command, arguments = command.get_command(context, arguments[0]), arguments[1:]
    assert command is not None, "there is no such command"
    command.make_context(command.name, arguments, parent=context)


def test_options_table_names_every_option_of_a_worker_with_its_default() -> None:
    table = (ROOT / "docs" / "workers.md").read_text().split("## Options")[1].split("##")[0]
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", table, flags=re.MULTILINE)
    listed = {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == set(WorkerOptions.model_fields)
    defaults = WorkerOptions()
    shown = dict(rows)
    assert shown["`concurrency`"] == str(defaults.concurrency)
    assert shown["`prefetch`"] == str(defaults.prefetch)
    for name in ("grace", "poll_interval", "hot_poll_period", "heartbeat"):
        assert shown[f"`{name}`"] == f"{getattr(defaults, name).total_seconds():g} s"


def test_settings_table_names_every_setting_with_its_default() -> None:
    rows = re.findall(
        r"^\| (`[^|]+`) \| ([^|]+) \|", README.split("## Settings")[1], flags=re.MULTILINE
    )
    listed = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(listed) == set(QueueSettings.model_fields)
    defaults = QueueSettings()
    assert str(defaults.max_attempts) in listed["max_attempts"]
    assert f"{defaults.visibility_timeout.total_seconds():.0f} s" in listed["visibility_timeout"]
    assert f"{defaults.retry_deadline.total_seconds():.0f} s" in listed["retry_deadline"]
    assert f"{defaults.call_timeout.total_seconds():.0f} s" in listed["call_timeout"]
    assert f"{defaults.long_call_timeout.total_seconds():.0f} s" in listed["long_call_timeout"]
    assert f"{defaults.server_timeout.total_seconds():.0f} s" in listed["server_timeout"]
    assert str(defaults.batch_size) in listed["batch_size"]


def test_files_that_the_documents_name_exist() -> None:
    for document in DOCUMENTS:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (document.parent / target).exists(), f"{document.name} names {target}"
        for test in re.findall(r"`(test_\w+\.py)`", text):
            assert list((ROOT / "tests").rglob(test)), f"{document.name} names {test}"
