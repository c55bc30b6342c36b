"""What both kinds of worker share: their parts, and the order of the steps of one run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from microqueue.arguments import check_worker_id, invalid_argument
from microqueue.core import HasCore, QueueCore, core_of, new_worker_id
from microqueue.deprecation import renamed_options
from microqueue.errors import AlreadyRunning, MicroqueueError
from microqueue.hooks import HookList, Hooks, check_hooks
from microqueue.model import reject_unknown
from microqueue.operations.call import Report
from microqueue.worker.batches import Batch
from microqueue.worker.completer import Completer, SettlementSink, SettlementWriter
from microqueue.worker.daemon_threads import POLL_SEC, DaemonThread
from microqueue.worker.dispatcher import Dispatcher
from microqueue.worker.effects import (
    JoinFetcher,
    JoinHooks,
    JoinSettlementWriter,
    JoinThread,
    Register,
    ReleaseUnstarted,
    RunEffects,
    StartParts,
    WaitForHandlers,
    WaitForStop,
)
from microqueue.worker.fetcher import Claimer, Fetcher, make_selection
from microqueue.worker.handlers import Handler, SingleHandler, router_for, task_names
from microqueue.worker.in_flight import InFlight, LeasedTask, now_sec
from microqueue.worker.lease_renewal import LeaseService, Registration
from microqueue.worker.log import UnstartedTasks, logger
from microqueue.worker.options import WorkerOptions, WorkerOptionsDict
from microqueue.worker.prefetch import PrefetchController
from microqueue.worker.shutdown import StopRequest
from microqueue.worker.waiting import WorkWaiter, await_server

QueueT = TypeVar("QueueT", bound=QueueCore[Any])
ContextT = TypeVar("ContextT")


class WorkerCore(Generic[QueueT]):
    """The parts of a worker, and what happens from the start of a run to its end.

    A subclass performs the effects with threads or with coroutines.

    Attributes:
        options: The worker's options.
        worker_id: The name under which it claims tasks.
    """

    _kind_of_queue: type
    """The class of the queues that it takes."""
    _instead: str
    """What to do about a queue of the other class."""

    # The parts of the latest run.
    _leases: LeaseService
    _completer: Completer
    _writer: SettlementWriter
    _fetcher: Fetcher
    _waiter: WorkWaiter | None

    def __init__(
        self,
        queue: HasCore[QueueT] | Sequence[HasCore[QueueT]],
        handler: Any,
        *,
        hooks: Sequence[Hooks],
        worker_id: str | None,
        options: WorkerOptionsDict,
    ) -> None:
        given_options = renamed_options(
            dict(options),
            WorkerOptions._renamed_fields,  # noqa: SLF001 (the warning points at the user's call)
            stacklevel=4,
        )
        reject_unknown(
            type(self).__name__, given_options, WorkerOptions.model_fields, function=type(self)
        )
        self._options = WorkerOptions(**given_options)
        self._worker_id = check_worker_id(worker_id) or new_worker_id()
        given = self._several(queue)
        self._queues: list[QueueT] = [core_of(one) for one in given]
        self._given: dict[QueueCore[Any], Any] = dict(zip(self._queues, given, strict=True))
        self._router = router_for(handler, batch=self._options.batch)
        # With a single function, the task need not be read to find its handler.
        self._only_handler: Handler | None = None
        if isinstance(self._router, SingleHandler):
            self._only_handler = self._router.handler
        self._given_hooks = check_hooks(hooks)
        self._hooks = HookList(self._given_hooks)
        if (knows := getattr(self._router, "knows", None)) is not None:
            self._hooks.call("on_attach", knows)
        self._timeout_sec = self._options.timeout.total_seconds() if self._options.timeout else None
        self._selection = make_selection(self._queues, self._options.weights)
        self._in_flight = InFlight()
        self._prefetch = PrefetchController(
            concurrency=self._options.max_running,
            prefetch=self._options.prefetch,
            lease_sec=min(one.settings.visibility_timeout.total_seconds() for one in self._queues),
        )
        self._claimer = Claimer(
            self._queues,
            worker_id=self._worker_id,
            in_flight=self._in_flight,
            prefetch=self._prefetch,
        )
        self._unstarted = UnstartedTasks()
        self._unused_lock = threading.Lock()
        self._runs = threading.Lock()
        self._stop = self._new_stop()

    def _several(self, queue: Any) -> list[HasCore[QueueT]]:
        """Return the given queues, at least one; reject those of the other kind."""
        is_list = isinstance(queue, Iterable) and not isinstance(queue, str | bytes | Mapping)
        given: list[Any] = list(queue) if is_list else [queue]
        if not given or not all(isinstance(one, self._kind_of_queue) for one in given):
            raise invalid_argument("queue", queue, self._instead)
        return given

    # One run

    @property
    def options(self) -> WorkerOptions:
        """The options of the worker."""
        return self._options

    @property
    def worker_id(self) -> str:
        """The id under which the worker claims tasks."""
        return self._worker_id

    @contextmanager
    def _one_run(self) -> Iterator[None]:
        """Begin and end a run; only one at a time."""
        if not self._runs.acquire(blocking=False):
            raise AlreadyRunning(worker_id=self._worker_id)
        try:
            self._in_flight.reset()
            self._prefetch.unused = 0
            self._waiter = None
            self._writer = SettlementWriter(
                self._stop, self._in_flight, self._hooks, self._unstarted
            )
            queues, handlers = [one.name for one in self._queues], self._router.names()
            logger.info(
                "worker %s started: queues %s, handlers %s",
                self._worker_id,
                ", ".join(map(repr, queues)),
                ", ".join(handlers),
                extra={"worker_id": self._worker_id, "queues": queues, "handlers": handlers},
            )
            yield
        finally:
            self._unstarted.log()
            handled, released = self._writer.handled, self._writer.released
            logger.info(
                "worker %s stopped: %d tasks handled, %d released",
                self._worker_id,
                handled,
                released,
                extra={"worker_id": self._worker_id, "handled": handled, "released": released},
            )
            self._stop = self._new_stop()
            self._runs.release()

    def _new_stop(self) -> StopRequest:
        return StopRequest(self._options.grace.total_seconds())

    def _assemble(
        self,
        settlements: SettlementSink,
        dispatcher: Dispatcher,
        call: Callable[[Callable[[LeasedTask], None], LeasedTask], object],
    ) -> None:
        """Create the parts of a run.

        Args:
            settlements: Where the completer puts its settlements.
            dispatcher: Where hooks run for events that no handler caused.
            call: Calls the completer from the threads that watch leases and timeouts.
        """
        self._reports: dict[QueueCore[Any], Report | None] = {
            one: one.report_to(self._given_hooks, source="worker", submit=dispatcher.submit)
            for one in self._queues
        }
        completer = self._completer = Completer(
            self._options,
            in_flight=self._in_flight,
            prefetch=self._prefetch,
            hooks=self._hooks,
            dispatcher=dispatcher,
            settlements=settlements,
            unstarted=self._unstarted,
        )
        writer = self._writer
        registration = Registration(
            self._worker_id,
            self._options,
            self._in_flight,
            handled=lambda: writer.handled,
            tasks=lambda: task_names(self._router),
        )
        self._leases = LeaseService(
            self._queues,
            self._in_flight,
            registration,
            on_timeout=lambda task: call(completer.time_out, task),
            on_lost=lambda task: call(completer.lose, task),
            after_check=self._unstarted.log,
        )
        self._fetcher = Fetcher(
            self._claimer,
            self._selection,
            self._options,
            in_flight=self._in_flight,
            prefetch=self._prefetch,
            completer=completer,
            leases=self._leases,
            declarations=self._router.declarations(),
        )

    def _run_effects(self, *, burst: bool) -> RunEffects[None]:
        """Register, start, wait for the stop, and shut down."""
        stop = self._stop
        ended = False
        try:
            if not (yield Register(burst)):
                return
            try:
                yield StartParts(burst)
                yield WaitForStop()
            except asyncio.CancelledError:
                stop.end_grace_within(0.0)
                raise
            finally:
                stop.request()
                yield from self._shutdown_effects(stop)
                ended = True
        except BaseException:
            if not ended:  # It could not begin, or was interrupted once more: do not wait.
                stop.request(immediately=True)
                self._give_up()
            raise

    def _register(self, stop: StopRequest, burst: bool) -> bool:  # noqa: FBT001 (run in a thread)
        """Register this worker as soon as MongoDB answers; return whether the run begins.

        A burst is for what is there now: it does not wait.
        """
        leases = self._leases

        def abandon(*, succeeded: bool) -> None:
            try:
                if succeeded:
                    leases.deregister()
            finally:
                leases.close()

        if burst:
            leases.register()
            return True
        return await_server(
            leases.register,
            who=f"worker {self._worker_id}",
            stopping=lambda: stop.requested,
            abandon=abandon,
        )

    def _shutdown_effects(self, stop: StopRequest) -> RunEffects[None]:
        """Release what has not started, let handlers finish, write settlements, deregister."""
        yield ReleaseUnstarted()
        self._log_shutdown(stop)
        while now_sec() < stop.grace_ends and self._in_flight.unconcluded():
            yield WaitForHandlers(POLL_SEC)
        deadline = stop.server_deadline(handlers_ended=now_sec())
        while self._release_running() and now_sec() < deadline():
            yield WaitForHandlers(POLL_SEC)
        fetched = yield JoinFetcher(deadline)
        settled = (yield JoinSettlementWriter(deadline)) and fetched
        if not settled:
            left = self._in_flight.snapshot()
            logger.error(
                "shutdown: MongoDB did not answer; %d leases will expire",
                len(left),
                extra={"leases_left": len(left)},
            )
            self._in_flight.remove(left)
            self._abandon()
        deregistered = threading.Event()
        closing = DaemonThread(
            self._closing(deadline, deregistered, settled=settled), name="microqueue-end"
        )
        closing.start()
        if settled and not (yield JoinThread(closing, deadline)) and not deregistered.is_set():
            logger.warning(
                "could not deregister worker: MongoDB did not answer",
                extra={"worker_id": self._worker_id, "deregistered": False},
            )
        yield JoinHooks(deadline)

    def _release_running(self) -> bool:
        """Release what runs; return whether handlers commit tasks, so that others cannot decide."""
        for task in self._in_flight.unconcluded():
            self._completer.release(task)  # Before the interrupt, which may end it at once.
            if task.concluded:
                task.interrupt()
        return bool(self._in_flight.unconcluded())

    def _log_shutdown(self, stop: StopRequest) -> None:
        running = len(self._in_flight.unconcluded())
        if running and (grace_sec := stop.grace_ends - now_sec()) > 0:
            logger.info(
                "shutdown: %d tasks running; grace ends in %.3g s",
                running,
                grace_sec,
                extra={"running": running, "grace_sec": grace_sec},
            )

    def _closing(
        self, deadline: Callable[[], float], deregistered: threading.Event, *, settled: bool
    ) -> Callable[[], None]:
        """Return the end of this run, for a thread: MongoDB may never answer."""
        leases, waiter = self._leases, self._waiter

        def close() -> None:
            leases.stop()
            # Otherwise the sweeper reclaims what is in flight when the heartbeats end.
            if settled and not len(self._in_flight) and not self._claimer.has_unconfirmed:
                try:
                    leases.deregister()
                except MicroqueueError as exc:
                    if now_sec() < deadline():  # Later, the shutdown has logged it.
                        logger.warning(
                            "could not deregister worker: %s",
                            exc,
                            extra={"worker_id": self._worker_id, "deregistered": False},
                        )
            deregistered.set()
            if waiter is not None:
                waiter.close()
                waiter.wait_closed()
            leases.close()

        return close

    def _abandon(self) -> None:
        """Stop waiting for the fetcher and the settlement writer."""

    def _give_up(self) -> None:
        """End everything without waiting; leases are left to expire."""
        leases, waiter = self._leases, self._waiter

        def close() -> None:
            if waiter is not None:
                waiter.close()
            leases.stop()
            leases.close()

        DaemonThread(close, name="microqueue-end").start()

    # One task

    def _may_start(self, task: LeasedTask) -> bool:
        """Return whether the handler of a task may start; release the task if its lease lapsed."""
        if task.concluded:  # Its lease was lost while it waited.
            return False
        if not task.lapsed:
            return True
        self._completer.release_lapsed(task)
        return False

    def _make_context(
        self, make: Callable[..., ContextT], task: LeasedTask, handler: Handler, queue: Any
    ) -> ContextT:
        """Return the context of a task for its handler, with a queue that suits the handler."""
        return make(
            task,
            queue,
            in_flight=self._in_flight,
            leases=self._leases,
            keep_result=self._options.keep_result or handler.keep_result,
        )

    def _begin(self, task: LeasedTask) -> Handler:
        """Note the start of a task; return its handler."""
        started = task.started = now_sec()
        if self._hooks:
            self._hooks.call("on_start", task.task)
        handler = self._only_handler or self._router.handler_for(task.task)
        task.exception_policy = handler.exception_policy
        limit_sec = self._timeout_sec if handler.timeout_sec is None else handler.timeout_sec
        if limit_sec is not None:
            task.deadline = started + limit_sec
            self._leases.expect_timeout(task.deadline)
        return handler

    # One batch

    def _begin_batch(self, batch: Batch) -> Handler:
        """Note the start of each task of a batch; return the handler."""
        handler = self._only_handler
        if handler is None:
            raise AssertionError  # Named tasks have no batches.
        started = now_sec()
        limit_sec = self._timeout_sec if handler.timeout_sec is None else handler.timeout_sec
        for task in batch.leased:
            task.started = started
            task.exception_policy = handler.exception_policy
            if self._hooks:
                # What a hook sets, such as the current span, is not for all tasks.
                copy_context().run(self._hooks.call, "on_start", task.task)
            if limit_sec is not None:
                task.deadline = started + limit_sec
        if limit_sec is not None:
            self._leases.expect_timeout(started + limit_sec)
        return handler

    def _add_unused(self, count: int) -> None:
        """Count by how much a batch is smaller than a full one, while its handler runs.

        No more tasks are claimed than can run beside it.
        """
        with self._unused_lock:
            self._prefetch.unused = max(self._prefetch.unused + count, 0)
