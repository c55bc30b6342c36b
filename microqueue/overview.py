"""How everything stands: what insights tell, and how it is put together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from microqueue.model import Model
from microqueue.operations.browse import Found
from microqueue.operations.call import Document
from microqueue.operations.insights import MinuteCounts, QueueOverview, RunningTask
from microqueue.operations.workers import WorkerInfo
from microqueue.sweeper import SweepReport
from microqueue.task import TaskId


class Held(Model):
    """A task as its worker's row shows it."""

    id: TaskId
    queue: str
    started_at: datetime | None
    lease_expires_at: datetime | None


class WorkerView(Model):
    """A registered worker, whether its heartbeat goes on, and what it holds."""

    id: str
    host: str | None
    pid: int | None
    queues: Sequence[str]
    concurrency: int | None
    handled: int | None
    running: int | None
    started_at: datetime | None
    heartbeat_at: datetime | None
    gone_at: datetime | None
    alive: bool
    holds: Sequence[Held]


class Overview(Model):
    """How everything stands at ``at``, by the server's clock."""

    at: datetime
    queues: Sequence[QueueOverview]
    minutes: MinuteCounts
    workers: Sequence[WorkerView]
    running: Sequence[RunningTask]
    last_sweep: SweepReport | None
    last_active_sweep: SweepReport | None


class TaskPage(Model):
    """Some documents of tasks; not ``complete``: the search stopped early to stay quick."""

    at: datetime
    documents: Sequence[Any]
    next_cursor: str | None
    complete: bool


def task_page(now: datetime, found: Found) -> TaskPage:
    """Put a page together."""
    return TaskPage.trusted(
        at=now,
        documents=found.documents,
        next_cursor=found.next_cursor,
        complete=found.complete,
    )


def queue_overview(name: str, counted: Document, minutes: MinuteCounts) -> QueueOverview:
    """Put together what was counted of one queue."""
    hours = {"done_last_hour": minutes.done_estimated, "failed_last_hour": minutes.failed_estimated}
    estimated = [*counted.get("estimated", ()), *(field for field, some in hours.items() if some)]
    return QueueOverview(
        queue=name,
        done_last_hour=sum(minutes.done.get(name, ())),
        failed_last_hour=sum(minutes.failed.get(name, ())),
        **{**counted, "estimated": tuple(estimated)},
    )


def worker_view(info: WorkerInfo, running: Sequence[RunningTask], now: datetime) -> WorkerView:
    """Show a worker with what it holds."""
    gone_at = info.gone_at()
    fields = set(WorkerView.model_fields) & set(WorkerInfo.model_fields)
    return WorkerView.trusted(
        **{name: getattr(info, name) for name in fields},
        gone_at=gone_at,
        alive=gone_at > now,
        holds=[
            Held.trusted(
                id=task.id,
                queue=task.queue,
                started_at=task.started_at,
                lease_expires_at=task.lease_expires_at,
            )
            for task in running
            if task.worker_id == info.id
        ],
    )


def read_report(document: Document | None) -> SweepReport | None:
    """Read a stored report; what another version stored beside it is left out."""
    if document is None:
        return None
    known = {name: document[name] for name in SweepReport.model_fields if name in document}
    return SweepReport(**known)
