"""The codes of errors about Spark, and the line that carries them through Spark."""

from __future__ import annotations

import re

import pytest

from microqueue import (
    InvalidArgument,
    InvalidPayload,
    MicroqueueError,
    PipelineError,
    RunConflict,
    SchemaDrift,
)
from microqueue.spark import error_codes
from microqueue.spark.error_notes import note_of, noting
from tests.conftest import ROOT

CODES = {
    value: name
    for name, value in vars(error_codes).items()
    if name.isupper() and name != "MEANINGS"
}


def test_every_code_has_a_meaning() -> None:
    assert CODES.keys() == error_codes.MEANINGS.keys()


def test_every_code_is_used() -> None:
    sources = (ROOT / "microqueue/spark").rglob("*.py")
    text = "".join(path.read_text() for path in sources if path.name != "error_codes.py")
    used = set(re.findall(r"\berror_codes\.([A-Z_]+)", text))
    elsewhere = {RunConflict(run="r", before={}, given={}).code, "no_timezone"}
    assert {code for code, name in CODES.items() if name not in used} <= elsewhere


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (InvalidArgument("m", argument="mode"), "InvalidArgument argument='mode'"),
        (
            InvalidPayload("m", argument="payload", code="lossy", field="a.b", key="7"),
            "InvalidPayload [lossy] argument='payload' field='a.b' key='7'",
        ),
        (
            SchemaDrift(task_id=1, column="error.at", reason="is missing", code="missing"),
            "SchemaDrift [missing] column='error.at'",
        ),
        (PipelineError("m", code="no_tasks"), "PipelineError [no_tasks]"),
        (MicroqueueError("m"), "MicroqueueError"),
    ],
    ids=["argument", "payload", "drift", "pipeline", "plain"],
)
def test_a_note_has_class_code_and_fields_and_is_added_once(
    error: MicroqueueError, note: str
) -> None:
    assert note_of(error) == note
    with pytest.raises(type(error)), noting(), noting():
        raise error
    assert error.__notes__ == [note]
    assert note not in str(error)


def test_an_error_of_something_else_has_no_note() -> None:
    error = ValueError("m")
    with pytest.raises(ValueError), noting():  # noqa: PT011 (it is this one)
        raise error
    assert not hasattr(error, "__notes__")
