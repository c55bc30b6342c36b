"""Create a Spark session that knows the format ``microqueue``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from microqueue.errors import JavaNotFound

DEFAULT_CONFIG = {
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
    """Get the active Spark session, or a new one, with the format ``microqueue`` registered.

    Args:
        master: The Spark master of a new session. Default: that of ``spark-submit``, or
            ``local[*]``.
        name: The application's name.
        config: Spark settings. They override the defaults here: no web UI, no progress bar, no
            warnings, session timezone UTC.

    Returns:
        The session.

    Raises:
        JavaNotFound: There is no Java to start Spark with.
    """
    running = SparkSession.getActiveSession()
    if running is not None:
        return register(running)
    require_java()
    submitted = "SPARK_ENV_LOADED" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ
    if not submitted and (master is None or master.startswith("local")):
        # Otherwise Spark resolves the host name, which may be in no DNS.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Otherwise executors run ``python3`` of the PATH, which may lack our packages.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if master is not None or not submitted:
        builder = builder.master(master or "local[*]")
    for key, value in {**DEFAULT_CONFIG, **(config or {})}.items():
        builder = builder.config(key, value)
    return register(builder.getOrCreate())


def register(spark: SparkSession) -> SparkSession:
    """Register the format ``microqueue`` with a session.

    Args:
        spark: The session.

    Returns:
        The same session.
    """
    from microqueue.spark.source import MicroqueueSource  # noqa: PLC0415 (pyarrow is slow to load)

    spark.dataSource.register(MicroqueueSource)
    return spark


def require_java() -> None:
    """Raise ``JavaNotFound`` if there is no Java, instead of a page of errors from Spark."""
    home = os.environ.get("JAVA_HOME")
    found = (Path(home) / "bin" / "java").exists() if home else shutil.which("java") is not None
    if not found:
        raise JavaNotFound(java_home=home)
