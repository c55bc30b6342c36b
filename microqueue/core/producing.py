"""Into the queue: check what is to be added, all of it first, and add it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from microqueue.arguments import check_session, check_several, refused
from microqueue.core.base import QueueBase
from microqueue.new_task import AddedTasks, Duplicate, EnqueueReport, NewTask
from microqueue.operations import indexes, produce
from microqueue.operations.call import Document, Operation
from microqueue.payload import encode_all
from microqueue.task import PayloadT, Task


class Producing(QueueBase[PayloadT]):
    """Produce."""

    def _enqueue(self, new: NewTask[PayloadT], session: Any) -> Operation[Task[PayloadT]]:
        given, payload = self._codec.accept(new.payload)
        now = yield from self._begin_adding([new], session)
        (document,) = self._documents([new], [payload], now)
        (stored,) = self._encoded([document])
        yield from produce.enqueue(document, stored=stored, settings=self.settings, session=session)
        return Task.from_document(document, given)

    def _enqueue_many(
        self, items: Iterable[Any], options: dict[str, Any], session: Any
    ) -> Operation[EnqueueReport[PayloadT]]:
        # Everything is checked before anything is written.
        if "payload" in options:
            raise refused("payload", options["payload"], "the items are the payloads")
        given = list(check_several("items", items, "give a list of payloads or NewTasks"))
        bare: NewTask[Any] = NewTask(payload=None, **options)
        news = [item if isinstance(item, NewTask) else bare for item in given]
        accept = self._codec.accept
        accepted = [
            accept(item if new is bare else new.payload)
            for item, new in zip(given, news, strict=True)
        ]
        now = yield from self._begin_adding(news, session)
        documents = self._documents(news, [payload for _, payload in accepted], now)
        encoded = self._encoded(documents)
        left_out: set[int] = set()
        for start in range(0, len(documents), self.settings.batch_size):
            chunk = slice(start, start + self.settings.batch_size)
            places = yield from produce.enqueue_many(
                documents[chunk], stored=encoded[chunk], settings=self.settings, session=session
            )
            left_out |= {start + place for place in places}
        return EnqueueReport.model_construct(
            tasks=AddedTasks(
                [
                    (document, payload)
                    for place, (document, (payload, _)) in enumerate(
                        zip(documents, accepted, strict=True)
                    )
                    if place not in left_out
                ]
            ),
            duplicates=[
                Duplicate(
                    index=place,
                    task_id=documents[place]["_id"],
                    dedupe_key=documents[place].get("dedupe_key"),
                )
                for place in sorted(left_out)
            ],
        )

    def _begin_adding(self, news: Iterable[NewTask[Any]], session: Any) -> Operation[datetime]:
        """Begin, and in a transaction see that the index is there which tells duplicates.

        A transaction cannot wait for an index that is built beside it.
        """
        check_session(session, self.collections.client)
        now = yield from self.begin(session)
        keys = (new.dedupe_key for new in news if new.dedupe_key is not None)
        if session is not None and not self._indexed and (key := next(keys, None)) is not None:
            wanted = indexes.task_indexes(self.settings.retention)
            missing = yield from indexes.missing_indexes(wanted)
            if "dedupe" in missing:
                instead = "call ensure_indexes() before the first transaction"
                raise refused("dedupe_key", key, instead)
            self._indexed = not missing
        return now

    def _documents(
        self, news: Sequence[NewTask[Any]], payloads: Sequence[Document], now: datetime
    ) -> list[Document]:
        position = self._positions.take(now, len(news))
        documents: list[Document] = []
        pattern: NewTask[Any] | None = None
        for place, (new, payload) in enumerate(zip(news, payloads, strict=True), position):
            if new is pattern and new.task_id is None:
                documents.append(produce.like(documents[-1], payload=payload, position=place))
                continue
            pattern = new
            documents.append(
                produce.new_document(
                    new,
                    queue=self.name,
                    payload=payload,
                    settings=self.settings,
                    now=now,
                    position=place,
                )
            )
        return documents

    def _encoded(self, documents: Sequence[Document]) -> Sequence[Any]:
        """Encode documents, which refuses those that cannot be stored; the driver need not."""
        encoded = encode_all(documents, self.collections.codec_options)
        return documents if self.collections.in_memory else encoded
