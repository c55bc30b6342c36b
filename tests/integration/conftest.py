"""Fixtures of the tests on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from microqueue.embedded import EmbeddedServer
from tests.integration.dashboard_site import Site, opened
from tests.integration.rig import KINDS, Rig


@pytest.fixture(params=KINDS)
def rig(
    request: pytest.FixtureRequest, microqueue_server: EmbeddedServer, microqueue_database: Any
) -> Rig:
    """Give a queue, and a worker of one kind on it."""
    return Rig(request.param, microqueue_server.uri, microqueue_database)


@pytest.fixture(params=["blocking", "async"])
async def site(
    request: pytest.FixtureRequest, microqueue_database: Any, microqueue_server: EmbeddedServer
) -> AsyncIterator[Site]:
    """Open a dashboard of either kind of queue."""
    uri = microqueue_server.uri
    options = {"kind": request.param, "uri": uri, "manual_actions": True}
    async with opened(microqueue_database, **options) as site:
        yield site
