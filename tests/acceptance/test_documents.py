"""The documents are true: examples run and are typed, commands parse, links and names exist."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import celery._state
import griffe
import pytest
from celery.contrib.testing.worker import start_worker
from pydantic import BaseModel
from pymongo import MongoClient
from typer.core import TyperGroup
from typer.main import get_command

import microqueue
from benchmarks.__main__ import PARTS
from benchmarks.walk import DRIVER, value_modules, walk
from microqueue import (
    AsyncQueue,
    AsyncSubscription,
    AsyncSweeper,
    AsyncTopic,
    AsyncWorker,
    EnqueueOptions,
    Outcome,
    Queue,
    QueueSettings,
    Subscription,
    Sweeper,
    Tasks,
    Topic,
    Worker,
    error_codes,
)
from microqueue.cli.app import (
    COMMANDS,
    DLQ_COMMANDS,
    PIPELINE_COMMANDS,
    SCHEDULE_COMMANDS,
    app,
)
from microqueue.cli.options import QueueScope
from microqueue.contrib.kombu import TransportOptions
from microqueue.dashboard import dashboard
from microqueue.dashboard.options import DashboardOptions
from microqueue.dead_letters import AsyncDeadLetters, DeadLetters
from microqueue.embedded import EmbeddedServer
from microqueue.insights import AsyncInsights, Insights
from microqueue.schedules import AsyncSchedules, Schedules
from microqueue.spark import error_codes as spark_codes
from microqueue.testing import memory_queue
from microqueue.worker import (
    AsyncBatchContext,
    AsyncContext,
    AsyncEnqueuedTask,
    BatchContext,
    Context,
    EnqueuedTask,
    WorkerOptions,
)
from microqueue.worker.registry import NamedTask
from tests.simulation.ledger import PROMISES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
EXECUTED = {
    "README.md": 2,
    "docs/queues.md": 5,
    "docs/results.md": 3,
    "docs/topics.md": 2,
    "docs/schedules.md": 4,
    "docs/quickstart.md": 5,
    "docs/workers.md": 5,
    "docs/dashboard.md": 2,
    "docs/monitoring.md": 4,
    "docs/repair.md": 1,
}
"""The documents whose Python blocks are run, with the least number of blocks."""
CELERY, FROM_CELERY = "docs/celery.md", "docs/from-celery.md"
WITH_SIDES = {CELERY: 4, FROM_CELERY: 23}
"""The pages with two sides, with the least number of blocks.

The first line of each block says whether it is Celery's.
"""
WITH_COMMANDS = {
    "README.md": 4,
    "docs/celery.md": 5,
    "docs/cli.md": 15,
    "docs/dashboard.md": 3,
    "docs/monitoring.md": 3,
    "docs/pipelines.md": 6,
    "docs/queues.md": 2,
    "docs/quickstart.md": 3,
    "docs/results.md": 2,
    "docs/schedules.md": 4,
    "docs/topics.md": 4,
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


class Webhook:
    """A server that keeps what is posted to it as JSON."""

    def __init__(self) -> None:
        self.posted: list[Any] = []
        posted = self.posted

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    found = Webhook()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


@pytest.mark.parametrize("name", EXECUTED)
def test_every_python_block_runs(
    name: str,
    webhook: Webhook,
    microqueue_server: EmbeddedServer,
    microqueue_client: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    database = re.sub(r"\W", "_", name)
    for used in ("shop", database):
        microqueue_client.drop_database(used)
    monkeypatch.setenv("MICROQUEUE_URI", microqueue_server.uri.replace("/?", f"/{database}?"))
    monkeypatch.setenv("WEBHOOK_URL", webhook.url)
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
        if name == "docs/monitoring.md":
            assert [one["code"] for one in webhook.posted] == ["expired"] * 2
            assert {one["source"] for one in webhook.posted} == {"sweeper"}
        if name == "docs/workers.md":
            assert namespace["urgent"].stats().done == namespace["bulk"].stats().done == 2
    finally:
        for one in opened:
            one.close()


@pytest.mark.parametrize("name", WITH_SIDES)
def test_every_python_block_of_the_pages_about_celery_runs(
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
    # Celery adds the tasks of one application to those that other tests create later.
    shared = set(celery._state._on_app_finalizers)  # noqa: SLF001
    monkeypatch.setattr(celery._state, "_on_app_finalizers", shared)  # noqa: SLF001
    sides: dict[str, dict[str, Any]] = {"# Celery": {}, "# microqueue": {}}
    need_a_worker = []
    examples = blocks("python", read(name))
    assert len(examples) >= WITH_SIDES[name]
    for block in examples:
        code = compile(block, name, "exec")
        side = sides[block.splitlines()[0]]
        if ".get(timeout" in block:
            need_a_worker.append(code)
        else:
            exec(code, side)
    page, app = sides["# Celery"], sides["# Celery"]["app"]
    app._backend_cache = app.backend  # noqa: SLF001 (else each thread opens one, and closes none)
    limit: Any = {"timeout": 90}
    try:
        with start_worker(
            app, pool="threads", concurrency=2, queues=["celery", "images"],
            perform_ping_check=False, shutdown_timeout=90,
        ):  # fmt: skip
            for code in need_a_worker:
                exec(code, page)
            if name == FROM_CELERY:
                assert page["chained"].get(**limit) == 200
                assert page["grouped"].get(**limit) == [0, 100, 200]
                assert page["joined"].get(**limit) == 300
        if name == FROM_CELERY:
            stored = microqueue_client[database].tasks
            assert stored.find_one({"queue": "images"})["name"] == "shop.thumbnail"
            delayed = {"queue": "celery", "status": "pending", "next_retry_at": {"$ne": None}}
            assert stored.count_documents(delayed) == 2
            assert stored.count_documents({"queue": "orders", "error.code": "cancelled"}) == 1
            said = capsys.readouterr().out
            (nightly,) = microqueue_client[database].microqueue_schedules.find()
            assert (nightly["name"], nightly["cron"]) == ("nightly", "0 3 * * *")
            assert "300" in said.splitlines()
    finally:
        app.backend._connection.close()  # noqa: SLF001 (the backend never closes it)
        for one in {id(one): one for side in sides.values() for one in side.values()}.values():
            if isinstance(one, Queue | MongoClient | type(app)):
                one.close()


@pytest.mark.parametrize("name", EXECUTED)
def test_every_executed_document_has_its_python_blocks(name: str) -> None:
    assert len(blocks("python", read(name))) >= EXECUTED[name]


def module_of(text: str, *, first_line: str = "") -> str:
    """Return the Python blocks of a document as a module with the document's line numbers.

    ``first_line`` selects the blocks that begin with this line.
    """
    lines, inside = [], False
    source = text.splitlines()
    for line, following in zip(source, [*source[1:], ""], strict=True):
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        begins = line in {"```python", "```py"} and following.startswith(first_line)
        inside = not inside and begins if fence else inside
    return "\n".join(lines) + "\n"


def modules_of(document: Path) -> dict[str, str]:
    """Return the modules of a document by their names: one, or one for each side."""
    name, text = re.sub(r"\W", "_", name_of(document)), document.read_text(encoding="utf-8")
    if name_of(document) not in WITH_SIDES:
        return {name: module_of(text)}
    sides = {"celery": "# Celery", "microqueue": "# microqueue"}
    return {
        f"{name}_{side}": module_of(text, first_line=first_line)
        for side, first_line in sides.items()
    }


def test_every_python_block_passes_mypy_strict(tmp_path: Path) -> None:
    modules = {}
    for document in DOCUMENTS:
        for name, module in modules_of(document).items():
            if module.strip():
                path = tmp_path / f"{name}.py"
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
    by_program = re.sub(
        r" < \S+", "", re.sub(r"\$\(.*?\)", "today", call)
    )  # The rest is the shell's.
    context, arguments = None, shlex.split(by_program)
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


def test_table_of_queues_names_every_command() -> None:
    table = read("docs/cli.md").split("## Which queues\n")[1].split("\n## ")[0]
    root: Any = get_command(app)
    names = [
        f"{name} {inner}".rstrip()
        for name, command in root.commands.items()
        for inner in getattr(command, "commands", [""])
    ]
    assert {"peek", "dlq list", "schedule put", "pipeline report"} <= set(names)
    assert [name for name in names if f"`{name}`" not in table] == []


def test_command_that_requires_a_queue_can_be_given_all_queues() -> None:
    required = {QueueScope.REQUIRED, QueueScope.REQUIRED_UNLESS_IDS}
    groups = (DLQ_COMMANDS, SCHEDULE_COMMANDS, PIPELINE_COMMANDS)
    for commands in (*COMMANDS.values(), *groups):
        for name, (function, scope) in commands.items():
            takes = "all_queues" in inspect.signature(function).parameters
            assert takes == (scope in required), name


def test_every_pipeline_is_in_the_lists_of_pipelines() -> None:
    pages = {name: read(name) for name in ("README.md", "docs/spark.md")}
    for name in PIPELINE_COMMANDS:
        assert f"[`{name}`](#{name})" in read("docs/pipelines.md")
        assert f"::: microqueue.spark.pipelines.{name}\n" in read("docs/reference/spark.md")
        assert re.search(
            rf"^    {name} ", read("microqueue/spark/pipelines.py"), flags=re.MULTILINE
        )
        assert [page for page, text in pages.items() if name not in text] == []


def test_scripts_and_modules_that_the_documents_run_exist() -> None:
    for line in [*console_lines(*DOCUMENTS), *(read(name_of(one)) for one in DOCUMENTS)]:
        for script in re.findall(r"(?<![\w./])(?:\./)?((?:scripts|\.ci)/[\w.-]+)", line):
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


def test_table_of_error_codes_has_every_code_with_its_meaning() -> None:
    assert rows_of("docs/queues.md", "Error codes") == error_codes.MEANINGS


def test_table_of_spark_codes_has_every_code_with_its_meaning() -> None:
    assert rows_of("docs/spark.md", "Codes") == spark_codes.MEANINGS


def test_options_table_names_every_option_of_enqueue() -> None:
    listed = set(rows_of("docs/queues.md", "Enqueue"))
    assert listed == {*EnqueueOptions.__annotations__, "session"}


def test_options_table_names_every_option_of_the_kombu_transport_with_its_default() -> None:
    shown = rows_of(CELERY, "Options")
    assert set(shown) == set(TransportOptions.model_fields)
    defaults = TransportOptions()
    for name, field in TransportOptions.model_fields.items():
        default = getattr(defaults, name)
        if isinstance(default, timedelta):
            assert shown[name] == f"{default.total_seconds():g} s"
        elif isinstance(default, bool):
            assert shown[name] == str(default).lower()
        elif isinstance(default, int):
            assert shown[name].replace(",", "") == str(default)
        elif default:
            assert shown[name] == f"`{default}`"
        else:
            assert field.default in {None, ""}


def test_options_table_names_every_option_of_the_dashboard() -> None:
    assert set(rows_of("docs/dashboard.md", "Options")) == set(DashboardOptions.model_fields)


def test_routes_table_names_every_route() -> None:
    text = read("docs/dashboard.md").split("## REST\n")[1].split("\n## ")[0]
    documented = set(re.findall(r"`(GET|POST) (/[^`]+)`", text))
    paths = dashboard(memory_queue(), manual_actions=True).openapi()["paths"]
    api = {path.removeprefix("/api/v1"): one for path, one in paths.items() if "/api/v1" in path}
    assert documented == {(method.upper(), path) for path, one in api.items() for method in one}


def test_every_outcome_is_in_the_glossary_and_labelled_in_the_page() -> None:
    row = read("docs/glossary.md").split("\n| outcome | ")[1].split("\n")[0]
    script = read("microqueue/dashboard/static/scripts/components/timeline.js")
    labels = script.split("OUTCOME_LABELS = {")[1].split("}")[0]
    assert set(re.findall(r"`(\w+)`", row)) == set(Outcome)
    assert set(re.findall(r"(\w+):", labels)) == set(Outcome)


def test_page_listens_to_every_documented_event() -> None:
    table = read("docs/dashboard.md").split("## Events\n")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| (`[^|]+) \|", table, flags=re.MULTILINE)
    documented = set(re.findall(r"`([\w.]+)`", "".join(first_cells)))
    script = read("microqueue/dashboard/static/scripts/events.js")
    lists = re.findall(r"(?:EVENT|CONTROL)_TYPES = \[(.*?)\]", script, flags=re.DOTALL)
    assert set(re.findall(r'"([\w.]+)"', "".join(lists))) == documented
    source = read("microqueue/operations/events.py") + read("microqueue/dashboard/feeds.py")
    source += read("microqueue/dashboard/events.py")
    assert set(re.findall(r'"((?:task|queue|worker|sweep)\.\w+)"', source)) <= documented


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


def quoted_in(text: str) -> list[str]:
    """Return what is between backticks."""
    return re.findall(r"`([^`]+)`", text)


def is_path(quoted: str) -> bool:
    """Return whether what is between backticks is a file or a folder of this project."""
    return bool(re.fullmatch(r"(?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|js|css|html|md)", quoted))


def place_of(name: str) -> Path:
    """Return the file or folder that a document names; tests may be named without their folder."""
    static = ROOT / "microqueue" / "dashboard" / "static"
    homes = (ROOT, ROOT / "microqueue", DOCS, static, static / "scripts")
    found = [home / name for home in homes if (home / name).exists()]
    if re.fullmatch(r"test_\w+\.py", name):
        found = list((ROOT / "tests").rglob(name))
        assert len(found) == 1, f"{len(found)} files are named {name}"
    assert found, f"there is no {name}"
    return found[0]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = prose(document.read_text(encoding="utf-8"))
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert list((ROOT / "tests").rglob(name)), f"there is no {name}"
    for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|js|css|html|md|toml|yml))`", text):
        place_of(name)


def test_each_promise_names_checks_that_exist() -> None:
    page = (DOCS / "guarantees.md").read_text()
    readme = (ROOT / "README.md").read_text()
    promises = re.findall(r"^\| \*\*(.+?)\*\* \|", readme, re.MULTILINE)
    rows = re.search(r"\| promise \| checks \|\n\|---\|---\|\n((?:\|.*\n)+)", page)
    assert rows is not None
    assert re.findall(r"^\| (.+?) \|", rows[1], re.MULTILINE) == promises
    assert all("test_" in row for row in rows[1].splitlines())
    table = re.search(r"\| verdict \| .*\n\|---\|---\|\n((?:\|.*\n)+)", read("docs/testing.md"))
    assert table is not None
    verdicts = set(re.findall(r"^\| (.+?) \|", table[1], re.MULTILINE))
    for known, found in ((verdicts, "chaos"), (set(PROMISES), "simulation")):
        named = re.findall(rf"; {found}: ([^;|]+?)(?:;| \|)", page)
        assert len(named) > len(promises)
        # A verdict may have a comma in its name.
        for names in named:
            left = names
            for one in sorted(known, key=len, reverse=True):
                left = left.replace(one, "")
            assert not left.strip(", "), f"{found}: {names}"


def test_changelog_names_every_deprecated_name() -> None:
    source = "".join(file.read_text() for file in (ROOT / "microqueue").rglob("*.py"))
    source = source.replace((ROOT / "microqueue" / "deprecation.py").read_text(), "")
    old = re.findall(r"warn_renamed\(\s*\"([\w.]+)", source)
    for names in re.findall(
        r"renamed_(?:fields|names|attributes|options)\b[^{}\n]*\n?[^{}\n]*{([^}]*)}", source
    ):
        old += re.findall(r'"(\w+)":', names)
    for names in re.findall(r"\bmoved_names\(\s*__name__,\s*{([^}]*)}", source):
        old += re.findall(r'"(\w+)":', names)
    for names in re.findall(r"@renamed_arguments\(([^)]*)\)", source):
        old += re.findall(r"(\w+)=", names)
    for names in re.findall(r"\brenamed\(\s*\"(--[\w/-]+)\"", source):  # Options of commands.
        old += names.split("/")
    assert len(old) >= 5
    section = read("CHANGELOG.md").split("### Deprecated\n")[1].split("\n### ")[0]
    assert [name for name in old if name.rpartition(".")[2] not in section] == []


def test_names_in_the_instructions_are_in_the_files_beside_them() -> None:
    text = read("docs/how-to-add.md")
    rows = [row for row in re.findall(r"^\|.*\|$", text, flags=re.MULTILINE) if "`" in row]
    items = re.findall(r"^(?:\d+\.|-) .*(?:\n  .*)*", text, flags=re.MULTILINE)
    assert len(rows) > 25
    assert len(items) > 75
    for row in (*rows, *items):
        assert all(place_of(name) for name in filter(is_path, quoted_in(row)))
        # The names of a sentence are in its files, or, if it has none, in those of the whole row.
        for part in re.split(r"[.;](?=\s)", row):
            words = {
                word
                for name in quoted_in(part)
                if not is_path(name)
                for word in re.findall(r"\w+", name)
            }
            beside = [name for name in quoted_in(part) if is_path(name)]
            found = text_of(beside or [name for name in quoted_in(row) if is_path(name)])
            missing = sorted(word for word in words if not re.search(rf"\b{word}\b", found))
            assert missing == [], f"{missing} is not in a file of: {part}"


def text_of(names: list[str]) -> str:
    """Return the text of files and folders that a document names."""
    places = [place_of(name) for name in names]
    files = [file for one in places for file in (one.rglob("*") if one.is_dir() else [one])]
    kinds = {".py", ".js", ".css", ".html", ".md"}
    return "".join(file.read_text() for file in files if file.suffix in kinds)


def test_command_to_copy_has_the_scope_that_the_instructions_name() -> None:
    text = read("docs/how-to-add.md").split("## A command\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([A-Z_]+) \| .* \| `(\w+)` in `cli/(\w+)\.py` \|$", text, re.MULTILINE)
    assert {scope for scope, _, _ in rows} == set(QueueScope.__members__)
    used = {
        (scope.name, function.__name__, function.__module__.rpartition(".")[2])
        for commands in (*COMMANDS.values(), DLQ_COMMANDS)
        for function, scope in commands.values()
    }
    assert set(rows) <= used


MOST_MODULES = {
    "enqueue": 15, "claim": 19, "handle": 7, "settle": 11, "sweep": 15, "replay": 20,
}  # fmt: skip
"""How many modules one task may cross in each step. A smaller number is better."""
VARYING = {"claim", "handle"}
"""Steps that a slow machine may take another way."""


def test_walk_of_a_task_is_the_one_that_the_architecture_shows(
    microqueue_server: EmbeddedServer, microqueue_client: Any
) -> None:
    text = read("docs/architecture.md").split("### The modules it crosses\n")[1].split("\n### ")[0]
    assert set(re.findall(r"`(\w+\.\w+)`", text.split("\n|")[0])) == DRIVER
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (.*`) \|$", text, flags=re.MULTILINE)
    microqueue_client.drop_database("walk")
    walked = walk(microqueue_server.uri.replace("/?", "/walk?"))
    assert [step for step, _, _ in rows] == [*walked, "archive"]
    assert {step: int(count) for step, count, _ in rows[:-1]} == MOST_MODULES
    values = value_modules()
    for step, count, listed in rows[:-1]:  # The archive needs Spark.
        modules = {module for module in walked[step] if module not in values}
        named = set(re.findall(r"`([\w.]+)`", listed))
        instead = f"{step}: update docs/architecture.md by benchmarks.walk --archive --markdown"
        assert named <= modules, instead
        if step not in VARYING:
            assert modules - DRIVER == named, instead
            assert len(walked[step]) == int(count), instead


def test_task_crosses_no_more_modules_than_before(
    microqueue_server: EmbeddedServer, microqueue_client: Any
) -> None:
    longer = MOST_MODULES
    for _ in range(3):  # A slow machine may take a longer way, but not each time.
        microqueue_client.drop_database("walk")
        walked = walk(microqueue_server.uri.replace("/?", "/walk?"))
        longer = {step: most for step, most in longer.items() if len(walked[step]) > most}
        if not longer:
            break
    assert longer == {}
    now = read("docs/architecture.md").split("| now | ")[1].splitlines()[0]
    assert [int(count) for count in re.findall(r"\d+", now)] == list(MOST_MODULES.values())


COMPLETED: list[type] = [Queue, AsyncQueue, Worker, AsyncWorker, Sweeper, AsyncSweeper, Tasks]
COMPLETED += [DeadLetters, AsyncDeadLetters, Insights, AsyncInsights, Schedules, AsyncSchedules]
COMPLETED += [Topic, AsyncTopic, Subscription, AsyncSubscription, Context, AsyncContext]
COMPLETED += [BatchContext, AsyncBatchContext, EnqueuedTask, AsyncEnqueuedTask, NamedTask]


@pytest.fixture(scope="module")
def reference() -> Any:
    """The package as the API reference reads it."""
    return griffe.load("microqueue", search_paths=[ROOT], resolve_aliases=True)


@pytest.mark.parametrize("cls", COMPLETED, ids=lambda cls: cls.__name__)
def test_completion_and_reference_list_the_same_names(reference: Any, cls: type) -> None:
    path = f"{cls.__module__}.{cls.__name__}".removeprefix("microqueue.")
    shown, offered = set(reference[path].all_members), {*dir(cls), *inspect.get_annotations(cls)}
    if issubclass(cls, BaseModel):
        offered |= set(cls.model_fields)
        shown, offered = shown - set(dir(BaseModel)), offered - set(dir(BaseModel))
    assert public(shown) == public(offered)


def public(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


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


PUBLIC_MODULES = [
    "microqueue", "microqueue.worker", "microqueue.testing", "microqueue.embedded",
    "microqueue.insights", "microqueue.dashboard", "microqueue.metrics", "microqueue.tracing",
    "microqueue.spark", "microqueue.spark.pipelines",
]  # fmt: skip


def public_functions(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions of a module and the methods of its classes, as users import them."""
    imported = importlib.import_module(module)
    for name in getattr(imported, "__all__", ()):
        found = getattr(imported, name)
        if not inspect.isclass(found):
            if inspect.isfunction(found):
                yield name, found
            continue
        for method, defined in list(vars(found).items()):
            function = getattr(defined, "__func__", defined)
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"{name}.{method}", function


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_public_functions_document_their_arguments_and_result(module: str) -> None:
    lacking = []
    for name, function in public_functions(module):
        signature, text = inspect.signature(function), inspect.getdoc(function) or ""
        arguments = [one for one in signature.parameters if one not in {"self", "cls"}]
        returned = str(signature.return_annotation)
        if arguments and "Args:" not in text:
            lacking.append((name, "Args"))
        if returned not in {"None", "Iterator[None]"} and "Returns:" not in text:
            lacking.append((name, "Returns"))
    assert lacking == []
