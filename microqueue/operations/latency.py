"""Latency: how long done tasks waited and ran, counted where they are.

The server sorts durations into classes, twenty for each factor of ten, and sends the counts of
the classes: a few hundred numbers for any number of tasks. A class is 12 % wide, so a
percentile is right to within 6 %.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from microqueue.model import Model
from microqueue.operations import filters
from microqueue.operations.call import Call, Document, Operation

CLASSES_PER_TEN = 20
MILLISECONDS = 1000


class Latency(Model):
    """What the done tasks of a queue took, in seconds: until they began, and to run.

    ``done`` is the number of tasks that were measured; ``estimated``: there were more.
    """

    queue: str
    done: int
    wait_p50: float
    wait_p95: float
    wait_p99: float
    run_p50: float
    run_p95: float
    run_p99: float
    estimated: bool = False


def latency(
    since: datetime, queue: str | None = None, *, limit: int | None = None
) -> Operation[list[Latency]]:
    """Measure the tasks done since an instant: from enqueue to first start, and the last run.

    With a limit, so many are measured, the newest of all queues.
    """
    began = {"$ifNull": [{"$arrayElemAt": ["$history.started_at", 0]}, "$started_at"]}
    group = {
        "_id": {
            "queue": "$queue",
            "wait": _class_of({"$subtract": [began, "$created_at"]}),
            "run": _class_of({"$subtract": ["$finished_at", "$started_at"]}),
        },
        "count": {"$sum": 1},
    }
    selection: Document = {**filters.FINISHED, "finished_at": {"$gte": since}}
    stages: list[Document] = []
    if limit is not None:
        # The index knows no queue: a filter would read past any number of others.
        stages = [{"$sort": {"finished_at": -1}}, {"$limit": limit + 1}]
    elif queue is not None:
        selection["queue"] = queue
    counted: list[Document] = yield Call(
        "aggregate", [{"$match": selection}, *stages, {"$group": group}]
    )
    more = limit is not None and sum(one["count"] for one in counted) > limit
    waits: dict[str, Counter[int]] = {}
    runs: dict[str, Counter[int]] = {}
    for one in counted:
        name = str(one["_id"]["queue"])
        if queue not in {None, name}:
            continue
        waits.setdefault(name, Counter())[int(one["_id"]["wait"] or 0)] += one["count"]
        runs.setdefault(name, Counter())[int(one["_id"]["run"] or 0)] += one["count"]
    return [
        Latency(
            queue=name,
            done=waits[name].total(),
            **_percentiles("wait", waits[name]),
            **_percentiles("run", runs[name]),
            estimated=more,
        )
        for name in sorted(waits)
    ]


def _class_of(milliseconds: Document) -> Document:
    at_least_one = {"$max": [1, milliseconds]}
    return {"$floor": {"$multiply": [CLASSES_PER_TEN, {"$log10": at_least_one}]}}


def _percentiles(name: str, counts: Counter[int]) -> dict[str, Any]:
    values = percentiles(counts, (50, 95, 99))
    return {f"{name}_p{share}": value for share, value in zip((50, 95, 99), values, strict=True)}


def percentiles(counts: Counter[int], shares: Iterable[int]) -> list[float]:
    """Read percentiles from the counts of classes, in seconds: the middle of their class."""
    found = []
    for share in shares:
        left = counts.total() * share / 100
        for number in sorted(counts):
            left -= counts[number]
            if left <= 0:
                middle = 10 ** ((number + 0.5) / CLASSES_PER_TEN)
                found.append(round(middle / MILLISECONDS, 4))
                break
    return found
