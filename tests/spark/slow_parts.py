"""Parts that Spark runs twice at once: an attempt and its copy wait for each other half way.

For executors that are processes of their own. Every attempt leaves a file, so that whoever looks
from outside can count them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, field_validator
from pyspark import TaskContext

from microqueue.spark import whole_tasks
from microqueue.spark.archive.direct import PartWriter

ATTEMPTS = "microqueue.test.attempts"
"""The property of a job that says where its attempts leave their files."""

SLOW_PART = 0
HALF_WAY = 50
PATIENCE_SEC = 60


def meet() -> None:
    """Say that an attempt came so far; of the slow part, wait until the other one did, too."""
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
    """What is written; of the slow part, half is, before a copy begins the same."""

    order: int

    @field_validator("order")
    @classmethod
    def _wait(cls, order: int) -> int:
        if order % 100 == HALF_WAY:
            meet()
        return order


class SlowWriter(PartWriter):
    """Writes the files of a part of the archive, and says so when a copy has written its own."""

    def __call__(self, part: Any) -> Iterator[Any]:
        written = list(super().__call__(part))
        meet()
        yield from written


def slow_batches(part: whole_tasks.Part) -> Iterator[Any]:
    """Read a part of the tasks, for Spark to write, until a copy has read it, too."""
    yield from whole_tasks.batches_of(part)
    meet()
