"""The Parquet files of an archive: written aside, put in place, read back and compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as f

from microqueue.errors import MicroqueueError
from microqueue.spark.pipelines.archive_log import DAY, DIRECTORY, ArchivedFile, ArchiveState
from microqueue.spark.pipelines.archive_names import is_shortened, shortened_column
from microqueue.spark.pipelines.archive_reader import ARCHIVE_SCHEMA, read_files
from microqueue.spark.pipelines.documents import decode
from microqueue.spark.pipelines.files import Storage
from microqueue.task import DEFAULT_QUEUE

STAGING = "_staging"
PARTITIONS = ("day", "queue")
NO_DAY = "0001-01-01"


class ArchiveDamaged(MicroqueueError):
    """What was read back is not what was written; nothing was committed or deleted."""


@dataclass(frozen=True)
class Totals:
    """What two sets of rows have in common if they are the same, in whatever order."""

    rows: int
    checksum: int

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Totals:
        """Read what :func:`totals` counted."""
        return cls(int(found["rows"]), int(found["checksum"] or 0))


def totals() -> tuple[Column, Column]:
    """Count rows, and sum up all their columns into one number."""
    columns = [field.name for field in ARCHIVE_SCHEMA]
    checksum = f.bit_xor(f.xxhash64(*columns))
    return f.count(f.lit(1)).alias("rows"), checksum.alias("checksum")


def placed(frame: DataFrame) -> DataFrame:
    """Add the day on which a task finished, in UTC; every row gets a day and a queue.

    The queue is named as in a path, which may be shorter.
    """
    # Text made by Spark's own clock would follow the session's timezone.
    day = f.date_format(
        f.date_from_unix_date((f.unix_seconds("finished_at") / 86_400).cast("int")), "yyyy-MM-dd"
    )
    queue = shortened_column(f.coalesce("queue", f.lit(DEFAULT_QUEUE)))
    return frame.withColumns({"day": f.coalesce(day, f.lit(NO_DAY)), "queue": queue})


def write(frame: DataFrame, storage: Storage, name: str, *, most_rows: int = 0) -> str:
    """Write rows aside, where nobody reads, and give the directory."""
    staging = f"{STAGING}/{name}"
    writer = frame.write.partitionBy(*PARTITIONS).option("compression", "zstd")
    writer = writer.option("maxRecordsPerFile", most_rows)
    # No two documents are equal: looking for it takes time and finds nothing.
    writer = writer.option("parquet.enable.dictionary#document", "false")
    writer.mode("overwrite").parquet(storage.path(staging))
    return staging


def staged(storage: Storage, staging: str) -> list[str]:
    """Name the files that Spark has written aside."""
    return sorted(info.name for info in storage.list(staging) if info.name.endswith(".parquet"))


def check_shared(storage: Storage, staging: str, names: Iterable[str]) -> None:
    """Refuse to go on if executors wrote files on disks that the driver does not see."""
    seen = {info.name for info in storage.list(staging)}
    if unseen := sorted(set(names) - seen):
        raise MicroqueueError(
            f"executors wrote {len(unseen):,} files, {unseen[0]} among them, that the driver does "
            f"not see in {storage.root}: give a path that is the same disk on all machines, or one "
            "in HDFS or an object store. Nothing was deleted from MongoDB"
        )


def move(storage: Storage, staging: str, names: Sequence[str], run: str) -> list[str]:
    """Move files to their places, under names of this run, and give the names in this order."""
    moved = []
    for number, name in enumerate(names):
        directory = name.removeprefix(f"{staging}/").rpartition("/")[0]
        moved.append(f"{directory}/{run}-{number:05}.parquet")
        storage.move(name, moved[-1])
    storage.secure(moved)  # What they stand for is deleted soon.
    storage.delete(staging)
    return moved


def verify(
    spark: SparkSession, storage: Storage, names: Sequence[str], expected: Totals
) -> list[ArchivedFile]:
    """Read files back and compare them with what was to be written; describe each file."""
    known = sizes(storage, names)
    unknown = [ArchivedFile(name=name, rows=0, size=known.get(name, 0)) for name in names]
    rows = _totals_by_file(spark, storage, unknown) if names else []
    checksum = 0
    for row in rows:
        checksum ^= row["checksum"]
    found = Totals(sum(row["rows"] for row in rows), checksum)
    if found != expected:
        raise ArchiveDamaged(
            f"the archive {storage.root} gives back {found.rows:,} tasks (checksum "
            f"{found.checksum:x}) where {expected.rows:,} ({expected.checksum:x}) were written; "
            "nothing was deleted from MongoDB. Look at the disk, and run it again"
        )
    by_name = {_last(row["file"]): row for row in rows}
    return [
        _described(file, by_name[_last(file.name)])
        for file in unknown
        if _last(file.name) in by_name
    ]


def _described(file: ArchivedFile, row: Row) -> ArchivedFile:
    queue = long_queue(file.name, row.asDict().get("document"))
    return file.model_copy(update={"rows": int(row["rows"]), "long_queue": queue})


def long_queue(name: str, document: bytes | None) -> str | None:
    """Read the queue's whole name in a task of a file whose path has it shortened."""
    file = ArchivedFile(name=name, rows=0, size=0)
    if document is None or not is_shortened(file.queue_in_path):
        return None
    return str(decode(document)["queue"])


def _totals_by_file(
    spark: SparkSession, storage: Storage, files: Sequence[ArchivedFile]
) -> list[Row]:
    by_file = f.col("_metadata.file_path").alias("file")
    wanted = list(totals())
    if any(is_shortened(file.queue_in_path) for file in files):
        wanted.append(f.any_value("document").alias("document"))
    return read_files(spark, storage, files).groupBy(by_file).agg(*wanted).collect()


def sizes(storage: Storage, names: Iterable[str]) -> dict[str, int]:
    """Tell how large files are, and their neighbours."""
    tops = {name.split("/")[0] for name in names}
    return {info.name: info.size for top in tops for info in storage.list(top)}


def _last(path: str) -> str:
    """Give a file's own name, which a run gives once; its directory is escaped now and then."""
    return path.rpartition("/")[2]


def sweep(storage: Storage, state: ArchiveState) -> int:
    """Delete what killed runs left behind; safe once this run has begun in the log.

    A run that the log does not name came later: its files may be committed by now, and their
    tasks gone from MongoDB. Files of no run at all are not the archive's.
    """
    orphans = [name for name in _placed_files(storage) if name not in state.files]
    orphans += storage.children(STAGING)
    of_killed = [name for name in orphans if _last(name).partition("-")[0] in state.runs]
    for name in of_killed:
        storage.delete(name)
    return len(of_killed)


def check_log(storage: Storage, state: ArchiveState) -> None:
    """Refuse a directory whose files no log explains: they may be an archive without its log."""
    if not state.number and (found := next(_placed_files(storage), None)):
        raise MicroqueueError(
            f"{storage.root} holds {found}, but no {DIRECTORY} that says which files count; bring "
            f"{DIRECTORY} back if it was lost, or give a directory of its own to this archive"
        )


def _placed_files(storage: Storage) -> Iterator[str]:
    return (info.name for info in storage.list() if info.name.startswith(DAY))
