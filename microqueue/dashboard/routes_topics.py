"""The routes about topics: those that read, and those that publish, bind and unbind."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field

from microqueue.binding import LONGEST_PATTERN, Binding, BindingOptions
from microqueue.dashboard.context import DashboardState
from microqueue.dashboard.payloads import from_extended_json, to_browser_json
from microqueue.dashboard.problems import MessageNotFound
from microqueue.dashboard.requests import (
    DashboardContext,
    Limit,
    MaxAttempts,
    PositiveSeconds,
    PrintableName,
    Priority,
    Seconds,
    Strict,
)
from microqueue.insights import TopicList, TopicView
from microqueue.message import Message
from microqueue.topic import LONGEST_KEY, LONGEST_NAME

router = APIRouter()
acting_router = APIRouter()

TopicInPath = Annotated[str, Path(min_length=1, max_length=LONGEST_NAME)]


class BindingRow(BaseModel):
    """A queue that is bound to a topic; the values of its filter are masked as those of payloads.

    ``filter`` is a pattern of keys, the values of some fields, or null for all messages.
    """

    queue: str
    filter: str | dict[str, Any] | None
    bound_at: datetime
    max_attempts: int
    priority: int
    delay_sec: float | None
    visibility_timeout_sec: float | None
    expires_in_sec: float | None


class TopicRow(BaseModel):
    """A topic in a list. Its limits are null if it keeps no messages."""

    topic: str
    messages: int
    bytes: int
    max_messages: int | None
    max_bytes: int | None
    oldest_at: datetime | None
    newest_at: datetime | None
    bindings: list[BindingRow]


class TopicsReply(BaseModel):
    """The first topics by name; ``total`` counts all."""

    at: datetime
    topics: list[TopicRow]
    total: int


class MessageRow(BaseModel):
    """A message in a list."""

    position: str
    key: str
    published_at: datetime | None
    preview: str


class MessagesReply(BaseModel):
    """The newest messages of a topic, newest first."""

    at: datetime
    topic: str
    items: list[MessageRow]


class MessageDetail(MessageRow):
    """A message with all fields."""

    topic: str
    body: Any
    headers: Any


class MessageBody(Strict):
    """A message to publish. It may contain extended JSON, such as ``{"$date": ...}``."""

    message: dict[str, Any] = Field(default_factory=dict)
    key: str = Field(default="", max_length=LONGEST_KEY)
    headers: dict[str, Any] = Field(default_factory=dict)
    message_id: str | None = Field(default=None, min_length=1, max_length=LONGEST_KEY)


class Published(BaseModel):
    """The position of a published message."""

    topic: str
    position: str


class BindingBody(Strict):
    """A queue to bind, which messages it gets, and the options of its tasks."""

    queue: PrintableName
    filter: Annotated[str, Field(max_length=LONGEST_PATTERN)] | dict[str, Any] | None = None
    priority: Priority = 0
    delay_sec: Seconds | None = None
    max_attempts: MaxAttempts | None = None
    expires_in_sec: PositiveSeconds | None = None


class QueueBody(Strict):
    """A queue to unbind."""

    queue: PrintableName


class Unbound(BaseModel):
    """A queue that is not bound, and whether it was."""

    topic: str
    queue: str
    was_bound: bool


@router.get("/topics")
async def topics(
    context: DashboardContext,
    topic: Annotated[str | None, Query(max_length=LONGEST_NAME)] = None,
    limit: Limit = 100,
) -> TopicsReply:
    """List topics by name, or only one, with what they keep and the queues bound to them."""
    limit = min(limit, context.options.page_limit)

    async def read() -> TopicsReply:
        found: TopicList = await context.access.call(
            context.access.insights.topics, topic, limit=limit
        )
        return TopicsReply(
            at=found.at,
            topics=[_topic_row(context, one) for one in found.topics],
            total=found.total,
        )

    reply: TopicsReply = await context.read_cache.get(("topics", topic, limit), read)
    return reply


@router.get("/topics/{topic:path}/messages")
async def messages(
    context: DashboardContext, topic: TopicInPath, limit: Limit = 50
) -> MessagesReply:
    """List the newest messages of a topic, newest first."""
    chosen = context.access.topic(topic)
    limit = min(limit, context.options.page_limit)

    async def read() -> MessagesReply:
        items = await context.access.call(
            chosen.peek, limit, convert=lambda message: _message_row(context, message)
        )
        return MessagesReply(at=await context.access.now(), topic=topic, items=items)

    reply: MessagesReply = await context.read_cache.get(("messages", topic, limit), read)
    return reply


@router.get("/topics/{topic:path}/message")
async def message(
    context: DashboardContext,
    topic: TopicInPath,
    position: Annotated[str, Query(min_length=1, max_length=LONGEST_KEY)],
) -> MessageDetail:
    """Return a message with all fields."""
    found: Message | None = await context.access.call(context.access.topic(topic).get, position)
    if found is None:
        raise MessageNotFound(topic=topic, position=position)
    return MessageDetail(
        **_message_row(context, found).model_dump(),
        topic=topic,
        body=_masked_json(context, found.body),
        headers=_masked_json(context, found.headers),
    )


@acting_router.post("/topics/{topic:path}/publish", status_code=HTTPStatus.CREATED)
async def publish(
    request: Request, context: DashboardContext, topic: TopicInPath, body: MessageBody
) -> Published:
    """Publish a message to the subscribers of a topic, and to the queues bound to it."""
    chosen = context.access.topic(topic)
    content = from_extended_json(body.message, name="message")
    headers = from_extended_json(body.headers, name="headers")
    async with context.audited(request, "topic.publish", target=topic) as action:
        position = await context.access.call(
            chosen.publish, content, key=body.key, headers=headers, message_id=body.message_id
        )
        action.count = 1
    return Published(topic=topic, position=position)


@acting_router.post("/topics/{topic:path}/bind")
async def bind(
    request: Request, context: DashboardContext, topic: TopicInPath, body: BindingBody
) -> BindingRow:
    """Bind a queue: each later message becomes a task of it."""
    chosen = context.access.topic(topic)
    which = body.filter
    if isinstance(which, dict):
        which = from_extended_json(which, name="filter")
    options: BindingOptions = {
        "priority": body.priority,
        "delay": body.delay_sec,
        "max_attempts": body.max_attempts,
        "expires_in": body.expires_in_sec,
    }
    async with context.audited(request, "topic.bind", queue=body.queue, target=topic) as action:
        binding = await context.access.call(chosen.bind, body.queue, which, **options)
        action.count = 1
    return _binding_row(context, binding)


@acting_router.post("/topics/{topic:path}/unbind")
async def unbind(
    request: Request, context: DashboardContext, topic: TopicInPath, body: QueueBody
) -> Unbound:
    """Unbind a queue. The tasks that it has stay."""
    chosen = context.access.topic(topic)
    async with context.audited(request, "topic.unbind", queue=body.queue, target=topic) as action:
        was_bound = await context.access.call(chosen.unbind, body.queue)
        action.count = int(was_bound)
    return Unbound(topic=topic, queue=body.queue, was_bound=was_bound)


def _topic_row(context: DashboardState, view: TopicView) -> TopicRow:
    bindings = [_binding_row(context, one) for one in view.bindings]
    fields = {name: getattr(view, name) for name in TopicRow.model_fields if name != "bindings"}
    return TopicRow(**fields, bindings=bindings)


def _binding_row(context: DashboardState, binding: Binding) -> BindingRow:
    which = binding.filter
    return BindingRow(
        queue=binding.queue,
        filter=_masked_json(context, which) if isinstance(which, Mapping) else which,
        bound_at=binding.bound_at,
        max_attempts=binding.max_attempts,
        priority=binding.priority,
        delay_sec=_seconds(binding.delay),
        visibility_timeout_sec=_seconds(binding.visibility_timeout),
        expires_in_sec=_seconds(binding.expires_in),
    )


def _message_row(context: DashboardState, message: Message) -> MessageRow:
    return MessageRow(
        position=message.position,
        key=message.key,
        published_at=message.published_at,
        preview=context.views.preview(message.body),
    )


def _masked_json(context: DashboardState, value: Any) -> Any:
    return to_browser_json(context.redactor.mask(value))


def _seconds(period: timedelta | None) -> float | None:
    return None if period is None else period.total_seconds()
