"""Connect to MongoDB by a URI, by the environment, or to the embedded server."""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

from pymongo.errors import ConfigurationError, InvalidURI

from microqueue.arguments import check_collection, check_uri
from microqueue.embedded import EmbeddedServer, default_directory
from microqueue.errors import InvalidArgument
from microqueue.masking import without_fragments, without_password
from microqueue.settings import QueueSettings

DEFAULT_DATABASE = "microqueue"
URI_VARIABLE = "MICROQUEUE_URI"


def option_names(uri: str) -> set[str]:
    """Return the names of the options that a URI sets, in lower case."""
    return {option.partition("=")[0].lower() for option in re.split("[&;]", uri.partition("?")[2])}


class Connection:
    """A client that a queue owns, its database, and the embedded server if it uses one."""

    def __init__(
        self,
        client_class: Any,
        uri: str | None,
        *,
        settings: QueueSettings,
        collection: str | None,
        client_options: dict[str, Any],
    ) -> None:
        check_uri(uri)
        check_collection(collection)
        self.server: EmbeddedServer | None = None
        address = uri or os.environ.get(URI_VARIABLE)
        if not address:
            self.server = EmbeddedServer.start(default_directory())
            address = self.server.uri
        timeout_ms = int(settings.server_timeout.total_seconds() * 1000)
        defaults = {
            "serverSelectionTimeoutMS": timeout_ms,
            "connectTimeoutMS": timeout_ms,
            # For what has no other limit: change streams, and what Spark reads.
            "socketTimeoutMS": int(settings.long_call_timeout.total_seconds() * 1000),
            "appname": "microqueue",
        }
        given = option_names(address)
        options = {name: value for name, value in defaults.items() if name.lower() not in given}
        try:
            self.client = client_class(address, **{**options, **client_options})
            database = self.client.get_default_database(DEFAULT_DATABASE)
        except (InvalidURI, ConfigurationError, ValueError, TypeError) as exc:
            self.stop_server()
            raise InvalidArgument(
                f"cannot use the MongoDB URI {without_password(address)!r}: "
                f"{without_fragments(str(exc))}",
                argument="uri",
            ) from exc
        self.database_or_collection = database if collection is None else database[collection]

    def abandon(self) -> None:
        """Close what was opened for a queue that could not be created."""
        closing = self.client.close()
        if inspect.iscoroutine(closing):
            closing.close()  # It never connected, so there is nothing to wait for.
        self.stop_server()

    def stop_server(self) -> None:
        """Release the embedded server; it stops with its last user."""
        if self.server is not None:
            self.server.stop()
