"""The scheduled jobs: reclaim what is stuck, wake what is due, bury what is used up.

A sweep is safe to run anywhere, and any number at once. It covers all queues of the
collection unless told otherwise. A lock keeps sweepers of the same jobs and queues from doing
the same work twice; nothing depends on it.
"""

from microqueue.sweeper.asynchronous import AsyncSweeper
from microqueue.sweeper.report import COUNTERS, JOBS, SweepReport, check_every
from microqueue.sweeper.threads import Sweeper

__all__ = ["COUNTERS", "JOBS", "AsyncSweeper", "SweepReport", "Sweeper", "check_every"]
