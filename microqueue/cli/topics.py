"""Commands about topics: publish, subscribe, topics, bind, unbind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from microqueue.binding import Binding, BindingOptions, MessageFilter
from microqueue.cli import formats, output, values
from microqueue.cli.exit import INTERRUPTED, stop_on_signals
from microqueue.cli.options import DURATION, Reveal
from microqueue.cli.session import Session
from microqueue.errors import InvalidArgument
from microqueue.insights import Insights, TopicView
from microqueue.masking import REDACTED_KEYS, Masker
from microqueue.message import Gap, Message
from microqueue.model import changed
from microqueue.subscription import Subscription
from microqueue.topic import NOW, Topic

READ = timedelta(seconds=1)
"""How long one read waits for messages, and so how long a stop takes at most."""
NO_QUEUE = "a topic belongs to no queue"

TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]
QueueName = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.")]


def publish(
    session: Session,
    topic: TopicName,
    message: Annotated[
        str, typer.Argument(metavar="MESSAGE", help="JSON object; - reads it from stdin.")
    ] = "-",
    *,
    key: Annotated[str, typer.Option(metavar="KEY", help="Routing key, such as shop.eu.")] = "",
    message_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            help="Id of the message, to repeat a command safely. \\[default: a new ObjectId]",
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Header to store with the message; repeatable."),
    ] = None,
) -> None:
    """Publish a message to the subscribers of a topic, and to the queues bound to it."""
    session.reject_queue(NO_QUEUE)
    text = values.read_stdin("MESSAGE") if message == "-" else message
    body = values.read_payload(text, where="the message")
    headers = values.read_headers(header or ())
    with session.connect() as queue:
        position = Topic(queue, topic).publish(
            body, key=key, headers=headers, message_id=message_id
        )
    if session.out.as_json:
        session.out.json({"topic": topic, "position": position})
    else:
        session.out.print(f"Published {position} to topic {topic!r}.")


def subscribe(
    session: Session,
    topic: TopicName,
    *,
    from_: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="POSITION",
            help="now: messages published from now on. start: all that the topic has. "
            "Otherwise a position: those after it.",
        ),
    ] = NOW,
    most: Annotated[
        int | None, typer.Option("--max", min=1, help="End after this number of messages.")
    ] = None,
    timeout: Annotated[
        timedelta | None,
        typer.Option(help="End if no message comes for this time.", **DURATION),
    ] = None,
    reveal: Reveal = False,
) -> None:
    """Print the messages of a topic as they come, until Ctrl-C.

    With --json, each message is one line. Gaps and the last position are printed to stderr.
    """
    session.reject_queue(NO_QUEUE)
    ends = most is not None or timeout is not None
    masker = Masker(None if reveal else REDACTED_KEYS)
    with session.connect() as queue, stop_on_signals() as stop:
        wait = READ if timeout is None else min(timeout, READ)
        with Topic(queue, topic).subscribe(
            from_, timeout=wait, on_gap=lambda gap: _note_gap(session, gap)
        ) as subscription:
            session.out.note(f"Subscribed to topic {topic!r}, from {from_}.")
            _print_messages(session, subscription, masker, stop.is_set, most=most, timeout=timeout)
    if ends and stop.is_set():
        raise typer.Exit(INTERRUPTED)


def _print_messages(
    session: Session,
    subscription: Subscription,
    masker: Masker,
    is_stopped: Callable[[], bool],
    *,
    most: int | None,
    timeout: timedelta | None,
) -> None:
    count, position = 0, subscription.position
    last = time.monotonic()
    while not is_stopped() and (most is None or count < most):
        found = subscription.read()
        if found:
            last = time.monotonic()
        elif timeout is not None and time.monotonic() - last >= timeout.total_seconds():
            break
        for message in found[: None if most is None else most - count]:
            _print_message(session, _masked(message, masker))
            count, position = count + 1, message.position
    resume = "" if position is None else f" The last position is {position}."
    session.out.note(f"{formats.count(count, 'message')}.{resume}")


def _print_message(session: Session, message: Message) -> None:
    if session.out.as_json:
        session.out.json(message, stream=True)
        return
    at = message.published_at
    when = "-" if at is None else f"{at:%Y-%m-%dT%H:%M:%SZ}"
    body = formats.one_line(formats.json_text(message.body))
    key = formats.one_line(message.key) or "-"
    session.out.print(f"{message.position} {when} {key} {body}")


def _masked(message: Message, masker: Masker) -> Message:
    return changed(message, body=masker.mask(message.body), headers=masker.mask(message.headers))


def _note_gap(session: Session, gap: Gap) -> None:
    session.out.note(f"Gap: the messages between {gap.after} and {gap.first} are lost.")


def topics(
    session: Session,
    *,
    limit: Annotated[int, typer.Option("--limit", "-n", help="Number of topics to show.")] = 100,
) -> None:
    """List the topics: how many messages each keeps, the newest one, and its bindings."""
    session.reject_queue(NO_QUEUE)
    with session.connect() as queue:
        found = Insights(queue).topics(limit=limit)
    if session.out.as_json:
        session.out.json(found.topics)
    elif not found.topics:
        session.out.print("No topics.")
    else:
        session.out.table(
            ["topic", "messages", "size", "newest", "bindings"],
            [_row(one, found.at) for one in found.topics],
            bindings="fold",
        )
    if found.total > len(found.topics):
        session.out.note(f"The first {len(found.topics):,} of {found.total:,} topics.")


def _row(view: TopicView, now: datetime) -> list[output.Cell]:
    return [
        formats.one_line(view.topic),
        view.messages,
        formats.size(view.bytes),
        formats.relative(view.newest_at, now),
        ", ".join(_describe(one) for one in view.bindings) or "-",
    ]


def _describe(binding: Binding) -> str:
    return formats.one_line(f"{binding.queue}{_describe_filter(binding.filter)}")


def _describe_filter(chosen: MessageFilter) -> str:
    if chosen is None:
        return ""
    if isinstance(chosen, Mapping):
        return f" ({', '.join(f'{path}={value}' for path, value in chosen.items())})"
    return f" ({chosen})"


def bind(
    session: Session,
    topic: TopicName,
    queue_name: QueueName,
    *,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Only messages whose key matches: * is one word, # any number, as in shop.*.",
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE",
            help="Only messages with this value, as in order.country=FR; repeatable. "
            "A number, true, false and null are read as JSON.",
        ),
    ] = None,
    priority: Annotated[int, typer.Option(help="Priority of the tasks, 0 to 255.")] = 0,
    delay: Annotated[
        timedelta | None, typer.Option(help="Deliver the tasks after this time.", **DURATION)
    ] = None,
    max_attempts: Annotated[
        int | None,
        typer.Option(
            help="Deliveries before a task becomes a dead letter. "
            "\\[default: $MICROQUEUE_MAX_ATTEMPTS, or 10]"
        ),
    ] = None,
    expires_in: Annotated[
        timedelta | None,
        typer.Option(help="Fail a task that is not delivered within this time.", **DURATION),
    ] = None,
) -> None:
    """Bind a queue to a topic: each later message becomes a task of the queue."""
    session.reject_queue(NO_QUEUE)
    if key is not None and where:
        raise typer.BadParameter("give --key or --where, not both.")
    options: BindingOptions = {
        "priority": priority,
        "delay": delay,
        "max_attempts": max_attempts,
        "expires_in": expires_in,
    }
    chosen: MessageFilter = _read_conditions(where) if where else key
    with session.connect() as queue:
        binding = Topic(queue, topic).bind(queue_name, chosen, **options)
    if session.out.as_json:
        session.out.json(binding)
    else:
        session.out.print(
            f"Bound queue {queue_name!r} to topic {topic!r}{_describe_filter(binding.filter)}."
        )


def _read_conditions(pairs: list[str]) -> dict[str, Any]:
    conditions: dict[str, Any] = {}
    for pair in pairs:
        path, equals, text = pair.partition("=")
        if not path or not equals:
            raise InvalidArgument(
                f"where={pair!r} is not valid: give FIELD=VALUE", argument="where", value=pair
            )
        conditions[path] = _read_scalar(text)
    return conditions


def _read_scalar(text: str) -> Any:
    """Return a number, boolean, null or quoted string of JSON; anything else as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, dict | list) else value


def unbind(session: Session, topic: TopicName, queue_name: QueueName) -> None:
    """Unbind a queue from a topic. The tasks that the queue has stay."""
    session.reject_queue(NO_QUEUE)
    with session.connect() as queue:
        was_bound = Topic(queue, topic).unbind(queue_name)
    if session.out.as_json:
        session.out.json({"topic": topic, "queue": queue_name, "was_bound": was_bound})
    else:
        state = "unbound from" if was_bound else "was not bound to"
        session.out.print(f"Queue {queue_name!r} {state} topic {topic!r}.")
