"""A Spark session with the microqueue format in it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from microqueue.errors import JavaNotFound

QUIET = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}


def session(
    *,
    master: str | None = None,
    name: str = "microqueue",
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """Give the session that runs already, else a new one on ``master``, with the format in it.

    Without a master it is that of ``spark-submit``, else ``local[*]``. ``config`` goes over
    what is set here: no web page, no progress bar, no warnings, times in UTC.
    """
    running = SparkSession.getActiveSession()
    if running is not None:
        return register(running)
    require_java()
    submitted = "SPARK_ENV_LOADED" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ
    if not submitted and (master is None or master.startswith("local")):
        # Else Spark looks the machine's own name up, which may not be known anywhere.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Else the workers run whatever ``python3`` is, which may lack what this one has.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if master is not None or not submitted:
        builder = builder.master(master or "local[*]")
    for key, value in {**QUIET, **(config or {})}.items():
        builder = builder.config(key, value)
    return register(builder.getOrCreate())


def register(spark: SparkSession) -> SparkSession:
    """Make the format ``microqueue`` known to a session, and give the session back."""
    from microqueue.spark.source import MicroqueueSource  # noqa: PLC0415 (pyarrow is slow to load)

    spark.dataSource.register(MicroqueueSource)
    return spark


def require_java() -> None:
    """Say in one sentence what is missing, where Spark would show a page of errors."""
    home = os.environ.get("JAVA_HOME")
    found = (Path(home) / "bin" / "java").exists() if home else shutil.which("java") is not None
    if not found:
        raise JavaNotFound(java_home=home)
