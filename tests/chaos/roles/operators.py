"""Operators: they replay dead letters and discard some, while everything else continues."""

from __future__ import annotations

import signal
import threading
from typing import Any

from pymongo.read_concern import ReadConcern

from microqueue import DeadLetterFilter, MicroqueueError, Queue, QueueSettings
from tests.chaos.handlers import Participant
from tests.chaos.ledger import now

BATCH = 5
"""A replay in small batches meets the discards of the other thread."""


def run_operator(me: Participant, database: str, *, queue: str, every: float = 3.0) -> None:
    """Replay all dead letters of a queue again and again, and discard a few at the same time."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    values: Any = {**dict(me.setup.settings(database)), "batch_size": BATCH}
    address = me.setup.address(database)
    with Queue[Any].from_uri(address, queue, settings=QueueSettings(**values)) as opened:
        while not stopping.wait(every):
            discarding = threading.Thread(target=_discard, args=(me, opened))
            discarding.start()
            _replay(me, opened)
            discarding.join()


def _replay(me: Participant, queue: Queue[Any]) -> None:
    fields: dict[str, Any] = {"queue": queue.name}
    try:
        before = _dead_letters(queue)
        began = now()
        me.ledger.write("replay", phase="begin", **fields)
        report = queue.dead_letters.replay(DeadLetterFilter())
        skipped = set(map(str, report.skipped))
        both = before.items() & _dead_letters(queue).items()
        left = [key for one, key in both if one[0] not in skipped]
        skipped -= _on_their_way(queue)
        fields |= {"skipped": [key for one, key in both if one[0] in skipped], "began": began}
        me.ledger.write("replay", phase="end", count=report.replayed, left=left, **fields)
    except Exception as exc:  # noqa: BLE001 (of the driver or of the queue: an outage)
        me.ledger.write("replay", phase="failed", error=repr(exc)[:200], **fields)


def _dead_letters(queue: Queue[Any]) -> dict[tuple[str, Any], str]:
    """Return the keys of the dead letters, by their id and the end of their last attempt.

    A plain query of what a majority has. One that is on its way to the other collection is missing,
    and so is judged by the next replay.
    """
    found = _find(queue, {"payload.key": 1, "finished_at": 1})
    return {(str(one["_id"]), one["finished_at"]): one["payload"]["key"] for one in found}


def _on_their_way(queue: Queue[Any]) -> set[str]:
    """Return the ids of dead letters that a call has begun to move back, as one that was killed."""
    return {str(one["_id"]) for one in _find(queue, {"_id": 1}, replaying={"$ne": None})}


def _find(queue: Queue[Any], fields: dict[str, Any], **more: Any) -> Any:
    database = queue._connection.client.get_default_database()  # type: ignore[union-attr]  # noqa: SLF001
    name = "tasks_dlq" if queue.settings.separate_dlq else "tasks"
    collection = database.get_collection(name, read_concern=ReadConcern("majority"))
    return collection.find({"queue": queue.name, "status": "failed", **more}, fields)


def _discard(me: Participant, queue: Queue[Any]) -> None:
    """Discard some dead letters, one by one, the oldest first."""
    try:
        page = queue.dead_letters.list(code="planned", limit=20 * BATCH)
    except MicroqueueError:
        return  # The next round tries again.
    for letter in reversed(list(page)[::4]):
        key = letter.payload["key"]
        me.ledger.write("discarding", key=key)
        try:
            gone = queue.dead_letters.discard(letter.id, missing_ok=True)
        except MicroqueueError:
            me.ledger.write("perhaps discarded", key=key)
            return
        me.ledger.write("discarded" if gone else "kept", key=key)
