"""What the Spark benchmarks share: the server, the session and the figures."""

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

from benchmarks.database import prepare
from microqueue import Queue, QueueSettings
from microqueue.core import core_of

TEXT = "x" * 200
CHUNK = 5_000


class Bench:
    """A server, a session, and the figures."""

    def __init__(self, spark: SparkSession, uri: str, *, tasks: int, rounds: int) -> None:
        self.spark = spark
        self.uri = uri
        self.tasks = tasks
        self.rounds = rounds
        self.results: list[dict[str, Any]] = []

    def queue(self, collection: str, settings: QueueSettings | None = None) -> Queue[Any]:
        """Return a queue in a collection."""
        return Queue[Any].from_uri(self.uri, "bench", collection=collection, settings=settings)

    @contextmanager
    def plain(self, queue: Queue[Any]) -> Iterator[Collection[dict[str, Any]]]:
        """Yield a queue's collection with a plain client of pymongo."""
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
        """Add a figure: the rates of both, the median of the ratios per round, and the target."""
        result: dict[str, Any] = {"name": name, "spark_per_sec": self._rate(spark)}
        if plain is not None:
            ratios = [one / other for one, other in zip(plain, spark, strict=True)]
            result["pymongo_per_sec"] = self._rate(plain)
            result["ratio"] = round(statistics.median(ratios), 2)
        if ratio is not None:
            result |= {"target": f"{ratio}", "met": result["ratio"] >= ratio}
        if per_sec is not None:
            result |= {"target": f"{per_sec:,}/s", "met": result["spark_per_sec"] >= per_sec}
        self.results.append(result)

    def _rate(self, seconds: Sequence[float]) -> int:
        return round(self.tasks / statistics.median(seconds))

    def table(self) -> str:
        """Return the figures as a Markdown table."""
        lines = [f"| {self.tasks:,} tasks | one pymongo process | Spark | ratio | target |"]
        lines.append("|---|---|---|---|---|")
        for one in self.results:
            plain = f"{one['pymongo_per_sec']:,}/s" if "ratio" in one else ""
            target = one.get("target", "") + ("" if one.get("met", True) else ", missed")
            lines.append(
                f"| {one['name']} | {plain} | {one['spark_per_sec']:,}/s "
                f"| {one.get('ratio', '')} | {target} |"
            )
        return "\n".join(lines)


def insert_all(queue: Queue[Any], made: Iterator[dict[str, Any]]) -> int:
    """Insert documents in chunks with one pymongo process; return their number."""
    prepare(queue)
    total = 0
    while chunk := list(islice(made, CHUNK)):
        core_of(queue).collections.tasks.insert_many(chunk, ordered=False)
        total += len(chunk)
    return total


def timed(work: Callable[[], Any]) -> float:
    """Return the time of a call in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
