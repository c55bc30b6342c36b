"""From the end of a handler to the written settlement.

:class:`Completer` decides the outcome of each task, once. A settlement buffer collects outcomes
for a moment, so that many share one write. :class:`SettlementWriter` writes them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from microqueue import error_codes
from microqueue.core import QueueCore
from microqueue.errors import InvalidArgument, LeaseLost, MicroqueueError
from microqueue.hooks import HookList
from microqueue.operations import settle
from microqueue.operations.call import Operation
from microqueue.operations.settle import Settlement, settle_batch
from microqueue.task import Outcome, TaskError, TaskStatus
from microqueue.task_ids import id_key
from microqueue.worker.dispatcher import Dispatcher
from microqueue.worker.effects import RunOperation, SettleEffects, Sleep
from microqueue.worker.handlers import Handler
from microqueue.worker.in_flight import InFlight, LeasedTask, now_sec
from microqueue.worker.log import UnstartedTasks, log_task, logger
from microqueue.worker.options import WorkerOptions
from microqueue.worker.outcomes import (
    check_storable,
    is_unexpected,
    plain_retry,
    settlement_for,
)
from microqueue.worker.prefetch import PrefetchController
from microqueue.worker.shutdown import StopRequest

RETRY_SEC = 1.0  # Between two attempts while MongoDB does not answer.


class Done(Enum):
    """Successes that need no :class:`Settlement`."""

    PLAIN = auto()
    COMMITTED = auto()


PLAIN_DONE: Final = Done.PLAIN
"""Done, without a result to store: all such tasks of one claim share one update."""
COMMITTED: Final = Done.COMMITTED
"""Done, and written in the handler's transaction: there is nothing left to write."""


class PendingSettlement(NamedTuple):
    """A task whose outcome is decided, but not written yet."""

    task: LeasedTask
    settlement: Settlement | Done

    @property
    def is_release(self) -> bool:
        """Whether the task is released, and not handled."""
        settlement = self.settlement
        return not isinstance(settlement, Done) and settlement.outcome is Outcome.RELEASED


class SettlementSink(Protocol):
    """Where the completer puts settlements: one of the two buffers."""

    def put(self, pending: PendingSettlement) -> None:
        """Add a settlement."""


class SettlementBuffer:
    """Collects settlements from many threads for the thread that writes them.

    Not a ``SimpleQueue``: its ``get`` can wait for ever if the timeout is so short that it has
    passed before the wait begins (seen on CPython 3.11).
    """

    def __init__(self, *, wait_sec: float, limit: int) -> None:
        self._wait_sec = wait_sec
        self._limit = limit if wait_sec else 1
        self._items: deque[PendingSettlement] = deque()
        self._awaited = 0  # How many settlements the writer waits for; 0: it is not waiting.
        self._closed = False
        self._changed = threading.Condition()

    def put(self, pending: PendingSettlement) -> None:
        """Add a settlement; wake the writer for the first one, and for a full batch."""
        self._items.append(pending)  # Without the lock, which the writer may hold for long.
        if self._awaited and (self._awaited == 1 or len(self._items) >= self._limit):
            with self._changed:
                self._changed.notify()

    def close(self) -> None:
        """Let :meth:`take` return what is left, then an empty list."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self) -> list[PendingSettlement]:
        """Wait for a settlement, and a moment longer for others; empty once closed and drained."""
        with self._changed:
            self._awaited = 1
            self._changed.wait_for(lambda: self._items or self._closed)
            self._awaited = self._limit
            if self._wait_sec:
                self._changed.wait_for(self._is_due, self._wait_sec)
            self._awaited = 0
        count = min(len(self._items), self._limit)
        return [self._items.popleft() for _ in range(count)]

    def _is_due(self) -> bool:
        return self._closed or len(self._items) >= self._limit


class AsyncSettlementBuffer:
    """The same for the coroutines of one event loop."""

    def __init__(self, *, wait_sec: float, limit: int) -> None:
        self._wait_sec = wait_sec
        self._limit = limit if wait_sec else 1
        self._items: deque[PendingSettlement] = deque()
        self._closed = False
        self._changed = asyncio.Event()  # There is a settlement, or the buffer is closed.
        self._due = asyncio.Event()  # A batch is full, or the buffer is closed.

    def __len__(self) -> int:
        return len(self._items)

    def put(self, pending: PendingSettlement) -> None:
        """Add a settlement."""
        self._items.append(pending)
        self._changed.set()
        if len(self._items) >= self._limit:
            self._due.set()

    def put_back(self, batch: Sequence[PendingSettlement]) -> None:
        """Return a batch whose write was cancelled. Writing it twice does no harm."""
        self._items.extendleft(reversed(batch))
        self._changed.set()

    def close(self) -> None:
        """Let :meth:`take` return what is left, then an empty list."""
        self._closed = True
        self._changed.set()
        self._due.set()

    async def take(self) -> list[PendingSettlement]:
        """Wait for a settlement, and a moment longer for others; empty once closed and drained."""
        while not self._items and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if self._wait_sec and len(self._items) < self._limit and not self._closed:
            self._due.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._due.wait(), self._wait_sec)
        count = min(len(self._items), self._limit)
        return [self._items.popleft() for _ in range(count)]


class Completer:
    """Decides the outcome of each task, and puts its settlement into the buffer.

    The handler, its timeout, a lost lease and a shutdown may all end a task: the first one
    decides. Hooks for events that the handler did not cause run on the ``dispatcher``.
    """

    def __init__(
        self,
        options: WorkerOptions,
        *,
        in_flight: InFlight,
        prefetch: PrefetchController,
        hooks: HookList,
        dispatcher: Dispatcher,
        settlements: SettlementSink,
        unstarted: UnstartedTasks,
    ) -> None:
        self._keep_result = options.keep_result
        self._in_flight = in_flight
        self._prefetch = prefetch
        self._hooks = hooks
        self._dispatcher = dispatcher
        self._settlements = settlements
        self._unstarted = unstarted
        self._verbose = logger.isEnabledFor(logging.DEBUG)

    def complete(
        self,
        task: LeasedTask,
        handler: Handler | None,
        result: Any,
        error: BaseException | None,
        *,
        with_traceback: bool = True,
    ) -> None:
        """Settle a task by how its handler ended, unless its outcome was decided before.

        Args:
            task: The task.
            handler: Its handler, if it was found.
            result: What the handler returned.
            error: What it raised.
            with_traceback: Whether the log has the traceback of the error.
        """
        try:
            self._complete(task, handler, result, error, with_traceback)
        except BaseException:  # User code may raise anything.
            logger.exception(
                "could not settle task %s; it will be redelivered when its lease expires",
                task.claimed.id,
            )
            self._in_flight.conclude(task, returned=True)
            self._in_flight.remove([task])

    def _complete(
        self,
        task: LeasedTask,
        handler: Handler | None,
        result: Any,
        error: BaseException | None,
        with_traceback: bool,  # noqa: FBT001 (an argument of complete)
    ) -> None:
        took_sec = now_sec() - (task.started or now_sec())
        self._prefetch.record_run(took_sec)
        if not self._in_flight.conclude(task, returned=True):
            log_task(
                logging.INFO,
                task.task,
                "handler returned after its outcome was decided; result discarded",
                extra={"discarded": True},
            )
            return
        if task.committed:
            self._report_committed(task, error, took_sec)
            self._settlements.put(PendingSettlement(task, COMMITTED))
            return
        settlement: Settlement | Done = PLAIN_DONE
        if error is None and (self._keep_result or (handler and handler.keep_result)):
            error = check_storable(task.queue, result)
            now, keep = task.queue.clock.now(), task.queue.keeps(task.claimed.id)
            settlement = settle.done(now, result=result, keep=keep)
        if error is not None:
            pending, call_hooks = self._settle_error(
                task, error, took_sec, with_traceback=with_traceback
            )
            call_hooks()
            self._settlements.put(pending)
            return
        if self._verbose:
            log_task(logging.DEBUG, task.task, "done in %.3f s", took_sec)
        if self._hooks:
            self._hooks.call("on_success", task.task, took_sec=took_sec)
        self._settlements.put(PendingSettlement(task, settlement))

    def _report_committed(
        self, task: LeasedTask, error: BaseException | None, took_sec: float
    ) -> None:
        """Report a success that the handler has committed, however the handler ended after it."""
        if error is not None:
            log_task(
                logging.WARNING,
                task.task,
                "done; its handler failed after its transaction was committed: %r",
                error,
                exc_info=error if is_unexpected(error) else None,
            )
        elif self._verbose:
            log_task(logging.DEBUG, task.task, "done in %.3f s", took_sec)
        self._hooks.call("on_success", task.task, took_sec=took_sec)

    def time_out(self, task: LeasedTask) -> None:
        """Fail a task whose handler has reached its timeout."""
        if not self._overtake(task):
            return
        limit_sec = (task.deadline or 0.0) - (task.started or 0.0)
        error = TimeoutError(f"the handler took longer than {limit_sec:g} s")
        if task.committed:
            self._settlements.put(PendingSettlement(task, COMMITTED))
            self._dispatcher.submit(lambda: self._report_committed(task, error, limit_sec))
            return
        pending, call_hooks = self._settle_error(task, error, limit_sec)
        self._settlements.put(pending)
        self._dispatcher.submit(call_hooks)

    def lose(self, task: LeasedTask) -> None:
        """Drop a task whose lease was lost; the result of its handler will be discarded."""
        if not task.committed and self._overtake(task):
            self._in_flight.remove([task])
            self._dispatcher.submit(lambda: self._report_lost(task))

    def _overtake(self, task: LeasedTask) -> bool:
        """Interrupt a handler; return whether it had not ended before."""
        first = self._in_flight.conclude(task)  # Before the interrupt, which may end it at once.
        if task.concluded:  # Otherwise its handler commits it, and may continue.
            task.interrupt()
        return first

    def _report_lost(self, task: LeasedTask) -> None:
        if task.cancelled:
            log_task(
                logging.INFO,
                task.task,
                "cancelled; its handler was asked to stop",
                extra={"cancelled": True},
            )
            self._hooks.call("on_cancel", task.task)
            return
        if task.started is None:
            self._unstarted.add(task)
        else:
            log_task(
                logging.WARNING,
                task.task,
                "lease lost; the result of its handler will be discarded",
                extra={"lease_lost": True},
            )
        self._hooks.call("on_lease_lost", task.task)

    def release(self, task: LeasedTask) -> bool:
        """Release a task with its attempt refunded; return whether its outcome was undecided."""
        if not self._in_flight.conclude(task):
            return False
        if task.committed:
            self._report_committed(task, None, task.running_sec)
            self._settlements.put(PendingSettlement(task, COMMITTED))
            return True
        self._hooks.call("on_release", task.task)
        settlement = settle.released(task.task, task.queue.clock.now(), front=False)
        self._settlements.put(PendingSettlement(task, settlement))
        return True

    def release_lapsed(self, task: LeasedTask) -> None:
        """Release a task that must not start because its lease has expired.

        If no other worker has claimed it, it is available at once, with its attempt refunded;
        otherwise the fence rejects the release.
        """
        if self.release(task):
            self._unstarted.add(task)

    def _settle_error(
        self,
        leased: LeasedTask,
        error: BaseException,
        took_sec: float,
        *,
        with_traceback: bool = True,
    ) -> tuple[PendingSettlement, Callable[[], None]]:
        """Return the settlement for an error, and the call that notifies the hooks."""
        task, settings, now = leased.task, leased.queue.settings, leased.queue.clock.now()
        try:
            settlement = settlement_for(
                task, error, leased.exception_policy, now=now, settings=settings
            )
        except Exception as exc:  # noqa: BLE001 (a subclass may break what Retry or Fail promise)
            log_task(
                logging.ERROR,
                task,
                "%s has no usable outcome and counts as an error: %r",
                type(error).__name__,
                exc,
                exc_info=exc,
            )
            settlement = plain_retry(task, error, now=now, settings=settings)
        dead = settlement.status is TaskStatus.FAILED
        if not settlement.outcome.is_refunded:
            log_task(
                logging.WARNING,
                task,
                "attempt %d of %d failed; %s: %r",
                task.attempts,
                task.max_attempts,
                "moved to the dead letters" if dead else "it will be retried",
                error,
                exc_info=error if with_traceback and is_unexpected(error) else None,
                extra={"dead_letter": dead},
            )
        hook = "on_failure" if dead else "on_retry"
        call_hooks = partial(self._hooks.call, hook, task, error, took_sec=took_sec)
        return PendingSettlement(leased, settlement), call_hooks


class SettlementWriter:
    """Writes the settlements of one run.

    Attributes:
        handled: How many tasks this run has handled.
        released: How many tasks this run has released.
    """

    def __init__(
        self, stop: StopRequest, in_flight: InFlight, hooks: HookList, unstarted: UnstartedTasks
    ) -> None:
        self._stop = stop
        self._in_flight = in_flight
        self._hooks = hooks
        self._unstarted = unstarted
        self.handled = self.released = 0

    def write(self, batch: Sequence[PendingSettlement]) -> SettleEffects[None]:
        """Settle every task of a batch, or leave it to its lease."""
        for queue, group in by_queue(batch).items():
            try:
                yield from self._write(queue, group)
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException:
                logger.exception(
                    "could not settle %d tasks; they will be redelivered when their leases expire",
                    len(group),
                    extra={"unsettled": len(group)},
                )
                self._in_flight.remove(task for task, _ in group)

    def _write(
        self, queue: QueueCore[Any], batch: Sequence[PendingSettlement]
    ) -> SettleEffects[None]:
        leases_end = now_sec() + queue.settings.visibility_timeout.total_seconds()
        while True:
            lost: Sequence[LeaseLost] = ()
            try:
                lost = yield RunOperation(queue, commit(queue, batch))
            except InvalidArgument as exc:
                if parts := storable_parts(batch, exc):
                    for part in parts:
                        yield from self._write(queue, part)
                    return
                logger.error(  # noqa: TRY400 (the message is enough)
                    "could not settle task %s; it will be redelivered when its lease expires: %s",
                    batch[0].task.claimed.id,
                    exc,
                )
            except MicroqueueError as exc:
                if now_sec() <= min(leases_end, self._stop.settle_until):
                    logger.warning(
                        "could not settle %d tasks; next attempt in %g s: %s",
                        len(batch),
                        RETRY_SEC,
                        exc,
                    )
                    yield Sleep(RETRY_SEC)
                    continue
                logger.error(  # noqa: TRY400 (the message is enough)
                    "could not settle %d tasks; they will be redelivered when their leases "
                    "expire: %s",
                    len(batch),
                    exc,
                    extra={"unsettled": len(batch)},
                )
            self._finish(batch, lost)
            return

    def _finish(self, batch: Sequence[PendingSettlement], lost: Sequence[LeaseLost]) -> None:
        """Count a batch, remove it from the table, and report the leases that were lost."""
        if lost:
            by_id = {id_key(task.claimed.id): task for task, _ in batch}
            for error in lost:
                task = by_id[id_key(error.task_id)]
                if task.started is None:
                    self._unstarted.add(task)
                else:
                    log_task(logging.WARNING, task.task, "%s", error, extra={"lease_lost": True})
                self._hooks.call("on_lease_lost", task.task)
        released = sum(one.is_release for one in batch if one[1] is not PLAIN_DONE)
        self.released += released
        self.handled += len(batch) - released
        self._in_flight.remove(task for task, _ in batch)


def by_queue(batch: Sequence[PendingSettlement]) -> dict[QueueCore[Any], list[PendingSettlement]]:
    """Group a batch by queue."""
    first = batch[0].task.queue
    if all(pending[0].queue is first for pending in batch):
        return {first: list(batch)}
    groups: dict[QueueCore[Any], list[PendingSettlement]] = defaultdict(list)
    for pending in batch:
        groups[pending.task.queue].append(pending)
    return groups


def storable_parts(
    batch: Sequence[PendingSettlement], error: InvalidArgument
) -> list[list[PendingSettlement]]:
    """Return what to write in place of a batch that MongoDB cannot store.

    First each settlement alone, so that one does not delay the others; then, for the one that
    cannot be stored, a failure that says so. Empty if that cannot be stored either.
    """
    if len(batch) > 1:
        return [[pending] for pending in batch]
    task, settlement = batch[0]
    error_code = (
        None if isinstance(settlement, Done) or not settlement.error else settlement.error.code
    )
    if error_code == error_codes.UNSTORABLE:
        return []
    now = task.queue.clock.now()
    reason = TaskError(
        message=f"its outcome could not be stored: {error}", code=error_codes.UNSTORABLE, at=now
    )
    return [[PendingSettlement(task, settle.failed(now, reason))]]


def commit(queue: QueueCore[Any], batch: Sequence[PendingSettlement]) -> Operation[list[LeaseLost]]:
    """Write a batch of one queue; return the leases that were lost."""
    now = yield from queue.begin()
    plain = [task.claimed for task, settlement in batch if settlement is PLAIN_DONE]
    others = [
        (task.task, settlement)
        for task, settlement in batch
        if settlement is not PLAIN_DONE and settlement is not COMMITTED
    ]
    return (
        yield from settle_batch(
            plain, others, now=now, settings=queue.settings, keep_done=queue.keeps_done
        )
    )
