"""An instant in the hour that a clock repeats is the same instant in every zone.

Python says of such a time that it equals none of another zone (PEP 495).
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from bson import ObjectId

from microqueue.clock import round_up
from microqueue.core import core_of
from microqueue.operations.archive import delete_archived
from microqueue.testing import memory_queue

BERLIN = ZoneInfo("Europe/Berlin")
REPEATED = datetime(2025, 10, 26, 0, 30, tzinfo=UTC)
LIVES = [REPEATED, REPEATED + timedelta(hours=1)]


@pytest.mark.parametrize("instant", LIVES)
def test_a_whole_millisecond_of_a_repeated_hour_is_not_rounded(instant: datetime) -> None:
    assert round_up(instant.astimezone(BERLIN)) == instant
    late = instant + timedelta(microseconds=1)
    assert round_up(late.astimezone(BERLIN)) == instant + timedelta(milliseconds=1)


@pytest.mark.parametrize("instant", LIVES)
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_a_purge_knows_a_task_of_a_repeated_hour_that_lived_on(
    zone: str, instant: datetime
) -> None:
    pa = pytest.importorskip("pyarrow")
    archive_purge = pytest.importorskip("microqueue.spark.archive.purge")
    task_id, at = ObjectId(), pa.array([instant], pa.timestamp("us", zone))
    batch = pa.record_batch(
        {
            "plain": [True],
            "id": [str(task_id)],
            "id_type": ["objectId"],
            "status": ["failed"],
            "created_at": at,
            "updated_at": at,
            "insert_token": pa.array([None], pa.string()),
        }
    )
    documents = archive_purge._plain_documents(batch, None)  # noqa: SLF001 (what it makes of a batch is the point)
    assert [document["updated_at"] for document in documents] == [instant]
    queue = memory_queue()
    lives_on = {"_id": task_id, "created_at": instant, "status": "pending"}
    core_of(queue).collections.tasks.insert_one(lives_on)
    assert core_of(queue).run(delete_archived(documents, now=REPEATED)).superseded == documents


def test_pipelines_without_a_server_tell_the_time_in_utc() -> None:
    pytest.importorskip("pyspark")
    place = pytest.importorskip("microqueue.spark.location")
    assert place.now_at(None).tzinfo is UTC
