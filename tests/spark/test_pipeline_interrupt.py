from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from py4j import java_gateway  # type: ignore[import-untyped]

from microqueue.cli.spark_runner import Interrupts

PATIENCE_SEC = 120


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """Put the loggers back as they were, and the handler of Ctrl-C."""
    former, filters = signal.getsignal(signal.SIGINT), list(logging.getLogger().filters)
    level = logging.getLogger("py4j").level
    yield
    logging.getLogger().filters = filters
    logging.getLogger("py4j").setLevel(level)
    signal.signal(signal.SIGINT, former)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_interrupt_takes_effect_when_spark_has_started() -> None:
    started, usual = False, signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts, interrupts.postponed():
        interrupt()
        started = True
    assert started
    assert signal.getsignal(signal.SIGINT) is usual


def test_second_interrupt_takes_effect_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts, interrupts.postponed():
        interrupt()
        interrupt()
        pytest.fail("the interrupt had no effect")


def test_interrupt_is_reported_instead_of_its_consequences() -> None:
    levels: list[str] = []

    class Spark:
        sparkContext = property(lambda self: self)  # noqa: N815 (Spark's name)

        def setLogLevel(self, level: str) -> None:  # noqa: N802 (Spark's name)
            levels.append(level)

    spark: Any = Spark()
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        with interrupts.postponed():
            signal.signal(signal.SIGINT, lambda *_: pytest.fail("Spark was asked"))
            interrupts.silence_at_end(spark)
        try:
            interrupt()
        finally:
            raise RuntimeError("Answer from Java side is empty")
    assert levels == ["OFF"]


def test_other_errors_are_unchanged() -> None:
    with pytest.raises(RuntimeError, match="boom"), Interrupts() as interrupts:
        with interrupts.postponed():
            pass
        raise RuntimeError("boom")


def test_interrupt_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts() as interrupts, interrupts.postponed():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_log_of_the_bridge_to_java_is_silent_and_others_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Interrupts():
        for path in (java_gateway.__file__, __file__):
            record = logging.LogRecord("root", logging.ERROR, path, 1, path, None, None)
            logging.getLogger().handle(record)
        logging.getLogger("py4j.clientserver").error("of py4j, too")
    assert [record.pathname for record in caplog.records] == [__file__]


@pytest.mark.measured
def test_interrupt_of_a_pipeline_is_quiet(database_uri: str, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(f'{{"n": {number}}}\n' for number in range(50_000)))
    command = [sys.executable, "-m", "microqueue.cli", "pipeline", "ingest", str(source)]
    with subprocess.Popen(
        [*command, "--uri", database_uri, "--master", "local[1]"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # As at a terminal, where Ctrl-C is for all of them.
    ) as process:
        try:
            assert process.stderr is not None
            while "Reading" not in process.stderr.readline():
                assert process.poll() is None
            time.sleep(2)  # So that it waits for an answer of Java's.
            os.killpg(process.pid, signal.SIGINT)
            said, errors = process.communicate(timeout=PATIENCE_SEC)
        finally:
            process.kill()
    assert (process.returncode, said, errors) == (130, "", "")
