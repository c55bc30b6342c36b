"""The archive: a process that moves done tasks of one database to Parquet files, now and then.

``python -m tests.chaos.roles.archiver DATABASE FOR_SEC TIMES`` does so at equal intervals, and
repeats a run that an outage has ended. It ends by itself.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession

from microqueue.spark import session
from microqueue.spark.archive.job import archive
from microqueue.spark.location import close_locations
from tests.chaos.handlers import Participant, participant
from tests.chaos.leaving import tolerate_threads
from tests.chaos.ledger import now
from tests.chaos.parquet import ARCHIVE

AGAIN_SEC = 1.0
OLDEST_SEC = 90.0
"""Longer than a producer repeats its call: no task is enqueued again after it is archived."""
MEMORY = "512m"


def _archive_all(me: Participant, database: str, for_sec: float, times: int) -> None:
    began = now()
    memory = {"spark.driver.memory": MEMORY, "spark.sql.shuffle.partitions": "1"}
    spark = session(master="local[1]", name="chaos", config=memory)
    tolerate_threads()
    try:
        for number in range(1, times + 1):
            time.sleep(max(began + for_sec * number / (times + 1) - now(), 0))
            while not _archive(me, spark, database, older_than=min(for_sec / 5, OLDEST_SEC)):
                time.sleep(AGAIN_SEC)
    finally:
        spark.stop()
        close_locations()


def _archive(me: Participant, spark: SparkSession, database: str, *, older_than: float) -> bool:
    """Run the archive once; return whether it came to its end."""
    me.ledger.write("archive", phase="begin")
    try:
        done = archive(
            spark,
            Path(me.setup.folder) / ARCHIVE,
            uri=me.setup.address(database),
            settings=me.setup.settings(database),
            statuses=["done"],
            older_than=older_than,
        )
    except Exception as exc:  # noqa: BLE001 (of Java, the queue or the driver: an outage)
        me.ledger.write("archive", phase="failed", error=repr(exc)[:300])
        return False
    counts = {"archived": done.archived, "deleted": done.deleted, "recovered": done.recovered}
    me.ledger.write("archive", phase="end", **counts)
    return True


if __name__ == "__main__":
    _archive_all(participant(), sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
