"""An archive that joins the Spark of the test, and kills itself at a given step."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

from pyspark import SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from microqueue.spark.archive.job import archive
from microqueue.spark.progress import Step
from microqueue.spark.storage import Storage

DIRECTLY, THROUGH_SPARK = "directly", "through spark"


def join() -> SparkSession:
    """Use the Java process of the test, whose port and secret are in the environment."""
    gateway = launch_gateway()  # type: ignore[no-untyped-call]  # pyspark's own.
    jvm = gateway.jvm
    SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001 (there is no other way)
    scala_context = jvm.org.apache.spark.SparkContext.getOrCreate()
    java_context = jvm.org.apache.spark.api.java.JavaSparkContext(scala_context)
    return SparkSession(SparkContext(gateway=gateway, jsc=java_context))


def see_no_disk() -> None:
    """Let Spark write the files, as on a file system that is not a disk."""
    Storage.disk = None  # type: ignore[assignment,method-assign]  # In place of a property.


def main() -> None:
    path, uri, way, deadly, count = sys.argv[1:]
    seen = 0
    if way == THROUGH_SPARK:
        see_no_disk()

    def progress(step: Step) -> None:
        nonlocal seen
        seen += step.name == deadly
        if seen == int(count):
            os.kill(os.getpid(), signal.SIGKILL)

    archive(join(), path, uri=uri, older_than=timedelta(hours=1), progress=progress)


if __name__ == "__main__":
    main()
