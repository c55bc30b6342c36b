"""The options of reads and writes: checked in the driver, before anything is asked of MongoDB.

Spark gives every option as text. Here they become frozen models: what a DataFrame was made
with never changes under it, however often it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from microqueue.arguments import check_collection, check_name, check_status, check_uri
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.drivers.connection import URI_VARIABLE
from microqueue.durations import NonNegativeDuration
from microqueue.embedded import default_directory, running
from microqueue.errors import InvalidArgument
from microqueue.extended_json import from_json
from microqueue.model import Model
from microqueue.spark.columns import PAYLOAD_OFF, chosen_columns

SPARK_OPTIONS = frozenset({"checkpointlocation", "queryname", "outputmode", "path"})
"""What Spark itself puts among the options."""


def _names(value: Any) -> Any:
    """Read a list as text: names between commas, or a list in JSON."""
    if isinstance(value, str):
        with suppress(ValueError):
            if isinstance(found := json.loads(value), list):
                return tuple(found)
        return tuple(name.strip() for name in value.split(",") if name.strip())
    return tuple(value) if isinstance(value, list | tuple | set) else value


def _instant(value: Any) -> Any:
    """Read an instant as ISO 8601; without a timezone it would be anybody's guess."""
    if not isinstance(value, str):
        return value
    try:
        instant = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError("give an instant as in 2026-01-31T12:00:00+00:00") from None
    if instant.utcoffset() is None:
        raise ValueError("it has no timezone; write for example 2026-01-31T12:00:00+00:00")
    return instant.astimezone(UTC)


def _seconds(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Instant = Annotated[datetime, BeforeValidator(_instant)]
Seconds = Annotated[NonNegativeDuration, BeforeValidator(_seconds)]
ReadPreference = Literal[
    "primary", "primaryPreferred", "secondary", "secondaryPreferred", "nearest"
]
TimeField = Literal["created_at", "updated_at", "finished_at", "started_at", "next_retry_at"]


class LocationOptions(Model):
    """Where the tasks are."""

    uri: str
    database: str | None = None
    collection: str = DEFAULT_COLLECTION
    read_preference: ReadPreference | None = None
    """Else that of the URI. Reports that may be a second late need not slow the primary."""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Self:
        """Read Spark's options; one that is not known is refused, in case it is a typing error."""
        values: dict[str, Any] = {
            name.lower(): value
            for name, value in given.items()
            if name.lower() not in SPARK_OPTIONS
        }
        return cls(**{**values, "uri": resolve_uri(values.get("uri"))})

    @field_validator("collection")
    @classmethod
    def _collection_is_a_name(cls, collection: str) -> str:
        check_collection(collection)
        return collection


class SinkOptions(LocationOptions):
    """How rows become tasks. What is given here holds for rows that do not say otherwise."""

    queue: str | None = None
    """The queue of all rows; else the column ``queue`` says it."""
    key: Names = ()
    """The columns that make a row what it is: written again, it is the same task."""
    keyless: bool = False
    """Write without a key: a task that Spark repeats is then written twice."""
    hold: bool = False
    """Let workers see all of it, once everything is written, or nothing."""
    model: str | None = None
    """A pydantic model that checks each payload, as ``module:Class``."""
    load: str | None = Field(default=None, min_length=1, max_length=200)
    """The name under which the report is left in ``microqueue_loads``."""
    batch_rows: int = Field(default=5_000, ge=1, le=100_000)
    priority: int | None = None
    max_attempts: int | None = None
    delay: Seconds | None = None
    expires_in: Seconds | None = None
    visibility_timeout: Seconds | None = None

    @field_validator("queue")
    @classmethod
    def _queue_is_a_name(cls, queue: str | None) -> str | None:
        return None if queue is None else check_name(queue)

    @model_validator(mode="after")
    def _keyed(self) -> Self:
        if not self.key and not self.keyless:
            raise ValueError(
                "name the columns of a key, so that a row written again is the same task; "
                "keyless=true does without, and Spark's retries then write rows twice"
            )
        if self.key and self.keyless:
            raise ValueError("key and keyless=true contradict each other")
        if self.keyless and self.hold:
            raise ValueError("a load that is held needs a key: it must know its rows again")
        return self

    @property
    def task_options(self) -> dict[str, Any]:
        """The options of every task that has none of its own."""
        names = ("priority", "max_attempts", "delay", "expires_in", "visibility_timeout")
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}


class SelectionOptions(LocationOptions):
    """Which tasks are read, and what of them."""

    queue: Names | None = None
    status: Names | None = None
    since: Instant | None = None
    until: Instant | None = None
    time: TimeField = "created_at"
    """The field that ``since`` (included) and ``until`` (not included) speak of."""
    query: str | None = None
    columns: Names | None = None
    payload: str | None = None
    mode: Literal["permissive", "strict"] = "permissive"
    partitions: int | None = Field(default=None, ge=1, le=100_000)
    batch_rows: int = Field(default=20_000, ge=1, le=1_000_000)
    lag: Seconds | None = None
    """Streams only: how old a change must be, so that none comes late; 3 s unless given."""
    max_rows: int | None = Field(default=None, ge=1)
    """Streams only: how many tasks one micro-batch takes at most."""

    @field_validator("queue")
    @classmethod
    def _queues_are_names(cls, queue: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if queue is None else tuple(check_name(name) for name in queue)

    @field_validator("status")
    @classmethod
    def _statuses_exist(cls, status: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if status is None else tuple(check_status(name).value for name in status)

    @field_validator("query")
    @classmethod
    def _query_is_a_document(cls, query: str | None) -> str | None:
        if query is not None:
            read_query(query)
        return query

    @model_validator(mode="after")
    def _columns_exist(self) -> Self:
        chosen_columns(self.columns, self.payload)
        if self.payload == PAYLOAD_OFF and self.columns and "payload" in self.columns:
            raise ValueError("payload=off and a column payload contradict each other")
        return self

    @property
    def chosen(self) -> list[str]:
        """The names of the columns, in their order."""
        return chosen_columns(self.columns, self.payload)

    @property
    def document(self) -> dict[str, Any]:
        """The expert's query."""
        return {} if self.query is None else read_query(self.query)


def read_query(text: str) -> dict[str, Any]:
    """Read a MongoDB query from extended JSON."""
    try:
        query = from_json(text)
    except (ValueError, TypeError) as exc:
        raise ValueError(f"give a MongoDB query as extended JSON: {exc}") from exc
    if not isinstance(query, dict):
        raise ValueError("give a MongoDB query as extended JSON: an object")  # noqa: TRY004 (pydantic reads ValueError)
    return query


def resolve_uri(uri: str | None) -> str:
    """Give the address for all executors: that given, the environment's, or the server's here."""
    check_uri(uri)
    address = uri or os.environ.get(URI_VARIABLE) or running(default_directory())
    if not address:
        raise InvalidArgument(
            "no MongoDB to use: give the option uri, or set MICROQUEUE_URI, "
            "or start one with `microqueue up`",
            argument="uri",
        )
    return address
