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
INTERRUPTED = 130  # As shells tell of a program that Ctrl-C has ended.


class WatchedStream:
    """A stream that remembers why it could not be written; what else fails is not its fault."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        """Write, and remember what keeps it from that."""
        with self._watching():
            return self._stream.write(text)

    def flush(self) -> None:
        """Write what is on its way, and remember what keeps it from that."""
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
def telling_how_it_ends() -> Iterator[None]:
    """Let Ctrl-C interrupt what runs here, and end the process with a status and no traceback."""
    # Before and after, it ends the process by itself; see ``microqueue.cli.main``.
    ours = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    stream = None
    if sys.stdout is not None:  # As it is for a process whose stdout is closed.
        stream = WatchedStream(sys.stdout)
        sys.stdout = cast("TextIO", stream)
    try:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (OSError, SystemExit):
        if stream is not None and _is_given_up(stream):
            sys.exit(FAILED)
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _is_given_up(stream: WatchedStream) -> bool:
    """Tell whether a stream could not be written; if so, say why, and leave it alone."""
    with suppress(OSError):
        stream.flush()  # What was printed may still be on its way.
    if stream.failure is None:
        return False
    # Else the interpreter tries once more at its end, and complains.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if not isinstance(stream.failure, BrokenPipeError):  # Who closes a pipe has seen enough.
        reason = f"cannot write the output: {stream.failure.strerror}"
        Output(as_json=False).error(MicroqueueError(reason))
    return True


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Give an event that the first Ctrl-C or SIGTERM sets; the second one interrupts."""
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
    """Ends the process if it takes too long after a stop in the block that this guards.

    Once there was a stop, it goes on after the block until the process is gone: the interpreter
    waits for threads that handlers have started.

    It waits in a thread of its own from the beginning, and is told through a pipe: a signal
    handler may interrupt anything, so it must take no lock and start no thread.
    """

    def __init__(self) -> None:
        self._end_at = float("inf")
        self._left = False
        self._status = 1
        self._flushing, self._flushed = threading.Event(), threading.Event()
        self._reader, self._writer = os.pipe()  # Never closed: a late stop may write to it.

    def __enter__(self) -> Self:
        # Both from the beginning: Python starts no thread once it is shutting down.
        threading.Thread(target=self._watch, name="microqueue-watchdog", daemon=True).start()
        threading.Thread(target=self._flush, name="microqueue-flush", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left = self._end_at == float("inf")
        os.write(self._writer, b"x")

    def succeeded(self) -> None:
        """Say that the work is done: if only the rest takes too long, that is no failure."""
        self._status = 0

    def expect_end(self, seconds: float) -> None:
        """End the process so many seconds from now, unless it ends by itself."""
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
        """Log and flush in a thread of its own: what does not end may hold the lock of a stream."""
        self._flushing.wait()
        if self._left:
            return
        logger.warning("something keeps this process from ending; it is ended now")
        sys.stdout.flush()
        sys.stderr.flush()
        self._flushed.set()
