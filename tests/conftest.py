from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from microqueue.embedded import EmbeddedServer
from microqueue.testing.given_server import TEST_URI_VARIABLE, GivenServer, UnusableServer
from tests.servers import given

ROOT = Path(__file__).parents[1]
SPARK = "tests/spark/"
WITHOUT_SPARK = tuple(
    f"{SPARK}test_{name}.py"
    for name in (
        *("pipeline_archive_digest", "pipeline_interrupt", "pipeline_output", "pipelines"),
        *("sink_chunks", "sink_columns", "sink_encoding", "sink_rows"),
        *("source_convert", "source_parts", "source_raw_batches", "whole_tasks", "cluster"),
    )
)
"""Files that do without the shared session of Spark."""
SPARK_ARCHIVES = (f"{SPARK}test_pipeline_archive", f"{SPARK}test_pipeline_replay")
LONGEST_FIRST = (
    *SPARK_ARCHIVES,
    f"{SPARK}test_cluster",
    f"{SPARK}test_pipeline_interrupt",
    SPARK,
    "tests/chaos/test_chaos_smoke.py",
    "tests/integration/test_half_open",
    "tests/acceptance/test_processes.py",
    "tests/integration/test_dlq_collection.py",
    "tests/integration/test_worker",
    "tests/integration/test_majority.py",
    "tests/acceptance/test_dashboard",
    "tests/celery/test_worker",
    "tests/integration/test_topic",
    "tests/integration/",
    "tests/acceptance/",
    "tests/celery/",
)
"""The order in which processes take files, so that none starts a long one when the rest is done."""

OF_PROGRAMS = {"acceptance", "celery", "spark"}
"""The folders of tests that start programs: on a slow machine, the waits of one add up."""
PROGRAMS_TIMEOUT_SEC = 600

pytest_plugins = ["microqueue.testing.fixtures"]

# Settings of the developer's own shell must not reach the tests.
for variable in [name for name in os.environ if name.startswith("MICROQUEUE_")]:
    if variable not in {"MICROQUEUE_MONGOD", TEST_URI_VARIABLE}:
        del os.environ[variable]
if os.environ.get(TEST_URI_VARIABLE):
    # A test that would start another server than the given one fails, unless it is skipped.
    os.environ["MICROQUEUE_MONGOD"] = f"/none, because {TEST_URI_VARIABLE} is set"


# Java of a test: only the fast compiler, for none runs long enough for the optimising one.
os.environ["SPARK_SUBMIT_OPTS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


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
    """Keeps each file's tests in one process, and those of Spark in two, which start Java once."""

    def _split_scope(self, nodeid: str) -> str:
        if not nodeid.startswith(SPARK) or nodeid.startswith(WITHOUT_SPARK):
            return str(super()._split_scope(nodeid))
        return SPARK_ARCHIVES[0] if nodeid.startswith(SPARK_ARCHIVES) else SPARK


def pytest_configure() -> None:
    """End at once if tests shall run on a server that cannot be used."""
    try:
        given()
    except UnusableServer as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header() -> str | None:
    """Name the server, if one is given."""
    server = given()
    if server is None:
        return None
    kind = "standalone" if server.is_standalone else "replica set or sharded cluster"
    return f"{TEST_URI_VARIABLE}: MongoDB {server.version}, {kind}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its folder, and put the files that take longest first."""
    for item in items:
        folder = item.nodeid.split("/")[1]
        item.add_marker(folder)
        if folder in OF_PROGRAMS and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PROGRAMS_TIMEOUT_SEC))
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    starts = (n for n, start in enumerate(LONGEST_FIRST) if item.nodeid.startswith(start))
    return next(starts, len(LONGEST_FIRST))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    """Spread tests over processes, where that is to be done by file."""
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escape lone surrogates, which tests with hostile values log: xdist cannot send them."""
    return _encodable((yield))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_encodable(one) for one in value)
    return value


def measuring(config: pytest.Config) -> dict[str, str]:
    """Return the environment in which a process measures its coverage, in a run with --cov."""
    if not config.getoption("cov_source", None):
        return {}
    return {
        "COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml"),
        "COVERAGE_FILE": os.environ.get("COVERAGE_FILE", str(ROOT / ".coverage")),
    }


@pytest.fixture(autouse=True)
def measured_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the processes that a test starts, if it is marked."""
    if request.node.get_closest_marker("measured") is not None:
        for name, value in measuring(request.config).items():
            monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def microqueue_server() -> Iterator[EmbeddedServer | GivenServer]:
    """The users' fixture, in memory where there is a memory disk, and with fail points."""
    if (server := given()) is not None:
        yield server
        return
    memory_disk = Path("/dev/shm")
    place = memory_disk if os.access(memory_disk, os.W_OK) else None
    arguments = ["--setParameter", "enableTestCommands=1"]
    with (
        tempfile.TemporaryDirectory(prefix="microqueue-", dir=place) as directory,
        EmbeddedServer.start(directory, arguments=arguments) as embedded,
    ):
        yield embedded


@pytest.fixture(scope="session")
def own_server() -> None:
    """Skip a test that starts, kills or configures a server, if one is given."""
    if given() is not None:
        pytest.skip(f"starts or configures a server, and {TEST_URI_VARIABLE} is set")


@pytest.fixture(scope="session")
def replica_set() -> None:
    """Skip a test that needs transactions or change streams on a standalone server."""
    server = given()
    if server is not None and server.is_standalone:
        pytest.skip("needs transactions or change streams, and the server is a standalone")


@pytest.fixture
def database_uri(microqueue_server: EmbeddedServer, microqueue_database: Any) -> str:
    """The address of the test's own database, as other processes need it."""
    return microqueue_server.uri.replace("/?", f"/{microqueue_database.name}?")
