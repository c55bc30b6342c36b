"""Fixtures of the tests on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from pymongo import MongoClient

from microqueue.dashboard import events, feeds
from microqueue.embedded import EmbeddedServer
from microqueue.operations import paging
from microqueue.testing.fixtures import temporary_database
from tests.integration.dashboard_site import Site, opened
from tests.integration.proxy import Proxy
from tests.integration.rig import KINDS, Rig
from tests.servers import direct_uri


@pytest.fixture(scope="module")
def new_database(microqueue_client: MongoClient[Any]) -> Iterator[Callable[[], Any]]:
    """Return a function that makes databases, which are dropped after the last test of a file."""
    with ExitStack() as databases:
        yield lambda: databases.enter_context(temporary_database(microqueue_client))


@pytest.fixture(params=KINDS)
def rig(
    request: pytest.FixtureRequest, microqueue_server: EmbeddedServer, microqueue_database: Any
) -> Rig:
    """Return a queue, and a worker of one kind on it."""
    return Rig(request.param, microqueue_server.uri, microqueue_database)


@pytest.fixture
def unhurried_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no search end early because the machine is slow."""
    monkeypatch.setattr(paging, "SCAN_SEC", 60.0)


@pytest.fixture
def patient_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a stall of the machine neither end a change stream nor keep it from being opened."""
    monkeypatch.setattr(events, "OPENING_SEC", 60.0)
    for name in ("OPEN_SEC", "SILENT_SEC"):
        monkeypatch.setattr(feeds, name, 60.0)


@pytest.fixture(params=["blocking", "async"])
async def site(
    request: pytest.FixtureRequest, microqueue_database: Any, microqueue_server: EmbeddedServer
) -> AsyncIterator[Site]:
    """Open a dashboard of either kind of queue."""
    uri = microqueue_server.uri
    options = {"kind": request.param, "uri": uri, "manual_actions": True}
    async with opened(microqueue_database, **options) as site:
        yield site


@pytest.fixture
def proxy(microqueue_server: EmbeddedServer) -> Iterator[Proxy]:
    """A proxy in front of the server, whose connections a test can silence."""
    with Proxy(direct_uri(microqueue_server)) as proxy:
        yield proxy
