"""Call a plain function for a worker of coroutines."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from microqueue.async_queue import AsyncQueue
from microqueue.core import AsyncCore, SyncCore
from microqueue.worker.completer import AsyncSettlementBuffer, PendingSettlement
from microqueue.worker.core import WorkerCore
from microqueue.worker.effects import Do, Step, perform_async
from microqueue.worker.handlers import AsyncContext, Context, Handler, close_unrun
from microqueue.worker.hooks import Hooks
from microqueue.worker.in_flight import InFlightTask, now_sec, split
from microqueue.worker.shutdown import CLOSING_WAIT_SEC, join_task, join_thread
from microqueue.worker.threads import DaemonThread, run_in_thread
from microqueue.worker.waiting import AsyncWorkWaiter


async def call_in_thread(
    handler: Handler, held: InFlightTask, queue: SyncCore[Any], expect: Callable[[float], None]
) -> Any:
    """Call the function in a thread; if it gives a coroutine, await that here."""
    # Nothing ends a thread: it is only told, and keeps its place until it returns.
    cancel, held.on_interrupt = held.on_interrupt, None
    result = await run_in_thread(
        handler.call, held.claimed.payload, lambda: Context(held, queue, expect)
    )
    if inspect.isawaitable(result):
        if held.cancelled:
            close_unrun(result)
            raise asyncio.CancelledError
        held.on_interrupt = cancel
        result = await result
    return result


logger = logging.getLogger("microqueue.worker")


class AsyncWorker(WorkerCore[AsyncCore[Any]]):
    """Claims tasks in batches, awaits their handlers, and settles in batches.

    As :class:`Worker`, awaited. Plain functions are run in threads. A handler that blocks the loop
    keeps its leases, which are renewed by a thread.
    """

    def __init__(
        self,
        queue: AsyncQueue[Any] | Sequence[AsyncQueue[Any]],
        handler: Any,
        *,
        hooks: Sequence[Hooks] = (),
        worker_id: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(queue, handler, hooks=hooks, worker_id=worker_id, options=options)
        self._waiting: deque[InFlightTask] = deque()
        self._running: dict[asyncio.Task[None], InFlightTask] = {}
        self._settlements = self._new_settlement_buffer()
        self._room = Step(Do.AWAIT_ROOM)  # What the claims wait for, when they do.
        self._changed = asyncio.Event()  # There is room, or stop was called.
        self._told = asyncio.Event()  # To stop.
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: AsyncWorkWaiter | None = None

    async def run(self, *, burst: bool = False) -> int:
        """Work until :meth:`stop`; give how many tasks were handled.

        With ``burst``, end when nothing is ready and nothing is running. Cancelling the
        coroutine ends it as :meth:`stop` does, without the grace.
        """
        with self._one_run():
            return await self._run(burst=burst)

    async def _run(self, *, burst: bool) -> int:
        self._loop = asyncio.get_running_loop()
        # Of this loop: the former run may have had another one.
        self._changed, self._told = asyncio.Event(), asyncio.Event()
        self._closing = False
        self._settlements = self._new_settlement_buffer()
        self._running = {}
        self._waiter = None
        leases = self._leases = self._new_lease_service(
            on_timeout=lambda held: self._from_thread(self._time_out, held),
            on_lost=lambda held: self._from_thread(self._lose, held),
        )
        given_up = False  # By a cancellation, of which the thread that waits would not know.

        def stopping() -> bool:
            return self._stopping or given_up

        try:
            if not await run_in_thread(partial(self._register, leases, stopping, burst=burst)):
                return 0
            leases.start()
            waiter = self._waiter = AsyncWorkWaiter(leases.lease_queues)
        except BaseException:
            given_up = True
            DaemonThread(leases.let_go, name="microqueue-end").start()
            raise
        settler = asyncio.create_task(self._settle_forever())
        # A task of its own: an answer that does not come must not hold up the end.
        claimer = asyncio.create_task(self._claim_forever(waiter, burst=burst))
        try:
            await self._await_stop(claimer)
        except asyncio.CancelledError:
            self._stop_by = now_sec()
            raise
        finally:
            self.stop()
            try:
                await self._finish_running()
                await self._end(claimer, settler)
            except asyncio.CancelledError:  # Once more: nothing is waited for.
                claimer.cancel()
                settler.cancel()
                DaemonThread(leases.let_go, name="microqueue-end").start()
                raise
        if claimer.done() and not claimer.cancelled():
            claimer.result()
        return self._settlement_writer.handled

    def stop(self, *, immediately: bool = False) -> None:
        """End :meth:`run`, as :meth:`Worker.stop` does: from any thread or a signal handler."""
        self._ask_to_stop(immediately=immediately)
        if self._loop is not None:
            with suppress(RuntimeError):  # It may have ended.
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self._stopping:  # That was an earlier run.
            return
        self._told.set()
        self._changed.set()
        if self._waiter is not None:
            self._waiter.wake()

    def _from_thread(self, function: Any, held: InFlightTask) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(function, held)

    # Claim

    async def _await_stop(self, claimer: asyncio.Task[None]) -> None:
        told = asyncio.create_task(self._told.wait())
        try:
            await asyncio.wait([claimer, told], return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()

    async def _claim_forever(self, waiter: AsyncWorkWaiter, *, burst: bool) -> None:
        def stopping() -> bool:
            return self._stopping

        async def do(step: Step) -> Any:
            if step.do is Do.SLEEP:
                return await waiter.sleep(step.seconds)
            return await self._do(step)

        steps = self._claiming(
            stopping, self._start, self._withdraw, self._settle_later, burst=burst
        )
        try:
            await perform_async(steps, do)
        finally:
            self._hand_back_waiting()
            waiter.close()

    async def _do(self, step: Step) -> Any:
        match step.do:
            case Do.RUN:
                return await step.queue.run(step.operation)
            case Do.AWAIT_ROOM:
                self._room = step
                if not self._has_room():
                    await self._wait_for_change(step.seconds)
            case Do.PAUSE:
                await asyncio.sleep(step.seconds)
        return None

    def _has_room(self) -> bool:
        return self._in_flight.has_room(unfinished=self._room.limit, held=self._room.most)

    async def _wait_for_change(self, seconds: float) -> None:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return

    # Run

    def _start(self, held: Sequence[InFlightTask]) -> None:
        self._waiting.extend(held)
        if self._stopping:
            self._hand_back_waiting()
        else:
            self._start_waiting()

    def _withdraw(self, unwanted: Callable[[InFlightTask], bool]) -> list[InFlightTask]:
        out, left = split(self._waiting, unwanted)
        self._waiting = deque(left)
        return out

    def _start_waiting(self) -> None:
        """Start handlers for what waits, as many as may run at the same time."""
        while self._waiting and len(self._running) < self.options.concurrency:
            held = self._waiting.popleft()
            if held.concluded:  # Its lease was lost while it waited.
                continue
            running = asyncio.create_task(self._handle(held))
            held.on_interrupt = running.cancel
            self._running[running] = held
            running.add_done_callback(self._handler_ended)

    def _handler_ended(self, running: asyncio.Task[None]) -> None:
        self._running.pop(running, None)  # It may be from an earlier run.
        if not self._closing:
            self._start_waiting()
        if self._has_room():
            self._changed.set()

    async def _handle(self, held: InFlightTask) -> None:
        # Here and not when it was put on the loop, which others may have blocked meanwhile.
        if not self._may_start(held, self._settle_later):
            held.on_interrupt = None
            return
        handler: Handler | None = None
        result: Any = None
        error: BaseException | None = None
        try:
            handler, renew_by = self._begin_handling(held), self._leases.expect_renewal
            if handler.is_async:
                result = await handler.call(
                    held.claimed.payload, lambda: AsyncContext(held, held.queue, renew_by)
                )
            else:
                lease_queue = self._leases.lease_queues[held.queue]
                result = await call_in_thread(handler, held, lease_queue, renew_by)
            if result is not None:
                handler.check_ran(result)
        except BaseException as exc:  # noqa: BLE001 (whatever it is, the task must be settled)
            error = exc
        held.on_interrupt = None
        if isinstance(error, asyncio.CancelledError) and self._was_ended(held):
            self._settle_later(self._completer.hand_back(held))
            self._in_flight.conclude(held, returned=True)
            return
        self._settle_later(self._completer.ended(held, handler, result, error))

    def _was_ended(self, held: InFlightTask) -> bool:
        """Tell whether a handler was cancelled from outside, as all are when the loop ends."""
        running = asyncio.current_task()
        return running is not None and bool(running.cancelling()) and not held.cancelled

    def _time_out(self, held: InFlightTask) -> None:
        if self._completer.overtake(held):
            finished, tell_hooks = self._completer.timed_out(held)
            self._settle_later(finished)
            tell_hooks()

    def _lose(self, held: InFlightTask) -> None:
        if self._completer.lose(held):
            self._completer.tell_lost(held)

    # Settle

    def _settle_later(self, finished: PendingSettlement | None) -> None:
        if finished is not None:
            self._settlements.put(finished)

    async def _settle_forever(self) -> None:
        while batch := await self._settlements.take():
            try:
                await perform_async(self._settlement_writer.steps(batch), self._do)
            except asyncio.CancelledError:
                self._settlements.put_back(batch)
                raise
            if self._has_room():
                self._changed.set()

    def _new_settlement_buffer(self) -> AsyncSettlementBuffer:
        wait_sec = self.options.flush_interval.total_seconds()
        return AsyncSettlementBuffer(wait_sec=wait_sec, limit=self.options.flush_limit)

    # End

    def _hand_back_waiting(self) -> None:
        self._waiting.extend(self._isolation.withdraw(lambda _held: True))
        while self._waiting:
            self._settle_later(self._completer.hand_back(self._waiting.popleft()))

    async def _finish_running(self) -> None:
        """Hand back what has not started, let what runs finish, then hand back the rest."""
        self._hand_back_waiting()
        self._tell_stopping()
        # A handler whose task was settled by its timeout, or taken away, is not waited for.
        while now_sec() < self._stop_by and (
            running := [one for one, held in self._running.items() if not held.concluded]
        ):
            await asyncio.wait(running, timeout=CLOSING_WAIT_SEC)
        for held in self._in_flight.snapshot():
            if not held.concluded:
                self._settle_later(self._completer.hand_back(held))
                held.interrupt()

    async def _end(self, claimer: asyncio.Task[None], settler: asyncio.Task[None]) -> None:
        """Wait for what is under way and say goodbye, unless the server takes too long."""
        end_by = self._end_from(now_sec())
        claimed = await join_task(claimer, end_by)
        self._closing = True
        self._settlements.close()
        settled = await join_task(settler, end_by) and claimed
        if settled and len(self._settlements):  # It was cancelled, as all is when the loop ends.
            settler = asyncio.create_task(self._settle_forever())
            settled = await join_task(settler, end_by)
        leases, waiter = self._leases, self._waiter

        async def leave() -> None:
            await run_in_thread(leases.stop)
            if not len(self._in_flight):  # Else the sweeper takes back what is held.
                await perform_async(self._leave(end_by), self._do)

        def close() -> None:
            leases.stop()
            if waiter is not None:
                waiter.wait_closed()
            leases.close()

        left = False
        if not settled:
            logger.error("ending without an answer; leases are left to expire")
            claimer.cancel()
            settler.cancel()
            self._in_flight.remove(self._in_flight.snapshot())
        elif not (left := await join_task(asyncio.create_task(leave()), end_by)):
            logger.warning("the end of this worker could not be told: there is no answer")
        # A thread of its own: the loop may end before the server has answered.
        closing = DaemonThread(close, name="microqueue-end")
        closing.start()
        if left:
            await run_in_thread(join_thread, closing, end_by)
