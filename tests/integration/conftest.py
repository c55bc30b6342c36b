"""Fixtures of the tests on a real server."""

from __future__ import annotations

from typing import Any

import pytest

from microqueue.embedded import EmbeddedServer
from tests.integration.rig import KINDS, Rig


@pytest.fixture(params=KINDS)
def rig(
    request: pytest.FixtureRequest, microqueue_server: EmbeddedServer, microqueue_database: Any
) -> Rig:
    """Give a queue, and a worker of one kind on it."""
    return Rig(request.param, microqueue_server.uri, microqueue_database)
