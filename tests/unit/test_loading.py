from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from microqueue import InvalidArgument
from microqueue.worker import load_handler
from microqueue.worker.handlers import load_model


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with a module in it."""
    code = (
        "def handle(payload): return payload\n"
        "class Shop:\n"
        "    @staticmethod\n"
        "    def ship(payload): return payload\n"
        "async def later(payload): ...\n"
        "number = 7\n"
    )
    (tmp_path / "shop_tasks.py").write_text(code, encoding="utf-8")
    (tmp_path / "shop_broken.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in ("shop_tasks", "shop_broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("reference", ["shop_tasks:handle", "shop_tasks:Shop.ship"])
def test_handler_is_found_in_the_current_directory(project: Path, reference: str) -> None:
    assert load_handler(reference)({"n": 1}) == {"n": 1}


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("shop_tasks", "give module:name"),
        (":handle", "give module:name"),
        ("shop_tasks:", "give module:name"),
        ("no_such_module:handle", "No module named 'no_such_module'"),
        ("shop_broken:handle", "ZeroDivisionError"),
        ("shop_tasks:missing", "has no 'missing'"),
        ("shop_tasks:number", "'number' is not callable: it is int"),
    ],
)
def test_handler_that_cannot_be_used_is_refused_by_name(
    project: Path, reference: str, reason: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load_handler(reference)
    assert repr(reference) in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("nowhere:Model", "No module named 'nowhere'"),
        ("shop_tasks", "give module:name, for example shop.tasks:Mail"),
        ("shop_tasks:Missing", "has no 'Missing'"),
        ("shop_tasks:number", "'number' is not callable: it is int"),
    ],
)
def test_model_that_cannot_be_used_is_refused_as_a_model(
    project: Path, reference: str, reason: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load_model(reference)
    assert caught.value.argument == "model"
    assert str(caught.value).startswith(f"model={reference!r} is not valid: ")
    assert reason in str(caught.value)


def test_model_is_found_in_the_current_directory(project: Path) -> None:
    assert load_model("shop_tasks:Shop").__name__ == "Shop"
