"""The Parquet files of an archive: staged, moved into place, read back and compared.

A file is at ``day=2026-05-01/queue=mail/RUN-NUMBER.parquet``. The queue's name is escaped as
Spark does it. File systems allow 255 bytes for the name of a directory, and a letter may take
four: a longer name is written as its beginning and a hash. The log has the whole name then, and
so has the document of each task.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType

from microqueue.errors import PipelineError
from microqueue.spark import error_codes
from microqueue.spark.archive.log import DAY, DIRECTORY, QUEUE, ArchivedFile, ArchiveState
from microqueue.spark.storage import Storage, sync
from microqueue.spark.whole_tasks import SCHEMA, Part, batches_of, decode, spread, tasks_for
from microqueue.task import DEFAULT_QUEUE

ARCHIVE_SCHEMA = StructType([*SCHEMA.fields, StructField("day", StringType())])
STAGING = "_staging"
PARTITIONS = ("day", "queue")
NO_DAY = "0001-01-01"

LONGEST_BYTES = 255 - len(QUEUE)
EMPTY = "__HIVE_DEFAULT_PARTITION__"
"""How Spark writes an empty name in a path."""

ESCAPED = frozenset("\"#%'*/:=?\\{[]^\x7f") | {chr(code) for code in range(1, 32)}
"""The characters that Spark escapes in the names of directories; each then takes three bytes."""

# As codes, which Python and Java read in the same way.
NOT_ESCAPED = "[^{}]".format("".join(f"\\x{ord(letter):02x}" for letter in sorted(ESCAPED)))
NOT_PLAIN = "[^A-Za-z0-9._-]"
BEGINNING = 40
HASH_DIGITS = 32
SHORT = f"~[0-9a-f]{{{HASH_DIGITS}}}$"
UNFIT = f"{SHORT}|\\x00|^{EMPTY}$"
"""Names that are always shortened: those that look shortened, and those that no path can hold."""


BUFFER_BYTES = 96 * 1024 * 1024
"""How much an executor reads before it writes one file per day and queue."""

ROWS_PER_GROUP = 50_000
WRITTEN_FILE = pa.schema(
    [
        ("name", pa.string()),
        ("rows", pa.int64()),
        ("digest", pa.string()),
        ("long_queue", pa.string()),
    ]
)
WRITTEN_FILE_DDL = "name string, rows long, digest string, long_queue string"
DIGEST_BYTES = 16


class ArchiveDamaged(PipelineError):
    """The files that were read back differ from what was written; nothing was deleted.

    ``path`` is the archive, or the file that differs.
    """


# Queue names in paths


def escaped(queue: str) -> str:
    """Return the name of a queue as Spark writes it in a path."""
    text = "".join(f"%{ord(letter):02X}" if letter in ESCAPED else letter for letter in queue)
    return text or EMPTY


def shortened(queue: str) -> str:
    """Return the queue's name if it fits into a path once escaped, or else a short one."""
    if len(escaped(queue).encode()) <= LONGEST_BYTES and not re.search(UNFIT, queue):
        return queue
    beginning = re.sub(NOT_PLAIN, "", queue[:BEGINNING])
    return f"{beginning}~{hashlib.sha256(queue.encode()).hexdigest()[:HASH_DIGITS]}"


def is_shortened(name: str) -> bool:
    """Return whether a name in a path is a shortened one."""
    return re.search(SHORT, name) is not None


def shortened_column(queue: Column) -> Column:
    """Return :func:`shortened` as a Spark expression."""
    size = f.octet_length(queue) + 2 * f.length(f.regexp_replace(queue, NOT_ESCAPED, ""))
    beginning = f.regexp_replace(f.substring(queue, 1, BEGINNING), NOT_PLAIN, "")
    digest = f.substring(f.sha2(queue.cast("binary"), 256), 1, HASH_DIGITS)
    short = f.concat(beginning, f.lit("~"), digest)
    return f.when((size <= LONGEST_BYTES) & ~queue.rlike(UNFIT), queue).otherwise(short)


def full_column(queue: Column, names: Mapping[str, str]) -> Column:
    """Return an expression that replaces shortened names by whole ones."""
    pairs = [f.lit(text) for pair in names.items() for text in pair]
    return f.coalesce(f.element_at(f.create_map(*pairs), queue), queue)


def long_queue(name: str, document: bytes | None) -> str | None:
    """Return the queue's whole name, from a task of the file, if the path has it shortened."""
    file = ArchivedFile(name=name, rows=0, size=0)
    if document is None or not is_shortened(file.queue_in_path):
        return None
    return str(decode(document)["queue"])


# Moving files into place, and reading them


def move(storage: Storage, staging: str, names: Sequence[str], run: str) -> list[str]:
    """Move staged files into place, named after the run; return the new names in this order."""
    moved = []
    for number, name in enumerate(names):
        directory = name.removeprefix(f"{staging}/").rpartition("/")[0]
        moved.append(f"{directory}/{run}-{number:05}.parquet")
        storage.move(name, moved[-1])
    storage.sync_files(moved)  # Their tasks are about to be deleted from MongoDB.
    storage.delete(staging)
    return moved


def read_files(spark: SparkSession, storage: Storage, files: Iterable[ArchivedFile]) -> DataFrame:
    """Load all rows of some files, with their days and queues."""
    files = list(files)
    paths = [storage.path(file.name) for file in files]
    if not paths:
        return spark.createDataFrame([], ARCHIVE_SCHEMA)
    # The base path shows Spark where the directories of day and queue begin.
    reader = spark.read.schema(ARCHIVE_SCHEMA).option("basePath", storage.root)
    frame = reader.parquet(*paths)
    names = {file.queue_in_path: file.long_queue for file in files if file.long_queue is not None}
    if names:
        frame = frame.withColumn("queue", full_column(frame["queue"], names))
    return frame


def sizes(storage: Storage, names: Iterable[str]) -> dict[str, int]:
    """Return the sizes of files, and of others of the same days."""
    days = {name.split("/")[0] for name in names}
    return {info.name: info.size for day in days for info in storage.list(day)}


def _file_name(path: str) -> str:
    """Return the last part of a path, which is unique; Spark may escape the directories."""
    return path.rpartition("/")[2]


# Writing and verifying by Spark, on any file system


def with_directories(frame: DataFrame) -> DataFrame:
    """Add the day on which a task finished, in UTC, and name its queue as in a path."""
    # Spark would format a timestamp in the timezone of the session.
    day = f.date_format(
        f.date_from_unix_date((f.unix_seconds("finished_at") / 86_400).cast("int")), "yyyy-MM-dd"
    )
    queue = shortened_column(f.coalesce("queue", f.lit(DEFAULT_QUEUE)))
    return frame.withColumns({"day": f.coalesce(day, f.lit(NO_DAY)), "queue": queue})


def write_by_spark(frame: DataFrame, storage: Storage, name: str, *, most_rows: int = 0) -> str:
    """Write rows to a staging directory, which no one reads, and return it."""
    staging = f"{STAGING}/{name}"
    writer = frame.write.partitionBy(*PARTITIONS).option("compression", "zstd")
    writer = writer.option("maxRecordsPerFile", most_rows)
    # No two documents are equal: a dictionary would only cost time.
    writer = writer.option("parquet.enable.dictionary#document", "false")
    writer.mode("overwrite").parquet(storage.path(staging))
    return staging


def staged(storage: Storage, staging: str) -> list[str]:
    """Return the files that Spark has written to a staging directory."""
    return sorted(info.name for info in storage.list(staging) if info.name.endswith(".parquet"))


@dataclass(frozen=True)
class Totals:
    """The number of rows, and a checksum that does not depend on their order."""

    rows: int
    checksum: int

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Totals:
        """Return the values of the expressions of :func:`totals`."""
        return cls(int(found["rows"]), int(found["checksum"] or 0))


def totals() -> tuple[Column, Column]:
    """Return the expressions that count rows and compute their checksum over all columns."""
    columns = [field.name for field in ARCHIVE_SCHEMA]
    checksum = f.bit_xor(f.xxhash64(*columns))
    return f.count(f.lit(1)).alias("rows"), checksum.alias("checksum")


def verify_by_spark(
    spark: SparkSession, storage: Storage, names: Sequence[str], expected: Totals
) -> list[ArchivedFile]:
    """Read files back, compare them with what was to be written, and describe each file.

    Raises:
        ArchiveDamaged: The rows differ.
    """
    known = sizes(storage, names)
    files = [ArchivedFile(name=name, rows=0, size=known.get(name, 0)) for name in names]
    rows = _totals_by_file(spark, storage, files) if names else []
    checksum = 0
    for row in rows:
        checksum ^= row["checksum"]
    found = Totals(sum(row["rows"] for row in rows), checksum)
    if found != expected:
        raise ArchiveDamaged(
            f"{storage.root} holds {found.rows:,} tasks (checksum {found.checksum:x}) where "
            f"{expected.rows:,} ({expected.checksum:x}) were written; nothing was deleted from "
            "MongoDB. Check the disk, and run the archive again",
            code=error_codes.FILES_DIFFER,
            path=storage.root,
        )
    by_name = {_file_name(row["file"]): row for row in rows}
    return [
        _described(file, by_name[_file_name(file.name)])
        for file in files
        if _file_name(file.name) in by_name
    ]


def _totals_by_file(
    spark: SparkSession, storage: Storage, files: Sequence[ArchivedFile]
) -> list[Row]:
    by_file = f.col("_metadata.file_path").alias("file")
    wanted = list(totals())
    if any(is_shortened(file.queue_in_path) for file in files):
        wanted.append(f.any_value("document").alias("document"))
    return read_files(spark, storage, files).groupBy(by_file).agg(*wanted).collect()


def _described(file: ArchivedFile, row: Row) -> ArchivedFile:
    queue = long_queue(file.name, row.asDict().get("document"))
    return file.model_copy(update={"rows": int(row["rows"]), "long_queue": queue})


# Writing and verifying by the executors, on a shared disk
#
# Rows need not pass through Java, which is several times as fast. Each attempt of a part writes
# files under its own names. The driver learns only those of the attempt whose result Spark used;
# the others stay in the staging directory.


@dataclass(frozen=True)
class WrittenFile:
    """A file: its name from the root of the archive, its rows, and their digest.

    ``long_queue`` is set only if the path has the queue's name shortened.
    """

    name: str
    rows: int
    digest: str
    long_queue: str | None

    @classmethod
    def of(cls, name: str, rows: pa.Table) -> WrittenFile:
        """Describe the rows of a file."""
        first = rows["document"][0].as_py() if rows.num_rows else None
        queue = long_queue(name, first)
        return cls(name, rows.num_rows, digest(rows), queue)


def write_directly(
    spark: SparkSession, disk: str, parts: Sequence[Part], run: str
) -> tuple[str, list[WrittenFile]]:
    """Write parts to a staging directory; return it, and what its files hold."""
    staging = f"{STAGING}/{run}"
    frame = spread(spark, parts, PartWriter(disk, staging), WRITTEN_FILE_DDL)
    return staging, [WrittenFile(**row.asDict()) for row in frame.collect()]


def check_shared(storage: Storage, staging: str, names: Iterable[str]) -> None:
    """Raise if executors wrote files on disks that the driver does not see."""
    seen = {info.name for info in storage.list(staging)}
    if unseen := sorted(set(names) - seen):
        raise PipelineError(
            f"executors wrote {len(unseen):,} files, such as {unseen[0]}, that the driver does "
            f"not see in {storage.root}: give a path that is the same disk on all machines, or one "
            "in HDFS or an object store. Nothing was deleted from MongoDB",
            code=error_codes.DISK_NOT_SHARED,
            path=storage.root,
        )


def verify_directly(
    spark: SparkSession, storage: Storage, disk: str, written: Sequence[WrittenFile]
) -> list[ArchivedFile]:
    """Read files back and compare each with what was to be written.

    Raises:
        ArchiveDamaged: A file differs.
    """
    names = [file.name for file in written]
    frame = spread(spark, names, FileReader(disk), WRITTEN_FILE_DDL, tasks=tasks_for(spark))
    found = {row["name"]: WrittenFile(**row.asDict()) for row in frame.collect()}
    for expected in written:
        if found[expected.name] != expected:
            raise ArchiveDamaged(
                f"{storage.path(expected.name)} does not hold the {expected.rows:,} tasks that "
                "were written; nothing was deleted from MongoDB. Check the disk, and run the "
                "archive again",
                code=error_codes.FILES_DIFFER,
                path=storage.path(expected.name),
            )
    known = sizes(storage, names)
    return [
        ArchivedFile(name=one.name, rows=one.rows, size=known[one.name], long_queue=one.long_queue)
        for one in written
    ]


class PartWriter:
    """Writes the files of one part; runs in the executors."""

    def __init__(self, disk: str, staging: str) -> None:
        self.disk, self.staging = disk, staging

    def __call__(self, part: Part) -> Iterator[pa.RecordBatch]:
        """Yield what the files hold; Spark may repeat this for a part, or run it twice at once."""
        buffered: list[pa.RecordBatch] = []
        size = 0
        for batch in batches_of(part):
            buffered.append(batch)
            size += batch.nbytes
            if size >= BUFFER_BYTES:
                yield self._written(buffered)
                buffered, size = [], 0
        if buffered:
            yield self._written(buffered)

    def _written(self, buffered: list[pa.RecordBatch]) -> pa.RecordBatch:
        rows = pa.Table.from_batches(buffered)
        return _batch(self._write(directory, some) for directory, some in by_directory(rows))

    def _write(self, directory: str, rows: pa.Table) -> WrittenFile:
        # Each attempt needs its own names.
        name = f"{self.staging}/{directory}/{uuid4().hex}.parquet"
        path = Path(self.disk, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            rows,
            path,
            compression="zstd",
            row_group_size=ROWS_PER_GROUP,
            # No two documents are equal: a dictionary would only cost time.
            use_dictionary=[column for column in rows.column_names if column != "document"],
        )
        sync(path)
        return WrittenFile.of(name, rows)


class FileReader:
    """Reads one file back; runs in the executors."""

    def __init__(self, disk: str) -> None:
        self.disk = disk

    def __call__(self, name: str) -> Iterator[pa.RecordBatch]:
        """Yield what the file holds."""
        with pq.ParquetFile(Path(self.disk, name)) as file:
            rows = file.read(use_threads=False)
        yield _batch([WrittenFile.of(name, rows)])


def _batch(files: Iterable[WrittenFile]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([asdict(file) for file in files], schema=WRITTEN_FILE)


def by_directory(rows: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    """Split rows by the day on which they finished, in UTC, and by queue."""
    days = pc.fill_null(rows["finished_at"].cast(pa.date32()).cast(pa.string()), NO_DAY)
    queues = pc.fill_null(rows["queue"], DEFAULT_QUEUE)
    directories = pa.table({"day": days, "queue": queues})
    order = pc.sort_indices(directories, sort_keys=[("day", "ascending"), ("queue", "ascending")])
    directories = directories.take(order)
    rows = rows.drop_columns("queue").take(order)
    for start, end in pairwise(_boundaries(directories)):
        day, queue = (column[start].as_py() for column in directories.columns)
        yield f"{DAY}{day}/{QUEUE}{escaped(shortened(queue))}", rows.slice(start, end - start)


def _boundaries(directories: pa.Table) -> list[int]:
    """Return where the rows of each directory begin, and the end."""
    changed = numpy.zeros(max(len(directories) - 1, 0), bool)
    for column in directories.columns:
        values = column.combine_chunks()
        changed |= pc.not_equal(values[1:], values[:-1]).to_numpy(zero_copy_only=False)
    return [0, *(numpy.flatnonzero(changed) + 1).tolist(), len(directories)]


def digest(rows: pa.Table) -> str:
    """Return a hash of all columns, equal before rows are written and after they are read back.

    Arrow may store equal rows differently: with or without a bitmap of nulls, with anything in
    place of a null, in one chunk or in several. So this hashes what the rows mean: for each
    column which values are null, how long they are, and the values.
    """
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for column in rows.columns:
        _add(hasher, pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([]))
    return hasher.hexdigest()


def _add(hasher: Any, array: pa.Array) -> None:
    kind = array.type
    hasher.update(len(array).to_bytes(8))
    _add_numbers(hasher, array.is_valid().cast(pa.uint8()))
    if pa.types.is_struct(kind):
        for child in array.flatten():
            _add(hasher, child)
    elif pa.types.is_list(kind):
        _add_numbers(hasher, pc.fill_null(pc.list_value_length(array), 0))
        _add(hasher, array.flatten())
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        _add_variable_size(hasher, array)
    elif pa.types.is_boolean(kind):
        _add_numbers(hasher, pc.fill_null(array.cast(pa.uint8()), 0))
    elif pa.types.is_timestamp(kind):
        _add_numbers(hasher, pc.fill_null(array.cast(pa.int64()), 0))
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        _add_numbers(hasher, pc.fill_null(array, 0))
    else:
        raise TypeError(f"cannot hash values of type {kind}")


def _add_numbers(hasher: Any, array: pa.Array) -> None:
    hasher.update(numpy.ascontiguousarray(array.to_numpy(zero_copy_only=False)))


def _add_variable_size(hasher: Any, array: pa.Array) -> None:
    full = pc.fill_null(array, b"" if pa.types.is_binary(array.type) else "")
    if not len(full):
        return
    _, offsets, data = full.buffers()
    edges = numpy.frombuffer(offsets, numpy.int32)[full.offset : full.offset + len(full) + 1]
    hasher.update(numpy.diff(edges))
    if data is not None:
        hasher.update(data[int(edges[0]) : int(edges[-1])])


# Leftovers of killed runs


def delete_leftovers(storage: Storage, state: ArchiveState) -> int:
    """Delete the files that killed runs left behind; safe once this run has begun in the log.

    A run that the log does not know came later: its files may be committed by now, and their
    tasks deleted from MongoDB. Files of no run at all do not belong to the archive.
    """
    orphans = [name for name in _archived_files(storage) if name not in state.files]
    orphans += storage.children(STAGING)
    of_killed = [name for name in orphans if _file_name(name).partition("-")[0] in state.runs]
    for name in of_killed:
        storage.delete(name)
    return len(of_killed)


def check_log(storage: Storage, state: ArchiveState) -> None:
    """Raise if a directory has files but no log: it may be an archive whose log was lost."""
    if not state.number and (found := next(_archived_files(storage), None)):
        raise PipelineError(
            f"{storage.root} holds {found}, but no {DIRECTORY} that lists the committed files; "
            f"restore {DIRECTORY} if it was lost, or give this archive another directory",
            code=error_codes.NO_LOG,
            path=storage.root,
        )


def _archived_files(storage: Storage) -> Iterator[str]:
    return (info.name for info in storage.list() if info.name.startswith(DAY))
