"""Settle: write a batch of endings, again if need be, so that none holds up the others."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from microqueue.errors import InvalidArgument, LeaseLost, MicroqueueError
from microqueue.operations import settle
from microqueue.operations.call import Operation
from microqueue.operations.settle_many import settle_batch
from microqueue.task import Outcome, TaskError
from microqueue.worker.hooks import HookList
from microqueue.worker.inflight import PAUSE_SEC, InFlight, now_sec
from microqueue.worker.log import Unstarted
from microqueue.worker.outbox import Finished
from microqueue.worker.steps import Do, Step, Steps, run_on

UNSTORABLE = "unstorable"

logger = logging.getLogger("microqueue.worker")


class Settling:
    """Settles for a worker, and counts what it has handled, and handed back.

    ``try_until`` says how long a server that is away is waited for, after a stop.
    """

    def __init__(
        self,
        in_flight: InFlight,
        hooks: HookList,
        unstarted: Unstarted,
        *,
        try_until: Callable[[], float],
    ) -> None:
        self._in_flight = in_flight
        self._hooks = hooks
        self._unstarted = unstarted
        self._try_until = try_until
        self.begin()

    def begin(self) -> None:
        """Count from nothing."""
        self.handled = self.handed_back = 0

    def steps(self, batch: Sequence[Finished]) -> Steps[None]:
        """Say what to do until every task of a batch is settled, or left to its lease."""
        for queue, group in by_queue(batch).items():
            try:
                yield from self._write(queue, group)
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException:
                # Others wait to be settled.
                event = "%d tasks cannot be settled, and are left to their leases"
                logger.exception(event, len(group))
                self._in_flight.remove(held for held, _ in group)

    def _write(self, queue: Any, batch: Sequence[Finished]) -> Steps[None]:
        lease_ends = now_sec() + queue.settings.visibility_timeout.total_seconds()
        while True:
            lost: Sequence[LeaseLost] = ()
            try:
                lost = yield from run_on(queue, commit(queue, batch))
            except InvalidArgument as exc:
                if parts := storable(batch, exc, queue.clock.now()):
                    for part in parts:
                        yield from self._write(queue, part)
                    return
                logger.error("a task is left to its lease: %s", exc)  # noqa: TRY400 (one line)
            except MicroqueueError as exc:
                if now_sec() <= min(lease_ends, self._try_until()):
                    logger.warning("cannot settle; trying again in %g s: %s", PAUSE_SEC, exc)
                    yield Step(Do.PAUSE, seconds=PAUSE_SEC)
                    continue
                logger.error("%d settlements are given up: %s", len(batch), exc)  # noqa: TRY400 (one line)
            self._account(batch, lost)
            return

    def _account(self, batch: Sequence[Finished], lost: Sequence[LeaseLost]) -> None:
        """Let a batch go, and tell of the leases that were lost."""
        if lost:
            by_id = {held.claimed.id: held for held, _ in batch}
            for error in lost:
                held = by_id[error.task_id]
                if held.started is None:
                    self._unstarted.add(held)
                else:
                    logger.warning("%s", error)
                self._hooks.call("on_lease_lost", held.task)
        handed_back = sum(
            settlement is not None and settlement.outcome is Outcome.RELEASED
            for _, settlement in batch
        )
        self.handed_back += handed_back
        self.handled += len(batch) - handed_back
        self._in_flight.remove(held for held, _ in batch)


def by_queue(batch: Sequence[Finished]) -> dict[Any, list[Finished]]:
    """Sort a batch by the queue that each task came from."""
    groups: dict[Any, list[Finished]] = defaultdict(list)
    for finished in batch:
        groups[finished.held.queue].append(finished)
    return groups


def storable(
    batch: Sequence[Finished], error: InvalidArgument, now: datetime
) -> list[list[Finished]]:
    """Say what to write in place of a batch that MongoDB cannot store.

    One by one, so that one does not hold up the others; and for the one that it is, that its
    outcome could not be stored. Nothing, if not even that can be.
    """
    if len(batch) > 1:
        return [[one] for one in batch]
    settlement = batch[0].settlement
    if settlement and settlement.error and settlement.error.code == UNSTORABLE:
        return []
    message = f"its outcome could not be stored: {error}"
    reason = TaskError(message=message, code=UNSTORABLE, at=now)
    return [[Finished(batch[0].held, settle.failed(now, reason))]]


def commit(queue: Any, batch: Sequence[Finished]) -> Operation[list[LeaseLost]]:
    """Write a batch of one queue; give the leases that were lost."""
    now = yield from queue.begin()
    plain = [held.claimed for held, settlement in batch if settlement is None]
    others = [(held.task, settlement) for held, settlement in batch if settlement is not None]
    return (yield from settle_batch(plain, others, now=now, settings=queue.settings))
