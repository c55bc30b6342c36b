from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from microqueue import Queue
from microqueue.spark import session
from microqueue.spark.location import close_locations

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests more time: whichever comes first starts a JVM and warms it up."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session for the whole run: it takes many seconds to start and to warm up."""
    started = session(
        master="local[2,4]",  # Two threads, and each task may be tried four times.
        name="microqueue tests",
        config={
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.memory": "1g",
            # The quick compiler only: no test runs for so long that the thorough one pays.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        },
    )
    started.sparkContext.setLogLevel("OFF")
    yield started
    started.stop()


@pytest.fixture
def in_zone(spark: SparkSession) -> Iterator[Callable[[str], None]]:
    """Give the session another timezone, until the test is over."""
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    yield lambda other: spark.conf.set("spark.sql.session.timeZone", other)
    spark.conf.set("spark.sql.session.timeZone", zone)


@pytest.fixture(autouse=True)
def no_client_left() -> Iterator[None]:
    """Close the clients that a process of Spark would keep."""
    yield
    close_locations()


@pytest.fixture
def make_queue(microqueue_database: Any) -> Callable[..., Queue[Any]]:
    """Make queues by their names in the test's own database."""

    def make(name: str = "default", **options: Any) -> Queue[Any]:
        return Queue(microqueue_database, name, **options)

    return make
