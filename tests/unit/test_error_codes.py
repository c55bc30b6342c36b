"""The codes that microqueue writes are spelled in one module."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from microqueue import error_codes
from tests.conftest import ROOT

ERRORS = {"TaskError", "Fail", "Retry"}
AMBIGUOUS = {"cancelled", "expired", "lease_expired", "max_attempts", "rejected"}
"""Also an outcome, a count or a setting."""


def spelled_codes(source: str) -> Iterator[str]:
    """Yield the codes of task errors that a module spells itself."""
    for node in ast.walk(ast.parse(source)):
        values: list[ast.expr] = []
        if isinstance(node, ast.Call) and ERRORS & set(_called(node)):
            values = [one.value for one in node.keywords if one.arg == "code"]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            values = [one for key, one in pairs if key and ast.unparse(key) == "'code'"]
        elif isinstance(node, ast.Constant) and node.value not in AMBIGUOUS:
            values = [node]
        for value in values:
            if isinstance(value, ast.Constant) and value.value in error_codes.MEANINGS:
                yield value.value


def _called(node: ast.Call) -> Iterator[str]:
    """Yield the names of what is called, and of its first argument: ``trusted(TaskError, ...)``."""
    for one in (node.func, *node.args[:1]):
        yield from ast.unparse(one).split(".")


def test_every_code_has_a_meaning() -> None:
    codes = [value for name, value in vars(error_codes).items() if name.isupper()]
    codes.remove(error_codes.MEANINGS)
    assert codes == list(error_codes.MEANINGS)


@pytest.mark.parametrize(
    "source",
    [
        "x = trusted(TaskError, message='m', code='expired')",
        "raise outcomes.Fail('m', code='max_attempts')",
        "error = {'code': 'cancelled', 'at': now}",
        "POISON = 'poison'",
    ],
)
def test_spelled_code_is_found(source: str) -> None:
    assert len(set(spelled_codes(source))) == 1


def test_no_other_module_spells_a_code() -> None:
    found = {
        str(path.relative_to(ROOT)): codes
        for path in (ROOT / "microqueue").rglob("*.py")
        if path.name != "error_codes.py" and (codes := set(spelled_codes(path.read_text())))
    }
    assert found == {}
