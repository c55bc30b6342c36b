"""Parts of the data source and the pipelines in rare situations; most need no Spark."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from bson import Decimal128, ObjectId
from bson.codec_options import CodecOptions
from pyspark.errors import AnalysisException, PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    DayTimeIntervalType,
    DecimalType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from microqueue import (
    BackoffPolicy,
    InvalidArgument,
    MicroqueueError,
    OperationFailed,
    PipelineError,
    Queue,
    QueueSettings,
)
from microqueue.cli import spark_runner
from microqueue.cli.options import SharedOptions
from microqueue.cli.session import Session
from microqueue.cli.spark_runner import Runner, explain_system, running
from microqueue.operations import bulk_load
from microqueue.spark import frames
from microqueue.spark.analytics import html, simulate, storms
from microqueue.spark.analytics.queue_model import record
from microqueue.spark.analytics.simulate import ScenarioResult
from microqueue.spark.analytics.task_source import live_ids, read_consistently
from microqueue.spark.archive import parquet
from microqueue.spark.archive.job import archive
from microqueue.spark.archive.log import ArchiveLog, Entry
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.ids import typed_id
from microqueue.spark.ingest.source import read_source
from microqueue.spark.location import Location, locate
from microqueue.spark.options import SelectionOptions, SinkOptions
from microqueue.spark.progress import Step
from microqueue.spark.read import batch as reading
from microqueue.spark.read.raw_batches import unpack_once
from microqueue.spark.replay.selection import select
from microqueue.spark.source import MicroqueueSource
from microqueue.spark.storage import Storage
from microqueue.spark.value_conversion import Drift, reader_of
from microqueue.spark.write import columnar
from microqueue.spark.write.documents import ChunkBuilder, Stamp
from microqueue.spark.write.sink import TaskStreamWriter, TaskWriter, Written
from tests.rejection import raising
from tests.spark.past import Past

AT = datetime(2026, 5, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
ROWS = StructType([StructField("order", LongType())])


# Options and values


def test_options_may_be_given_as_python_values() -> None:
    options = SelectionOptions(uri="mongodb://h/db", queue=["a", "b"], since=AT)
    assert (options.queue, options.since) == (("a", "b"), AT)


def test_type_of_an_id_that_is_none_is_rejected() -> None:
    with pytest.raises(InvalidArgument) as caught:
        typed_id("1", "float")
    assert caught.value.argument == "id_type"


def test_schema_of_a_map_has_quoted_names() -> None:
    kind = MapType(StringType(), StructType([StructField("a b", ArrayType(LongType()))]))
    assert frames._ddl_type(kind) == "map<string,struct<`a b`:array<bigint>>>"  # noqa: SLF001 (pure)


@pytest.mark.parametrize(
    ("kind", "value", "read", "drifted"),
    [
        (MapType(StringType(), LongType()), None, None, False),
        (MapType(StringType(), LongType()), [1], None, True),
        (MapType(StringType(), LongType()), {"a": 1}, [("a", 1)], False),
        (DecimalType(5, 2), Decimal128("NaN"), None, True),
        (DecimalType(5, 2), "1", None, True),
        (DecimalType(5, 2), 12, Decimal(12), False),
    ],
)
def test_value_that_does_not_fit_its_column_is_drift(
    kind: Any, value: Any, read: Any, drifted: bool
) -> None:
    drift = Drift(strict=False)
    assert reader_of(kind, "payload.a")(value, drift) == read
    assert drift.count == drifted


def test_delay_may_be_an_interval() -> None:
    schema = StructType(
        [StructField("payload", StringType()), StructField("delay", DayTimeIntervalType())]
    )
    options = SinkOptions(uri="mongodb://h/db", queue="q", keyless=True)
    builder = ChunkBuilder(schema, options, settings=QueueSettings(), load="load")
    rows = pa.table({"payload": ["{}"], "delay": pa.array([HOUR], pa.duration("us"))})
    chunk = builder.build(rows, Stamp(AT, 1, "part"), CodecOptions())
    assert [one["next_retry_at"] for one in chunk.documents] == [AT + HOUR]


def test_documents_of_columns_are_a_sequence() -> None:
    ids = [ObjectId().binary for _ in range(3)]
    documents = columnar.ColumnarDocuments({"queue": "q"}, ids, [])
    assert [one["_id"].binary for one in documents[1:]] == ids[1:]
    assert len(documents) == 3


def test_rows_that_are_too_large_are_encoded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "MAX_CHUNK_BYTES", 10)
    rows = pa.table({"order": list(range(100))})
    options: Any = {"key": ["order"], "has_payload_column": False, "codec_options": None}
    assert columnar.columnar_documents(rows, {"queue": "q", "position": 1}, **options) is None


def test_values_of_unknown_types_are_not_hashed() -> None:
    with pytest.raises(TypeError, match="duration"):
        parquet._add(Hasher(), pa.array([1], pa.duration("s")))  # noqa: SLF001


class Hasher:
    def update(self, _value: Any) -> None:
        """Ignore it."""


# The data source


@pytest.mark.parametrize(
    "field", [StructField("unknown", LongType()), StructField("id", IntegerType())]
)
def test_schema_of_a_read_has_the_columns_of_tasks(field: StructField) -> None:
    source = MicroqueueSource({"uri": "mongodb://h/db"})
    with pytest.raises(InvalidArgument) as caught:
        source.reader(StructType([field]))
    assert caught.value.argument == "schema"


def test_stream_needs_a_pyspark_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "microqueue.spark.read.stream", None)
    with pytest.raises(ImportError, match=r"PySpark 4\.2"):
        MicroqueueSource({"uri": "mongodb://h/db"}).streamReader(StructType([]))


def test_package_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "pyspark":
            raise ImportError(name)
        return usual(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "microqueue.spark")
    with pytest.raises(ImportError, match=r"microqueue\[spark\]"):
        __import__("microqueue.spark")


def test_spark_finds_the_source_by_its_package() -> None:
    import pyspark_microqueue  # noqa: PLC0415 (as Spark does)

    assert pyspark_microqueue.DefaultSource is MicroqueueSource


def test_cursor_without_a_payload_is_unpacked_by_pymongo() -> None:
    replies: list[Any] = [{"cursor": {"firstBatch": []}}]
    cursor = SimpleNamespace(_unpack_response=lambda _response: replies)
    unpacked = unpack_once(cursor)
    assert unpacked._unpack_response(SimpleNamespace(payload_document=None)) is replies  # noqa: SLF001


def test_large_collection_is_read_in_parts(
    microqueue_database: Any, database_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Queue[Any](microqueue_database).enqueue_many([{}] * 40)
    monkeypatch.setattr(reading, "SINGLE_PART_ROWS", 10)
    monkeypatch.setattr(reading, "ROWS_PER_PART", 1)
    with Location(SelectionOptions(uri=database_uri)) as location:
        assert reading.default_parts(location, {}) == 40
        assert reading.default_parts(location, {"queue": "other"}) == 1


def test_location_may_name_its_database(microqueue_server: Any, microqueue_database: Any) -> None:
    options = SelectionOptions(uri=microqueue_server.uri, database=microqueue_database.name)
    with Location(options) as location:
        assert location.collections.database.name == microqueue_database.name


# The sink


def written(database_uri: str, **options: Any) -> SinkOptions:
    return SinkOptions(uri=database_uri, queue="q", key=("order",), **options)


def batches(first: int = 0) -> Any:
    return iter([pa.RecordBatch.from_pydict({"order": list(range(first, first + 5))})])


@pytest.mark.parametrize("hold", [False, True])
def test_write_that_is_aborted_leaves_no_held_task(
    microqueue_database: Any, database_uri: str, hold: bool
) -> None:
    writer = TaskWriter(ROWS, written(database_uri, hold=hold))
    assert writer.write(batches()).inserted == 5
    writer.abort([])
    assert microqueue_database.tasks.count_documents({}) == (0 if hold else 5)


def test_micro_batches_of_a_stream_are_reported_apart(
    microqueue_database: Any, database_uri: str
) -> None:
    source = MicroqueueSource({"uri": database_uri, "queue": "q", "key": "order", "load": "stream"})
    writer: Any = source.streamWriter(ROWS, overwrite=False)
    assert isinstance(writer, TaskStreamWriter)
    for batch_id in (1, 2):
        message = writer.write(batches(5 * batch_id))
        assert isinstance(message, Written)
        writer.commit([message, None], batch_id)
    with Location(written(database_uri)) as location:
        reports = [location.run(bulk_load.take_report(f"stream-{number}")) for number in (1, 2)]
    assert [report and report["inserted"] for report in reports] == [5, 5]
    assert microqueue_database.tasks.count_documents({}) == 10


def test_tasks_of_a_stream_cannot_be_held(database_uri: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        TaskStreamWriter(ROWS, written(database_uri, hold=True))
    assert caught.value.argument == "hold"


def test_load_whose_report_is_missing_is_an_error(
    database_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[Any] = []
    writing = SimpleNamespace(save=lambda: saved.append(1))
    for name in ("format", "options", "mode"):
        setattr(writing, name, lambda *_, **_options: writing)
    frame: Any = SimpleNamespace(write=writing)
    with pytest.raises(OperationFailed, match="report"):
        frames.write_tasks(frame, queue="q", uri=database_uri, key="order")
    assert saved == [1]


# The archive


def test_log_entry_that_is_damaged_is_named(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "_log").mkdir()
    (tmp_path / "_log" / "00000001.json").write_text("{")
    with raising(PipelineError, "damaged_log", naming=["_log/00000001.json"]):
        ArchiveLog(Storage(spark, tmp_path))


def test_archive_that_differs_from_what_was_written_is_damaged(
    spark: SparkSession, tmp_path: Path
) -> None:
    with pytest.raises(parquet.ArchiveDamaged):
        parquet.verify_by_spark(spark, Storage(spark, tmp_path), [], parquet.Totals(1, 7))


def test_file_is_not_moved_over_another_one(spark: SparkSession, tmp_path: Path) -> None:
    storage = Storage(spark, tmp_path)
    system = SimpleNamespace(mkdirs=lambda _path: True, rename=lambda *_: False)
    storage._system = system  # noqa: SLF001 (some file systems refuse without an error)
    with pytest.raises(FileExistsError):
        storage.move("one", "there")


def test_archive_is_read_until_an_instant(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    for hours in (9, 5):
        past = Past(microqueue_database, ago=hours * HOUR)
        past.enqueue(1)
        past.fail([f"{hours} hours ago"])
    archive(spark, tmp_path, uri=database_uri, older_than=HOUR)
    until = datetime.now(UTC) - 7 * HOUR
    (row,) = read_archive(spark, tmp_path, until=until).collect()
    assert row["error"]["message"] == "9 hours ago"


# Pipelines


def test_changing_archive_is_read_a_last_time_and_other_errors_are_raised(
    spark: SparkSession, database_uri: str, tmp_path: Path
) -> None:
    location = locate(database_uri)
    tries: list[int] = []

    def failing() -> Any:
        raise AnalysisException("no such file")

    def meddled() -> int:
        tries.append(1)
        ArchiveLog(Storage(spark, tmp_path)).commit(Entry(kind="begun", run=str(len(tries)), at=AT))
        return len(tries)

    assert read_consistently(spark, meddled, live=location, archive=tmp_path) == 3
    with pytest.raises(PySparkException):
        read_consistently(spark, failing, live=location, archive=tmp_path)


def test_ids_of_both_collections_are_live(
    spark: SparkSession, microqueue_database: Any, database_uri: str
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.enqueue({})
    microqueue_database.tasks_dlq.insert_one({"_id": "letter", "status": "failed"})
    settings = queue.settings.model_copy(update={"dead_letters": "collection"})
    found = live_ids(spark, locate(database_uri), settings)
    assert found.count() == 2


def test_source_of_an_unknown_format_is_rejected(spark: SparkSession) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_source(spark, "rows.xml", "xml", {})
    assert caught.value.argument == "source_format"


def test_replay_needs_something_to_select_from(spark: SparkSession, database_uri: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        select(
            spark,
            locate(database_uri),
            QueueSettings(),
            where="true",
            archive=None,
            dead_letters=False,
        )
    assert caught.value.argument == "archive"


def test_too_many_scenarios_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "MOST_SCENARIOS", 3)
    with pytest.raises(InvalidArgument) as caught:
        simulate.grid([BackoffPolicy()], [1, 2], [60.0], seeds=[1, 2])
    assert caught.value.argument == "scenarios"


def test_nothing_is_recorded_of_no_tasks() -> None:
    assert record([]).tasks == ()


def test_no_policy_is_suggested_that_is_not_calmer() -> None:
    figures = {
        "peak_attempts_per_sec": 9, "recovery_sec": 60.0, "wasted_attempts": 1.0, "done": 1.0,
        "dead": 0.0, "latency_p95_sec": 1.0, "workers": 1, "visibility_timeout_sec": 60.0,
        "seeds": 1, "attempts": 2.0, "retries_by_sec": {},
    }  # fmt: skip
    policies = [BackoffPolicy(base_sec=5), BackoffPolicy(base_sec=9)]
    outcomes = [
        ScenarioResult(name=str(n), policy=one, peak_retries_per_sec=5 + n, **figures)
        for n, one in enumerate(policies)
    ]
    assert storms.choose_policy(policies[0], outcomes) is None
    better = storms.choose_policy(policies[1], outcomes)
    assert better is not None
    assert better.policy == policies[0]


def test_charts_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MicroqueueError, match=r"microqueue\[spark\]"):
        html._figure(SimpleNamespace())  # type: ignore[arg-type]  # noqa: SLF001 (the import)


# Progress at a terminal


class Status:
    """Records what is shown."""

    shown: list[str]

    def __init__(self, text: str, **_: Any) -> None:
        type(self).shown = [text]

    def update(self, text: str) -> None:
        self.shown.append(text)

    def start(self) -> None:
        self.shown.append("started")

    def stop(self) -> None:
        self.shown.append("stopped")


def test_progress_is_shown_in_place_at_a_terminal(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, database_uri: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(spark_runner, "Status", Status)
    monkeypatch.setattr(spark_runner, "REFRESH_SEC", 0.001)
    refreshed: list[Callable[[], None]] = []
    usual = Runner.refresh

    def refresh(runner: Runner) -> None:
        refreshed.append(lambda: usual(runner))

    monkeypatch.setattr(Runner, "refresh", refresh)
    with running(Session(SharedOptions(uri=database_uri)), None) as runner:
        runner.show_step(Step("group", "Grouping"))
        stage = SimpleNamespace(numTasks=8, numCompletedTasks=3)
        tracker = SimpleNamespace(
            getActiveStageIds=lambda: [1, 2],
            getStageInfo=lambda number: stage if number == 1 else None,
        )
        runner.spark = SimpleNamespace(  # type: ignore[assignment]
            sparkContext=SimpleNamespace(statusTracker=lambda: tracker)
        )
        usual(runner)
    assert Status.shown[:3] == ["Starting Spark", "started", "Grouping"]
    assert Status.shown[-1] == "stopped"
    assert "Grouping: 3 of 8 Spark tasks" in Status.shown


def test_pipeline_without_spark_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "microqueue.spark", None)
    with pytest.raises(MicroqueueError), running(Session(SharedOptions()), None):
        pass


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PermissionError(13, "Permission denied", "/kept"), "Permission denied: /kept"),
        (OSError("odd"), "odd"),
    ],
)
def test_error_of_the_system_names_the_file(error: OSError, told: str) -> None:
    assert explain_system(error) == told


def test_loggers_of_pyspark_leave_the_format_of_pytests_handlers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger, formatter = PySparkLogger.getLogger("SQLQueryContextLogger"), caplog.handler.formatter
    logger.addHandler(caplog.handler)
    logger.removeHandler(caplog.handler)
    assert caplog.handler.formatter is formatter
