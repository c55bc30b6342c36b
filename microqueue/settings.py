"""The settings of a queue, from code or from ``MICROQUEUE_*`` in the environment."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack

from pydantic import Field, ValidationError

from microqueue.backoff import BackoffPolicy
from microqueue.deprecation import renamed_attributes
from microqueue.durations import (
    NOT_A_DURATION,
    Duration,
    NonNegativeDuration,
    PositiveDuration,
    read_duration,
)
from microqueue.errors import InvalidArgument
from microqueue.model import Model, reason_of, shorten

PREFIX = "MICROQUEUE_"
OTHER_VARIABLES = frozenset({"URI", "TEST_URI", "MONGOD", "HOME", "HOOKS", "DASHBOARD_TOKEN"})
DASHBOARD_PORT = 8765
"""The dashboard's port. It is here because commands name it without the dashboard extra."""

JSON_EXAMPLE = '{"base_sec": 5, "jitter": "none"}'
"""An example of a backoff in the environment: the one setting that has fields."""

logger = logging.getLogger("microqueue.settings")


class SettingsOptions(TypedDict, total=False):
    """What :class:`QueueSettings` accepts, for type checkers: durations as numbers, too."""

    max_attempts: int
    visibility_timeout: Duration
    backoff: BackoffPolicy
    max_crashes: int
    history_limit: int
    traceback_limit: int
    retention: Duration | None
    dead_letters: Literal["status", "collection"]
    poll_interval: Duration
    retry_deadline: Duration
    call_timeout: Duration
    long_call_timeout: Duration
    server_timeout: Duration
    batch_size: int
    promote_limit: int
    lock_ttl: Duration
    count_limit: int
    ensure_indexes: bool


class QueueSettings(Model):
    """The settings of a queue, and the defaults of its tasks.

    Durations are a ``timedelta`` or seconds. Each field can come from the environment:
    ``MICROQUEUE_VISIBILITY_TIMEOUT=120``, ``MICROQUEUE_BACKOFF='{"base_sec": 1}'``.
    """

    max_attempts: int = Field(default=10, ge=1, le=1_000_000, strict=True)
    """Deliveries in all: with 3, a failing task runs three times."""
    visibility_timeout: PositiveDuration = timedelta(minutes=10)
    """How long a lease lasts before the sweeper may reclaim the task."""
    backoff: BackoffPolicy = BackoffPolicy()
    """The waits between attempts."""
    max_crashes: int = Field(default=3, ge=1, le=1_000_000, strict=True)
    """A task that has crashed this many workers becomes a dead letter with code ``poison``."""
    history_limit: int = Field(default=20, ge=1, le=1000, strict=True)
    """How many finished attempts a task keeps in its history, the latest ones."""
    traceback_limit: int = Field(default=8192, ge=0, le=65_536, strict=True)
    """How many bytes of the traceback of its last exception a task keeps. 0: none."""
    retention: NonNegativeDuration | None = timedelta(days=7)
    """How long a done task is kept; ``None``: forever, 0: it is deleted when it is done. One value
    per collection."""
    dead_letters: Literal["status", "collection"] = "status"
    """Where failed tasks stay: in ``tasks`` with status ``failed``, or moved to ``tasks_dlq``."""
    poll_interval: PositiveDuration = timedelta(seconds=1)
    """How often ``pop(wait=...)`` and ``wait_for`` poll where the server has no change streams."""
    retry_deadline: NonNegativeDuration = timedelta(seconds=15)
    """How long transient MongoDB errors are retried where a repeat is safe. 0: never."""
    call_timeout: PositiveDuration = timedelta(seconds=10)
    """How long one attempt of a call may take. It is cut to two thirds of ``retry_deadline``, which
    leaves time for a repeat."""
    long_call_timeout: PositiveDuration = timedelta(minutes=1)
    """The same for a call that may read the whole collection, such as a count."""
    server_timeout: PositiveDuration = timedelta(seconds=5)
    """How long the clients of ``from_uri`` wait for a server."""
    batch_size: int = Field(default=1000, ge=1, le=100_000, strict=True)
    """How many documents one step of a bulk operation or a sweep changes."""
    promote_limit: int = Field(default=100, ge=1, le=100_000, strict=True)
    """How many due tasks one pop makes ready before it claims."""
    lock_ttl: PositiveDuration = timedelta(seconds=5)
    """How long a sweeper's lock lives without being renewed, and so how long a killed sweeper
    delays the others."""
    count_limit: int = Field(default=2000, ge=1, le=10_000_000, strict=True)
    """How far stats and views count. Larger numbers are estimates, and marked as such."""
    ensure_indexes: bool = True
    """Create missing indexes before the first write. If false, the deployment creates them."""

    if TYPE_CHECKING:  # Type checkers would ask for the stored types, not the accepted ones.

        def __init__(self, **settings: Unpack[SettingsOptions]) -> None: ...

    @property
    def separate_dlq(self) -> bool:
        """Whether dead letters are kept in their own collection, ``tasks_dlq``."""
        return self.dead_letters == "collection"

    if not TYPE_CHECKING:
        __getattr__ = renamed_attributes({"letters_apart": "separate_dlq"})

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **overrides: Unpack[SettingsOptions]
    ) -> Self:
        """Read settings from ``MICROQUEUE_*``.

        Durations may have units there, such as ``90s`` or ``5m``. An empty variable is ignored.

        Args:
            environment: The variables. Default: those of the process.
            **overrides: Settings that take precedence over the environment.

        Returns:
            The settings.

        Raises:
            InvalidArgument: A value is not valid; the error names the variable.
        """
        values: dict[str, Any] = {}
        variables: dict[str, tuple[str, str]] = {}
        for variable, text in (os.environ if environment is None else environment).items():
            name = variable.removeprefix(PREFIX)
            if name == variable or name in OTHER_VARIABLES or not text.strip():
                continue
            if name.lower() in cls.model_fields:
                values[name.lower()] = _read_value(text)
                variables[name.lower()] = (variable, text)
            else:
                # Not an error: container platforms set variables named after a service.
                close = [
                    f"{PREFIX}{setting.upper()}"
                    for setting in get_close_matches(name.lower(), cls.model_fields, n=1)
                ]
                logger.warning(
                    "%s is ignored: microqueue has no such setting%s",
                    variable,
                    f"; did you mean {close[0]}?" if close else "",
                    extra={"variable": variable, "closest": close},
                )
        try:
            return cls(**{**values, **overrides})
        except InvalidArgument as exc:
            name = exc.argument or ""
            if name in overrides or name not in variables:
                raise
            raise _of_variable(*variables[name], exc) from exc


def _read_value(text: str) -> Any:
    if text.strip().lower() in {"none", "null"}:
        return None
    readers: tuple[Callable[[str], Any], ...] = (int, float, json.loads, read_duration)
    for read in readers:
        with suppress(ValueError):
            return read(text)
    return text  # A word, or a value that the field rejects.


def _of_variable(variable: str, text: str, exc: InvalidArgument) -> InvalidArgument:
    """Return an error that names the variable instead of the setting."""
    cause = exc.__cause__
    reason = reason_of(cause) if isinstance(cause, ValidationError) else str(exc)
    if reason == NOT_A_DURATION:
        try:
            read_duration(text)
        except ValueError as wrong:  # Its message shows how durations are written here.
            reason = str(wrong)
    elif isinstance(cause, ValidationError) and cause.errors()[0]["type"] == "model_type":
        reason = f"give JSON, as in {JSON_EXAMPLE}"
    return InvalidArgument(
        f"{variable}={shorten(text)} is not valid: {reason}", argument=exc.argument, value=exc.value
    )
