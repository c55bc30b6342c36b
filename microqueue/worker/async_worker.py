"""The worker that awaits coroutines on an event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from math import inf
from typing import Any, Unpack, assert_never

from microqueue.async_queue import AsyncQueue
from microqueue.core import AsyncCore, QueueCore, core_of
from microqueue.effect_runner import perform_async
from microqueue.hooks import Hooks
from microqueue.operations.call import reporting
from microqueue.queue import Queue
from microqueue.worker.batches import Batch, BatchCollector
from microqueue.worker.completer import AsyncSettlementBuffer
from microqueue.worker.context import AsyncBatchContext, AsyncContext, BatchContext, Context
from microqueue.worker.core import WorkerCore
from microqueue.worker.daemon_threads import join_task, join_thread, run_in_thread
from microqueue.worker.dispatcher import InlineDispatcher
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
from microqueue.worker.handlers import Handler, close_unrun
from microqueue.worker.in_flight import LeasedTask, now_sec, split
from microqueue.worker.options import WorkerOptionsDict
from microqueue.worker.shutdown import StopRequest
from microqueue.worker.waiting import WorkWaiter

TURN_SEC = 0.001
"""After so long, handlers that never wait let other coroutines run."""


class AsyncWorker(WorkerCore[AsyncCore[Any]]):
    """Claims tasks in batches, awaits their handlers, and settles in batches.

    Plain functions run in threads. A handler that blocks the loop keeps its lease, because leases
    are renewed by a thread. Cancelling :meth:`run` ends it as :meth:`stop` does, without the grace.
    """

    _kind_of_queue = AsyncQueue
    _instead = "give an AsyncQueue, or a list of them; for a Queue there is Worker"

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
                With the option ``batch``, a function of a list of tasks.
            hooks: Called when tasks start and end.
            worker_id: The name under which tasks are claimed; unique by default.
            **options: The fields of :class:`WorkerOptions`.

        Raises:
            InvalidArgument: An argument is not valid.
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
            self._waiting: deque[LeasedTask] = deque()
            self._batches = self._new_collector()  # In place of the above.
            self._batch_timer: asyncio.TimerHandle | None = None
            self._free_since = 0.0
            self._running: dict[asyncio.Task[None], LeasedTask | Batch] = {}
            self._blocking_queues: dict[QueueCore[Any], Queue[Any]] = {}
            self._closed = False
            self._fetching: asyncio.Task[None] | None = None
            self._writing: asyncio.Task[None] | None = None
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

    def _new_collector(self) -> BatchCollector | None:
        if self._options.batch is None:
            return None
        return BatchCollector(
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

    async def _perform(self, effect: SettleEffect) -> Any:
        match effect:
            case RunOperation():
                report = self._reports.get(effect.queue)
                return await effect.queue.run(reporting(effect.operation, report))
            case Sleep():
                await asyncio.sleep(effect.seconds)
            case _:
                assert_never(effect)
        return None

    async def _perform_run(self, effect: RunEffect) -> Any:
        match effect:
            case Register():
                return await run_in_thread(self._register, self._stop, effect.burst)
            case StartParts():
                self._leases.start()
                self._waiter = WorkWaiter(self._leases.lease_queues)
                self._writing = asyncio.create_task(self._write_settlements())
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
            case JoinSettlementWriter():
                return await self._join_settlement_writer(effect.deadline)
            case JoinThread():
                return await run_in_thread(join_thread, effect.thread, effect.deadline)
            case JoinHooks():
                pass  # The dispatcher has called each hook at once.
            case _:
                assert_never(effect)
        return None

    # Fetch

    async def _fetch_forever(self, waiter: WorkWaiter, stop: StopRequest, *, burst: bool) -> None:
        async def perform_one(effect: FetchEffect) -> Any:
            match effect:
                case PutInBuffer():
                    self._start(effect.tasks)
                case Withdraw():
                    if self._batches is not None:
                        return self._batches.withdraw(effect.unwanted)
                    withdrawn, left = split(self._waiting, effect.unwanted)
                    self._waiting = deque(left)
                    return withdrawn
                case WaitForWork():
                    return await run_in_thread(
                        lambda: waiter.wait(effect.seconds, stopping=lambda: stop.requested)
                    )
                case WaitForRoom():
                    await self._wait_for_room(effect)
                case RunOperation() | Sleep():
                    return await self._perform(effect)
                case _:
                    assert_never(effect)
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

    def _start(self, tasks: Sequence[LeasedTask]) -> None:
        if self._batches is None:
            self._waiting.extend(tasks)
        else:
            self._batches.add(tasks)
        if self._stop.requested:
            self._release_waiting()
        else:
            self._start_waiting()

    def _start_waiting(self) -> None:
        """Start handlers for waiting tasks, as many as may run at the same time."""
        if self._batches is not None:
            self._start_batches(self._batches)
            return
        while len(self._running) < self._options.concurrency:
            task = self._next_waiting()
            if task is None:
                return
            running = asyncio.create_task(self._handle_several(task, self._stop))
            task.on_interrupt = running.cancel
            self._running[running] = task
            running.add_done_callback(self._handler_ended)

    def _next_waiting(self) -> LeasedTask | None:
        while self._waiting:
            task = self._waiting.popleft()
            if not task.concluded:  # Otherwise its lease was lost while it waited.
                return task
        return None

    async def _handle_several(self, first: LeasedTask, stop: StopRequest) -> None:
        """Handle a task, and then others that wait: a new asyncio task for each takes longer.

        The next one gets a new asyncio task if the handler left context variables behind, or was
        cancelled. Other coroutines have their turn every millisecond.
        """
        running = asyncio.current_task()
        variables = copy_context()
        turn_ends = now_sec() + TURN_SEC
        task: LeasedTask | None = first
        while task is not None and running is not None:
            await self._handle(task)
            if stop is not self._stop or running.cancelling() or copy_context() != variables:
                return
            if now_sec() >= turn_ends:
                await asyncio.sleep(0)
                turn_ends = now_sec() + TURN_SEC
            if self._closed or stop is not self._stop:
                return
            task = self._next_waiting()
            if task is not None:
                task.on_interrupt = running.cancel
                self._running[running] = task
                if self._has_room():
                    self._changed.set()

    def _handler_ended(self, running: asyncio.Task[None]) -> None:
        if len(self._running) >= self._options.concurrency:
            self._free_since = now_sec()
        self._running.pop(running, None)  # It may be left over from an earlier run.
        if not self._closed:
            self._start_waiting()
        if self._has_room():
            self._changed.set()

    async def _handle(self, task: LeasedTask) -> None:
        # Checked here, and not when the coroutine was created: the loop may have been blocked.
        if not self._may_start(task):
            task.on_interrupt = None
            return
        handler: Handler | None = None
        result: Any = None
        error: BaseException | None = None
        try:
            handler = self._begin(task)
            if handler.is_async and handler.wants_context:
                queue = self._given[task.queue]
                context = self._make_context(AsyncContext, task, handler, queue)
                result = await handler.function(task.claimed.payload, context=context)
            elif handler.is_async:
                result = await handler.function(task.claimed.payload)
            else:
                result = await self._call_in_thread(
                    handler,
                    task.claimed.payload,
                    lambda queue: self._make_context(Context, task, handler, queue),
                    task,
                )
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

    async def _call_in_thread(
        self,
        handler: Handler,
        given: Any,
        make_context: Callable[[Queue[Any]], Any],
        work: LeasedTask | Batch,
    ) -> Any:
        """Call a plain function in a thread; if it returns a coroutine, await that here."""
        queue = (work.leased[0] if isinstance(work, Batch) else work).queue
        # A thread cannot be cancelled: it occupies its place until the function returns.
        cancel, work.on_interrupt = work.on_interrupt, None
        result = await run_in_thread(
            handler.call, given, lambda: make_context(self._blocking_queue(queue))
        )
        if inspect.isawaitable(result):
            if work.interrupted:
                close_unrun(result)
                raise asyncio.CancelledError
            work.on_interrupt = cancel
            result = await result
        return result

    def _blocking_queue(self, core: QueueCore[Any]) -> Queue[Any]:
        """Return a queue for plain functions: a blocking one, on the client of the leases."""
        if (queue := self._blocking_queues.get(core)) is None:
            queue = self._blocking_queues[core] = Queue(
                self._leases.lease_queues[core].collections.tasks,
                core.name,
                settings=core.settings,
                payload_model=core.payload_model,
                clock=core.clock,
            )
            core_of(queue).attach_as(core)
        return queue

    def _was_cancelled_outside(self, work: LeasedTask | Batch) -> bool:
        """Return whether a handler was cancelled, but not by the worker: its loop is closing."""
        running = asyncio.current_task()
        return running is not None and bool(running.cancelling()) and not work.interrupted

    def _start_batches(self, batches: BatchCollector) -> None:
        """Start handlers for batches that are due; wait for the next one if a handler is free."""
        if self._batch_timer is not None:
            self._batch_timer.cancel()
            self._batch_timer = None
        while len(self._running) < self._options.concurrency and not self._closed:
            if taken := batches.take(self._free_since):
                batch = Batch(taken)
                running = asyncio.create_task(self._handle_batch(batch))
                batch.on_interrupt = running.cancel
                self._running[running] = batch
                running.add_done_callback(self._handler_ended)
                continue
            if (due_at := batches.due_at(self._free_since)) < inf:
                self._batch_timer = asyncio.get_running_loop().call_later(
                    max(due_at - now_sec(), 0.0), self._start_batches, batches
                )
            return

    async def _handle_batch(self, batch: Batch) -> None:
        # Checked here, as for one task.
        batch.keep([task for task in batch.leased if self._may_start(task)])
        if not batch.tasks:
            return
        unused = (self._options.batch or 1) - len(batch.tasks)
        self._add_unused(unused)
        result: Any = None
        error: BaseException | None = None
        handler = self._begin_batch(batch)
        try:
            if handler.is_async:
                queue = self._given[batch.leased[0].queue]
                result = await handler.call(batch.tasks, lambda: AsyncBatchContext(batch, queue))
            else:
                result = await self._call_in_thread(
                    handler, batch.tasks, lambda queue: BatchContext(batch, queue), batch
                )
        except BaseException as exc:  # noqa: BLE001 (the tasks must be settled in any case)
            error = exc
        batch.on_interrupt = None
        self._add_unused(-unused)
        if isinstance(error, asyncio.CancelledError) and self._was_cancelled_outside(batch):
            for task in batch.leased:
                self._completer.release(task)
                self._in_flight.conclude(task, returned=True)
            return
        batch.complete(self._completer, handler, result, error)

    # Settle

    async def _write_settlements(self) -> None:
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
        for task in self._batches.take_all() if self._batches is not None else ():
            self._completer.release(task)
        while self._waiting:
            self._completer.release(self._waiting.popleft())

    async def _wait_for_handlers(self, seconds: float) -> None:
        running = [one for one, work in self._running.items() if not work.concluded]
        if running:
            await asyncio.wait(running, timeout=seconds)
        else:  # Delayed by crash isolation; the fetcher releases them when it ends.
            await asyncio.sleep(seconds)

    async def _join_settlement_writer(self, deadline: Callable[[], float]) -> bool:
        await run_in_thread(self._leases.stop_timeouts)
        self._closed = True
        self._settlements.close()
        if self._writing is None:
            return True
        if not await join_task(self._writing, deadline):
            return False
        if len(self._settlements):  # It was cancelled: the loop is closing.
            self._writing = asyncio.create_task(self._write_settlements())
            return await join_task(self._writing, deadline)
        return True

    def _abandon(self) -> None:
        for part in (self._fetching, self._writing):
            if part is not None:
                part.cancel()

    def _give_up(self) -> None:
        self._abandon()
        super()._give_up()
