"""Memory that grows is noticed, and a small run can be drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import ledger, soak
from tests.chaos.__main__ import Console, judge_memory
from tests.chaos.profiles import steady_slots
from tests.chaos.sampling import SAMPLES

STEADY = [f"{slot.name}-1" for slot in steady_slots(0)]
FLAT = [50_000, 80_000, 90_000, 90_500, 91_000, 90_000, 92_000, 90_500] * 3


def test_flat_memory() -> None:
    assert soak.is_flat(sorted(FLAT[:6]) + [90_000.0] * 18)


def test_growing_memory() -> None:
    assert soak.is_flat([50_000 + 3000 * n for n in range(24)]) is False


def test_few_samples_show_nothing() -> None:
    assert soak.is_flat([50_000.0] * 19) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"flat": dict.fromkeys(STEADY[1:], True)}, STEADY[0].removesuffix("-1")),
        ({"flat": dict.fromkeys(STEADY, True) | {STEADY[0]: None}}, STEADY[0]),
        ({"flat": {}}, STEADY[0].removesuffix("-1")),
        ({"pages": 10}, "the dashboard"),
        ({"load_sec": 47.0}, "the load"),
        ({"acknowledged": 499}, "acknowledged"),
    ],
)
def test_soak_without_data_fails(change: dict[str, Any], problem: str | None) -> None:
    whole: dict[str, Any] = {"flat": dict.fromkeys(STEADY, True), "samples": 30, "pages": 120}
    whole |= {"run": {"minutes": 1, "least": 500}, "load_sec": 48.0, "acknowledged": 500}
    found = [one.partition(":")[0] for one in soak.problems(whole | change)]
    assert found[:1] == ([] if problem is None else [problem])


def test_report_names_what_grew(tmp_path: Path) -> None:
    _tell(tmp_path, faults_until=23.0, stored_until=24.0)
    (problem,) = soak.report(tmp_path)
    assert problem.startswith(STEADY[1])
    assert (tmp_path / "soak.png").stat().st_size > 10_000
    summary = ledger.read_json(tmp_path, soak.REPORT)
    assert summary["latency"][0][1] == 0.5
    assert summary["faults"] == [[1.0, "cut"], [23.0, "cut"]]
    assert summary["acknowledged"] == 2


def test_command_says_which_share_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _tell(tmp_path, faults_until=23.0, stored_until=24.0)
    lines = ledger.Ledger(tmp_path, "worker")
    for key, outcomes in {
        "done": ["done"],
        "repeated": ["retry", "snooze", "done"],
        "flaky": ["raise", "done"],
        "dead": ["fail"],
    }.items():
        for number, outcome in enumerate(outcomes):
            run: dict[str, Any] = {"key": key, "token": f"{key}-{number}", "at": 2.0 + number}
            lines.write("start", attempt=number + 1, lease_until=9.0, **run)
            lines.write("finish", outcome=outcome, **run)
    lines.write("start", key="late", token="late", attempt=1, lease_until=9.0, at=3.0)
    lines.write("settled", key="late", token="late", outcome="failed", at=8.0)
    lines.close()
    judge_memory(tmp_path, None, Console())
    assert "3 of 7 tasks that ran failed at least once: 42.9%" in capsys.readouterr().out


@pytest.mark.parametrize(("faults_until", "stored_until"), [(24.0, 24.0), (40.0, 24.0)])
def test_growth_under_load_is_noticed_though_the_run_goes_on(
    tmp_path: Path, faults_until: float, stored_until: float
) -> None:
    """The faults and the production end early, and the memory does not grow any more."""
    _tell(tmp_path, faults_until=faults_until, stored_until=stored_until, samples=96)
    (problem,) = soak.report(tmp_path)
    assert problem == f"{STEADY[1]}: its memory grew"


@pytest.mark.parametrize(("faults_until", "stored_until"), [(18.0, 24.0), (24.0, 18.0)])
def test_few_samples_under_load(tmp_path: Path, faults_until: float, stored_until: float) -> None:
    _tell(tmp_path, faults_until=faults_until, stored_until=stored_until, samples=96)
    assert soak.report(tmp_path) == [f"{who}: too few samples under load" for who in STEADY]


def _tell(folder: Path, *, faults_until: float, stored_until: float, samples: int = 24) -> None:
    """Write a run: one process grows for 24 seconds."""
    lines = ledger.Ledger(folder, "harness")
    for at in (1.0, faults_until):
        lines.write("fault", kind="cut", target="proxy-0", phase="begin", at=at)
    for key, at in (("k", 1.1), ("l", stored_until)):
        lines.write("plan", key=key, queue="q", due_at=None, at=at - 0.1)
        lines.write("stored", key=key, at=at)
        lines.write("start", key=key, token=key, attempt=1, lease_until=9.0, at=at + 0.4)
    lines.close()
    ledger.write_json(folder, ledger.RUN, {"seed": 1, "versions": {"mongodb": "6.0.5"}})
    sampled = [
        {
            "at": float(n),
            "memory_kb": dict.fromkeys(STEADY, 90_000) | {STEADY[1]: 50_000 + 5000 * min(n, 24)},
            "depth": {"pending": n},
            "pages": 4,
        }
        for n in range(samples)
    ]
    text = "".join(json.dumps(one) + "\n" for one in sampled)
    (folder / SAMPLES).write_text(text, encoding="utf-8")
