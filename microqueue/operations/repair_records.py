"""The rules of a repair for schedules, workers, pauses, bindings and locks.

There are few such documents, so they are read whole and examined here. Each write matches the
fields that were read. The last rule compares ``tasks`` with ``tasks_dlq``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from microqueue.clock import later
from microqueue.errors import MicroqueueError
from microqueue.operations import bindings, filters, pauses, schedules
from microqueue.operations.call import Call, Document, Operation, Span, Target
from microqueue.operations.export import BY_ID
from microqueue.operations.repair import Findings, Moment, batches
from microqueue.reports import LATE_BEATS, MISSED_BEATS
from microqueue.schedule import timing_of
from microqueue.task import LARGEST_COUNT
from microqueue.task_ids import id_key

PAGE = 10_000
"""How many documents one call reads."""
HEARTBEAT_SEC = 3.0
"""The heartbeat of a worker whose registration has none; a live one writes its own."""


@dataclass(frozen=True)
class RecordRule:
    """One thing that can be wrong with a document of another collection.

    Args:
        name: The name in reports.
        wrong: What is wrong.
        remedy: What a repair does.
        target: The collection.
        scope: Returns the filter of the documents that belong to a collection of tasks.
        examine: Returns the fields to set; none if it can only be reported, and None if the
            document is fine.
        fence: The fields that must be as they were read.
    """

    name: str
    wrong: str
    remedy: str
    target: Target
    scope: Callable[[str], Document]
    examine: Callable[[Document, Moment], Document | None]
    fence: Sequence[str]


def check_records(rule: RecordRule, moment: Moment, *, apply: bool) -> Operation[Findings]:
    """Examine the documents of a rule, and mend them with ``apply``. Safe to repeat."""
    findings = Findings()
    options: Document = {"hint": BY_ID, "sort": BY_ID, "limit": PAGE + 1}
    while True:
        page = yield Call(
            "find", rule.scope(moment.collection), target=rule.target, span=Span.LONG, **options
        )
        yield from _check_page(rule, page[:PAGE], moment, findings, apply=apply)
        if len(page) <= PAGE:
            return findings
        options["min"] = {"_id": page[PAGE]["_id"]}


def _check_page(
    rule: RecordRule, page: Sequence[Document], moment: Moment, findings: Findings, *, apply: bool
) -> Operation[None]:
    for document in page:
        changes = rule.examine(document, moment)
        if changes is None:
            continue
        findings.documents += 1
        findings.note(rule.name, document["_id"])
        mended = False
        if apply and changes:
            names = {*rule.fence, *changes}
            fence = {name: {"$eq": document.get(name)} for name in sorted(names)}
            key = {"_id": {"$eq": document["_id"]}}
            result = yield Call(
                "update_one", {**fence, **key}, {"$set": changes}, target=rule.target
            )
            mended = bool(result.matched_count)
        findings.of(rule.name).mended += mended
        if not mended:
            findings.of(rule.name).left += 1
            findings.left += 1


def _is_date(value: Any) -> bool:
    return isinstance(value, datetime)


def _is_positive(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value <= LARGEST_COUNT
    )


def _changed(document: Document, wanted: Document) -> Document | None:
    """Return the fields that have another value than wanted, or None if none has."""
    changes = {
        name: value
        for name, value in wanted.items()
        if name not in document or document[name] != value
    }
    return changes or None


# Schedules


def _of_schedules(collection: str) -> Document:
    return {"$or": [{"collection": collection}, {"_id": _starts(schedules.key_prefix(collection))}]}


def _starts(text: str) -> Document:
    return {"$regex": f"^{re.escape(text)}"}


def _schedule_names(document: Document, moment: Moment) -> Document | None:
    names = schedules.names_in(document["_id"])
    if names is None or names[0] != moment.collection:
        return None
    return _changed(document, dict(zip(("collection", "queue", "name"), names, strict=True)))


def _is_named(document: Document, moment: Moment) -> bool:
    return _schedule_names(document, moment) is None


def _schedule(document: Document, moment: Moment) -> Document | None:
    if not _is_named(document, moment):
        return None  # It is examined again once it has its names.
    try:
        _following(document, moment)
    except (MicroqueueError, LookupError, OSError, TypeError, ValueError, OverflowError):
        return {}
    return None


def _following(document: Document, moment: Moment) -> datetime | None:
    """Return the next run after now."""
    return timing_of(schedules.read({**document, "next_at": None})).after(moment.now)


def _schedule_next(document: Document, moment: Moment) -> Document | None:
    if not _is_named(document, moment) or _schedule(document, moment) is not None:
        return None
    next_at = document.get("next_at")
    if document.get("paused"):
        return None if next_at is None else {"next_at": None}
    if _is_date(next_at):
        return None
    following = _following(document, moment)
    if next_at is None and following is None:
        return None  # It has no further run.
    return {"next_at": following}


# Workers


def _worker(document: Document, moment: Moment) -> Document | None:
    get: Any = document.get
    beat_sec = get("heartbeat_sec") if _is_positive(get("heartbeat_sec")) else HEARTBEAT_SEC
    beat_at = moment.now
    if _is_date(get("heartbeat_at")):
        with suppress(OverflowError):  # It is no time from which a deadline can be computed.
            later(get("heartbeat_at"), timedelta(seconds=beat_sec * MISSED_BEATS))
            beat_at = get("heartbeat_at")
    queues = get("queues")
    wanted: Document = {
        "heartbeat_sec": beat_sec,
        "heartbeat_at": beat_at,
        "started_at": get("started_at") if _is_date(get("started_at")) else beat_at,
        "concurrency": get("concurrency") if _is_positive(get("concurrency")) else 1,
        "queues": queues if isinstance(queues, list) else [],
    }
    for name, beats in (("gone_at", MISSED_BEATS), ("late_at", LATE_BEATS)):
        ends = later(beat_at, timedelta(seconds=beat_sec * beats))
        wanted[name] = get(name) if _is_date(get(name)) else ends
    if get("missed_at") is not None and not _is_date(get("missed_at")):
        wanted["missed_at"] = None
    return _changed(document, wanted)


# Pauses, bindings and locks


def _of_pauses(collection: str) -> Document:
    return {"$or": [{"collection": collection}, {"_id": _starts(pauses.key_prefix(collection))}]}


def _pause(document: Document, moment: Moment) -> Document | None:
    prefix = pauses.key_prefix(moment.collection)
    key, paused_at = document["_id"], document.get("paused_at")
    owner = document.get("collection")
    if isinstance(owner, str) and owner != moment.collection:
        return None
    if not isinstance(key, str) or not key.startswith(prefix):
        return {}
    wanted = {"collection": moment.collection, "queue": key.removeprefix(prefix)}
    stamp = paused_at if _is_date(paused_at) else moment.now
    return _changed(document, {**wanted, "paused_at": stamp})


def _binding(document: Document, _: Moment) -> Document | None:
    return {} if bindings.is_malformed(document) else None


def _lock(document: Document, moment: Moment) -> Document | None:
    return None if _is_date(document.get("expires_at")) else {"expires_at": moment.now}


def _of_collection(collection: str) -> Document:
    return {"collection": collection}


def _of_locks(collection: str) -> Document:
    return {"_id": {"$regex": f"^sweeper:{re.escape(collection)}(:|$)"}}


RECORD_RULES: tuple[RecordRule, ...] = (
    RecordRule(
        "schedule-names",
        "a schedule has not the names that its `_id` has, so it is not found",
        "it gets the names of its `_id`",
        Target.SCHEDULES,
        _of_schedules,
        _schedule_names,
        ("revision",),
    ),
    RecordRule(
        "schedule",
        "a schedule is not valid, so it cannot run",
        "it is only reported: put it again, or remove it",
        Target.SCHEDULES,
        _of_schedules,
        _schedule,
        (),
    ),
    RecordRule(
        "schedule-next",
        "`next_at` of a schedule is no date, so it never runs; or it is paused and has one",
        "it becomes the next run after now; of a paused schedule it is removed",
        Target.SCHEDULES,
        _of_schedules,
        _schedule_next,
        ("revision", "paused"),
    ),
    RecordRule(
        "worker",
        "the registration of a worker is malformed, so sweeps cannot tell whether it lives",
        "it counts from now; a live worker overwrites it, and a dead one is reclaimed",
        Target.WORKERS,
        _of_collection,
        _worker,
        ("heartbeat_at",),
    ),
    RecordRule(
        "pause",
        "the pause of a queue is malformed, so its workers cannot read it",
        "it gets the queue of its `_id`, and starts now if it has no start",
        Target.PAUSES,
        _of_pauses,
        _pause,
        (),
    ),
    RecordRule(
        "binding",
        "a binding of a topic is malformed, so `publish` fails",
        "it is only reported: unbind its queue, and bind it again",
        Target.BINDINGS,
        _of_collection,
        _binding,
        (),
    ),
    RecordRule(
        "lock",
        "the sweeper's lock has no end, so no sweeper runs",
        "it ends now",
        Target.LOCKS,
        _of_locks,
        _lock,
        ("token",),
    ),
)


# The same id in both collections

IN_BOTH = RecordRule(
    "in-both",
    "a task and a dead letter of `tasks_dlq` have the same id, and no move is under way",
    "it is only reported: compare the two, and delete or discard one of them",
    Target.DEAD_LETTERS,
    _of_collection,
    lambda *_: None,  # It needs both collections, see find_in_both.
    (),
)
LIFE = ("created_at", "insert_token")
COMPARED = dict.fromkeys(["status", "moves", "version", "replaying.at", *LIFE], 1)


def find_in_both(
    start: Sequence[Any], end: Sequence[Any], *, batch_size: int
) -> Operation[Findings]:
    """Find the ids of a part of ``tasks_dlq`` that ``tasks`` has too, without a move under way.

    A move or a replay may happen in between. So both are read twice, and must not have changed.
    """
    options: Document = {"hint": BY_ID}
    if start:
        options["min"] = {"_id": start[0]}
    if end:
        options["max"] = {"_id": end[0]}
    copies = yield Call(
        "find", filters.DEAD, COMPARED, target=Target.DEAD_LETTERS, span=Span.LONG, **options
    )
    findings = Findings()
    for batch in batches(copies, batch_size):
        yield from _compare(batch, findings)
    return findings


def _compare(copies: Sequence[Document], findings: Findings) -> Operation[None]:
    pairs = yield from _pairs(copies)
    suspects = {key: pair for key, pair in pairs.items() if _is_stuck(*pair)}
    if not suspects:
        return
    these = filters.any_of(copy["_id"] for copy, _ in suspects.values())
    dead = {**these, **filters.DEAD}
    again = yield from _pairs((yield Call("find", dead, COMPARED, target=Target.DEAD_LETTERS)))
    for key, pair in suspects.items():
        if again.get(key) == pair:
            findings.documents += 1
            findings.left += 1
            findings.note(IN_BOTH.name, pair[0]["_id"])
            findings.of(IN_BOTH.name).left += 1


def _pairs(copies: Sequence[Document]) -> Operation[dict[Any, tuple[Document, Document]]]:
    if not copies:
        return {}
    found = yield Call("find", filters.any_of(one["_id"] for one in copies), COMPARED)
    tasks = {id_key(one["_id"]): one for one in found}
    return {key: (copy, tasks[key]) for copy in copies if (key := id_key(copy["_id"])) in tasks}


def _is_stuck(copy: Document, task: Document) -> bool:
    """Return whether no sweep would resolve this pair."""
    if any(copy.get(name) != task.get(name) for name in LIFE):
        return True  # Another task had the id before.
    if task.get("status") != filters.FAILED:
        return True
    if "replaying" in copy or "replaying" in task:
        return False  # The sweeper finishes the replay.
    moves, version = task.get("moves", 0), copy.get("version")
    # The move of a copy that is not newer is completed.
    return isinstance(moves, int) and isinstance(version, int) and version > 2 * moves
