"""Diagnostics: the state of a server, its collections and indexes. Everything is read-only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pymongo import IndexModel

from microqueue.errors import IndexConflict
from microqueue.operations import filters
from microqueue.operations.call import Call, Document, Operation, Target, dlq_collection_name
from microqueue.operations.claim import claim_update
from microqueue.operations.indexes import ensure_indexes, index_names
from microqueue.settings import QueueSettings
from microqueue.task import Lease


@dataclass(frozen=True)
class IndexFindings:
    """How the indexes of a collection differ from those that it should have."""

    existing: Mapping[str, Document]
    missing: Sequence[str] = ()
    expiry_differs: Sequence[str] = ()
    conflict: IndexConflict | None = None
    expected_expiry_sec: Mapping[str, int] = field(default_factory=dict)


def server_version() -> Operation[str]:
    """Return the server's version, such as ``6.0.5``."""
    reply = yield Call("command", "buildInfo", target=Target.DATABASE)
    return str(reply["version"])


def hello() -> Operation[Document]:
    """Return the server's role and time."""
    reply: Document = yield Call("command", "hello", target=Target.DATABASE)
    return reply


def list_indexes(*, target: Target = Target.TASKS) -> Operation[dict[str, Document]]:
    """Return the indexes of a collection by name; none if the collection does not exist."""
    found: dict[str, Document] = (yield Call("index_information", target=target)) or {}
    return found


def compare_indexes(
    wanted: Sequence[IndexModel], collection: str, *, target: Target = Target.TASKS
) -> Operation[IndexFindings]:
    """Return what ``ensure_indexes`` would do, by running it without performing its calls."""
    existing = yield from list_indexes(target=target)
    expiry = {
        model.document["name"]: model.document["expireAfterSeconds"]
        for model in wanted
        if "expireAfterSeconds" in model.document
    }
    missing: list[str] = []
    expiry_differs: list[str] = []
    conflict: IndexConflict | None = None
    rehearsal = ensure_indexes(wanted, collection, target=target)
    next(rehearsal)  # It asks for the indexes that exist.
    try:
        call = rehearsal.send(existing)
        while True:
            if call.method == "create_indexes":
                missing += [model.document["name"] for model in call.arguments[0]]
            else:
                expiry_differs.append(call.arguments[0]["index"]["name"])
            call = rehearsal.send(None)
    except StopIteration:
        pass
    except IndexConflict as exc:
        conflict = exc
    return IndexFindings(existing, missing, expiry_differs, conflict, expiry)


def explain_pop(queue: str, collection: str) -> Operation[list[str]]:
    """Return which indexes a pop uses; a full scan is ``COLLSCAN``."""
    never = datetime(1970, 1, 1, tzinfo=UTC)
    lease = Lease(token="explain", worker_id="explain", started_at=never, expires_at=never)  # noqa: S106 (it is not written)
    command = {
        "findAndModify": collection,
        "query": {"queue": queue, **filters.READY},
        "sort": dict(filters.READY_ORDER),
        "update": claim_update(lease),
    }
    explain = {"explain": command, "verbosity": "queryPlanner"}
    reply = yield Call("command", explain, target=Target.DATABASE)
    return list(dict.fromkeys(index_names(winning_plan(reply))))


def winning_plan(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the plan of an explanation; of a sharded collection, the plans of all shards."""
    plan: Mapping[str, Any] = reply["queryPlanner"]["winningPlan"]
    if "shards" not in plan:
        return plan
    return {"inputStages": [shard["winningPlan"] for shard in plan["shards"]]}


def count_overdue(now: datetime, *, most: int) -> Operation[int]:
    """Count tasks whose lease has expired and that are not reclaimed yet, up to ``most``."""
    count: int = yield Call("count_documents", filters.lease_expired(now), limit=most)
    return count


def has_separate_dlq(collection: str) -> Operation[bool]:
    """Return whether ``tasks_dlq`` exists: a queue keeps or kept its dead letters there."""
    name = dlq_collection_name(collection)
    names = yield Call(
        "list_collection_names",
        filter={"name": name},
        authorizedCollections=True,  # Without the right to list all, list those that are readable.
        target=Target.DATABASE,
    )
    return name in names


def every_queue(settings: QueueSettings) -> Operation[list[str]]:
    """Return the queues that have tasks, or dead letters in the DLQ collection."""
    names = set((yield from queue_names()))
    if settings.separate_dlq:
        names.update((yield from other_dlq_queues(names)))
    return sorted(names)


def queue_names() -> Operation[list[str]]:
    """Return the queues that have tasks, by one key of the index ``browse`` each."""
    names: list[str] = yield Call("distinct", "queue")
    return sorted(str(name) for name in names)


def other_dlq_queues(known: Collection[str]) -> Operation[list[str]]:
    """Return other queues that have dead letters in ``tasks_dlq``, by one key each.

    ``distinct`` would read all of them: it cannot skip in a partial index.
    """
    found: list[str] = []
    while True:
        elsewhere = {"queue": {"$gt": "", "$nin": [*known, *found]}, **filters.DEAD}
        another = yield Call("find", elsewhere, {"queue": 1}, limit=1, target=Target.DEAD_LETTERS)
        if not another:
            return found
        found.append(another[0]["queue"])
