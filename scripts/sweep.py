#!/usr/bin/env python3
"""Sweep the queues of a MongoDB collection: from cron, or with --every as a small service.

    */1 * * * *  MICROQUEUE_URI=mongodb://... python scripts/sweep.py

Any number may run at once: while one sweeps, another with the same jobs and queues skips its turn.
Each sweep logs one line to stderr. With --every, schedules are fired on time between sweeps. The
exit status is 1 if the server could not be reached or a job failed, else 0. Needs no extra.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from microqueue.cli.dlq_detection import detect_dlq
from microqueue.drivers.connection import URI_VARIABLE
from microqueue.errors import MicroqueueError
from microqueue.masking import without_password
from microqueue.queue import Queue
from microqueue.sweeper import (
    COUNTERS,
    JOBS,
    Sweeper,
    SweepReport,
    check_every,
    describe_burials,
    wait_for_next_sweep,
)

logger = logging.getLogger("sweep")


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--uri",
        metavar="URI",
        help="MongoDB to connect to (default: $MICROQUEUE_URI, or the embedded server)",
    )
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--once", action="store_true", help="sweep once (the default)")
    when.add_argument(
        "--every", type=float, metavar="SECONDS", help="sweep with this pause until SIGTERM"
    )
    parser.add_argument(
        "--job",
        action="append",
        choices=JOBS,
        metavar="JOB",
        help=f"run only this job; repeatable (default: all of {', '.join(JOBS)})",
    )
    parser.add_argument(
        "--queue",
        action="append",
        metavar="NAME",
        help="sweep only this queue; repeatable (default: all queues)",
    )
    parser.add_argument(
        "--lock-ttl", type=float, metavar="SECONDS", help="lifetime of the sweeper's lock"
    )
    parser.add_argument("--json", action="store_true", help="print each report as one line of JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep once or repeatedly, and return the exit status."""
    options = read_arguments(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level="INFO")
    # Each sweep is one line here, including its errors, instead of the sweeper's own log.
    logging.getLogger("microqueue").setLevel(logging.CRITICAL)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if not (options.uri or os.environ.get(URI_VARIABLE)):
        logger.warning("neither --uri nor %s is set: sweeping the embedded MongoDB", URI_VARIABLE)
    try:
        pause = None if options.every is None else check_every(options.every)
        with Queue.from_uri(options.uri) as queue:
            sweeper = Sweeper(
                queue,
                queues=options.queue,
                jobs=options.job or JOBS,
                lock_ttl=options.lock_ttl,
            )
            while True:
                ok = sweep(queue, sweeper, as_json=options.json)
                if pause is None:
                    return 0 if ok else 1
                wait_for_next_sweep(sweeper, pause, stop, on_error=log_error)
                if stop.is_set():
                    return 0
    except MicroqueueError as exc:
        logger.error("%s", without_password(str(exc)))  # noqa: TRY400 (one line)
        return 1


def sweep(queue: Queue[Any], sweeper: Sweeper, *, as_json: bool) -> bool:
    """Sweep once, log one line, and return whether all jobs succeeded."""
    try:
        detect_dlq(queue)
        report = sweeper.run_once()
    except MicroqueueError as exc:
        log_error(exc)
        return False
    logger.log(logging.INFO if report.ok else logging.ERROR, "%s", describe(report))
    if as_json:
        print(report.model_dump_json(), flush=True)
    return report.ok


def log_error(error: MicroqueueError) -> None:
    """Log an error in one line."""
    logger.error("sweep failed: %s", without_password(str(error)))


def describe(report: SweepReport) -> str:
    """Return one line about a sweep."""
    if report.skipped:
        return "skipped: another sweeper is running"
    counts = " ".join(f"{name}={getattr(report, name)}" for name in COUNTERS)
    errors = "".join(f"; {job} failed: {message}" for job, message in report.errors.items())
    buried = "".join(f"; {line}" for line in describe_burials(report.buried_tasks))
    end = "; another sweeper took over" if report.taken_over else ""
    return without_password(f"{counts} took={report.took_sec:.3f}s{buried}{end}{errors}")


if __name__ == "__main__":
    sys.exit(main())
