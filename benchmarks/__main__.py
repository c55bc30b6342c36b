"""Measure the queue: ``python -m benchmarks``.

Prints one table, with ratios against references of the same run: machines differ, and are
noisy, but then both sides are. ``--json`` prints the same for programs; ``--only drain``
measures a part; ``--uri`` takes a server of yours instead of the embedded one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks import anatomy, drain, enqueue, latency, memory, references, round_trips, stats
from benchmarks.place import BATCH, fill, fresh_place, server
from benchmarks.processes import run_processes

NAIVE_TASKS = 1500
DELAYED = 100_000
MOST_GROWTH = 1.1
WHOLE_FROM = 100
STATS_MS = 100
LIMITS_MS = {
    "warm": (4.5, 15.0),
    "warm, 100,000 delayed": (4.5, 15.0),
    "cold": (7.0, 30.0),
}
"""For p50 and p99 of a pick-up."""


@dataclass(frozen=True)
class Line:
    """One measured value: what it is compared with, and what the comparison should give."""

    what: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    target: str = ""
    kept: bool | None = None


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    tasks: int
    rounds: int
    memory_tasks: int
    samples: int
    stats_tasks: int


def at_least(what: str, rate: float, *, against: str, base: float, least: float) -> Line:
    """Compare a rate with one that should be reached to a share."""
    ratio = rate / base
    return Line(what, rate, "/s", against, ratio, f"at least {least:g}", ratio >= least)


def below(what: str, milliseconds: float, *, most: float, insert: float) -> Line:
    """Compare a latency with its limit, and with that of a bare insert."""
    ratio = milliseconds / insert
    limit = f"below {most:g} ms"
    return Line(what, milliseconds, "ms", "bare insert", ratio, limit, milliseconds < most)


def _drained(uri: str, tasks: int, kind: str, processes: int) -> float:
    """Fill a queue, drain it, and give tasks per second."""
    with fresh_place(uri) as place:
        fill(place, tasks)
        if kind in {"naive", "ceiling"}:
            references.copy_to_bare(place)
        if kind == "naive":
            run = run_processes(references.naive_loop, 1, place, NAIVE_TASKS)
        elif kind == "ceiling":
            run = run_processes(references.ceiling, processes, place)
        elif kind == "threads":
            run = run_processes(drain.threads, processes, place)
        else:
            run = run_processes(drain.coroutines, processes, place, kind)
        return float(sum(run.results)) / run.took_sec


def measure_drain(uri: str, size: Size) -> list[Line]:
    """Drain no-op tasks; the references are measured in turns with the workers."""
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
        Line("naive loop", naive, "/s"),
        Line("ceiling, 2 processes", ceiling, "/s"),
        at_least("Worker, 2 processes", two, against="ceiling", base=ceiling, least=0.8),
        at_least("Worker, 2 processes", two, against="naive loop", base=naive, least=35),
        Line(
            "Worker, 1 process", rate["threads", 1], "/s", "ceiling", rate["threads", 1] / ceiling
        ),
        *[
            Line(
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


def measure_enqueue(uri: str, size: Size) -> list[Line]:
    """Enqueue many and single tasks beside bare inserts."""
    with fresh_place(uri) as place:
        many = run_processes(enqueue.many, 1, place, 10_000, size.rounds).results[0]
    with fresh_place(uri) as place:
        single = run_processes(enqueue.single, 1, place, size.samples * 2).results[0]
    return [
        at_least(
            "enqueue_many", many["queue"], against="insert_many", base=many["bare"], least=0.7
        ),
        at_least("enqueue", single["queue"], against="insert_one", base=single["bare"], least=0.8),
    ]


def measure_latency(uri: str, size: Size) -> list[Line]:
    """Measure how soon a task is picked up from an idle queue."""
    with fresh_place(uri) as place:
        insert = latency.bare_insert_ms(place, size.samples)
    lines = [Line("bare insert, p50", insert, "ms")]

    def add(name: str, kind: str, count: int, every_sec: float, **more: int) -> None:
        with fresh_place(uri) as place:
            found = latency.measure(place, kind=kind, count=count, every_sec=every_sec, **more)
        p50_below, p99_below = LIMITS_MS[name]
        for label, value, most in (("p50", found.p50, p50_below), ("p99", found.p99, p99_below)):
            what = f"{name}, {kind}, {label}"
            lines.append(below(what, value, most=most, insert=insert))

    add("warm", "threads", size.samples, 0.05)
    add("warm", "coroutines", size.samples, 0.05)
    add("warm, 100,000 delayed", "threads", size.samples, 0.05, delayed=DELAYED)
    add("cold", "threads", max(size.samples // 10, 10), 2.0)
    add("cold", "coroutines", max(size.samples // 10, 10), 2.0)
    return lines


def measure_contention(uri: str, size: Size) -> list[Line]:
    """Drain one queue with more and more processes."""
    rates: dict[int, float] = {}
    lines = []
    for count in (1, 2, 4, 8):
        rates[count] = statistics.median(
            _drained(uri, size.tasks, "threads", count) for _ in range(size.rounds)
        )
        what, best = f"Worker, {count} process{'es' * (count > 1)}", max(rates.values())
        lines.append(at_least(what, rates[count], against="best so far", base=best, least=0.8))
    return lines


def measure_memory(uri: str, size: Size) -> list[Line]:
    """See whether a worker grows with the tasks that it has handled."""
    with fresh_place(uri) as place:
        fill(place, size.memory_tasks)
        marks = run_processes(memory.growth, 1, place, size.memory_tasks).results[0]
    tenth = f"after {size.memory_tasks // 10:,}"
    what = f"memory after {size.memory_tasks:,} tasks"
    ratio = marks["late"] / marks["early"]
    return [
        Line(
            what,
            marks["late"],
            "MB",
            tenth,
            ratio,
            f"at most {MOST_GROWTH:g}",
            ratio <= MOST_GROWTH,
        )
    ]


def measure_round_trips(uri: str, size: Size) -> list[Line]:
    """Count what a worker sends."""
    with fresh_place(uri) as place:
        fill(place, size.tasks)
        counts = run_processes(round_trips.per_thousand, 1, place).results[0]
    return [
        Line(f"commands per 1,000 tasks: {name}", count, "")
        for name, count in sorted(counts.items(), key=lambda item: -item[1])
    ]


def measure_anatomy(uri: str, size: Size) -> list[Line]:
    """Take apart what a drained task costs the server."""
    found = anatomy.microseconds(uri, max(size.tasks // BATCH, 4))
    leanest = min(found.values())
    return [
        Line(name, value, "us", "the leanest", value / leanest) for name, value in found.items()
    ]


def measure_stats(uri: str, size: Size) -> list[Line]:
    """Count a large collection: with bounds, and everything."""
    with fresh_place(uri) as place:
        found = stats.costs(place, size.stats_tasks)
    exact = found["queue.stats(exact=True)"].milliseconds
    lines = []
    for name, cost in found.items():
        took = cost.milliseconds
        target = "" if "exact" in name else f"below {STATS_MS:g} ms"
        kept = took < STATS_MS if target else None
        lines.append(Line(name, took, "ms", "everything counted", took / exact, target, kept))
        lines.append(Line(f"{name}, keys examined", cost.keys, ""))
    return lines


PARTS: dict[str, Callable[[str, Size], list[Line]]] = {
    "drain": measure_drain,
    "enqueue": measure_enqueue,
    "latency": measure_latency,
    "contention": measure_contention,
    "memory": measure_memory,
    "round_trips": measure_round_trips,
    "anatomy": measure_anatomy,
    "stats": measure_stats,
}


def show(console: Console, title: str, lines: list[Line]) -> None:
    """Print one part as a table."""
    table = Table(title=title, title_justify="left", min_width=100)
    for name in ("what", "value", "ratio", "against", "target", ""):
        table.add_column(name, justify="right" if name in {"value", "ratio"} else "left")
    for line in lines:
        value = f"{line.value:,.0f}" if line.value >= WHOLE_FROM else f"{line.value:.2f}"
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        kept = "" if line.kept is None else ("kept" if line.kept else "MISSED")
        table.add_row(line.what, f"{value} {line.unit}", ratio, line.against, line.target, kept)
    console.print(table)


def main() -> None:
    """Read the options, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--uri", help="the server to measure; else an embedded one")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tasks", type=int, default=30_000, help="per drain")
    parser.add_argument("--rounds", type=int, default=3, help="the median of these counts")
    parser.add_argument("--memory-tasks", type=int, default=200_000)
    parser.add_argument("--samples", type=int, default=200, help="of latencies")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--stats-tasks", type=int, default=1_000_000)
    options = parser.parse_args()
    size = Size(
        options.tasks,
        options.rounds,
        options.memory_tasks,
        options.samples,
        options.stats_tasks,
    )
    console = Console(stderr=options.json)
    found: dict[str, list[Line]] = {}
    with server(options.uri) as uri:
        for name in options.only:
            with console.status(f"Measuring {name} ..."):
                found[name] = PARTS[name](uri, size)
            show(console, name.replace("_", " "), found[name])
    if options.json:
        print(json.dumps({name: [asdict(one) for one in lines] for name, lines in found.items()}))


if __name__ == "__main__":
    main()
