"""The soak report: memory, depth, latency and faults over time, as JSON and as one picture.

``python -m tests.chaos.soak RUN [--picture FILE]`` makes both from the folder of a run.

Only samples under load count: while tasks are enqueued and faults are injected. Memory is flat if
the median of the last quarter of them is at most 10 % and 8 MB above the median of the second
quarter. The first quarter is left out: caches and pools fill. A run fails without enough of these
samples of each steady process, if the load ended too early, if too few tasks were acknowledged, or
if the dashboard was hardly read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.chaos import ledger
from tests.chaos.history import History, read_history
from tests.chaos.profiles import steady_slots
from tests.chaos.sampling import PAGES, SAMPLES
from tests.chaos.verifier import OF_HANDLERS

REPORT = "soak.json"
MOST_GROWTH = 1.10
MOST_GROWTH_KB = 8 * 1024
FEWEST = 20
"""How many samples under load a verdict needs."""
LEAST_LOAD = 0.8
"""Which share of the planned time the load must last."""
FEWEST_PAGES = 0.5
"""Which share of the pages of the dashboard must have come, though servers fail in between."""
BINS = 120
FAILED = {"raise", "fail", "unstorable", "exit"}
"""How a handler ends that has failed. One that asks for a retry or a snooze has not."""


def is_flat(samples: Sequence[float]) -> bool | None:
    """Return whether memory did not grow; None if there are too few samples."""
    if len(samples) < FEWEST:
        return None
    quarter = len(samples) // 4
    early = statistics.median(samples[quarter : 2 * quarter])
    late = statistics.median(samples[-quarter:])
    return late <= early * MOST_GROWTH + MOST_GROWTH_KB


def latencies(history: History) -> list[tuple[float, float]]:
    """Return when each task started first, and how long after it was stored or due."""
    found = []
    for entry in history.entries.values():
        if entry.stored_at is not None and entry.runs:
            first = min(run.at for run in entry.runs.values())
            ready = max(entry.planned_at or 0.0, entry.due_at or 0.0)
            found.append((first, max(first - ready, 0.0)))
    return sorted(found)


def failed_of(history: History) -> tuple[int, int]:
    """Return how many tasks failed at least once, of how many that ran.

    A task failed if a handler of it did, or if it was settled as failed.
    """
    ran = [list(one.runs.values()) for one in history.entries.values() if one.runs]
    failed = (
        any(run.outcome in FAILED or run.settled_as == "failed" for run in one) for one in ran
    )
    return sum(failed), len(ran)


def load_of(history: History) -> tuple[float, float]:
    """Return when tasks were enqueued and faults injected: both of them.

    Faults that follow from tasks continue after that.
    """
    stored = [one.stored_at for one in history.entries.values() if one.stored_at is not None]
    faults = [one.at for one in history.faults if not one.kind.startswith(OF_HANDLERS)]
    if not stored or not faults:
        return 0.0, 0.0
    return max(min(stored), min(faults)), min(max(stored), max(faults))


def summarize(folder: Path) -> dict[str, Any]:
    """Return the figures of a run."""
    lines = (folder / SAMPLES).read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    began = samples[0]["at"]
    history = read_history(ledger.read_lines(folder))
    begin, end = load_of(history)
    loaded: dict[str, list[float]] = {}
    memory: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        for who, size in sample["memory_kb"].items():
            if size:
                memory.setdefault(who, []).append((sample["at"] - began, size))
                loaded.setdefault(who, [])
                if begin <= sample["at"] <= end:
                    loaded[who].append(size)
    failed, ran = failed_of(history)
    late = [(at - began, took) for at, took in latencies(history)]
    return {
        "run": ledger.read_json(folder, ledger.RUN),
        "memory_kb": memory,
        "flat": {who: is_flat(some) for who, some in loaded.items()},
        "load": (begin - began, end - began),
        "load_sec": end - begin,
        "depth": [(one["at"] - began, one["depth"]) for one in samples if one["depth"]],
        "samples": len(samples),
        "pages": sum(one["pages"] for one in samples),
        "latency": _binned(late),
        "faults": [(fault.at - began, fault.kind) for fault in history.faults],
        "tasks": len(history.entries),
        "ran": ran,
        "failed": failed,
        "acknowledged": sum(one.stored_at is not None for one in history.entries.values()),
    }


def _binned(late: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """Return the median and the 99th percentile of the latency, for parts of the time."""
    if not late:
        return []
    width = max((late[-1][0] - late[0][0]) / BINS, 1.0)
    bins: dict[int, list[float]] = {}
    for at, took in late:
        bins.setdefault(int((at - late[0][0]) / width), []).append(took)
    result = []
    for number, some in sorted(bins.items()):
        some.sort()
        at = late[0][0] + (number + 0.5) * width
        result.append((at, statistics.median(some), some[int(len(some) * 0.99)]))
    return result


def draw(summary: Mapping[str, Any], path: Path) -> None:
    """Draw memory, depth and latency above each other, with a mark for each fault."""
    import matplotlib as mpl  # noqa: PLC0415 (slow, and only needed here)

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, (memory, depth, latency) = plt.subplots(3, 1, figsize=(10, 8), sharex=True)
    for who, some in summary["memory_kb"].items():
        memory.plot([at / 60 for at, _ in some], [size / 1024 for _, size in some], label=who)
    memory.set_ylabel("memory, MB")
    memory.set_ylim(bottom=0)
    for status in ("pending", "processing"):
        some = [(at / 60, counts.get(status, 0)) for at, counts in summary["depth"]]
        depth.plot([at for at, _ in some], [count for _, count in some], label=status)
    depth.set_ylabel("tasks")
    bins = [(at / 60, half, most) for at, half, most in summary["latency"]]
    latency.plot([one[0] for one in bins], [one[1] for one in bins], label="median")
    latency.plot([one[0] for one in bins], [one[2] for one in bins], label="99 %")
    latency.set_yscale("log")
    latency.set_ylabel("start after due, s")
    latency.set_xlabel("minutes; each thin line is a fault; memory is judged in the grey time")
    for axes in (memory, depth, latency):
        axes.axvspan(*(at / 60 for at in summary["load"]), color="grey", alpha=0.08)
        for at, _kind in summary["faults"]:
            axes.axvline(at / 60, color="red", alpha=0.12, linewidth=0.6)
        axes.legend(loc="upper left", fontsize="small")
        axes.grid(visible=True, alpha=0.3)
    run = summary["run"]
    figure.suptitle(
        f"{summary['acknowledged']:,} tasks, {len(summary['faults'])} faults, seed {run['seed']}, "
        f"MongoDB {run['versions']['mongodb']}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report(folder: Path, picture: Path | None = None) -> list[str]:
    """Write the JSON and the picture; return what is wrong with memory, or with its samples."""
    summary = summarize(folder)
    ledger.write_json(folder, REPORT, summary)
    draw(summary, picture or folder / "soak.png")
    return list(problems(summary))


def failures(summary: Mapping[str, Any]) -> str:
    """Return how many tasks failed, and their share."""
    failed, ran = summary["failed"], summary["ran"]
    share = failed / ran if ran else 0.0
    return f"{failed:,} of {ran:,} tasks that ran failed at least once: {share:.1%}"


def problems(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield which processes grew, or were not sampled often enough under load to know that."""
    planned_sec = summary["run"].get("minutes", 0) * 60
    if summary["load_sec"] < planned_sec * LEAST_LOAD:
        yield f"the load: {summary['load_sec']:.0f} s of {planned_sec:.0f} s"
    if summary["acknowledged"] < summary["run"].get("least", 0):
        yield f"acknowledged: only {summary['acknowledged']:,} tasks"
    flat = summary["flat"]
    for slot in steady_slots(0):
        if not any(who.rpartition("-")[0] == slot.name for who in flat):
            yield f"{slot.name}: no samples"
    for who, is_so in flat.items():
        if is_so is None:
            yield f"{who}: too few samples under load"
        elif not is_so:
            yield f"{who}: its memory grew"
    if summary["pages"] < summary["samples"] * len(PAGES) * FEWEST_PAGES:
        yield f"the dashboard: only {summary['pages']} pages"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw a soak run, and judge its memory.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    wrong = report(options.folder, options.picture)
    sys.stdout.write(f"{failures(ledger.read_json(options.folder, REPORT))}\n")
    if wrong:
        raise SystemExit("; ".join(wrong))
