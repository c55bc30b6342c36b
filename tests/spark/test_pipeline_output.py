"""What the pipeline commands print of a summary."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from microqueue.backoff import BackoffPolicy
from microqueue.cli import pipeline_output as views
from microqueue.cli.options import SharedOptions
from microqueue.cli.session import Session
from microqueue.spark.analytics.report import Report, ReportRow
from microqueue.spark.analytics.storms import ComingStorm, Reproduction, Storm, Storms
from microqueue.spark.analytics.triage import Cluster, Command, Triage
from microqueue.spark.archive.job import ArchiveSummary
from microqueue.spark.ingest.job import IngestSummary
from microqueue.spark.replay.job import ReplaySummary

AT = datetime(2026, 5, 1, 12, tzinfo=UTC)
POLICY = BackoffPolicy(base_sec=5, jitter="none")
STORM = {
    "queue": "mail", "start": AT, "end": AT, "retries": 900, "peak_per_min": 600,
    "peak_per_sec": 500, "baseline_per_min": 3.0, "synchrony": 0.9, "policy": POLICY,
}  # fmt: skip
SIMULATED = {
    "reproduced": True, "retries": 900, "peak_per_sec": 500, "peak_per_min": 600,
    "simulated_retries": 880.0, "simulated_peak_per_sec": 490.0, "simulated_peak_per_min": 590.0,
    "tasks": 50, "tasks_total": 900,
}  # fmt: skip


def archived(**fields: Any) -> ArchiveSummary:
    return ArchiveSummary(run="run", path="/kept", cutoff=AT, **fields)


def cluster(**fields: Any) -> Cluster:
    return Cluster(
        fingerprint="f", queue="q", code=None, pattern="no", count=1, live=0, archived=1,
        first_at=AT, last_at=AT, new=False, **fields,
    )  # fmt: skip


PRINTED: dict[str, tuple[Any, Any, list[str]]] = {
    "archived": (
        views.archive,
        archived(archived=2000, deleted=1999, files=2, size=3 * 1024**2, write_sec=2.0,
                 purge_sec=0.5, superseded=1, compacted=3, recovered=1),
        ["Finished an earlier run: deleted 1 task", "2,000 tasks in 2 s (1,000/s): 2 files, 3 MiB",
         "Deleted 1,999 tasks", "in 500 ms", "1 task changed since", "Merged 3 small files"],
    ),
    "nothing to archive": (views.archive, archived(), ["No tasks that finished before 2026-05-01"]),
    "rejected rows": (
        views.ingest,
        IngestSummary(run="r", source="s", queue="q", added=1, duplicates=0, rejected=2,
                      rejects="/rejects"),
        ["1 task added", "2 rejected", "/rejects"],
    ),
    "repeated replay": (
        views.replay,
        ReplaySummary(run="r", where="true", letters=2, begun_at=AT, until=AT, repeated=True),
        ["Run r is finished already", "2 dead letters"],
    ),
    "written report": (
        views.report,
        Report(since=AT, until=AT + timedelta(hours=1), bucket="hour", target_wait_sec=5.0,
               rows=(ReportRow(queue=None, start=None),
                     ReportRow(queue=None, start=None, name="pay", done=7),
                     ReportRow(queue=None, start=None, name="", done=1)), files=("report.html",)),
        ["in 5 s", "-", "pay", "(no name)", "Written: report.html"],
    ),
    "triage of an archive": (
        views.triage,
        Triage(total=1, kinds=1, new=0,
               clusters=(cluster(replay_archived=Command(line="microqueue replay it")),)),
        ["microqueue replay it"],
    ),
    "no storm": (
        views.storms,
        Storms(since=AT, until=AT, storms=(),
               coming=(ComingStorm(queue="mail", at=AT, tasks=40),)),
        ["No retry storms", "Upcoming: 40 retries of queue 'mail'", "12:00:00 UTC"],
    ),
    "storm that no policy calms": (
        views.storms,
        Storms(since=AT, until=AT, coming=(),
               storms=(Storm(**STORM, reproduction=Reproduction(**SIMULATED)),)),
        ["no other base or jitter is calmer", "a sample of 50 of 900 tasks"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_summary_is_told_in_sentences(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    view, summary, expected = PRINTED[name]
    views.show(Session(SharedOptions()), summary, view)
    printed = " ".join(capsys.readouterr().out.split())
    for text in expected:
        assert text in printed


@pytest.mark.parametrize(
    ("size", "told"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1536, "1.5 KiB"), (5 * 1024**2, "5 MiB"),
     (2048 * 1024**3, "2,048 GiB")],
)  # fmt: skip
def test_sizes_are_told_in_the_unit_that_fits(size: int, told: str) -> None:
    assert views._size(size) == told  # noqa: SLF001 (pure)
