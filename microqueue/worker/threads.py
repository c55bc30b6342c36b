"""The worker for plain functions: a pool of threads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from microqueue.errors import InvalidArgument, MicroqueueError
from microqueue.operations import workers
from microqueue.queue import Queue
from microqueue.worker.base import CLOSING_WAIT_SEC, HURRY_SEC, WorkerCore
from microqueue.worker.claiming import Do, Sight, Step
from microqueue.worker.context import Context
from microqueue.worker.handlers import Handler
from microqueue.worker.hooks import Hooks
from microqueue.worker.inflight import PAUSE_SEC, Held, now_sec
from microqueue.worker.line import Line
from microqueue.worker.settler import Finished, Outbox, by_queue, commit, storable
from microqueue.worker.sleeping import SyncSleeper

logger = logging.getLogger("microqueue.worker")


class Worker(WorkerCore[Queue[Any]]):
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
        self._line = Line()
        self._outbox = self._new_outbox()

    def run(self, *, burst: bool = False) -> int:
        """Work until :meth:`stop`; give how many tasks were handled.

        With ``burst``, end when nothing is ready and nothing is running.
        """
        self._handled = 0
        self._settle_by = float("inf")
        keeper = self._keeper(
            {queue: queue for queue in self._queues},
            on_timeout=lambda held: self._settle_later(self._timed_out(held)),
            on_lost=self._lose,
        )
        self._line, self._outbox = Line(), self._new_outbox()
        # Daemons: a handler that never returns, or a server that never answers, must not keep
        # the process alive.
        settler = threading.Thread(
            target=self._settle_forever, name="microqueue-settler", daemon=True
        )
        handlers = [
            threading.Thread(
                target=self._handle_forever,
                args=[self._line],
                name=f"microqueue-{n}",
                daemon=True,
            )
            for n in range(self.options.concurrency)
        ]
        keeper.start()
        for thread in (settler, *handlers):
            thread.start()
        sleeper = SyncSleeper(self._queues)
        try:
            with sleeper:
                self._claim_forever(sleeper, burst=burst)
        finally:
            self._finish_running(handlers)
            self._outbox.close()
            settled = self._await_settled(settler)
            keeper.stop(wait=settled)
            if settled:
                self._leave()
                sleeper.wait_closed()
            self._stopping = self._hurrying = False
        return self._handled

    def stop(self, *, immediately: bool = False) -> None:
        """End :meth:`run`, from any thread or a signal handler.

        Nothing is claimed any more. What has not started is handed back at once; what runs
        may finish within ``grace``, and is then handed back with its attempt refunded. With
        ``immediately`` there is no grace.
        """
        self._stopping = True
        self._hurrying = self._hurrying or immediately

    # Claim

    def _claim_forever(self, sleeper: SyncSleeper, *, burst: bool) -> None:
        steps = self._claiming(
            self._line.extend, self._line.withdraw, self._settle_later, burst=burst
        )
        reply: Any = None
        with suppress(StopIteration):
            step = next(steps)
            while True:
                try:
                    reply = self._perform(step, sleeper)
                except MicroqueueError as exc:
                    step = steps.throw(exc)
                else:
                    step = steps.send(reply)

    def _perform(self, step: Step, sleeper: SyncSleeper) -> Any:
        match step.do:
            case Do.CLAIM:
                return self._claim(step.queues[0], step.limit)
            case Do.LOOK:
                return self._look(step.queues)
            case Do.PROMOTE:
                for queue in step.queues:
                    queue.run(queue.promote_due())
            case Do.AWAIT_ROOM:
                self._in_flight.await_room(
                    unfinished=step.limit, held=step.most, timeout_sec=step.seconds
                )
            case Do.SLEEP:
                return sleeper.sleep(step.seconds, until=lambda: self._stopping)
            case Do.PAUSE:
                time.sleep(step.seconds)
        return None

    def _claim(self, queue: Queue[Any], limit: int) -> list[Held]:
        operation = queue.claim_batch(limit, self.worker_id, after=self._claimed_last)
        return self._take_in(queue, queue.run(operation))

    def _look(self, opened: Sequence[Queue[Any]]) -> Sight:
        return Sight.of(
            [
                (group[0].run(group[0].look(names)), group)
                for names, group in self._by_collection(opened)
            ]
        )

    # Run

    def _handle_forever(self, line: Line) -> None:
        while (held := line.take()) is not None:
            if not held.concluded:  # Its lease may have been lost while it waited.
                self._handle(held)

    def _handle(self, held: Held) -> None:
        handler: Handler | None = None
        result: Any = None
        error: BaseException | None = None
        try:
            handler = self._begin_handling(held)
            result = handler.call(
                held.claimed.payload, lambda: Context(held, held.queue, self._expect)
            )
        except BaseException as exc:  # noqa: BLE001 (whatever it is, the task must be settled)
            error = exc
        self._settle_later(self._ended(held, handler, result, error))

    # Settle

    def _new_outbox(self) -> Outbox:
        wait_sec = self.options.flush_interval.total_seconds()
        return Outbox(wait_sec=wait_sec, limit=self.options.flush_limit)

    def _settle_later(self, finished: Finished | None) -> None:
        if finished is not None:
            self._outbox.put(finished)

    def _settle_forever(self) -> None:
        while batch := self._outbox.take():
            for queue, group in by_queue(batch).items():
                self._commit(queue, group)

    def _commit(self, queue: Queue[Any], batch: list[Finished]) -> None:
        lease_ends = now_sec() + queue.settings.visibility_timeout.total_seconds()
        while True:
            try:
                lost = queue.run(commit(queue, batch, queue.now()))
            except InvalidArgument as exc:
                if parts := storable(batch, exc, queue.clock.now()):
                    for part in parts:
                        self._commit(queue, part)
                    return
                logger.error("a task is left to its lease: %s", exc)  # noqa: TRY400 (one line)
                lost = []
            except MicroqueueError as exc:
                if self._try_again(len(batch), exc, lease_ends):
                    time.sleep(PAUSE_SEC)
                    continue
                lost = []
            self._committed(batch, lost)
            return

    # End

    def _await_settled(self, settler: threading.Thread) -> bool:
        """Wait until all is settled; who is in a hurry does not wait for a server that is away."""
        waited_from: float | None = None
        while settler.is_alive():
            settler.join(CLOSING_WAIT_SEC)
            if self._hurrying:
                waited_from = waited_from or now_sec()
                if now_sec() - waited_from > HURRY_SEC:
                    logger.error("ending without an answer; leases are left to expire")
                    self._settle_by = now_sec()  # When there is an answer, it is the last.
                    return False
        return True

    def _leave(self) -> None:
        try:
            for _, group in self._by_collection(self._queues):
                group[0].run(workers.leave(self.worker_id, group[0].collections.name))
        except MicroqueueError as exc:  # The sweeper finds out by the heartbeat.
            logger.warning("the end of this worker could not be told: %s", exc)

    def _finish_running(self, handlers: list[threading.Thread]) -> None:
        """Hand back what has not started, let what runs finish, then hand back the rest."""
        for held in (*self._line.close(), *self._caution.withdraw(lambda _held: True)):
            self._settle_later(self._handed_back(held))
        deadline = now_sec() + self.options.grace.total_seconds()
        self._settle_by = deadline
        while any(thread.is_alive() for thread in handlers) and now_sec() < deadline:
            if self._hurrying:
                break
            self._in_flight.await_empty(CLOSING_WAIT_SEC)
        for held in self._in_flight.snapshot():
            if not held.concluded:
                held.interrupt()
                self._settle_later(self._handed_back(held))
