"""Read an archive without Spark and without microqueue: every row of every Parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bson

ARCHIVE = "archive"
"""The folder of the archive in that of the run."""


def archived(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the archived tasks as they were stored; none if there is no archive."""
    files = sorted((folder / ARCHIVE).glob("day=*/queue=*/*.parquet"))
    if not files:
        return
    import pyarrow.parquet as pq  # noqa: PLC0415 (only runs with an archive need it)

    for path in files:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["document"]):
                for value in batch.column(0):
                    yield bson.decode(value.as_py())
