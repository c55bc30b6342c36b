"""Payload models that fail in the middle of a part, when chunks before it are written."""

from __future__ import annotations

from pydantic import BaseModel, field_validator
from pyspark import TaskContext

FATAL = frozenset({150, 350, 850})


class Order(BaseModel):
    """What the tests write."""

    order: int
    text: str = "x"


class FailsAtFirst(Order):
    """The first attempt at each part dies half way."""

    @field_validator("order")
    @classmethod
    def _die(cls, order: int) -> int:
        context = TaskContext.get()
        if order in FATAL and context is not None and context.attemptNumber() == 0:
            raise ValueError("the first attempt dies here")
        return order


class Fails(Order):
    """Every attempt dies half way."""

    @field_validator("order")
    @classmethod
    def _die(cls, order: int) -> int:
        if order in FATAL:
            raise ValueError("every attempt dies here")
        return order
