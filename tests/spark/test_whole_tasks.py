from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from bson import DatetimeMS, ObjectId

from microqueue.spark.whole_tasks import to_batch
from tests.spark.past import encoded

AT = datetime(2026, 5, 1, 12, 0, 0, 123000, tzinfo=UTC)
ATTEMPT: dict[str, Any] = {"attempt": 1, "worker_id": "w", "started_at": AT, "ended_at": AT}
ATTEMPT |= {"outcome": "retried", "error": None}
NO_DATE = DatetimeMS(2**50)


def test_fast_and_exact_columns_are_equal() -> None:
    at = datetime(2026, 5, 1, 12, 0, 0, 123000, tzinfo=UTC)
    plain = {"_id": ObjectId(), "queue": "q", "status": "done", "created_at": at, "attempts": 1}
    attempt = {"attempt": 1, "worker_id": "w", "started_at": at, "ended_at": at}
    attempt |= {"outcome": "retried", "error": {"message": "m", "code": None, "at": at}}
    full = {**plain, "_id": "own", "history": [attempt, {**attempt, "error": None}]}
    full |= {"error": {"message": "m", "code": "c", "at": at, "traceback": "t"}, "priority": 3}
    drifted = {**plain, "_id": 7, "attempts": "many"}
    fast = to_batch(encoded(plain) + encoded(full)).to_pylist()
    exact = to_batch(encoded(plain) + encoded(full) + encoded(drifted)).to_pylist()
    assert fast == exact[:2]
    assert fast[0]["error"] is None
    assert fast[1]["error"] == {"message": "m", "code": "c", "at": at}
    assert fast[0]["history"] is None
    assert [one["error"] for one in fast[1]["history"]] == [
        {"message": "m", "code": None, "at": at},
        None,
    ]
    assert [row["id_type"] for row in exact] == ["objectId", "string", "int"]
    assert exact[2]["attempts"] is None


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("attempts", 2.7, None),
        ("attempts", 2.0, 2),
        ("attempts", True, None),
        ("attempts", 2**31, None),
        ("attempts", 2**60 + 1, None),
        ("visibility_timeout_sec", True, None),
        ("visibility_timeout_sec", 5, 5.0),
        ("visibility_timeout_sec", 2**60 + 1, None),
        ("visibility_timeout_sec", float("nan"), None),
        ("backoff_policy", {"base_sec": True}, None),
        ("backoff_policy", {"base_sec": 2**60 + 1}, None),
        ("backoff_policy", "none", None),
        ("history", "x", None),
        ("history", {}, None),
        ("history", {"0": ATTEMPT}, None),
        ("history", [], []),
        ("history", [{}], [None]),
        ("history", ["x", ATTEMPT], [None, ATTEMPT]),
        ("history", [{**ATTEMPT, "attempt": 1.9}], [{**ATTEMPT, "attempt": None}]),
        ("history", [{**ATTEMPT, "attempt": True}], [{**ATTEMPT, "attempt": None}]),
        ("history", [{**ATTEMPT, "error": {}}], [ATTEMPT]),
        ("history", [{**ATTEMPT, "started_at": NO_DATE}], [{**ATTEMPT, "started_at": None}]),
        ("error", {}, None),
        ("error", {"other": 1}, None),
        ("error", "x", None),
    ],
)
def test_a_value_that_does_not_fit_is_null(name: str, value: Any, read: Any) -> None:
    malformed = encoded({"_id": "malformed", "queue": "q", name: value})
    drifted = encoded({"_id": "drifted", "queue": "q", "priority": "high"})
    (alone,) = to_batch(malformed).to_pylist()
    beside, _ = to_batch(malformed + drifted).to_pylist()
    assert alone[name] == beside[name] == read
