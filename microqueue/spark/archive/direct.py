"""Write the files of an archive in the executors themselves, and read them back there.

On a disk that all machines share, rows need not pass through Java, which is several times as
fast. Each attempt of a part writes files under its own names. The driver learns only those of
the attempt whose result Spark used; the others stay in the staging directory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from microqueue.spark.archive import parquet
from microqueue.spark.archive.log import DAY, QUEUE, ArchivedFile
from microqueue.spark.archive.parquet import NO_DAY, ArchiveDamaged, escaped, shortened
from microqueue.spark.storage import Storage, sync
from microqueue.spark.whole_tasks import Part, batches_of, spread, tasks_for
from microqueue.task import DEFAULT_QUEUE

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
        queue = parquet.long_queue(name, first)
        return cls(name, rows.num_rows, digest(rows), queue)


def write(
    spark: SparkSession, disk: str, parts: Sequence[Part], run: str
) -> tuple[str, list[WrittenFile]]:
    """Write parts to a staging directory; return it, and what its files hold."""
    staging = f"{parquet.STAGING}/{run}"
    frame = spread(spark, parts, PartWriter(disk, staging), WRITTEN_FILE_DDL)
    return staging, [WrittenFile(**row.asDict()) for row in frame.collect()]


def verify(
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
                "archive again"
            )
    sizes = parquet.sizes(storage, names)
    return [
        ArchivedFile(name=one.name, rows=one.rows, size=sizes[one.name], long_queue=one.long_queue)
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


DIGEST_BYTES = 16


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
