"""Ctrl-C while Spark runs: it ends the command, and neither Java nor its bridge tell of it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Interrupts:
    """Hears Ctrl-C in place of Spark, which would ask Java something amid another question."""

    def __init__(self) -> None:
        self._received = 0
        self._starting = False
        self._former = signal.getsignal(signal.SIGINT)
        self._spark: SparkSession | None = None

    def __enter__(self) -> Self:
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        logging.getLogger().addFilter(_is_not_of_py4j)  # It logs there, too.
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        signal.signal(signal.SIGINT, self._former)
        if error is None or not self._received:
            return
        if self._spark is not None:
            with suppress(Exception):  # Java may be gone already.
                # Its tasks fail when this process ends, which nobody wants to read about.
                self._spark.sparkContext.setLogLevel("OFF")
        # The error may be one that followed: the interrupt has cut an answer of Java's off.
        raise KeyboardInterrupt from error

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Hear the first Ctrl-C only afterwards: a start that is cut off leaves Java behind."""
        self._starting = True
        self._listen()
        try:
            yield
        finally:
            self._starting = False
            self._listen()  # Spark has put a handler of its own there.
        if self._received:
            raise KeyboardInterrupt

    def silence_at_end(self, spark: SparkSession) -> None:
        """Know the session whose Java is to be silent after an interrupt."""
        self._spark = spark

    def _listen(self) -> None:
        listens = callable(self._former)  # Else it is ignored, or ends the process.
        signal.signal(signal.SIGINT, self._handle if listens else self._former)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._received += 1
        if self._received > 1 or not self._starting:
            raise KeyboardInterrupt


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return "py4j" not in Path(record.pathname).parts
