"""A message as a task: what Kombu publishes becomes a payload and options, and back again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from kombu.utils import json as kombu_json

from microqueue.arguments import invalid_argument
from microqueue.durations import LONGEST
from microqueue.errors import InvalidPayload
from microqueue.new_task import NewTask
from microqueue.task import NAME_HEADER, is_name

TAGGED = "tagged"
"""Set in the payload if headers or properties have values that Kombu's JSON must decode."""
TAG_KEYS = {"__type__", "__value__"}
"""The keys of a mapping that Kombu's JSON decodes to a value of another type."""
MAPPING = "microqueue.mapping"
"""The type of a mapping that has these keys itself."""
PLAIN = (str, int, float, type(None))
INTEGER_LIMIT = 2**63
AMQP_PROPERTIES = frozenset(
    {
        "app_id",
        "correlation_id",
        "delivery_mode",
        "expiration",
        "message_id",
        "priority",
        "reply_to",
        "timestamp",
        "type",
        "user_id",
    }
)


def to_payload(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is stored of a message."""
    encoder = _Encoder()
    payload = {
        "body": message.get("body"),
        "content-type": message.get("content-type"),
        "content-encoding": message.get("content-encoding"),
        "headers": encoder.encode(message.get("headers") or {}),
        "properties": encoder.encode_properties(message["properties"]),
    }
    if encoder.tagged:
        payload[TAGGED] = True
    return payload


def to_task(
    message: Mapping[str, Any], *, priority: int, ttl: timedelta | None, now: datetime
) -> NewTask[Any]:
    """Return the task of a message.

    Args:
        message: What Kombu publishes.
        priority: The priority of the task.
        ttl: How long the message may wait, from when it is due.
        now: The server's time.
    """
    name = task_name(message)
    storable = name is None or is_name(name)
    eta = task_eta(message)
    delay = timedelta(0) if eta is None else max(eta - now, timedelta(0))
    expires_in = None if ttl is None else delay + ttl
    return NewTask(
        payload=to_payload(message),
        priority=priority,
        eta=eta if delay else None,
        expires_in=expires_in if expires_in is None or expires_in <= LONGEST else None,
        name=name if storable else None,
        headers={} if storable else {NAME_HEADER: name},
    )


def to_message(payload: Any, delivery_tag: str, *, redelivered: bool) -> dict[str, Any]:
    """Return a stored message as Kombu expects it.

    Raises:
        InvalidPayload: It was not published as a message, or this process cannot decode it.
    """
    if not isinstance(payload, Mapping):
        raise _no_message("its payload is no mapping")
    message = dict(payload)
    headers, properties = message.get("headers") or {}, message.get("properties")
    if message.pop(TAGGED, False):
        headers, properties = _decode(headers), _decode(properties)
    if not isinstance(properties, dict):
        raise _no_message("its payload has no properties")
    info = properties.get("delivery_info") or {}
    if not (isinstance(headers, dict) and isinstance(info, dict)):
        raise _no_message("its headers or its delivery_info are no mapping")
    info = {**info, "redelivered": redelivered}
    message["headers"] = headers
    message["properties"] = {**properties, "delivery_info": info, "delivery_tag": delivery_tag}
    return message


def _no_message(reason: str) -> InvalidPayload:
    return InvalidPayload(f"it is not a message: {reason}", argument="payload")


def time_to_live(message: Any, *limits: timedelta | None) -> timedelta | None:
    """Return how long a message may wait: the shortest of these limits and its ``expiration``.

    Raises:
        InvalidPayload: It was not published as a message.
        InvalidArgument: Its expiration is no number.
    """
    properties = message.get("properties") if isinstance(message, Mapping) else None
    if properties is not None and not isinstance(properties, Mapping):
        raise _no_message("its properties are no mapping")
    expiration = (properties or {}).get("expiration")
    found = (from_milliseconds("expiration", expiration), *limits)
    return min((limit for limit in found if limit is not None), default=None)


def from_milliseconds(name: str, value: Any) -> timedelta | None:
    """Return a duration of AMQP; 0 becomes the shortest one.

    Raises:
        InvalidArgument: It is no number, or too large.
    """
    if value is None:
        return None
    try:
        return timedelta(milliseconds=max(int(value), 1))
    except (TypeError, ValueError, OverflowError) as exc:
        raise invalid_argument(name, value, "give a number of milliseconds") from exc


def task_name(message: Mapping[str, Any]) -> str | None:
    """Return the name of Celery's task; None for other messages."""
    name = task_field(message, "task")
    return name if isinstance(name, str) else None


def task_eta(message: Mapping[str, Any]) -> datetime | None:
    """Return when Celery's task is due; None for others. A date without a zone is in UTC."""
    eta = task_field(message, "eta")
    if isinstance(eta, str):
        try:
            eta = datetime.fromisoformat(eta)
        except ValueError:
            return None  # The worker rejects the message.
    if not isinstance(eta, datetime):
        return None
    return eta.replace(tzinfo=UTC) if eta.utcoffset() is None else eta


def task_field(message: Mapping[str, Any], field: str) -> Any:
    """Return a field of Celery's protocol: in the headers, or in the body of version 1."""
    headers = message.get("headers") or {}
    if "task" in headers:
        return headers.get(field)
    body = message.get("body")
    if not isinstance(body, str) or message.get("content-type") != "application/json":
        return None
    if '"task"' not in body:
        return None
    try:
        content = json.loads(body)
    except ValueError:
        return None
    is_task = isinstance(content, dict) and "task" in content and "id" in content
    return content.get(field) if is_task else None


class _Encoder:
    """Encodes what BSON cannot hold. ``tagged``: some values are as Kombu's JSON has them."""

    def __init__(self) -> None:
        self.tagged = False

    def encode_properties(self, properties: Mapping[str, Any]) -> dict[str, Any]:
        """Return the properties to store.

        Those that AMQP does not know and that cannot be stored are left out: AMQP ignores them,
        too.
        """
        stored: dict[str, Any] = {}
        for name, value in properties.items():
            if name == "delivery_tag":
                continue  # Each delivery gets a new one.
            try:
                stored[name] = self.encode(value)
            except TypeError:
                if name in AMQP_PROPERTIES:
                    raise
        return stored

    def encode(self, value: Any) -> Any:
        """Return a value that BSON holds as it is; others as Kombu's JSON encodes them."""
        if isinstance(value, int) and not -INTEGER_LIMIT <= value < INTEGER_LIMIT:
            self.tagged = True
            return {"__type__": "decimal", "__value__": str(value)}
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, Mapping):
            encoded = {str(key): self.encode(item) for key, item in value.items()}
            if encoded.keys() != TAG_KEYS:
                return encoded
            self.tagged = True
            return {"__type__": MAPPING, "__value__": list(encoded.items())}
        if isinstance(value, set | frozenset):
            value = sorted(value, key=repr)
        if isinstance(value, list | tuple):
            return [self.encode(item) for item in value]
        self.tagged = True
        return json.loads(kombu_json.dumps(value))


def _decode(value: Any) -> Any:
    """Return a value as it was published.

    Raises:
        InvalidPayload: This process cannot decode it.
    """
    try:
        return _decoded(value)
    except Exception as exc:
        raise InvalidPayload(
            f"its headers or properties cannot be decoded: {exc!r}; a type that the publisher "
            "registers with kombu.utils.json.register_type must be registered here, too",
            argument="payload",
        ) from exc


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == TAG_KEYS and value["__type__"] == MAPPING:
        return {key: _decoded(item) for key, item in value["__value__"]}
    return kombu_json.object_hook({key: _decoded(item) for key, item in value.items()})
