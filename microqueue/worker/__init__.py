"""Workers: claim tasks, run their handlers, renew their leases, and settle them.

``Worker`` runs plain functions in threads; ``AsyncWorker`` awaits coroutines. When a handler
returns, its task is done. Any exception is a retry after the backoff; :class:`Retry` chooses the
delay, :class:`Fail` makes the task a dead letter at once, and :class:`Snooze` delivers it again
later without counting the attempt.

One task passes through these modules: ``fetcher`` claims it, ``worker`` or ``async_worker`` runs
its handler while ``lease_renewal`` keeps its lease, and ``completer`` decides and writes the
outcome. ``core`` has the order of the steps of a run; ``effects`` are those steps.
"""

from microqueue.hooks import Hooks
from microqueue.worker.async_worker import AsyncWorker
from microqueue.worker.context import AsyncBatchContext, AsyncContext, BatchContext, Context
from microqueue.worker.enqueued_task import AsyncEnqueuedTask, EnqueuedTask
from microqueue.worker.handlers import load_handler
from microqueue.worker.options import WorkerOptions, WorkerOptionsDict
from microqueue.worker.outcomes import Fail, Retry, Snooze
from microqueue.worker.registry import Tasks
from microqueue.worker.shutdown import stopping_by_signal
from microqueue.worker.worker import Worker

__all__ = [
    "AsyncBatchContext",
    "AsyncContext",
    "AsyncEnqueuedTask",
    "AsyncWorker",
    "BatchContext",
    "Context",
    "EnqueuedTask",
    "Fail",
    "Hooks",
    "Retry",
    "Snooze",
    "Tasks",
    "Worker",
    "WorkerOptions",
    "WorkerOptionsDict",
    "load_handler",
    "stopping_by_signal",
]
