"""The collections of a queue, with the options that its guarantees need."""

from __future__ import annotations

import copy
import math
from datetime import UTC
from typing import Any, Self

from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion, TypeRegistry
from pymongo import MongoClient, ReadPreference, WriteConcern
from pymongo.read_concern import ReadConcern

from microqueue.errors import InvalidArgument
from microqueue.operations.call import (
    DEDUPE_KEYS_COLLECTION,
    PAUSES_COLLECTION,
    SCHEDULES_COLLECTION,
    dlq_collection_name,
    topic_collection_name,
)

DEFAULT_COLLECTION = "tasks"
LOCKS_COLLECTION = "microqueue_locks"
WORKERS_COLLECTION = "microqueue_workers"
AUDIT_COLLECTION = "microqueue_audit"
LOADS_COLLECTION = "microqueue_loads"
BROKER_COLLECTION = "microqueue_broker"
BINDINGS_COLLECTION = "microqueue_bindings"

STREAM_MS = 60_000
"""After how long without any reply of the server a change stream is given up."""


class Collections:
    """The collections and the database that calls go to.

    Whatever the caller's options, dates are aware and in UTC, reads and claims go to the primary,
    and writes are acknowledged: by a majority, unless the caller set another write concern. The
    caller's type registry and UUID representation are kept.
    """

    def __init__(self, given: Any) -> None:
        source = given if is_collection(given) else _tasks_of(given)
        self.name: str = source.name
        self.codec_options = codec_options_for(source.codec_options)
        self.in_memory = is_in_memory(source)
        options = self._options(source)
        self.tasks = source.with_options(**options)
        self.claims = self._without_zones()
        database = self.tasks.database
        self.dead_letters = database[dlq_collection_name(self.name)].with_options(**options)
        self.committed = self._as_majority_has(self.tasks)
        self.committed_dead_letters = self._as_majority_has(self.dead_letters)
        self.locks = database[LOCKS_COLLECTION].with_options(**options)
        self.workers = database[WORKERS_COLLECTION].with_options(**options)
        self.audit = database[AUDIT_COLLECTION].with_options(**options)
        self.pauses = database[PAUSES_COLLECTION].with_options(**options)
        self.loads = database[LOADS_COLLECTION].with_options(**options)
        self.topic: Any = None  # Of for_topic.
        self.bindings = database[BINDINGS_COLLECTION].with_options(**options)
        self.dedupe_keys = database[DEDUPE_KEYS_COLLECTION].with_options(**options)
        self.broker = database[BROKER_COLLECTION].with_options(**options)
        self.schedules = database[SCHEDULES_COLLECTION].with_options(**options)
        self.database = database
        self.client = database.client
        # Motor's objects have every attribute, so the name of the type decides.
        self.is_motor = not self.in_memory and type(self.tasks).__module__.startswith("motor.")
        # What the caller's client is set to.
        self.timeout_sec: float | None = None if self.in_memory else self.client.options.timeout
        self.selection_sec: float = (
            math.inf if self.in_memory else self.client.options.server_selection_timeout
        )

    def for_topic(self, name: str) -> Self:
        """Return the same collections, with that of a topic."""
        found = copy.copy(self)
        collection = self.database[topic_collection_name(self.name, name)]
        found.topic = collection.with_options(**self._options(self.tasks))
        return found

    def blocking(self) -> Self:
        """Return the same collections on the blocking client that Motor wraps."""
        return type(self)(self.tasks.delegate)

    def _options(self, source: Any) -> dict[str, Any]:
        if self.in_memory:
            return {"codec_options": CodecOptions(tz_aware=True)}  # All that mongomock takes.
        concern = source.write_concern
        if not concern.acknowledged:
            raise InvalidArgument(
                f"the write concern {concern.document} loses tasks silently; use one with w >= 1",
                argument="write_concern",
                value=concern,
            )
        return {
            "codec_options": self.codec_options,
            "read_preference": ReadPreference.PRIMARY,
            "read_concern": ReadConcern(),
            "write_concern": WriteConcern("majority") if concern.is_server_default else concern,
        }

    def _without_zones(self) -> Any:
        """Return the tasks with dates in UTC, but without a timezone.

        The driver takes as long for the timezones of a task as for all the rest of it. A caller's
        decoder gets dates as always.
        """
        options = self.codec_options
        if self.in_memory or options.type_registry != TypeRegistry():
            return self.tasks
        plain = options.with_options(tz_aware=False, tzinfo=None)
        return self.tasks.with_options(codec_options=plain)

    def _as_majority_has(self, collection: Any) -> Any:
        """Return a collection whose reads show what a failover cannot undo."""
        if self.in_memory:
            return collection
        return collection.with_options(read_concern=ReadConcern("majority"))

    def pools(self) -> list[Any]:
        """Return the connection pools of the client, to close their idle connections.

        There is no public way to do that. Where it is not possible, each dead connection is
        noticed by the next call that uses it.
        """
        blocking = self.client.delegate if self.is_motor else self.client
        servers = getattr(getattr(blocking, "_topology", None), "_servers", None) or {}
        pools = (getattr(server, "pool", None) for server in list(servers.values()))
        return [pool for pool in pools if hasattr(pool, "reset_without_pause")]

    def second_client(self) -> MongoClient[Any] | None:
        """Make a blocking client like the one in use, with as many connections as it needs.

        None for a database in memory, which has no connections.
        """
        if self.in_memory:
            return None
        # Motor wraps a blocking client. There is no public way to make a second client like a
        # first one.
        first = self.client if hasattr(self.client, "_init_kwargs") else self.client.delegate
        given: dict[str, Any] = first._init_kwargs  # noqa: SLF001 (as above)
        pool: dict[str, Any] = {"maxPoolSize": 0, "minPoolSize": 0, "waitQueueTimeoutMS": None}
        others = {name.lower() for name in pool}
        kept = {name: value for name, value in given.items() if name.lower() not in others}
        if first.options.pool_options.socket_timeout is None:
            # For its change stream: calls have their own limits.
            kept["socketTimeoutMS"] = STREAM_MS
        return MongoClient(**kept, **pool)

    def through(self, client: MongoClient[Any] | None) -> Any:
        """Return the collection of tasks, with the same options, on a second client."""
        if client is None:
            return self.tasks
        return client[self.database.name].get_collection(
            self.name, codec_options=self.codec_options, write_concern=self.tasks.write_concern
        )


def codec_options_for(given: CodecOptions[Any]) -> CodecOptions[Any]:
    """Return options that keep the caller's payload types, with what the queue relies on."""
    representation = given.uuid_representation
    if representation == UuidRepresentation.UNSPECIFIED:
        representation = UuidRepresentation.STANDARD
    return CodecOptions(
        document_class=dict,
        tz_aware=True,
        tzinfo=UTC,
        uuid_representation=representation,
        unicode_decode_error_handler=given.unicode_decode_error_handler,
        type_registry=given.type_registry,
        # A date outside datetime's range in one payload must not stop the others.
        datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    )


def is_collection(given: Any) -> bool:
    """Return whether this is a collection and not a database, for any driver."""
    # A database turns unknown attributes into collections, so the name of the type decides.
    return type(given).__name__.endswith("Collection")


def _tasks_of(given: Any) -> Any:
    if not type(given).__name__.endswith("Database"):
        raise InvalidArgument(
            f"a queue needs a MongoDB database or collection, not {given!r}; "
            "for a URI there is from_uri()",
            argument="database_or_collection",
            value=given,
            code="no_database",
        )
    return given[DEFAULT_COLLECTION]


def is_in_memory(collection: Any) -> bool:
    """Return whether a collection is of mongomock or mongomock-motor.

    The type of the latter looks like Motor's, but that of a copy with other options does not.
    """
    return type(collection.with_options()).__module__.startswith("mongomock")


def is_async(given: Any) -> bool:
    """Return whether a database or collection is of Motor, or of PyMongo's async client."""
    return type(given).__module__.startswith(("motor.", "pymongo.asynchronous."))


def is_blocking(given: Any) -> bool:
    """Return whether a database or collection is of pymongo's blocking client."""
    return type(given).__module__.startswith("pymongo.synchronous.")
