"""What the benchmarks of Spark share: a server, a session, and the figures that come of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from pymongo import MongoClient
from pymongo.collection import Collection
from pyspark.sql import SparkSession

from microqueue import Queue, QueueSettings
from microqueue.core import core_of

TEXT = "x" * 200
CHUNK = 5_000


class Bench:
    """One server, one session, and the figures."""

    def __init__(self, spark: SparkSession, uri: str, *, tasks: int, rounds: int) -> None:
        self.spark = spark
        self.uri = uri
        self.tasks = tasks
        self.rounds = rounds
        self.results: list[dict[str, Any]] = []

    def queue(self, collection: str, settings: QueueSettings | None = None) -> Queue[Any]:
        """Open a collection."""
        return Queue[Any].from_uri(self.uri, "bench", collection=collection, settings=settings)

    @contextmanager
    def plain(self, queue: Queue[Any]) -> Iterator[Collection[dict[str, Any]]]:
        """Open a queue's collection as one does by hand: with pymongo's own options."""
        tasks = core_of(queue).collections.tasks
        with MongoClient[dict[str, Any]](self.uri) as client:
            yield client[tasks.database.name][tasks.name]

    def record(
        self,
        name: str,
        plain: Sequence[float] | None,
        spark: Sequence[float],
        *,
        ratio: float | None = None,
        per_sec: int | None = None,
    ) -> None:
        """Keep the rates of both, and the median of each round's own ratio, beside the goal."""
        result: dict[str, Any] = {"what": name, "spark_per_sec": self._rate(spark)}
        if plain is not None:
            ratios = [one / other for one, other in zip(plain, spark, strict=True)]
            result["pymongo_per_sec"] = self._rate(plain)
            result["ratio"] = round(statistics.median(ratios), 2)
        if ratio is not None:
            result |= {"goal": f"{ratio}", "met": result["ratio"] >= ratio}
        if per_sec is not None:
            result |= {"goal": f"{per_sec:,}/s", "met": result["spark_per_sec"] >= per_sec}
        self.results.append(result)

    def _rate(self, seconds: Sequence[float]) -> int:
        return round(self.tasks / statistics.median(seconds))

    def table(self) -> str:
        """Write the figures for people."""
        lines = [f"| {self.tasks:,} tasks | one pymongo process | Spark | ratio | goal |"]
        lines.append("|---|---|---|---|---|")
        for one in self.results:
            plain = f"{one['pymongo_per_sec']:,}/s" if "ratio" in one else ""
            goal = one.get("goal", "") + ("" if one.get("met", True) else ", missed")
            lines.append(
                f"| {one['what']} | {plain} | {one['spark_per_sec']:,}/s "
                f"| {one.get('ratio', '')} | {goal} |"
            )
        return "\n".join(lines)


def insert_all(queue: Queue[Any], made: Iterator[dict[str, Any]]) -> int:
    """Insert with one pymongo process, a chunk at a time."""
    queue.ensure_indexes()
    total = 0
    while chunk := list(islice(made, CHUNK)):
        core_of(queue).collections.tasks.insert_many(chunk, ordered=False)
        total += len(chunk)
    return total


def timed(work: Callable[[], Any]) -> float:
    """Time a piece of work in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
