"""Spread work over the executors: each gets some of a list, and gives rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

TASKS_PER_CORE = 4
"""So that a slow one does not keep all others waiting."""


def tasks_for(spark: SparkSession) -> int:
    """Say into how many tasks to split what can be split at will."""
    return TASKS_PER_CORE * spark.sparkContext.defaultParallelism


def spread(
    spark: SparkSession,
    items: Sequence[Any],
    work: Callable[[Any], Iterator[pa.RecordBatch]],
    schema: StructType | str,
    *,
    tasks: int | None = None,
) -> DataFrame:
    """Call ``work`` for each of the items, and give the rows of all of them."""
    tasks = min(len(items), tasks or len(items))
    return spark.range(len(items), numPartitions=max(tasks, 1)).mapInArrow(
        _Each(items, work), schema
    )


class _Each:
    """What Spark sends to its executors: they get the numbers of their items."""

    def __init__(
        self, items: Sequence[Any], work: Callable[[Any], Iterator[pa.RecordBatch]]
    ) -> None:
        self.items, self.work = items, work

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                yield from self.work(self.items[number])
