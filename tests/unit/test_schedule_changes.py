"""What a changed schedule keeps of the one that was stored."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from microqueue.backoff import BackoffPolicy
from microqueue.operations.schedules import merged
from microqueue.schedule import Schedule

NOW = datetime(2036, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
EARLIER, KEPT_AT = NOW - 90 * MINUTE, NOW + 7 * MINUTE
SCHEDULE = Schedule(
    name="report",
    queue="q",
    payload={},
    every=timedelta(hours=1),
    max_attempts=3,
    backoff=BackoffPolicy(),
    starts_at=NOW,
    created_at=NOW,
    updated_at=NOW,
    next_at=None,
)
TIMING = {"cron": None, "every_sec": 3600.0, "timezone": "UTC"}
WANTED = {**TIMING, "starts_at": NOW, "created_at": NOW, "next_at": None, "runs": 0, "priority": 2}
STORED = {**TIMING, "starts_at": EARLIER, "created_at": EARLIER, "next_at": KEPT_AT, "runs": 5}
IN_AN_HOUR = NOW + 60 * MINUTE


@pytest.mark.parametrize(
    ("kept", "paused", "expected"),
    [
        (None, False, {"next_at": IN_AN_HOUR, "starts_at": NOW, "runs": 0}),
        (None, True, {"next_at": None, "starts_at": NOW, "runs": 0}),
        ({}, False, {"next_at": KEPT_AT, "starts_at": EARLIER, "runs": 5}),
        ({}, True, {"next_at": None, "starts_at": EARLIER, "runs": 5}),
        ({"next_at": None}, False, {"next_at": IN_AN_HOUR, "starts_at": EARLIER, "runs": 5}),
        (
            {"next_at": None, "held_at": KEPT_AT},
            False,
            {"next_at": KEPT_AT, "starts_at": EARLIER, "runs": 5},
        ),
        ({"every_sec": 60.0}, False, {"next_at": IN_AN_HOUR, "starts_at": NOW, "runs": 5}),
        ({"paused": True}, False, {"next_at": KEPT_AT, "starts_at": EARLIER, "runs": 5}),
    ],
    ids=["new", "new, paused", "same", "paused", "resumed", "moved", "other timing", "resumed now"],
)
def test_a_changed_schedule_keeps_its_next_run_while_its_timing_is_the_same(
    kept: dict[str, Any] | None, paused: bool, expected: dict[str, Any]
) -> None:
    stored = None if kept is None else {**STORED, **kept}
    found = merged(SCHEDULE, WANTED, stored, paused=paused, now=NOW)
    created_at = NOW if stored is None else EARLIER
    assert found == WANTED | {"created_at": created_at, "paused": paused} | expected
