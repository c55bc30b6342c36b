"""Out of the queue: claim tasks, and hand over what may run."""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from microqueue.clock import TICK, later
from microqueue.core.pausing import REMEMBERED_SEC, Pausing
from microqueue.core.settling import Settling
from microqueue.durations import to_positive_timedelta
from microqueue.errors import InvalidPayload, LeaseLost
from microqueue.model import shorten
from microqueue.operations import (
    claim,
    glance,
    inspect,
    settle,
    sweep,
)
from microqueue.operations.call import Document, Operation
from microqueue.operations.glance import Glance
from microqueue.operations.settle import Settlement
from microqueue.task import Claimed, Lease, PayloadT, Task, TaskError

_HOST = socket.gethostname()


class Delivery(Settling[PayloadT], Pausing[PayloadT]):
    """Claim."""

    def _pop(self, worker_id: str | None) -> Operation[Task[PayloadT] | None]:
        if not (yield from self._may_claim()):
            return None
        yield from self.promote_due()
        while True:
            lease = yield from self._new_lease(worker_id)
            document = yield from claim.pop(self.name, lease)
            if document is None:
                return None
            claimed = yield from self._deliver([document], lease)
            if claimed:
                return claimed[0].task
            # It had expired, most likely; others at the head of the line may have, too.
            yield from sweep.expire_undelivered(lease.started_at, self.settings, [self.name])

    def _pop_one(self, worker_id: str | None) -> Operation[list[Task[PayloadT]]]:
        task = yield from self._pop(worker_id)
        return [] if task is None else [task]

    def _pop_many(self, limit: int, worker_id: str | None) -> Operation[list[Task[PayloadT]]]:
        if not (yield from self._may_claim()):
            return []
        yield from self.promote_due()
        return [one.task for one in (yield from self.claim_batch(limit, worker_id))]

    def promote_due(self) -> Operation[int]:
        """Make delayed tasks ready whose time has come."""
        now = yield from self.begin()
        return (yield from claim.promote_due(self.name, now, limit=self.settings.promote_limit))

    def look(self, queues: Sequence[str]) -> Operation[Glance]:
        """See what these queues of the collection hold for a worker, with one query."""
        now = yield from self.begin()
        look = glance.glance_in_memory if self.collections.in_memory else glance.glance
        return (yield from look(self.collections.name, queues, now=now))

    def claim_batch(
        self,
        limit: int,
        worker_id: str | None = None,
        *,
        after: datetime | None = None,
        attempted: list[Lease] | None = None,
        one_reply: bool = False,
    ) -> Operation[list[Claimed]]:
        """Claim up to ``limit`` ready tasks; what is due and what is paused is not looked at.

        The claim starts later than ``after``, the worker's last one, so that its claims are
        in order although clocks are read anew. If it ends in an error, nobody knows what it took:
        ``attempted`` gets its lease before anything is written, for :meth:`claim_again`. With
        ``one_reply`` it takes no more than 16 MB.
        """
        while True:
            lease = yield from self._new_lease(worker_id, after)
            documents = yield from claim.pop_many(
                self.name,
                lease,
                limit=limit,
                spread=self._spread,
                attempted=attempted,
                one_reply=one_reply,
            )
            claimed = yield from self._deliver(documents, lease)
            if claimed or not documents:
                return claimed
            yield from sweep.expire_undelivered(lease.started_at, self.settings, [self.name])

    def claim_again(self, lease: Lease) -> Operation[list[Claimed]]:
        """Take what a claim holds that ended in an error, under the same lease, renewed."""
        now = yield from self.begin()
        renewed = lease.model_copy(
            update={"expires_at": later(now, self.settings.visibility_timeout)}
        )
        documents = yield from claim.find_held(renewed)
        return (yield from self._deliver(documents, renewed))

    def _new_lease(self, worker_id: str | None, after: datetime | None = None) -> Operation[Lease]:
        now = yield from self.begin()
        started_at = now
        # A clock that went back by more was wrong before.
        if after is not None and now <= after < now + claim.LARGEST_SKEW:
            started_at = after + TICK
        return Lease.trusted(
            token=secrets.token_hex(12),
            worker_id=worker_id or f"{_HOST}:{os.getpid()}",
            started_at=started_at,
            expires_at=later(now, self.settings.visibility_timeout),
        )

    def _deliver(self, documents: list[Document], lease: Lease) -> Operation[list[Claimed]]:
        """Hand over what may run; fail what has expired, is used up, or does not validate."""
        now = lease.started_at
        sound: list[Claimed] = []
        for document in documents:
            settlement = None if clearly_deliverable(document) else undeliverable(document, now)
            if settlement is None:
                try:
                    payload = self._codec.load(document.get("payload"))
                    sound.append(Claimed(document, lease, payload))
                except InvalidPayload as exc:
                    error = TaskError(message=str(exc), code="invalid_payload", at=now)
                    settlement = settle.failed(now, error)
            if settlement is not None:
                task: Task[Any] = Task.from_document(document)
                with suppress(LeaseLost):  # Whoever has it now decides about it.
                    yield from self._settle(task, settlement, now)
        if own := [one for one in sound if one.own_timeout_sec is not None]:
            granted_at = lease.expires_at - self.settings.visibility_timeout
            yield from claim.apply_own_timeouts([one.document for one in own], lease, granted_at)
            for one in own:
                expires_at = one.document["lease_expires_at"]
                one.lease = lease.model_copy(update={"expires_at": expires_at})
        return sound

    def next_look_sec(self) -> Operation[float | None]:
        """Give the seconds after which a pop that waits should look, whatever the stream says.

        When the next delayed task comes due, or, as the stream does not tell of a resume, when
        a pause is due to be read again.
        """
        if not (yield from self._may_claim()):
            return REMEMBERED_SEC
        now = yield from self._now()
        due_at = yield from inspect.next_due(self.name)
        return None if due_at is None else max((due_at - now).total_seconds(), 0.0)


def worker_name(given: str | None = None) -> str:
    """Name one life of a worker: as it is called, or where it runs, and no two are the same.

    One under a former name would pass for the one that died: its heartbeat would hide that the
    former one's has ended, and with it the tasks that it held.
    """
    return f"{given or f'{_HOST}:{os.getpid()}'}:{secrets.token_hex(3)}"


def clearly_deliverable(document: Document) -> bool:
    """Tell the ordinary task, which most are, from one that needs a closer look."""
    get, attempts, most = document.get, document["attempts"], document.get("max_attempts")
    return (
        type(attempts) is int
        and type(most) is int
        and attempts <= most
        and get("expires_at") is None
        and get("visibility_timeout_sec") is None
        and type(document["_id"]) is not dict
    )


def undeliverable(document: Document, now: datetime) -> Settlement | None:
    """Decide whether a claimed task must not run, and what becomes of it."""
    if reason := malformed(document):
        return settle.failed(now, settle.invalid_task(reason, now), delivered=False)
    task: Task[Any] = Task.from_document(document)
    if task.expires_at is not None and task.expires_at <= now:
        message, code = "not delivered before it expired", "expired"
    elif task.attempts > task.max_attempts:
        message, code = f"all {task.max_attempts} attempts are used up", "max_attempts"
    else:
        return None
    return settle.failed(now, TaskError(message=message, code=code, at=now), delivered=False)


def malformed(document: Document) -> str | None:
    """Say which field of a claimed task cannot be what it is, and why, if there is one."""
    attempts, expires_at = document["attempts"], document.get("expires_at")
    own_sec = document.get("visibility_timeout_sec")
    if isinstance(document["_id"], dict):
        return f"_id={shorten(document['_id'])} is not valid: {claim.GOOD_IDS}"
    if not isinstance(attempts, int | float) or not math.isfinite(attempts):
        return f"attempts={shorten(attempts)} is not valid: give a number"
    if expires_at is not None and not isinstance(expires_at, datetime):
        return f"expires_at={shorten(expires_at)} is not valid: give a date up to the year 9999"
    if own_sec is not None:
        try:
            to_positive_timedelta(own_sec)
        except ValueError as exc:
            return f"visibility_timeout_sec={shorten(own_sec)} is not valid: {exc}"
    return None
