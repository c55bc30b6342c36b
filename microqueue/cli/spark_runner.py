"""Run a pipeline from the command line: Spark session, progress, Ctrl-C and errors."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from rich.status import Status

from microqueue.arguments import invalid_argument
from microqueue.cli.session import Session
from microqueue.errors import MicroqueueError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from microqueue.spark.progress import Step

REFRESH_SEC = 0.5
OWN_ERROR = re.compile(r"microqueue\.[\w.]*\.(\w+): ([^\n]+)")


class Runner:
    """A Spark session with a progress display."""

    def __init__(self, session: Session, spark: SparkSession, status: Status | None) -> None:
        self.spark = spark
        self._session, self._status = session, status
        self._text = ""

    def show_step(self, step: Step) -> None:
        """Show a step: in place at a terminal, otherwise as a line on stderr."""
        self._text = step.text
        if self._status is not None:
            self._status.update(step.text)
        elif not self._session.out.as_json:
            self._session.out.errors.print(step.text, soft_wrap=True)

    def refresh(self) -> None:
        """Show how many Spark tasks of the active stages are completed."""
        tracker = self.spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        known = [stage for stage in stages if stage is not None]
        whole = sum(stage.numTasks for stage in known)
        if self._status is not None and whole:
            done = sum(stage.numCompletedTasks for stage in known)
            self._status.update(f"{self._text}: {done} of {whole} Spark tasks")


@contextmanager
def running(session: Session, master: str | None, *, live: bool = True) -> Iterator[Runner]:
    """Start Spark or reuse its session, show progress, and turn Spark's errors into one line.

    If the embedded server is used, it runs as long as the pipeline, unless not ``live``.
    """
    check_master(master)
    try:
        from microqueue.spark import session as spark_session  # noqa: PLC0415 (optional, slow)
    except ImportError as exc:
        raise MicroqueueError(f"{exc}") from exc
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # noqa: PLC0415 (of Spark)
    from pyspark.errors import PySparkException  # noqa: PLC0415 (as above)
    from pyspark.logger import PySparkLogger  # noqa: PLC0415 (as above)

    # It would print each error as a page of JSON, before the one line below.
    PySparkLogger.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    at_terminal = session.out.errors.is_terminal and not session.out.as_json
    status = Status("Starting Spark", console=session.out.errors) if at_terminal else None
    if status is not None:
        status.start()
    stop = threading.Event()
    try:
        server = session.embedded_server() if live else nullcontext()
        with server, Interrupts() as interrupts:
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
    except OSError as exc:  # For example, a path that cannot be written.
        raise MicroqueueError(explain_system(exc)) from exc
    finally:
        stop.set()
        if status is not None:
            status.stop()


def _refresh(runner: Runner, stop: threading.Event) -> None:
    while not stop.wait(REFRESH_SEC):
        runner.refresh()


def explain(error: Any) -> str:
    """Return microqueue's own error from a Spark failure, or the first line of Java's."""
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
    """Return what the operating system rejected, and the file."""
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"{error.strerror}: {error.filename}"


FORMS = tuple(
    re.compile(form)
    for form in (
        r"local",
        r"local\[(\*|[1-9]\d*)(\s*,\s*[1-9]\d*)?\]",
        r"local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]",
        r"spark://[^\s,/:]+:\d+(,[^\s,/:]+:\d+)*",
        r"spark://\[[0-9a-fA-F:.]+\]:\d+",
        r"yarn",
        r"k8s://\S+",
    )
)
INSTEAD = (
    "give local[4] for four cores here, local[*] for all of them, "
    "or a cluster: spark://host:7077, yarn, k8s://https://host:443"
)


def check_master(master: str | None) -> None:
    """Reject a master URL that Spark would not accept; None is Spark's default."""
    if master is not None and not any(form.fullmatch(master) for form in FORMS):
        raise invalid_argument("master", master, INSTEAD)


class Interrupts:
    """Handles Ctrl-C instead of Spark, whose handler would call Java amid another call."""

    def __init__(self) -> None:
        self._received = 0
        self._starting = False
        self._former = signal.getsignal(signal.SIGINT)
        self._spark: SparkSession | None = None

    def __enter__(self) -> Self:
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        logging.getLogger().addFilter(_is_not_of_py4j)  # It also logs to the root logger.
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        signal.signal(signal.SIGINT, self._former)
        if error is None or not self._received:
            return
        if self._spark is not None:
            with suppress(Exception):  # Java may have exited already.
                # Its tasks fail when this process exits; hide those errors.
                self._spark.sparkContext.setLogLevel("OFF")
                jvm: Any = self._spark.sparkContext._jvm  # noqa: SLF001 (no public way to Java)
                nowhere = jvm.java.io.OutputStream.nullOutputStream()
                jvm.java.lang.System.setErr(jvm.java.io.PrintStream(nowhere))
        # The error may be a consequence: the interrupt has cut off a reply from Java.
        raise KeyboardInterrupt from error

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Delay the first Ctrl-C: interrupting the start of Spark would leave Java running."""
        self._starting = True
        self._listen()
        try:
            yield
        finally:
            self._starting = False
            self._listen()  # Spark has installed its own handler.
        if self._received:
            raise KeyboardInterrupt

    def silence_at_end(self, spark: SparkSession) -> None:
        """Set the session whose log is turned off after an interrupt."""
        self._spark = spark

    def _listen(self) -> None:
        listens = callable(self._former)  # Otherwise SIGINT is ignored, or kills the process.
        signal.signal(signal.SIGINT, self._handle if listens else self._former)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._received += 1
        if self._received > 1 or not self._starting:
            raise KeyboardInterrupt


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return "py4j" not in Path(record.pathname).parts
