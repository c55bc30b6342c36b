"""The state that all routes of one dashboard share, and the audit log of its actions."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio.to_thread
from bson import ObjectId
from fastapi import Request

from microqueue.dashboard.access import AnyQueue, QueueAccess, ReadCache, read_overview
from microqueue.dashboard.events import EventHub
from microqueue.dashboard.options import DashboardOptions
from microqueue.dashboard.payloads import Redactor
from microqueue.dashboard.security import Guard, storable
from microqueue.dashboard.task_views import TaskDetail, TaskViews
from microqueue.errors import MicroqueueError, TaskNotFound
from microqueue.insights import Overview
from microqueue.operations import audit, lookup, workers
from microqueue.operations.call import Document
from microqueue.reports import AuditEntry, ServedNames
from microqueue.task import TaskId

MAX_TARGET_LENGTH = 300

logger = logging.getLogger("microqueue.dashboard")


@dataclass
class Action:
    """An action under way: who performs it, and how many tasks it changed."""

    who: str
    count: int = 0


class DashboardState:
    """The queue, its views, the read cache, the guard and the event stream of a dashboard."""

    def __init__(self, queue: AnyQueue, options: DashboardOptions) -> None:
        self.options = options
        self.access = QueueAccess(queue, options.hooks)
        self.redactor = Redactor(options.redact)
        self.views = TaskViews(
            self.redactor, read_only=options.read_only, manual_actions=options.manual_actions
        )
        self.guard = Guard(options)
        self.read_cache = ReadCache(options.cache_sec)
        self.events = EventHub(self.access, options, self.read_cache)
        self._audit_ready = False

    async def overview(self, *, exact: bool = False) -> Overview:
        """Return the overview that all viewers share; with ``exact``, nothing is estimated."""
        return await read_overview(self.access, self.read_cache, exact=exact)

    async def served_names(self) -> list[ServedNames]:
        """Return the task names that live workers have registered, by queue."""

        async def read() -> list[ServedNames]:
            now = await self.access.now()
            found: list[ServedNames] = await self.access.run(
                workers.served_names(self.access.collections.name, now)
            )
            return found

        names: list[ServedNames] = await self.read_cache.get("names", read)
        return names

    def known_names(self) -> list[str]:
        """Return the names of the tasks in the option ``tasks``."""
        tasks = self.options.tasks
        return [] if tasks is None else sorted(tasks.names())

    async def check_payload(self, queue: str, name: str | None, payload: Any) -> None:
        """Check a payload against the model of the dashboard's queue and the option ``tasks``.

        Raises:
            InvalidPayload: A worker could not run a task with this payload.
        """

        def check() -> None:
            if queue == self.access.name:
                self.access.core.check_payload(payload)
            if name is not None and self.options.tasks is not None:
                self.options.tasks.check(name, payload)

        await anyio.to_thread.run_sync(check)  # Validators are user code, and may take long.

    async def document(self, task_id: str) -> Document:
        """Return the document of the task with the id in a URL, or raise TaskNotFound."""
        found: Document | None = await self.access.call(self.access.insights.find, task_id)
        if found is None:
            raise TaskNotFound(task_id=task_id)
        return found

    async def detail(self, task_id: TaskId) -> TaskDetail:
        """Return the current details of the task with exactly this id, or raise TaskNotFound."""
        document = await self.access.run(lookup.get(task_id, self.access.settings))
        if document is None:
            raise TaskNotFound(task_id=task_id)
        now = await self.access.now()
        return await anyio.to_thread.run_sync(self.views.detail, document, now)

    @asynccontextmanager
    async def audited(
        self, request: Request, action: str, *, queue: str | None = None, target: Any = None
    ) -> AsyncIterator[Action]:
        """Record the action in the block in the audit log, whether it succeeds or fails.

        The user is identified first: an action of an unknown user is not performed.
        """
        performed = Action(self.guard.who(request))
        outcome = "ok"
        try:
            yield performed
        except MicroqueueError as exc:
            outcome = type(exc).__name__
            raise
        except BaseException:
            outcome = "error"
            raise
        finally:
            self.read_cache.clear()
            await self._record(
                who=performed.who,
                action=action,
                queue=queue,
                target=None if target is None else storable(str(target))[:MAX_TARGET_LENGTH],
                count=performed.count,
                outcome=outcome,
            )

    async def _record(self, **fields: Any) -> None:
        await self._prepare_audit()
        try:
            entry = AuditEntry(id=str(ObjectId()), at=await self.access.now(), **fields)
            await self.access.run(audit.record(entry, self.access.collections.name))
        except MicroqueueError:
            # The action is done. It must not appear failed because it could not be recorded.
            logger.exception("could not record %s in the audit log", fields["action"])

    async def _prepare_audit(self) -> None:
        """Create the index that deletes old entries, or continue without it."""
        if self._audit_ready:
            return
        try:
            # The default must not shorten the retention that another dashboard has set.
            adjust = "audit_retention" in self.options.model_fields_set
            await self.access.run(audit.prepare(self.options.audit_retention, adjust=adjust))
            self._audit_ready = True
        except MicroqueueError:
            logger.exception("could not create the index that deletes old audit log entries")
