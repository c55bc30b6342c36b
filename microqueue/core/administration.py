"""Look at the queue, and deal with what waits or is finished."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from microqueue.arguments import (
    check_count,
    check_id,
    check_name,
    check_status,
    refused,
)
from microqueue.core.base import QueueBase
from microqueue.durations import Duration, duration_argument
from microqueue.errors import InvalidArgument
from microqueue.operations import (
    administer,
    examine,
    inspect,
    relocate,
    stats,
    workers,
)
from microqueue.operations.call import Operation
from microqueue.task import PayloadT, Task, TaskStatus
from microqueue.task_ids import readings


class Administration(QueueBase[PayloadT]):
    """Inspect and administer."""

    def identify(self, task_ids: Iterable[Any]) -> Operation[list[Any]]:
        """Check ids, and find out what those stand for that came as text, as they do in a URL."""
        asked = [readings(check_id(one)) for one in task_ids]
        return (yield from inspect.first_existing(asked, self.settings))

    def _get(self, task_id: Any) -> Operation[Task[PayloadT] | None]:
        document = yield from inspect.find_first(readings(check_id(task_id)), self.settings)
        return self.view(document) if document else None

    def _peek(
        self,
        limit: int,
        status: TaskStatus | str | None,
        queue: str | None,
        *,
        all_queues: bool = False,
    ) -> Operation[list[Task[PayloadT]]]:
        chosen: str | list[str] = self.name if queue is None else check_name(queue)
        if all_queues and queue is not None:
            raise refused("queue", queue, "leave it out, or leave out all_queues")
        if all_queues:
            chosen = yield from examine.every_queue(self.settings)
        documents = yield from inspect.peek(
            chosen,
            status=None if status is None else check_status(status),
            limit=check_count("limit", limit),
            settings=self.settings,
        )
        return [self.view(document) for document in documents]

    def _stats(self, *, exact: bool) -> Operation[stats.QueueStats]:
        now = yield from self._now()
        bounds = self.count_bounds(exact=exact)
        (found,) = yield from stats.queue_stats([self.name], now, self.settings, bounds=bounds)
        return found

    def _workers(self) -> Operation[list[workers.WorkerInfo]]:
        return (yield from workers.list_workers(self.collections.name))

    def _purge(
        self, status: TaskStatus | str, older_than: Duration | None, *, dry_run: bool
    ) -> Operation[int]:
        chosen = check_status(status)
        if chosen is TaskStatus.PROCESSING:
            raise InvalidArgument(
                "status='processing' cannot be purged: workers hold these tasks",
                argument="status",
                value=status,
            )
        age = duration_argument("older_than", older_than)
        now = yield from self._now()
        before = None if age is None else now - age
        return (
            yield from administer.purge(
                self.name,
                status=chosen,
                before=before,
                now=now,
                settings=self.settings,
                dry_run=dry_run,
            )
        )

    def _cancel(self, task_id: Any) -> Operation[Task[PayloadT]]:
        (wanted,) = yield from self.identify([task_id])
        now = yield from self._now()
        document = yield from administer.cancel(wanted, now, self.settings)
        if self.settings.letters_apart:
            yield from relocate.move_out_by_id(wanted)
        return self.view(document)
