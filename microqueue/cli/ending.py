"""How a run of the command line ends: well, interrupted, or because nobody takes its output."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from microqueue.cli.output import Output
from microqueue.errors import MicroqueueError

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
