"""What viewers are told: one message per type, or per sweep, and one that asks to refresh."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from microqueue.dashboard.views import shown_id
from microqueue.operations import events, id_order
from microqueue.operations.events import Change
from microqueue.sweeper import SweepReport

MOST_TASKS = 20
Told: TypeAlias = tuple[str, dict[str, Any]]


def messages_of(
    by_type: Mapping[str, Sequence[Change]], at: str, queues: Mapping[Hashable, str]
) -> list[Told]:
    """Tell what happened. ``queues`` are those of tasks whose change does not say, by id."""
    messages: list[Told] = []
    for kind, some in by_type.items():
        if kind == "sweep.finished":
            for one in some:
                messages += _sweep_messages(at, one.report)
        elif kind.startswith("worker."):
            names = [str(one.id) for one in some[:MOST_TASKS]]
            messages.append((kind, {"at": at, "count": len(some), "workers": names}))
        elif kind.startswith("queue."):
            messages.append((kind, {"at": at, "queues": sorted(_named(some))}))
        elif kind != events.REFRESH:
            shown = [
                {"id": shown_id(one.id), "queue": queues.get(id_order.key(one.id), one.queue)}
                for one in some[:MOST_TASKS]
            ]
            named = sorted({one["queue"] for one in shown if one["queue"]} | _named(some))
            data = {"at": at, "count": len(some), "queues": named, "tasks": shown}
            messages.append((kind, data))
    touched = _named(by_type.get(events.REFRESH, ()))
    touched |= {name for _, data in messages for name in data.get("queues", ())}
    types = list(dict.fromkeys(kind for kind, _ in messages))
    return [*messages, ("refresh", {"at": at, "queues": sorted(touched), "types": types})]


def _named(some: Sequence[Change]) -> set[str]:
    return {one.queue for one in some if one.queue}


def _sweep_messages(at: str, report: SweepReport) -> list[Told]:
    messages: list[Told] = []
    if report.reclaimed or report.buried:
        requeue = {"count": report.reclaimed, "dlq_count": report.buried}
        by = f"sweeper {report.sweeper_id}"
        messages.append(("queue.requeue", {"at": at, **requeue, "triggered_by": by}))
    if buried := report.buried + report.expired:
        messages.append(("queue.move_to_dlq", {"at": at, "count": buried}))
    data = {"at": at, "report": report.model_dump(mode="json")}
    return [*messages, ("sweep.finished", data)]
