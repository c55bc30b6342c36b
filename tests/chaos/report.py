"""The report of a run as text, as a row of a Markdown table, and as JSON.

``python -m tests.chaos.report RUN`` judges a folder again, and ends with status 1 for any finding.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.chaos import ledger
from tests.chaos.verifier import Verdict, Verification, injected_kinds, verify

REPORT = "report.json"
REPEATS = "repeats.jsonl"
"""One line for each repeated run: its key, both runs, and the fault that explains it."""
SHOWN = 10
"""How many findings of each verdict the text has."""
COLUMNS = (
    "server",
    "seed",
    "tasks acknowledged",
    "faults",
    "kinds",
    "runs",
    "repeats by outcome",
    "by a fault",
    "by a stall",
    "findings",
)
ASKED = {"retry by outcome", "replay"}
FULL = "disk_full"


def as_text(result: Verification) -> str:
    """Return the report that a person reads."""
    run = result.run
    lines = [f"profile {run.get('profile')}, seed {run.get('seed')}"]
    lines += [f"  {name:14} {count:>10,}" for name, count in result.counts.items()]
    share = f"{result.excused:.0%} of the time of those that run tasks"
    lines.append(f"troubles with a fault behind them, and a lease after each: {share}")
    lines += _table("faults", result.faults.items())
    if FULL in result.faults:
        lines.append(f"  {result.failed_writes:>8,}  {FULL} after which writes failed")
    lines += ["skipped:", *(f"  {one}" for one in run.get("skipped", ()))]
    causes = Counter(f"{one.cause.reason} ({one.cause.fault})" for one in result.repeats)
    lines += _table("repeated runs, by cause", causes.most_common())
    found = Counter(finding.verdict for finding in result.findings)
    lines += _table("findings", ((verdict.value, found[verdict]) for verdict in Verdict))
    for verdict in found:
        some = [one for one in result.findings if one.verdict == verdict]
        lines += [f"  {verdict.value}: {one.key}: {one.detail}" for one in some[:SHOWN]]
        if len(some) > SHOWN:
            lines.append(f"  {verdict.value}: {len(some) - SHOWN} more, see {REPORT}")
    lines.append("passed" if result.passed else f"failed: {len(result.findings)} findings")
    return "\n".join(lines)


def _table(title: str, rows: Iterable[tuple[str, int]]) -> list[str]:
    return [f"{title}:"] + [f"  {count:>8,}  {name}" for name, count in rows]


def as_markdown(results: Iterable[Verification]) -> str:
    """Return the table of docs/guarantees.md, with one row for each run."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for result in results:
        injected = injected_kinds(result.faults)
        asked = sum(one.cause.reason in ASKED for one in result.repeats)
        stalls = sum(one.cause.fault == "stall" for one in result.repeats)
        found = Counter(finding.verdict.value for finding in result.findings)
        cells = [
            result.run.get("server"),
            result.run.get("seed"),
            f"{result.counts.get('acknowledged', 0):,}",
            f"{sum(result.faults[kind] for kind in injected):,}",
            len(injected),
            f"{result.counts.get('runs', 0):,}",
            f"{asked:,}",
            f"{len(result.repeats) - asked - stalls:,}",
            f"{stalls:,}",
            ", ".join(f"{count} {verdict}" for verdict, count in found.items()) or "none",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def as_json(result: Verification) -> dict[str, Any]:
    """Return all of it."""
    causes = Counter((one.cause.reason.value, one.cause.fault) for one in result.repeats)
    return {
        "passed": result.passed,
        "run": dict(result.run),
        "counts": result.counts,
        "faults": dict(result.faults),
        "failed_writes": result.failed_writes,
        "excused": round(result.excused, 4),
        "repeats": [
            {"reason": reason, "fault": fault, "count": count}
            for (reason, fault), count in causes.most_common()
        ],
        "verdicts": Counter(finding.verdict.value for finding in result.findings),
        "findings": [
            {"verdict": one.verdict.value, "key": one.key, "detail": one.detail}
            for one in result.findings
        ],
    }


def report(folder: Path | str) -> Verification:
    """Judge a run, write ``report.json`` into its folder, and print the text."""
    result = verify(folder)
    ledger.write_json(folder, REPORT, as_json(result))
    with (Path(folder) / REPEATS).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(one.as_json()) + "\n" for one in result.repeats)
    sys.stdout.write(f"{as_text(result)}\n\n{as_markdown([result])}")
    sys.stdout.flush()
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Judge the folder of a chaos run.")
    parser.add_argument("folder", type=Path)
    raise SystemExit(0 if report(parser.parse_args().folder).passed else 1)
