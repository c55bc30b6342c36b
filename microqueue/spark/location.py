"""Connect to a collection of tasks, once per process, and run operations on it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Self, TypeVar

from pymongo import MongoClient

from microqueue.clock import ServerClock
from microqueue.drivers.collections import DEFAULT_COLLECTION, Collections
from microqueue.drivers.connection import Connection
from microqueue.drivers.sync import SyncDriver
from microqueue.operations.call import Operation, dlq_collection_name
from microqueue.operations.server_clock import read_clock
from microqueue.settings import QueueSettings
from microqueue.spark.options import LocationOptions, resolve_uri

T = TypeVar("T")


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

    def run(self, operation: Operation[T]) -> T:
        """Run an operation on this collection."""
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
