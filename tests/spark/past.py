"""Tasks with a past: processed by a real queue, at times that the test sets."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import bson

from microqueue import Queue, QueueSettings
from microqueue.spark.whole_tasks import CODEC
from microqueue.testing import FakeClock

KEPT = QueueSettings(retention=None)
"""Without retention, as the server's TTL monitor must not delete old tasks during a test."""


def encoded(document: dict[str, Any]) -> bytes:
    return bson.encode(document, codec_options=CODEC)


class Past:
    """A queue in the past, whose clock the test advances."""

    def __init__(
        self,
        database: Any,
        name: str = "mail",
        *,
        ago: timedelta,
        settings: QueueSettings = KEPT,
    ) -> None:
        # On the minute, so that counts by minute are the same in every run.
        begin = (datetime.now(UTC) - ago).replace(second=0, microsecond=0)
        self.clock = FakeClock(begin)
        self.begin = begin
        self.queue: Queue[Any] = Queue(database, name, settings=settings, clock=self.clock)

    def enqueue(self, count: int, **options: Any) -> list[Any]:
        payloads = [{"n": number, "to": f"user-{number}@example.org"} for number in range(count)]
        return [task.id for task in self.queue.enqueue_many(payloads, **options).tasks]

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def work(self, count: int, *, took: float = 1.0) -> None:
        tasks = self.queue.pop_many(count)
        assert len(tasks) == count
        self.clock.advance(took)
        assert not self.queue.mark_done_many(tasks)

    def fail(self, messages: Sequence[str], *, code: str | None = "E", took: float = 1.0) -> None:
        tasks = self.queue.pop_many(len(messages))
        assert len(tasks) == len(messages)
        self.clock.advance(took)
        for task, message in zip(tasks, messages, strict=True):
            self.queue.mark_failure(task, message, code=code)

    def retry(
        self, count: int, message: str = "busy", *, took: float = 1.0, delay: float | None = None
    ) -> None:
        tasks = self.queue.pop_many(count)
        assert len(tasks) == count
        self.clock.advance(took)
        for task in tasks:
            self.queue.mark_retry(task, message, code="Busy", delay=delay)
