"""Watch: which changes mean that a queue may have something to pop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bson import Timestamp

from microqueue.operations import filters


def new_work(queues: Sequence[str]) -> list[dict[str, Any]]:
    """Select inserts into the queues, and updates that make any task ready.

    An update does not say which queue it was in, so some of them wake for nothing; the
    pop that follows finds that out.
    """
    changed = "updateDescription.updatedFields"
    return [
        {
            "$match": {
                "$or": [
                    {"operationType": "insert", "fullDocument.queue": {"$in": list(queues)}},
                    {f"{changed}.status": filters.PENDING},
                    {f"{changed}.next_retry_at": {"$type": "null"}},
                ]
            }
        },
        {"$project": {"_id": 1}},
    ]


def from_now_on(hello: Mapping[str, Any]) -> Timestamp | None:
    """Read where a stream has to begin that is opened later; nothing if there are no streams.

    Motor opens a stream when it is first read, and would not tell what happened until then.
    """
    last = hello.get("operationTime")
    return Timestamp(last.time, last.inc + 1) if isinstance(last, Timestamp) else None
