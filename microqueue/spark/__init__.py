"""Read and write a queue with Spark.

from microqueue.spark import read_tasks, session

spark = session()
read_tasks(spark, queue="mail", status="done").groupBy("worker_id").count().show()
"""

from __future__ import annotations

try:
    import pyspark  # noqa: F401 (only to name what is missing)
except ImportError as exc:
    raise ImportError("Spark is not installed: pip install 'microqueue[spark]'") from exc

from microqueue.spark.frames import LoadReport, read_tasks, write_tasks
from microqueue.spark.ids import key_id, typed_id
from microqueue.spark.session import register, session

__all__ = [
    "LoadReport",
    "key_id",
    "read_tasks",
    "register",
    "session",
    "typed_id",
    "write_tasks",
]
