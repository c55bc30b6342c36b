from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from microqueue.embedded import EmbeddedServer

HERE = Path(__file__).parent

pytest_plugins = ["microqueue.testing.fixtures"]

# Settings of the developer's own shell must not reach the tests.
for variable in [name for name in os.environ if name.startswith("MICROQUEUE_")]:
    if variable != "MICROQUEUE_MONGOD":
        del os.environ[variable]


@pytest.hookimpl(tryfirst=True)  # Before it is looked at how they are marked.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests are spread over processes, keep together what shares something costly.

    That is all of Spark, whose Java starts once and gets warm, and the fixtures of each file.
    """
    for item in items:
        name = "spark" if item.path.is_relative_to(HERE / "spark") else item.path.stem
        item.add_marker(pytest.mark.xdist_group(name))


@pytest.fixture(scope="session")
def microqueue_server() -> Iterator[EmbeddedServer]:
    """The users' fixture, in memory where there is a memory disk, and with fail points."""
    memory_disk = Path("/dev/shm")
    place = memory_disk if os.access(memory_disk, os.W_OK) else None
    arguments = ["--setParameter", "enableTestCommands=1"]
    with (
        tempfile.TemporaryDirectory(prefix="microqueue-", dir=place) as directory,
        EmbeddedServer.start(directory, arguments=arguments) as server,
    ):
        yield server


@pytest.fixture
def database_uri(microqueue_server: EmbeddedServer, microqueue_database: Any) -> str:
    """The address of the test's own database, as other processes need it."""
    return microqueue_server.uri.replace("/?", f"/{microqueue_database.name}?")
