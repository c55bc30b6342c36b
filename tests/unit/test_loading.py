from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from microqueue.worker import load_handler
from microqueue.worker.handlers import load_model
from tests.rejection import rejecting


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
    ("reference", "code", "cause"),
    [
        ("shop_tasks", "no_reference", None),
        (":handle", "no_reference", None),
        ("shop_tasks:", "no_reference", None),
        ("no_such_module:handle", "import_failed", ModuleNotFoundError),
        ("shop_broken:handle", "import_failed", ZeroDivisionError),
        ("shop_tasks:missing", "name_missing", AttributeError),
        ("shop_tasks:number", "not_callable", None),
    ],
)
def test_handler_that_cannot_be_used_is_rejected_by_name(
    project: Path, reference: str, code: str, cause: type[Exception] | None
) -> None:
    with rejecting("handler", reference, code=code) as caught:
        load_handler(reference)
    assert repr(reference) in str(caught.value)
    assert type(caught.value.__cause__) is (cause or type(None))
    assert cause is None or code != "import_failed" or cause.__name__ in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "code", "named"),
    [
        ("nowhere:Model", "import_failed", "'nowhere'"),
        ("shop_tasks", "no_reference", "shop.tasks:Mail"),
        ("shop_tasks:Missing", "name_missing", "'Missing'"),
        ("shop_tasks:number", "not_callable", "int"),
    ],
)
def test_model_that_cannot_be_used_is_rejected_as_a_model(
    project: Path, reference: str, code: str, named: str
) -> None:
    with rejecting("model", reference, code=code) as caught:
        load_model(reference)
    told = str(caught.value).removeprefix(f"model={reference!r} ")
    assert named in told
    assert told != str(caught.value)


def test_model_is_found_in_the_current_directory(project: Path) -> None:
    assert load_model("shop_tasks:Shop").__name__ == "Shop"
