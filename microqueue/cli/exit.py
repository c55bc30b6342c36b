"""How the process exits: status codes, signals and the watchdog."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self, TextIO, cast

from microqueue.cli.output import Output
from microqueue.errors import MicroqueueError
from microqueue.worker.shutdown import stopping_by_signal

FAILED = 1
TASK_FAILED = 3
NOT_FINISHED = 4
INTERRUPTED = 130  # The status that shells report after Ctrl-C: 128 + SIGINT.


class WatchedStream:
    """A stream that keeps the error of a failed write, to tell it from other OSErrors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        """Write, and keep the error if that fails."""
        with self._watching():
            return self._stream.write(text)

    def flush(self) -> None:
        """Flush, and keep the error if that fails."""
        with self._watching():
            self._stream.flush()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            self.failure = exc
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def exiting_cleanly() -> Iterator[None]:
    """Exit with a status and no traceback after Ctrl-C, or when stdout cannot be written."""
    # Outside this block Ctrl-C kills the process; see ``microqueue.cli.main``.
    ours = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    stream = None
    if sys.stdout is not None:  # It is None if the process was started with stdout closed.
        stream = WatchedStream(sys.stdout)
        sys.stdout = cast("TextIO", stream)
    try:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (OSError, SystemExit):
        if stream is not None and _output_failed(stream):
            sys.exit(FAILED)
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _output_failed(stream: WatchedStream) -> bool:
    """Return whether stdout could not be written; if so, print why and stop using it."""
    with suppress(OSError):
        stream.flush()  # Output may still be buffered.
    if stream.failure is None:
        return False
    # Otherwise the interpreter flushes again at exit, and prints a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if not isinstance(
        stream.failure, BrokenPipeError
    ):  # A closed pipe, as after `| head`, is no error.
        reason = f"cannot write the output: {stream.failure.strerror}"
        Output(as_json=False).error(MicroqueueError(reason))
    return True


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets; the second raises KeyboardInterrupt."""
    stop = threading.Event()

    def handle(*, immediately: bool) -> None:
        if immediately or stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with stopping_by_signal(handle):
        yield stop


FLUSH_SEC = 0.5

logger = logging.getLogger("microqueue.worker")


class Watchdog:
    """Ends the process if it has not exited in time after a stop.

    Used as a context manager around the work. After a stop it stays armed until the process is
    gone, because the interpreter waits at exit for threads that handlers have started.

    It waits in its own thread, started on entry, and is woken through a pipe: a signal handler
    may interrupt any code, so it must take no lock and start no thread.
    """

    def __init__(self) -> None:
        self._end_at = float("inf")
        self._left = False
        self._status = 1
        self._flushing, self._flushed = threading.Event(), threading.Event()
        self._reader, self._writer = os.pipe()  # Never closed, because a late stop may write to it.

    def __enter__(self) -> Self:
        # Both start now: Python starts no thread once the interpreter is shutting down.
        threading.Thread(target=self._watch, name="microqueue-watchdog", daemon=True).start()
        threading.Thread(target=self._flush, name="microqueue-flush", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left = self._end_at == float("inf")
        os.write(self._writer, b"x")

    def succeeded(self) -> None:
        """Exit with status 0 if the watchdog ends the process from now on: the work is done."""
        self._status = 0

    def expect_end(self, seconds: float) -> None:
        """End the process after so many seconds, unless it exits earlier."""
        self._end_at = min(self._end_at, time.monotonic() + seconds)
        os.write(self._writer, b"x")

    def _watch(self) -> None:
        while not self._left and (rest_sec := self._end_at - time.monotonic()) > 0:
            wait_sec = None if rest_sec == float("inf") else rest_sec
            if select.select([self._reader], [], [], wait_sec)[0]:
                os.read(self._reader, 64)
        self._flushing.set()
        if not self._left:
            self._flushed.wait(FLUSH_SEC)
            os._exit(self._status)

    def _flush(self) -> None:
        """Log and flush in a separate thread: a stuck handler may hold the lock of a stream."""
        self._flushing.wait()
        if self._left:
            return
        logger.warning(
            "process did not exit in time: a handler or thread is still running; killing it",
            extra={"killed_by": "watchdog"},
        )
        sys.stdout.flush()
        sys.stderr.flush()
        self._flushed.set()
