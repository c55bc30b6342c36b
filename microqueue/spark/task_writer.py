"""Add tasks from Spark's executors, so that a part that is written twice is there once."""

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


class Adder:
    """Writes tasks with ids and tokens that are fixed: the run's own are known again."""

    def __init__(self, place: Location, *, settings: QueueSettings, now: datetime) -> None:
        self._place, self._settings, self._now = place, settings, now
        self._positions = Positions()

    def document(
        self, queue: str, new: NewTask[Any], payload: dict[str, Any], *, token: str
    ) -> dict[str, Any]:
        """Write the document of a task, or raise :class:`InvalidPayload`.

        ``token`` is one for each row of each run: it tells a row that is written again from
        another row of the same id.
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
        check_encodable(document, self._place.collections.codec_options)
        return document

    def add(self, documents: Sequence[dict[str, Any]]) -> tuple[int, int]:
        """Insert tasks; give how many are there by this run, and how many by others."""
        added = others = 0
        for start in range(0, len(documents), CHUNK):
            chunk = documents[start : start + CHUNK]
            new, old = self._place.run(
                bulk_load.insert_chunk(chunk, settings=self._settings, hold=None)
            )
            added += new
            others += old
        return added, others
