"""Start a worker anew when its code changes, while it is being written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from microqueue.errors import MicroqueueError


def watch_code(restart: Callable[[], None]) -> None:
    """Call ``restart`` whenever a Python file below the current directory changes."""
    try:
        from watchfiles import PythonFilter, watch  # noqa: PLC0415 (only for --reload)
    except ImportError as exc:
        raise MicroqueueError(
            "--reload needs watchfiles: run pip install 'microqueue[reload]'"
        ) from exc

    def run() -> None:
        for _ in watch(Path.cwd(), watch_filter=PythonFilter(), raise_interrupt=False):
            restart()

    threading.Thread(target=run, name="microqueue-reload", daemon=True).start()
