"""Cursors: a place in a list that is ordered by an instant, then by id, as text.

The text can stand in an address, and the id in it may be of any type that MongoDB sorts.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from bson import json_util
from bson.binary import UuidRepresentation
from bson.errors import BSONError

from microqueue.arguments import refused
from microqueue.operations import id_order

EPOCH = datetime.fromtimestamp(0, UTC)
FORMAT = json_util.JSONOptions(
    json_mode=json_util.JSONMode.CANONICAL,
    uuid_representation=UuidRepresentation.STANDARD,
    tz_aware=True,
)


def write(at: Any, last_id: Any) -> str:
    """Name the place of a document; one without an instant is at the end, as MongoDB sorts."""
    return json_util.dumps({"at": at or EPOCH, "id": last_id}, json_options=FORMAT)


def read(cursor: str) -> tuple[datetime, Any]:
    """Read the instant and the id of a place; anything but an instant and a plain id is refused."""
    try:
        place = json_util.loads(cursor, json_options=FORMAT)
        at, last_id = place["at"].astimezone(UTC), place["id"]
        id_order.beyond(last_id, ascending=True)  # It tells what is no id.
    except (ValueError, TypeError, KeyError, AttributeError, BSONError) as exc:
        raise refused("cursor", cursor, "give the next_cursor of a page") from exc
    return at, last_id
