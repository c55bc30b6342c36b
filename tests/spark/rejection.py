"""Expect an error that crosses Spark, which raises its own with the text of a traceback."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from pyspark.errors import PySparkException

from microqueue import MicroqueueError


@contextmanager
def crossing_spark(
    kind: type[MicroqueueError], code: str, *, naming: Iterable[str] = (), **fields: str
) -> Iterator[None]:
    """Expect an error with this class, code and fields.

    They are a line of the text, because nothing else crosses. ``naming`` is in the text too.
    """
    with pytest.raises(PySparkException) as caught:
        yield
    text = str(caught.value)
    shown = [f"{name}={value!r}" for name, value in fields.items()]
    assert " ".join([kind.__name__, f"[{code}]", *shown]) in map(str.strip, text.splitlines())
    for name in naming:
        assert name in text
