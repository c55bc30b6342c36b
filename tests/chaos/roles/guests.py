"""Guests: Celery on the Kombu transport, and the Spark archive. Others import neither of them."""

from __future__ import annotations

import os
import sys

from tests.chaos.handlers import Participant

WHO = "CHAOS_WHO"
"""The environment variable with the name of a process that a command has started."""
QUEUE = "celery"
MOST_ATTEMPTS = 1_000_000
"""A message that waits in a Celery worker counts as delivered whenever the worker is killed."""


def run_celery_worker(me: Participant) -> None:
    """Become ``celery worker``."""
    command = ["celery", "-A", "tests.chaos.roles.celery_app", "worker", "-P", "threads", "-c", "4"]
    command += ["-Q", QUEUE, "-n", f"{me.ledger.who}@chaos", "-l", "WARNING"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    _become(me, command, MICROQUEUE_MAX_CRASHES=str(MOST_ATTEMPTS))


def run_celery_sender(me: Participant, *, seed: int, for_sec: float, rate: float = 8.0) -> None:
    """Send Celery tasks for a while."""
    from tests.chaos.roles.celery_app import send  # noqa: PLC0415 (only here)

    send(me, seed=seed, for_sec=for_sec, rate=rate)


def run_archiver(me: Participant, database: str, *, for_sec: float, times: int) -> None:
    """Become a process that runs the archive a few times, and ends."""
    _become(me, ["tests.chaos.roles.archiver", database, str(for_sec), str(times)])


def _become(me: Participant, module: list[str], **environment: str) -> None:
    command = [sys.executable, "-m", "tests.chaos.roles.command", *module]
    os.execve(sys.executable, command, {**os.environ, WHO: me.ledger.who, **environment})
