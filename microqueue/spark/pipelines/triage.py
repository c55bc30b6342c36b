"""Triage dead letters, live and archived: which kinds of error there are, and which are new.

Letters are of one kind if they have the same queue and code, and messages that differ only in
numbers, ids, paths and quoted text. Each kind comes with the command that replays it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as f

from microqueue.arguments import check_count
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.errors import MicroqueueError
from microqueue.model import Model
from microqueue.settings import QueueSettings
from microqueue.spark.pipelines.commands import Asked, Command, replay_archived, replay_letters
from microqueue.spark.pipelines.fingerprint import fingerprinted, normalised
from microqueue.spark.pipelines.history import all_tasks, steadily
from microqueue.spark.pipelines.place import locate, now_at
from microqueue.spark.pipelines.steps import Step, Tell, silent

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
