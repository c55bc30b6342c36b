"""microqueue: a task queue that lives in the MongoDB you already run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from microqueue.async_queue import AsyncQueue
from microqueue.backoff import BackoffPolicy, compute_backoff_seconds
from microqueue.dead_letter_models import (
    DeadLetter,
    DeadLetterFilter,
    DeadLetterPage,
    DeadLetterStats,
    ReplayReport,
)
from microqueue.errors import (
    AlreadyRunning,
    DuplicatesStored,
    DuplicateTask,
    EmbeddedServerError,
    IndexConflict,
    InvalidArgument,
    InvalidCron,
    InvalidPayload,
    JavaNotFound,
    LeaseLost,
    MessagesLost,
    MicroqueueError,
    OperationFailed,
    PipelineError,
    RunConflict,
    ScheduleNotFound,
    SchemaDrift,
    SchemaMismatch,
    SchemaTooNew,
    SchemaTooOld,
    ServerUnavailable,
    TaskDeleted,
    TaskFailed,
    TaskNotFound,
    TopicConflict,
    TransactionsUnsupported,
    WaitTimeout,
    WrongStatus,
)
from microqueue.hooks import Hooks
from microqueue.new_task import Duplicate, EnqueueOptions, EnqueueReport, NewTask
from microqueue.queue import Queue
from microqueue.reports import Pause, QueueStats
from microqueue.settings import QueueSettings
from microqueue.task import Attempt, Lease, Outcome, Progress, Task, TaskError, TaskStatus

if TYPE_CHECKING:
    from microqueue.binding import Binding, BindingOptions
    from microqueue.message import Gap, Message
    from microqueue.schedule import Schedule, ScheduleOptions, ScheduleRun
    from microqueue.subscription import AsyncSubscription, Subscription
    from microqueue.sweeper import AsyncSweeper, Sweeper, SweepReport
    from microqueue.topic import AsyncTopic, Topic
    from microqueue.worker import AsyncWorker, Fail, Retry, Snooze, Tasks, Worker

__version__ = "0.1.0"

__all__ = [
    "AlreadyRunning",
    "AsyncQueue",
    "AsyncSubscription",
    "AsyncSweeper",
    "AsyncTopic",
    "AsyncWorker",
    "Attempt",
    "BackoffPolicy",
    "Binding",
    "BindingOptions",
    "DeadLetter",
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
    "Gap",
    "Hooks",
    "IndexConflict",
    "InvalidArgument",
    "InvalidCron",
    "InvalidPayload",
    "JavaNotFound",
    "Lease",
    "LeaseLost",
    "Message",
    "MessagesLost",
    "MicroqueueError",
    "NewTask",
    "OperationFailed",
    "Outcome",
    "Pause",
    "PipelineError",
    "Progress",
    "Queue",
    "QueueSettings",
    "QueueStats",
    "ReplayReport",
    "Retry",
    "RunConflict",
    "Schedule",
    "ScheduleNotFound",
    "ScheduleOptions",
    "ScheduleRun",
    "SchemaDrift",
    "SchemaMismatch",
    "SchemaTooNew",
    "SchemaTooOld",
    "ServerUnavailable",
    "Snooze",
    "Subscription",
    "SweepReport",
    "Sweeper",
    "Task",
    "TaskDeleted",
    "TaskError",
    "TaskFailed",
    "TaskNotFound",
    "TaskStatus",
    "Tasks",
    "Topic",
    "TopicConflict",
    "TransactionsUnsupported",
    "WaitTimeout",
    "Worker",
    "WrongStatus",
    "__version__",
    "compute_backoff_seconds",
]

# Imported on first use: most producers run no worker or sweeper and have no schedule, and
# `import microqueue` stays light. A test lists what it loads.
_LAZY = {
    **dict.fromkeys(["AsyncWorker", "Fail", "Retry", "Snooze", "Tasks", "Worker"], "worker"),
    **dict.fromkeys(["AsyncSweeper", "SweepReport", "Sweeper"], "sweeper"),
    **dict.fromkeys(["Schedule", "ScheduleOptions", "ScheduleRun"], "schedule"),
    **dict.fromkeys(["AsyncTopic", "Topic"], "topic"),
    **dict.fromkeys(["AsyncSubscription", "Subscription"], "subscription"),
    **dict.fromkeys(["Binding", "BindingOptions"], "binding"),
    **dict.fromkeys(["Gap", "Message"], "message"),
}

# Modules that `import microqueue` made attributes of the package before it loaded fewer.
_MODULES = {"embedded", "message", "schedule", "schedules", "sweeper", "timing"}

if not TYPE_CHECKING:  # Type checkers would accept any name.

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"microqueue.{name}")
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"microqueue.{_LAZY[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
