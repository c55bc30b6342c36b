from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import pytest

import microqueue
from microqueue import Task, TaskError
from microqueue.masking import without_password


def test_import_loads_no_optional_dependency() -> None:
    heavy = [
        "motor",
        "mongomock",
        "typer",
        "rich",
        "fastapi",
        "pyspark",
        "prometheus_client",
        "opentelemetry",
    ]
    program = f"import microqueue, sys; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_everything_exported_exists() -> None:
    for name in microqueue.__all__:
        assert hasattr(microqueue, name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mongodb://user:secret@host/db", "mongodb://***@host/db"),
        ("mongodb+srv://u:p%40ss@h.example/?x=1", "mongodb+srv://***@h.example/?x=1"),
        ("mongodb://u:p@ss@host", "mongodb://***@host"),
        ("mongodb://u:p/ss@host/db", "mongodb://***@host/db"),
        ("mongodb://host/db", "mongodb://host/db"),
        (
            "mongodb://h/?tlsCertificateKeyFilePassword=x&w=1",
            "mongodb://h/?tlsCertificateKeyFilePassword=***&w=1",
        ),
    ],
)
def test_password_in_a_uri_is_masked(text: str, expected: str) -> None:
    assert without_password(text) == expected


def test_trusted_models_equal_validated_ones() -> None:
    fields = {"message": "no", "code": None, "at": datetime(2026, 1, 1, tzinfo=UTC)}
    trusted, validated = TaskError.trusted(**fields), TaskError(**fields)
    assert trusted == validated
    assert hash(trusted) == hash(validated)
    assert trusted.model_dump_json() == validated.model_dump_json()
    assert trusted.model_copy(update={"code": "c"}).code == "c"


def test_task_read_from_a_document_has_every_field() -> None:
    task = Task.from_document({"_id": 1})
    assert set(task.__dict__) == set(Task.model_fields)
