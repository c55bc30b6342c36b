"""The Celery app that is measured, and its worker: ``python -m benchmarks.celery_worker``.

Its one task does nothing but note when it started.
"""

from __future__ import annotations

import functools
import os
import struct
import sys
import time
from typing import Any

from celery import Celery

import microqueue.contrib.kombu  # noqa: F401 (it registers the schemes)

POOL = "prefork"
CONCURRENCY = 2
PREFETCH = 64
"""Messages that are fetched ahead for each process of the pool."""
RECORD = struct.Struct("<qdd")
"""The number of a task, when it was sent and when it started."""
SETTINGS = {
    "task_ignore_result": True,
    "task_store_errors_even_if_ignored": False,
    "worker_prefetch_multiplier": PREFETCH,
    "worker_send_task_events": False,
    "broker_connection_retry_on_startup": True,
}


def new_app(url: str) -> Celery:
    """Return an app without tasks."""
    app = Celery("benchmarks", broker=url, set_as_current=False)
    app.conf.update(SETTINGS)
    return app


def create_app(url: str, record_path: str = os.devnull) -> tuple[Celery, Any]:
    """Return an app with a task that notes when it was sent and when it started."""
    app = new_app(url)

    def no_op(number: int, sent: float) -> None:
        started = time.monotonic()  # All processes of a machine share this clock.
        os.write(_opened(record_path, os.getpid()), RECORD.pack(number, sent, started))

    return app, app.task(name="no_op")(no_op)


@functools.cache
def _opened(path: str, _process: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def run_worker(app: Celery) -> None:
    """Run a worker until it is terminated."""
    app.worker_main(
        [
            "worker",
            f"--pool={POOL}",
            f"--concurrency={CONCURRENCY}",
            "--loglevel=WARNING",
            "--without-gossip",
            "--without-mingle",
            "--without-heartbeat",
        ]
    )


def main() -> None:
    """Run a worker of the app that notes its tasks in a file."""
    url, record_path = sys.argv[1:]
    app, _ = create_app(url, record_path)
    run_worker(app)


if __name__ == "__main__":
    main()
