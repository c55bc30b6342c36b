"""A queue's name, settings, clock and collections, and what every operation needs."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Generic, Self

from microqueue.arguments import check_clock, check_name, check_settings
from microqueue.clock import Clock
from microqueue.connection import Connection
from microqueue.drivers.collections import Collections
from microqueue.errors import InvalidPayload
from microqueue.operations import indexes
from microqueue.operations.call import Document, Operation, Target, letters_collection
from microqueue.operations.claim import Spread
from microqueue.operations.stats import Bounds, KnownSamples
from microqueue.operations.time import read_clock
from microqueue.payload import PayloadCodec, codec_of
from microqueue.positions import Positions
from microqueue.settings import QueueSettings
from microqueue.task import PayloadT, Task


class QueueBase(Generic[PayloadT]):
    """What a queue is made of."""

    def __init__(
        self,
        database_or_collection: Any,
        name: str,
        *,
        settings: QueueSettings | None,
        payload_model: type[PayloadT] | None,
        clock: Clock | None,
    ) -> None:
        self.name = check_name(name)
        self.settings = check_settings(settings)
        self.clock: Clock = check_clock(clock)
        self.collections = Collections(database_or_collection)
        self._codec: PayloadCodec[PayloadT] = codec_of(payload_model)
        self._positions = Positions()
        self._spread = Spread()
        self._samples = KnownSamples()
        self._connection: Connection | None = None
        self._indexed = not self.settings.ensure_indexes

    @classmethod
    def _connect(
        cls,
        client_class: Any,
        uri: str | None,
        name: str,
        *,
        settings: QueueSettings | None,
        payload_model: type[PayloadT] | None,
        clock: Clock | None,
        collection: str | None,
        client_options: dict[str, Any],
    ) -> Self:
        settings = check_settings(settings)
        connection = Connection(
            client_class,
            uri,
            settings=settings,
            collection=collection,
            client_options=client_options,
        )
        try:
            queue = cls(
                connection.database_or_collection,
                name,
                settings=settings,
                payload_model=payload_model,
                clock=clock,
            )
        except Exception:
            connection.abandon()
            raise
        queue._connection = connection
        return queue

    def __repr__(self) -> str:
        place = f"{self.collections.database.name}.{self.collections.name}"
        return f"{type(self).__name__}({self.name!r}, {place})"

    def _now(self) -> Operation[datetime]:
        return (yield from read_clock(self.clock))

    def count_bounds(self, *, exact: bool) -> Bounds:
        """Say how far to count. In memory there is no server to spare, and all is counted."""
        unbounded = exact or self.collections.in_memory
        limit = None if unbounded else self.settings.count_limit
        return Bounds(self.collections.name, limit, self._samples)

    def _ensure_indexes(self, *, adjust: bool) -> Operation[list[str]]:
        tasks = self.collections.name
        wanted = indexes.task_indexes(self.settings.retention)
        created = yield from indexes.ensure_indexes(wanted, tasks, adjust=adjust)
        if self.settings.letters_apart:
            created += yield from indexes.ensure_indexes(
                indexes.dead_letter_indexes(), letters_collection(tasks), target=Target.DEAD_LETTERS
            )
        self._indexed = True
        return created

    def begin(self, session: Any = None) -> Operation[datetime]:
        """Create missing indexes before the first write, and read the clock.

        Not inside a caller's transaction, which an index build could not join.
        """
        if not self._indexed and session is None:
            # The retention of the collection changes only when it is asked for by name.
            yield from self._ensure_indexes(adjust=False)
        return (yield from self._now())

    def next_position(self) -> Operation[tuple[datetime, int]]:
        """Give the time, and the place at the end of the line."""
        now = yield from self.begin()
        return now, self._positions.take(now)

    def check_payload(self, payload: Any) -> None:
        """Raise :class:`InvalidPayload` if a task of this queue could not be read back with it."""
        self._codec.load(payload)

    def view(self, document: Document) -> Task[PayloadT]:
        """Show a task as it is stored, validated if it can be: a bad payload is still seen."""
        try:
            payload = self._codec.load(document.get("payload"))
        except InvalidPayload:
            payload = None
        return Task.from_document(document, payload)
