"""The Parquet files of an archive: written aside, put in place, read back and compared."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StringType, StructField, StructType

from microqueue.errors import MicroqueueError
from microqueue.spark.archive.log import (
    DAY,
    DIRECTORY,
    QUEUE,
    ArchivedFile,
    ArchiveState,
)
from microqueue.spark.storage import Storage
from microqueue.spark.whole_tasks import SCHEMA, decode
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


ARCHIVE_SCHEMA = StructType([*SCHEMA.fields, StructField("day", StringType())])


def read_files(spark: SparkSession, storage: Storage, files: Iterable[ArchivedFile]) -> DataFrame:
    """Load the rows of some files, all of them, with their days and queues.

    What the log does not say of a file is as in its path.
    """
    files = list(files)
    paths = [storage.path(file.name) for file in files]
    if not paths:
        return spark.createDataFrame([], ARCHIVE_SCHEMA)
    # The base tells Spark where the part of a path begins that names the day and the queue.
    reader = spark.read.schema(ARCHIVE_SCHEMA).option("basePath", storage.root)
    frame = reader.parquet(*paths)
    names = {file.queue_in_path: file.long_queue for file in files if file.long_queue is not None}
    if names:
        frame = frame.withColumn("queue", full_column(frame["queue"], names))
    return frame


LONGEST_BYTES = 255 - len(QUEUE)
EMPTY = "__HIVE_DEFAULT_PARTITION__"
"""How Spark writes an empty name in a path."""

ESCAPED = frozenset("\"#%'*/:=?\\{[]^\x7f") | {chr(code) for code in range(1, 32)}
"""What Spark escapes in the names of directories, and nothing else; each takes three bytes."""

# Code by code, which Python and Java read alike.
NOT_ESCAPED = "[^{}]".format("".join(f"\\x{ord(letter):02x}" for letter in sorted(ESCAPED)))
NOT_PLAIN = "[^A-Za-z0-9._-]"
BEGINNING = 40
HASH_DIGITS = 32
SHORT = f"~[0-9a-f]{{{HASH_DIGITS}}}$"
UNFIT = f"{SHORT}|\\x00|^{EMPTY}$"
"""What is shortened, however long: names that look shortened, and those that no path can hold."""


def escaped(queue: str) -> str:
    """Write the name of a queue as Spark writes it in a path, and reads it."""
    text = "".join(f"%{ord(letter):02X}" if letter in ESCAPED else letter for letter in queue)
    return text or EMPTY


def shortened(queue: str) -> str:
    """Give a name that fits into a path, escaped: the queue's own wherever that does."""
    if len(escaped(queue).encode()) <= LONGEST_BYTES and not re.search(UNFIT, queue):
        return queue
    beginning = re.sub(NOT_PLAIN, "", queue[:BEGINNING])
    return f"{beginning}~{hashlib.sha256(queue.encode()).hexdigest()[:HASH_DIGITS]}"


def is_shortened(name: str) -> bool:
    """Tell whether a name in a path stands for another one."""
    return re.search(SHORT, name) is not None


def shortened_column(queue: Column) -> Column:
    """Have Spark do the same as :func:`shortened`."""
    size = f.octet_length(queue) + 2 * f.length(f.regexp_replace(queue, NOT_ESCAPED, ""))
    beginning = f.regexp_replace(f.substring(queue, 1, BEGINNING), NOT_PLAIN, "")
    digest = f.substring(f.sha2(queue.cast("binary"), 256), 1, HASH_DIGITS)
    short = f.concat(beginning, f.lit("~"), digest)
    return f.when((size <= LONGEST_BYTES) & ~queue.rlike(UNFIT), queue).otherwise(short)


def full_column(queue: Column, names: Mapping[str, str]) -> Column:
    """Give back the names that were shortened, each by its short one."""
    pairs = [f.lit(text) for pair in names.items() for text in pair]
    return f.coalesce(f.element_at(f.create_map(*pairs), queue), queue)
