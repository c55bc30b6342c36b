"""The scheduled jobs: reclaim what is stuck, wake what is due, bury what is used up.

A sweep is safe to run anywhere, and any number at once. It covers all queues of the
collection unless told otherwise. A lock keeps sweepers of the same jobs and queues from doing
the same work twice; nothing depends on it. It lives for ``lock_ttl`` and is renewed between
batches, so that a sweeper that was killed delays the others by no more than that.
"""

from microqueue.sweeper.asynchronous import AsyncSweeper
from microqueue.sweeper.report import (
    COUNTERS,
    JOBS,
    BuriedTasks,
    SweepReport,
    check_every,
    describe_burials,
)
from microqueue.sweeper.threads import Sweeper

__all__ = [
    "COUNTERS",
    "JOBS",
    "AsyncSweeper",
    "BuriedTasks",
    "SweepReport",
    "Sweeper",
    "check_every",
    "describe_burials",
]
