"""What a dashboard may be told."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from microqueue.durations import PositiveDuration
from microqueue.masking import REDACTED_KEYS
from microqueue.model import Model


class DashboardOptions(Model):
    """How a dashboard behaves.

    ``token``, of at least 16 characters, protects everything but the health checks.
    ``login_failures`` wrong tokens per address, and ``login_failures_in_all``, are answered within
    ``login_period``. ``manual_actions`` lets viewers mark tasks as done or failed that no worker
    ran. ``tasks`` are your named tasks: what viewers enqueue is checked against them.
    ``redact`` is a pattern of keys whose values are not shown; ``None`` shows all. ``identify``
    names the user of a request for the audit log, where your own app knows who it is. ``hosts``
    are the names under which the dashboard may be asked for; ``None`` leaves that to the app
    around it.
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
    def _acts_or_not(self) -> Self:
        if self.read_only and self.manual_actions:
            raise ValueError("give read_only or manual_actions, not both")
        return self
