"""Topics: broadcast messages to every subscriber.

A topic keeps its latest messages in one capped collection. Each subscriber reads all of them,
independently of the others and without acknowledgement::

    prices = Topic(database, "prices")
    prices.publish({"sku": "a-1", "price": 12}, key="shop.eu")

    with prices.subscribe() as messages:
        for message in messages:
            print(message.key, message.body)

A message also becomes a task of each queue that is bound to the topic::

    prices.bind("invoices", "shop.*")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Unpack, overload
from urllib.parse import quote

import bson
from bson import ObjectId

from microqueue.arguments import (
    check_callback,
    check_count,
    check_name,
    check_session,
    check_settings,
    clock_argument,
    invalid_argument,
    is_encodable,
)
from microqueue.async_queue import AsyncQueue
from microqueue.binding import Binding, BindingOptions, MessageFilter, check_filter
from microqueue.clock import Clock
from microqueue.core import QueueCore, core_of
from microqueue.drivers.collections import Collections, is_async, is_blocking
from microqueue.drivers.driver import AsyncDriver, SyncDriver
from microqueue.durations import Duration, duration_argument
from microqueue.errors import DuplicateTask, InvalidArgument, InvalidPayload
from microqueue.message import Message
from microqueue.model import changed, reject_unknown
from microqueue.new_task import NewTask
from microqueue.operations import bindings, enqueue, topics
from microqueue.operations.call import Document, Operation, Target
from microqueue.payload import codec_of, encode_all
from microqueue.positions import Positions
from microqueue.queue import Queue
from microqueue.settings import QueueSettings
from microqueue.subscription import AsyncSubscription, Buffer, OnGap, Subscription, check_on_gap
from microqueue.task import DEFAULT_QUEUE, is_text
from microqueue.topic_reader import AsyncReader, LoopReader, SyncReader, Tail, ThreadReader

__all__ = ["AsyncTopic", "Topic"]

MAX_MESSAGES = 10_000
MAX_BYTES = 64 * 1024 * 1024
SMALLEST_BYTES = 4096
LONGEST_NAME = 80
LONGEST_KEY = 255
LONGEST_NAMESPACE = 255
"""In bytes: what MongoDB allows for the names of a database and a collection together."""
NOW, START = "now", "start"
TASK_HEADERS = ("topic", "key", "position")
"""What the headers of a task say about its message."""

T = TypeVar("T")
_codec = codec_of(None)


class TopicCore:
    """What both kinds of topics share: names, limits and operations. It performs no I/O."""

    def __init__(
        self,
        queue_core: QueueCore[Any],
        name: str,
        *,
        max_messages: int,
        max_bytes: int,
        live: bool,
    ) -> None:
        self.name = name
        self.live = live
        self.max_messages = check_count("max_messages", max_messages)
        self.max_bytes = check_count("max_bytes", max_bytes)
        if max_bytes < SMALLEST_BYTES:
            raise invalid_argument("max_bytes", max_bytes, f"give {SMALLEST_BYTES} or more")
        self.settings = queue_core.settings
        self.clock = queue_core.clock
        self.collections = queue_core.collections
        self._queue_core = queue_core
        self._positions = Positions()
        self._is_created = False

    @property
    def namespace(self) -> str:
        """The names of the database and the collection."""
        return f"{self.collections.database.name}.{self.collections.topic.name}"

    def create(self) -> Operation[None]:
        """Create the collection of the topic, unless it exists."""
        if not self._is_created:
            yield from topics.create(
                self.collections.name,
                self.name,
                max_messages=self.max_messages,
                max_bytes=self.max_bytes,
            )
            self._is_created = True

    # Publish

    def publish(
        self,
        message: Any,
        key: str,
        headers: Mapping[str, Any] | None,
        message_id: Any,
        session: Any,
    ) -> Operation[str]:
        """Perform :meth:`Topic.publish`.

        The tasks are written first, and the live message last. So a message that the topic has is
        also in all queues that were bound, and need not be published again.
        """
        chosen = ObjectId() if message_id is None else check_message_id(message_id)
        body = check_message(message)
        given = check_headers(headers)
        check_key(key)
        self._check_session(session)
        now = yield from self._queue_core.now()
        document = topics.new_document(chosen, key=key, body=body, headers=given, now=now)
        stored = self._encode(message, document)
        if self.live:
            self._check_size(message, len(stored.raw))
            yield from self.create()
            if message_id is not None and (yield from topics.holds(chosen)):
                return topics.position_of(chosen)
        repeated = message_id is not None
        yield from self._enqueue(document, stored, session, repeated=repeated)
        if self.live:
            in_memory = self.collections.in_memory
            yield from topics.publish(chosen, document if in_memory else stored)
            if in_memory:
                yield from topics.trim(self.max_messages)
        return topics.position_of(chosen)

    def _encode(self, message: Any, document: Document) -> Any:
        try:
            (stored,) = encode_all(
                [document], self.collections.codec_options, noun="message", field="body"
            )
        except InvalidPayload as exc:
            raise InvalidPayload(str(exc), argument="message", value=message) from exc
        return stored

    def _check_session(self, session: Any) -> None:
        check_session(session, self.collections.client)
        if session is not None and self.live:
            instead = (
                "MongoDB cannot write a live message in a transaction; "
                "create the topic with live=False, which publishes to bound queues only"
            )
            raise invalid_argument("session", session, instead)

    def _check_size(self, message: Any, size: int) -> None:
        if size > self.max_bytes:
            raise InvalidPayload(
                f"the message takes {size:,} bytes, more than the max_bytes={self.max_bytes:,} of "
                "this object; give it a larger max_bytes",
                argument="message",
                value=message,
            )

    def _enqueue(
        self, document: Document, stored: Any, session: Any, *, repeated: bool
    ) -> Operation[None]:
        """Add a task to each bound queue that accepts the message: to all of them, or to none.

        If the message may have been ``repeated``, a task that is stored is not added again.
        """
        collections = self.collections
        bound = yield from bindings.of_topic(collections.name, self.name, session=session)
        if any(isinstance(one.filter, Mapping) for one in bound):
            document = bson.decode(stored.raw, collections.codec_options)  # As it is compared.
        accepting = [one for one in bound if one.accepts(document["key"], document["body"])]
        if not accepting:
            return
        now = yield from self._queue_core.begin(session)
        first = self._positions.take(now, len(accepting))
        documents = []
        for position, binding in enumerate(accepting, first):
            settings = changed(
                self.settings, max_attempts=binding.max_attempts, backoff=binding.backoff
            )
            documents.append(
                enqueue.new_document(
                    self._new_task(binding, document),
                    queue=binding.queue,
                    payload=document["body"],
                    settings=settings,
                    now=now,
                    position=position,
                    insert_token=topics.position_of(document["_id"]),
                )
            )
        if session is not None and repeated:  # A duplicate would abort the transaction.
            known = yield from enqueue.find_stored(documents, Target.TASKS, session)
            documents = [one for one in documents if not known.is_ours(one)]
        encoded = encode_all(documents, collections.codec_options)
        left_out = yield from enqueue.enqueue_many(
            documents,
            encoded=documents if collections.in_memory else encoded,
            settings=self.settings,
            session=session,
            atomic=True,
        )
        if left_out:  # Someone else chose this id for another task.
            taken = documents[min(left_out)]
            queue, task_id = taken["queue"], taken["_id"]
            raise DuplicateTask(queue=queue, task_id=task_id, dedupe_key=None, existing_id=task_id)

    def _new_task(self, binding: Binding, document: Document) -> NewTask[Any]:
        """Return the task of a message in a bound queue; its id is the same at every repeat."""
        position = topics.position_of(document["_id"])
        about = dict(zip(TASK_HEADERS, (self.name, document["key"], position), strict=True))
        return NewTask(
            payload=document["body"],
            task_id="/".join(quote(part, safe="") for part in (self.name, position, binding.queue)),
            headers={**document.get("headers", {}), **about},
            priority=binding.priority,
            delay=binding.delay,
            visibility_timeout=binding.visibility_timeout,
            expires_in=binding.expires_in,
        )

    # Bind

    def bind(self, queue: Any, given: Any, options: BindingOptions) -> Operation[Binding]:
        """Perform :meth:`Topic.bind`."""
        name, settings = self._queue(queue)
        reject_unknown("bind", options, BindingOptions.__annotations__, function=Topic.bind)
        checked = NewTask[Any](payload={}, **options)
        binding = Binding(
            topic=self.name,
            queue=name,
            filter=check_filter(given),
            bound_at=(yield from self._queue_core.now()),
            max_attempts=checked.max_attempts or settings.max_attempts,
            backoff=checked.backoff or settings.backoff,
            priority=checked.priority,
            delay=checked.delay,
            visibility_timeout=checked.visibility_timeout,
            expires_in=checked.expires_in,
        )
        return (yield from bindings.bind(self.collections.name, binding))

    def unbind(self, queue: Any) -> Operation[bool]:
        """Perform :meth:`Topic.unbind`."""
        name, _ = self._queue(queue)
        return (yield from bindings.unbind(self.collections.name, self.name, name))

    def bindings(self) -> Operation[list[Binding]]:
        """Perform :meth:`Topic.bindings`."""
        return (yield from bindings.of_topic(self.collections.name, self.name))

    def _queue(self, given: Any) -> tuple[str, QueueSettings]:
        """Return the name and the settings of a queue, which is in the topic's collection."""
        if is_text(given):
            return check_queue_name(given), self.settings
        if not isinstance(given, Queue | AsyncQueue):
            raise invalid_argument("queue", given, "give the name of a queue, or a queue")
        core: QueueCore[Any] = core_of(given)
        if core.namespace != self._queue_core.namespace:
            instead = f"the topic adds tasks to {self._queue_core.namespace}; give a queue there"
            raise invalid_argument("queue", given, instead)
        return core.name, core.settings

    # Read

    def peek(self, limit: int, convert: Callable[[Message], Any] | None) -> Operation[list[Any]]:
        """Perform :meth:`Topic.peek`."""
        check_callback("convert", convert)
        limit, in_memory = check_count("limit", limit), self.collections.in_memory
        return (yield from topics.newest(limit, in_memory=in_memory, convert=convert))

    def get(self, position: str) -> Operation[Message | None]:
        """Perform :meth:`Topic.get`."""
        if not is_text(position) or not is_encodable(position):
            raise invalid_argument("position", position, "give the position of a message")
        return (yield from topics.find(position))

    def start(self, from_: str) -> Operation[Any]:
        """Return the id of the message after which a subscription starts; None: at the start."""
        if not is_text(from_) or not from_ or not is_encodable(from_):
            raise invalid_argument("from_", from_, "give 'now', 'start' or a position")
        if not self.live:
            raise InvalidArgument("the topic was created with live=False", argument="live")
        yield from self.create()
        if from_ == START:
            return None
        if from_ == NOW:
            return (yield from topics.latest(in_memory=self.collections.in_memory))
        return topics.id_of(from_)

    def tail(self, after: Any) -> Tail:
        """Return what decides how a subscription reads."""
        return Tail(self.name, self.collections, after)


def check_topic(name: Any) -> str:
    """Reject the name of a topic that is not a short, printable string."""
    named = is_text(name) and 0 < len(name) <= LONGEST_NAME and name.isprintable()
    if not named:
        raise invalid_argument(
            "name", name, f"give a printable string of at most {LONGEST_NAME} characters"
        )
    return str(name)


def topic_collections(collections: Collections, name: Any) -> Collections:
    """Return the collections of a topic; reject a name that is too long for MongoDB."""
    found = collections.for_topic(check_topic(name))
    place = f"{found.database.name}.{found.topic.name}"
    if len(place.encode()) > LONGEST_NAMESPACE:
        instead = f"its collection, {place!r}, has a name longer than {LONGEST_NAMESPACE} bytes"
        raise invalid_argument("name", name, instead)
    return found


def check_message(message: Any) -> Document:
    """Return a message as a document; reject one that is neither a dict nor a model."""
    try:
        return _codec.dump(message)
    except InvalidPayload as exc:
        raise InvalidPayload(str(exc), argument="message", value=message) from exc


def check_queue_name(name: str) -> str:
    """Reject the name of a queue that is not short and printable."""
    try:
        return check_name(name)
    except InvalidArgument as exc:
        raise InvalidArgument(str(exc), argument="queue", value=name) from exc


def check_key(key: Any) -> str:
    """Reject a routing key that is not a short string."""
    if not is_text(key) or len(key) > LONGEST_KEY:
        raise invalid_argument("key", key, f"give a string of at most {LONGEST_KEY} characters")
    return key


def check_headers(headers: Any) -> dict[str, Any]:
    """Reject headers that are not a mapping, or that microqueue itself sets in the tasks."""
    if headers is not None and not isinstance(headers, Mapping):
        raise invalid_argument("headers", headers, "give a dict")
    given = dict(headers or {})
    if reserved := sorted({*TASK_HEADERS} & {*given}):
        raise invalid_argument("headers", headers, f"microqueue sets {', '.join(reserved)}")
    return given


def check_message_id(message_id: Any) -> Any:
    """Reject an id that is no ObjectId or short text; return text like an ObjectId as one."""
    if isinstance(message_id, ObjectId):
        return message_id
    reserved = message_id in {NOW, START, ""} if is_text(message_id) else True
    if reserved or len(message_id) > LONGEST_KEY or not message_id.isprintable():
        instead = f"give an ObjectId, or a printable string of at most {LONGEST_KEY} characters"
        raise invalid_argument("message_id", message_id, instead)
    return topics.id_of(message_id)


class Topic:
    """A named topic beside a collection of tasks. Safe to share between threads.

    Args:
        database_or_queue: A pymongo database, a collection of tasks, or a :class:`Queue`, whose
            collection, settings and clock the topic shares.
        name: The name of the topic.
        max_messages: How many messages the topic keeps. The first to use a topic decides.
        max_bytes: How many bytes of messages it keeps. The first to use a topic decides. It is also
            the size of the largest message that this object publishes.
        live: Keep messages for subscribers. If false, messages go to bound queues only, and
            :meth:`publish` can join a transaction.
        settings: Time limits of calls. Default: those of the queue, or of the environment.
        clock: The clock. Default: that of the queue, or the server's.

    Raises:
        InvalidArgument: An argument is not valid.
    """

    def __init__(
        self,
        database_or_queue: Any,
        name: str,
        *,
        max_messages: int = MAX_MESSAGES,
        max_bytes: int = MAX_BYTES,
        live: bool = True,
        settings: QueueSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        if isinstance(database_or_queue, AsyncQueue) or is_async(database_or_queue):
            raise InvalidArgument(
                f"{type(database_or_queue).__name__} is asynchronous; use AsyncTopic",
                argument="database_or_queue",
            )
        collections, settings, clock = _shared(database_or_queue, settings, clock)
        collections = topic_collections(collections, name)
        self._driver = SyncDriver(collections, settings=settings, on_retry=clock.forget)
        shared: Any = {"settings": settings, "payload_model": None, "clock": clock}
        tasks = QueueCore[Any](self._driver, collections, DEFAULT_QUEUE, **shared)
        self._core = TopicCore(
            tasks, name, max_messages=max_messages, max_bytes=max_bytes, live=live
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._core.namespace})"

    @property
    def name(self) -> str:
        """The name of the topic."""
        return self._core.name

    def publish(
        self,
        message: Any,
        *,
        key: str = "",
        headers: Mapping[str, Any] | None = None,
        message_id: Any = None,
        session: Any = None,
    ) -> str:
        """Publish a message to all subscribers and all bound queues.

        Where the server has transactions, all bound queues get their task, or none does.

        Args:
            message: A dict or a pydantic model.
            key: A routing key, such as ``"shop.eu"``.
            headers: Values stored beside the message, and in its tasks.
            message_id: The id of the message, to repeat a call whose outcome is unknown: what the
                topic or a queue has is not added again. Default: a new ``ObjectId``.
            session: A session of the topic's own client, to add the tasks in the caller's
                transaction. Only with ``live=False``.

        Returns:
            The position of the message. A majority has it and its tasks.

        Raises:
            InvalidPayload: MongoDB cannot store the message, or it is too large.
            InvalidArgument: Another argument is not valid.
            TopicConflict: The collection of the topic is not capped.
            DuplicateTask: A queue has a task with the id of this one, which is of another message.
        """
        return self._driver.run(self._core.publish(message, key, headers, message_id, session))

    def bind(
        self,
        queue: Queue[Any] | AsyncQueue[Any] | str,
        filter: MessageFilter = None,  # noqa: A002 (as MongoDB's own methods name it)
        **options: Unpack[BindingOptions],
    ) -> Binding:
        """Bind a queue: each later message becomes a task of it, with retries and dead letters.

        Safe to repeat: a binding that exists gets the new filter and options.

        Args:
            queue: The name of a queue beside the topic, or the queue.
            filter: Which messages. A string is a pattern of keys: ``*`` stands for one word, ``#``
                for any number of words, as in ``"shop.*"``. A dict has values of fields of the
                message, which must be equal, as in ``{"order.country": "FR"}``. Default: all.
            **options: Options of the tasks, see :class:`BindingOptions`. What is left out has the
                value of the queue's settings, or of the topic's for a name.

        Returns:
            The binding as it was stored.

        Raises:
            InvalidArgument: An argument is not valid, or the topic has 1,000 bindings.
        """
        return self._driver.run(self._core.bind(queue, filter, options))

    def unbind(self, queue: Queue[Any] | AsyncQueue[Any] | str) -> bool:
        """Unbind a queue: later messages do not become tasks of it. Tasks that it has stay.

        Args:
            queue: The name of the queue, or the queue.

        Returns:
            Whether the queue was bound.

        Raises:
            InvalidArgument: The argument is not valid.
        """
        return self._driver.run(self._core.unbind(queue))

    def bindings(self) -> list[Binding]:
        """List the bindings of the topic.

        Returns:
            The bindings, by the names of their queues.
        """
        return self._driver.run(self._core.bindings())

    @overload
    def peek(self, limit: int = 10) -> list[Message]: ...

    @overload
    def peek(self, limit: int = 10, *, convert: Callable[[Message], T]) -> list[T]: ...

    def peek(
        self, limit: int = 10, *, convert: Callable[[Message], Any] | None = None
    ) -> list[Any]:
        """Return the newest messages, newest first, without subscribing. Read-only.

        Args:
            limit: The largest number of messages.
            convert: A function of a message. The list holds what it returns instead of the message,
                so that large messages are freed one by one.

        Returns:
            The messages. A failover may roll back the newest ones.

        Raises:
            InvalidArgument: The limit is not valid.
        """
        return self._driver.run(self._core.peek(limit, convert))

    def get(self, position: str) -> Message | None:
        """Return the message at a position. Read-only.

        Args:
            position: The position that :meth:`publish` returned.

        Returns:
            The message, or ``None`` if the topic has it no longer.

        Raises:
            InvalidArgument: The position is not valid.
        """
        return self._driver.run(self._core.get(position))

    def subscribe(
        self,
        from_: str = NOW,
        *,
        timeout: Duration | None = None,
        on_gap: OnGap = "report",
    ) -> Subscription:
        """Subscribe to the messages of the topic.

        Args:
            from_: ``"now"``: what is published after this call. ``"start"``: all messages that the
                topic has. Otherwise a position: what was published after that message.
            timeout: End the iteration if no message comes within this time. Default: wait forever.
            on_gap: What to do if messages were replaced before they were read. ``"report"``: log a
                warning, and list them in :attr:`Subscription.gaps`. ``"raise"``: raise
                :class:`MessagesLost`; the next read continues behind the gap. Otherwise a function
                that is called with the :class:`Gap`.

        Returns:
            The subscription. Close it at the end, or use it in a context.

        Raises:
            InvalidArgument: An argument is not valid.
        """
        timeout_sec = _seconds(timeout)
        check_on_gap(on_gap)
        after = self._driver.run(self._core.start(from_))
        collections = self._core.collections
        reader = SyncReader(self._driver, collections, self._core.tail(after), timeout_sec)
        return Subscription(reader, Buffer(self.name, after, on_gap))


class AsyncTopic:
    """A named topic beside a collection of tasks, for asyncio.

    Args:
        database_or_queue: A database of PyMongo's async client or of Motor, a collection of tasks,
            or an :class:`AsyncQueue`, whose collection, settings and clock the topic shares.
        name: The name of the topic.
        max_messages: How many messages the topic keeps. The first to use a topic decides.
        max_bytes: How many bytes of messages it keeps. The first to use a topic decides. It is also
            the size of the largest message that this object publishes.
        live: Keep messages for subscribers. If false, messages go to bound queues only, and
            :meth:`publish` can join a transaction.
        settings: Time limits of calls. Default: those of the queue, or of the environment.
        clock: The clock. Default: that of the queue, or the server's.

    Raises:
        InvalidArgument: An argument is not valid.
    """

    def __init__(
        self,
        database_or_queue: Any,
        name: str,
        *,
        max_messages: int = MAX_MESSAGES,
        max_bytes: int = MAX_BYTES,
        live: bool = True,
        settings: QueueSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        if isinstance(database_or_queue, Queue) or is_blocking(database_or_queue):
            raise InvalidArgument(
                f"{type(database_or_queue).__name__} is blocking; "
                "use AsyncMongoClient or Motor, or Topic",
                argument="database_or_queue",
            )
        collections, settings, clock = _shared(database_or_queue, settings, clock)
        collections = topic_collections(collections, name)
        self._driver = AsyncDriver(collections, settings=settings, on_retry=clock.forget)
        shared: Any = {"settings": settings, "payload_model": None, "clock": clock}
        tasks = QueueCore[Any](self._driver, collections, DEFAULT_QUEUE, **shared)
        self._core = TopicCore(
            tasks, name, max_messages=max_messages, max_bytes=max_bytes, live=live
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self._core.namespace})"

    @property
    def name(self) -> str:
        """The name of the topic."""
        return self._core.name

    async def publish(
        self,
        message: Any,
        *,
        key: str = "",
        headers: Mapping[str, Any] | None = None,
        message_id: Any = None,
        session: Any = None,
    ) -> str:
        """Publish a message to all subscribers and all bound queues.

        Where the server has transactions, all bound queues get their task, or none does.

        Args:
            message: A dict or a pydantic model.
            key: A routing key, such as ``"shop.eu"``.
            headers: Values stored beside the message, and in its tasks.
            message_id: The id of the message, to repeat a call whose outcome is unknown: what the
                topic or a queue has is not added again. Default: a new ``ObjectId``.
            session: A session of the topic's own client, to add the tasks in the caller's
                transaction. Only with ``live=False``.

        Returns:
            The position of the message. A majority has it and its tasks.

        Raises:
            InvalidPayload: MongoDB cannot store the message, or it is too large.
            InvalidArgument: Another argument is not valid.
            TopicConflict: The collection of the topic is not capped.
            DuplicateTask: A queue has a task with the id of this one, which is of another message.
        """
        return await self._driver.run(
            self._core.publish(message, key, headers, message_id, session)
        )

    async def bind(
        self,
        queue: Queue[Any] | AsyncQueue[Any] | str,
        filter: MessageFilter = None,  # noqa: A002 (as MongoDB's own methods name it)
        **options: Unpack[BindingOptions],
    ) -> Binding:
        """Bind a queue: each later message becomes a task of it, with retries and dead letters.

        Safe to repeat: a binding that exists gets the new filter and options.

        Args:
            queue: The name of a queue beside the topic, or the queue.
            filter: Which messages. A string is a pattern of keys: ``*`` stands for one word, ``#``
                for any number of words, as in ``"shop.*"``. A dict has values of fields of the
                message, which must be equal, as in ``{"order.country": "FR"}``. Default: all.
            **options: Options of the tasks, see :class:`BindingOptions`. What is left out has the
                value of the queue's settings, or of the topic's for a name.

        Returns:
            The binding as it was stored.

        Raises:
            InvalidArgument: An argument is not valid, or the topic has 1,000 bindings.
        """
        return await self._driver.run(self._core.bind(queue, filter, options))

    async def unbind(self, queue: Queue[Any] | AsyncQueue[Any] | str) -> bool:
        """Unbind a queue: later messages do not become tasks of it. Tasks that it has stay.

        Args:
            queue: The name of the queue, or the queue.

        Returns:
            Whether the queue was bound.

        Raises:
            InvalidArgument: The argument is not valid.
        """
        return await self._driver.run(self._core.unbind(queue))

    async def bindings(self) -> list[Binding]:
        """List the bindings of the topic.

        Returns:
            The bindings, by the names of their queues.
        """
        return await self._driver.run(self._core.bindings())

    @overload
    async def peek(self, limit: int = 10) -> list[Message]: ...

    @overload
    async def peek(self, limit: int = 10, *, convert: Callable[[Message], T]) -> list[T]: ...

    async def peek(
        self, limit: int = 10, *, convert: Callable[[Message], Any] | None = None
    ) -> list[Any]:
        """Return the newest messages, newest first, without subscribing. Read-only.

        Args:
            limit: The largest number of messages.
            convert: A function of a message. The list holds what it returns instead of the message,
                so that large messages are freed one by one.

        Returns:
            The messages. A failover may roll back the newest ones.

        Raises:
            InvalidArgument: The limit is not valid.
        """
        return await self._driver.run(self._core.peek(limit, convert))

    async def get(self, position: str) -> Message | None:
        """Return the message at a position. Read-only.

        Args:
            position: The position that :meth:`publish` returned.

        Returns:
            The message, or ``None`` if the topic has it no longer.

        Raises:
            InvalidArgument: The position is not valid.
        """
        return await self._driver.run(self._core.get(position))

    async def subscribe(
        self,
        from_: str = NOW,
        *,
        timeout: Duration | None = None,  # noqa: ASYNC109 (of each read, not of the call)
        on_gap: OnGap = "report",
    ) -> AsyncSubscription:
        """Subscribe to the messages of the topic.

        Args:
            from_: ``"now"``: what is published after this call. ``"start"``: all messages that the
                topic has. Otherwise a position: what was published after that message.
            timeout: End the iteration if no message comes within this time. Default: wait forever.
            on_gap: What to do if messages were replaced before they were read. ``"report"``: log a
                warning, and list them in :attr:`AsyncSubscription.gaps`. ``"raise"``: raise
                :class:`MessagesLost`; the next read continues behind the gap. Otherwise a function
                that is called with the :class:`Gap`.

        Returns:
            The subscription. Close it at the end, or use it in a context.

        Raises:
            InvalidArgument: An argument is not valid.
        """
        timeout_sec = _seconds(timeout)
        check_on_gap(on_gap)
        after = await self._driver.run(self._core.start(from_))
        core = self._core
        reader: AsyncReader
        if core.collections.is_motor:
            collections = core.collections.blocking().for_topic(core.name)
            driver = SyncDriver(collections, settings=core.settings, on_retry=core.clock.forget)
            tail = Tail(core.name, collections, after)
            reader = ThreadReader(SyncReader(driver, collections, tail, timeout_sec))
        else:
            reader = LoopReader(self._driver, core.collections, core.tail(after), timeout_sec)
        return AsyncSubscription(reader, Buffer(self.name, after, on_gap))


def _shared(
    given: Any, settings: QueueSettings | None, clock: Clock | None
) -> tuple[Collections, QueueSettings, Clock]:
    """Return the collections, settings and clock of a queue, or of a database or collection."""
    if isinstance(given, Queue | AsyncQueue):
        core: Any = core_of(given)
        found = check_settings(core.settings if settings is None else settings)
        return core.collections, found, clock_argument(core.clock if clock is None else clock)
    return Collections(given), check_settings(settings), clock_argument(clock)


def _seconds(timeout: Duration | None) -> float | None:
    found = duration_argument("timeout", timeout)
    return None if found is None else found.total_seconds()
