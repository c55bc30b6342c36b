"""The options of a dashboard."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from microqueue.durations import PositiveDuration
from microqueue.masking import REDACTED_KEYS
from microqueue.model import Model


class DashboardOptions(Model):
    """The options of :func:`~microqueue.dashboard.dashboard`.

    Attributes:
        token: Protects everything but the health checks. It needs at least 16 characters.
        login_failures: How many wrong tokens an address may try within ``login_period``.
        login_failures_in_all: How many all addresses together may try within ``login_period``.
        login_period: How long a failed login counts.
        read_only: Whether the routes that change something are left out.
        manual_actions: Whether viewers may mark tasks as done or failed without running them.
        tasks: Your named tasks. The payloads that viewers enqueue are checked against them.
        redact: A pattern of keys whose values are masked; ``None`` masks nothing.
        audit_retention: How long entries of the audit log are kept.
        page_limit: The largest number of tasks on a page.
        request_bytes: The largest body of a request.
        identify: A function that returns the user of a request for the audit log.
        hosts: The accepted values of the ``Host`` header; ``None`` accepts all.
        cache_sec: How long the results of reads are kept.
        poll_sec: How often to poll for changes if the server has no change streams.
        heartbeat_sec: How often the event stream sends a heartbeat.
    """

    token: SecretStr | None = None
    login_failures: int = Field(default=10, ge=1)
    login_failures_in_all: int = Field(default=100, ge=1)
    login_period: PositiveDuration = timedelta(minutes=1)
    read_only: bool = False
    manual_actions: bool = False
    tasks: Any = None
    redact: str | None = REDACTED_KEYS
    audit_retention: PositiveDuration = timedelta(days=90)
    page_limit: int = Field(default=200, ge=1, le=1000)
    request_bytes: int = Field(default=1_000_000, ge=1000)
    identify: Callable[[Any], str | None] | None = None
    hosts: tuple[str, ...] | None = None
    cache_sec: float = Field(default=0.3, ge=0)
    poll_sec: float = Field(default=1.0, gt=0)
    heartbeat_sec: float = Field(default=15.0, gt=0)

    @field_validator("tasks")
    @classmethod
    def _are_named_tasks(cls, tasks: Any) -> Any:
        if tasks is not None and not all(hasattr(tasks, name) for name in ("names", "check")):
            raise ValueError("give Tasks(), or one of its tasks")
        return tasks

    @model_validator(mode="after")
    def _read_only_excludes_manual_actions(self) -> Self:
        if self.read_only and self.manual_actions:
            raise ValueError("give read_only or manual_actions, not both")
        return self
