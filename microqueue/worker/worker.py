"""The buffer of claimed tasks that wait for a free handler thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context as Variables
from contextvars import copy_context
from functools import partial
from typing import Any

from microqueue.core import SyncCore
from microqueue.errors import InvalidArgument
from microqueue.queue import Queue
from microqueue.worker.completer import PendingSettlement, SettlementBuffer
from microqueue.worker.core import WorkerCore
from microqueue.worker.effects import Do, Step, perform
from microqueue.worker.handlers import Context, Handler
from microqueue.worker.hooks import HookDispatcher, Hooks
from microqueue.worker.in_flight import InFlightTask, now_sec, split
from microqueue.worker.shutdown import CLOSING_WAIT_SEC, SIGNAL_WAIT_SEC, join_thread
from microqueue.worker.threads import DaemonThread
from microqueue.worker.waiting import WorkWaiter


class TaskBuffer:
    """First come, first served; threads wait here only when there is nothing to take."""

    def __init__(self) -> None:
        self._waiting: deque[InFlightTask] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the worker ends."""
        return self._closed

    def extend(self, held: Iterable[InFlightTask]) -> bool:
        """Add tasks, and wake as many threads as can have one; give whether it was open."""
        with self._changed:
            if self._closed:
                return False
            self._waiting.extend(held)
            if self._idle:
                self._changed.notify(len(self._waiting))
            return True

    def take(self) -> InFlightTask | None:
        """Wait for a task; nothing once the buffer is closed and empty."""
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
        """Take out what is not to be started any more, and nobody has taken yet."""
        with self._changed:
            # Who finds nothing in between waits for the lock.
            out, left = split(self._take_all(), unwanted)
            self._waiting.extend(left)
            return out

    def close(self) -> list[InFlightTask]:
        """Let the threads go, and give what nobody has taken."""
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
            except IndexError:  # A thread was quicker.
                break
        return left


logger = logging.getLogger("microqueue.worker")


class Worker(WorkerCore[SyncCore[Any]]):
    """Claims tasks in batches, runs their handlers in threads, and settles in batches.

    ``handler`` is a function of the payload, or ``Tasks``. Of several queues, the first that
    has a task goes first. The options are those of :class:`WorkerOptions`.
    """

    def __init__(
        self,
        queue: Queue[Any] | Sequence[Queue[Any]],
        handler: Any,
        *,
        hooks: Sequence[Hooks] = (),
        worker_id: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(queue, handler, hooks=hooks, worker_id=worker_id, options=options)
        if names := self._router.coroutines():
            raise InvalidArgument(
                f"handler={handler!r} has coroutine functions, {', '.join(names)}; use AsyncWorker",
                argument="handler",
                value=handler,
            )
        self._buffer = TaskBuffer()
        self._settlements = self._new_settlement_buffer()
        self._hook_dispatcher = HookDispatcher()
        self._waiter: WorkWaiter | None = None
        self._pid = os.getpid()

    def run(self, *, burst: bool = False) -> int:
        """Work until :meth:`stop`; give how many tasks were handled.

        With ``burst``, end when nothing is ready and nothing is running.
        """
        with self._one_run():
            return self._run(burst=burst)

    def _run(self, *, burst: bool) -> int:
        self._pid = os.getpid()
        self._buffer, self._settlements, self._hook_dispatcher = (
            TaskBuffer(),
            self._new_settlement_buffer(),
            HookDispatcher(),
        )
        self._waiter = None
        self._leases = self._new_lease_service(on_timeout=self._time_out, on_lost=self._lose)
        # Daemons: a handler that never returns, or a server that never answers, must not keep
        # the process alive, nor hold up the end.
        claimer = DaemonThread(
            partial(self._claim_forever, self._buffer, burst=burst), name="microqueue-claims"
        )
        settler = DaemonThread(
            partial(self._settle_forever, self._settlements), name="microqueue-settler"
        )
        handlers = [
            DaemonThread(
                partial(self._handle_forever, self._buffer, copy_context()), name=f"microqueue-{n}"
            )
            for n in range(self.options.concurrency)
        ]
        if not self._register(self._leases, lambda: self._stopping, burst=burst):
            return 0
        ended = False
        try:
            try:
                self._leases.start()
                for thread in (self._hook_dispatcher.thread, settler, *handlers, claimer):
                    thread.start()
                while claimer.is_alive() and not self._stopping:
                    claimer.join(SIGNAL_WAIT_SEC)
            finally:
                self.stop()
                self._finish_running()
                self._end(claimer, settler)
                ended = True
        except BaseException:
            if not ended:  # Interrupted once more: nothing is waited for.
                self._give_up()
            raise
        if claimer.error is not None:
            raise claimer.error
        return self._settlement_writer.handled

    def stop(self, *, immediately: bool = False) -> None:
        """End :meth:`run`, from any thread or a signal handler.

        Nothing is claimed any more. What has not started is handed back at once; what runs
        may finish within ``grace``, and is then handed back with its attempt refunded. With
        ``immediately`` there is no grace.
        """
        self._ask_to_stop(immediately=immediately)

    # Claim

    def _claim_forever(self, buffer: TaskBuffer, *, burst: bool) -> None:
        waiter = self._waiter = WorkWaiter(self._leases.lease_queues)

        def stopping() -> bool:
            return self._stopping or buffer.closed  # Closed for good, while the flag is reset.

        def start(held: Sequence[InFlightTask]) -> None:
            if not buffer.extend(held):  # The worker was stopped meanwhile.
                self._hand_back(held)

        def do(step: Step) -> Any:
            if step.do is Do.SLEEP:
                return waiter.sleep(step.seconds, until=stopping)
            return self._do(step)

        steps = self._claiming(stopping, start, buffer.withdraw, self._settle_later, burst=burst)
        try:
            with waiter:
                perform(steps, do)
        finally:
            # By this thread, which alone knows what was set aside.
            self._hand_back(self._isolation.withdraw(lambda _held: True))

    def _do(self, step: Step) -> Any:
        match step.do:
            case Do.RUN:
                return step.queue.run(step.operation)
            case Do.AWAIT_ROOM:
                self._in_flight.await_room(
                    unfinished=step.limit, held=step.most, timeout_sec=step.seconds
                )
            case Do.PAUSE:
                time.sleep(step.seconds)
        return None

    # Run

    def _handle_forever(self, buffer: TaskBuffer, variables: Variables) -> None:
        while (held := buffer.take()) is not None:
            if self._may_start(held, self._settle_later):
                # What a handler sets in its context variables is not for the next one to see.
                variables.copy().run(self._handle, held)

    def _handle(self, held: InFlightTask) -> None:
        handler: Handler | None = None
        result: Any = None
        error: BaseException | None = None
        try:
            handler = self._begin_handling(held)
            result = handler.call(
                held.claimed.payload, lambda: Context(held, held.queue, self._leases.expect_renewal)
            )
            if result is not None:
                handler.check_ran(result)
        except BaseException as exc:  # noqa: BLE001 (whatever it is, the task must be settled)
            error = exc
        if os.getpid() != self._pid:  # The handler forked, and this is the child: no worker.
            os._exit(0 if error is None else 1)
        self._settle_later(self._completer.ended(held, handler, result, error))

    # What the handler has not brought about

    def _time_out(self, held: InFlightTask) -> None:
        if self._completer.overtake(held):
            finished, tell_hooks = self._completer.timed_out(held)
            self._settle_later(finished)
            self._hook_dispatcher.put(tell_hooks)

    def _lose(self, held: InFlightTask) -> None:
        if self._completer.lose(held):
            self._hook_dispatcher.put(lambda: self._completer.tell_lost(held))

    # Settle

    def _new_settlement_buffer(self) -> SettlementBuffer:
        wait_sec = self.options.flush_interval.total_seconds()
        return SettlementBuffer(wait_sec=wait_sec, limit=self.options.flush_limit)

    def _settle_later(self, finished: PendingSettlement | None) -> None:
        if finished is not None:
            self._settlements.put(finished)

    def _settle_forever(self, settlements: SettlementBuffer) -> None:
        while batch := settlements.take():
            perform(self._settlement_writer.steps(batch), self._do)

    # End

    def _hand_back(self, unstarted: Iterable[InFlightTask]) -> None:
        for held in unstarted:
            self._settle_later(self._completer.hand_back(held))

    def _finish_running(self) -> None:
        """Hand back what has not started, let what runs finish, then hand back the rest."""
        self._hand_back(self._buffer.close())
        self._tell_stopping()
        # What is held runs, or is about to be settled. A handler that goes on although its task
        # was settled by its timeout, or taken away, is not waited for.
        while len(self._in_flight) and now_sec() < self._stop_by:
            self._in_flight.await_empty(CLOSING_WAIT_SEC)
        for held in self._in_flight.snapshot():
            if not held.concluded:
                self._hand_back([held])  # Before it is told, as it may end at once.
                held.interrupt()

    def _end(self, claimer: DaemonThread, settler: DaemonThread) -> None:
        """Wait for what is under way and say goodbye, unless the server takes too long."""
        end_by = self._end_from(now_sec())
        leases, waiter = self._leases, self._waiter  # Of this run, however long that takes.
        claimed = join_thread(claimer, end_by)
        leases.stop_deadlines()
        self._settlements.close()
        settled = join_thread(settler, end_by) and claimed

        def leave() -> None:
            leases.stop()
            if settled and not len(self._in_flight):  # Else the sweeper takes back what is held.
                perform(self._leave(end_by), self._do)
            if waiter is not None:
                waiter.wait_closed()
            leases.close()

        if not settled:
            logger.error("ending without an answer; leases are left to expire")
            self._in_flight.remove(self._in_flight.snapshot())
        leaving = DaemonThread(leave, name="microqueue-end")
        leaving.start()
        if settled and not join_thread(leaving, end_by):
            logger.warning("the end of this worker could not be told: there is no answer")
        self._hook_dispatcher.close()
        join_thread(self._hook_dispatcher.thread, end_by)

    def _give_up(self) -> None:
        """End all that goes on, and wait for nothing; leases are left to expire."""
        self._buffer.close()
        self._settlements.close()
        self._hook_dispatcher.close()
        DaemonThread(self._leases.let_go, name="microqueue-end").start()
