"""Measure the queue: ``python -m benchmarks``.

Each part prints a table. Figures are compared with baselines of the same run, because machines
differ and are noisy. ``docs/performance.md`` explains the parts.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import (
    anatomy,
    brokers,
    drain,
    enqueue,
    latency,
    memory,
    references,
    results,
    round_trips,
    stats,
    topics,
)
from benchmarks.brokers import KOMBU_MONGODB, MICROQUEUE
from benchmarks.database import BATCH, fill, fresh_database, server
from benchmarks.peers import report as peers
from benchmarks.peers import roster
from benchmarks.processes import run_processes
from benchmarks.processor import server_pid

NAIVE_TASKS = 1500
DELAYED = 100_000
MAX_GROWTH = 1.1
MAX_STATS_MS = 100
MAX_RESULT_MS = 10
MIN_CELERY_DRAIN = 3
MAX_CELERY_PICK_UP_MS = 10
DECIMALS_BELOW = 100
DRAIN_NAMES = {
    "ceiling": "ceiling",
    "threads": "Worker",
    "pymongo": "AsyncWorker (pymongo)",
    "motor": "AsyncWorker (motor)",
}
MAX_INSERTS = 2.5
"""Limit for p50 of the latency: plain inserts."""
MAX_P99_MS = {"warm": 8.0, "warm, 100,000 tasks delayed": 8.0, "cold": 30.0}


@dataclass(frozen=True)
class Figure:
    """One measured value, its ratio to a baseline, and its target."""

    name: str
    value: float
    unit: str
    baseline: str = ""
    ratio: float | None = None
    target: str = ""
    met: bool | None = None


@dataclass(frozen=True)
class Size:
    """The amounts to measure with."""

    tasks: int
    rounds: int
    memory_tasks: int
    samples: int
    stats_tasks: int
    peer_tasks: tuple[int, ...]


@dataclass(frozen=True)
class Drained:
    """How fast a queue was drained, and the processor time per task in microseconds."""

    rate: float
    clients: float
    mongod: float | None
    """Of the server; None if it is not a ``mongod`` on this machine."""


def at_least(name: str, rate: float, *, baseline: str, base: float, least: float) -> Figure:
    """Compare a rate with a baseline. The target is the minimum ratio."""
    ratio = rate / base
    return Figure(name, rate, "/s", baseline, ratio, f"at least {least:g}", ratio >= least)


def picked_up(name: str, found: latency.Latency, *, insert: float, max_p99: float) -> list[Figure]:
    """Compare a latency with a plain insert at the same pace. The targets are maxima."""
    return [
        _in_inserts(name, found, "plain insert at this pace", insert),
        Figure(
            f"{name}, p99",
            found.p99,
            "ms",
            target=f"below {max_p99:g} ms",
            met=found.p99 < max_p99,
        ),
    ]


def _in_inserts(name: str, found: latency.Latency, baseline: str, insert: float) -> Figure:
    """Compare the median of a latency with that of an insert."""
    ratio, target = found.p50 / insert, f"at most {MAX_INSERTS:g}"
    return Figure(f"{name}, p50", found.p50, "ms", baseline, ratio, target, ratio <= MAX_INSERTS)


def _drained(uri: str, tasks: int, kind: str, processes: int) -> Drained:
    """Fill a queue and drain it."""
    pid = server_pid(uri)
    with fresh_database(uri) as database:
        fill(database, tasks)
        if kind in {"naive", "ceiling"}:
            references.copy_to_bare(database)
        functions: dict[str, tuple[Any, ...]] = {
            "naive": (references.naive_loop, NAIVE_TASKS),
            "ceiling": (references.ceiling,),
            "threads": (drain.threads,),
        }
        function, *arguments = functions.get(kind, (drain.coroutines, kind))
        run = run_processes(function, processes, database, *arguments, server_pid=pid)
    done, mongod = sum(run.results), run.server_sec
    return Drained(
        done / run.took_sec,
        run.client_sec / done * 1e6,
        None if mongod is None else mongod / done * 1e6,
    )


def measure_drain(uri: str, size: Size) -> list[Figure]:
    """Drain no-op tasks with workers, and alternately with the baselines."""
    kinds = [("naive", 1), ("ceiling", 2), ("threads", 1), ("threads", 2)]
    kinds += [("pymongo", 1), ("pymongo", 2), ("motor", 1)]
    drains: dict[tuple[str, int], list[Drained]] = {kind: [] for kind in kinds}
    for _ in range(size.rounds):
        for kind in kinds:
            drains[kind].append(_drained(uri, size.tasks, *kind))
    rate = {kind: statistics.median(one.rate for one in found) for kind, found in drains.items()}
    naive, ceiling = rate["naive", 1], rate["ceiling", 2]
    two = rate["threads", 2]
    names = {
        (kind, count): f"{DRAIN_NAMES[kind]}, {count} process{'es' * (count > 1)}"
        for kind, count in kinds
        if kind in DRAIN_NAMES
    }
    return [
        Figure("naive loop", naive, "/s"),
        Figure("ceiling, 2 processes", ceiling, "/s"),
        at_least("Worker, 2 processes", two, baseline="ceiling", base=ceiling, least=0.75),
        at_least("Worker, 2 processes", two, baseline="naive loop", base=naive, least=35),
        *[
            Figure(name, rate[kind], "/s", "ceiling", rate[kind] / ceiling)
            for kind, name in names.items()
            if kind not in {("ceiling", 2), ("threads", 2)}
        ],
        *[
            one
            for kind, name in names.items()
            for one in processor_times(name, drains[kind], drains["ceiling", 2])
        ],
    ]


def processor_times(name: str, drains: list[Drained], ceiling: list[Drained]) -> list[Figure]:
    """Return the medians of the processor time per task: of ``mongod``, if known, and clients."""

    def median(whose: str, found: list[Drained]) -> float | None:
        values = [value for one in found if (value := getattr(one, whose)) is not None]
        return statistics.median(values) if values else None

    figures = []
    for whose in ("mongod", "clients"):
        value, base = median(whose, drains), median(whose, ceiling)
        if value is not None and base is not None:
            what = f"{name}, {whose} per task"
            ratio = None if drains is ceiling else value / base
            figures.append(Figure(what, value, "µs", "" if ratio is None else "ceiling", ratio))
    return figures


def measure_enqueue(uri: str, size: Size) -> list[Figure]:
    """Enqueue tasks, and alternately insert plain documents."""
    with fresh_database(uri) as database:
        many = run_processes(enqueue.many, 1, database, 10_000, size.rounds).results[0]
    with fresh_database(uri) as database:
        single = run_processes(enqueue.single, 1, database, size.samples * 2).results[0]
    return [
        at_least(
            "enqueue_many", many["queue"], baseline="insert_many", base=many["bare"], least=0.7
        ),
        at_least("enqueue", single["queue"], baseline="insert_one", base=single["bare"], least=0.8),
    ]


def measure_latency(uri: str, size: Size) -> list[Figure]:
    """Enqueue into an idle queue, and measure how soon a worker starts the task, and by steps."""
    few = max(size.samples // 10, 10)
    inserts: dict[float, float] = {}
    with fresh_database(uri) as database:
        for every_sec, count in ((0.0, size.samples), (0.05, size.samples), (2.0, few)):
            inserts[every_sec] = latency.bare_insert_ms(database, count, every_sec=every_sec)
    figures = [
        Figure("plain insert, one after the other, p50", inserts[0.0], "ms"),
        Figure("plain insert, one every 50 ms, p50", inserts[0.05], "ms"),
        Figure("plain insert, one every 2 s, p50", inserts[2.0], "ms"),
    ]

    def add(name: str, kind: str, count: int, every_sec: float, **more: int) -> None:
        with fresh_database(uri) as database:
            found = latency.measure(database, kind=kind, count=count, every_sec=every_sec, **more)
        worker = "AsyncWorker" if kind == "coroutines" else "Worker"
        insert, max_p99 = inserts[every_sec], MAX_P99_MS[name]
        figures.extend(picked_up(f"{name}, {worker}", found, insert=insert, max_p99=max_p99))
        if name == "warm" and kind == "threads":
            baseline = "plain insert, one after the other"
            figures.append(_in_inserts(f"{name}, {worker}", found, baseline, inserts[0.0]))

    add("warm", "threads", size.samples, 0.05)
    add("warm", "coroutines", size.samples, 0.05)
    add("warm, 100,000 tasks delayed", "threads", size.samples, 0.05, delayed=DELAYED)
    add("cold", "threads", few, 2.0)
    add("cold", "coroutines", few, 2.0)
    for name, count, every_sec in (("warm", size.samples, 0.05), ("cold", few, 2.0)):
        with fresh_database(uri) as database:
            found = latency.measure_steps(database, count=count, every_sec=every_sec)
        figures += _steps(name, found)
    return figures


def _steps(name: str, found: latency.Steps) -> list[Figure]:
    """Return the steps of one pick-up, beside the whole."""
    baseline, whole = "call of enqueue to handler", found.in_all
    steps = {
        "call of enqueue to its return": found.enqueue,
        "call of enqueue to claim": found.until_claim,
        "change stream to claim": found.wake_up,
        "commands of the claim": found.claim,
        "end of claim to handler": found.hand_over,
    }
    return [
        Figure(f"{name}, Worker, {baseline}, p50", whole, "ms"),
        *[
            Figure(f"{name}, Worker, {what}, p50", took, "ms", baseline, took / whole)
            for what, took in steps.items()
            if took is not None
        ],
        Figure(f"{name}, Worker, reported by the change stream", found.woken * 100, "%"),
    ]


def measure_contention(uri: str, size: Size) -> list[Figure]:
    """Drain one queue with more and more processes."""
    rates: dict[int, float] = {}
    figures = []
    for count in (1, 2, 4, 8):
        rates[count] = statistics.median(
            _drained(uri, size.tasks, "threads", count).rate for _ in range(size.rounds)
        )
        what, best = f"Worker, {count} process{'es' * (count > 1)}", max(rates.values())
        figures.append(at_least(what, rates[count], baseline="best so far", base=best, least=0.8))
    return figures


def measure_memory(uri: str, size: Size) -> list[Figure]:
    """Compare the memory of a worker after many tasks with that after a tenth of them."""
    with fresh_database(uri) as database:
        fill(database, size.memory_tasks)
        marks = run_processes(memory.growth, 1, database, size.memory_tasks).results[0]
    tenth = f"after {size.memory_tasks // 10:,}"
    what = f"memory after {size.memory_tasks:,} tasks"
    ratio = marks["late"] / marks["early"]
    return [
        Figure(
            what,
            marks["late"],
            "MB",
            tenth,
            ratio,
            f"at most {MAX_GROWTH:g}",
            ratio <= MAX_GROWTH,
        )
    ]


def measure_round_trips(uri: str, size: Size) -> list[Figure]:
    """Count the commands that a worker sends."""
    with fresh_database(uri) as database:
        fill(database, size.tasks)
        counts = run_processes(round_trips.per_thousand, 1, database).results[0]
    return [
        Figure(f"commands per 1,000 tasks: {name}", count, "")
        for name, count in sorted(counts.items(), key=lambda item: -item[1])
    ]


def measure_anatomy(uri: str, size: Size) -> list[Figure]:
    """Measure what updates and indexes cost per task: the elapsed time, and the server's."""
    found = anatomy.costs(uri, max(size.tasks // BATCH, 4))
    elapsed = {name: cost.elapsed for name, cost in found.items()}
    mongod = {
        f"{name}, mongod per task": cost.server
        for name, cost in found.items()
        if cost.server is not None
    }
    return [
        Figure(name, value, "µs", "minimal", value / min(values.values()))
        for values in (elapsed, mongod)
        for name, value in values.items()
    ]


def measure_stats(uri: str, size: Size) -> list[Figure]:
    """Read the stats of a large collection, with bounded and with exact counts."""
    with fresh_database(uri) as database:
        found = stats.costs(database, size.stats_tasks)
    exact = found["queue.stats(exact=True)"].milliseconds
    figures = []
    for name, cost in found.items():
        took = cost.milliseconds
        target = "" if "exact" in name else f"below {MAX_STATS_MS:g} ms"
        met = took < MAX_STATS_MS if target else None
        figures.append(Figure(name, took, "ms", "exact=True", took / exact, target, met))
        figures.append(Figure(f"{name}, keys examined", cost.keys, ""))
    return figures


def measure_results(uri: str, size: Size) -> list[Figure]:
    """Settle tasks in one process, and measure how soon another one has their results."""
    figures: list[Figure] = []
    for kind, waiters in (("threads", 1), ("coroutines", 1), ("threads", 500), ("coroutines", 500)):
        with fresh_database(uri) as database:
            found = results.measure(database, kind=kind, count=size.samples, others=waiters - 1)
        for label, value in (("p50", found.p50), ("p99", found.p99)):
            name = f"mark_done to result, {kind}, waiters: {waiters}, {label}"
            ratio = value / found.settle_p50
            target, met = "", None
            if label == "p50":
                target, met = f"below {MAX_RESULT_MS:g} ms", value < MAX_RESULT_MS
            figures.append(Figure(name, value, "ms", "mark_done, p50", ratio, target, met))
    return figures


def measure_topics(uri: str, size: Size) -> list[Figure]:
    """Publish to topics with more and more bound queues, and measure the delivery."""
    with fresh_database(uri) as database:
        plain, publish = topics.publish_ms(database, size.samples)
    with fresh_database(uri) as database:
        one = topics.delivery_ms(database, size.samples, 1)
    with fresh_database(uri) as database:
        ten = topics.delivery_ms(database, size.samples, 10)
    return [
        Figure("insert into a capped collection, p50", plain, "ms"),
        *[
            Figure(f"publish, bound queues: {bound}, p50", took, "ms", "insert", took / plain)
            for bound, took in publish.items()
        ],
        Figure("publish to delivery, 1 subscriber, p50", one, "ms", "insert", one / plain),
        Figure("publish to delivery, 10 subscribers, p50", ten, "ms", "insert", ten / plain),
    ]


def measure_celery(uri: str, size: Size) -> list[Figure]:
    """Publish, drain and pick up tasks of Celery, on each broker alternately."""
    if brokers.missing_celery() is not None:
        return []
    from benchmarks import celery_bench  # noqa: PLC0415 (Celery is optional)

    with brokers.brokers(uri) as found:
        rates = celery_bench.measure_rates(found, _celery_tasks(size), size.rounds)
        waits = celery_bench.measure_pick_up(found, _celery_samples(size))
    drain = {name: statistics.median(one.drain) for name, one in rates.items()}
    publish = {name: statistics.median(one.publish) for name, one in rates.items()}
    p50 = {name: celery_bench.percentile(values, 50) for name, values in waits.items()}
    p99 = {name: celery_bench.percentile(values, 99) for name, values in waits.items()}

    def beside(what: str, values: dict[str, float], unit: str) -> list[Figure]:
        base = values[KOMBU_MONGODB]
        return [
            Figure(f"{what}, {name}", value, unit, KOMBU_MONGODB, value / base)
            for name, value in values.items()
        ]

    figures = beside("drain", drain, "/s") + beside("publish", publish, "/s")
    figures += beside("pick-up p50", p50, "ms") + beside("pick-up p99", p99, "ms")
    reached = drain[MICROQUEUE] / drain[KOMBU_MONGODB] >= MIN_CELERY_DRAIN
    prompt = p50[MICROQUEUE] < MAX_CELERY_PICK_UP_MS
    targets = {
        f"drain, {MICROQUEUE}": (f"at least {MIN_CELERY_DRAIN}", reached),
        f"pick-up p50, {MICROQUEUE}": (f"below {MAX_CELERY_PICK_UP_MS} ms", prompt),
    }
    return [
        replace(one, target=targets[one.name][0], met=targets[one.name][1])
        if one.name in targets
        else one
        for one in figures
    ]


def describe_celery(uri: str, size: Size) -> list[str]:
    """Return what is measured: the versions, the settings and the amounts."""
    if (reason := brokers.missing_celery()) is not None:
        return [f"Not measured: {reason}. To install it: {brokers.INSTALL}"]
    from benchmarks import celery_bench  # noqa: PLC0415 (Celery is optional)

    amounts = f"{_celery_tasks(size):,} tasks per drain, the median of {size.rounds}; "
    amounts += f"{_celery_samples(size)} samples per pick-up"
    return [*brokers.describe(uri), celery_bench.SETTINGS, amounts]


def _celery_tasks(size: Size) -> int:
    return max(size.tasks // 10, 2)


def _celery_samples(size: Size) -> int:
    return max(size.samples // 2, 2)


def measure_peers(uri: str, size: Size) -> list[peers.PeerFigure]:
    """Enqueue, drain and pick up tasks with each peer that is installed, alternately."""
    return peers.measure(uri, size.peer_tasks, size.rounds, size.samples)


def describe_peers(uri: str, size: Size) -> list[str]:
    """Return what is measured: the versions, the settings and the amounts."""
    amounts = f"The median of {size.rounds} rounds; {size.samples} samples per pick-up"
    return [*roster.describe(uri), amounts]


def _no_notes(_uri: str, _size: Size) -> list[str]:
    return []


def show(console: Console, title: str, figures: list[Figure]) -> None:
    """Print the figures of one part as a table."""
    table = Table(title=title, title_justify="left", min_width=100)
    for name in ("figure", "value", "ratio", "baseline", "target", ""):
        numeric = name in {"value", "ratio"}
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for one in figures:
        value = f"{one.value:,.0f}" if one.value >= DECIMALS_BELOW else f"{one.value:.2f}"
        ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
        met = "" if one.met is None else ("met" if one.met else "MISSED")
        table.add_row(one.name, f"{value} {one.unit}", ratio, one.baseline, one.target, met)
    console.print(table)


class Part(NamedTuple):
    """A part of the benchmarks."""

    title: str
    measure: Callable[[str, Size], list[Any]]
    describe: Callable[[str, Size], list[str]] = _no_notes
    """What to print above the table."""
    show: Callable[[Console, str, list[Any]], None] = show


PARTS = {
    "drain": Part("no-op tasks processed per second", measure_drain),
    "enqueue": Part("tasks added per second", measure_enqueue),
    "latency": Part("time from enqueue to the start of the handler", measure_latency),
    "contention": Part("drain of one queue by 1, 2, 4 and 8 processes", measure_contention),
    "memory": Part("growth of a worker over many tasks", measure_memory),
    "round_trips": Part("commands that a worker sends", measure_round_trips),
    "anatomy": Part(
        "time per task, and that of the server, by updates and indexes", measure_anatomy
    ),
    "stats": Part("time and examined keys of stats", measure_stats),
    "results": Part("time from a settlement until a waiting call returns", measure_results),
    "topics": Part("time of a publish, and until subscribers have it", measure_topics),
    "celery": Part(
        "Celery on microqueue, beside Kombu's own transports", measure_celery, describe_celery
    ),
    "peers": Part("microqueue beside other task queues", measure_peers, describe_peers, peers.show),
}


def main() -> None:
    """Run the selected parts and print their figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure the queue, compared with plain pymongo in the same run.",
        epilog="parts:\n" + "\n".join(f"  {name:<12} {PARTS[name].title}" for name in PARTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--uri", help="the server; default: MICROQUEUE_URI, or an embedded one")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help="the parts to measure; default: all",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; tables go to stderr")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--tasks", type=int, default=30_000, help="tasks per drain (%(default)s)")
    sizes.add_argument(
        "--rounds", type=int, default=3, help="rounds, of which the median counts (%(default)s)"
    )
    sizes.add_argument(
        "--samples", type=int, default=200, help="samples of a latency (%(default)s)"
    )
    sizes.add_argument(
        "--memory-tasks", type=int, default=200_000, help="tasks of the part memory (%(default)s)"
    )
    sizes.add_argument(
        "--stats-tasks", type=int, default=1_000_000, help="tasks of the part stats (%(default)s)"
    )
    sizes.add_argument(
        "--peer-tasks",
        type=int,
        nargs="+",
        default=[10_000, 50_000],
        metavar="TASKS",
        help="tasks per drain of the part peers (10000 and 50000)",
    )
    options = parser.parse_args()
    size = Size(
        options.tasks,
        options.rounds,
        options.memory_tasks,
        options.samples,
        options.stats_tasks,
        tuple(options.peer_tasks),
    )
    console = Console(stderr=options.json)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that all processes are ended.
    found: dict[str, list[Any]] = {}
    with server(options.uri) as uri:
        for name in options.only:
            for line in PARTS[name].describe(uri, size):
                console.print(line)
            with console.status(f"Measuring {name} ..."):
                found[name] = PARTS[name].measure(uri, size)
            PARTS[name].show(console, f"{name}: {PARTS[name].title}", found[name])
    if options.json:
        print(
            json.dumps({name: [asdict(one) for one in figures] for name, figures in found.items()})
        )


if __name__ == "__main__":
    main()
