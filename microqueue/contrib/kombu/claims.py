"""Claims: take messages of a queue under a lease, and hold them until they are settled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from microqueue import error_codes
from microqueue.contrib.kombu.broker import Broker
from microqueue.contrib.kombu.deliveries import Settle, logger
from microqueue.contrib.kombu.messages import to_message
from microqueue.contrib.kombu.recent import Recent
from microqueue.core import SyncCore
from microqueue.errors import InvalidPayload
from microqueue.operations import broker as operations
from microqueue.operations import claim, settle
from microqueue.operations.call import Document, Operation
from microqueue.operations.claim import Spread
from microqueue.task import Claimed, Lease, Task


class MessageClaimer:
    """Claims messages, in one thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._last_claim_at: datetime | None = None
        self._spreads: Recent[Spread] = Recent()

    def claim(self, queue: str, limit: int) -> list[tuple[str, dict[str, Any]]]:
        """Claim up to ``limit`` messages of a queue; return them with their delivery tags."""
        return self._claim(queue, limit)[0]

    def claim_next(self, queue: str) -> tuple[str, dict[str, Any]] | None:
        """Claim the next message that can be delivered; None if there is none."""
        claimed = 1
        while claimed:
            held, claimed = self._claim(queue, 1)
            if held:
                return held[0]
        return None

    def _claim(self, queue: str, limit: int) -> tuple[list[tuple[str, dict[str, Any]]], int]:
        """Return the messages that can be delivered, and how many were claimed in all."""
        core = self._broker.queue(queue)
        keep = not self._broker.declared(queue).transient
        if (failed := self._broker.lost_claims.take(queue)) is not None:
            # A claim whose reply was lost may have taken messages, under this lease.
            with self._kept_if_lost(queue, failed):
                claimed = core.run(core.recover_claim(failed.token, failed.worker_id))
            if claimed:
                return self._hold(claimed, keep=keep), len(claimed)
        lease = core.run(core.new_lease(self._broker.worker_id, after=self._last_claim_at))
        spread = self._spreads.get(queue) or self._spreads.put(queue, Spread())
        with self._kept_if_lost(queue, lease):
            documents: list[Document] = core.run(
                claim.pop_many(core.name, lease, limit=limit, spread=spread, one_reply=True)
            )
        self._last_claim_at = lease.started_at
        found = core.run(self._deliverable(core, documents, lease))
        return self._hold(found, keep=keep), len(documents)

    @contextmanager
    def _kept_if_lost(self, queue: str, lease: Lease) -> Iterator[None]:
        """Keep the lease of a claim for another attempt if this one fails."""
        try:
            yield
        except BaseException:
            self._broker.lost_claims.add(queue, lease)
            raise

    def _deliverable(
        self, core: SyncCore[Any], documents: list[Document], lease: Lease
    ) -> Operation[list[Claimed]]:
        """Return the messages that may be delivered; end the expired and the exhausted ones."""
        now = lease.started_at
        found: list[Claimed] = []
        expired: list[Claimed] = []
        dead: list[tuple[Task[Any], settle.Settlement]] = []
        for document in documents:
            one = Claimed(document, lease, document.get("payload"))
            settlement = claim.settlement_if_undeliverable(document, now)
            code = settlement.error.code if settlement and settlement.error else None
            if settlement is None:
                found.append(one)
            elif code == error_codes.EXPIRED and not self._broker.options.dead_letter_expired:
                expired.append(one)
            else:
                dead.append((one.task, settlement))
        if expired:
            yield from operations.drop(expired)
        if dead:
            yield from settle.settle_batch([], dead, now=now, settings=core.settings)
        return found

    def _hold(self, claimed: Iterable[Claimed], *, keep: bool) -> list[tuple[str, dict[str, Any]]]:
        deliveries = self._broker.deliveries
        held: list[tuple[str, dict[str, Any]]] = []
        for place, one in enumerate(claimed):
            tag = f"{one.lease.token if one.lease else ''}.{place}"
            deliveries.add(tag, one, keep=keep)
            try:
                held.append((tag, to_message(one.payload, tag, redelivered=one.attempts > 1)))
            except InvalidPayload as exc:
                fields = {"task_id": str(one.id), "queue": one.task.queue, "dead_letter": True}
                logger.error("task %s becomes a dead letter: %s", one.id, exc, extra=fields)  # noqa: TRY400
                deliveries.settle(tag, Settle.DEAD_LETTER)
        return held
