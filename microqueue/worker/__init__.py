"""Workers: claim, run the handler, settle; renew the leases meanwhile.

``Worker`` runs plain functions in threads, ``AsyncWorker`` awaits coroutines. A handler
returns, or raises: any exception means a retry with backoff, :class:`Retry` one with a delay
of its own, :class:`Fail` a dead letter at once, :class:`Snooze` later and uncounted.
"""

from microqueue.worker.async_worker import AsyncWorker
from microqueue.worker.handlers import AsyncContext, Context, load_handler
from microqueue.worker.hooks import Hooks
from microqueue.worker.options import WorkerOptions
from microqueue.worker.outcomes import Fail, Retry, Snooze
from microqueue.worker.registry import Tasks
from microqueue.worker.shutdown import stopping_by_signal
from microqueue.worker.worker import Worker

__all__ = [
    "AsyncContext",
    "AsyncWorker",
    "Context",
    "Fail",
    "Hooks",
    "Retry",
    "Snooze",
    "Tasks",
    "Worker",
    "WorkerOptions",
    "load_handler",
    "stopping_by_signal",
]
