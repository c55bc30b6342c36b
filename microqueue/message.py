"""Messages: what a subscriber of a topic receives."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from microqueue.model import Model


class Message(Model):
    """A message of a topic."""

    position: str
    """The id of the message. A subscription resumes behind it."""
    key: str
    """The routing key; empty if none was given."""
    body: Any
    headers: Mapping[str, Any]
    published_at: datetime | None
    """When it was published, by the server's clock. ``None`` in a document edited manually."""


class Gap(Model):
    """Messages that a subscriber did not read before newer ones replaced them."""

    topic: str
    after: str
    """The last position that was read."""
    first: str
    """The position of the next message that is still there."""
