"""Where the tasks are: the options, and one connection per process that runs operations there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import field_validator
from pymongo import MongoClient

from microqueue.arguments import check_collection, check_uri
from microqueue.clock import ServerClock
from microqueue.drivers.collections import DEFAULT_COLLECTION, Collections
from microqueue.drivers.connection import URI_VARIABLE, Connection
from microqueue.drivers.driver import SyncDriver
from microqueue.embedded import default_directory, running
from microqueue.errors import InvalidArgument
from microqueue.model import Model
from microqueue.operations import schema
from microqueue.operations.call import Operation, dlq_collection_name
from microqueue.operations.server_clock import read_clock
from microqueue.settings import QueueSettings

T = TypeVar("T")

SPARK_OPTIONS = frozenset({"checkpointlocation", "queryname", "outputmode", "path"})
"""Options that Spark adds itself."""

ReadPreference = Literal[
    "primary", "primaryPreferred", "secondary", "secondaryPreferred", "nearest"
]


class LocationOptions(Model):
    """The collection of tasks to read or write."""

    _owner: ClassVar[str | None] = "format('microqueue')"

    uri: str
    database: str | None = None
    collection: str = DEFAULT_COLLECTION
    read_preference: ReadPreference | None = None
    """Default: that of the URI. A secondary takes load off the primary and may lag behind it."""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Self:
        """Validate Spark's options. An unknown option is an error, because it may be a typo."""
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


def resolve_uri(uri: str | None) -> str:
    """Return the URI for all executors: ``uri``, ``MICROQUEUE_URI``, or the embedded server."""
    check_uri(uri)
    address = uri or os.environ.get(URI_VARIABLE) or running(default_directory())
    if not address:
        raise InvalidArgument(
            "no MongoDB server is configured: give the option uri, set MICROQUEUE_URI, "
            "or start a server with `microqueue up`",
            argument="uri",
        )
    return address


class ReadCollections(Collections):
    """The collections of a queue, with the caller's read preference instead of the primary."""

    def _options(self, source: Any) -> dict[str, Any]:
        return {**super()._options(source), "read_preference": source.read_preference}


class Location:
    """A collection of tasks and the driver that runs operations on it."""

    def __init__(self, options: LocationOptions) -> None:
        self.settings = QueueSettings.from_environment()
        preference = options.read_preference
        connection = Connection(
            MongoClient,
            options.uri,
            settings=self.settings,
            collection=None,
            client_options={} if preference is None else {"readPreference": preference},
        )
        database = connection.database_or_collection
        if options.database is not None:
            database = connection.client[options.database]
        self._client = connection.client
        self.collections = ReadCollections(database[options.collection])
        self._driver = SyncDriver(self.collections, settings=self.settings, on_retry=lambda: None)
        self._checked = False

    def run(self, operation: Operation[T]) -> T:
        """Run an operation on this collection.

        Raises:
            SchemaMismatch: The first call found that this code cannot work with the collection.
        """
        if not self._checked:
            self._driver.run(schema.check(self.collections.name, self.settings.retention))
            self._checked = True
        return self._driver.run(operation)

    def close(self) -> None:
        """Close the client."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_locations: dict[LocationOptions, Location] = {}


def location_of(options: LocationOptions) -> Location:
    """Return the location of these options, with a client that this process keeps.

    Spark reuses its Python processes, so later tasks reuse the client.
    """
    location = LocationOptions(
        **{name: getattr(options, name) for name in LocationOptions.model_fields}
    )
    if location not in _locations:
        _locations[location] = Location(location)
    return _locations[location]


def close_locations() -> None:
    """Close all clients that this process keeps."""
    while _locations:
        _locations.popitem()[1].close()


def locate(
    uri: str | None = None, *, database: str | None = None, collection: str = DEFAULT_COLLECTION
) -> LocationOptions:
    """Return where the tasks are; by default at ``MICROQUEUE_URI``, or in the embedded server."""
    return LocationOptions(uri=resolve_uri(uri), database=database, collection=collection)


def primary(location: LocationOptions) -> LocationOptions:
    """Return the location read from the primary, as is required before writing."""
    return location.model_copy(update={"read_preference": "primary"})


def dead_letters_of(location: LocationOptions) -> LocationOptions:
    """Return the separate collection of dead letters."""
    return location.model_copy(update={"collection": dlq_collection_name(location.collection)})


def server_now(location: LocationOptions) -> datetime:
    """Read the server's time."""
    return location_of(location).run(read_clock(ServerClock()))


def now_at(location: LocationOptions | None) -> datetime:
    """Read the server's time, or without a server that of this machine, in UTC."""
    return datetime.now(UTC) if location is None else server_now(location)
