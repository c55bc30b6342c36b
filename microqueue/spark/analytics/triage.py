"""Triage dead letters, live and archived: the kinds of errors, and which of them are new.

Dead letters are of one kind if they have the same queue and error code, and messages that differ
only in numbers, ids, paths and quoted text. Each kind comes with the command that replays it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as f

from microqueue.arguments import check_count
from microqueue.dead_letter_models import DeadLetterFilter
from microqueue.deprecation import renamed_arguments
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.drivers.connection import option_names
from microqueue.errors import PipelineError
from microqueue.masking import without_password
from microqueue.model import Model
from microqueue.operations.dead_letters import read_errors
from microqueue.settings import QueueSettings
from microqueue.spark import error_codes
from microqueue.spark.analytics.fingerprint import (
    fingerprint,
    fingerprint_column,
    literals,
    normalised_column,
)
from microqueue.spark.analytics.task_source import all_tasks, read_consistently
from microqueue.spark.location import LocationOptions, locate, location_of, now_at, resolve_uri
from microqueue.spark.progress import ProgressCallback, Step, no_progress

KIND = ("fingerprint", "queue", "code", "pattern")
MICROS = 1_000_000
MOST_COMPARED = 20_000
MOST_TEXTS = 3
ONE_MILLISECOND = timedelta(milliseconds=1)

NO_PASSWORD = "add the user and the password to --uri"  # noqa: S105 (that there is none)


class Command(Model):
    """A command to paste into a shell, and what to do before."""

    line: str
    note: str | None = None

    @property
    def text(self) -> str:
        """The line, with the note as a shell comment."""
        return self.line if self.note is None else f"{self.line}   # {self.note}"


class Sample(Model):
    """One dead letter of a kind."""

    id: str
    message: str
    archived: bool


class Cluster(Model):
    """Dead letters of one kind.

    Attributes:
        fingerprint: Identifies the kind.
        queue: The queue.
        code: The error code.
        pattern: The error message, masked.
        count: How many dead letters there are.
        live: How many of them are in MongoDB.
        archived: How many of them are in the archive.
        first_at: When the first one failed; ``None`` if no dead letter has a valid time.
        last_at: When the last one failed; ``None`` like ``first_at``.
        new: Whether no earlier triage has seen the kind.
        samples: The latest dead letters.
        replay: The command that replays those in MongoDB.
        replay_archived: The command that replays those in the archive.
    """

    fingerprint: str
    queue: str
    code: str | None
    pattern: str
    count: int
    live: int
    archived: int
    first_at: datetime | None
    last_at: datetime | None
    new: bool
    samples: tuple[Sample, ...] = ()
    replay: Command | None = None
    replay_archived: Command | None = None


class Triage(Model):
    """The kinds of dead letters, the most frequent first; ``total`` counts all dead letters."""

    total: int
    kinds: int
    new: int
    clusters: tuple[Cluster, ...]
    dry_run: bool = False


@renamed_arguments(tell="progress")
def triage(
    spark: SparkSession,
    *,
    archive: str | Path | None = None,
    live: bool = True,
    uri: str | None = None,
    database: str | None = None,
    collection: str = DEFAULT_COLLECTION,
    queues: Sequence[str] | None = None,
    since: datetime | None = None,
    top: int = 20,
    samples: int = 3,
    state: str | Path | None = None,
    settings: QueueSettings | None = None,
    dry_run: bool = False,
    progress: ProgressCallback = no_progress,
) -> Triage:
    """Group dead letters by kind of error.

    Args:
        spark: The session.
        archive: An archive to read, besides MongoDB.
        live: Whether to read MongoDB.
        uri: The address of MongoDB; by default ``MICROQUEUE_URI``, or the embedded server.
        database: The database; by default that of the address.
        collection: The collection of the tasks.
        queues: The queues to read; by default all.
        since: Leave out dead letters that failed before; by default there is no limit.
        top: How many kinds to describe, the most frequent first.
        samples: How many dead letters to show of each.
        state: A file that records which kinds were seen.
        settings: The settings of the queues; by default those of the environment.
        dry_run: Whether to leave ``state`` as it is.
        progress: Called with each step that begins.

    Returns:
        The kinds, with the commands that replay them.

    Raises:
        InvalidArgument: An argument is not valid, or there is nothing to read.
        PipelineError: ``state`` is not a file that a triage has written.
    """
    check_count("top", top)
    queue_settings = settings or QueueSettings.from_environment()
    location = locate(uri, database=database, collection=collection) if live else None
    if since is not None:  # In milliseconds, as in MongoDB, so that the commands select the same.
        since = since.astimezone(UTC).replace(microsecond=since.microsecond // 1000 * 1000)
    scope = TriageScope(uri=uri, database=database, collection=collection, since=since)
    known = _read_state(state)
    progress(Step("group", "Grouping dead letters"))

    def work() -> tuple[list[Row], dict[str, list[Sample]]]:
        tasks = all_tasks(
            spark,
            live=location,
            archive=archive,
            queues=queues,
            statuses=["failed"],
            since=since,
            settings=queue_settings,
        )
        dead_letters = _dead_letters(tasks).cache()
        try:
            groups = _groups(dead_letters)
            kinds = [row["fingerprint"] for row in groups[:top]]
            return groups, _samples(dead_letters, kinds, samples)
        finally:
            dead_letters.unpersist()

    groups, shown = read_consistently(spark, work, live=location, archive=archive)
    progress(Step("commands", "Finding the commands to replay them"))
    clusters = []
    for row in groups[:top]:
        cluster = _cluster(row, known, shown.get(row["fingerprint"], ()))
        changes: dict[str, Any] = {}
        if location is not None and cluster.live:
            first, last = _instant(row["first_live"]), _instant(row["last_live"])
            changes["replay"] = replay_live(
                location, queue_settings, cluster, scope, failed_between=(first, last)
            )
        if archive is not None and cluster.archived:
            changes["replay_archived"] = replay_archived(archive, cluster, scope)
        clusters.append(cluster.model_copy(update=changes))
    if state is not None and not dry_run:
        seen_at = now_at(location)
        _write_state(state, known, [row["fingerprint"] for row in groups], seen_at)
    return Triage(
        total=sum(row["count"] for row in groups),
        kinds=len(groups),
        new=sum(row["fingerprint"] not in known for row in groups),
        clusters=tuple(clusters),
        dry_run=dry_run,
    )


def _dead_letters(tasks: DataFrame) -> DataFrame:
    queue, code, message = f.col("queue"), f.col("error.code"), f.col("error.message")
    return tasks.select(
        "id",
        "queue",
        "archived",
        code.alias("code"),
        f.coalesce(message, f.lit("")).alias("message"),
        f.unix_micros("updated_at").alias("at"),
        normalised_column(message).alias("pattern"),
        fingerprint_column(queue, code, message).alias("fingerprint"),
    )


def _groups(dead_letters: DataFrame) -> list[Row]:
    in_mongodb = ~f.col("archived")
    counted = dead_letters.groupBy(*KIND).agg(
        f.count(f.lit(1)).alias("count"),
        f.count_if(in_mongodb).alias("live"),
        f.min("at").alias("first"),
        f.max("at").alias("last"),
        f.min(f.when(in_mongodb, f.col("at"))).alias("first_live"),
        f.max(f.when(in_mongodb, f.col("at"))).alias("last_live"),
    )
    return counted.orderBy(f.desc("count"), "fingerprint").collect()


def _samples(
    dead_letters: DataFrame, fingerprints: Sequence[str], limit: int
) -> dict[str, list[Sample]]:
    """Read the latest dead letters of each kind."""
    latest = Window.partitionBy("fingerprint").orderBy(f.desc("at"), "id")
    chosen = dead_letters.where(f.col("fingerprint").isin(list(fingerprints)))
    ranked = chosen.withColumn("rank", f.row_number().over(latest)).where(f.col("rank") <= limit)
    found: dict[str, list[Sample]] = {}
    for row in ranked.orderBy("fingerprint", "rank").collect():
        sample = Sample(id=row["id"], message=row["message"], archived=row["archived"])
        found.setdefault(row["fingerprint"], []).append(sample)
    return found


def _cluster(row: Row, known: Mapping[str, str], samples: Sequence[Sample]) -> Cluster:
    return Cluster(
        **{name: row[name] for name in KIND},
        count=row["count"],
        live=row["live"],
        archived=row["count"] - row["live"],
        first_at=_instant(row["first"]),
        last_at=_instant(row["last"]),
        new=row["fingerprint"] not in known,
        samples=tuple(samples),
    )


def _instant(micros: int | None) -> datetime | None:
    return None if micros is None else datetime.fromtimestamp(micros / MICROS, UTC)


def _read_state(path: str | Path | None) -> dict[str, str]:
    if path is None or not Path(path).exists():
        return {}
    try:
        known = json.loads(Path(path).read_text(encoding="utf-8"))["seen"]
        return {str(name): str(at) for name, at in known.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise PipelineError(
            f"{path} was not written by an earlier triage; give another file, or delete it",
            code=error_codes.NOT_A_STATE,
            path=str(path),
        ) from exc


def _write_state(
    path: str | Path, known: Mapping[str, str], seen: Sequence[str], now: datetime
) -> None:
    """Write a draft and rename it, so that a kill leaves the old file."""
    merged = {**dict.fromkeys(seen, now.isoformat()), **known}
    draft = Path(f"{path}.draft")
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(json.dumps({"seen": merged}, indent=1), encoding="utf-8")
    draft.replace(path)


# The commands that replay a kind


@dataclass(frozen=True)
class TriageScope:
    """The arguments of a triage that its commands have to repeat."""

    uri: str | None = None
    database: str | None = None
    collection: str = DEFAULT_COLLECTION
    since: datetime | None = None

    def command(self, *arguments: str) -> Command:
        """Return a command for the same server, without the credentials of its address."""
        address = self._address()
        if address is None:
            return Command(line=shlex.join(["microqueue", *arguments]))
        shown = without_password(address)
        line = shlex.join(["microqueue", *arguments, "--uri", shown])
        return Command(line=line, note=None if shown == address else NO_PASSWORD)

    def _address(self) -> str | None:
        """Return the address that was given, with the database that was given separately."""
        if self.database is None:
            return self.uri
        parts = urlsplit(resolve_uri(self.uri))
        options = [parts.query] if parts.query else []
        if "@" in parts.netloc and "authsource" not in option_names(parts.geturl()):
            options.append(f"authSource={parts.path.strip('/') or 'admin'}")
        return parts._replace(path=f"/{self.database}", query="&".join(options)).geturl()

    def replay(self, condition: str, time: str, *options: str) -> Command:
        """Return the command of the replay pipeline for a condition, within ``since``."""
        where = condition
        if self.since is not None:
            where = f"{where} and {time} >= timestamp '{self.since.isoformat()}'"
        # The fingerprint covers the queue, so all queues can be searched.
        arguments = ["pipeline", "replay", *options, "--all-queues", "--where", where]
        if self.collection != DEFAULT_COLLECTION:
            arguments += ["--collection", self.collection]
        return self.command(*arguments)


def replay_live(
    location: LocationOptions,
    settings: QueueSettings,
    kind: Cluster,
    scope: TriageScope,
    *,
    failed_between: tuple[datetime | None, datetime | None],
) -> Command:
    """Return the simplest command that replays all dead letters of a kind, and no others.

    Filters of ``dlq replay`` are run as the replay would use them, and what they find is compared.
    If none is exact, the replay pipeline selects by fingerprint.
    """
    if scope.collection == DEFAULT_COLLECTION:  # ``dlq replay`` uses no other.
        for which in _filters(kind, scope.since, failed_between):
            arguments = _arguments(kind.queue, which)
            # Other characters cannot be copied from a terminal.
            if "".join(arguments).isprintable() and _is_exact(location, settings, kind, which):
                return scope.command(*arguments)
    return scope.replay(f"fingerprint = '{kind.fingerprint}'", "updated_at")


def _is_exact(
    location: LocationOptions, settings: QueueSettings, kind: Cluster, which: DeadLetterFilter
) -> bool:
    """Return whether a filter finds exactly the dead letters of a kind.

    It does not if there are too many to compare, or if it misses messages whose white space
    differs from the pattern.
    """
    reading = read_errors(kind.queue, which, limit=MOST_COMPARED + 1, settings=settings)
    dead_letters = location_of(location).run(reading)
    if not kind.live <= len(dead_letters) <= MOST_COMPARED:
        return False
    return all(_fingerprint(one) == kind.fingerprint for one in dead_letters)


def _fingerprint(dead_letter: dict[str, Any]) -> str:
    error = dead_letter.get("error") or {}
    return fingerprint(dead_letter.get("queue"), error.get("code"), error.get("message"))


def _filters(
    kind: Cluster, since: datetime | None, between: tuple[datetime | None, datetime | None]
) -> Iterator[DeadLetterFilter]:
    """Yield filters from the simplest to the narrowest."""
    first, last = between
    texts = literals(kind.pattern)[:MOST_TEXTS]
    if kind.code is not None:
        yield DeadLetterFilter(code=kind.code, since=since)
    for text in texts:
        yield DeadLetterFilter(code=kind.code, text=text, since=since)
    if first is None or last is None:
        return
    for narrow in (*texts, None):
        yield DeadLetterFilter(
            code=kind.code, text=narrow, since=first, until=last + ONE_MILLISECOND
        )


def _arguments(queue: str, which: DeadLetterFilter) -> Sequence[str]:
    arguments = ["dlq", "replay", "--queue", queue]
    for name in ("code", "text"):
        value = getattr(which, name)
        # One word: a text that begins with a dash is not an option.
        arguments += [f"--{name}={value}"] if value is not None else []
    for name in ("since", "until"):
        instant = getattr(which, name)
        arguments += [f"--{name}={instant.isoformat()}"] if instant is not None else []
    return arguments


def replay_archived(archive: str | Path, kind: Cluster, scope: TriageScope) -> Command:
    """Return the command that replays the archived dead letters of a kind."""
    condition = f"fingerprint = '{kind.fingerprint}' and archived"
    return scope.replay(condition, "finished_at", "--archive", str(archive), "--no-dead-letters")
