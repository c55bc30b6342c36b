"""microqueue: a task queue that lives in the MongoDB you already run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from microqueue.new_task import Duplicate, EnqueueOptions, EnqueueReport, NewTask
from microqueue.queue import Queue
from microqueue.reports import Pause, QueueStats
from microqueue.settings import QueueSettings
from microqueue.sweeper import AsyncSweeper, Sweeper, SweepReport
from microqueue.task import Attempt, Lease, Outcome, Progress, Task, TaskError, TaskStatus

if TYPE_CHECKING:
    from microqueue.worker import AsyncWorker, Fail, Retry, Snooze, Tasks, Worker

__version__ = "0.1.0"

__all__ = [
    "AlreadyRunning",
    "AsyncQueue",
    "AsyncSweeper",
    "AsyncWorker",
    "Attempt",
    "BackoffPolicy",
    "DeadLetterFilter",
    "DeadLetterPage",
    "DeadLetterStats",
    "Duplicate",
    "DuplicateTask",
    "DuplicatesStored",
    "EmbeddedServerError",
    "EnqueueOptions",
    "EnqueueReport",
    "Fail",
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
    "Retry",
    "ServerUnavailable",
    "Snooze",
    "SweepReport",
    "Sweeper",
    "Task",
    "TaskError",
    "TaskNotFound",
    "TaskStatus",
    "Tasks",
    "Worker",
    "WrongStatus",
    "__version__",
    "compute_backoff_seconds",
]

# Imported on first use: most producers run no worker, and `import microqueue` stays light.
_FROM_WORKER = frozenset({"AsyncWorker", "Fail", "Retry", "Snooze", "Tasks", "Worker"})

if not TYPE_CHECKING:  # Type checkers would accept any name.

    def __getattr__(name: str) -> Any:
        if name not in _FROM_WORKER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module("microqueue.worker"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
