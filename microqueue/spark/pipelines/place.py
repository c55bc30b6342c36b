"""Where a pipeline finds the tasks, and what time it is there."""

from __future__ import annotations

from datetime import UTC, datetime

from microqueue.clock import ServerClock
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.operations.call import letters_collection
from microqueue.operations.server_clock import read_clock
from microqueue.spark.location import location_of
from microqueue.spark.options import LocationOptions, resolve_uri


def locate(
    uri: str | None = None, *, database: str | None = None, collection: str = DEFAULT_COLLECTION
) -> LocationOptions:
    """Give the place of the tasks: an address, that of the environment, or the embedded one."""
    return LocationOptions(uri=resolve_uri(uri), database=database, collection=collection)


def primary(place: LocationOptions) -> LocationOptions:
    """Give the same place, read from the primary: what is written is decided on what is true."""
    return place.model_copy(update={"read_preference": "primary"})


def letters_of(place: LocationOptions) -> LocationOptions:
    """Give the place of the dead letters, where they have a collection of their own."""
    return place.model_copy(update={"collection": letters_collection(place.collection)})


def server_now(place: LocationOptions) -> datetime:
    """Read the server's time."""
    return location_of(place).run(read_clock(ServerClock()))


def now_at(place: LocationOptions | None) -> datetime:
    """Read the server's time, or that of this machine where no server is asked; in UTC."""
    return datetime.now(UTC) if place is None else server_now(place)
