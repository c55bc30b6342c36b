"""Measure the queue: ``python -m benchmarks``.

Each part prints a table. Figures are compared with baselines of the same run, because machines
differ and are noisy. ``docs/performance.md`` explains the parts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import anatomy, drain, enqueue, latency, memory, references, round_trips, stats
from benchmarks.database import BATCH, fill, fresh_database, server
from benchmarks.processes import run_processes

NAIVE_TASKS = 1500
DELAYED = 100_000
MAX_GROWTH = 1.1
MAX_STATS_MS = 100
DECIMALS_BELOW = 100
LIMITS_MS = {
    "warm": (4.5, 15.0),
    "warm, 100,000 tasks delayed": (4.5, 15.0),
    "cold": (7.0, 30.0),
}
"""Limits for p50 and p99 of the latency."""


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


def at_least(name: str, rate: float, *, baseline: str, base: float, least: float) -> Figure:
    """Compare a rate with a baseline. The target is the minimum ratio."""
    ratio = rate / base
    return Figure(name, rate, "/s", baseline, ratio, f"at least {least:g}", ratio >= least)


def below(name: str, milliseconds: float, *, limit: float, insert: float) -> Figure:
    """Compare a latency with a plain insert. The target is the maximum."""
    ratio = milliseconds / insert
    target = f"below {limit:g} ms"
    return Figure(name, milliseconds, "ms", "plain insert", ratio, target, milliseconds < limit)


def _drained(uri: str, tasks: int, kind: str, processes: int) -> float:
    """Fill a queue and drain it; return tasks per second."""
    with fresh_database(uri) as database:
        fill(database, tasks)
        if kind in {"naive", "ceiling"}:
            references.copy_to_bare(database)
        if kind == "naive":
            run = run_processes(references.naive_loop, 1, database, NAIVE_TASKS)
        elif kind == "ceiling":
            run = run_processes(references.ceiling, processes, database)
        elif kind == "threads":
            run = run_processes(drain.threads, processes, database)
        else:
            run = run_processes(drain.coroutines, processes, database, kind)
        return float(sum(run.results)) / run.took_sec


def measure_drain(uri: str, size: Size) -> list[Figure]:
    """Drain no-op tasks with workers, and alternately with the baselines."""
    kinds = [("naive", 1), ("ceiling", 2), ("threads", 1), ("threads", 2)]
    kinds += [("pymongo", 1), ("pymongo", 2), ("motor", 1)]
    rates: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    for _ in range(size.rounds):
        for kind in kinds:
            rates[kind].append(_drained(uri, size.tasks, *kind))
    rate = {kind: statistics.median(values) for kind, values in rates.items()}
    naive, ceiling = rate["naive", 1], rate["ceiling", 2]
    two = rate["threads", 2]
    return [
        Figure("naive loop", naive, "/s"),
        Figure("ceiling, 2 processes", ceiling, "/s"),
        at_least("Worker, 2 processes", two, baseline="ceiling", base=ceiling, least=0.8),
        at_least("Worker, 2 processes", two, baseline="naive loop", base=naive, least=35),
        Figure(
            "Worker, 1 process", rate["threads", 1], "/s", "ceiling", rate["threads", 1] / ceiling
        ),
        *[
            Figure(
                f"AsyncWorker ({name}), {count} process{'es' * (count > 1)}",
                value,
                "/s",
                "ceiling",
                value / ceiling,
            )
            for (name, count), value in rate.items()
            if name in {"pymongo", "motor"}
        ],
    ]


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
    """Enqueue into an idle queue, and measure how soon a worker starts the task."""
    with fresh_database(uri) as database:
        insert = latency.bare_insert_ms(database, size.samples)
    figures = [Figure("plain insert, p50", insert, "ms")]

    def add(name: str, kind: str, count: int, every_sec: float, **more: int) -> None:
        with fresh_database(uri) as database:
            found = latency.measure(database, kind=kind, count=count, every_sec=every_sec, **more)
        p50_below, p99_below = LIMITS_MS[name]
        for label, value, limit in (("p50", found.p50, p50_below), ("p99", found.p99, p99_below)):
            worker = "AsyncWorker" if kind == "coroutines" else "Worker"
            what = f"{name}, {worker}, {label}"
            figures.append(below(what, value, limit=limit, insert=insert))

    add("warm", "threads", size.samples, 0.05)
    add("warm", "coroutines", size.samples, 0.05)
    add("warm, 100,000 tasks delayed", "threads", size.samples, 0.05, delayed=DELAYED)
    add("cold", "threads", max(size.samples // 10, 10), 2.0)
    add("cold", "coroutines", max(size.samples // 10, 10), 2.0)
    return figures


def measure_contention(uri: str, size: Size) -> list[Figure]:
    """Drain one queue with more and more processes."""
    rates: dict[int, float] = {}
    figures = []
    for count in (1, 2, 4, 8):
        rates[count] = statistics.median(
            _drained(uri, size.tasks, "threads", count) for _ in range(size.rounds)
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
    """Measure what updates and indexes cost the server per task."""
    found = anatomy.microseconds(uri, max(size.tasks // BATCH, 4))
    minimal = min(found.values())
    return [Figure(name, value, "µs", "minimal", value / minimal) for name, value in found.items()]


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


class Part(NamedTuple):
    """A part of the benchmarks."""

    title: str
    measure: Callable[[str, Size], list[Figure]]


PARTS = {
    "drain": Part("no-op tasks processed per second", measure_drain),
    "enqueue": Part("tasks added per second", measure_enqueue),
    "latency": Part("time from enqueue to the start of the handler", measure_latency),
    "contention": Part("drain of one queue by 1, 2, 4 and 8 processes", measure_contention),
    "memory": Part("growth of a worker over many tasks", measure_memory),
    "round_trips": Part("commands that a worker sends", measure_round_trips),
    "anatomy": Part("server time per task, by updates and indexes", measure_anatomy),
    "stats": Part("time and examined keys of stats", measure_stats),
}


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
    options = parser.parse_args()
    size = Size(
        options.tasks,
        options.rounds,
        options.memory_tasks,
        options.samples,
        options.stats_tasks,
    )
    console = Console(stderr=options.json)
    found: dict[str, list[Figure]] = {}
    with server(options.uri) as uri:
        for name in options.only:
            with console.status(f"Measuring {name} ..."):
                found[name] = PARTS[name].measure(uri, size)
            show(console, f"{name}: {PARTS[name].title}", found[name])
    if options.json:
        print(
            json.dumps({name: [asdict(one) for one in figures] for name, figures in found.items()})
        )


if __name__ == "__main__":
    main()
