from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pymongo import WriteConcern

from microqueue import Queue, QueueSettings, Sweeper
from microqueue.core import core_of
from microqueue.doctor import (
    Check,
    check_clock,
    check_sweeper,
    check_topology,
    check_version,
    check_write_concern,
    describe_location,
    describe_retention,
    examine,
)
from microqueue.operations.diagnostics import winning_plan
from microqueue.sweeper import SweepReport
from microqueue.testing import FakeClock

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


def by_name(queue: Queue[Any]) -> dict[str, Check]:
    return {check.name: check for check in examine(queue)}


def unhealthy(queue: Queue[Any]) -> set[str]:
    return {check.name for check in examine(queue) if not check.ok}


def test_healthy_queue_passes_every_check(microqueue_database: Any) -> None:
    queue = Queue[Any](microqueue_database)
    queue.ensure_indexes()
    Sweeper(queue).run_once()
    checks = by_name(queue)
    assert all(check.ok and check.advice is None for check in checks.values()), checks
    assert list(checks) == [
        "place",
        "server version",
        "replica set",
        "clock",
        "schema version",
        "indexes of tasks",
        "index of a pop",
        "retention",
        "sweeper",
        "documents",
        "write concern",
    ]
    assert checks["index of a pop"].detail == "ready"
    assert checks["retention"].detail == "done tasks are kept for 7 days"


def test_location_has_all_hosts_or_the_socket() -> None:
    nodes = [("db2.example", 27017), ("db1.example", 27018)]
    check = describe_location(nodes, database="shop", collection="jobs")
    assert check.detail == (
        "collection 'jobs' of database 'shop' at db1.example:27018, db2.example:27017"
    )
    socket = describe_location([("/run/mongodb.sock", None)], database="shop", collection="jobs")
    assert socket.detail.endswith(" at /run/mongodb.sock")


def test_examining_writes_nothing(microqueue_database: Any) -> None:
    examine(Queue[Any](microqueue_database))
    assert microqueue_database.list_collection_names() == []


def test_missing_collection_is_fine_if_the_first_write_creates_it(microqueue_database: Any) -> None:
    check = by_name(Queue[Any](microqueue_database))["indexes of tasks"]
    assert check.ok
    assert check.advice is not None
    strict = QueueSettings(ensure_indexes=False)
    assert unhealthy(Queue[Any](microqueue_database, settings=strict)) == {"indexes of tasks"}


def test_missing_index_fails_with_the_command_that_creates_it(microqueue_database: Any) -> None:
    queue = Queue[Any](microqueue_database)
    queue.ensure_indexes()
    microqueue_database.tasks.drop_index("ready")
    checks = by_name(queue)
    assert not checks["indexes of tasks"].ok
    assert checks["indexes of tasks"].detail == "missing: ready"
    assert "microqueue indexes" in str(checks["indexes of tasks"].advice)
    assert not checks["index of a pop"].ok


def test_claim_without_any_index_is_reported_as_a_scan(microqueue_database: Any) -> None:
    microqueue_database.tasks.insert_one({"status": "pending"})
    check = by_name(Queue[Any](microqueue_database))["index of a pop"]
    assert not check.ok
    assert "whole collection" in check.detail


def test_index_with_another_definition_fails(microqueue_database: Any) -> None:
    microqueue_database.tasks.create_index([("status", 1)], name="ready")
    check = by_name(Queue[Any](microqueue_database))["indexes of tasks"]
    assert not check.ok
    assert check.detail == "index 'ready' has an unexpected definition"
    assert "dropIndex('ready')" in str(check.advice)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (None, "kept forever"),
        (0, "deleted at once"),
        (90, "kept for 90 seconds"),
        (120, "kept for 2 minutes"),
        (86_400, "kept for 24 hours"),
        (7 * 86_400, "kept for 7 days"),
    ],
)
def test_retention_is_told_in_the_largest_unit_that_fits(seconds: Any, told: str) -> None:
    assert describe_retention(seconds) == told


def test_retention_that_differs_from_the_settings_fails(microqueue_database: Any) -> None:
    Queue[Any](microqueue_database, settings=QueueSettings(retention=3600)).ensure_indexes()
    forever = Queue[Any](microqueue_database, settings=QueueSettings(retention=None))
    check = by_name(forever)["retention"]
    assert not check.ok
    assert check.detail == "done tasks are kept for 60 minutes, but the settings say forever"
    forever.ensure_indexes()
    assert unhealthy(forever) == set()


def test_indexes_of_the_dead_letters_are_examined_where_they_are_used(
    microqueue_database: Any,
) -> None:
    settings = QueueSettings(dead_letters="collection")
    queue = Queue[Any](microqueue_database, settings=settings)
    queue.ensure_indexes()
    assert unhealthy(queue) == set()
    microqueue_database.tasks_dlq.drop_index("retired")
    assert unhealthy(queue) == {"indexes of tasks_dlq"}


def test_queue_that_was_never_swept_gets_an_advice_until_a_lease_expires(
    microqueue_queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    for number in range(3):
        microqueue_queue.enqueue({"n": number})
    microqueue_queue.pop()
    waiting = by_name(microqueue_queue)["sweeper"]
    assert (waiting.ok, waiting.detail) == (True, "no sweep so far")
    assert "microqueue sweep --every 30s" in str(waiting.advice)
    microqueue_clock.advance(3600)
    overdue = by_name(microqueue_queue)["sweeper"]
    assert overdue.detail == "no sweep so far; expired leases: 1"
    assert "microqueue sweep --every 30s" in str(overdue.advice)
    assert unhealthy(microqueue_queue) == {"sweeper"}


def test_lease_that_expires_in_any_queue_is_reported(
    microqueue_queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    other: Queue[Any] = Queue(
        core_of(microqueue_queue).collections.tasks, "other", clock=microqueue_clock
    )
    other.enqueue({})
    other.pop()
    microqueue_clock.advance(3600)
    assert unhealthy(microqueue_queue) == {"sweeper"}


def test_queue_that_was_swept_recently_needs_no_advice(
    microqueue_queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    microqueue_queue.ensure_indexes()
    Sweeper(microqueue_queue).run_once()
    microqueue_clock.advance(60)
    lately = by_name(microqueue_queue)["sweeper"]
    assert (lately.ok, lately.detail, lately.advice) == (True, "last sweep 60 s ago", None)
    microqueue_clock.advance(3600)
    long_ago = by_name(microqueue_queue)["sweeper"]
    assert (long_ago.ok, long_ago.detail) == (True, "last sweep 3,660 s ago")
    assert long_ago.advice is not None


@pytest.mark.parametrize(
    ("ago_sec", "overdue", "ok", "detail", "advises"),
    [
        (None, 0, True, "no sweep so far", True),
        (None, 1, False, "no sweep so far; expired leases: 1", True),
        (5, 0, True, "last sweep 5 s ago", False),
        (5, 2000, True, "last sweep 5 s ago; expired leases: 2,000", False),
        (599, 1, True, "last sweep 599 s ago; expired leases: 1", False),
        (600, 0, True, "last sweep 600 s ago", True),
        (600, 1, False, "last sweep 600 s ago; expired leases: 1", True),
        (-0.4, 0, True, "last sweep 0 s ago", False),  # By a clock that is a little ahead.
    ],
)
def test_missing_sweeper_fails_only_where_something_waits_for_it(
    ago_sec: float | None, overdue: int, ok: bool, detail: str, advises: bool
) -> None:
    last = (
        None
        if ago_sec is None
        else SweepReport(sweeper_id="anna", at=NOON - timedelta(seconds=ago_sec))
    )
    check = check_sweeper(last, overdue=overdue, now=NOON)
    assert (check.ok, check.detail, check.advice is not None) == (ok, detail, advises)


@pytest.mark.parametrize(
    ("version", "ok"),
    [("3.6.23", False), ("4.2.0", False), ("4.4.0", True), ("10.0.1-rc0", True)],
)
def test_versions_since_4_4_are_supported(version: str, ok: bool) -> None:
    check = check_version(version)
    assert check.ok is ok
    assert version in check.detail
    assert (check.advice is None) is ok


@pytest.mark.parametrize(
    ("hello", "detail", "warns"),
    [
        ({"setName": "rs0", "hosts": ["a", "b"], "passives": ["c"]}, "'rs0' with 3 members", False),
        ({"msg": "isdbgrid"}, "a sharded cluster", False),
        ({}, "a standalone server", True),
    ],
)
def test_standalone_server_works_with_a_warning(
    hello: dict[str, Any], detail: str, warns: bool
) -> None:
    check = check_topology(hello)
    assert (check.ok, check.detail, check.advice is not None) == (True, detail, warns)


@pytest.mark.parametrize(
    ("ahead_sec", "trip_sec", "detail", "warns"),
    [
        (0.0, 0.01, "this machine agrees with the server within 11 ms", False),
        (0.5, 0.01, "this machine is 0.500 s ahead of the server", False),
        (90.0, 0.01, "this machine is 90.000 s ahead of the server", True),
        (-90.0, 0.01, "this machine is 90.000 s behind the server", True),
        (1.5, 2.0, "this machine agrees with the server within 2001 ms", False),
    ],
)
def test_clock_skew_is_reported_within_the_uncertainty(
    ahead_sec: float, trip_sec: float, detail: str, warns: bool
) -> None:
    here = NOON + timedelta(seconds=ahead_sec)
    check = check_clock(NOON, here=here, uncertain=timedelta(seconds=trip_sec))
    assert (check.ok, check.detail, check.advice is not None) == (True, detail, warns)


@pytest.mark.parametrize(
    ("concern", "advice"),
    [
        (WriteConcern("majority"), None),
        (WriteConcern(2), None),
        (WriteConcern(1), "remove w=1"),
        (WriteConcern("majority", j=False), "remove journal=false"),
    ],
)
def test_weak_write_concern_gets_an_advice(concern: WriteConcern, advice: str | None) -> None:
    check = check_write_concern(concern)
    assert check.ok
    assert (check.advice is None) if advice is None else (advice in str(check.advice))


def test_write_concern_of_the_callers_collection_is_the_one_examined(
    microqueue_database: Any,
) -> None:
    weak = microqueue_database.get_collection("tasks", write_concern=WriteConcern(1))
    check = by_name(Queue[Any](weak))["write concern"]
    assert (check.detail, check.advice is not None) == ("w: 1", True)


def test_explanation_of_a_sharded_collection_shows_all_plans() -> None:
    plans = [{"stage": "IXSCAN", "indexName": name} for name in ("ready", "browse")]
    sharded = {"shards": [{"winningPlan": plan} for plan in plans]}
    assert winning_plan({"queryPlanner": {"winningPlan": sharded}}) == {"inputStages": plans}
