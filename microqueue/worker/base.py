"""What both kinds of worker share: options, what is held, and how endings are judged."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Generic, TypeVar

from microqueue.core import QueueCore, worker_name
from microqueue.errors import InvalidArgument, InvalidPayload, LeaseLost, MicroqueueError
from microqueue.operations import settle, workers
from microqueue.operations.workers import WorkerInfo
from microqueue.payload import check_encodable
from microqueue.queue import Queue
from microqueue.task import Claimed, Outcome, TaskStatus
from microqueue.worker.caution import Caution
from microqueue.worker.claiming import Claiming, Steps
from microqueue.worker.handlers import Handler, SingleHandler, router_for
from microqueue.worker.hooks import HookList, Hooks
from microqueue.worker.inflight import (
    PAUSE_SEC,
    RENEWALS_PER_LEASE,
    Held,
    InFlight,
    Pace,
    now_sec,
)
from microqueue.worker.keeper import LeaseKeeper, LeaseKeepers
from microqueue.worker.log import logger, tell
from microqueue.worker.options import WorkerOptions
from microqueue.worker.outcomes import Fail, plain_retry, settlement_for
from microqueue.worker.selection import make_selection
from microqueue.worker.settler import Finished
from microqueue.worker.stopping import Stopping

QueueT = TypeVar("QueueT", bound=QueueCore[Any])


class WorkerCore(Stopping, Generic[QueueT]):
    """A worker's queues, options and hooks, and what it holds."""

    def __init__(
        self,
        queue: QueueT | Sequence[QueueT],
        handler: Any,
        *,
        hooks: Sequence[Hooks],
        worker_id: str | None,
        options: dict[str, Any],
    ) -> None:
        self.options = WorkerOptions(**options)
        self.worker_id = worker_id or worker_name()
        self._queues: list[QueueT] = [queue] if isinstance(queue, QueueCore) else list(queue)
        if not self._queues:
            raise InvalidArgument("queue=[] is not valid: give at least one", argument="queue")
        self._router = router_for(handler)
        # A single function needs no look into the task.
        self._only_handler: Handler | None = None
        if isinstance(self._router, SingleHandler):
            self._only_handler = self._router.handler
        self._hooks = HookList(hooks)
        if (knows := getattr(self._router, "knows", None)) is not None:
            self._hooks.call("on_attach", knows)
        self._in_flight = InFlight()
        self._shortest_lease_sec = min(
            one.settings.visibility_timeout.total_seconds() for one in self._queues
        )
        self._caution = Caution(self._in_flight, self.options.concurrency)
        self._pace = Pace(
            concurrency=self.options.concurrency,
            prefetch=self.options.prefetch,
            lease_sec=self._shortest_lease_sec,
        )
        self._selection = make_selection(self._queues, self.options.weights)
        self._timeout_sec = self.options.timeout.total_seconds() if self.options.timeout else None
        self._verbose = logger.isEnabledFor(logging.DEBUG)
        self._handled = 0
        self._claimed_last: datetime | None = None
        self._expect: Callable[[float], None] = lambda _due: None

    def _keeper(
        self,
        twins: Mapping[Any, Queue[Any]],
        *,
        on_timeout: Callable[[Held], None],
        on_lost: Callable[[Held], None],
    ) -> LeaseKeepers:
        """Register this worker; make the threads that keep its leases and beat on."""
        started_at = twins[self._queues[0]].now()

        def beat(queues: Sequence[QueueT]) -> None:
            held = self._in_flight.snapshot()
            for names, group in self._by_collection(queues):
                if not names:
                    continue  # It is on another server.
                first = twins[group[0]]
                info = WorkerInfo(
                    id=self.worker_id,
                    collection=first.collections.name,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    queues=names,
                    concurrency=self.options.concurrency,
                    running=sum(one.started is not None and one.queue in group for one in held),
                    handled=self._handled,
                    started_at=started_at,
                    heartbeat_at=first.now(),
                    heartbeat_sec=self.options.heartbeat.total_seconds(),
                )
                first.run(workers.beat(info))

        beat(self._queues)  # Before the first claim: its death is noticed however soon it comes.
        by_client: dict[int, list[QueueT]] = {}
        for queue in self._queues:
            by_client.setdefault(id(queue.collections.client), []).append(queue)
        keepers = LeaseKeepers(
            [
                LeaseKeeper(
                    self._in_flight,
                    {queue: twins[queue] for queue in group},
                    on_timeout=on_timeout,
                    on_lost=on_lost,
                    beat=partial(beat, group),
                    heartbeat_sec=self.options.heartbeat.total_seconds(),
                )
                for group in by_client.values()
            ]
        )
        self._expect = keepers.expect
        return keepers

    def _claiming(
        self,
        stopping: Callable[[], bool],
        start: Callable[[Sequence[Held]], None],
        withdraw: Callable[[Callable[[Held], bool]], list[Held]],
        settle_later: Callable[[Finished | None], None],
        *,
        burst: bool,
    ) -> Steps:
        """Give the steps by which this worker claims, starts what it claimed, or thinks better."""

        def hand_back(unwanted: Callable[[Held], bool]) -> None:
            for held in (*withdraw(unwanted), *self._caution.withdraw(unwanted)):
                settle_later(self._handed_back(held))

        return Claiming(
            self._queues,
            self._selection,
            self.options,
            pace=self._pace,
            in_flight=self._in_flight,
            caution=self._caution,
            start=start,
            hand_back=hand_back,
            stopping=stopping,
            burst=burst,
        ).steps()

    def _by_collection(self, opened: Sequence[QueueT]) -> list[tuple[list[str], list[QueueT]]]:
        """Sort the queues by collection, with the names of those that are open."""
        groups: dict[Any, list[QueueT]] = {}
        for queue in self._queues:
            groups.setdefault(place_of(queue), []).append(queue)
        return [([one.name for one in group if one in opened], group) for group in groups.values()]

    def _take_in(self, queue: QueueT, claimed: Sequence[Claimed]) -> list[Held]:
        """Take tasks in that were just claimed, and have their leases looked after."""
        now = now_sec()
        held = [Held(queue, one, now) for one in claimed]
        self._in_flight.add(held)
        if held:
            lease = claimed[0].lease
            self._claimed_last = lease.started_at if lease else None
            own = [one.own_timeout_sec for one in claimed if one.own_timeout_sec is not None]
            shortest_sec = min([self._shortest_lease_sec, *own])
            self._expect(now + shortest_sec / RENEWALS_PER_LEASE)
        return held

    def _begin_handling(self, held: Held) -> Handler:
        """Note the start of a handler, and find it."""
        started = held.started = now_sec()
        if self._hooks:
            self._hooks.call("on_start", held.task)
        handler = self._only_handler or self._router.handler_for(held.task)
        held.judgement = handler.judgement
        limit_sec = self._timeout_sec if handler.timeout_sec is None else handler.timeout_sec
        if limit_sec is not None:
            held.deadline = started + limit_sec
            self._expect(held.deadline)
        return handler

    def _judged(
        self, held: Held, handler: Handler | None, result: Any, error: BaseException | None
    ) -> Finished | None:
        """Judge how a handler ended, as below; whatever happens, the worker goes on."""
        try:
            return self._ended(held, handler, result, error)
        except BaseException as exc:  # noqa: BLE001 (a hook may raise anything)
            event = "task %s cannot be judged, and is left to its lease: %r"
            logger.error(event, held.claimed.id, exc, exc_info=exc)
            self._in_flight.conclude(held, returned=True)
            self._in_flight.remove([held])
            return None

    def _ended(
        self, held: Held, handler: Handler | None, result: Any, error: BaseException | None
    ) -> Finished | None:
        """Judge how a handler ended; nothing if somebody else has concluded the task."""
        took_sec = now_sec() - (held.started or now_sec())
        self._pace.learn(took_sec)
        if not self._in_flight.conclude(held, returned=True):
            tell(logging.INFO, held.task, "the late end of its handler is discarded")
            return None
        settlement = None
        if error is None and (self.options.keep_result or (handler and handler.keep_result)):
            error = unstorable(held.queue, result)
            settlement = settle.done(held.queue.clock.now(), result=result)
        if error is not None:
            return self._failed(held, error, held.queue.clock.now(), took_sec)
        if self._verbose:
            tell(logging.DEBUG, held.task, "done in %.3f s", took_sec)
        if self._hooks:
            self._hooks.call("on_success", held.task, took_sec=took_sec)
        return Finished(held, settlement)

    def _timed_out(self, held: Held) -> Finished | None:
        """Settle a task whose handler took too long; the handler itself is only told."""
        held.interrupt()
        if not self._in_flight.conclude(held):
            return None
        limit_sec = (held.deadline or 0.0) - (held.started or 0.0)
        error = TimeoutError(f"the handler took longer than {limit_sec:g} s")
        return self._failed(held, error, held.queue.clock.now(), limit_sec)

    def _failed(self, held: Held, error: BaseException, now: datetime, took_sec: float) -> Finished:
        task, settings = held.task, held.queue.settings
        try:
            settlement = settlement_for(task, error, held.judgement, now=now, settings=settings)
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
                exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
            )
        self._hooks.call("on_failure" if buried else "on_retry", task, error, took_sec=took_sec)
        return Finished(held, settlement)

    def _lose(self, held: Held) -> None:
        """Tell a handler that its task was taken away; its result will be discarded."""
        held.interrupt()
        if not self._in_flight.conclude(held):
            return
        if held.was_cancelled:
            tell(logging.INFO, held.task, "cancelled; its handler is told")
            self._hooks.call("on_cancel", held.task)
        else:
            tell(logging.WARNING, held.task, "its lease is lost; its result is discarded")
            self._hooks.call("on_lease_lost", held.task)
        self._in_flight.remove([held])

    def _handed_back(self, held: Held) -> Finished | None:
        """Give a task back unharmed, unless it ended by itself."""
        if not self._in_flight.conclude(held):
            return None
        self._hooks.call("on_release", held.task)
        now = held.queue.clock.now()
        return Finished(held, settle.released(held.task, now, front=False))

    def _try_again(self, count: int, error: MicroqueueError, lease_ends: float) -> bool:
        """Decide whether to write settlements again that did not reach the server.

        Not longer than their leases last; after a stop, not longer than the grace.
        """
        if self._hurrying or now_sec() > min(lease_ends, self._stop_by):
            logger.error("%d settlements are given up: %s", count, error)
            return False
        logger.warning("cannot settle; trying again in %g s: %s", PAUSE_SEC, error)
        return True

    def _leave_to_leases(self, batch: Sequence[Finished], error: BaseException) -> None:
        """Let tasks go whose settlement failed in a way that nobody foresaw."""
        event = "%d tasks cannot be settled, and are left to their leases: %r"
        logger.error(event, len(batch), error, exc_info=error)
        self._in_flight.remove(held for held, _ in batch)

    def _committed(self, batch: Sequence[Finished], lost: Sequence[LeaseLost]) -> None:
        """Account for a batch that was written."""
        if lost:
            tasks = {held.claimed.id: held.task for held, _ in batch}
            for error in lost:
                logger.warning("%s", error)
                self._hooks.call("on_lease_lost", tasks[error.task_id])
        self._handled += sum(
            settlement is None or settlement.outcome is not Outcome.RELEASED
            for _, settlement in batch
        )
        self._in_flight.remove(held for held, _ in batch)


def place_of(queue: QueueCore[Any]) -> Any:
    """Tell one collection from another."""
    return id(queue.collections.client), queue.collections.database.name, queue.collections.name


def unstorable(queue: Any, result: Any) -> Fail | None:
    """Say why a result cannot be stored, if so; doing the work again would not change that."""
    try:
        check_encodable({"result": result}, queue.collections.codec_options)
    except InvalidPayload as exc:
        return Fail(str(exc), code="invalid_result")
    return None
