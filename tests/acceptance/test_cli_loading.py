"""Errors about an app that cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.command_line import Cli

HINT = "; --debug shows the traceback\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with apps in it, and one with an app that is installed."""
    files = {
        "shop/good.py": "def handle(payload): ...\n",
        "shop/broken.py": "import json\n\n\ndef read():\n    json.loads('{')\n\n\nread()\n",
        "shop/outer.py": "import shop.broken\n",
        "shop/unfinished.py": "def handle(\n",
        "elsewhere/site-packages/installed_shop/tasks.py": "import library_of_shop\n",
        "elsewhere/site-packages/library_of_shop.py": "\n1 / 0\n",
    }
    for name, code in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code, encoding="utf-8")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    installed = str(tmp_path / "elsewhere" / "site-packages")
    monkeypatch.setattr(sys, "path", [installed, *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {"shop", "installed_shop", "library_of_shop"}:
            del sys.modules[name]


@pytest.mark.parametrize("module", ["broken", "outer"])
@pytest.mark.parametrize("processes", ["1", "2"])
def test_line_of_the_app_that_raised_is_named(
    cli: Cli, project: Path, module: str, processes: str
) -> None:
    cli("worker", f"shop.{module}:handle", "--processes", processes, status=1)
    assert f"importing 'shop.{module}' raised JSONDecodeError: Expecting property" in cli.stderr
    assert cli.stderr.endswith(f", at shop/broken.py:5{HINT}")
    assert len(cli.stderr.splitlines()) == 1
    cli("worker", f"shop.{module}:handle", "--debug", status=1)
    assert "json/decoder.py" in cli.stderr


def test_line_of_an_app_that_is_installed_is_named_and_no_line_of_a_library(
    cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project / "here")
    cli("worker", "installed_shop.tasks:handle", status=1)
    file = project / "elsewhere" / "site-packages" / "installed_shop" / "tasks.py"
    assert cli.stderr.endswith(f"ZeroDivisionError: division by zero, at {file}:1{HINT}")


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("shop.good:missing", "'shop.good' has no 'missing'\n"),
        ("shop.nowhere:handle", "No module named 'shop.nowhere'\n"),
        ("shop.unfinished:handle", "'(' was never closed (unfinished.py, line 1)\n"),
    ],
)
def test_other_reasons_are_told_as_they_are(
    cli: Cli, project: Path, reference: str, reason: str
) -> None:
    cli("worker", reference, status=1)
    assert cli.stderr.endswith(reason)


def test_line_of_a_model_that_raised_is_named_before_spark_starts(
    cli: Cli, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    cli("pipeline", "ingest", "rows.csv", "--model", "shop.broken:Order", status=1)
    assert "model='shop.broken:Order' is not valid: importing 'shop.broken'" in cli.stderr
    assert cli.stderr.endswith(f", at shop/broken.py:5{HINT}")


@pytest.mark.parametrize("module", ["broken", "outer"])
def test_line_of_a_registry_that_raised_is_named_by_the_dashboard(
    cli: Cli, project: Path, module: str
) -> None:
    cli("dashboard", "--tasks", f"shop.{module}:tasks", status=1)
    assert f"tasks='shop.{module}:tasks' is not valid: importing 'shop.{module}'" in cli.stderr
    assert cli.stderr.endswith(f", at shop/broken.py:5{HINT}")
    assert len(cli.stderr.splitlines()) == 1
    cli("dashboard", "--tasks", f"shop.{module}:tasks", "--debug", status=1)
    assert "json/decoder.py" in cli.stderr
