"""microqueue: a task queue that lives in the MongoDB you already run."""

from microqueue.async_queue import AsyncQueue
from microqueue.backoff import BackoffPolicy, compute_backoff_seconds
from microqueue.dlq import DeadLetterFilter, DeadLetterPage, DeadLetterStats, ReplayReport
from microqueue.errors import (
    AlreadyRunning,
    DuplicatesStored,
    DuplicateTask,
    EmbeddedServerError,
    IndexConflict,
    InvalidArgument,
    InvalidPayload,
    LeaseLost,
    MicroqueueError,
    OperationFailed,
    ServerUnavailable,
    TaskNotFound,
    WrongStatus,
)
from microqueue.new_task import Duplicate, EnqueueReport, NewTask
from microqueue.queue import Queue
from microqueue.reports import Pause, QueueStats
from microqueue.settings import QueueSettings
from microqueue.sweeper import AsyncSweeper, Sweeper, SweepReport
from microqueue.task import Attempt, Lease, Outcome, Progress, Task, TaskError, TaskStatus

__version__ = "0.1.0"

__all__ = [
    "AlreadyRunning",
    "AsyncQueue",
    "AsyncSweeper",
    "Attempt",
    "BackoffPolicy",
    "DeadLetterFilter",
    "DeadLetterPage",
    "DeadLetterStats",
    "Duplicate",
    "DuplicateTask",
    "DuplicatesStored",
    "EmbeddedServerError",
    "EnqueueReport",
    "IndexConflict",
    "InvalidArgument",
    "InvalidPayload",
    "Lease",
    "LeaseLost",
    "MicroqueueError",
    "NewTask",
    "OperationFailed",
    "Outcome",
    "Pause",
    "Progress",
    "Queue",
    "QueueSettings",
    "QueueStats",
    "ReplayReport",
    "ServerUnavailable",
    "SweepReport",
    "Sweeper",
    "Task",
    "TaskError",
    "TaskNotFound",
    "TaskStatus",
    "WrongStatus",
    "__version__",
    "compute_backoff_seconds",
]
