from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from datetime import UTC, datetime

import pytest

import microqueue
from microqueue import Task, TaskError
from microqueue.masking import without_password
from microqueue.model import trusted
from microqueue.new_task import new_task_of
from microqueue.task import read_task
from microqueue.testing import memory_queue

LOADED = """
arguments async_queue backoff clock core dead_letter_models dead_letters deprecation drivers
durations effect_runner encoding_errors error_codes errors extended_json hooks masking model
new_task operations payload positions queue reports run_ids settings task task_filter task_ids
tracebacks
drivers.change_stream drivers.client_options drivers.collections drivers.connection
drivers.driver drivers.error_translation drivers.mongomock drivers.result_watch
operations.administration operations.batches operations.burials operations.call operations.claim
operations.confirm operations.dead_letters operations.deadlines operations.dedupe_keys
operations.diagnostics operations.dlq_collection operations.duplicates operations.enqueue
operations.filters operations.indexes operations.lookup operations.maintenance
operations.matching operations.mongo_errors operations.paging operations.pauses operations.poll
operations.replay operations.results operations.schema operations.search operations.server_clock
operations.settle operations.stats operations.workers
"""
"""The modules that `import microqueue` may load: what a plain producer needs, and no more."""


def test_import_loads_only_what_a_plain_producer_needs() -> None:
    program = (
        "import microqueue, sys; print(*(m for m in sys.modules if m.startswith('microqueue')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = {name.removeprefix("microqueue.") for name in result.stdout.split()} - {"microqueue"}
    assert loaded <= set(LOADED.split())


def test_modules_are_attributes_after_a_bare_import() -> None:
    names = ["embedded", "message", "schedule", "schedules", "sweeper", "timing"]
    program = f"import microqueue; print(*(getattr(microqueue, n).__name__ for n in {names}))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == [f"microqueue.{name}" for name in names]


def test_import_loads_no_dependency_that_few_need() -> None:
    heavy = [
        "motor",
        "mongomock",
        "typer",
        "rich",
        "fastapi",
        "pyspark",
        "prometheus_client",
        "opentelemetry",
        "cronsim",  # No option, but needed for schedules alone.
    ]
    program = f"import microqueue, sys; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_completion_on_the_package_shows_what_is_loaded_on_first_use() -> None:
    assert set(microqueue.__all__) <= set(dir(microqueue))


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
    fields |= {"traceback": None}
    read, validated = trusted(TaskError, **fields), TaskError(**fields)
    assert read == validated
    assert hash(read) == hash(validated)
    assert read.model_dump_json() == validated.model_dump_json()
    assert read.model_copy(update={"code": "c"}).code == "c"


def test_task_read_from_a_document_has_every_field() -> None:
    task = read_task({"_id": 1})
    assert set(task.__dict__) == set(Task.model_fields)


def test_class_of_new_tasks_survives_a_garbage_collection() -> None:
    kind = weakref.ref(type(new_task_of({}, {})))
    gc.collect()
    assert kind() is not None


def test_queue_in_memory_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mongomock", None)
    with pytest.raises(ImportError, match="pip install mongomock"):
        memory_queue()
