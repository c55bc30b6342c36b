from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from microqueue.embedded import EmbeddedServer

SPARK = "tests/spark/"
LONGEST_FIRST = (
    SPARK,
    "tests/integration/test_half_open.py",
    "tests/acceptance/test_endings.py",
    "tests/acceptance/test_processes.py",
    "tests/integration/test_majority.py",
    "tests/integration/test_worker",
    "tests/acceptance/test_dashboard",
    "tests/integration/",
    "tests/acceptance/",
)
"""The order in which processes take files, so that none starts a long one when the rest is done."""

pytest_plugins = ["microqueue.testing.fixtures"]

# Settings of the developer's own shell must not reach the tests.
for variable in [name for name in os.environ if name.startswith("MICROQUEUE_")]:
    if variable != "MICROQUEUE_MONGOD":
        del os.environ[variable]


def _stay(_number: int, _frame: FrameType | None) -> None:
    """Do nothing, as a process does that ignores the signal."""


# A suite that runs in the background ignores Ctrl-C, and what it starts would inherit that. A
# handler is not inherited: children get the default, whichever way the suite was started.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, _stay)

settings.register_profile(
    "microqueue",
    # The same examples at each run, so that a red build speaks of the change at hand; and none
    # fails because a machine is slow.
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("microqueue")


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # Its package has no types.
    """Keeps each file's tests in one process, and all of Spark, whose Java starts once there."""

    def _split_scope(self, nodeid: str) -> str:
        return SPARK if nodeid.startswith(SPARK) else super()._split_scope(nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its folder, and put the files that take longest first."""
    for item in items:
        item.add_marker(item.nodeid.split("/")[1])
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    starts = (n for n, start in enumerate(LONGEST_FIRST) if item.nodeid.startswith(start))
    return next(starts, len(LONGEST_FIRST))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    """Spread tests over processes, where that is to be done by file."""
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


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
