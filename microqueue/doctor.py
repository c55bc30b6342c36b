"""Check the server, indexes and settings of a queue, and advise how to fix problems."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from pymongo import WriteConcern

from microqueue.clock import as_utc
from microqueue.core import core_of
from microqueue.insights import parse_report
from microqueue.model import Model
from microqueue.operations import diagnostics as operations
from microqueue.operations import indexes, maintenance, schema
from microqueue.operations.call import Target, dlq_collection_name
from microqueue.operations.diagnostics import IndexFindings
from microqueue.operations.schema import Schema
from microqueue.queue import Queue
from microqueue.repair import Sampled, sample
from microqueue.sweeper import SweepReport, describe_burials

OLDEST_VERSION = (4, 4)
MAX_SKEW_SEC = 1.0
MAX_SWEEP_AGE_SEC = 600.0
MAX_COUNTED = 10_000
RUN_INDEXES = "run: microqueue indexes"


class Check(Model):
    """The result of one check. If it is ``ok`` with an ``advice``, it works but could be better."""

    name: str
    ok: bool
    detail: str
    advice: str | None = None


def examine(queue: Queue[Any]) -> list[Check]:
    """Check the server, clock, schema, indexes, sweeper, documents and write concern. Read-only.

    Args:
        queue: The queue.

    Returns:
        One result per check.

    Raises:
        ServerUnavailable: The server cannot be reached.
    """
    core = core_of(queue)
    run = core.run_on_any_version
    sent_at, started = datetime.now(UTC), time.monotonic()
    hello = run(operations.hello())
    took = timedelta(seconds=time.monotonic() - started)
    tasks = core.collections.name
    found = run(schema.read(tasks, queue.settings.retention))
    existing = run(operations.list_indexes())
    wanted = indexes.task_indexes(dedupe="dedupe" in existing)
    findings = run(operations.compare_indexes(wanted, tasks))
    checks = [
        describe_location(
            core.collections.client.nodes,
            database=core.collections.database.name,
            collection=tasks,
        ),
        check_version(run(operations.server_version())),
        check_topology(hello),
        check_clock(as_utc(hello["localTime"]), here=sent_at + took / 2, uncertain=took / 2),
        check_schema(found),
    ]
    if found.version != schema.VERSION:
        return checks
    checks += [
        check_indexes(findings, tasks, made_on_demand=queue.settings.ensure_indexes),
    ]
    configured = queue.settings.model_fields_set
    separate_dlq = queue.settings.separate_dlq
    if not separate_dlq and core.run(operations.has_separate_dlq(tasks)):
        separate_dlq = "dead_letters" not in configured
        checks.append(check_dead_letters(tasks, configured="dead_letters" in configured))
    if separate_dlq:
        wanted, name = indexes.dead_letter_indexes(), dlq_collection_name(tasks)
        dlq_findings = core.run(
            operations.compare_indexes(wanted, name, target=Target.DEAD_LETTERS),
        )
        checks.append(
            check_indexes(dlq_findings, name, made_on_demand=queue.settings.ensure_indexes)
        )
    if findings.existing:
        checks.append(check_pop(core.run(operations.explain_pop(queue.name, tasks))))
        checks.append(
            check_retention(
                found, wanted=queue.settings.retention, configured="retention" in configured
            )
        )
        now = queue.now()
        last, _ = core.run(maintenance.read_report(tasks))
        overdue = core.run(operations.count_overdue(now, most=MAX_COUNTED))
        checks.append(check_sweeper(parse_report(last), overdue=overdue, now=now))
        checks.append(check_documents(sample(queue)))
    checks.append(check_write_concern(core.collections.tasks.write_concern))
    return checks


def describe_location(
    nodes: Iterable[tuple[str, int | None]], *, database: str, collection: str
) -> Check:
    """Describe which tasks are checked. Only the hosts of a URI, which may hold a password."""
    hosts = sorted(host if port is None else f"{host}:{port}" for host, port in nodes)
    detail = f"collection {collection!r} of database {database!r} at {', '.join(hosts)}"
    return Check(name="place", ok=True, detail=detail)


def check_version(version: str) -> Check:
    """Check whether microqueue supports the server's version."""
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    name, detail = "server version", f"MongoDB {version}"
    if found >= OLDEST_VERSION:
        return Check(name=name, ok=True, detail=detail)
    oldest = ".".join(str(number) for number in OLDEST_VERSION)
    advice = f"microqueue needs MongoDB {oldest} or newer; upgrade the server"
    return Check(name=name, ok=False, detail=detail, advice=advice)


def check_topology(hello: Mapping[str, Any]) -> Check:
    """Check whether the server is a replica set or a sharded cluster."""
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
        advice="the queue works, but without transactions and change streams, so idle workers "
        "poll; a replica set of one member has both",
    )


def check_clock(server_time: datetime, *, here: datetime, uncertain: timedelta) -> Check:
    """Compare this machine's clock with the server's, within the uncertainty of the round trip."""
    skew_sec = (here - server_time).total_seconds()
    margin_sec = uncertain.total_seconds() + 0.001  # The server reports whole milliseconds.
    direction = "ahead of" if skew_sec > 0 else "behind"
    detail = f"this machine is {abs(skew_sec):,.3f} s {direction} the server"
    if abs(skew_sec) <= margin_sec:
        detail = f"this machine agrees with the server within {margin_sec * 1000:.0f} ms"
    advice = None
    if abs(skew_sec) - margin_sec > MAX_SKEW_SEC:
        advice = (
            "the queue is not affected, because it uses only the server's clock; but times in your "
            "own logs differ, so let NTP set this machine's clock"
        )
    return Check(name="clock", ok=True, detail=detail, advice=advice)


def check_indexes(findings: IndexFindings, collection: str, *, made_on_demand: bool) -> Check:
    """Check whether all indexes exist with the expected definitions."""
    name = f"indexes of {collection}"
    if findings.conflict is not None:
        index = findings.conflict.index
        return Check(
            name=name,
            ok=False,
            detail=f"index {index!r} has an unexpected definition",
            advice=f"drop it (db.{collection}.dropIndex({index!r})), then {RUN_INDEXES}",
        )
    if not findings.existing and made_on_demand:
        detail = "the collection does not exist yet"
        advice = f"nothing to do: the first write creates it with its indexes; or {RUN_INDEXES}"
        return Check(name=name, ok=True, detail=detail, advice=advice)
    if findings.missing:
        detail = f"missing: {', '.join(findings.missing)}"
        return Check(name=name, ok=False, detail=detail, advice=RUN_INDEXES)
    if old := sorted(schema.FIRST_INDEXES & set(findings.existing)):
        detail = f"of an earlier version: {', '.join(old)}"
        advice = "they slow writes, and 'finished' deletes done tasks; run: microqueue migrate"
        return Check(name=name, ok=False, detail=detail, advice=advice)
    return Check(name=name, ok=True, detail="all exist")


def check_dead_letters(collection: str, *, configured: bool) -> Check:
    """Describe where dead letters are kept if a DLQ collection exists that the settings lack."""
    name, dlq = "dead letters", dlq_collection_name(collection)
    if not configured:
        detail = f"{dlq} exists, so commands use it; the settings do not name it"
        advice = (
            "set MICROQUEUE_DEAD_LETTERS=collection here and dead_letters='collection' in all "
            f"services; or, if no service uses {dlq} any more, drop it once it is empty"
        )
        return Check(name=name, ok=True, detail=detail, advice=advice)
    detail = f"kept in {collection} by the settings, but {dlq} exists too"
    advice = f"tasks in {dlq} are ignored: set dead_letters to 'collection', or drop it if empty"
    return Check(name=name, ok=True, detail=detail, advice=advice)


def check_pop(used: list[str]) -> Check:
    """Check whether a claim uses the index that keeps it fast with any number of tasks."""
    name = "index of a pop"
    if used == ["ready"]:
        return Check(name=name, ok=True, detail="ready")
    detail = ", ".join(used) or "none"
    if used == ["COLLSCAN"]:
        detail = "none: a claim scans the whole collection"
    return Check(name=name, ok=False, detail=detail, advice=f"it must use 'ready'; {RUN_INDEXES}")


def check_schema(found: Schema) -> Check:
    """Check whether this code can work with the collection."""
    name, detail = "schema version", str(found.version)
    if found.version > schema.VERSION:
        advice = f"this microqueue supports version {schema.VERSION}: upgrade it"
        return Check(name=name, ok=False, detail=detail, advice=advice)
    if found.version < schema.VERSION:
        advice = f"this microqueue needs version {schema.VERSION}: run: microqueue migrate"
        return Check(name=name, ok=False, detail=detail, advice=advice)
    return Check(name=name, ok=True, detail=detail)


def check_retention(found: Schema, *, wanted: timedelta | None, configured: bool) -> Check:
    """Check whether done tasks are kept as long as the settings say.

    If no retention is configured, any is fine.
    """
    name = "retention"
    if not found.recorded:
        detail = "how long done tasks are kept is not stored"
        return Check(name=name, ok=False, detail=detail, advice=RUN_INDEXES)
    detail = f"done tasks are {describe_retention(schema.seconds_of(found.retention))}"
    if not configured or found.retention == wanted:
        return Check(name=name, ok=True, detail=detail)
    wanted_sec = schema.seconds_of(wanted)
    detail = (
        f"{detail}, but the settings say {describe_retention(wanted_sec).removeprefix('kept ')}"
    )
    duration = "forever" if wanted_sec is None else f"{wanted_sec:g}s"
    advice = f"if the settings are right, {RUN_INDEXES} --retention {duration}"
    return Check(name=name, ok=False, detail=detail, advice=advice)


def check_sweeper(last: SweepReport | None, *, overdue: int, now: datetime) -> Check:
    """Check whether a sweeper runs, which reclaims the tasks of crashed workers."""
    name = "sweeper"
    ago_sec = None if last is None else max((now - last.at).total_seconds(), 0.0)
    detail = "no sweep so far" if ago_sec is None else f"last sweep {ago_sec:,.0f} s ago"
    if last is not None and last.buried_tasks:
        detail += f" ({'; '.join(describe_burials(last.buried_tasks))})"
    if overdue:
        detail += f"; expired leases: {overdue:,}"
    if ago_sec is not None and ago_sec < MAX_SWEEP_AGE_SEC:
        return Check(name=name, ok=True, detail=detail)
    advice = (
        "keep one running (microqueue sweep --every 30s), or sweep from cron or in a service; "
        "without it, tasks of crashed or stalled workers are not redelivered"
    )
    return Check(name=name, ok=not overdue, detail=detail, advice=advice)


def check_documents(sampled: Sampled) -> Check:
    """Check whether there are documents that no healthy run makes."""
    name = "documents"
    where = "" if sampled.whole else f" in samples of up to {sampled.size:,} of each collection"
    if sampled.late:
        detail = f"{sampled.malformed:,} malformed{where}; read too slowly: "
        advice = "to read all documents in parts, run: microqueue doctor --repair"
        return Check(name=name, ok=False, detail=detail + ", ".join(sampled.late), advice=advice)
    if not sampled.malformed:
        return Check(name=name, ok=True, detail=f"none is malformed{where}")
    detail = f"{sampled.malformed:,} malformed{where}"
    advice = "to see them and what would be done, run: microqueue doctor --repair"
    return Check(name=name, ok=False, detail=detail, advice=advice)


def describe_retention(seconds: float | None) -> str:
    """Return how long done tasks are kept, in words; ``None`` means forever."""
    if seconds is None:
        return "kept forever"
    if not seconds:
        return "deleted at once"
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size and seconds % size == 0:
            return f"kept for {seconds / size:,.0f} {unit}"
    return f"kept for {seconds:,.0f} seconds"


def check_write_concern(concern: WriteConcern) -> Check:
    """Check whether an acknowledged write survives the loss of the primary."""
    document = concern.document
    detail = ", ".join(f"{key}: {value}" for key, value in document.items())
    advice = None
    if document.get("j") is False:
        advice = "a crash of the server can lose acknowledged tasks; remove journal=false"
    elif document.get("w") == 1:
        advice = (
            "a failover can lose acknowledged tasks and redeliver settled ones; remove w=1 to use "
            "the default, majority"
        )
    return Check(name="write concern", ok=True, detail=detail, advice=advice)
