"""The contents of an archive, for tests."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from microqueue.spark.archive.reader import read_archive
from microqueue.spark.whole_tasks import decode

HOUR = timedelta(hours=1)


def documents_of(spark: SparkSession, path: Path) -> list[dict[str, Any]]:
    """Return the archived documents."""
    return [decode(row["document"]) for row in read_archive(spark, path).collect()]
