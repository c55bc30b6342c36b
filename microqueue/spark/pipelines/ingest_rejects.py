"""The file of an ingest's rejects: one JSON object per line, with the row and all reasons."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from microqueue.arguments import refused
from microqueue.spark.pipelines.files import Storage


class RejectFile:
    """One file, in the place of that of earlier runs.

    Made before anything is read: a path that cannot be a file, is a directory, or one of the
    ``sources`` is refused, so that nothing else is ever replaced.
    """

    def __init__(self, spark: SparkSession, path: str | Path, sources: Iterable[str]) -> None:
        try:
            self._storage, self._name = Storage.of_file(spark, path)
        except ValueError as exc:
            raise refused("rejects", str(path), f"give the name of a file; {exc}") from exc
        if self._storage.is_directory(self._name):
            raise refused("rejects", str(path), "it is a directory; give the name of a file")
        if self._storage.exists() and not self._storage.is_directory():
            reason = f"{self._storage.root} is no directory; give the name of a file in one"
            raise refused("rejects", str(path), reason)
        if self._storage.path(self._name) in sources:
            raise refused("rejects", str(path), "it is a file of the source; give another one")

    def write(self, outcome: DataFrame) -> str:
        """Write the rejects of a run, and give the path of the file."""
        staging = f".{self._name}.staging"
        lines = outcome.where("reject is not null").select(f.col("reject").alias("value"))
        lines.coalesce(1).write.mode("overwrite").text(self._storage.path(staging))
        (part,) = (one.name for one in self._storage.list(staging) if one.name.endswith(".txt"))
        self.clear()
        self._storage.move(part, self._name)
        self._storage.delete(staging)
        return self._storage.path(self._name)

    def clear(self) -> None:
        """Delete the file of an earlier run, if there is one."""
        self._storage.delete_file(self._name)
