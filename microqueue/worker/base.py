"""What both kinds of worker share: their queues and options, and how they claim and begin."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Generic, TypeVar

from microqueue.core import QueueCore, worker_name
from microqueue.errors import InvalidArgument, MicroqueueError
from microqueue.operations import workers
from microqueue.operations.workers import WorkerInfo
from microqueue.queue import Queue
from microqueue.task import Claimed, Lease
from microqueue.worker.caution import Caution
from microqueue.worker.claiming import Claiming, Sight
from microqueue.worker.handlers import Handler, SingleHandler, router_for
from microqueue.worker.hooks import HookList, Hooks
from microqueue.worker.inflight import RENEWALS_PER_LEASE, Held, InFlight, Pace, now_sec
from microqueue.worker.judging import Judge
from microqueue.worker.keeper import LeaseKeeper, LeaseKeepers
from microqueue.worker.log import logger
from microqueue.worker.options import WorkerOptions
from microqueue.worker.outbox import Finished
from microqueue.worker.selection import make_selection
from microqueue.worker.settling import Settling
from microqueue.worker.steps import Steps, run_on
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
        self._judge = Judge(
            self.options, pace=self._pace, in_flight=self._in_flight, hooks=self._hooks
        )
        self._settling = Settling(
            self._in_flight,
            self._hooks,
            try_until=lambda: 0.0 if self._hurrying else self._stop_by,
        )
        self._claimed_last: datetime | None = None
        self._uncertain: dict[QueueT, list[Lease]] = {}  # Of claims that ended in an error.
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
                    handled=self._settling.handled,
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
    ) -> Steps[None]:
        """Give the steps by which this worker claims, starts what it claimed, or thinks better."""

        def hand_back(unwanted: Callable[[Held], bool]) -> None:
            for held in (*withdraw(unwanted), *self._caution.withdraw(unwanted)):
                settle_later(self._judge.hand_back(held))

        return Claiming(
            self._queues,
            self._selection,
            self.options,
            pace=self._pace,
            in_flight=self._in_flight,
            caution=self._caution,
            claim=self._claim,
            look=self._look,
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

    def _claim(self, queue: QueueT, limit: int) -> Steps[list[Held]]:
        """Claim up to ``limit`` tasks; give what there was, not started yet.

        What a claim took that ended in an error comes first: it is leased, and nobody else would
        start it.
        """
        uncertain = self._uncertain.setdefault(queue, [])
        while uncertain:
            found = yield from run_on(queue, queue.claim_again(uncertain[-1]))
            uncertain.pop()
            if found:
                return self._take_in(queue, found)
        operation = queue.claim_batch(
            limit, self.worker_id, after=self._claimed_last, attempted=uncertain
        )
        claimed = yield from run_on(queue, operation)
        uncertain.clear()
        return self._take_in(queue, claimed)

    def _look(self, opened: Sequence[QueueT]) -> Steps[Sight]:
        """Look at the queues that are open, as far as is known."""
        seen = []
        for names, group in self._by_collection(opened):
            seen.append(((yield from run_on(group[0], group[0].look(names))), group))
        return Sight.of(seen)

    def _leave(self, end_by: Callable[[], float]) -> Steps[None]:
        """Say that this worker ends; if it cannot, the sweeper finds out by the heartbeat.

        So it does if a claim ended in an error: what that took is nowhere else to be found.
        """
        if any(self._uncertain.values()):
            return
        try:
            for _, group in self._by_collection(self._queues):
                left = workers.leave(self.worker_id, group[0].collections.name)
                yield from run_on(group[0], left)
        except MicroqueueError as exc:
            if now_sec() < end_by():  # Later nobody waits any more, and that was said.
                logger.warning("the end of this worker could not be told: %s", exc)

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


def place_of(queue: QueueCore[Any]) -> Any:
    """Tell one collection from another."""
    return id(queue.collections.client), queue.collections.database.name, queue.collections.name
