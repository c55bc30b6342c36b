"""Run a pipeline from the command line: a Spark session, and a line that shows what it does."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.status import Status

from microqueue.cli.session import Session
from microqueue.cli.spark_interrupts import Interrupts
from microqueue.cli.spark_master import check_master
from microqueue.errors import MicroqueueError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from microqueue.spark.pipelines.steps import Step

REFRESH_SEC = 0.5
OWN_ERROR = re.compile(r"microqueue\.[\w.]*\.(\w+): ([^\n]+)")


class Runner:
    """A Spark session, and who tells a person what goes on in it."""

    def __init__(self, session: Session, spark: SparkSession, status: Status | None) -> None:
        self.spark = spark
        self._session, self._status = session, status
        self._text = ""

    def tell(self, step: Step) -> None:
        """Show a step: in place at a terminal, else as a line of its own beside the result."""
        self._text = step.text
        if self._status is not None:
            self._status.update(step.text)
        elif not self._session.out.as_json:
            self._session.out.errors.print(step.text, soft_wrap=True)

    def refresh(self) -> None:
        """Show how many parts of the current work are done."""
        tracker = self.spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        known = [stage for stage in stages if stage is not None]
        whole = sum(stage.numTasks for stage in known)
        if self._status is not None and whole:
            done = sum(stage.numCompletedTasks for stage in known)
            self._status.update(f"{self._text}: {done} of {whole} parts")


@contextmanager
def running(session: Session, master: str | None) -> Iterator[Runner]:
    """Start Spark, or join it, show progress, and tell Spark's errors in one sentence."""
    check_master(master)
    try:
        from microqueue.spark import session as spark_session  # noqa: PLC0415 (optional, slow)
    except ImportError as exc:
        raise MicroqueueError(f"{exc}") from exc
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415 (of Spark)
    from pyspark.errors import PySparkException  # noqa: PLC0415 (as above)
    from pyspark.logger import PySparkLogger  # noqa: PLC0415 (as above)

    # It would print every error that is told below, as a page of JSON.
    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    at_terminal = session.out.errors.is_terminal and not session.out.as_json
    status = Status("Starting Spark", console=session.out.errors) if at_terminal else None
    if status is not None:
        status.start()
    stop = threading.Event()
    try:
        with Interrupts() as interrupts:
            with interrupts.postponed():
                spark = spark_session(master=master, config={"spark.log.level": "ERROR"})
                interrupts.silence_at_end(spark)
            runner = Runner(session, spark, status)
            thread = threading.Thread(target=_refresh, args=(runner, stop), daemon=True)
            if status is not None:
                thread.start()
            yield runner
    except (PySparkException, Py4JError) as exc:
        raise MicroqueueError(explain(exc)) from exc
    except OSError as exc:  # A path that cannot be written, for one.
        raise MicroqueueError(explain_system(exc)) from exc
    finally:
        stop.set()
        if status is not None:
            status.stop()


def _refresh(runner: Runner, stop: threading.Event) -> None:
    while not stop.wait(REFRESH_SEC):
        runner.refresh()


def explain(error: Any) -> str:
    """Find our own error in what Spark tells of an executor, or give the first line of Java's."""
    text = str(error)
    own = OWN_ERROR.findall(text)
    if own:
        name, message = own[-1]
        return f"{message} ({name}, in a Spark task)"
    java = getattr(error, "java_exception", None)
    if java is not None:
        text = java.getMessage() or java.toString()
    return f"Spark failed: {text.strip().partition(chr(10))[0]}"


def explain_system(error: OSError) -> str:
    """Say what the system refused, and where."""
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"{error.strerror}: {error.filename}"
