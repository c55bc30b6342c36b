from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import kombu
import pytest

import microqueue.contrib.kombu  # noqa: F401 (it registers the schemes)
from microqueue.embedded import EmbeddedServer
from tests.celery.kombu_tools import Connect
from tests.celery.workers import Site


def new_site(server: EmbeddedServer, directory: Path, **config: Any) -> Site:
    """Return a site with its own database."""
    return Site(server.uri.replace("/?", f"/test_{uuid4().hex[:12]}?"), directory, **config)


def end_site(site: Site) -> None:
    """Empty the database of a site, after its workers have ended."""
    for name in site.database.list_collection_names():
        site.database.drop_collection(name)
    site.close()


@pytest.fixture(scope="module")
def shared_site(
    microqueue_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A site that the tests of a file share, with its worker."""
    site = new_site(microqueue_server, tmp_path_factory.mktemp("celery"))
    yield site
    end_site(site)


@pytest.fixture
def site(microqueue_server: EmbeddedServer, tmp_path: Path) -> Iterator[Site]:
    """A site of one test."""
    site = new_site(microqueue_server, tmp_path)
    yield site
    end_site(site)


@pytest.fixture
def connect(database_uri: str) -> Iterator[Connect]:
    """Opens connections to the test's database, and closes them after it."""
    opened: list[Any] = []

    def open_connection(**options: Any) -> Any:
        opened.append(kombu.Connection(f"microqueue+{database_uri}", transport_options=options))
        return opened[-1]

    yield open_connection
    for connection in opened:
        connection.release()
