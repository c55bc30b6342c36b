"""The error codes that microqueue itself writes into tasks.

All other codes are those of users: what they pass to ``Fail`` or ``mark_failure``, or the type of
an exception.
"""

from __future__ import annotations

CANCELLED = "cancelled"
EXPIRED = "expired"
LEASE_EXPIRED = "lease_expired"
WORKER_GONE = "worker_gone"
MAX_ATTEMPTS = "max_attempts"
POISON = "poison"
UNKNOWN_TASK = "unknown_task"
INVALID_PAYLOAD = "invalid_payload"
INVALID_RESULT = "invalid_result"
UNSTORABLE = "unstorable"
INVALID_TASK = "invalid_task"
BY_HAND = "by_hand"
REJECTED = "rejected"

MEANINGS = {
    CANCELLED: "was cancelled",
    EXPIRED: "was not delivered within `expires_in`",
    LEASE_EXPIRED: "was in its last attempt when its lease expired",
    WORKER_GONE: "was in its last attempt when its worker died",
    MAX_ATTEMPTS: "was waiting with no attempts left",
    POISON: (
        "crashed `max_crashes` workers, or is a message of the Kombu transport that was requeued "
        "after its last delivery"
    ),
    UNKNOWN_TASK: "has no name, or a name that the worker of its last attempt did not have",
    INVALID_PAYLOAD: "has a payload that does not fit the model, or the arguments of the function",
    INVALID_RESULT: "returned a value that MongoDB cannot store, with `keep_result`",
    UNSTORABLE: "would exceed MongoDB's document size with its result",
    INVALID_TASK: "is a [malformed document](repair.md)",
    BY_HAND: "was marked as failed on the dashboard",
    REJECTED: (
        "is a message of the Kombu transport that its consumer rejected, if "
        "`dead_letter_rejected` is set"
    ),
}
"""What a dead letter with each code is, as ``docs/queues.md`` says it: "the task ..."."""
