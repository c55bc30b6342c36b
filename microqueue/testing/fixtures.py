"""Pytest fixtures for a real server: ``pytest_plugins = ["microqueue.testing.fixtures"]``.

One MongoDB serves the whole run: the embedded server, or the one of ``MICROQUEUE_TEST_URI``. Each
test gets its own database.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from pymongo import MongoClient

from microqueue.embedded import EmbeddedServer
from microqueue.queue import Queue
from microqueue.testing import FakeClock

TEST_URI_VARIABLE = "MICROQUEUE_TEST_URI"


@pytest.fixture(scope="session")
def microqueue_server() -> Iterator[EmbeddedServer]:
    """A MongoDB server of one member, in a temporary directory."""
    with EmbeddedServer.start() as server:
        yield server


@pytest.fixture(scope="session")
def microqueue_client(request: pytest.FixtureRequest) -> Iterator[MongoClient[Any]]:
    """A pymongo client of the server."""
    # Not of ``MICROQUEUE_URI``: tests must not write to a database in use.
    uri = os.environ.get(TEST_URI_VARIABLE)
    with MongoClient[Any](uri or request.getfixturevalue("microqueue_server").uri) as client:
        yield client


@pytest.fixture
def microqueue_database(microqueue_client: MongoClient[Any]) -> Iterator[Any]:
    """An empty database for one test, emptied after it."""
    database = microqueue_client[f"test_{uuid4().hex[:12]}"]
    yield database
    # A database without collections is gone; dropping it whole takes 40 times as long.
    for name in database.list_collection_names():
        database.drop_collection(name)


@pytest.fixture
def microqueue_clock() -> FakeClock:
    """A clock that the test moves."""
    return FakeClock()


@pytest.fixture
def microqueue_queue(microqueue_database: Any, microqueue_clock: FakeClock) -> Queue[Any]:
    """A queue on the real server, with the clock that the test moves."""
    return Queue(microqueue_database, clock=microqueue_clock)
