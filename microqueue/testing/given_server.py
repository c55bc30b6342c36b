"""The MongoDB of ``MICROQUEUE_TEST_URI``, which tests use instead of the embedded server."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pymongo import MongoClient
from pymongo.errors import ConfigurationError, InvalidURI, OperationFailure, PyMongoError

from microqueue.drivers.connection import option_names
from microqueue.errors import MicroqueueError
from microqueue.masking import without_fragments

TEST_URI_VARIABLE = "MICROQUEUE_TEST_URI"
CHECK_MILLISECONDS = 5000


class UnusableServer(MicroqueueError):
    """The server of ``MICROQUEUE_TEST_URI`` cannot be used; the message is one line."""


class GivenServer:
    """A running server, which tests neither start nor stop.

    Attributes:
        uri: Its URI without a database: ``mongodb://host/?options``, with at least one option.
        hello: Its reply to ``hello``.
        version: Its version.
    """

    def __init__(self, uri: str) -> None:
        """Connect once.

        Args:
            uri: The value of the variable. A database in it only names where its user is defined.

        Raises:
            UnusableServer: The URI is not valid, no primary answers within 5 seconds or the
                ``serverSelectionTimeoutMS`` of the URI, or the server rejects the user.
        """
        self.uri = _without_database(uri.strip())
        limits: Any = {"serverSelectionTimeoutMS": CHECK_MILLISECONDS}
        if "serverselectiontimeoutms" in option_names(self.uri):
            limits = {}
        try:
            with (
                warnings.catch_warnings(action="error", category=UserWarning),  # Unknown options.
                MongoClient[Any](self.uri, **limits) as client,
            ):
                self.hello = client.admin.command("hello")
                self.version: str = client.server_info()["version"]
                client.admin.command("listDatabases", nameOnly=True)  # Requires a valid user.
        except (InvalidURI, ConfigurationError, ValueError, TypeError, UserWarning) as error:
            raise _unusable("is not a valid URI", error) from error
        except OperationFailure as error:
            raise _unusable("names a server that rejects its user", error) from error
        except PyMongoError as error:
            raise _unusable("names a server that does not answer", error) from error
        if not self.hello["isWritablePrimary"]:
            raise UnusableServer(f"{TEST_URI_VARIABLE} names a server that is not a primary")

    @property
    def is_standalone(self) -> bool:
        """Return whether it has neither transactions nor change streams."""
        return "setName" not in self.hello and self.hello.get("msg") != "isdbgrid"


def given_server() -> GivenServer | None:
    """Return the server of the environment, if one is given.

    Raises:
        UnusableServer: It cannot be used.
    """
    uri = os.environ.get(TEST_URI_VARIABLE)
    return GivenServer(uri) if uri else None


def _without_database(uri: str) -> str:
    """Return the URI with neither a database nor an end that options cannot be added to."""
    parts = urlsplit(uri)
    query = parts.query
    database = parts.path.strip("/")
    if database and "@" in parts.netloc and "authsource" not in option_names(uri):
        query = f"{query}&authSource={database}".lstrip("&")
    # The driver's default, so that there is an option.
    return urlunsplit(parts._replace(path="/", query=query or "retryWrites=true"))


def _unusable(what: str, error: Exception) -> UnusableServer:
    # The driver appends its view of all servers, or the whole reply.
    reason = re.split(r", Timeout: |, full error: | \(configured timeouts", str(error))[0]
    reason = without_fragments(" ".join(reason.split()))
    return UnusableServer(f"{TEST_URI_VARIABLE} {what}: {reason}")
