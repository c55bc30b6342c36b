"""Group commit: settlements wait a moment for others, and share a write."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from microqueue.errors import InvalidArgument, InvalidPayload, LeaseLost, MicroqueueError
from microqueue.operations import settle
from microqueue.operations.call import Operation
from microqueue.operations.settle import Settlement, settle_batch
from microqueue.payload import check_encodable
from microqueue.task import Outcome, TaskError, TaskStatus
from microqueue.worker.effects import Do, Step, Steps, run_on
from microqueue.worker.handlers import Handler
from microqueue.worker.hooks import HookList
from microqueue.worker.in_flight import PAUSE_SEC, InFlight, InFlightTask, now_sec
from microqueue.worker.log import UnstartedTasks, logger, tell
from microqueue.worker.options import WorkerOptions
from microqueue.worker.outcomes import Fail, is_unexpected, plain_retry, settlement_for
from microqueue.worker.prefetch import PrefetchController


class PendingSettlement(NamedTuple):
    """A task whose handler is through, and what becomes of it: plainly done, if nothing else."""

    held: InFlightTask
    settlement: Settlement | None = None


class SettlementBuffer:
    """The settlements of many threads that wait for the next write of one.

    Not a ``SimpleQueue``: its ``get`` with a timeout so short that it has passed before the
    wait begins can wait for ever (seen on CPython 3.11).
    """

    def __init__(self, *, wait_sec: float, limit: int) -> None:
        self._wait_sec = wait_sec
        self._limit = limit if wait_sec else 1
        self._items: deque[PendingSettlement] = deque()
        self._hungry = 0  # How many items the writer waits for; 0: it is not waiting.
        self._closed = False
        self._changed = threading.Condition()

    def put(self, finished: PendingSettlement) -> None:
        """Add a settlement; the writer is woken for the first, and when a batch is full."""
        self._items.append(finished)  # Safe without the lock, which the writer may hold long.
        if self._hungry and (self._hungry == 1 or len(self._items) >= self._limit):
            with self._changed:
                self._changed.notify()

    def close(self) -> None:
        """Say that nothing more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self) -> list[PendingSettlement]:
        """Wait for a settlement, and a moment longer for others; nothing at the end."""
        with self._changed:
            self._hungry = 1
            self._changed.wait_for(lambda: self._items or self._closed)
            self._hungry = self._limit
            if self._wait_sec:
                self._changed.wait_for(self._is_due, self._wait_sec)
            self._hungry = 0
        count = min(len(self._items), self._limit)
        return [self._items.popleft() for _ in range(count)]

    def _is_due(self) -> bool:
        return self._closed or len(self._items) >= self._limit


class AsyncSettlementBuffer:
    """The same for coroutines of one loop."""

    def __init__(self, *, wait_sec: float, limit: int) -> None:
        self._wait_sec = wait_sec
        self._limit = limit if wait_sec else 1
        self._items: deque[PendingSettlement] = deque()
        self._closed = False
        self._changed = asyncio.Event()  # There is something, or nothing more will come.
        self._due = asyncio.Event()  # A batch is full, or nothing more will come.

    def __len__(self) -> int:
        return len(self._items)

    def put(self, finished: PendingSettlement) -> None:
        """Add a settlement."""
        self._items.append(finished)
        self._changed.set()
        if len(self._items) >= self._limit:
            self._due.set()

    def put_back(self, batch: Sequence[PendingSettlement]) -> None:
        """Take a batch back whose writing was cancelled; who writes it again does no harm."""
        self._items.extendleft(reversed(batch))
        self._changed.set()

    def close(self) -> None:
        """Say that nothing more will come."""
        self._closed = True
        self._changed.set()
        self._due.set()

    async def take(self) -> list[PendingSettlement]:
        """Wait for a settlement, and a moment longer for others; nothing at the end."""
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
    """Says what becomes of each task, once: whoever is first to conclude it decides."""

    def __init__(
        self,
        options: WorkerOptions,
        *,
        prefetch: PrefetchController,
        in_flight: InFlight,
        hooks: HookList,
        unstarted: UnstartedTasks,
    ) -> None:
        self._keep_result = options.keep_result
        self._prefetch_controller = prefetch
        self._in_flight = in_flight
        self._hooks = hooks
        self._unstarted = unstarted
        self._verbose = logger.isEnabledFor(logging.DEBUG)

    def ended(
        self, held: InFlightTask, handler: Handler | None, result: Any, error: BaseException | None
    ) -> PendingSettlement | None:
        """Completer how a handler ended; nothing if somebody else has concluded the task.

        Whatever happens here, the worker goes on.
        """
        try:
            return self._ended(held, handler, result, error)
        except BaseException as exc:  # noqa: BLE001 (the code of users may raise anything)
            event = "task %s cannot be judged, and is left to its lease: %r"
            logger.error(event, held.claimed.id, exc, exc_info=exc)
            self._in_flight.conclude(held, returned=True)
            self._in_flight.remove([held])
            return None

    def _ended(
        self, held: InFlightTask, handler: Handler | None, result: Any, error: BaseException | None
    ) -> PendingSettlement | None:
        took_sec = now_sec() - (held.started or now_sec())
        self._prefetch_controller.learn(took_sec)
        if not self._in_flight.conclude(held, returned=True):
            tell(logging.INFO, held.task, "the late end of its handler is discarded")
            return None
        settlement = None
        if error is None and (self._keep_result or (handler and handler.keep_result)):
            error = unstorable(held.queue, result)
            settlement = settle.done(held.queue.clock.now(), result=result)
        if error is not None:
            finished, tell_hooks = self._failed(held, error, held.queue.clock.now(), took_sec)
            tell_hooks()
            return finished
        if self._verbose:
            tell(logging.DEBUG, held.task, "done in %.3f s", took_sec)
        if self._hooks:
            self._hooks.call("on_success", held.task, took_sec=took_sec)
        return PendingSettlement(held, settlement)

    def overtake(self, held: InFlightTask) -> bool:
        """Tell a handler that it is too late; give whether it had not ended before."""
        first = self._in_flight.conclude(held)  # Before it is told, as it may end at once.
        held.interrupt()
        return first

    def timed_out(self, held: InFlightTask) -> tuple[PendingSettlement, Callable[[], None]]:
        """Settle a task whose handler took too long, and was overtaken; give how hooks are told."""
        limit_sec = (held.deadline or 0.0) - (held.started or 0.0)
        error = TimeoutError(f"the handler took longer than {limit_sec:g} s")
        return self._failed(held, error, held.queue.clock.now(), limit_sec)

    def lose(self, held: InFlightTask) -> bool:
        """Let a task go that was taken away; the result of its handler will be discarded.

        Give whether that is news, and :meth:`tell_lost` is to be called.
        """
        if not self.overtake(held):
            return False
        self._in_flight.remove([held])
        return True

    def tell_lost(self, held: InFlightTask) -> None:
        """Say that a task was taken away, and how."""
        if held.was_cancelled:
            tell(logging.INFO, held.task, "cancelled; its handler is told")
            self._hooks.call("on_cancel", held.task)
        else:
            if held.started is None:
                self._unstarted.add(held)
            else:
                tell(logging.WARNING, held.task, "its lease is lost; its result is discarded")
            self._hooks.call("on_lease_lost", held.task)

    def discard(self, held: InFlightTask) -> PendingSettlement | None:
        """Release a task that is not started because its lease has ended."""
        finished = self.hand_back(held)
        if finished is not None:
            self._unstarted.add(held)
        return finished

    def hand_back(self, held: InFlightTask) -> PendingSettlement | None:
        """Give a task back unharmed, unless it ended by itself."""
        if not self._in_flight.conclude(held):
            return None
        self._hooks.call("on_release", held.task)
        now = held.queue.clock.now()
        return PendingSettlement(held, settle.released(held.task, now, front=False))

    def _failed(
        self, held: InFlightTask, error: BaseException, now: datetime, took_sec: float
    ) -> tuple[PendingSettlement, Callable[[], None]]:
        task, settings = held.task, held.queue.settings
        try:
            settlement = settlement_for(
                task, error, held.exception_policy, now=now, settings=settings
            )
        except Exception as exc:  # noqa: BLE001 (its class is the users' own)
            event = "task %s: %s is no whole outcome, and taken for an error: %r"
            logger.error(event, task.id, type(error).__name__, exc, exc_info=exc)
            settlement = plain_retry(task, error, now=now, settings=settings)
        buried = settlement.changes["status"] == TaskStatus.FAILED
        if settlement.outcome is not Outcome.SNOOZED:
            tell(
                logging.WARNING,
                task,
                "attempt %d of %d failed, %s: %r",
                task.attempts,
                task.max_attempts,
                "and it is a dead letter" if buried else "and it will be tried again",
                error,
                exc_info=error if is_unexpected(error) else None,
            )
        hook = "on_failure" if buried else "on_retry"
        tell_hooks = partial(self._hooks.call, hook, task, error, took_sec=took_sec)
        return PendingSettlement(held, settlement), tell_hooks


def unstorable(queue: Any, result: Any) -> Fail | None:
    """Say why a result cannot be stored, if so; doing the work again would not change that."""
    try:
        check_encodable({"result": result}, queue.collections.codec_options)
    except InvalidPayload as exc:
        return Fail(str(exc), code="invalid_result")
    return None


UNSTORABLE = "unstorable"


class SettlementWriter:
    """Settles for a worker, and counts what it has handled, and handed back.

    ``try_until`` says how long a server that is away is waited for, after a stop.
    """

    def __init__(
        self,
        in_flight: InFlight,
        hooks: HookList,
        unstarted: UnstartedTasks,
        *,
        try_until: Callable[[], float],
    ) -> None:
        self._in_flight = in_flight
        self._hooks = hooks
        self._unstarted = unstarted
        self._try_until = try_until
        self.begin()

    def begin(self) -> None:
        """Count from nothing."""
        self.handled = self.handed_back = 0

    def steps(self, batch: Sequence[PendingSettlement]) -> Steps[None]:
        """Say what to do until every task of a batch is settled, or left to its lease."""
        for queue, group in by_queue(batch).items():
            try:
                yield from self._write(queue, group)
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException:  # noqa: BLE001 (it is logged)
                # Others wait to be settled.
                event = "%d tasks cannot be settled, and are left to their leases"
                logger.exception(event, len(group))
                self._in_flight.remove(held for held, _ in group)

    def _write(self, queue: Any, batch: Sequence[PendingSettlement]) -> Steps[None]:
        lease_ends = now_sec() + queue.settings.visibility_timeout.total_seconds()
        while True:
            lost: Sequence[LeaseLost] = ()
            try:
                lost = yield from run_on(queue, commit(queue, batch))
            except InvalidArgument as exc:
                if parts := storable(batch, exc, queue.clock.now()):
                    for part in parts:
                        yield from self._write(queue, part)
                    return
                logger.error("a task is left to its lease: %s", exc)
            except MicroqueueError as exc:
                if now_sec() <= min(lease_ends, self._try_until()):
                    logger.warning("cannot settle; trying again in %g s: %s", PAUSE_SEC, exc)
                    yield Step(Do.PAUSE, seconds=PAUSE_SEC)
                    continue
                logger.error("%d settlements are given up: %s", len(batch), exc)
            self._account(batch, lost)
            return

    def _account(self, batch: Sequence[PendingSettlement], lost: Sequence[LeaseLost]) -> None:
        """Let a batch go, and tell of the leases that were lost."""
        if lost:
            by_id = {held.claimed.id: held for held, _ in batch}
            for error in lost:
                held = by_id[error.task_id]
                if held.started is None:
                    self._unstarted.add(held)
                else:
                    logger.warning("%s", error)
                self._hooks.call("on_lease_lost", held.task)
        handed_back = sum(
            settlement is not None and settlement.outcome is Outcome.RELEASED
            for _, settlement in batch
        )
        self.handed_back += handed_back
        self.handled += len(batch) - handed_back
        self._in_flight.remove(held for held, _ in batch)


def by_queue(batch: Sequence[PendingSettlement]) -> dict[Any, list[PendingSettlement]]:
    """Sort a batch by the queue that each task came from."""
    groups: dict[Any, list[PendingSettlement]] = defaultdict(list)
    for finished in batch:
        groups[finished.held.queue].append(finished)
    return groups


def storable(
    batch: Sequence[PendingSettlement], error: InvalidArgument, now: datetime
) -> list[list[PendingSettlement]]:
    """Say what to write in place of a batch that MongoDB cannot store.

    One by one, so that one does not hold up the others; and for the one that it is, that its
    outcome could not be stored. Nothing, if not even that can be.
    """
    if len(batch) > 1:
        return [[one] for one in batch]
    settlement = batch[0].settlement
    if settlement and settlement.error and settlement.error.code == UNSTORABLE:
        return []
    message = f"its outcome could not be stored: {error}"
    reason = TaskError(message=message, code=UNSTORABLE, at=now)
    return [[PendingSettlement(batch[0].held, settle.failed(now, reason))]]


def commit(queue: Any, batch: Sequence[PendingSettlement]) -> Operation[list[LeaseLost]]:
    """Write a batch of one queue; give the leases that were lost."""
    now = yield from queue.begin()
    plain = [held.claimed for held, settlement in batch if settlement is None]
    others = [(held.task, settlement) for held, settlement in batch if settlement is not None]
    return (yield from settle_batch(plain, others, now=now, settings=queue.settings))
