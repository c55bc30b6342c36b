"""The documents are true: examples run and are typed, commands parse, links and names exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import griffe
import pytest
from pymongo import MongoClient
from typer.core import TyperGroup
from typer.main import get_command

import microqueue
from benchmarks.__main__ import PARTS
from benchmarks.walk import DRIVER, value_modules, walk
from microqueue import (
    AsyncQueue,
    AsyncSweeper,
    AsyncWorker,
    EnqueueOptions,
    Queue,
    QueueSettings,
    Sweeper,
    Tasks,
    Worker,
)
from microqueue.cli.app import app
from microqueue.dashboard import dashboard
from microqueue.dashboard.options import DashboardOptions
from microqueue.dead_letters import AsyncDeadLetters, DeadLetters
from microqueue.embedded import EmbeddedServer
from microqueue.insights import AsyncInsights, Insights
from microqueue.testing import memory_queue
from microqueue.worker import WorkerOptions

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
EXECUTED = {
    "README.md": 2,
    "docs/queues.md": 5,
    "docs/quickstart.md": 5,
    "docs/workers.md": 5,
    "docs/dashboard.md": 2,
    "docs/monitoring.md": 4,
}
"""The documents whose Python blocks are run, with the least number of blocks."""
WITH_COMMANDS = {
    "README.md": 4,
    "docs/cli.md": 15,
    "docs/dashboard.md": 3,
    "docs/monitoring.md": 3,
    "docs/pipelines.md": 6,
    "docs/queues.md": 2,
    "docs/quickstart.md": 3,
    "docs/workers.md": 1,
}
"""Documents with console blocks, with the least number of commands of ``microqueue``."""


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def prose(text: str) -> str:
    """Return a document without its code blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


# Python


@pytest.mark.parametrize("name", EXECUTED)
def test_every_python_block_runs(
    name: str,
    microqueue_server: EmbeddedServer,
    microqueue_client: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    database = re.sub(r"\W", "_", name)
    for used in ("shop", database):
        microqueue_client.drop_database(used)
    monkeypatch.setenv("MICROQUEUE_URI", microqueue_server.uri.replace("/?", f"/{database}?"))
    namespace: dict[str, Any] = {}
    opened = []
    try:
        # A second time, on what the first time left.
        for number, block in [*enumerate(blocks("python", read(name)))] * 2:
            exec(compile(block, f"{name} block {number}", "exec"), namespace)
            values = namespace.values()
            opened += [value for value in values if isinstance(value, Queue | MongoClient)]
        said = capsys.readouterr().out
        if name == "README.md":
            assert "sending to ada@example.org" in said
        if name == "docs/queues.md":
            lost = [line for line in said.splitlines() if str(namespace["first"].id) in line]
            assert lost
            assert all("worker-2" in line for line in lost)
        if name == "docs/workers.md":
            assert namespace["urgent"].stats().done == namespace["bulk"].stats().done == 2
    finally:
        for one in opened:
            one.close()


@pytest.mark.parametrize("name", EXECUTED)
def test_every_executed_document_has_its_python_blocks(name: str) -> None:
    assert len(blocks("python", read(name))) >= EXECUTED[name]


def module_of(text: str) -> str:
    """Return the Python blocks of a document as a module with the document's line numbers."""
    lines, inside = [], False
    for line in text.splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = not inside and line in {"```python", "```py"} if fence else inside
    return "\n".join(lines) + "\n"


def test_every_python_block_passes_mypy_strict(tmp_path: Path) -> None:
    modules = {}
    for document in DOCUMENTS:
        if (module := module_of(document.read_text(encoding="utf-8"))).strip():
            path = tmp_path / (re.sub(r"\W", "_", name_of(document)) + ".py")
            path.write_text(module, encoding="utf-8")
            modules[path.name] = name_of(document)
    assert len(modules) >= len(EXECUTED)
    options = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = result.stdout + result.stderr
    for file_name, name in modules.items():
        found = found.replace(str(tmp_path / file_name), name)
    assert result.returncode == 0, found


# Commands


def console_lines(*documents: Path) -> list[str]:
    """Return every line of the console blocks, with continued lines joined."""
    found = [block for one in documents for block in blocks("console", one.read_text())]
    return "".join(found).replace("\\\n", " ").splitlines()


def documented_commands(*documents: Path) -> list[str]:
    """Return every call of ``microqueue`` in the documents, without what stands before it."""
    calls = [re.search(r"(?:^| )microqueue ([^#]+)", line) for line in console_lines(*documents)]
    return [call[1].strip() for call in calls if call and "pip install" not in call.string]


@pytest.mark.parametrize("call", documented_commands(*DOCUMENTS))
def test_every_documented_command_takes_its_arguments(call: str) -> None:
    command: Any = get_command(app)
    context, arguments = None, shlex.split(re.sub(r"\$\(.*?\)", "today", call))
    while isinstance(command, TyperGroup):
        context = command.make_context(command.name, arguments[:1], parent=context)
        command, arguments = command.get_command(context, arguments[0]), arguments[1:]
    assert command is not None, "there is no such command"
    command.make_context(command.name, arguments, parent=context)


@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_every_document_has_its_commands(name: str) -> None:
    assert len(documented_commands(ROOT / name)) >= WITH_COMMANDS[name]


def test_every_command_is_in_the_page_about_the_command_line() -> None:
    root: Any = get_command(app)
    calls = [call.split() for call in documented_commands(*DOCUMENTS)]
    shown = {" ".join(call[:length]) for call in calls for length in (1, 2)}
    page = read("docs/cli.md")
    for name, command in root.commands.items():
        assert name in shown, f"no document shows microqueue {name}"
        assert f"microqueue {name}" in page or name == "pipeline"
        for inner in getattr(command, "commands", {}):
            assert f"{name} {inner}" in shown, f"no document shows microqueue {name} {inner}"


def test_scripts_and_modules_that_the_documents_run_exist() -> None:
    for line in [*console_lines(*DOCUMENTS), *(read(name_of(one)) for one in DOCUMENTS)]:
        for script in re.findall(r"(?<![\w./])(?:\./)?((?:scripts|\.ci)/[\w.]+)", line):
            assert (ROOT / script.rstrip(".")).exists(), script
        for module, options in re.findall(r"python -m ([\w.]+\w)([^`\n|#]*)", line):
            assert importlib.util.find_spec(module) is not None, module
            if module == "benchmarks" and (only := re.search(r"--only (\w+)", options)):
                assert only[1] in PARTS


# Tables


def rows_of(name: str, section: str) -> dict[str, str]:
    """Return the first two columns of the table in a section, by each name in the first."""
    text = read(name).split(f"## {section}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", text, flags=re.MULTILINE)
    return {one: default for names, default in rows for one in re.findall(r"`(\w+)`", names)}


def test_options_table_names_every_option_of_a_worker_with_its_default() -> None:
    shown = rows_of("docs/workers.md", "Options")
    assert set(shown) == set(WorkerOptions.model_fields)
    defaults = WorkerOptions()
    assert shown["concurrency"] == str(defaults.concurrency)
    assert shown["prefetch"] == str(defaults.prefetch)
    for name in ("grace", "poll_interval", "hot_poll_period", "heartbeat"):
        assert shown[name] == f"{getattr(defaults, name).total_seconds():g} s"


def test_settings_table_names_every_setting_with_its_default() -> None:
    listed = rows_of("docs/queues.md", "Settings")
    assert set(listed) == set(QueueSettings.model_fields)
    defaults = QueueSettings()
    assert str(defaults.max_attempts) in listed["max_attempts"]
    assert f"{defaults.visibility_timeout.total_seconds():.0f} s" in listed["visibility_timeout"]
    assert f"{defaults.retry_deadline.total_seconds():.0f} s" in listed["retry_deadline"]
    assert f"{defaults.call_timeout.total_seconds():.0f} s" in listed["call_timeout"]
    assert f"{defaults.long_call_timeout.total_seconds():.0f} s" in listed["long_call_timeout"]
    assert f"{defaults.server_timeout.total_seconds():.0f} s" in listed["server_timeout"]
    assert str(defaults.batch_size) in listed["batch_size"]


def test_options_table_names_every_option_of_enqueue() -> None:
    listed = set(rows_of("docs/queues.md", "Enqueue"))
    assert listed == {*EnqueueOptions.__annotations__, "session"}


def test_options_table_names_every_option_of_the_dashboard() -> None:
    assert set(rows_of("docs/dashboard.md", "Options")) == set(DashboardOptions.model_fields)


def test_routes_table_names_every_route() -> None:
    text = read("docs/dashboard.md").split("## REST\n")[1].split("\n## ")[0]
    documented = set(re.findall(r"`(GET|POST) (/[^`]+)`", text))
    paths = dashboard(memory_queue(), manual_actions=True).openapi()["paths"]
    api = {path.removeprefix("/api/v1"): one for path, one in paths.items() if "/api/v1" in path}
    assert documented == {(method.upper(), path) for path, one in api.items() for method in one}


def test_error_codes_table_names_every_code_that_microqueue_writes() -> None:
    source = "".join(file.read_text() for file in (ROOT / "microqueue").rglob("*.py"))
    constants = dict(re.findall(r'^([A-Z_]+) = "(\w+)"$', source, flags=re.MULTILINE))
    written = re.findall(r"\bcode=\"(\w+)\"|\"code\": \"(\w+)\"", source)
    named = re.findall(r"\bcode=([A-Z_]+)\b|\"code\": ([A-Z_]+)\b", source)
    codes = {one or other for one, other in written}
    codes |= {constants[one or other] for one, other in named if (one or other) in constants}
    assert {"cancelled", "expired", "poison"} <= codes
    text = read("docs/queues.md").split("### Error codes\n")[1].split("\n## ")[0]
    assert codes <= set(re.findall(r"`(\w+)`", text))


# Links and names


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", prose(text), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading).strip().lower() for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_resolve(document: Path) -> None:
    text = prose(document.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]+))?\)", text):
        linked = document.parent / target if target else document
        assert linked.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), f"{target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = prose(document.read_text(encoding="utf-8"))
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert list((ROOT / "tests").rglob(name)), f"there is no {name}"
    for name in re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|js|css|html|md|toml|yml))`", text):
        assert any((home / name).exists() for home in (ROOT, ROOT / "microqueue", DOCS)), name


def test_changelog_names_every_deprecated_name() -> None:
    source = "".join(file.read_text() for file in (ROOT / "microqueue").rglob("*.py"))
    source = source.replace((ROOT / "microqueue" / "deprecation.py").read_text(), "")
    old = re.findall(r"warn_renamed\(\s*\"([\w.]+)", source)
    for names in re.findall(
        r"renamed_(?:fields|names|attributes|options)\b[^{}\n]*\n?[^{}\n]*{([^}]*)}", source
    ):
        old += re.findall(r'"(\w+)":', names)
    for names in re.findall(r"@renamed_arguments\(([^)]*)\)", source):
        old += re.findall(r"(\w+)=", names)
    for names in re.findall(r"\brenamed\(\s*\"(--[\w/-]+)\"", source):  # Options of commands.
        old += names.split("/")
    assert len(old) >= 5
    section = read("CHANGELOG.md").split("### Deprecated\n")[1].split("\n### ")[0]
    assert [name for name in old if name.rpartition(".")[2] not in section] == []


def test_names_in_the_instructions_are_in_the_files_beside_them() -> None:
    text = read("docs/architecture.md").split("## How to add\n")[1]
    for row in re.findall(r"^\| \d+\. .*$", text, flags=re.MULTILINE):
        quoted = re.findall(r"`([^`]+)`", row)
        places = [ROOT / one for one in quoted if "/" in one and (ROOT / one).exists()]
        files = [
            file for place in places for file in (place.rglob("*") if place.is_dir() else [place])
        ]
        found = "".join(file.read_text() for file in files if file.suffix in {".py", ".js", ".md"})
        for name in [one for one in quoted if re.fullmatch(r"[\w.]+(\(\))?", one)]:
            if not name.endswith((".py", ".js")):
                assert name.rstrip("()") in found, f"{name} is not in a file of: {row}"


def test_walk_of_a_task_is_the_one_that_the_architecture_shows(
    microqueue_server: EmbeddedServer, microqueue_client: Any
) -> None:
    text = read("docs/architecture.md").split("### The modules it crosses\n")[1].split("\n### ")[0]
    assert set(re.findall(r"`(\w+\.\w+)`", text.split("\n|")[0])) == DRIVER
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (.*) \|$", text, flags=re.MULTILINE)
    microqueue_client.drop_database("walk")
    walked = walk(microqueue_server.uri.replace("/?", "/walk?"))
    assert [step for step, _, _ in rows] == [*walked, "archive"]
    values = value_modules()
    for step, count, listed in rows[:-1]:  # The archive needs Spark.
        modules = {module for module in walked[step] if module not in values}
        named = set(re.findall(r"`([\w.]+)`", listed))
        instead = f"{step}: update docs/architecture.md by benchmarks.walk --archive --markdown"
        assert named <= modules, instead
        if step not in {"claim", "handle"}:  # A slow machine may take them another way.
            assert modules - DRIVER == named, instead
        assert int(count) == len(named | modules & DRIVER), instead


COMPLETED: list[type] = [Queue, AsyncQueue, Worker, AsyncWorker, Sweeper, AsyncSweeper, Tasks]
COMPLETED += [DeadLetters, AsyncDeadLetters, Insights, AsyncInsights]


@pytest.fixture(scope="module")
def reference() -> Any:
    """The package as the API reference reads it."""
    return griffe.load("microqueue", search_paths=[ROOT], resolve_aliases=True)


@pytest.mark.parametrize("cls", COMPLETED, ids=lambda cls: cls.__name__)
def test_completion_and_reference_list_the_same_names(reference: Any, cls: type) -> None:
    path = f"{cls.__module__}.{cls.__name__}".removeprefix("microqueue.")
    shown = {name for name in reference[path].all_members if not name.startswith("_")}
    offered = {name for name in dir(cls) if not name.startswith("_")}
    assert shown == offered


def test_reference_shows_every_public_name() -> None:
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: microqueue\.(\w+)$", text, flags=re.MULTILINE))
    errors = vars(microqueue.errors)
    missing = [
        name
        for name in microqueue.__all__
        if name not in shown and name not in errors and not name.startswith("_")
    ]
    assert missing == []
