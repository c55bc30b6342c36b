"""Makes the format ``microqueue`` known to Spark, which imports packages named ``pyspark_*``."""

from __future__ import annotations

from microqueue.spark.source import MicroqueueSource as DefaultSource

__all__ = ["DefaultSource"]
