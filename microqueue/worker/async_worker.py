"""The worker that awaits coroutines on an event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Unpack

from microqueue.async_queue import AsyncQueue
from microqueue.core import AsyncCore
from microqueue.effects import perform_async
from microqueue.worker.completer import AsyncSettlementBuffer
from microqueue.worker.core import WorkerCore
from microqueue.worker.effects import (
    Effect,
    JoinFetcher,
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
from microqueue.worker.handlers import AsyncContext, Context, Handler, close_unrun
from microqueue.worker.hooks import Hooks, InlineDispatcher
from microqueue.worker.in_flight import InFlightTask, split
from microqueue.worker.options import WorkerOptionsDict
from microqueue.worker.shutdown import StopRequest
from microqueue.worker.threads import join_task, join_thread, run_in_thread
from microqueue.worker.waiting import WorkWaiter


class AsyncWorker(WorkerCore[AsyncCore[Any]]):
    """Claims tasks in batches, awaits their handlers, and settles in batches.

    Plain functions run in threads. A handler that blocks the loop keeps its lease, because leases
    are renewed by a thread. Cancelling :meth:`run` ends it as :meth:`stop` does, without the grace.
    """

    def __init__(
        self,
        queue: AsyncQueue[Any] | Sequence[AsyncQueue[Any]],
        handler: Any,
        *,
        hooks: Sequence[Hooks] = (),
        worker_id: str | None = None,
        **options: Unpack[WorkerOptionsDict],
    ) -> None:
        """Create a worker; :meth:`run` starts it.

        Args:
            queue: One queue, or several: the first one that has a task goes first.
            handler: A function or coroutine function of the payload, or a :class:`Tasks` registry.
            hooks: Called when tasks start and end.
            worker_id: The name under which tasks are claimed; unique by default.
            **options: The fields of :class:`WorkerOptions`.

        Raises:
            InvalidArgument: An option is not valid.
        """
        super().__init__(queue, handler, hooks=hooks, worker_id=worker_id, options=options)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, *, burst: bool = False) -> int:
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
            self._loop = asyncio.get_running_loop()
            # All of this is new for each run: an earlier one may have had another loop.
            self._changed, self._stopped = asyncio.Event(), asyncio.Event()
            self._room: WaitForRoom | None = None  # What the fetcher waits for.
            self._waiting: deque[InFlightTask] = deque()
            self._running: dict[asyncio.Task[None], InFlightTask] = {}
            self._closed = False
            self._fetching: asyncio.Task[None] | None = None
            self._settling: asyncio.Task[None] | None = None
            self._settlements = AsyncSettlementBuffer(
                wait_sec=self._options.flush_interval.total_seconds(),
                limit=self._options.flush_limit,
            )
            self._assemble(self._settlements, InlineDispatcher(), self._loop.call_soon_threadsafe)
            await perform_async(self._run_effects(burst=burst), self._perform_run)
            if self._fetching is not None and self._fetching.done():
                with suppress(asyncio.CancelledError):
                    self._fetching.result()
            return self._writer.handled

    def stop(self, *, immediately: bool = False) -> None:
        """End :meth:`run`, from any thread or from a signal handler.

        No more tasks are claimed. Tasks that have not started are released at once. Running
        handlers may finish within the ``grace`` option; after that their tasks are released with
        the attempt refunded.

        Args:
            immediately: Skip the grace.
        """
        stop = self._stop
        stop.request(immediately=immediately)
        if self._loop is not None:
            with suppress(RuntimeError):  # It may be closed.
                self._loop.call_soon_threadsafe(self._wake, stop)

    def _wake(self, stop: StopRequest) -> None:
        if stop is self._stop:  # Not the stop of an earlier run.
            self._stopped.set()
            self._changed.set()
            if self._waiter is not None:
                self._waiter.wake()

    async def _perform(self, effect: Effect) -> Any:
        match effect:
            case Run():
                return await effect.queue.run(effect.operation)
            case Sleep():
                await asyncio.sleep(effect.seconds)
            case WaitForRoom():
                await self._wait_for_room(effect)
        return None

    async def _perform_run(self, effect: Effect) -> Any:
        match effect:
            case Register():
                return await run_in_thread(self._register, self._stop, effect.burst)
            case StartThreads():
                self._leases.start()
                self._waiter = WorkWaiter(self._leases.queues)
                self._settling = asyncio.create_task(self._settle_forever())
                # Its own task: a server that does not answer must not delay the end.
                self._fetching = asyncio.create_task(
                    self._fetch_forever(self._waiter, self._stop, burst=effect.burst)
                )
            case WaitForStop():
                await self._wait_for_stop()
            case ReleaseUnstarted():
                self._release_waiting()
            case WaitForHandlers():
                await self._wait_for_handlers(effect.seconds)
            case JoinFetcher():
                return self._fetching is None or await join_task(self._fetching, effect.deadline)
            case JoinSettler():
                return await self._join_settler(effect.deadline)
            case JoinThread():
                return await run_in_thread(join_thread, effect.thread, effect.deadline)
        return None

    # Fetch

    async def _fetch_forever(self, waiter: WorkWaiter, stop: StopRequest, *, burst: bool) -> None:
        async def perform_one(effect: Effect) -> Any:
            match effect:
                case Start():
                    self._start(effect.tasks)
                case Withdraw():
                    withdrawn, left = split(self._waiting, effect.unwanted)
                    self._waiting = deque(left)
                    return withdrawn
                case WaitForWork():
                    return await run_in_thread(
                        lambda: waiter.wait(effect.seconds, stopping=lambda: stop.requested)
                    )
                case _:
                    return await self._perform(effect)
            return None

        try:
            await perform_async(self._fetcher.fetch(stop, burst=burst), perform_one)
        finally:
            waiter.close()

    async def _wait_for_room(self, room: WaitForRoom) -> None:
        self._room = room
        if not self._has_room():
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), room.seconds)

    def _has_room(self) -> bool:
        room = self._room
        return room is not None and self._in_flight.has_room(
            unfinished=room.unfinished, total=room.total
        )

    # Handle

    def _start(self, tasks: Sequence[InFlightTask]) -> None:
        self._waiting.extend(tasks)
        if self._stop.requested:
            self._release_waiting()
        else:
            self._start_waiting()

    def _start_waiting(self) -> None:
        """Start handlers for waiting tasks, as many as may run at the same time."""
        while self._waiting and len(self._running) < self._options.concurrency:
            task = self._waiting.popleft()
            if task.concluded:  # Its lease was lost while it waited.
                continue
            running = asyncio.create_task(self._handle(task))
            task.on_interrupt = running.cancel
            self._running[running] = task
            running.add_done_callback(self._handler_ended)

    def _handler_ended(self, running: asyncio.Task[None]) -> None:
        self._running.pop(running, None)  # It may be left over from an earlier run.
        if not self._closed:
            self._start_waiting()
        if self._has_room():
            self._changed.set()

    async def _handle(self, task: InFlightTask) -> None:
        # Checked here, and not when the coroutine was created: the loop may have been blocked.
        if not self._may_start(task):
            task.on_interrupt = None
            return
        handler: Handler | None = None
        result: Any = None
        error: BaseException | None = None
        try:
            handler = self._begin(task)
            if handler.is_async:
                result = await handler.call(
                    task.claimed.payload,
                    lambda: AsyncContext(task, task.queue, self._leases.expect_renewal),
                )
            else:
                result = await self._call_in_thread(handler, task)
            if result is not None:
                handler.check_ran(result)
        except BaseException as exc:  # noqa: BLE001 (the task must be settled in any case)
            error = exc
        task.on_interrupt = None
        if isinstance(error, asyncio.CancelledError) and self._was_cancelled_outside(task):
            self._completer.release(task)
            self._in_flight.conclude(task, returned=True)
            return
        self._completer.complete(task, handler, result, error)

    async def _call_in_thread(self, handler: Handler, task: InFlightTask) -> Any:
        """Call a plain function in a thread; if it returns a coroutine, await that here."""
        lease_queue = self._leases.queues[task.queue]
        # A thread cannot be cancelled: it occupies its place until the function returns.
        cancel, task.on_interrupt = task.on_interrupt, None
        result = await run_in_thread(
            handler.call,
            task.claimed.payload,
            lambda: Context(task, lease_queue, self._leases.expect_renewal),
        )
        if inspect.isawaitable(result):
            if task.cancelled:
                close_unrun(result)
                raise asyncio.CancelledError
            task.on_interrupt = cancel
            result = await result
        return result

    def _was_cancelled_outside(self, task: InFlightTask) -> bool:
        """Return whether a handler was cancelled, but not by the worker: its loop is closing."""
        running = asyncio.current_task()
        return running is not None and bool(running.cancelling()) and not task.cancelled

    # Settle

    async def _settle_forever(self) -> None:
        settlements, writer = self._settlements, self._writer
        while batch := await settlements.take():
            try:
                await perform_async(writer.write(batch), self._perform)
            except asyncio.CancelledError:
                settlements.put_back(batch)
                raise
            if self._has_room():
                self._changed.set()

    # Shut down

    async def _wait_for_stop(self) -> None:
        stopped = asyncio.create_task(self._stopped.wait())
        parts = [stopped] if self._fetching is None else [stopped, self._fetching]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()

    def _release_waiting(self) -> None:
        while self._waiting:
            self._completer.release(self._waiting.popleft())

    async def _wait_for_handlers(self, seconds: float) -> None:
        running = [one for one, task in self._running.items() if not task.concluded]
        if running:
            await asyncio.wait(running, timeout=seconds)
        else:  # Delayed by crash isolation; the fetcher releases them when it ends.
            await asyncio.sleep(seconds)

    async def _join_settler(self, deadline: Callable[[], float]) -> bool:
        await run_in_thread(self._leases.stop_timeouts)
        self._closed = True
        self._settlements.close()
        if self._settling is None:
            return True
        if not await join_task(self._settling, deadline):
            return False
        if len(self._settlements):  # It was cancelled: the loop is closing.
            self._settling = asyncio.create_task(self._settle_forever())
            return await join_task(self._settling, deadline)
        return True

    def _abandon(self) -> None:
        for part in (self._fetching, self._settling):
            if part is not None:
                part.cancel()

    def _give_up(self) -> None:
        self._abandon()
        super()._give_up()
