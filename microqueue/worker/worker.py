"""The worker that runs handlers in threads."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context as Variables
from contextvars import copy_context
from functools import partial
from typing import Any, Unpack

from microqueue.core import SyncCore
from microqueue.effects import perform
from microqueue.errors import InvalidArgument
from microqueue.queue import Queue
from microqueue.worker.completer import SettlementBuffer
from microqueue.worker.core import WorkerCore
from microqueue.worker.effects import (
    Effect,
    JoinFetcher,
    JoinHooks,
    JoinSettler,
    JoinThread,
    Register,
    ReleaseUnstarted,
    Run,
    Sleep,
    Start,
    StartThreads,
    WaitForHandlers,
    WaitForRoom,
    WaitForStop,
    WaitForWork,
    Withdraw,
)
from microqueue.worker.handlers import Context, Handler
from microqueue.worker.hooks import HookDispatcher, Hooks
from microqueue.worker.in_flight import InFlightTask, split
from microqueue.worker.options import WorkerOptionsDict
from microqueue.worker.shutdown import SIGNAL_WAIT_SEC, StopRequest
from microqueue.worker.threads import DaemonThread, join_thread
from microqueue.worker.waiting import WorkWaiter


class TaskBuffer:
    """The claimed tasks that wait for a free thread, first in, first out."""

    def __init__(self) -> None:
        self._waiting: deque[InFlightTask] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._closed = False

    def extend(self, tasks: Iterable[InFlightTask]) -> bool:
        """Add tasks and wake threads for them; return ``False`` if the buffer is closed."""
        with self._changed:
            if self._closed:
                return False
            self._waiting.extend(tasks)
            if self._idle:
                self._changed.notify(len(self._waiting))
            return True

    def take(self) -> InFlightTask | None:
        """Wait for a task; ``None`` once the buffer is closed."""
        while True:
            try:
                return self._waiting.popleft()  # Most often there is one, and no lock is needed.
            except IndexError:
                pass
            with self._changed:
                if self._closed:
                    return None
                if not self._waiting:
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1

    def withdraw(self, unwanted: Callable[[InFlightTask], bool]) -> list[InFlightTask]:
        """Remove the unwanted tasks, and return them."""
        with self._changed:
            # A thread that finds the buffer empty for a moment waits for the lock.
            removed, left = split(self._take_all(), unwanted)
            self._waiting.extend(left)
            return removed

    def close(self) -> list[InFlightTask]:
        """Let the threads end, and return the tasks that none has taken."""
        with self._changed:
            left = self._take_all()
            self._closed = True
            self._changed.notify_all()
            return left

    def _take_all(self) -> list[InFlightTask]:
        left = []
        while self._waiting:
            try:
                left.append(self._waiting.popleft())
            except IndexError:  # A thread was faster.
                break
        return left


class Worker(WorkerCore[SyncCore[Any]]):
    """Claims tasks in batches, runs their handlers in threads, and settles in batches."""

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
            handler: A function of the payload, or a :class:`Tasks` registry.
            hooks: Called when tasks start and end.
            worker_id: The name under which tasks are claimed; unique by default.
            **options: The fields of :class:`WorkerOptions`.

        Raises:
            InvalidArgument: An option is not valid, or the handler is a coroutine function.
        """
        super().__init__(queue, handler, hooks=hooks, worker_id=worker_id, options=options)
        if names := self._router.coroutines():
            raise InvalidArgument(
                f"handler={handler!r} has coroutine functions, {', '.join(names)}; use AsyncWorker",
                argument="handler",
                value=handler,
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
            self._buffer = TaskBuffer()
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
                name="microqueue-claims",
            )
            self._settling = DaemonThread(
                partial(self._settle_forever, self._settlements), name="microqueue-settler"
            )
            perform(self._run_effects(burst=burst), self._perform_run)
            if self._fetching.error is not None:
                raise self._fetching.error
            return self._writer.handled

    def stop(self, *, immediately: bool = False) -> None:
        """End :meth:`run`, from any thread or from a signal handler.

        No more tasks are claimed. Tasks that have not started are released at once. Running
        handlers may finish within the ``grace`` option; after that their tasks are released with
        the attempt refunded.

        Args:
            immediately: Skip the grace.
        """
        self._stop.request(immediately=immediately)

    def _perform(self, effect: Effect) -> Any:
        match effect:
            case Run():
                return effect.queue.run(effect.operation)
            case Sleep():
                time.sleep(effect.seconds)
            case WaitForRoom():
                self._in_flight.wait_for_room(
                    unfinished=effect.unfinished, total=effect.total, timeout_sec=effect.seconds
                )
        return None

    def _perform_run(self, effect: Effect) -> Any:
        match effect:
            case Register():
                return self._register(self._stop, effect.burst)
            case StartThreads():
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
            case JoinSettler():
                self._leases.stop_timeouts()
                self._settlements.close()
                return join_thread(self._settling, effect.deadline)
            case JoinThread():
                return join_thread(effect.thread, effect.deadline)
            case JoinHooks():
                self._dispatcher.close()
                join_thread(self._dispatcher.thread, effect.deadline)
        return None

    def _start_threads(self) -> None:
        self._leases.start()
        self._waiter = WorkWaiter(self._leases.queues)
        handlers = [
            DaemonThread(
                partial(self._handle_forever, self._buffer, copy_context()), name=f"microqueue-{n}"
            )
            for n in range(self._options.concurrency)
        ]
        for thread in (self._dispatcher.thread, self._settling, *handlers, self._fetching):
            thread.start()

    def _fetch_forever(self, stop: StopRequest, buffer: TaskBuffer, *, burst: bool) -> None:
        waiter = self._waiter
        if waiter is None:
            raise AssertionError  # It was created before this thread was started.

        def perform_one(effect: Effect) -> Any:
            match effect:
                case Start():
                    if not buffer.extend(effect.tasks):  # The worker has been stopped.
                        self._release(effect.tasks)
                case Withdraw():
                    return buffer.withdraw(effect.unwanted)
                case WaitForWork():
                    return waiter.wait(effect.seconds, stopping=lambda: stop.requested)
                case _:
                    return self._perform(effect)
            return None

        try:
            perform(self._fetcher.fetch(stop, burst=burst), perform_one)
        finally:
            waiter.close()

    def _settle_forever(self, settlements: SettlementBuffer) -> None:
        writer = self._writer
        while batch := settlements.take():
            perform(writer.write(batch), self._perform)

    def _handle_forever(self, buffer: TaskBuffer, variables: Variables) -> None:
        while (task := buffer.take()) is not None:
            if self._may_start(task):
                # Each handler has its own context variables.
                variables.copy().run(self._handle, task)

    def _handle(self, task: InFlightTask) -> None:
        handler: Handler | None = None
        result: Any = None
        error: BaseException | None = None
        try:
            handler = self._begin(task)
            result = handler.call(
                task.claimed.payload,
                lambda: Context(task, task.queue, self._leases.expect_renewal),
            )
            if result is not None:
                handler.check_ran(result)
        except BaseException as exc:  # noqa: BLE001 (the task must be settled in any case)
            error = exc
        if os.getpid() != self._pid:  # The handler forked, and this is the child: not a worker.
            os._exit(0 if error is None else 1)
        self._completer.complete(task, handler, result, error)

    def _release(self, tasks: Iterable[InFlightTask]) -> None:
        for task in tasks:
            self._completer.release(task)

    def _give_up(self) -> None:
        self._buffer.close()
        self._settlements.close()
        self._dispatcher.close()
        super()._give_up()
