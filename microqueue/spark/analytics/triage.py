"""Triage dead letters, live and archived: which kinds of error there are, and which are new.

Letters are of one kind if they have the same queue and code, and messages that differ only in
numbers, ids, paths and quoted text. Each kind comes with the command that replays it.
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
from microqueue.dlq import DeadLetterFilter
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.drivers.connection import option_names
from microqueue.errors import MicroqueueError
from microqueue.masking import without_password
from microqueue.model import Model
from microqueue.operations.dead_letters import read_errors
from microqueue.settings import QueueSettings
from microqueue.spark.analytics.fingerprint import fingerprint, fingerprinted, literals, normalised
from microqueue.spark.analytics.history import all_tasks, steadily
from microqueue.spark.location import locate, location_of, now_at
from microqueue.spark.options import LocationOptions, resolve_uri
from microqueue.spark.progress import Step, Tell, silent

KIND = ("fingerprint", "queue", "code", "pattern")
MICROS = 1_000_000


class Sample(Model):
    """One dead letter of a kind."""

    id: str
    message: str
    archived: bool


class Cluster(Model):
    """Dead letters of one kind; ``new`` if no earlier triage has seen the kind.

    ``replay`` is the command for those in MongoDB, ``replay_archived`` for those archived.
    """

    fingerprint: str
    queue: str
    code: str | None
    pattern: str
    count: int
    live: int
    archived: int
    first_at: datetime
    last_at: datetime
    new: bool
    samples: tuple[Sample, ...] = ()
    replay: Command | None = None
    replay_archived: Command | None = None


class Triage(Model):
    """The kinds of dead letters, the most frequent first; ``total`` counts all of them."""

    total: int
    kinds: int
    new: int
    clusters: tuple[Cluster, ...]
    dry_run: bool = False


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
    tell: Tell = silent,
) -> Triage:
    """Group dead letters by kind, and describe the ``top`` ones with some samples each.

    ``state`` is a file that remembers which kinds were seen; a dry run leaves it as it is.
    """
    check_count("top", top)
    rules = settings or QueueSettings.from_environment()
    place = locate(uri, database=database, collection=collection) if live else None
    if since is not None:  # As exact as MongoDB is, so that the commands choose the same.
        since = since.astimezone(UTC).replace(microsecond=since.microsecond // 1000 * 1000)
    asked = Asked(uri=uri, database=database, collection=collection, since=since)
    known = _read_state(state)
    tell(Step("group", "Grouping dead letters"))

    def work() -> tuple[list[Row], dict[str, list[Sample]]]:
        tasks = all_tasks(
            spark,
            live=place,
            archive=archive,
            queues=queues,
            statuses=["failed"],
            since=since,
            settings=rules,
        )
        letters = _letters(tasks).cache()
        try:
            groups = _groups(letters)
            kinds = [row["fingerprint"] for row in groups[:top]]
            return groups, _samples(letters, kinds, samples)
        finally:
            letters.unpersist()

    groups, shown = steadily(spark, work, live=place, archive=archive)
    chosen = groups[:top]
    tell(Step("commands", "Finding the commands that replay them"))
    clusters = []
    for row in chosen:
        cluster = _cluster(row, known, shown.get(row["fingerprint"], ()))
        changes: dict[str, Any] = {}
        if place is not None and cluster.live:
            first, last = _instant(row["first_live"]), _instant(row["last_live"])
            changes["replay"] = replay_letters(
                place, rules, cluster, asked, failed_between=(first, last)
            )
        if archive is not None and cluster.archived:
            changes["replay_archived"] = replay_archived(archive, cluster, asked)
        clusters.append(cluster.model_copy(update=changes))
    if state is not None and not dry_run:
        seen_at = now_at(place)
        _write_state(state, known, [row["fingerprint"] for row in groups], seen_at)
    return Triage(
        total=sum(row["count"] for row in groups),
        kinds=len(groups),
        new=sum(row["fingerprint"] not in known for row in groups),
        clusters=tuple(clusters),
        dry_run=dry_run,
    )


def _letters(tasks: DataFrame) -> DataFrame:
    queue, code, message = f.col("queue"), f.col("error.code"), f.col("error.message")
    return tasks.select(
        "id",
        "queue",
        "archived",
        code.alias("code"),
        f.coalesce(message, f.lit("")).alias("message"),
        f.unix_micros("updated_at").alias("at"),
        normalised(message).alias("pattern"),
        fingerprinted(queue, code, message).alias("fingerprint"),
    )


def _groups(letters: DataFrame) -> list[Row]:
    in_mongodb = ~f.col("archived")
    counted = letters.groupBy(*KIND).agg(
        f.count(f.lit(1)).alias("count"),
        f.count_if(in_mongodb).alias("live"),
        f.min("at").alias("first"),
        f.max("at").alias("last"),
        f.min(f.when(in_mongodb, f.col("at"))).alias("first_live"),
        f.max(f.when(in_mongodb, f.col("at"))).alias("last_live"),
    )
    return counted.orderBy(f.desc("count"), "fingerprint").collect()


def _samples(
    letters: DataFrame, fingerprints: Sequence[str], limit: int
) -> dict[str, list[Sample]]:
    """Read the latest letters of each kind."""
    latest = Window.partitionBy("fingerprint").orderBy(f.desc("at"), "id")
    chosen = letters.where(f.col("fingerprint").isin(list(fingerprints)))
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


def _instant(micros: int) -> datetime:
    return datetime.fromtimestamp(micros / MICROS, UTC)


def _read_state(path: str | Path | None) -> dict[str, str]:
    if path is None or not Path(path).exists():
        return {}
    try:
        known = json.loads(Path(path).read_text(encoding="utf-8"))["seen"]
        return {str(name): str(at) for name, at in known.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise MicroqueueError(
            f"{path} is not what an earlier triage has written; give another file, or delete it"
        ) from exc


def _write_state(
    path: str | Path, known: Mapping[str, str], seen: Sequence[str], now: datetime
) -> None:
    """Write the whole file aside and put it in place: a kill leaves the old one."""
    merged = {**dict.fromkeys(seen, now.isoformat()), **known}
    draft = Path(f"{path}.draft")
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(json.dumps({"seen": merged}, indent=1), encoding="utf-8")
    draft.replace(path)


MOST_COMPARED = 20_000
MOST_TEXTS = 3
ONE_MILLISECOND = timedelta(milliseconds=1)

NO_PASSWORD = "put the user and the password back into --uri"  # noqa: S105 (that there is none)


class Command(Model):
    """A command as a person pastes it, and what to do before that."""

    line: str
    note: str | None = None

    @property
    def text(self) -> str:
        """The line, with the note as a comment of the shell."""
        return self.line if self.note is None else f"{self.line}   # {self.note}"


@dataclass(frozen=True)
class Asked:
    """What a triage was asked about, which its commands have to say again."""

    uri: str | None = None
    database: str | None = None
    collection: str = DEFAULT_COLLECTION
    since: datetime | None = None

    def command(self, *arguments: str) -> Command:
        """Write a command for the same server; what is secret in its address is left out."""
        address = self._address()
        if address is None:
            return Command(line=shlex.join(["microqueue", *arguments]))
        shown = without_password(address)
        line = shlex.join(["microqueue", *arguments, "--uri", shown])
        return Command(line=line, note=None if shown == address else NO_PASSWORD)

    def _address(self) -> str | None:
        """Give the address, if one was given; a database that was given beside it is put in."""
        if self.database is None:
            return self.uri
        parts = urlsplit(resolve_uri(self.uri))
        options = [parts.query] if parts.query else []
        if "@" in parts.netloc and "authsource" not in option_names(parts.geturl()):
            options.append(f"authSource={parts.path.strip('/') or 'admin'}")
        return parts._replace(path=f"/{self.database}", query="&".join(options)).geturl()

    def replay(self, condition: str, time: str, *options: str) -> Command:
        """Write the replay pipeline's command for a condition, and for no older tasks."""
        where = condition
        if self.since is not None:
            where = f"{where} and {time} >= timestamp '{self.since.isoformat()}'"
        # A kind is of one queue: its fingerprint has the queue in it.
        arguments = ["pipeline", "replay", *options, "--all-queues", "--where", where]
        if self.collection != DEFAULT_COLLECTION:
            arguments += ["--collection", self.collection]
        return self.command(*arguments)


def replay_letters(
    place: LocationOptions,
    settings: QueueSettings,
    kind: Any,
    asked: Asked,
    *,
    failed_between: tuple[datetime, datetime],
) -> Command:
    """Find the simplest command that takes all letters of a kind, and no others.

    Each filter of ``dlq replay`` is tried as the replay itself would use it, and what it finds
    is compared. Where none fits, the replay pipeline computes of each letter which kind it is.
    """
    if asked.collection == DEFAULT_COLLECTION:  # The one that ``dlq replay`` works on.
        for which in _filters(kind, asked.since, failed_between):
            arguments = _arguments(kind.queue, which)
            # Of others, a terminal would show something else.
            if "".join(arguments).isprintable() and _is_exact(place, settings, kind, which):
                return asked.command(*arguments)
    return asked.replay(f"fingerprint = '{kind.fingerprint}'", "updated_at")


def _is_exact(
    place: LocationOptions, settings: QueueSettings, kind: Any, which: DeadLetterFilter
) -> bool:
    """Tell whether a filter finds all letters of a kind, and no others; if too many, it does not.

    It misses some whose messages differ from the pattern in white space.
    """
    reading = read_errors(kind.queue, which, limit=MOST_COMPARED + 1, settings=settings)
    letters = location_of(place).run(reading)
    if not kind.live <= len(letters) <= MOST_COMPARED:
        return False
    return all(_fingerprint(letter) == kind.fingerprint for letter in letters)


def _fingerprint(letter: dict[str, Any]) -> str:
    error = letter.get("error") or {}
    return fingerprint(letter.get("queue"), error.get("code"), error.get("message"))


def _filters(
    kind: Any, since: datetime | None, between: tuple[datetime, datetime]
) -> Iterator[DeadLetterFilter]:
    """Give filters from the simplest to the narrowest."""
    first, last = between
    texts = literals(kind.pattern)[:MOST_TEXTS]
    if kind.code is not None:
        yield DeadLetterFilter(code=kind.code, since=since)
    for text in texts:
        yield DeadLetterFilter(code=kind.code, text=text, since=since)
    for narrow in (*texts, None):
        yield DeadLetterFilter(
            code=kind.code, text=narrow, since=first, until=last + ONE_MILLISECOND
        )


def _arguments(queue: str, which: DeadLetterFilter) -> Sequence[str]:
    arguments = ["dlq", "replay", "--queue", queue]
    for name in ("code", "text"):
        value = getattr(which, name)
        # One word, so that a text which begins with a dash is not taken for an option.
        arguments += [f"--{name}={value}"] if value is not None else []
    for name in ("since", "until"):
        instant = getattr(which, name)
        arguments += [f"--{name}={instant.isoformat()}"] if instant is not None else []
    return arguments


def replay_archived(archive: str | Path, kind: Any, asked: Asked) -> Command:
    """Write the command that adds the archived letters of a kind anew."""
    condition = f"fingerprint = '{kind.fingerprint}' and archived"
    return asked.replay(condition, "finished_at", "--archive", str(archive), "--no-letters")
