"""Where a pipeline finds the tasks, and what time it is there."""

from __future__ import annotations

from datetime import UTC, datetime

from microqueue.clock import ServerClock
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.operations.call import letters_collection
from microqueue.operations.server_clock import read_clock
from microqueue.spark.options import PlaceOptions, resolve_uri
from microqueue.spark.place import place_of


def locate(
    uri: str | None = None, *, database: str | None = None, collection: str = DEFAULT_COLLECTION
) -> PlaceOptions:
    """Give the place of the tasks: an address, that of the environment, or the embedded one."""
    return PlaceOptions(uri=resolve_uri(uri), database=database, collection=collection)


def primary(place: PlaceOptions) -> PlaceOptions:
    """Give the same place, read from the primary: what is written is decided on what is true."""
    return place.model_copy(update={"read_preference": "primary"})


def letters_of(place: PlaceOptions) -> PlaceOptions:
    """Give the place of the dead letters, where they have a collection of their own."""
    return place.model_copy(update={"collection": letters_collection(place.collection)})


def server_now(place: PlaceOptions) -> datetime:
    """Read the server's time."""
    return place_of(place).run(read_clock(ServerClock()))


def now_at(place: PlaceOptions | None) -> datetime:
    """Read the server's time, or that of this machine where no server is asked; in UTC."""
    return datetime.now(UTC) if place is None else server_now(place)
