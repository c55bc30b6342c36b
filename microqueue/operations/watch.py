"""Watch: which changes mean that a queue may have something to pop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
