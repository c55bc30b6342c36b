"""The Celery app whose workers are killed: ``python -m benchmarks.celery_kills_worker``.

Its one task writes its start and its end to a ledger: a file of one JSON object per line, which
each process appends to, and which no broker can change.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

from celery import Celery

import microqueue.contrib.kombu  # noqa: F401 (it registers the schemes)

CONCURRENCY = 2
SETTINGS = {
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "task_ignore_result": True,
    "broker_connection_retry_on_startup": True,
}
RUN_SEC = (0.05, 0.15)
"""How long a task runs: random, between these."""


def create_app(
    url: str, transport_options: dict[str, Any], ledger: str = os.devnull
) -> tuple[Celery, Any]:
    """Return an app with a task that notes its runs."""
    app = Celery("kills", broker=url, set_as_current=False)
    app.conf.update(SETTINGS, broker_transport_options=transport_options)

    def run(number: int) -> None:
        note(ledger, "start", number)
        time.sleep(random.uniform(*RUN_SEC))
        note(ledger, "end", number)

    return app, app.task(name="run", shared=False)(run)


def note(ledger: str, what: str, number: int) -> None:
    """Append a line, with one write."""
    line = {
        "what": what,
        "number": number,
        "at": time.monotonic(),  # All processes of a machine share this clock.
        "process": os.getpid(),
        "worker": os.getppid(),
    }
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def main() -> None:
    """Run a worker until it is killed."""
    url, transport_options, ledger, name = sys.argv[1:]
    app, _ = create_app(url, json.loads(transport_options), ledger)
    app.worker_main(
        [
            "worker",
            "--pool=prefork",
            f"--concurrency={CONCURRENCY}",
            "--loglevel=WARNING",
            f"--hostname={name}",
        ]
    )


if __name__ == "__main__":
    main()
