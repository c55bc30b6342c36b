"""What all routes of one dashboard share."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio.to_thread
from bson import ObjectId
from fastapi import Request

from microqueue.dashboard.access import Access, AnyQueue, ReadCache, overview_of
from microqueue.dashboard.events import EventHub
from microqueue.dashboard.options import DashboardOptions
from microqueue.dashboard.payloads import Redactor
from microqueue.dashboard.security import Guard, storable
from microqueue.dashboard.views import TaskDetail, Viewer
from microqueue.errors import MicroqueueError, TaskNotFound
from microqueue.insights import Overview
from microqueue.operations import audit, lookup, workers
from microqueue.operations.call import Document
from microqueue.reports import AuditEntry, ServedNames
from microqueue.task import TaskId

LONGEST_TARGET = 300

logger = logging.getLogger("microqueue.dashboard")


class Tally:
    """Says who acts, and at the end how many tasks it concerned."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.count = 0


class Context:
    """The queue, the views, the shared reads and the stream of events."""

    def __init__(self, queue: AnyQueue, options: DashboardOptions) -> None:
        self.options = options
        self.access = Access(queue)
        self.redactor = Redactor(options.redact)
        self.viewer = Viewer(
            self.redactor, read_only=options.read_only, manual_actions=options.manual_actions
        )
        self.guard = Guard(options)
        self.read_cache = ReadCache(options.cache_sec)
        self.events = EventHub(self.access, options, self.read_cache)
        self._audit_ready = False

    async def overview(self, *, exact: bool = False) -> Overview:
        """Give the overview that all viewers share; with ``exact``, everything is counted."""
        return await overview_of(self.access, self.read_cache, exact=exact)

    async def served_names(self) -> list[ServedNames]:
        """List which names of tasks the living workers serve, by queue."""

        async def read() -> list[ServedNames]:
            now = await self.access.now()
            found: list[ServedNames] = await self.access.run(
                workers.served_names(self.access.collections.name, now)
            )
            return found

        names: list[ServedNames] = await self.read_cache.get("names", read)
        return names

    def known_names(self) -> list[str]:
        """List the named tasks that this dashboard was given."""
        tasks = self.options.tasks
        return [] if tasks is None else sorted(tasks.names())

    async def check_payload(self, queue: str, name: str | None, payload: Any) -> None:
        """Raise :class:`InvalidPayload` if a task could not run with this payload.

        Known here are the model of the dashboard's own queue, and the named tasks that were given.
        """

        def check() -> None:
            if queue == self.access.name:
                self.access.core.check_payload(payload)
            if name is not None and self.options.tasks is not None:
                self.options.tasks.check(name, payload)

        await anyio.to_thread.run_sync(check)  # Validators are the caller's, and may take long.

    async def document(self, task_id: str) -> Document:
        """Find a task by the id in an address, or raise :class:`TaskNotFound`."""
        found: Document | None = await self.access.call(self.access.insights.find, task_id)
        if found is None:
            raise TaskNotFound(task_id=task_id)
        return found

    async def detail(self, task_id: TaskId) -> TaskDetail:
        """Show the task of this very id as it is now."""
        document = await self.access.run(lookup.get(task_id, self.access.settings))
        if document is None:
            raise TaskNotFound(task_id=task_id)
        now = await self.access.now()
        return await anyio.to_thread.run_sync(self.viewer.detail, document, now)

    @asynccontextmanager
    async def acting(
        self, request: Request, action: str, *, queue: str | None = None, target: Any = None
    ) -> AsyncIterator[Tally]:
        """Write what is done inside to the audit log, whatever comes of it.

        Who acts is found out first: nothing is done for somebody who cannot be named.
        """
        tally = Tally(self.guard.who(request))
        outcome = "ok"
        try:
            yield tally
        except MicroqueueError as exc:
            outcome = type(exc).__name__
            raise
        except BaseException:
            outcome = "error"
            raise
        finally:
            self.read_cache.forget()
            await self._record(
                who=tally.who,
                action=action,
                queue=queue,
                target=None if target is None else storable(str(target))[:LONGEST_TARGET],
                count=tally.count,
                outcome=outcome,
            )

    async def _record(self, **what: Any) -> None:
        await self._prepare_audit()
        try:
            entry = AuditEntry(id=str(ObjectId()), at=await self.access.now(), **what)
            await self.access.run(audit.record(entry, self.access.collections.name))
        except MicroqueueError:
            # What was done is done; that it could not be noted must not look like a failure.
            logger.exception("%s by hand is not in the audit log", what["action"])

    async def _prepare_audit(self) -> None:
        """See that entries end in time; those that are kept too long are better than none."""
        if self._audit_ready:
            return
        try:
            # The default must not shorten what another dashboard was told to keep.
            told = "audit_retention" in self.options.model_fields_set
            await self.access.run(audit.prepare(self.options.audit_retention, adjust=told))
            self._audit_ready = True
        except MicroqueueError:
            logger.exception("the audit log has no index that ends its entries")
