"""Parts that Spark runs twice at once: an attempt and its copy wait for each other half way.

Executors are separate processes. Every attempt creates a file, so that the test can count them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, field_validator
from pyspark import TaskContext

from microqueue.spark import whole_tasks
from microqueue.spark.archive.parquet import PartWriter

ATTEMPTS = "microqueue.test.attempts"
"""The property of a job with the directory for these files."""

SLOW_PART = 0
HALF_WAY = 50
PATIENCE_SEC = 240


def meet() -> None:
    """Create the file of an attempt; in the slow part, wait for that of the other attempt."""
    context = TaskContext.get()
    assert context is not None
    place = Path(context.getLocalProperty(ATTEMPTS) or "")
    part = context.partitionId()
    (place / f"{part}-{context.attemptNumber()}").touch()
    deadline = time.monotonic() + PATIENCE_SEC
    both = [place / f"{SLOW_PART}-{number}" for number in range(2)]
    while part == SLOW_PART and not all(file.exists() for file in both):
        if time.monotonic() > deadline:
            raise TimeoutError("Spark started no copy of a slow part")
        time.sleep(0.01)


class SlowOrder(BaseModel):
    """A payload; half of the slow part is written before a copy of it starts."""

    order: int

    @field_validator("order")
    @classmethod
    def _wait(cls, order: int) -> int:
        if order % 100 == HALF_WAY:
            meet()
        return order


class SlowWriter(PartWriter):
    """Writes the files of a part, and reports them after a copy has written its own."""

    def __call__(self, part: Any) -> Iterator[Any]:
        written = list(super().__call__(part))
        meet()
        yield from written


def slow_batches(part: whole_tasks.Part) -> Iterator[Any]:
    """Read a part, and wait until a copy has read it."""
    yield from whole_tasks.batches_of(part)
    meet()
