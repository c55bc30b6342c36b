"""The options of a dashboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

from pydantic import Field, SecretStr, field_validator, model_validator

from microqueue.durations import Duration, PositiveDuration
from microqueue.hooks import Hooks
from microqueue.masking import REDACTED_KEYS
from microqueue.model import Model


class DashboardOptionsDict(TypedDict, total=False):
    """The options as keyword arguments of ``dashboard`` and ``DashboardServer``."""

    token: str | SecretStr | None
    login_failures: int
    login_failures_in_all: int
    login_period: Duration
    read_only: bool
    manual_actions: bool
    tasks: Any
    redact: str | None
    hooks: Sequence[Hooks]
    audit_retention: Duration
    page_limit: int
    request_bytes: int
    identify: Callable[[Any], str | None] | None
    hosts: Sequence[str] | None
    cache_sec: float
    poll_sec: float
    heartbeat_sec: float


class DashboardServerOptionsDict(DashboardOptionsDict, total=False):
    """The keyword arguments of ``DashboardServer``."""

    host: str
    port: int
    insecure: bool
    proxies: Sequence[str]


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
        hooks: ``on_dead_letter`` is called for each dead letter that a viewer's action makes. With
            an ``AsyncQueue``, hooks run in the event loop.
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
    hooks: tuple[Hooks, ...] = ()
    audit_retention: PositiveDuration = timedelta(days=90)
    page_limit: int = Field(default=200, ge=1, le=1000)
    request_bytes: int = Field(default=1_000_000, ge=1000)
    identify: Callable[[Any], str | None] | None = None
    hosts: tuple[str, ...] | None = None
    cache_sec: float = Field(default=0.3, ge=0)
    poll_sec: float = Field(default=1.0, gt=0)
    heartbeat_sec: float = Field(default=15.0, gt=0)

    if TYPE_CHECKING:  # Type checkers would ask for the stored types, not the accepted ones.

        def __init__(self, **options: Unpack[DashboardOptionsDict]) -> None: ...

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
