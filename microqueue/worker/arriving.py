"""Wait for a MongoDB that is not there yet: a service may start before its database.

A worker that runs on waits for a server that went away; one that starts does so, too. A password
does not reach the log: errors of ours have none.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator

from microqueue.errors import ServerUnavailable
from microqueue.worker.background import Background
from microqueue.worker.stopping import ENDING_SEC, SIGNAL_WAIT_SEC

FIRST_PAUSE_SEC = 0.5
LONGEST_PAUSE_SEC = 5.0
JITTER = (0.8, 1.0)  # So that many workers do not ask at once.

logger = logging.getLogger("microqueue.worker")
_random = random.Random()  # noqa: S311 (it only spreads attempts)


def pauses() -> Iterator[float]:
    """Yield how long to wait after each attempt: twice as long each time, up to a limit."""
    pause_sec = FIRST_PAUSE_SEC
    while True:
        yield pause_sec * _random.uniform(*JITTER)
        pause_sec = min(2 * pause_sec, LONGEST_PAUSE_SEC)


def await_server(
    attempt: Callable[[], object],
    *,
    who: str,
    stopping: Callable[[], bool],
    abandon: Callable[..., object] | None = None,
) -> bool:
    """Make an attempt again and again until MongoDB answers.

    Args:
        attempt: What needs the server. Each try runs in its own thread, because a server that
            does not answer must not delay a stop.
        who: What waits, for the log.
        stopping: Whether to give up; asked several times a second.
        abandon: Called if this is given up, when the attempt under way has ended, or some seconds
            later, with ``succeeded``: whether that attempt did after all.

    Returns:
        Whether it succeeded; not if it was given up.

    Raises:
        MicroqueueError: The attempt failed for another reason than a missing server.
    """
    waited = False
    for pause_sec in pauses():
        trial = Background(attempt, name="microqueue-start")
        trial.start()
        while trial.is_alive() and not stopping():
            trial.join(SIGNAL_WAIT_SEC)
        if not trial.is_alive() and trial.error is None:
            if waited:
                logger.info("MongoDB is there: %s starts", who)
            return True
        if isinstance(trial.error, ServerUnavailable) and not stopping():
            logger.warning(
                "%s waits for MongoDB; next attempt in %.1f s: %s",
                who,
                pause_sec,
                trial.error,
                extra={"waits_for": "mongodb"},
            )
            waited = True
            _sleep(pause_sec, stopping)
        elif trial.error is not None and not isinstance(trial.error, ServerUnavailable):
            raise trial.error
        if stopping():
            _abandon(trial, abandon)
            return False
    raise AssertionError  # There is always another pause.


def _sleep(seconds: float, stopping: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while not stopping() and (rest_sec := until - time.monotonic()) > 0:
        time.sleep(min(rest_sec, SIGNAL_WAIT_SEC))


def _abandon(trial: Background, abandon: Callable[..., object] | None) -> None:
    def end() -> None:
        trial.join(ENDING_SEC)
        if abandon is not None:
            abandon(succeeded=not trial.is_alive() and trial.error is None)

    Background(end, name="microqueue-end").start()
