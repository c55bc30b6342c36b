"""What the routes that only look reply with."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel

from microqueue.dashboard.views import TaskRow
from microqueue.dlq import LetterGroup
from microqueue.insights import MinuteCounts, QueueOverview, RunningTask, WorkerView
from microqueue.reports import ServedNames
from microqueue.sweeper import SweepReport


class Shown(BaseModel):
    """Which queues a reply shows: one, or all."""

    queue: str | None
    all_queues: bool


class Config(BaseModel):
    """What the page has to know before it shows anything. ``at`` is the server's time."""

    at: datetime
    queue: str
    version: str
    read_only: bool
    auth: bool
    visibility_timeout_sec: float
    max_attempts: int
    retention_sec: float | None
    audit_retention_sec: float
    page_limit: int
    redacts: bool
    mask: str
    can_pause: bool
    manual_actions: bool
    live: Literal["change_stream", "polling", "idle"]


class OverviewReply(BaseModel):
    """How everything stands."""

    at: datetime
    queues: list[QueueOverview]
    minutes: MinuteCounts
    workers: list[WorkerView]
    last_sweep: SweepReport | None
    last_active_sweep: SweepReport | None


class QueuesReply(BaseModel):
    """How the queues stand."""

    at: datetime
    queues: list[QueueOverview]


class WorkersReply(BaseModel):
    """Who works, and on what."""

    at: datetime
    workers: list[WorkerView]


class NamesReply(Shown):
    """The names of tasks that living workers have registered, by queue.

    ``known`` are those of the tasks that the dashboard was given; their payloads are checked.
    """

    at: datetime
    queues: list[ServedNames]
    known: list[str]


class RunningReply(Shown):
    """What runs, those whose lease ends soonest first; ``estimated``: the total is an estimate."""

    at: datetime
    total: int
    estimated: bool
    items: list[RunningTask]


class TasksReply(Shown):
    """A page of tasks; not ``complete``: go on with ``next_cursor`` even if there are few."""

    at: datetime
    items: list[TaskRow]
    next_cursor: str | None
    complete: bool = True


class GroupsReply(Shown):
    """Dead letters by code and normalised message, the largest groups first.

    ``more_groups`` is how many smaller ones there are; ``total`` counts their letters too.
    ``truncated``: there are older letters, which were not looked at.
    """

    at: datetime
    total: int
    truncated: bool
    groups: list[LetterGroup]
    more_groups: int


class SweeperReply(BaseModel):
    """What the last sweeps did."""

    at: datetime
    last_sweep: SweepReport | None
    last_active_sweep: SweepReport | None
