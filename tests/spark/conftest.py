from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from microqueue import Queue
from microqueue.spark import session
from microqueue.spark.location import close_locations
from tests.conftest import measuring

# Pytest adds its handlers to each logger that does not propagate, and one of PySpark's would give
# them its own format for the rest of the run.
PySparkLogger.addHandler = logging.Logger.addHandler  # type: ignore[assignment, method-assign]


@pytest.fixture(scope="package")
def spark(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SparkSession]:
    """One session for all tests of this folder: it takes many seconds to start and to warm up.

    It stops right after the last of them, while Java still runs.
    """
    with pytest.MonkeyPatch.context() as environment:
        for name, value in measuring(pytestconfig).items():
            environment.setenv(name, value)  # Java hands it to the Python processes it starts.
        started = session(
            master="local[2,4]",  # Two threads, four attempts per task.
            name="microqueue tests",
            config={
                "spark.sql.shuffle.partitions": "2",
                "spark.driver.memory": "1g",
                "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
            },
        )
    started.sparkContext.setLogLevel("OFF")
    yield started
    started.stop()


@pytest.fixture
def in_zone(spark: SparkSession) -> Iterator[Callable[[str], None]]:
    """Set another timezone of the session during the test."""
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    yield lambda other: spark.conf.set("spark.sql.session.timeZone", other)
    spark.conf.set("spark.sql.session.timeZone", zone)


@pytest.fixture(autouse=True)
def no_client_left() -> Iterator[None]:
    """Close the clients that a Spark process would keep."""
    yield
    close_locations()


@pytest.fixture
def make_queue(microqueue_database: Any) -> Callable[..., Queue[Any]]:
    """Return a factory of queues in the test's database."""

    def make(name: str = "default", **options: Any) -> Queue[Any]:
        return Queue(microqueue_database, name, **options)

    return make
