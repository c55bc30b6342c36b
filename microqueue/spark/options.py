"""The options of reads and writes, validated on the Spark driver before any call to MongoDB.

Spark passes every option as text. Here they become frozen models, so the options of a DataFrame
never change, however often it is used.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self, TypedDict, cast

from pydantic import BeforeValidator, Field, field_validator, model_validator

from microqueue.arguments import check_name, check_status
from microqueue.durations import Duration, NonNegativeDuration
from microqueue.errors import InvalidArgument
from microqueue.extended_json import from_json
from microqueue.new_task import EnqueueOptions
from microqueue.spark import error_codes
from microqueue.spark.columns import PAYLOAD_OFF, select_columns
from microqueue.spark.location import LocationOptions


def _names(value: Any) -> Any:
    """Parse a list of names: comma-separated, or a JSON array."""
    if isinstance(value, str):
        with suppress(ValueError):
            if isinstance(found := json.loads(value), list):
                return tuple(found)
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return tuple(value) if isinstance(value, list | tuple | set) else value


def _instant(value: Any) -> Any:
    """Parse an ISO 8601 instant, which must have a timezone."""
    if not isinstance(value, str):
        return value
    try:
        instant = datetime.fromisoformat(value)
    except ValueError:
        raise InvalidArgument(
            "give an instant as in 2026-01-31T12:00:00+00:00", code=error_codes.NOT_AN_INSTANT
        ) from None
    if instant.utcoffset() is None:
        raise InvalidArgument(
            "it has no timezone; write for example 2026-01-31T12:00:00+00:00",
            code=error_codes.NO_TIMEZONE,
        )
    return instant.astimezone(UTC)


def _seconds(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Instant = Annotated[datetime, BeforeValidator(_instant)]
Seconds = Annotated[NonNegativeDuration, BeforeValidator(_seconds)]
TimeField = Literal["created_at", "updated_at", "finished_at", "started_at", "next_retry_at"]


class RowDefaults(TypedDict, total=False):
    """The enqueue options of ``write_tasks``, for rows that do not set their own."""

    name: str | None
    priority: int | None
    max_attempts: int | None
    delay: Duration | None
    expires_in: Duration | None
    visibility_timeout: Duration | None


class SinkOptions(LocationOptions):
    """How rows become tasks. Enqueue options apply to rows that do not set their own."""

    queue: str | None = None
    """The queue of all rows. Default: the column ``queue``."""
    key: Names = ()
    """The columns that identify a row. Rows with the same key are the same task."""
    keyless: bool = False
    """Write without a key. Rows that Spark retries are then written twice."""
    hold: bool = False
    """Make all tasks visible to workers at the end of the write, or none if it fails."""
    model: str | None = None
    """A pydantic model that validates each payload, as ``module:Class``."""
    load: str | None = Field(default=None, min_length=1, max_length=200)
    """The name under which the report is stored in ``microqueue_loads``."""
    batch_rows: int = Field(default=5_000, ge=1, le=100_000)
    name: str | None = None
    priority: int | None = None
    max_attempts: int | None = None
    delay: Seconds | None = None
    expires_in: Seconds | None = None
    visibility_timeout: Seconds | None = None

    @field_validator("queue", "name")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        return None if name is None else check_name(name)

    @model_validator(mode="after")
    def _keyed(self) -> Self:
        if not self.key and not self.keyless:
            raise InvalidArgument(
                "set key to the columns that identify a row, so that a retried row is the same "
                "task; or set keyless=true, and Spark's retries write rows twice",
                argument="key",
                value=self.key,
                code=error_codes.NO_KEY,
            )
        if self.key and self.keyless:
            raise InvalidArgument(
                "key and keyless=true exclude each other",
                argument="keyless",
                value=self.keyless,
                code=error_codes.CONFLICTING_OPTIONS,
            )
        if self.keyless and self.hold:
            raise InvalidArgument(
                "hold=true needs a key, to recognise rows that were written before",
                argument="hold",
                value=self.hold,
                code=error_codes.NO_KEY,
            )
        return self

    @property
    def task_options(self) -> EnqueueOptions:
        """The enqueue options for rows that do not set their own."""
        names = EnqueueOptions.__annotations__.keys() & type(self).model_fields.keys()
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        return cast("EnqueueOptions", options)


class SelectionOptions(LocationOptions):
    """Which tasks are read, and which columns."""

    queue: Names | None = None
    name: Names | None = None
    status: Names | None = None
    since: Instant | None = None
    until: Instant | None = None
    time: TimeField = "created_at"
    """The field that ``since`` (inclusive) and ``until`` (exclusive) apply to."""
    query: str | None = None
    columns: Names | None = None
    payload: str | None = None
    mode: Literal["permissive", "strict"] = "permissive"
    partitions: int | None = Field(default=None, ge=1, le=100_000)
    batch_rows: int = Field(default=20_000, ge=1, le=1_000_000)
    lag: Seconds | None = None
    """Streams only: the minimum age of a change, so that none is missed. Default: 3 s."""
    max_rows: int | None = Field(default=None, ge=1)
    """Streams only: the maximum number of tasks per micro-batch."""

    @field_validator("queue", "name")
    @classmethod
    def _are_names(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if names is None else tuple(check_name(name) for name in names)

    @field_validator("status")
    @classmethod
    def _statuses_exist(cls, status: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if status is None else tuple(check_status(name).value for name in status)

    @field_validator("query")
    @classmethod
    def _query_is_a_document(cls, query: str | None) -> str | None:
        if query is not None:
            parse_query(query)
        return query

    @model_validator(mode="after")
    def _columns_exist(self) -> Self:
        select_columns(self.columns, self.payload)
        if self.payload == PAYLOAD_OFF and self.columns and "payload" in self.columns:
            raise InvalidArgument(
                "payload=off and the column payload exclude each other",
                argument="payload",
                value=self.payload,
                code=error_codes.CONFLICTING_OPTIONS,
            )
        return self

    @property
    def selected_columns(self) -> list[str]:
        """The names of the columns to read, in order."""
        return select_columns(self.columns, self.payload)

    @property
    def query_document(self) -> dict[str, Any]:
        """The option ``query`` as a document."""
        return {} if self.query is None else parse_query(self.query)


def parse_query(text: str) -> dict[str, Any]:
    """Parse a MongoDB query from Extended JSON."""
    try:
        query = from_json(text)
    except (ValueError, TypeError) as exc:
        raise InvalidArgument(
            f"give a MongoDB query as Extended JSON: {exc}", code=error_codes.NOT_JSON
        ) from exc
    if not isinstance(query, dict):
        raise InvalidArgument(
            "give a MongoDB query as Extended JSON: an object", code=error_codes.NOT_AN_OBJECT
        )
    return query
