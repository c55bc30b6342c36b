"""Failures in the middle of a part, in the first attempt or in all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, field_validator
from pyspark import TaskContext

from microqueue.spark.archive.parquet import PartWriter

FATAL = frozenset({150, 350, 850})


class Order(BaseModel):
    """What the tests write."""

    order: int
    text: str = "x"


class FailsAtFirst(Order):
    """Fails in the first attempt of each part."""

    @field_validator("order")
    @classmethod
    def _die(cls, order: int) -> int:
        context = TaskContext.get()
        if order in FATAL and context is not None and context.attemptNumber() == 0:
            raise ValueError("the first attempt dies here")
        return order


class Fails(Order):
    """Fails in every attempt."""

    @field_validator("order")
    @classmethod
    def _die(cls, order: int) -> int:
        if order in FATAL:
            raise ValueError("every attempt dies here")
        return order


class FailsAfterWriting(PartWriter):
    """Writes the files of a part; the first attempt fails before it reports them."""

    def __call__(self, part: Any) -> Iterator[Any]:
        written = list(super().__call__(part))
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise RuntimeError("the first attempt dies here")
        yield from written


class WritesElsewhere(PartWriter):
    """Writes the files of a part to another directory, as if machines shared no disk."""

    def __call__(self, part: Any) -> Iterator[Any]:
        return PartWriter(f"{self.disk}/_elsewhere", self.staging)(part)
