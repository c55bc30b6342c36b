"""The pipelines: jobs over months of tasks, as functions that take a Spark session.

    archive    finished tasks to Parquet, verified, then deleted from MongoDB
    ingest     rows of files or tables into a queue, bad rows into a reject file
    report     throughput, waits, run times and the share of tasks that met a target
    triage     dead letters by kind of error, with the command that replays each kind
    replay     selected tasks back into a queue, spread over a period, once per run
    storms     retry storms, and the backoff that would have prevented them
    simulate   recorded tasks under other policies, workers and timeouts

Each function returns a frozen summary. ``read_archive`` loads an archive, ``compact`` merges
its small files.
"""

from __future__ import annotations

from microqueue.deprecation import register_moved_modules
from microqueue.spark.analytics.report import Report, report
from microqueue.spark.analytics.simulate import Simulation, simulate
from microqueue.spark.analytics.storms import Storms, storms
from microqueue.spark.analytics.triage import Triage, triage
from microqueue.spark.archive.job import ArchiveSummary, CompactionSummary, archive, compact
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.ingest.job import IngestSummary, ingest
from microqueue.spark.replay.job import ReplaySummary, replay

__all__ = [
    "ArchiveSummary",
    "CompactionSummary",
    "IngestSummary",
    "ReplaySummary",
    "Report",
    "Simulation",
    "Storms",
    "Triage",
    "archive",
    "compact",
    "ingest",
    "read_archive",
    "replay",
    "report",
    "simulate",
    "storms",
    "triage",
]

# Only pipelines that once had a module here; new ones are not added.
register_moved_modules(
    __name__,
    {
        "archive": "microqueue.spark.archive.job",
        "archive_reader": "microqueue.spark.archive.reader",
        "compaction": "microqueue.spark.archive.job",
        "ingest": "microqueue.spark.ingest.job",
        "replay": "microqueue.spark.replay.job",
        "report": "microqueue.spark.analytics.report",
        "simulate": "microqueue.spark.analytics.simulate",
        "storms": "microqueue.spark.analytics.storms",
        "triage": "microqueue.spark.analytics.triage",
    },
)
