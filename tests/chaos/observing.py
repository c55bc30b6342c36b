"""Write to the ledger what a process does: settlements, renewals, lost leases and failed calls.

Hooks of a worker run before its settlements are written. So the function that writes a batch is
wrapped: when it returns, MongoDB has acknowledged the batch, except for the leases that were lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pymongo.errors import (
    BulkWriteError,
    ConnectionFailure,
    OperationFailure,
    PyMongoError,
    WriteConcernError,
)

from microqueue import TaskStatus
from microqueue.drivers import driver
from microqueue.hooks import Hooks
from microqueue.operations.call import Call, Span
from microqueue.task_ids import id_key
from microqueue.worker import completer
from microqueue.worker.completer import Done, PendingSettlement
from microqueue.worker.in_flight import LeasedTask, lease_now
from tests.chaos.ledger import Ledger, now

SLOW_SEC = 1.0
"""A call that takes so long is noted: the server or this process did not get on."""
SERVER_CODES = {
    *(6, 7, 89, 9001),  # The host cannot be reached.
    *(91, 11600),  # It shuts down.
    *(189, 10058, 10107, 11602, 13435, 13436),  # It is no longer primary, or not yet.
    *(50, 202, 262, 290, 11601),  # The time is over, or an operator has killed the call.
    *(64, 79, 100),  # The write concern is not met.
    14031,  # Its disk is full.
    *(
        43,
        134,
        234,
        237,
        251,
    ),  # A read concern, a cursor or a transaction that an election has ended.
}
"""What a server says when it is in trouble; other codes blame the call."""


def outcome_of(pending: PendingSettlement) -> str:
    """Return what a settlement makes of its task: ``failed`` also after the last attempt."""
    settlement = pending.settlement
    if isinstance(settlement, Done):
        return "done"
    if settlement.changes.get("status") == TaskStatus.FAILED:
        return "failed"
    return str(settlement.outcome.value)


def key_of(leased: Any) -> str:
    """Return the key of a task: of its payload, with its queue for a message, or its own id."""
    document = getattr(leased, "document", None)
    headers = leased.headers if document is None else document.get("headers") or {}
    if "schedule" in headers:
        return str(leased.id)
    key = str(leased.payload["key"])
    if "topic" in headers:
        return f"{key}>{leased.queue if document is None else document['queue']}"
    return key


def line_of(event: str, leased: Any, **fields: Any) -> dict[str, Any]:
    """Return a line about a task and its lease."""
    token = None if leased.lease is None else leased.lease.token
    return {"event": event, "key": key_of(leased), "token": token, **fields}


class LeaseNotes(Hooks):
    """Notes the leases that a worker lost, and when it decides to release a task."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def on_lease_lost(self, task: Any) -> None:
        """Write a line."""
        self._ledger.write_all([line_of("lost", task)])

    def on_release(self, task: Any) -> None:
        """Write a line, before the release is written."""
        self._ledger.write_all([line_of("releasing", task)])


def observe_workers(ledger: Ledger) -> None:
    """Let the workers of this process write their settlements and renewals."""
    commit, renew = completer.commit, LeasedTask.renew

    def observed(queue: Any, batch: Sequence[PendingSettlement]) -> Any:
        lost = yield from commit(queue, batch)
        refused = {id_key(error.task_id) for error in lost}
        instant = now()
        ledger.write_all(
            line_of("settled", one.task.claimed, outcome=outcome_of(one), at=instant)
            for one in batch
            if id_key(one.task.claimed.id) not in refused
        )
        return lost

    def renewed(self: LeasedTask, at: float, *, lost: bool = False) -> None:
        renew(self, at, lost=lost)
        if not lost:
            until = at + self.lease_sec - lease_now() + now()
            ledger.write_all([line_of("renewed", self.claimed, lease_until=until)])

    completer.commit = observed
    LeasedTask.renew = renewed  # type: ignore[method-assign]  # That is the purpose.


def observe_calls(ledger: Ledger) -> None:
    """Let this process write which calls failed, or took long, and when."""

    def note(call: Call, begin: float, error: BaseException | None) -> None:
        until = now()
        failed = error is not None and is_trouble(error)
        if failed or (call.span is Span.BRIEF and until - begin >= SLOW_SEC):
            name = type(error).__name__ if failed else None
            line = {"event": "trouble", "at": begin, "until": until, "call": call.method}
            ledger.write_all([{**line, "error": name}])

    send, send_async = driver.SyncDriver._send, driver.AsyncDriver._send  # noqa: SLF001

    def observed(self: Any, call: Call, limit_sec: float) -> Any:
        begin = now()
        try:
            reply = send(self, call, limit_sec)
        except BaseException as exc:
            note(call, begin, exc)
            raise
        note(call, begin, None)
        return reply

    async def observed_async(self: Any, call: Call, limit_sec: float) -> Any:
        begin = now()
        try:
            reply = await send_async(self, call, limit_sec)
        except BaseException as exc:
            note(call, begin, exc)
            raise
        note(call, begin, None)
        return reply

    driver.SyncDriver._send = observed  # type: ignore[method-assign]  # noqa: SLF001
    driver.AsyncDriver._send = observed_async  # type: ignore[method-assign]  # noqa: SLF001


def is_trouble(error: BaseException) -> bool:
    """Return whether an error is one of the server or the connection, and not of what was sent."""
    if isinstance(error, BulkWriteError):
        details = error.details or {}
        codes = {one.get("code") for one in details.get("writeErrors") or ()}
        return bool(details.get("writeConcernErrors") or codes & SERVER_CODES)
    if isinstance(error, OperationFailure):
        return isinstance(error, WriteConcernError) or error.timeout or error.code in SERVER_CODES
    return isinstance(error, PyMongoError) and (
        error.timeout or isinstance(error, ConnectionFailure)
    )
