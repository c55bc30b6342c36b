"""Pytest fixtures for a real server: ``pytest_plugins = ["microqueue.testing.fixtures"]``.

One MongoDB serves the whole run: the embedded server, or the one of ``MICROQUEUE_TEST_URI``. Each
test gets its own database, with a random name that begins with ``microqueue_test_``. No other
database is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from pymongo import MongoClient

from microqueue.embedded import EmbeddedServer
from microqueue.queue import Queue
from microqueue.testing import FakeClock
from microqueue.testing.given_server import GivenServer, UnusableServer, given_server


@pytest.fixture(scope="session")
def microqueue_server() -> Iterator[EmbeddedServer | GivenServer]:
    """The server of ``MICROQUEUE_TEST_URI``, or one of one member in a temporary directory."""
    # Not of ``MICROQUEUE_URI``: tests must not write to a database in use.
    try:
        given = given_server()
    except UnusableServer as error:
        pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    if given is not None:
        yield given
        return
    with EmbeddedServer.start() as server:
        yield server


@pytest.fixture(scope="session")
def microqueue_client(
    microqueue_server: EmbeddedServer | GivenServer,
) -> Iterator[MongoClient[Any]]:
    """A pymongo client of the server."""
    with MongoClient[Any](microqueue_server.uri) as client:
        yield client


@contextmanager
def temporary_database(client: MongoClient[Any]) -> Iterator[Any]:
    """Return an empty database with a random name, and drop it afterwards.

    Args:
        client: The client to use.

    Yields:
        The database.
    """
    database = client[f"microqueue_test_{uuid4().hex[:12]}"]
    yield database
    # A database without collections is gone; dropping it whole takes 40 times as long.
    for name in database.list_collection_names():
        database.drop_collection(name)


@pytest.fixture
def microqueue_database(microqueue_client: MongoClient[Any]) -> Iterator[Any]:
    """An empty database for one test, dropped after it."""
    with temporary_database(microqueue_client) as database:
        yield database


@pytest.fixture
def microqueue_clock() -> FakeClock:
    """A clock that the test moves."""
    return FakeClock()


@pytest.fixture
def microqueue_queue(microqueue_database: Any, microqueue_clock: FakeClock) -> Queue[Any]:
    """A queue on the real server, with the clock that the test moves."""
    return Queue(microqueue_database, clock=microqueue_clock)
