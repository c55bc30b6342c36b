"""Add tasks from Spark's executors, each once even if Spark repeats a part."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from microqueue.new_task import NewTask
from microqueue.operations import bulk_load
from microqueue.operations.enqueue import new_document
from microqueue.payload import check_encodable
from microqueue.positions import Positions
from microqueue.settings import QueueSettings
from microqueue.spark.location import Location

CHUNK = 1000


class TaskInserter:
    """Inserts tasks with fixed ids and tokens, by which a run recognizes its own tasks."""

    def __init__(self, location: Location, *, settings: QueueSettings, now: datetime) -> None:
        self._location, self._settings, self._now = location, settings, now
        self._positions = Positions()

    def document(
        self, queue: str, new: NewTask[Any], payload: dict[str, Any], *, token: str
    ) -> dict[str, Any]:
        """Return the document of a task.

        Args:
            queue: The queue of the task.
            new: Its options.
            payload: Its payload.
            token: Identifies the row and the run. It distinguishes a row that is written again
                from another row with the same id.

        Raises:
            InvalidPayload: MongoDB cannot store the payload.
        """
        document = new_document(
            new,
            queue=queue,
            payload=payload,
            settings=self._settings,
            now=self._now,
            position=self._positions.take(self._now),
        )
        document["insert_token"] = token
        check_encodable(document, self._location.collections.codec_options)
        return document

    def add(self, documents: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """Insert tasks; return how many this run has added, and how many were there before."""
        added = others = 0
        for start in range(0, len(documents), CHUNK):
            chunk = documents[start : start + CHUNK]
            new, old = self._location.run(
                bulk_load.insert_chunk(chunk, settings=self._settings, hold=None)
            )
            added += new
            others += old
        return added, others
