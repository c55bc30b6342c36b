"""Measure how much slower a pop is with a large backlog: ``python -m benchmarks.flatness``.

It fills a small and a large queue with equal shares of ready, delayed and done tasks, and times
single pops of both alternately. The result is a ratio within one run, because machines differ and
are noisy. It also counts the index keys that a pop and each job of a sweep examine in the large
queue, when nothing is due, expired or old.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from benchmarks.database import prepare
from microqueue import Queue, QueueSettings, Sweeper
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.new_task import NewTask
from microqueue.operations.enqueue import new_document

PAYLOAD = {"text": "x" * 230}
CHUNK = 5000


def fill(queue: Queue[Any], total: int) -> None:
    """Insert a third each of ready, delayed and done tasks."""
    prepare(queue)
    now = queue.now()
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
            if n % 3 == 1:
                due = now + timedelta(days=1, seconds=n)
                document |= {"next_retry_at": due, "deadline_at": due, "attempts": 1}
            elif n % 3 == 2:  # noqa: PLR2004 (the last third)
                document |= {"status": "done", "finished_at": now, "deadline_at": now}
                document |= {"attempts": 1}
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


HOT: dict[str, Callable[[Queue[Any]], Any]] = {
    "pop": lambda queue: queue.pop(),
    "promote_due": lambda queue: Sweeper(queue).promote_due(),
    "reclaim_stuck": lambda queue: Sweeper(queue).reclaim_stuck(),
    "bury_exhausted": lambda queue: Sweeper(queue).bury_exhausted(),
    "expire_undelivered": lambda queue: Sweeper(queue).expire_undelivered(),
    "purge_finished": lambda queue: Sweeper(queue).purge_finished(),
}


def keys_examined(queue: Queue[Any]) -> dict[str, int]:
    """Count the keys that each hot operation examines, by the server's profiler."""
    collections = core_of(queue).collections
    database, name = collections.database, f"{collections.database.name}.{collections.name}"
    found = {}
    for operation, run in HOT.items():
        database.command("profile", 0)
        database["system.profile"].drop()
        database.command("profile", 2)
        run(queue)
        database.command("profile", 0)
        entries = database["system.profile"].find({"ns": name})
        found[operation] = sum(entry.get("keysExamined", 0) for entry in entries)
    return found


def main() -> None:
    """Measure and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uri", help="the MongoDB server; default: an embedded one")
    parser.add_argument("--small", type=int, default=1_000, help="tasks in the small queue")
    parser.add_argument("--large", type=int, default=1_000_000, help="tasks in the large queue")
    parser.add_argument("--pops", type=int, default=300, help="measured pops per queue")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
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
            keys = keys_examined(large)
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
        "keys_examined": keys,
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"pop with {options.small:>9,} tasks: {result['small_pop_ms']} ms (median)")
    print(f"pop with {options.large:>9,} tasks: {result['large_pop_ms']} ms")
    print(f"ratio: {result['ratio']}")
    for operation, count in keys.items():
        print(f"{operation}: {count} keys examined")


if __name__ == "__main__":
    main()
