"""The worker that runs handlers in threads."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context as Variables
from contextvars import copy_context
from functools import partial
from typing import Any, Unpack, assert_never

from microqueue.core import SyncCore
from microqueue.effect_runner import perform
from microqueue.errors import InvalidArgument
from microqueue.hooks import Hooks
from microqueue.operations.call import reporting
from microqueue.queue import Queue
from microqueue.worker.batches import Batch, BatchBuffer
from microqueue.worker.completer import SettlementBuffer
from microqueue.worker.context import BatchContext, Context
from microqueue.worker.core import WorkerCore
from microqueue.worker.daemon_threads import DaemonThread, join_thread
from microqueue.worker.dispatcher import HookDispatcher
from microqueue.worker.effects import (
    FetchEffect,
    JoinFetcher,
    JoinHooks,
    JoinSettlementWriter,
    JoinThread,
    PutInBuffer,
    Register,
    ReleaseUnstarted,
    RunEffect,
    RunOperation,
    SettleEffect,
    Sleep,
    StartParts,
    WaitForHandlers,
    WaitForRoom,
    WaitForStop,
    WaitForWork,
    Withdraw,
)
from microqueue.worker.handlers import COROUTINE, Handler
from microqueue.worker.in_flight import LeasedTask, split
from microqueue.worker.options import WorkerOptionsDict
from microqueue.worker.shutdown import SIGNAL_WAIT_SEC, StopRequest
from microqueue.worker.waiting import WorkWaiter


class TaskBuffer:
    """The claimed tasks that wait for a free thread, first in, first out."""

    def __init__(self) -> None:
        self._waiting: deque[LeasedTask] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._closed = False

    def extend(self, tasks: Iterable[LeasedTask]) -> bool:
        """Add tasks and wake a thread for them; return ``False`` if the buffer is closed.

        Each thread that wakes up wakes the next one while tasks are left. So no more threads
        wake up than there are tasks.
        """
        with self._changed:
            if self._closed:
                return False
            self._waiting.extend(tasks)
            if self._idle:
                self._changed.notify()
            return True

    def take(self) -> LeasedTask | None:
        """Wait for a task; ``None`` once the buffer is closed."""
        was_idle = False
        while True:
            try:
                task = self._waiting.popleft()  # Most often there is one, and no lock is needed.
            except IndexError:
                pass
            else:
                if was_idle and self._waiting:
                    with self._changed:
                        self._changed.notify()
                return task
            with self._changed:
                if self._closed:
                    return None
                if not self._waiting:
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                    was_idle = True

    def withdraw(self, unwanted: Callable[[LeasedTask], bool]) -> list[LeasedTask]:
        """Remove the unwanted tasks, and return them."""
        with self._changed:
            # A thread that finds the buffer empty for a moment waits for the lock.
            removed, left = split(self._take_all(), unwanted)
            self._waiting.extend(left)
            return removed

    def close(self) -> list[LeasedTask]:
        """Let the threads end, and return the tasks that none has taken."""
        with self._changed:
            left = self._take_all()
            self._closed = True
            self._changed.notify_all()
            return left

    def _take_all(self) -> list[LeasedTask]:
        left: list[LeasedTask] = []
        with suppress(IndexError):  # Threads also take tasks, without the lock.
            while True:
                left.append(self._waiting.popleft())
        return left


class Worker(WorkerCore[SyncCore[Any]]):
    """Claims tasks in batches, runs their handlers in threads, and settles in batches."""

    _kind_of_queue = Queue
    _instead = "give a Queue, or a list of them; for an AsyncQueue there is AsyncWorker"

    def __init__(
        self,
        queue: Queue[Any] | Sequence[Queue[Any]],
        handler: Any,
        *,
        hooks: Sequence[Hooks] = (),
        worker_id: str | None = None,
        **options: Unpack[WorkerOptionsDict],
    ) -> None:
        """Create a worker; :meth:`run` starts it.

        Args:
            queue: One queue, or several: the first one that has a task goes first.
            handler: A function of the payload, or a :class:`Tasks` registry. With the option
                ``batch``, a function of a list of tasks.
            hooks: Called when tasks start and end.
            worker_id: The name under which tasks are claimed; unique by default.
            **options: The fields of :class:`WorkerOptions`.

        Raises:
            InvalidArgument: An argument is not valid, or the handler is a coroutine function.
        """
        super().__init__(queue, handler, hooks=hooks, worker_id=worker_id, options=options)
        if names := self._router.coroutines():
            raise InvalidArgument(
                f"handler={handler!r} has coroutine functions, {', '.join(names)}; use AsyncWorker",
                argument="handler",
                value=handler,
                code=COROUTINE,
            )
        self._pid = os.getpid()

    def run(self, *, burst: bool = False) -> int:
        """Process tasks until :meth:`stop`.

        Args:
            burst: Return as soon as no task is ready or running.

        Returns:
            How many tasks were handled.

        Raises:
            AlreadyRunning: The worker is already running.
            MicroqueueError: In a burst, MongoDB did not answer.
        """
        with self._one_run():
            self._pid = os.getpid()
            self._buffer = self._new_buffer()
            self._settlements = SettlementBuffer(
                wait_sec=self._options.flush_interval.total_seconds(),
                limit=self._options.flush_limit,
            )
            self._dispatcher = HookDispatcher()
            self._assemble(self._settlements, self._dispatcher, lambda call, task: call(task))
            # Daemons: a handler that never returns, or a server that never answers, must neither
            # keep the process alive nor delay the end.
            self._fetching = DaemonThread(
                partial(self._fetch_forever, self._stop, self._buffer, burst=burst),
                name="microqueue-fetcher",
            )
            self._writing = DaemonThread(
                partial(self._write_settlements, self._settlements),
                name="microqueue-settlement-writer",
            )
            perform(self._run_effects(burst=burst), self._perform_run)
            if self._fetching.error is not None:
                raise self._fetching.error
            return self._writer.handled

    def _new_buffer(self) -> TaskBuffer | BatchBuffer:
        if self._options.batch is None:
            return TaskBuffer()
        return BatchBuffer(
            size=self._options.batch, wait_sec=self._options.batch_wait.total_seconds()
        )

    def stop(self, *, immediately: bool = False) -> None:
        """End :meth:`run`, from any thread or from a signal handler.

        No more tasks are claimed. Tasks that have not started are released at once. Running
        handlers may finish within the ``grace`` option; after that their tasks are released with
        the attempt refunded.

        Args:
            immediately: Skip the grace.
        """
        self._stop.request(immediately=immediately)

    def _perform(self, effect: SettleEffect) -> Any:
        match effect:
            case RunOperation():
                report = self._reports.get(effect.queue)
                return effect.queue.run(reporting(effect.operation, report))
            case Sleep():
                time.sleep(effect.seconds)
            case _:
                assert_never(effect)
        return None

    def _perform_run(self, effect: RunEffect) -> Any:
        match effect:
            case Register():
                return self._register(self._stop, effect.burst)
            case StartParts():
                self._start_threads()
            case WaitForStop():
                while self._fetching.is_alive() and not self._stop.requested:
                    self._fetching.join(SIGNAL_WAIT_SEC)
            case ReleaseUnstarted():
                self._release(self._buffer.close())
            case WaitForHandlers():
                self._in_flight.wait_until_empty(effect.seconds)
            case JoinFetcher():
                return join_thread(self._fetching, effect.deadline)
            case JoinSettlementWriter():
                self._leases.stop_timeouts()
                self._settlements.close()
                return join_thread(self._writing, effect.deadline)
            case JoinThread():
                return join_thread(effect.thread, effect.deadline)
            case JoinHooks():
                self._dispatcher.close()
                join_thread(self._dispatcher.thread, effect.deadline)
            case _:
                assert_never(effect)
        return None

    def _start_threads(self) -> None:
        self._leases.start()
        self._waiter = WorkWaiter(self._leases.lease_queues)
        handlers = [
            DaemonThread(
                partial(self._handle_forever, self._buffer, copy_context()), name=f"microqueue-{n}"
            )
            for n in range(self._options.concurrency)
        ]
        for thread in (self._dispatcher.thread, self._writing, *handlers, self._fetching):
            thread.start()

    def _fetch_forever(
        self, stop: StopRequest, buffer: TaskBuffer | BatchBuffer, *, burst: bool
    ) -> None:
        waiter = self._waiter
        if waiter is None:
            raise AssertionError  # It was created before this thread was started.

        def perform_one(effect: FetchEffect) -> Any:
            match effect:
                case PutInBuffer():
                    if not buffer.extend(effect.tasks):  # The worker has been stopped.
                        self._release(effect.tasks)
                case Withdraw():
                    return buffer.withdraw(effect.unwanted)
                case WaitForWork():
                    return waiter.wait(effect.seconds, stopping=lambda: stop.requested)
                case WaitForRoom():
                    self._in_flight.wait_for_room(
                        unfinished=effect.unfinished, total=effect.total, timeout_sec=effect.seconds
                    )
                case RunOperation() | Sleep():
                    return self._perform(effect)
                case _:
                    assert_never(effect)
            return None

        try:
            perform(self._fetcher.fetch(stop, burst=burst), perform_one)
        finally:
            waiter.close()

    def _write_settlements(self, settlements: SettlementBuffer) -> None:
        writer = self._writer
        while batch := settlements.take():
            perform(writer.write(batch), self._perform)

    def _handle_forever(self, buffer: TaskBuffer | BatchBuffer, variables: Variables) -> None:
        if isinstance(buffer, BatchBuffer):
            while taken := buffer.take():
                variables.copy().run(self._handle_batch, taken)
            return
        while (task := buffer.take()) is not None:
            if self._may_start(task):
                # Each handler has its own context variables.
                variables.copy().run(self._handle, task)

    def _handle(self, task: LeasedTask) -> None:
        handler: Handler | None = None
        result: Any = None
        error: BaseException | None = None
        try:
            handler = self._begin(task)
            if handler.wants_context:
                queue = self._given[task.queue]
                context = self._make_context(Context, task, handler, queue)
                result = handler.function(task.claimed.payload, context=context)
            else:
                result = handler.function(task.claimed.payload)
            if result is not None:
                handler.check_ran(result)
        except BaseException as exc:  # noqa: BLE001 (the task must be settled in any case)
            error = exc
        if os.getpid() != self._pid:  # The handler forked, and this is the child: not a worker.
            os._exit(0 if error is None else 1)
        self._completer.complete(task, handler, result, error)

    def _handle_batch(self, taken: Sequence[LeasedTask]) -> None:
        batch = Batch([task for task in taken if self._may_start(task)])
        if not batch.tasks:
            return
        unused = (self._options.batch or 1) - len(batch.tasks)
        self._add_unused(unused)
        result: Any = None
        error: BaseException | None = None
        handler = self._begin_batch(batch)
        try:
            queue = self._given[batch.leased[0].queue]
            result = handler.call(batch.tasks, lambda: BatchContext(batch, queue))
        except BaseException as exc:  # noqa: BLE001 (the tasks must be settled in any case)
            error = exc
        if os.getpid() != self._pid:  # As for one task.
            os._exit(0 if error is None else 1)
        self._add_unused(-unused)
        batch.complete(self._completer, handler, result, error)

    def _release(self, tasks: Iterable[LeasedTask]) -> None:
        for task in tasks:
            self._completer.release(task)

    def _give_up(self) -> None:
        self._buffer.close()
        self._settlements.close()
        self._dispatcher.close()
        super()._give_up()
