"""Connect to MongoDB by a URI, by the environment, or to the embedded server."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pymongo.errors import ConfigurationError

from microqueue.arguments import check_collection, check_uri
from microqueue.errors import InvalidArgument
from microqueue.masking import without_fragments, without_password
from microqueue.model import UNKNOWN_OPTION
from microqueue.settings import QueueSettings

if TYPE_CHECKING:
    from microqueue.embedded import EmbeddedServer

DEFAULT_DATABASE = "microqueue"
URI_VARIABLE = "MICROQUEUE_URI"
OWN_OPTIONS = ("uri", "name", "settings", "payload_model", "clock", "hooks", "collection")
"""The options of ``from_uri`` that are not the driver's."""


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
        client_options: Mapping[str, Any],
    ) -> None:
        check_uri(uri)
        check_collection(collection)
        self.server: EmbeddedServer | None = None
        address = uri or os.environ.get(URI_VARIABLE)
        if not address:
            # On first use: a service with a URI starts no server.
            from microqueue.embedded import EmbeddedServer, default_directory  # noqa: PLC0415

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
        except Exception as exc:  # Its checks of options raise whatever they meet.
            self.stop_server()
            raise _rejected(exc, address, client_options) from exc
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


def _rejected(exc: Exception, address: str, client_options: Mapping[str, Any]) -> InvalidArgument:
    """Return the error for what the driver rejected: an option that it names, or the URI."""
    reason = without_fragments(str(exc))
    # A number may be anything, such as the errno of a file: small ones are one object everywhere.
    args = (one for one in exc.args if not isinstance(one, int))
    for cause in (getattr(exc, "filename", None), *args):
        for option, value in client_options.items():
            if value is not None and value is cause:
                return InvalidArgument(f"{option} is not valid: {reason}", argument=option)
    named = re.search(rf"\b(?:{'|'.join(map(re.escape, client_options)) or '(?!)'})\b", reason)
    if named is None:
        return InvalidArgument(
            f"cannot use the MongoDB URI {without_password(address)!r}: {reason}", argument="uri"
        )
    option = named[0]
    # Its value is not shown: it may be a password.
    if not isinstance(exc, ConfigurationError):
        return InvalidArgument(f"{option} is not valid: {reason}", argument=option)
    close = get_close_matches(option, [*OWN_OPTIONS, *QueueSettings.model_fields], n=1, cutoff=0.8)
    if close:
        [meant] = close
        hint = f"did you mean {meant!r}?"
        if meant not in OWN_OPTIONS:
            hint = f"pass settings=QueueSettings({meant}=...)"
        reason = f"from_uri has no option {option!r}; {hint}"
    return InvalidArgument(reason, argument=option, code=UNKNOWN_OPTION, closest=close)
