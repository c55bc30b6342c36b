"""Replay chosen dead letters, live and archived, spread over a period.

Archived tasks that are done are replayed only if that is asked for.
Dead letters go back themselves, as ``dlq replay`` sends them. Archived tasks are added anew,
with ids derived from the run and the task, so that a run adds each once, however often it is
started.
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

from microqueue.arguments import check_name, refused
from microqueue.clock import round_up
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.durations import Duration, check_duration
from microqueue.model import Model
from microqueue.new_task import NewTask
from microqueue.operations.replay import PlannedReplay, requeue
from microqueue.positions import Positions
from microqueue.settings import QueueSettings
from microqueue.spark.archive.reader import read_archive
from microqueue.spark.ids import id_type, key_id
from microqueue.spark.location import locate, location_of, primary, server_now
from microqueue.spark.options import LocationOptions
from microqueue.spark.progress import Step, Tell, silent
from microqueue.spark.replay.selection import choose, dead
from microqueue.spark.runs import Run, begin_run, finish_run
from microqueue.spark.task_writer import Adder
from microqueue.spark.whole_tasks import decode
from microqueue.task import DEFAULT_QUEUE, Task

CHUNK = 1000
COUNTED = "archived long, letters long, skipped long"
COUNTS = ("archived", "letters", "skipped")


class ReplaySummary(Model):
    """What a replay did; ``repeated`` says that the run was over before, and nothing was done.

    What the run had sent before it was interrupted counts, if the condition chooses it again.
    ``skipped`` were not sent back: a live task has their dedupe key, or they changed meanwhile.
    ``matched_by`` (queue, place and status) and ``matched_by_status`` are those of a dry run.
    ``done_left_out`` counts the done tasks that meet the condition and are not replayed; it is
    counted in a dry run, and where nothing else met the condition.
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


def replay(
    spark: SparkSession,
    *,
    where: str,
    archive: str | Path | None = None,
    letters: bool = True,
    include_done: bool = False,
    to: str | None = None,
    over: Duration = timedelta(0),
    run: str | None = None,
    uri: str | None = None,
    database: str | None = None,
    collection: str = DEFAULT_COLLECTION,
    settings: QueueSettings | None = None,
    dry_run: bool = False,
    tell: Tell = silent,
) -> ReplaySummary:
    """Send back the dead letters that a SQL condition chooses, once per ``run``.

    Those in MongoDB, and those in an ``archive``. With ``include_done`` archived tasks that
    succeeded are chosen, too, and run again.

    ``where`` may use the columns of a task, ``payload`` (as JSON text), ``fingerprint`` (as in
    triage) and ``archived``: ``"error.code = 'timeout' and payload:to like '%.org'"``. They are
    due at times spread evenly by chance ``over`` a period, so that a replay is not a storm.
    Without ``to``, each goes to its own queue.
    """
    if to is not None:
        check_name(to)
    if include_done and archive is None:
        raise refused(
            "include_done", include_done, "done tasks are replayed from an archive: give --archive"
        )
    period = check_duration("over", over)
    place = primary(locate(uri, database=database, collection=collection))
    rules = settings or QueueSettings.from_environment()
    found = choose(spark, place, rules, where=where, archive=archive, letters=letters)
    name = run or uuid4().hex[:12]
    if dry_run:
        return _look(place, found, name, where, period, include_done=include_done)
    chosen = found if include_done else found.where(dead())
    details = {
        "kind": "replay",
        "where": where,
        "to": to,
        "over_sec": period.total_seconds(),
        "archive": None if archive is None else str(archive),
        "letters": letters,
    }
    if include_done:
        details["include_done"] = True
    begun = begin_run(place, f"replay:{name}", details)
    if begun.report is not None:
        return ReplaySummary(**{**begun.report, "repeated": True})
    tell(Step("replay", "Sending tasks back"))
    archived_copies = _archived_copies(spark, archive, name) if begun.resumed else frozenset()
    sender = _Sender(place, rules, begun, name, to=to, period=period, known=archived_copies)
    # What the run itself has added may have failed since, and be chosen by the condition.
    foreign = ~f.col("insert_token").eqNullSafe(f.lit(token_of(name)))
    rows = (
        chosen.where(foreign).select("document", "archived").mapInArrow(sender, COUNTED).collect()
    )
    counts = {one: sum(row[one] for row in rows) for one in COUNTS}
    matched = sum(counts.values())
    # Counting reads the archive once more: only who gets nothing has to know why.
    left_out = archive is not None and not include_done and not matched
    summary = ReplaySummary(
        run=name,
        where=where,
        matched=matched,
        begun_at=begun.begun_at,
        until=begun.begun_at + period,
        done_left_out=found.where(foreign & ~dead()).count() if left_out else None,
        **counts,
    )
    finish_run(place, begun, summary.model_dump())
    return summary


def _look(
    place: LocationOptions,
    found: DataFrame,
    name: str,
    where: str,
    period: timedelta,
    *,
    include_done: bool,
) -> ReplaySummary:
    """Count what would be sent back, and the done tasks that would be left out."""
    now = server_now(place)
    grouped = found.groupBy("queue", "archived", "status", dead().alias("dead")).count()
    counted = grouped.orderBy("queue", "archived", "status").collect()
    chosen = [row for row in counted if row["dead"] or include_done]
    by_status: Counter[str] = Counter()
    for row in chosen:
        by_status[row["status"]] += row["count"]
    matched = by_status.total()
    archived = sum(row["count"] for row in chosen if row["archived"])
    return ReplaySummary(
        run=name,
        where=where,
        matched=matched,
        archived=archived,
        letters=matched - archived,
        begun_at=now,
        until=now + period,
        dry_run=True,
        matched_by={_place_of(row): row["count"] for row in chosen},
        matched_by_status=dict(sorted(by_status.items())),
        done_left_out=sum(row["count"] for row in counted) - matched,
    )


def _place_of(row: Row) -> str:
    return f"{row['queue']}/{'archived' if row['archived'] else 'dead letters'}/{row['status']}"


def _archived_copies(spark: SparkSession, archive: str | Path | None, run: str) -> frozenset[str]:
    """Find what an interrupted run had added, and what was done and archived since."""
    if archive is None:
        return frozenset()
    kept = read_archive(spark, archive).where(f.col("insert_token") == token_of(run))
    return frozenset(row["id"] for row in kept.select("id").collect())


def token_of(run: str) -> str:
    """Give the token by which tasks that a run has added are known."""
    return f"replay:{run}"


def copy_id(run: str, document: dict[str, Any]) -> ObjectId:
    """Give the id under which a run adds an archived task."""
    task_id = document["_id"]
    life = f"{id_type(task_id)}/{task_id}/{document.get('created_at')}"
    return key_id(token_of(run), life)


def eta_of(run: str, begun_at: datetime, period: timedelta, task_id: Any) -> datetime:
    """Choose when a task comes due: anywhere in the period, and the same for the same run."""
    digest = hashlib.blake2b(f"{run}/{task_id}".encode(), digest_size=8).digest()
    return round_up(begun_at + period * (int.from_bytes(digest) / 2**64))


class _Sender:
    """Sends back the documents that it is given: what Spark sends to its executors."""

    def __init__(
        self,
        place: LocationOptions,
        settings: QueueSettings,
        begun: Run,
        run: str,
        *,
        to: str | None,
        period: timedelta,
        known: frozenset[str],
    ) -> None:
        self.place, self.settings, self.run, self.to = place, settings, run, to
        self.begun_at, self.period, self.known = begun.begun_at, period, known

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        now = server_now(self.place)
        # As they are written again: a UUID that is read in another way would be another one.
        options = location_of(self.place).collections.codec_options
        for batch in batches:
            rows = batch.to_pylist()
            for start in range(0, len(rows), CHUNK):
                some = rows[start : start + CHUNK]
                archived = [decode(row["document"], options) for row in some if row["archived"]]
                letters = [decode(row["document"], options) for row in some if not row["archived"]]
                fresh = [letter for letter in letters if not self._sent(letter)]
                added, left = self._add(archived, now)
                returned = self._return(fresh, now)
                left += len(fresh) - returned
                counts = [added, returned + len(letters) - len(fresh), left]
                arrays = [pa.array([count], pa.int64()) for count in counts]
                yield pa.RecordBatch.from_arrays(arrays, list(COUNTS))

    def _eta(self, document: dict[str, Any]) -> datetime:
        return eta_of(self.run, self.begun_at, self.period, document["_id"])

    def _sent(self, document: dict[str, Any]) -> bool:
        """Tell whether this run has sent a task back, before it failed again or was archived."""
        if document.get("replay_run") == self.run:
            return True
        return str(copy_id(self.run, document)) in self.known

    def _add(self, archived: Sequence[dict[str, Any]], now: datetime) -> tuple[int, int]:
        adder = Adder(location_of(self.place), settings=self.settings, now=now)
        documents = [
            adder.document(
                self.to or document.get("queue", DEFAULT_QUEUE),
                self._anew(document),
                document.get("payload") or {},
                token=token_of(self.run),
            )
            for document in archived
            if not self._sent(document)
        ]
        added, left = adder.add(documents)
        return added + len(archived) - len(documents), left

    def _anew(self, document: dict[str, Any]) -> NewTask[Any]:
        """Write a new task with the options of an archived one."""
        task: Task[Any] = Task.from_document(document)
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
        )

    def _return(self, letters: Sequence[dict[str, Any]], now: datetime) -> int:
        if not letters:
            return 0
        operation = requeue(
            [PlannedReplay(letter, self._eta(letter)) for letter in letters],
            run=self.run,
            queue=self.to,
            position=Positions().take(now),
            now=now,
            settings=self.settings,
        )
        return location_of(self.place).run(operation)
