"""Measure how much slower a pop is with a large backlog: ``python -m benchmarks.flatness``.

It fills a small and a large queue with equal shares of ready, delayed, done and failed tasks, and
times single pops of both alternately. The result is a ratio within one run, because machines differ
and are noisy. It also counts the index keys and the documents that each hot operation examines in
the large queue, when nothing is due, expired or old.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from benchmarks.database import prepare
from microqueue import Queue, QueueSettings, Sweeper
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.new_task import NewTask
from microqueue.operations import poll
from microqueue.operations.enqueue import new_document
from microqueue.schedules import Firer

PAYLOAD = {"text": "x" * 230}
CHUNK = 5000


def fill(queue: Queue[Any], total: int) -> None:
    """Insert a quarter each of ready, delayed, done and failed tasks."""
    prepare(queue)
    now = queue.now() - timedelta(hours=1)  # What is fresh is read once more by a batch claim.
    settings = QueueSettings()
    new = NewTask(payload=PAYLOAD)
    for start in range(0, total, CHUNK):
        documents = []
        for n in range(start, min(start + CHUNK, total)):
            document = new_document(
                new,
                queue=queue.name,
                payload=PAYLOAD,
                settings=settings,
                now=now,
                position=n,
            )
            due = now + timedelta(days=1, seconds=n)
            ended = {"attempts": 1, "finished_at": now}
            changes: list[dict[str, Any]] = [
                {},
                {"next_retry_at": due, "deadline_at": due, "attempts": 1},
                {**ended, "status": "done", "deadline_at": now},
                {**ended, "status": "failed", "error": {"message": "x", "code": "c", "at": now}},
            ]
            document |= changes[n % len(changes)]
            documents.append(document)
        core_of(queue).collections.tasks.insert_many(documents, ordered=False)


def timed_pop_ms(queue: Queue[Any]) -> float:
    """Return the time of one pop. Settling the task is not measured."""
    started = time.perf_counter()
    task = queue.pop()
    took = time.perf_counter() - started
    assert task is not None
    queue.mark_done(task)
    return took * 1000


@dataclass(frozen=True)
class Hot:
    """An operation that is hot.

    Attributes:
        run: The operation, with what ``prepared`` returned.
        prepared: What it needs; not counted.
        most: How many keys it may examine, and how many documents.
    """

    run: Callable[[Queue[Any], Any], Any]
    prepared: Callable[[Queue[Any]], Any] = lambda _queue: None
    most: int = 2


def _with_key(queue: Queue[Any]) -> None:
    queue.enqueue({}, dedupe_key="taken", on_duplicate="return")


def _with_schedules(queue: Queue[Any]) -> None:
    for number in range(SCHEDULES):
        queue.schedules.put(f"schedule {number}", every=timedelta(days=365), payload={})


BATCH = 10
SCHEDULES = 10
HOT: dict[str, Hot] = {
    "pop": Hot(lambda queue, _: queue.pop()),
    # A key of "ready" per task, and for the update a key to find each id and one to pass it.
    "pop_many(10)": Hot(lambda queue, _: queue.pop_many(BATCH), most=3 * BATCH + 3),
    "mark_done": Hot(lambda queue, task: queue.mark_done(task), lambda queue: queue.pop()),
    "touch": Hot(lambda queue, task: queue.touch(task), lambda queue: queue.pop()),
    "promote_due": Hot(lambda queue, _: Sweeper(queue).promote_due()),
    "reclaim_stuck": Hot(lambda queue, _: Sweeper(queue).reclaim_stuck()),
    "bury_exhausted": Hot(lambda queue, _: Sweeper(queue).bury_exhausted()),
    "expire_undelivered": Hot(lambda queue, _: Sweeper(queue).expire_undelivered()),
    # A key is that of the stored retention.
    "purge_finished": Hot(lambda queue, _: Sweeper(queue).purge_finished(), most=3),
    "fire schedules, none due": Hot(
        lambda queue, _: core_of(queue).run(Firer(core_of(queue)).fire()), _with_schedules
    ),
    # A ready task, the next delayed one, and the next schedule.
    "poll": Hot(
        lambda queue, _: core_of(queue).run(core_of(queue).poll([queue.name])),
        _with_schedules,
        most=3,
    ),
    "next due": Hot(lambda queue, _: core_of(queue).run(poll.next_due(queue.name))),
    # It looks for the task by its id and by its key, confirms it, and reads it.
    "enqueue, key taken": Hot(lambda queue, _: _with_key(queue), _with_key, most=4),
    "dead_letters.list, first page": Hot(lambda queue, _: queue.dead_letters.list(), most=51),
    "peek(10)": Hot(lambda queue, _: queue.peek(BATCH), most=BATCH),
    # It sorts all tasks that workers have.
    "peek(10), processing": Hot(
        lambda queue, _: queue.peek(BATCH, status="processing"), most=2 * BATCH
    ),
}


@dataclass(frozen=True)
class Examined:
    """What an operation examines."""

    keys: int
    documents: int
    plans: frozenset[str]


def examined(queue: Queue[Any], hot: Hot) -> Examined:
    """Run an operation, and count what it examines in any collection, by the server's profiler."""
    database = core_of(queue).collections.database
    prepared = hot.prepared(queue)
    database.command("profile", 0)
    database["system.profile"].drop()
    database.command("profile", 2)
    try:
        hot.run(queue, prepared)
    finally:
        database.command("profile", 0)
    entries = list(database["system.profile"].find({"ns": {"$not": {"$regex": r"\.system\."}}}))
    database["system.profile"].drop()
    if not entries:
        raise RuntimeError("the profiler saw nothing")
    return Examined(
        sum(entry.get("keysExamined", 0) for entry in entries),
        sum(entry.get("docsExamined", 0) for entry in entries),
        frozenset(str(entry["planSummary"]) for entry in entries if "planSummary" in entry),
    )


def main() -> None:
    """Measure and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uri", help="the MongoDB server; default: an embedded one")
    parser.add_argument("--small", type=int, default=1_000, help="tasks in the small queue")
    parser.add_argument("--large", type=int, default=1_000_000, help="tasks in the large queue")
    parser.add_argument("--pops", type=int, default=200, help="measured pops per queue")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.pops > options.small // 4:
        parser.error("--pops: a quarter of the small queue is ready; give at most that")
    server = None if options.uri else EmbeddedServer.start()
    uri = options.uri or (server.uri if server else "")
    try:
        with (
            Queue[Any].from_uri(uri, "bench", collection="bench_small") as small,
            Queue[Any].from_uri(uri, "bench", collection="bench_large") as large,
        ):
            for queue, total in ((small, options.small), (large, options.large)):
                core_of(queue).collections.tasks.drop()
                fill(queue, total)
            core_of(small).collections.client.admin.command(
                "fsync"
            )  # Finish the writes of the filling.
            times: dict[str, list[float]] = {"small": [], "large": []}
            for _ in range(options.pops):
                times["small"].append(timed_pop_ms(small))
                times["large"].append(timed_pop_ms(large))
            counts = {name: examined(large, hot) for name, hot in HOT.items()}
            for number in range(SCHEDULES):
                large.schedules.remove(f"schedule {number}")
            for queue in (small, large):
                core_of(queue).collections.tasks.drop()
    finally:
        if server is not None:
            server.stop()
    medians = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "small_tasks": options.small,
        "large_tasks": options.large,
        "small_pop_ms": round(medians["small"], 3),
        "large_pop_ms": round(medians["large"], 3),
        "ratio": round(medians["large"] / medians["small"], 3),
        "keys_examined": {name: one.keys for name, one in counts.items()},
        "documents_examined": {name: one.documents for name, one in counts.items()},
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"pop with {options.small:>9,} tasks: {result['small_pop_ms']} ms (median)")
    print(f"pop with {options.large:>9,} tasks: {result['large_pop_ms']} ms")
    print(f"ratio: {result['ratio']}")
    for name, one in counts.items():
        print(f"{name}: {one.keys} keys and {one.documents} documents examined")


if __name__ == "__main__":
    main()
