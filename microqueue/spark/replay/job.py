"""Replay selected dead letters, live and archived, spread over a period.

Live dead letters return to their queue, as by ``dlq replay``. Archived tasks are added as new
tasks, whose ids are derived from the run and the task: a run adds each once, however often it is
started. Archived tasks that are done are replayed only on request.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
from bson import ObjectId
from pydantic import Field
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f

from microqueue.arguments import check_name, invalid_argument
from microqueue.clock import round_up
from microqueue.deprecation import renamed_arguments
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.durations import Duration, check_duration
from microqueue.model import Model
from microqueue.new_task import NewTask
from microqueue.operations.replay import PlannedReplay, requeue
from microqueue.positions import Positions
from microqueue.settings import QueueSettings
from microqueue.spark import error_codes
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.ids import id_type, key_id
from microqueue.spark.location import LocationOptions, locate, location_of, primary, server_now
from microqueue.spark.progress import ProgressCallback, Step, no_progress
from microqueue.spark.replay.selection import is_dead_letter, select
from microqueue.spark.runs import NamedRun, begin_run, finish_run
from microqueue.spark.task_inserter import TaskInserter
from microqueue.spark.whole_tasks import decode
from microqueue.task import DEFAULT_QUEUE, is_name, read_task

CHUNK = 1000
COUNTED = "archived long, letters long, skipped long"
COUNTS = ("archived", "letters", "skipped")


class ReplaySummary(Model):
    """What a replay did.

    Tasks that the run had replayed before it was interrupted count if they still meet the
    condition.

    Attributes:
        run: The name of the run.
        where: The condition.
        matched: Tasks that meet it.
        archived: Archived tasks that were added to a queue.
        letters: Dead letters that returned to a queue.
        skipped: Tasks that were not replayed: an unfinished task has their dedupe key, or they
            changed while the replay ran.
        begun_at: When the run began.
        until: When the last of the tasks is due.
        dry_run: Whether nothing was changed.
        repeated: Whether the run had finished before, and nothing was done.
        matched_by: Tasks by ``queue/location/status``; only of a dry run.
        matched_by_status: Tasks by status; only of a dry run.
        done_left_out: Done tasks that meet the condition and are not replayed; counted in a dry
            run, and if nothing else meets the condition.
    """

    run: str
    where: str
    matched: int = 0
    archived: int = 0
    letters: int = 0
    skipped: int = 0
    begun_at: datetime
    until: datetime
    dry_run: bool = False
    repeated: bool = False
    matched_by: dict[str, int] = Field(default_factory=dict)
    matched_by_status: dict[str, int] = Field(default_factory=dict)
    done_left_out: int | None = None


@renamed_arguments(tell="progress", letters="dead_letters", over="spread")
def replay(
    spark: SparkSession,
    *,
    where: str,
    archive: str | Path | None = None,
    dead_letters: bool = True,
    include_done: bool = False,
    to: str | None = None,
    spread: Duration = timedelta(0),
    run: str | None = None,
    uri: str | None = None,
    database: str | None = None,
    collection: str = DEFAULT_COLLECTION,
    settings: QueueSettings | None = None,
    dry_run: bool = False,
    progress: ProgressCallback = no_progress,
) -> ReplaySummary:
    """Replay the dead letters that meet a SQL condition, once per ``run``.

    Args:
        spark: The session.
        where: The condition. It may use the columns of a task, ``payload`` (as JSON text),
            ``fingerprint`` (as in triage) and ``archived``, such as
            ``"error.code = 'timeout' and payload:to like '%.org'"``.
        archive: An archive to select from, besides MongoDB.
        dead_letters: Whether to select from the dead letters in MongoDB.
        include_done: Whether to select archived tasks that succeeded, too. They run again.
        to: The queue that gets the tasks; by default each returns to its own.
        spread: The period over which the tasks come due, at random, so that the replay is not
            a storm.
        run: The name of the run; by default a new one.
        uri: The address of MongoDB; by default ``MICROQUEUE_URI``, or the embedded server.
        database: The database; by default that of the address.
        collection: The collection of the tasks.
        settings: The settings of the queues; by default those of the environment.
        dry_run: Whether to count only, and change nothing.
        progress: Called with each step that begins.

    Returns:
        How many tasks were replayed.

    Raises:
        InvalidArgument: An argument is not valid, or the run was begun with other options.
        PipelineError: The run is too old to be resumed, or there is no archive at ``archive``.
    """
    if to is not None:
        check_name(to)
    if include_done and archive is None:
        raise invalid_argument(
            "include_done",
            include_done,
            "done tasks are replayed from an archive: give --archive",
            code=error_codes.NO_SOURCE,
        )
    period = check_duration("spread", spread)
    location = primary(locate(uri, database=database, collection=collection))
    queue_settings = settings or QueueSettings.from_environment()
    found = select(
        spark, location, queue_settings, where=where, archive=archive, dead_letters=dead_letters
    )
    name = run or uuid4().hex[:12]
    if dry_run:
        return _count(location, found, name, where, period, include_done=include_done)
    selected = found if include_done else found.where(is_dead_letter())
    details = {
        "kind": "replay",
        "where": where,
        "to": to,
        "over_sec": period.total_seconds(),
        "archive": None if archive is None else str(archive),
        "letters": dead_letters,
    }
    if include_done:
        details["include_done"] = True
    begun = begin_run(location, f"replay:{name}", details)
    if begun.report is not None:
        return ReplaySummary(**{**begun.report, "repeated": True})
    progress(Step("replay", "Replaying tasks"))
    archived_copies = _archived_copies(spark, archive, name) if begun.resumed else frozenset()
    replayer = _Replayer(
        location, queue_settings, begun, name, to=to, period=period, known=archived_copies
    )
    # Tasks that the run itself has added may have failed since, and meet the condition.
    foreign = ~f.col("insert_token").eqNullSafe(f.lit(run_token(name)))
    rows = (
        selected.where(foreign)
        .select("document", "archived")
        .mapInArrow(replayer, COUNTED)
        .collect()
    )
    counts = {one: sum(row[one] for row in rows) for one in COUNTS}
    matched = sum(counts.values())
    # Counting reads the archive again: do so only to explain why nothing matched.
    left_out = archive is not None and not include_done and not matched
    summary = ReplaySummary(
        run=name,
        where=where,
        matched=matched,
        begun_at=begun.begun_at,
        until=begun.begun_at + period,
        done_left_out=found.where(foreign & ~is_dead_letter()).count() if left_out else None,
        **counts,
    )
    finish_run(location, begun, summary.model_dump())
    return summary


def _count(
    location: LocationOptions,
    found: DataFrame,
    name: str,
    where: str,
    period: timedelta,
    *,
    include_done: bool,
) -> ReplaySummary:
    """Count the tasks that would be replayed, and the done tasks that would be left out."""
    now = server_now(location)
    dead = is_dead_letter().alias("dead")
    grouped = found.groupBy("queue", "archived", "status", dead).count()
    counted = grouped.orderBy("queue", "archived", "status").collect()
    selected = [row for row in counted if row["dead"] or include_done]
    by_status: Counter[str] = Counter()
    for row in selected:
        by_status[row["status"]] += row["count"]
    matched = by_status.total()
    archived = sum(row["count"] for row in selected if row["archived"])
    return ReplaySummary(
        run=name,
        where=where,
        matched=matched,
        archived=archived,
        letters=matched - archived,
        begun_at=now,
        until=now + period,
        dry_run=True,
        matched_by={_group_name(row): row["count"] for row in selected},
        matched_by_status=dict(sorted(by_status.items())),
        done_left_out=sum(row["count"] for row in counted) - matched,
    )


def _group_name(row: Row) -> str:
    return f"{row['queue']}/{'archived' if row['archived'] else 'dead letters'}/{row['status']}"


def _archived_copies(spark: SparkSession, archive: str | Path | None, run: str) -> frozenset[str]:
    """Return the ids of tasks that an interrupted run had added, and that were archived since."""
    if archive is None:
        return frozenset()
    kept = read_archive(spark, archive).where(f.col("insert_token") == run_token(run))
    return frozenset(row["id"] for row in kept.select("id").collect())


def run_token(run: str) -> str:
    """Return the token that marks the tasks a run has added."""
    return f"replay:{run}"


def copy_id(run: str, document: dict[str, Any]) -> ObjectId:
    """Return the id under which a run adds an archived task."""
    task_id = document["_id"]
    life = f"{id_type(task_id)}/{task_id}/{document.get('created_at')}"
    return key_id(run_token(run), life)


def eta_of(run: str, begun_at: datetime, period: timedelta, task_id: Any) -> datetime:
    """Return when a task comes due: at random within the period, and always the same in a run."""
    digest = hashlib.blake2b(f"{run}/{task_id}".encode(), digest_size=8).digest()
    return round_up(begun_at + period * (int.from_bytes(digest) / 2**64))


class _Replayer:
    """Replays the documents it gets; runs in the executors."""

    def __init__(
        self,
        location: LocationOptions,
        settings: QueueSettings,
        begun: NamedRun,
        run: str,
        *,
        to: str | None,
        period: timedelta,
        known: frozenset[str],
    ) -> None:
        self.location, self.settings, self.run, self.to = location, settings, run, to
        self.begun_at, self.period, self.known = begun.begun_at, period, known

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        now = server_now(self.location)
        # With the options for writing: a UUID in another representation would be another UUID.
        options = location_of(self.location).collections.codec_options
        for batch in batches:
            rows = batch.to_pylist()
            for start in range(0, len(rows), CHUNK):
                some = rows[start : start + CHUNK]
                archived = [decode(row["document"], options) for row in some if row["archived"]]
                dead_letters = [
                    decode(row["document"], options) for row in some if not row["archived"]
                ]
                fresh = [one for one in dead_letters if not self._is_replayed(one)]
                added, left = self._add(archived, now)
                returned = self._return(fresh, now)
                left += len(fresh) - returned
                counts = [added, returned + len(dead_letters) - len(fresh), left]
                arrays = [pa.array([count], pa.int64()) for count in counts]
                yield pa.RecordBatch.from_arrays(arrays, list(COUNTS))

    def _eta(self, document: dict[str, Any]) -> datetime:
        return eta_of(self.run, self.begun_at, self.period, document["_id"])

    def _is_replayed(self, document: dict[str, Any]) -> bool:
        """Return whether this run has replayed a task before it failed again or was archived."""
        if document.get("replay_run") == self.run:
            return True
        return str(copy_id(self.run, document)) in self.known

    def _add(self, archived: Sequence[dict[str, Any]], now: datetime) -> tuple[int, int]:
        inserter = TaskInserter(location_of(self.location), settings=self.settings, now=now)
        documents = [
            inserter.document(
                self.to or document.get("queue", DEFAULT_QUEUE),
                self._copy(document),
                document.get("payload") or {},
                token=run_token(self.run),
            )
            for document in archived
            if not self._is_replayed(document)
        ]
        added, left = inserter.add(documents)
        return added + len(archived) - len(documents), left

    def _copy(self, document: dict[str, Any]) -> NewTask[Any]:
        """Return a new task with the options of an archived one."""
        task = read_task(document)
        origin = {"replayed_from": str(task.id), "replay_run": self.run}
        return NewTask[Any](
            payload=None,
            task_id=copy_id(self.run, document),
            eta=self._eta(document),
            priority=task.priority,
            max_attempts=max(task.max_attempts, 1),
            backoff=task.backoff,
            visibility_timeout=task.visibility_timeout_sec,
            dedupe_key=task.dedupe_key,
            headers={**task.headers, **origin},
            name=task.name if is_name(task.name) else None,
        )

    def _return(self, dead_letters: Sequence[dict[str, Any]], now: datetime) -> int:
        if not dead_letters:
            return 0
        operation = requeue(
            [PlannedReplay(one, self._eta(one)) for one in dead_letters],
            run=self.run,
            queue=self.to,
            position=Positions().take(now),
            now=now,
            settings=self.settings,
        )
        return location_of(self.location).run(operation)
