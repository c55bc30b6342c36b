"""Messages of the Kombu transport in the archive and in reports."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import kombu
from pyspark.sql import SparkSession

import microqueue.contrib.kombu  # noqa: F401 (it registers the schemes)
from microqueue.spark.analytics.report import report
from microqueue.spark.archive.job import archive
from tests.spark.archived import HOUR, documents_of
from tests.spark.past import encoded


def test_messages_are_archived_and_reported_as_tasks(
    spark: SparkSession, microqueue_database: Any, database_uri: str, tmp_path: Path
) -> None:
    options = {"dead_letter_rejected": True}
    with kombu.Connection(f"microqueue+{database_uri}", transport_options=options) as connection:
        queue = kombu.Queue("mail", routing_key="mail")
        for body in ("text", b"\xff\x00"):
            connection.Producer().publish(
                body,
                exchange="",
                routing_key="mail",
                declare=[queue],
                headers={"task": "shop.pay", "id": "1"},
                serializer="pickle" if isinstance(body, bytes) else "json",
            )
        connection.default_channel.basic_get("mail").ack()
        connection.default_channel.basic_get("mail").reject()
    finished = list(microqueue_database.tasks.find())
    assert {one["status"] for one in finished} == {"done", "failed"}

    since = datetime.now(UTC) - HOUR
    made = report(spark, uri=database_uri, since=since, output=tmp_path / "report")
    assert (made.total.done, made.total.failed) == (1, 1)
    summary = archive(spark, tmp_path / "archive", uri=database_uri, older_than=timedelta(0))
    assert (summary.archived, summary.deleted) == (2, 2)
    kept = documents_of(spark, tmp_path / "archive")
    assert [one["name"] for one in kept] == ["shop.pay"] * 2
    assert sorted(map(encoded, kept)) == sorted(map(encoded, finished))
