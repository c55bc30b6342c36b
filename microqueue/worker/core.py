"""What both kinds of worker share: their queues and options, and how they claim and begin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from math import inf
from typing import Any, Generic, TypeVar

from microqueue.core import HasCore, QueueCore, core_of, new_token, worker_name
from microqueue.errors import AlreadyRunning, InvalidArgument, MicroqueueError
from microqueue.operations import workers
from microqueue.task import Claimed
from microqueue.worker.completer import Completer, PendingSettlement, SettlementWriter
from microqueue.worker.effects import Steps, run_on
from microqueue.worker.fetcher import CrashIsolation, Fetcher, PollSummary, make_selection
from microqueue.worker.handlers import Handler, SingleHandler, router_for, task_names
from microqueue.worker.hooks import HookList, Hooks
from microqueue.worker.in_flight import (
    RENEWALS_PER_LEASE,
    InFlight,
    InFlightTask,
    lease_now,
    now_sec,
)
from microqueue.worker.lease_renewal import LeaseService, Registration, by_collection
from microqueue.worker.log import UnstartedTasks, logger
from microqueue.worker.options import WorkerOptions
from microqueue.worker.prefetch import PrefetchController
from microqueue.worker.shutdown import Stopping
from microqueue.worker.threads import DaemonThread
from microqueue.worker.waiting import await_server

QueueT = TypeVar("QueueT", bound=QueueCore[Any])


class WorkerCore(Stopping, Generic[QueueT]):
    """A worker's queues, options and hooks, and what it holds."""

    _leases: LeaseService  # Of the latest run.

    def __init__(
        self,
        queue: HasCore[QueueT] | Sequence[HasCore[QueueT]],
        handler: Any,
        *,
        hooks: Sequence[Hooks],
        worker_id: str | None,
        options: dict[str, Any],
    ) -> None:
        self.options = WorkerOptions(**options)
        self.worker_id = worker_id or worker_name()
        given = queue if isinstance(queue, Iterable) else [queue]
        self._queues: list[QueueT] = [core_of(one) for one in given]
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
        self._runs = threading.Lock()
        self._in_flight = InFlight()
        self._shortest_lease_sec = min(
            one.settings.visibility_timeout.total_seconds() for one in self._queues
        )
        self._isolation = CrashIsolation(self._in_flight, self.options.concurrency)
        self._prefetch_controller = PrefetchController(
            concurrency=self.options.concurrency,
            prefetch=self.options.prefetch,
            lease_sec=self._shortest_lease_sec,
        )
        self._selection = make_selection(self._queues, self.options.weights)
        self._timeout_sec = self.options.timeout.total_seconds() if self.options.timeout else None
        self._unstarted = UnstartedTasks()
        self._completer = Completer(
            self.options,
            prefetch=self._prefetch_controller,
            in_flight=self._in_flight,
            hooks=self._hooks,
            unstarted=self._unstarted,
        )
        self._settlement_writer = SettlementWriter(
            self._in_flight,
            self._hooks,
            self._unstarted,
            try_until=lambda: 0.0 if self._hurrying else self._stop_by,
        )
        self._claimed_last: datetime | None = None
        self._unconfirmed: dict[QueueT, str] = {}  # Tokens of claims without a reply, or failed.

    @contextmanager
    def _one_run(self) -> Iterator[None]:
        """Begin and end a run: one at a time, each with counts of its own."""
        if not self._runs.acquire(blocking=False):
            raise AlreadyRunning(worker_id=self.worker_id)
        try:
            self._settlement_writer.begin()
            self._in_flight.begin()
            self._stop_by = inf
            queues = ", ".join(repr(one.name) for one in self._queues)
            handlers = ", ".join(self._router.names())
            logger.info(
                "worker %s begins: queues %s, handlers %s", self.worker_id, queues, handlers
            )
            yield
        finally:
            self._unstarted.log()
            handled, handed_back = (
                self._settlement_writer.handled,
                self._settlement_writer.handed_back,
            )
            event = "worker %s ends: %d handled, %d handed back"
            logger.info(event, self.worker_id, handled, handed_back)
            self._forget_stop()
            self._runs.release()

    def _new_lease_service(
        self, *, on_timeout: Callable[[InFlightTask], None], on_lost: Callable[[InFlightTask], None]
    ) -> LeaseService:
        """Make what looks after the tasks of one run."""
        registration = Registration(
            self.worker_id,
            self.options,
            self._in_flight,
            handled=lambda: self._settlement_writer.handled,
            tasks=lambda: task_names(self._router),
        )
        return LeaseService(
            self._queues,
            self._in_flight,
            registration,
            on_timeout=on_timeout,
            on_lost=on_lost,
            on_looked=self._unstarted.log,
        )

    def _register(self, leases: LeaseService, stopping: Callable[[], bool], *, burst: bool) -> bool:
        """Register this worker, as soon as MongoDB is there; return whether it is to begin.

        A burst is for what is there now: it waits for nothing.
        """

        def abandon(*, succeeded: bool) -> None:
            try:
                if succeeded:
                    leases.unregister()
            finally:
                leases.close()

        try:
            if burst:
                leases.register()
                return True
            who = f"worker {self.worker_id}"
            return await_server(leases.register, who=who, stopping=stopping, abandon=abandon)
        except BaseException:
            DaemonThread(leases.close, name="microqueue-end").start()
            raise

    def _claiming(
        self,
        stopping: Callable[[], bool],
        start: Callable[[Sequence[InFlightTask]], None],
        withdraw: Callable[[Callable[[InFlightTask], bool]], list[InFlightTask]],
        settle_later: Callable[[PendingSettlement | None], None],
        *,
        burst: bool,
    ) -> Steps[None]:
        """Give the steps by which this worker claims, starts what it claimed, or thinks better."""

        def hand_back(unwanted: Callable[[InFlightTask], bool]) -> None:
            for held in (*withdraw(unwanted), *self._isolation.withdraw(unwanted)):
                settle_later(self._completer.hand_back(held))

        return Fetcher(
            self._queues,
            self._selection,
            self.options,
            prefetch=self._prefetch_controller,
            in_flight=self._in_flight,
            isolation=self._isolation,
            claim=self._claim,
            look=self._look,
            start=start,
            hand_back=hand_back,
            stopping=stopping,
            burst=burst,
        ).steps()

    def _claim(self, queue: QueueT, limit: int) -> Steps[list[InFlightTask]]:
        """Claim up to ``limit`` tasks of a queue, but first recover what a failed claim took.

        Those tasks are leased to this worker, and no one else would start them.
        """
        if (failed := self._unconfirmed.get(queue)) is not None:
            asked_at = lease_now()
            found = yield from run_on(queue, queue.recover_claim(failed, self.worker_id))
            del self._unconfirmed[queue]
            if found:
                return self._take_in(queue, found, asked_at)
        asked_at = lease_now()  # Before the call: the lease begins at this time or later.
        token = self._unconfirmed[queue] = new_token()
        operation = queue.claim_batch(
            limit, self.worker_id, after=self._claimed_last, token=token, one_reply=True
        )
        claimed = yield from run_on(queue, operation)
        del self._unconfirmed[queue]
        return self._take_in(queue, claimed, asked_at)

    def _look(self, opened: Sequence[QueueT]) -> Steps[PollSummary]:
        """Look at the queues that are open, as far as is known."""
        seen = []
        for group in by_collection(self._queues):
            names = [one.name for one in group if one in opened]
            seen.append(((yield from run_on(group[0], group[0].poll(names))), group))
        return PollSummary.of(seen)

    def _leave(self, end_by: Callable[[], float]) -> Steps[None]:
        """Say that this worker ends; if it cannot, the sweeper finds out by the heartbeat.

        So it does if a claim ended in an error: what that took is nowhere else to be found.
        """
        if self._unconfirmed:
            return
        try:
            for group in by_collection(self._queues):
                left = workers.leave(self.worker_id, group[0].collections.name)
                yield from run_on(group[0], left)
        except MicroqueueError as exc:
            if now_sec() < end_by():  # Later nobody waits any more, and that was said.
                logger.warning("the end of this worker could not be told: %s", exc)

    def _take_in(
        self, queue: QueueT, claimed: Sequence[Claimed], claimed_at: float
    ) -> list[InFlightTask]:
        """Take tasks in that were just claimed, and have their leases looked after."""
        held = [InFlightTask(queue, one, claimed_at) for one in claimed]
        self._in_flight.add(held)
        if held:
            for sample in {claimed[0], claimed[-1]}:  # All would take long, and these will do.
                self._prefetch_controller.weigh(sample.document, queue.collections.codec_options)
            lease = claimed[0].lease
            self._claimed_last = lease.started_at if lease else None
            own = [one.own_timeout_sec for one in claimed if one.own_timeout_sec is not None]
            shortest_sec = min([self._shortest_lease_sec, *own])
            due = claimed_at + shortest_sec / RENEWALS_PER_LEASE
            self._leases.expect_renewal(due - lease_now())
        return held

    def _tell_stopping(self) -> None:
        """Say what the end waits for."""
        running = sum(not one.concluded for one in self._in_flight.snapshot())
        if running and (grace_sec := self._stop_by - now_sec()) > 0:
            logger.info("stopping: %d running, to end within %.3g s", running, grace_sec)

    def _may_start(
        self, held: InFlightTask, settle_later: Callable[[PendingSettlement | None], None]
    ) -> bool:
        """Decide whether a handler starts that is about to; if its lease has ended, it does not.

        The task is released all the same: if nobody has reclaimed it, others get it at once, with
        its attempt; else the fence keeps it as it is.
        """
        if held.concluded:  # Its lease was lost while it waited.
            return False
        if not held.lapsed:
            return True
        settle_later(self._completer.discard(held))
        return False

    def _begin_handling(self, held: InFlightTask) -> Handler:
        """Note the start of a handler, and find it."""
        started = held.started = now_sec()
        if self._hooks:
            self._hooks.call("on_start", held.task)
        handler = self._only_handler or self._router.handler_for(held.task)
        held.exception_policy = handler.exception_policy
        limit_sec = self._timeout_sec if handler.timeout_sec is None else handler.timeout_sec
        if limit_sec is not None:
            held.deadline = started + limit_sec
            self._leases.expect_deadline(held.deadline)
        return handler
