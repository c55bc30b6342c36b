"""The collections that a queue uses, with the options that its guarantees need."""

from __future__ import annotations

from datetime import UTC
from typing import Any

from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo import MongoClient, ReadPreference, WriteConcern
from pymongo.read_concern import ReadConcern

from microqueue.drivers import memory
from microqueue.errors import InvalidArgument
from microqueue.operations.call import PAUSES_COLLECTION, Target, letters_collection

DEFAULT_COLLECTION = "tasks"
LOCKS_COLLECTION = "microqueue_locks"
WORKERS_COLLECTION = "microqueue_workers"
AUDIT_COLLECTION = "microqueue_audit"
LOADS_COLLECTION = "microqueue_loads"


class Collections:
    """The places that calls go to, made from what the caller gave.

    Whatever the caller's options, dates come back aware and in UTC, reads and claims go to
    the primary, and writes are acknowledged: by a majority, unless the caller chose otherwise.
    The caller's type registry and UUID representation are kept.
    """

    def __init__(self, given: Any) -> None:
        source = given if is_collection(given) else _tasks_of(given)
        self.name: str = source.name
        self.codec_options = codec_options_for(source.codec_options)
        self.in_memory = memory.is_in_memory(source)
        options = self._options(source)
        self.tasks = source.with_options(**options)
        database = self.tasks.database
        self.dead_letters = database[letters_collection(self.name)].with_options(**options)
        self.locks = database[LOCKS_COLLECTION].with_options(**options)
        self.workers = database[WORKERS_COLLECTION].with_options(**options)
        self.audit = database[AUDIT_COLLECTION].with_options(**options)
        self.pauses = database[PAUSES_COLLECTION].with_options(**options)
        self.loads = database[LOADS_COLLECTION].with_options(**options)
        self.database = database
        self.client = database.client

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

    def at(self, target: Target) -> Any:
        """Give the collection, or the database, that a call is for."""
        return getattr(self, target.value)

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
        return MongoClient(**kept, **pool)

    def through(self, client: MongoClient[Any] | None) -> Any:
        """Give the same collection, with the same options, through a second client."""
        if client is None:
            return self.tasks
        return client[self.database.name].get_collection(
            self.name, codec_options=self.codec_options, write_concern=self.tasks.write_concern
        )


def codec_options_for(given: CodecOptions[Any]) -> CodecOptions[Any]:
    """Keep what concerns the caller's payloads, and set what the queue relies on."""
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
        # A date outside of datetime's range in one payload must not stop the others.
        datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    )


def is_collection(given: Any) -> bool:
    """Tell a collection from a database, for any driver."""
    # A database turns unknown attributes into collections, so the type's own name decides.
    return type(given).__name__.endswith("Collection")


def _tasks_of(given: Any) -> Any:
    if not type(given).__name__.endswith("Database"):
        raise InvalidArgument(
            f"a queue needs a MongoDB database or collection, not {given!r}; "
            "for a URI there is from_uri()",
            argument="database_or_collection",
            value=given,
        )
    return given[DEFAULT_COLLECTION]


def is_async(given: Any) -> bool:
    """Tell whether a database or collection is of Motor, or of PyMongo's async client."""
    return type(given).__module__.startswith(("motor.", "pymongo.asynchronous."))


def is_blocking(given: Any) -> bool:
    """Tell whether a database or collection is of pymongo's blocking client."""
    return type(given).__module__.startswith("pymongo.synchronous.")
