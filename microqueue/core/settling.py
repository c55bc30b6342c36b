"""How an attempt ends, and how long it may last."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from microqueue.arguments import (
    check_code,
    check_popped,
    check_session,
    check_several,
)
from microqueue.clock import later
from microqueue.core.base import QueueBase
from microqueue.durations import Duration, duration_argument, to_positive_timedelta
from microqueue.errors import LeaseLost
from microqueue.operations import (
    relocate,
    settle,
    settle_many,
)
from microqueue.operations.call import Operation
from microqueue.operations.settle import Settlement
from microqueue.payload import check_encodable
from microqueue.task import PayloadT, Task, TaskStatus


class Settling(QueueBase[PayloadT]):
    """Settle and renew."""

    def _settle(
        self, task: Task[Any], settlement: Settlement, now: datetime, session: Any = None
    ) -> Operation[None]:
        yield from settle.settle(task, settlement, now=now, settings=self.settings, session=session)
        if self.settings.letters_apart and settlement.changes["status"] == TaskStatus.FAILED:
            yield from relocate.move_out_by_id(task.id)

    def _mark_done(self, task: Task[Any], result: Any, session: Any) -> Operation[None]:
        check_session(session, self.collections.client)
        check_popped(task)
        if result is not None:
            check_encodable({"result": result}, self.collections.codec_options)
        now = yield from self._now()
        yield from self._settle(task, settle.done(now, result=result), now, session)

    def _mark_done_many(self, tasks: Iterable[Task[Any]]) -> Operation[list[LeaseLost]]:
        popped: list[Task[Any]] = []
        lost: list[LeaseLost] = []
        for task in check_several("tasks", tasks, "give a list of the Tasks that pop returned"):
            try:
                popped.append(check_popped(task))
            except LeaseLost as exc:
                lost.append(exc)
        now = yield from self._now()
        lost += yield from settle_many.mark_all_done(popped, now=now, settings=self.settings)
        return lost

    def _mark_retry(
        self, task: Task[Any], error: object, code: str | None, delay: Duration | None
    ) -> Operation[TaskStatus]:
        check_popped(task)
        check_code(code)
        given = duration_argument("delay", delay)
        now = yield from self._now()
        policy = task.backoff or self.settings.backoff
        delay_sec = (
            policy.delay_seconds(task.attempts, previous=task.backoff_sec)
            if given is None
            else given.total_seconds()
        )
        reason = settle.describe_error(error, code, now, otherwise="the handler asked for a retry")
        settlement = settle.retried(task, now, reason, delay_sec=delay_sec)
        yield from self._settle(task, settlement, now)
        return TaskStatus(settlement.changes["status"])

    def _mark_failure(self, task: Task[Any], message: object, code: str | None) -> Operation[None]:
        check_popped(task)
        check_code(code)
        now = yield from self._now()
        error = settle.describe_error(message, code, now, otherwise="failed")
        yield from self._settle(task, settle.failed(now, error), now)

    def _release(self, task: Task[Any], *, front: bool) -> Operation[None]:
        check_popped(task)
        now = yield from self._now()
        yield from self._settle(task, settle.released(task, now, front=front), now)

    def _touch(self, task: Task[PayloadT], extend: Duration | None) -> Operation[Task[PayloadT]]:
        lease = check_popped(task).lease
        given = duration_argument("extend", extend)
        now = yield from self._now()
        expires_at = later(now, given if given is not None else self._lease_length(task))
        yield from settle.touch(task, expires_at, now)
        renewed = lease.model_copy(update={"expires_at": expires_at}) if lease else None
        return task.model_copy(update={"lease": renewed, "updated_at": now})

    def _lease_length(self, task: Task[Any]) -> timedelta:
        own = task.visibility_timeout_sec
        if own is not None:
            with suppress(ValueError):  # Read by an id, it may be anything.
                return to_positive_timedelta(own)
        return self.settings.visibility_timeout
