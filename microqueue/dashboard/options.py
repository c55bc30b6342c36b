"""What a dashboard may be told."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pydantic import Field, SecretStr

from microqueue.dashboard.redact import TELLING_KEYS
from microqueue.durations import PositiveDuration
from microqueue.model import Model


class DashboardOptions(Model):
    """How a dashboard behaves.

    ``token``, of at least 8 characters, protects everything but the health checks. ``redact``
    is a pattern of keys whose values are not shown; ``None`` shows all. ``identify`` names the
    user of a request for the audit log, where your own app knows who it is. ``hosts`` are the
    names under which the dashboard may be asked for; ``None`` leaves that to the app around it.
    """

    token: SecretStr | None = None
    read_only: bool = False
    redact: str | None = TELLING_KEYS
    audit_retention: PositiveDuration = timedelta(days=90)
    page_limit: int = Field(default=200, ge=1, le=1000)
    request_bytes: int = Field(default=1_000_000, ge=1000)
    identify: Callable[[Any], str | None] | None = None
    hosts: tuple[str, ...] | None = None
    cache_sec: float = Field(default=0.3, ge=0)
    poll_sec: float = Field(default=1.0, gt=0)
    heartbeat_sec: float = Field(default=15.0, gt=0)
