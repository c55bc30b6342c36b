"""Examine a queue's surroundings, and say what to do about what is not right."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from pymongo import WriteConcern

from microqueue.clock import as_utc
from microqueue.core import core_of
from microqueue.insights import read_report
from microqueue.model import Model
from microqueue.operations import diagnostics as operations
from microqueue.operations import indexes, maintenance
from microqueue.operations.call import Target, letters_collection
from microqueue.operations.diagnostics import IndexFindings
from microqueue.queue import Queue
from microqueue.sweeper import SweepReport, describe_burials

OLDEST_VERSION = (4, 4)
LARGEST_SKEW_SEC = 1.0
LONGEST_UNSWEPT_SEC = 600.0
MOST_COUNTED = 10_000
RUN_INDEXES = "run: microqueue indexes"


class Check(Model):
    """One thing that was looked at. ``ok`` with an ``advice``: it works, and could be better."""

    name: str
    ok: bool
    detail: str
    advice: str | None = None


def examine(queue: Queue[Any]) -> list[Check]:
    """Look at the server, its clock, the indexes, the sweeper and the writes. Writes nothing.

    Raises :class:`ServerUnavailable` if there is no server to look at.
    """
    sent = datetime.now(UTC), time.monotonic()
    hello = core_of(queue).run(operations.hello())
    took = timedelta(seconds=time.monotonic() - sent[1])
    tasks = core_of(queue).collections.name
    findings = core_of(queue).run(
        operations.compare_indexes(indexes.task_indexes(queue.settings.retention), tasks)
    )
    checks = [
        describe_place(
            core_of(queue).collections.client.nodes,
            database=core_of(queue).collections.database.name,
            collection=tasks,
        ),
        check_version(core_of(queue).run(operations.server_version())),
        check_topology(hello),
        check_clock(as_utc(hello["localTime"]), here=sent[0] + took / 2, uncertain=took / 2),
        check_indexes(findings, tasks, made_on_demand=queue.settings.ensure_indexes),
    ]
    told = queue.settings.model_fields_set
    kept_apart = queue.settings.separate_dlq
    if not kept_apart and core_of(queue).run(operations.has_letters_apart(tasks)):
        kept_apart = "dead_letters" not in told
        checks.append(check_dead_letters(tasks, told="dead_letters" in told))
    if kept_apart:
        wanted, name = indexes.dead_letter_indexes(), letters_collection(tasks)
        there = core_of(queue).run(
            operations.compare_indexes(wanted, name, target=Target.DEAD_LETTERS),
        )
        checks.append(check_indexes(there, name, made_on_demand=queue.settings.ensure_indexes))
    if findings.existing:
        checks.append(check_pop(core_of(queue).run(operations.explain_pop(queue.name, tasks))))
        checks.append(check_retention(findings, told="retention" in told))
        now = queue.now()
        last, _ = core_of(queue).run(maintenance.read_report(tasks))
        overdue = core_of(queue).run(operations.count_overdue(now, most=MOST_COUNTED))
        checks.append(check_sweeper(read_report(last), overdue=overdue, now=now))
    checks.append(check_write_concern(core_of(queue).collections.tasks.write_concern))
    return checks


def describe_place(
    nodes: Iterable[tuple[str, int | None]], *, database: str, collection: str
) -> Check:
    """Tell which tasks are looked at. Of an address only the hosts: it may hold a password."""
    hosts = sorted(host if port is None else f"{host}:{port}" for host, port in nodes)
    detail = f"collection {collection!r} of database {database!r} at {', '.join(hosts)}"
    return Check(name="place", ok=True, detail=detail)


def check_version(version: str) -> Check:
    """Tell whether the server is one that microqueue supports."""
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    name, detail = "server version", f"MongoDB {version}"
    if found >= OLDEST_VERSION:
        return Check(name=name, ok=True, detail=detail)
    oldest = ".".join(str(number) for number in OLDEST_VERSION)
    advice = f"microqueue is made for MongoDB {oldest} and later; upgrade the server"
    return Check(name=name, ok=False, detail=detail, advice=advice)


def check_topology(hello: Mapping[str, Any]) -> Check:
    """Tell a replica set or sharded cluster from a standalone server."""
    name = "replica set"
    if set_name := hello.get("setName"):
        members = len(hello.get("hosts", ())) + len(hello.get("passives", ()))
        plural = "member" if members == 1 else "members"
        return Check(name=name, ok=True, detail=f"{set_name!r} with {members} {plural}")
    if hello.get("msg") == "isdbgrid":
        return Check(name=name, ok=True, detail="a sharded cluster")
    return Check(
        name=name,
        ok=True,
        detail="a standalone server",
        advice="the queue works, but without transactions, and waiting workers poll because "
        "there are no change streams; a replica set of one member has both",
    )


def check_clock(server_time: datetime, *, here: datetime, uncertain: timedelta) -> Check:
    """Compare this machine's clock with the server's, as far as the round trip allows."""
    skew_sec = (here - server_time).total_seconds()
    margin_sec = uncertain.total_seconds() + 0.001  # The server tells whole milliseconds.
    direction = "ahead of" if skew_sec > 0 else "behind"
    detail = f"this machine's is {abs(skew_sec):,.3f} s {direction} the server's"
    if abs(skew_sec) <= margin_sec:
        detail = f"agrees with the server's to {margin_sec * 1000:.0f} ms"
    advice = None
    if abs(skew_sec) - margin_sec > LARGEST_SKEW_SEC:
        advice = (
            "harmless for the queue, which goes by the server's clock alone; but compare the "
            "times in your own logs with care, and let NTP set this machine's clock"
        )
    return Check(name="clock", ok=True, detail=detail, advice=advice)


def check_indexes(findings: IndexFindings, collection: str, *, made_on_demand: bool) -> Check:
    """Tell whether all indexes are there and have the right shape."""
    name = f"indexes of {collection}"
    if findings.conflict is not None:
        index = findings.conflict.index
        return Check(
            name=name,
            ok=False,
            detail=f"{index!r} has another shape than it should",
            advice=f"drop it (db.{collection}.dropIndex({index!r})), then {RUN_INDEXES}",
        )
    if not findings.existing and made_on_demand:
        detail = "the collection does not exist yet"
        advice = f"nothing to do: the first write makes it, with its indexes; or {RUN_INDEXES}"
        return Check(name=name, ok=True, detail=detail, advice=advice)
    if findings.missing:
        detail = f"missing: {', '.join(findings.missing)}"
        return Check(name=name, ok=False, detail=detail, advice=RUN_INDEXES)
    return Check(name=name, ok=True, detail="all there")


def check_dead_letters(collection: str, *, told: bool) -> Check:
    """Tell where dead letters are kept if ``tasks_dlq`` is there, and the settings do without."""
    name, place = "dead letters", letters_collection(collection)
    if not told:
        detail = f"{place} is there, so commands keep them there; the settings do not say so"
        advice = (
            "set MICROQUEUE_DEAD_LETTERS=collection here, and dead_letters='collection' in all "
            f"services; or, if no service keeps them apart any more, drop {place} once it is empty"
        )
        return Check(name=name, ok=True, detail=detail, advice=advice)
    detail = f"kept in {collection}, as the settings say; but {place} is there, too"
    advice = (
        f"what is in {place} is not seen: set dead_letters to 'collection', or drop it if empty"
    )
    return Check(name=name, ok=True, detail=detail, advice=advice)


def check_pop(used: list[str]) -> Check:
    """Tell whether a pop reads the one index that keeps it fast at any size."""
    name = "index of a pop"
    if used == ["ready"]:
        return Check(name=name, ok=True, detail="ready")
    detail = ", ".join(used) or "none"
    if used == ["COLLSCAN"]:
        detail = "none: a pop reads the whole collection"
    return Check(name=name, ok=False, detail=detail, advice=f"it must be 'ready'; {RUN_INDEXES}")


def check_retention(findings: IndexFindings, *, told: bool) -> Check:
    """Tell whether the server removes done tasks when the settings say so.

    Settings that were not told how long, have nothing to say against what there is.
    """
    name = "retention"
    if "finished" not in findings.existing:
        detail = "the index that removes done tasks is missing"
        return Check(name=name, ok=False, detail=detail, advice=RUN_INDEXES)
    found = describe_expiry(findings.existing["finished"].get("expireAfterSeconds"))
    if not told or "finished" not in findings.expiry_differs:
        return Check(name=name, ok=True, detail=f"done tasks are kept {found}")
    wanted = findings.expected_expiry_sec["finished"]
    detail = f"done tasks are kept {found}, and the settings say {describe_expiry(wanted)}"
    duration = "forever" if wanted == indexes.NEVER_SEC else f"{wanted}s"
    advice = f"if the settings are right, {RUN_INDEXES} --retention {duration}"
    return Check(name=name, ok=False, detail=detail, advice=advice)


def check_sweeper(last: SweepReport | None, *, overdue: int, now: datetime) -> Check:
    """Tell whether somebody sweeps, so that what crashes leave behind is taken up again."""
    name = "sweeper"
    ago_sec = None if last is None else max((now - last.at).total_seconds(), 0.0)
    detail = "nothing has swept yet" if ago_sec is None else f"swept {ago_sec:,.0f} s ago"
    if last is not None and last.buried_tasks:
        detail += f" ({'; '.join(describe_burials(last.buried_tasks))})"
    if overdue:
        detail += f", and leases have expired: {overdue:,}"
    if ago_sec is not None and ago_sec < LONGEST_UNSWEPT_SEC:
        return Check(name=name, ok=True, detail=detail)
    advice = (
        "keep one running (microqueue sweep --every 30s), or sweep from cron or in a service: "
        "without it, tasks whose worker died or stalled do not come back"
    )
    return Check(name=name, ok=not overdue, detail=detail, advice=advice)


def describe_expiry(seconds: float | None) -> str:
    """Say how long done tasks are kept."""
    if seconds is None or seconds >= indexes.NEVER_SEC:
        return "for good"
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size and seconds % size == 0:
            return f"for {seconds / size:,.0f} {unit}"
    return f"for {seconds:,.0f} seconds"


def check_write_concern(concern: WriteConcern) -> Check:
    """Tell whether a write that was acknowledged survives the loss of the primary."""
    document = concern.document
    said = ", ".join(f"{key}: {value}" for key, value in document.items())
    advice = None
    if document.get("j") is False:
        advice = "a crash of the server can lose tasks that it acknowledged; remove journal=false"
    elif document.get("w") == 1:
        advice = (
            "a failover can lose tasks that were acknowledged, and bring settled ones back; "
            "remove w=1, and the default, majority, applies"
        )
    return Check(name="write concern", ok=True, detail=said, advice=advice)
