"""Each verdict finds its violation, and nothing in a ledger without one."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from microqueue.worker.supervisor import TICK_SEC
from tests.chaos import ledger, report
from tests.chaos.causes import FORWARD_SEC, Reason
from tests.chaos.verifier import Verdict, Verification, verify

DATE = {"$date": "2026-01-01T00:00:00Z"}
LEASE_SEC = 10.0


class Story:
    """A small ledger, told line by line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.documents: dict[str, list[dict[str, Any]]] = {
            name: [] for name in ("tasks", "tasks_dlq", ledger.ARCHIVED)
        }
        self.settings: dict[str, Any] = {"dead_after_sec": 3.0, "lease_sec": LEASE_SEC}
        self.leaks: dict[str, list[str]] = {"processes": [], "connections": []}
        self.planned: dict[str, dict[str, Any]] = {}
        self.needs: dict[str, Any] = {}
        """The least numbers of the profile, and what takes part."""
        self.happy("bystander")

    def say(self, who: str, at: float, event: str, **fields: Any) -> None:
        lines = self.folder / ledger.LEDGER
        lines.mkdir(exist_ok=True)
        line = {"at": at, "who": who, "pid": 7, "event": event, **fields}
        name = who.replace("/", ".")
        with (lines / f"{name}-7.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def plan(self, key: str = "k", at: float = 0.0, *, stored: bool = True, **fields: Any) -> None:
        given = {"queue": "q", "due_at": None, "max_attempts": 3, "priority": 0, "kind": "ok"}
        self.planned[key] = given | fields
        self.say("producer", at, "plan", key=key, **self.planned[key])
        if stored:
            self.say("producer", at + 0.01, "stored", key=key)

    def run(
        self,
        who: str,
        at: float,
        outcome: str | None = None,
        *,
        key: str = "k",
        settled: str | None = None,
        took: float = 1.0,
        attempt: int = 1,
        token: str | None = None,
        **finish: Any,
    ) -> None:
        name = token or f"{who}@{at}"
        until = at + LEASE_SEC
        self.say(who, at, "start", key=key, token=name, attempt=attempt, lease_until=until)
        if outcome:
            self.say(who, at + took, "finish", key=key, token=name, outcome=outcome, **finish)
        if settled:
            self.say(who, at + took + 0.1, "settled", key=key, token=name, outcome=settled)

    def fault(
        self,
        kind: str,
        target: str,
        begin: float,
        end: float | None = None,
        *,
        phase: str = "end",
        **detail: Any,
    ) -> None:
        self.say("injector", begin, "fault", kind=kind, target=target, phase="begin")
        if end is not None:
            fields = {"kind": kind, "target": target, "phase": phase, "detail": detail}
            self.say("injector", end, "fault", **fields)

    def trouble(
        self,
        who: str,
        begin: float,
        until: float,
        error: str | None = "Error",
        *,
        call: str = "update_many",
    ) -> None:
        """Record a call that failed or took long."""
        self.say(who, begin, "trouble", until=until, call=call, error=error)

    def beats(self, who: str, begin: float, until: float) -> None:
        """Record a process that runs for a while."""
        for number in range(int((until - begin) / 0.5) + 1):
            self.say(who, begin + number / 2, "beat")

    def died(self, target: str, at: float, reason: str) -> None:
        self.say("injector", at, "died", target=target, reason=reason)

    def store(
        self,
        key: str = "k",
        status: str = "done",
        *,
        dlq: bool = False,
        archived: bool = False,
        **fields: Any,
    ) -> None:
        planned = self.planned.get(key, {})
        document: dict[str, Any] = {
            "payload": {"key": key, **({"kind": planned["kind"]} if planned else {})},
            "queue": planned.get("queue", "q"),
            "priority": planned.get("priority", 0),
            "status": status,
            "attempts": 1 if status == "done" else 0,
            "max_attempts": planned.get("max_attempts", 3),
            "history": [],
            "finished_at": DATE if status in {"done", "failed"} else None,
            "deadline_at": DATE if status == "done" else None,
            **({"error": {"message": "no"}} if status == "failed" else {}),
        }
        place = "tasks_dlq" if dlq else ledger.ARCHIVED if archived else "tasks"
        self.documents[place].append(document | fields)

    def happy(self, key: str, at: float = 0.0, **fields: Any) -> None:
        """Record a task that was done at once."""
        self.plan(key, at, **fields)
        self.run("bystander", at + 1, "done", key=key, settled="done", token=f"{key}@{at}")
        self.store(key)

    def verify(self) -> Verification:
        ledger.write_documents(self.folder, self.documents)
        run = {"profile": "test", "seed": 1, "settings": self.settings, **self.needs}
        ledger.write_json(self.folder, ledger.RUN, run)
        ledger.write_json(self.folder, ledger.LEAKS, self.leaks)
        return verify(self.folder)

    def findings(self) -> set[tuple[Verdict, str | None]]:
        return {(one.verdict, one.key) for one in self.verify().findings}

    def reasons(self) -> list[Reason]:
        result = self.verify()
        assert result.findings == []
        return [one.cause.reason for one in result.repeats]


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_run_without_violations_passes(story: Story) -> None:
    result = story.verify()
    assert result.passed
    assert result.counts["tasks"] == result.counts["runs"] == 1


def test_lost(story: Story) -> None:
    story.plan()
    assert story.findings() == {(Verdict.LOST, "k")}


@pytest.mark.parametrize("reply", ["uncertain", "rejected", None])
def test_task_that_was_not_acknowledged_may_be_missing(story: Story, reply: str | None) -> None:
    story.plan(stored=False)
    if reply:
        story.say("producer", 1, reply, key="k", error="no answer")
    assert story.findings() == set()


@pytest.mark.parametrize(
    ("answers", "lost"),
    [
        (["discarded"], False),
        (["perhaps discarded"], False),
        (["perhaps discarded", "kept"], False),
        (["kept"], True),
        ([], True),
    ],
)
def test_discarded_task_is_not_lost(story: Story, answers: list[str], lost: bool) -> None:
    story.plan()
    for number, answer in enumerate(answers):
        story.say("operator", 5 + number, "discarding", key="k")
        story.say("operator", 5.5 + number, answer, key="k")
    assert story.findings() == ({(Verdict.LOST, "k")} if lost else set())


@pytest.mark.parametrize(
    ("begin", "call", "error", "lost"),
    [
        (5.1, "delete_many", "AutoReconnect", False),
        (5.1, "replace_one", "AutoReconnect", False),
        (5.1, "update_many", "AutoReconnect", True),
        (5.1, "delete_many", None, True),
        (6.1, "delete_many", "AutoReconnect", True),
    ],
)
def test_discard_whose_call_was_repeated_may_have_deleted_the_task(
    story: Story, begin: float, call: str, error: str | None, lost: bool
) -> None:
    story.plan()
    story.say("operator", 5, "discarding", key="k")
    story.trouble("operator", 5.2, 6.5)  # Of the thread that replays; both are one trouble.
    story.trouble("operator", begin, begin + 0.3, error, call=call)
    story.say("operator", 6, "kept", key="k")
    assert story.findings() == ({(Verdict.LOST, "k")} if lost else set())


def test_discard_by_an_operator_that_was_killed(story: Story) -> None:
    story.plan()
    story.say("operator", 5, "discarding", key="k")
    assert story.findings() == {(Verdict.LOST, "k")}
    story.died("operator", 5.5, "sigkill")
    assert story.findings() == set()


def test_tombstone_is_no_task(story: Story) -> None:
    tombstone = {"_id": 1, "version": 1, "retired_at": DATE}
    story.documents["tasks_dlq"].append(tombstone)
    assert story.findings() == set()
    story.documents["tasks_dlq"].append({**tombstone, "status": "failed"})
    assert story.findings() == {(Verdict.IMPOSSIBLE, None)}


def test_left_by_a_replay_of_all(story: Story) -> None:
    story.say("operator", 5, "replay", phase="begin", queue="q")
    story.say("operator", 6, "replay", phase="end", queue="q", left=[])
    assert story.findings() == set()
    story.say("operator", 7, "replay", phase="end", queue="q", left=["k"])
    assert story.findings() == {(Verdict.LEFT, "k")}


@pytest.mark.parametrize(
    ("dedupe", "settled", "left"),
    [(None, False, True), ("x", True, True), ("x", False, False)],
)
def test_replay_skips_only_what_has_a_live_twin(
    story: Story, dedupe: str | None, settled: bool, left: bool
) -> None:
    story.plan(dedupe=dedupe, expires=True)
    story.store(status="failed", error={"code": "expired"})
    story.plan("twin", 2, dedupe="x")
    story.run("w", 3, "done", key="twin", settled="done", took=0.5 if settled else 5.0)
    story.store("twin")
    fields = {"phase": "end", "queue": "q", "left": [], "skipped": ["k"], "began": 5.0}
    story.say("operator", 6, "replay", **fields)
    found = story.findings()
    assert ((Verdict.LEFT, "k") in found) == left


@pytest.mark.parametrize("replays", [0, 1])
def test_replay_of_a_queue_explains_what_it_has_replayed(story: Story, replays: int) -> None:
    story.plan(max_attempts=1)
    story.run("w", 1, "raise", settled="failed")
    story.say("operator", 5, "replay", phase="begin", queue="q")
    story.say("operator", 6, "replay", phase="end", queue="q", left=[])
    story.run("w", 7, "done", settled="done")
    story.store(replays=replays)
    if replays:
        assert story.reasons() == [Reason.REPLAY]
    else:
        assert (Verdict.AFTER_SETTLEMENT, "k") in story.findings()


def test_done_task_that_is_deleted_at_once_is_not_lost(story: Story) -> None:
    story.plan()
    story.run("w", 1, "done")
    assert story.findings() == {(Verdict.LOST, "k")}
    story.settings["deleted_when_done"] = ["q"]
    assert story.findings() == set()


def test_task_deleted_before_it_was_done_is_lost(story: Story) -> None:
    story.settings["deleted_when_done"] = ["q"]
    story.plan()
    story.run("w", 1)
    story.died("w", 2, "SIGKILL")
    assert story.findings() == {(Verdict.LOST, "k")}


@pytest.mark.parametrize("status", ["pending", "processing"])
def test_never_settled(story: Story, status: str) -> None:
    story.plan()
    held: dict[str, Any] = {"lease_token": "t", "deadline_at": DATE, "attempts": 1}
    story.store(status=status, **(held if status == "processing" else {}))
    assert story.findings() == {(Verdict.NEVER_SETTLED, "k")}


@pytest.mark.parametrize(("at", "early"), [(4.9, True), (5.1, False)])
def test_ran_before_it_was_due(story: Story, at: float, early: bool) -> None:
    story.plan(due_at=5.0)
    story.run("w", at, "done", settled="done")
    story.store()
    assert story.findings() == ({(Verdict.EARLY, "k")} if early else set())


@pytest.mark.parametrize(("at", "early"), [(5.9, True), (6.1, False)])
def test_retry_ran_before_it_was_due(story: Story, at: float, early: bool) -> None:
    story.plan()
    story.run("w", 1, "retry", settled="retried", retry_at=6.0)
    story.run("w", at, "done", settled="done")
    story.store()
    assert story.findings() == ({(Verdict.EARLY, "k")} if early else set())


@pytest.fixture
def waiting(story: Story) -> Story:
    """Tasks wait for 2 seconds at least after their first attempt, for 4 after the second."""
    story.settings |= {"backoff_sec": 4.0, "max_backoff_sec": 9.0, "timeout_sec": 3.0}
    return story


@pytest.mark.parametrize(
    ("attempt", "at", "early"),
    [(1, 3.9, True), (1, 4.1, False), (2, 5.9, True), (2, 6.1, False), (3, 6.6, False)],
)
def test_ran_before_its_backoff_was_over(
    waiting: Story, attempt: int, at: float, early: bool
) -> None:
    waiting.plan()
    waiting.run("w", 1, "raise", settled="retried", attempt=attempt)
    waiting.run("w", at, "done", settled="done", attempt=attempt + 1)
    waiting.store(attempts=attempt + 1, history=[{"outcome": "retried"}] * attempt, max_attempts=9)
    assert ((Verdict.EARLY, "k") in waiting.findings()) == early


@pytest.mark.parametrize(("at", "early"), [(5.9, True), (6.1, False)])
def test_ran_before_the_backoff_of_its_timeout_was_over(
    waiting: Story, at: float, early: bool
) -> None:
    """The handler continues after its timeout: the wait has begun before its end."""
    waiting.plan(kind="hang")
    waiting.run("w", 1, "raise", token="t", took=4.0)
    waiting.say("w", 4.1, "settled", key="k", token="t", outcome="retried")
    waiting.run("w", at, "done", settled="done", attempt=2)
    waiting.store(attempts=2, history=[{"outcome": "retried"}])
    assert waiting.findings() == ({(Verdict.EARLY, "k")} if early else set())


@pytest.mark.parametrize("outcome", ["lease_expired", "crashed", "released"])
@pytest.mark.parametrize(("at", "early"), [(13.9, True), (14.1, False)])
def test_ran_before_the_backoff_of_its_lost_lease_was_over(
    waiting: Story, outcome: str, at: float, early: bool
) -> None:
    waiting.plan()
    waiting.run("w", 1, token="t")
    waiting.died("w", 2, "SIGKILL")
    waiting.run("v", at, "done", settled="done", attempt=2)
    lost = {"outcome": outcome, "lease_token": "t", "ended_at": _date(12)}
    waiting.store(attempts=1 if outcome == "released" else 2, history=[lost])
    waits = outcome != "released"
    assert waiting.findings() == ({(Verdict.EARLY, "k")} if early and waits else set())


def test_replay_ends_the_wait(waiting: Story) -> None:
    waiting.plan()
    waiting.run("w", 1, "raise", settled="retried")
    waiting.say("operator", 2.5, "replaying", key="k")
    waiting.run("w", 3, "done", settled="done")
    waiting.store(replays=1)
    assert waiting.findings() == set()


def test_ran_after_a_confirmed_settlement(story: Story) -> None:
    story.plan()
    story.run("w", 1, "done", settled="done")
    story.run("v", 20, "done")
    story.fault("kill mongod", "mongod", 3, 4)
    story.store()
    assert (Verdict.AFTER_SETTLEMENT, "k") in story.findings()


def test_settlement_accepted_after_another_worker_has_started(story: Story) -> None:
    """The fence is gone: a worker that was suspended settles a task that another one runs."""
    story.plan()
    story.run("w", 1, "done", settled="done", took=30)
    story.fault("stop", "w", 2, 30)
    story.run("v", 15, "done")
    story.store()
    assert (Verdict.AFTER_SETTLEMENT, "k") in story.findings()


@pytest.mark.parametrize(("settled", "stale"), [("retried", True), (None, False)])
def test_retry_accepted_after_another_worker_has_started(
    story: Story, settled: str | None, stale: bool
) -> None:
    story.plan()
    story.run("w", 1, "retry", settled=settled, took=30)
    story.fault("sigstop", "w", 2, 30)
    story.beats("w", 0, 2)
    story.beats("w", 30, 32)
    story.run("v", 15, "done", settled="done")
    story.store()
    assert story.findings() == ({(Verdict.NO_LEASE, "k")} if stale else set())


def test_ran_after_a_confirmed_cancellation(story: Story) -> None:
    story.plan()
    story.say("operator", 2, "cancelled", key="k")
    story.store(status="failed", error={"code": "cancelled"})
    assert story.findings() == set()
    story.run("w", 3, "fail")
    assert story.findings() == {(Verdict.AFTER_SETTLEMENT, "k")}


def test_overlapping_leases(story: Story) -> None:
    story.plan()
    story.run("w", 1, "done", took=8)
    story.run("v", 5, "done", settled="done")
    story.store()
    found = story.findings()
    assert (Verdict.OVERLAP, "k") in found
    story.fault("cut", "network", 0.5, 0.7)  # Too short before: no one is dead after a moment.
    story.settings["dead_after_sec"] = 60.0
    assert (Verdict.OVERLAP, "k") in story.findings()


def test_leases_do_not_overlap_if_the_worker_is_dead(story: Story) -> None:
    story.plan()
    story.run("w", 1)
    story.died("w", 2, "SIGKILL")
    story.run("v", 5, "done", settled="done")
    story.store()
    assert story.findings() == set()


def test_leases_do_not_overlap_if_the_worker_was_silent(story: Story) -> None:
    story.plan()
    story.run("w", 1)
    story.fault("sigstop", "w", 1.5, 20)
    story.beats("w", 0, 1.5)
    story.beats("w", 20, 21)
    story.run("v", 5, "done", settled="done")
    story.store()
    assert story.reasons() == [Reason.STOPPED]


def test_attempts_above_the_limit(story: Story) -> None:
    story.plan()
    for number in range(1, 5):
        story.run("w", number * 20, "raise", settled="retried", attempt=number)
    story.store(status="failed", attempts=3, history=[{"outcome": "retried"}] * 3)
    assert story.findings() == {(Verdict.ATTEMPTS, "k")}


@pytest.mark.parametrize("outcome", ["released", "snoozed"])
def test_refunded_attempts_are_not_counted(story: Story, outcome: str) -> None:
    story.plan()
    for number in range(1, 5):
        story.run("w", number * 20, settled=outcome)
    story.run("w", 100, "done", settled="done")
    story.store(history=[{"outcome": outcome}] * 4)
    assert (Verdict.ATTEMPTS, "k") not in story.findings()


@pytest.mark.parametrize(("outcome", "counted"), [("raise", True), ("cancelled", False)])
def test_attempt_of_a_handler_that_had_returned_is_not_refunded(
    story: Story, outcome: str, counted: bool
) -> None:
    story.plan()
    for number in range(1, 5):
        story.run("w", number * 20, outcome, settled="released")
    story.store(status="failed", history=[{"outcome": "released"}] * 4)
    assert ((Verdict.ATTEMPTS, "k") in story.findings()) is counted


@pytest.mark.parametrize(("decided", "counted"), [(0.9, False), (1.0, False), (1.06, True)])
def test_attempt_is_refunded_when_its_release_is_decided(
    story: Story, decided: float, counted: bool
) -> None:
    story.plan(max_attempts=1)
    for at in (20, 40):
        story.run("w", at, "done", settled="released")
        story.say("w", at + decided, "releasing", key="k", token=f"w@{at}")
    story.run("w", 60, "done", settled="done")
    story.store(history=[{"outcome": "released"}] * 2)
    assert ((Verdict.ATTEMPTS, "k") in story.findings()) is counted


@pytest.mark.parametrize(("replays", "found"), [(2, 0), (1, 1)])
def test_replay_explains_as_many_repeats_as_the_task_counts(
    story: Story, replays: int, found: int
) -> None:
    story.plan()
    for at in (1, 11):
        story.run("w", at, "raise", settled="failed")
        story.say("operator", at + 5, "replaying", key="k")
    story.run("w", 21, "done", settled="done")
    story.store(replays=replays)
    findings = story.verify().findings
    assert [(one.verdict, one.key) for one in findings] == [(Verdict.UNEXPLAINED, "k")] * found


def test_replay_is_left_to_the_repeat_without_another_cause(story: Story) -> None:
    """The first repeat follows from its outcome or from a death, though a replay was under way."""
    story.plan()
    story.say("operator", 0.5, "replay", phase="begin", queue="q")
    story.run("w", 1)
    story.died("w", 2, "SIGKILL")
    story.run("v", 20, "raise", settled="failed", attempt=2)
    story.run("v", 30, "done", settled="done")
    story.store(replays=1)
    assert story.reasons() == [Reason.KILLED, Reason.REPLAY]


@pytest.mark.parametrize(("begin", "overlaps"), [(0.9, True), (1.0, False)])
def test_replay_before_two_runs_explains_no_overlap(
    story: Story, begin: float, overlaps: bool
) -> None:
    story.plan()
    story.say("operator", begin, "replay", phase="begin", queue="q")
    story.run("w", 1, "done", took=5)
    story.run("v", 2, "done", settled="done")
    story.store(replays=1)
    assert ((Verdict.OVERLAP, "k") in story.findings()) is overlaps


def test_replay_counts_again(story: Story) -> None:
    story.plan(max_attempts=1)
    story.run("w", 1, "raise", settled="failed")
    story.say("operator", 5, "replaying", key="k")
    story.run("w", 6, "done", settled="done")
    story.store(replays=1)
    assert story.reasons() == [Reason.REPLAY]


def test_settled_done_and_stored_as_failed(story: Story) -> None:
    story.plan()
    story.run("w", 1, "done", settled="done")
    story.store(status="failed")
    assert story.findings() == {(Verdict.STATUS, "k")}


def test_done_though_no_handler_finished(story: Story) -> None:
    """The settlement was written before the handler, which was killed."""
    story.plan()
    story.run("w", 1)
    story.died("w", 2, "SIGKILL")
    story.store()
    assert story.findings() == {(Verdict.STATUS, "k")}


def test_settled_before_its_handler_finished(story: Story) -> None:
    story.plan()
    story.run("w", 1, "done", token="t", took=5)
    story.say("w", 1.5, "settled", key="k", token="t", outcome="done")
    story.store()
    assert story.findings() == {(Verdict.STATUS, "k")}


def test_dead_letter_that_nothing_explains(story: Story) -> None:
    story.plan()
    story.run("w", 1, "done")
    story.store(status="failed", attempts=1, history=[{"outcome": "lease_expired"}])
    assert story.findings() == {(Verdict.STATUS, "k")}


@pytest.mark.parametrize("troubled", [True, False])
def test_dead_letter_that_no_handler_has_seen(story: Story, troubled: bool) -> None:
    """Each of its claims was lost: the worker noted that, or has died."""
    story.plan()
    story.fault("kill mongod", "mongod-1", 0.5, 3)
    if troubled:
        story.trouble("w", 1, 2)
    at = {"started_at": _date(1), "ended_at": _date(11)}
    lost = {"outcome": "lease_expired", "worker_id": "w", **at}
    story.store(status="failed", attempts=3, history=[lost] * 3)
    assert story.findings() == (set() if troubled else {(Verdict.STATUS, "k")})


def _date(second: int) -> dict[str, str]:
    return {"$date": f"1970-01-01T00:00:{second:02}Z"}


@pytest.mark.parametrize(("outcome", "attempts"), [("fail", 1), ("raise", 3)])
def test_dead_letter_by_its_handler(story: Story, outcome: str, attempts: int) -> None:
    story.plan(expect="failed")
    story.run("w", 1, outcome, settled="failed", attempt=attempts)
    history = [{"outcome": "failed"}] * attempts
    story.store(status="failed", attempts=attempts, history=history, dlq=True)
    assert story.findings() == set()


@pytest.mark.parametrize("expect", ["done", "failed"])
def test_dead_letter_with_attempts_left(story: Story, expect: str) -> None:
    """Its handler raised once, and has two more attempts."""
    story.plan(kind="flaky", expect=expect)
    story.run("w", 1, "raise", settled="failed")
    story.store(status="failed", attempts=1, history=[{"outcome": "failed"}])
    assert story.findings() == {(Verdict.STATUS, "k")}


@pytest.mark.parametrize(("code", "explained"), [("cancelled", False), ("expired", True)])
def test_dead_letter_that_expired(story: Story, code: str, explained: bool) -> None:
    story.plan(expires=True)
    story.store(status="failed", error={"code": code})
    assert story.findings() == (set() if explained else {(Verdict.STATUS, "k")})


def test_task_that_must_fail_is_done(story: Story) -> None:
    story.happy("k", kind="fail", expect="failed")
    assert story.findings() == {(Verdict.STATUS, "k")}


def test_dead_letter_by_the_last_of_its_workers(story: Story) -> None:
    story.plan(max_attempts=1, expect="done")
    story.run("w", 1)
    story.died("w", 2, "SIGKILL")
    at = {"started_at": _date(1), "ended_at": _date(5)}
    story.store(
        status="failed", attempts=1, history=[{"outcome": "crashed", "worker_id": "w", **at}]
    )
    assert story.findings() == set()


def _pair(
    story: Story, first: float, second: float, *, attempt: int = 1, priority: int = 0
) -> None:
    story.settings["ordered_queues"] = ["line"]
    for key, planned, start in (("a", 0.0, first), ("b", 1.0, second)):
        story.plan(key, planned, queue="line", priority=priority if key == "a" else 0)
        number = attempt if key == "a" else 1
        story.run("single-1", start, "done", key=key, settled="done", took=0.1, attempt=number)
        attempts: dict[str, Any] = {
            "attempts": number,
            "history": [{"outcome": "lease_expired"}] * (number - 1),
        }
        story.store(key, position=1 if key == "a" else 2, **attempts)


def test_order_within_a_priority(story: Story) -> None:
    _pair(story, 6, 5)
    assert story.findings() == {(Verdict.ORDER, "b")}


def test_order_is_kept(story: Story) -> None:
    _pair(story, 5, 6)
    assert story.findings() == set()


@pytest.mark.parametrize(("priority", "wrong"), [(1, True), (-1, False)])
def test_order_of_priorities(story: Story, priority: int, wrong: bool) -> None:
    _pair(story, 6, 5, priority=priority)
    assert story.findings() == ({(Verdict.ORDER, "b")} if wrong else set())


@pytest.mark.parametrize("how", ["many", "single"])
def test_order_of_tasks_that_one_call_adds(story: Story, how: str) -> None:
    """They are stored at once, so the order holds before that is confirmed."""
    story.settings["ordered_queues"] = ["line"]
    for key, position in (("a", 1), ("b", 2)):
        story.plan(key, stored=False, queue="line", how=how)
        story.say("producer", 9, "stored", key=key)
        story.run("single-1", 6 - position, "done", key=key, settled="done", took=0.1)
        story.store(key, position=position)
    assert story.findings() == ({(Verdict.ORDER, "b")} if how == "many" else set())


def test_order_of_positions(story: Story) -> None:
    story.settings["ordered_queues"] = ["line"]
    for key, position in (("a", 2), ("b", 1)):
        story.plan(key, queue="line", how="many")
        story.run("single-1", 4 + position, "done", key=key, settled="done", took=0.1)
        story.store(key, position=position)
    assert story.findings() == {(Verdict.ORDER, "b")}


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("what", ["killed", "outage", "nothing", "outage elsewhere"])
def test_order_after_the_consumer_lost_a_claim(story: Story, what: str, attempt: int) -> None:
    """What was overtaken was claimed before, and the consumer has noted why it was lost."""
    _pair(story, 6, 5, attempt=attempt)
    if what == "killed":
        story.died("single-1", 4, "SIGKILL")
    story.fault("cut", "proxy-0", 3, 3)
    if what == "outage":
        story.trouble("single-1", 3.1, 3.2)
    if what == "outage elsewhere":
        story.trouble("w-1", 3.1, 3.2)
    excused = attempt == 2 and what in {"killed", "outage"}
    assert story.findings() == (set() if excused else {(Verdict.ORDER, "b")})


IMPOSSIBLE: dict[str, Mapping[str, Any]] = {
    "unknown status": {"status": "lost"},
    "attempts": {"attempts": -1},
    "above the limit": {"attempts": 4},
    "a lease after the failure": {"status": "failed", "lease_token": "t"},
    "no end": {"finished_at": None},
    "no deadline": {"deadline_at": None},
    "no error": {"status": "failed", "error": None},
    "attempts without history": {"attempts": 2},
    "a release that was not refunded": {"attempts": 2, "history": [{"outcome": "released"}]},
    "history": {"history": None},
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_document(story: Story, name: str) -> None:
    story.plan()
    story.run("w", 1, "done", settled="done")
    story.store(**IMPOSSIBLE[name])
    assert (Verdict.IMPOSSIBLE, "k") in story.findings()


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "processing", "lease_token": "t"},
        {"status": "pending", "lease_token": "t"},
        {"status": "pending", "next_retry_at": DATE},
        {"status": "pending", "finished_at": DATE},
    ],
)
def test_impossible_document_that_waits(story: Story, fields: dict[str, Any]) -> None:
    story.plan()
    story.store(**fields)
    assert (Verdict.IMPOSSIBLE, "k") in story.findings()


def test_stored_in_both_collections(story: Story) -> None:
    story.plan()
    story.run("w", 1, "fail", settled="failed")
    story.store(status="failed", dlq=True)
    assert story.findings() == set()
    story.store(status="failed")
    assert story.findings() == {(Verdict.IMPOSSIBLE, "k")}


def test_unknown_task(story: Story) -> None:
    story.store("stranger")
    story.run("w", 1, "done", key="ghost")
    assert story.findings() == {(Verdict.UNKNOWN, "stranger"), (Verdict.UNKNOWN, "ghost")}


def test_rejected_task_is_stored(story: Story) -> None:
    story.plan(stored=False)
    story.say("producer", 1, "rejected", key="k", error="too large")
    story.run("w", 2, "done", settled="done")
    story.store()
    assert story.findings() == {(Verdict.UNKNOWN, "k")}


@pytest.mark.parametrize(
    ("effects", "found"),
    [
        ({"orders": {"sent": 1}, "effects": {"handled": 1}}, set()),
        ({"orders": {}, "effects": {"handled": 1}}, {"sent"}),
        ({"orders": {"sent": 1}, "effects": {}}, {"handled"}),
        ({"orders": {"sent": 1}, "effects": {"handled": 2}}, {"handled"}),
        ({"orders": {"sent": 1, "aborted": 1}, "effects": {"handled": 1}}, {"aborted"}),
        ({"orders": {"sent": 1}, "effects": {"handled": 1, "retried": 1}}, {"retried"}),
    ],
)
def test_half_of_a_transaction(
    story: Story, effects: dict[str, dict[str, int]], found: set[str]
) -> None:
    story.happy("sent", how="transaction")
    story.happy("handled", kind="transaction")
    story.happy("retried")
    story.plan("aborted", stored=False, how="aborted")
    ledger.write_json(story.folder, ledger.EFFECTS, effects)
    assert story.findings() == {(Verdict.TRANSACTION, key) for key in found}


def _fire(story: Story, second: int) -> str:
    name = f"schedule:q:tick:2026-01-01T00:00:0{second}Z"
    story.store(_id=name, headers={"schedule": "tick"})
    story.run("w", 1.0 + second, "done", key=name, settled="done")
    return name


def _instant(second: float) -> float:
    return datetime(2026, 1, 1, tzinfo=UTC).timestamp() + second


@pytest.mark.parametrize(
    ("seconds", "missing"),
    [((1, 2, 3), False), ((2, 3), False), ((1, 3), True), ((3,), True), ((1, 2), True), ((), True)],
)
def test_missing_run_of_a_schedule(story: Story, seconds: tuple[int, ...], missing: bool) -> None:
    schedule = {"name": "q:tick", "event": "schedule"}
    story.say("scheduler", 1.0, phase="put", wall=_instant(0.2), **schedule)
    story.say("scheduler", 2.0, phase="put", wall=_instant(1.2), **schedule)  # After a kill.
    for second in seconds:
        _fire(story, second)
    story.say("scheduler", 4.0, phase="over", wall=_instant(3.4), **schedule)
    assert story.findings() == ({(Verdict.SCHEDULE, "q:tick")} if missing else set())


def test_run_of_a_schedule_that_is_stored_twice(story: Story) -> None:
    name = _fire(story, 1)
    story.store(_id=name, headers={"schedule": "tick"})
    assert story.findings() == {(Verdict.IMPOSSIBLE, name)}


TOPICS: dict[str, tuple[list[int], tuple[int, int] | None, bool]] = {
    "all": ([1, 2, 3, 4], None, False),
    "the first one": ([2, 3, 4], None, True),
    "the last one": ([1, 2, 3], None, True),
    "all are missing": ([], None, True),
    "missing": ([1, 3, 4], None, True),
    "missing, with a gap": ([1, 3, 4], (1, 3), False),
    "missing, with a gap elsewhere": ([1, 3, 4], (3, 4), True),
    "the first one, with a gap": ([2, 3, 4], (0, 2), False),
    "twice": ([1, 2, 2, 3, 4], None, True),
    "out of order": ([1, 3, 2, 4], None, True),
}


@pytest.mark.parametrize("name", TOPICS)
def test_messages_of_a_topic(story: Story, name: str) -> None:
    """The subscriber is replaced in between, and the second one resumes."""
    numbers, gap, wrong = TOPICS[name]
    for number in (1, 2, 3, 4):
        story.say("publisher-1", float(number), "published", number=number)
    for number in (1, 2):
        story.say(f"reader-{number}", 4.0, "subscribed")
    for place, number in enumerate(numbers):
        fields = {"publisher": "publisher-1", "number": number, "position": f"p{number}"}
        story.say(f"reader-{1 + (place > 1)}", 5.0 + place, "received", **fields)
    if gap:
        after, first = gap
        story.say("reader-1", 6.0, "gap", after=f"p{after}", first=f"p{first}")
    assert story.findings() == ({(Verdict.TOPIC, "publisher-1 to reader")} if wrong else set())


def test_topic_without_subscribers(story: Story) -> None:
    story.say("publisher-1", 1.0, "published", number=1)
    assert story.findings() == {(Verdict.LEDGER, None)}


DEDUPED: dict[str, tuple[float, str, bool]] = {
    "rejected while the first one waits": (1.0, "rejected", False),
    "rejected while the first one runs": (5.5, "rejected", False),
    "rejected after the first one was settled": (8.0, "rejected", True),
    "added while the first one runs": (5.5, "stored", True),
    "added after the first one was settled": (8.0, "stored", False),
}


@pytest.mark.parametrize("name", DEDUPED)
def test_dedupe_key(story: Story, name: str) -> None:
    at, reply, wrong = DEDUPED[name]
    story.plan("a", dedupe="x")
    story.run("w", 5, "done", key="a", settled="done", took=1.0)
    story.store("a")
    story.plan("b", at, stored=False, dedupe="x")
    story.say("producer", at + 0.1, reply, key="b")
    if reply == "stored":
        story.run("w", 9, "done", key="b", settled="done")
        story.store("b")
    assert story.findings() == ({(Verdict.DEDUPE, "b")} if wrong else set())


def test_dedupe_key_that_no_task_has(story: Story) -> None:
    story.plan("a", stored=False, dedupe="x")
    story.say("producer", 1, "rejected", key="a")
    assert story.findings() == {(Verdict.DEDUPE, "a")}


def test_message_of_a_topic_is_one_task_of_each_bound_queue(story: Story) -> None:
    for queue in ("q", "r"):
        story.plan(f"k>{queue}", queue=queue)
        story.run("w", 1.0, "done", key=f"k>{queue}", settled="done")
    story.store(queue="q", headers={"topic": "news"})
    assert story.findings() == {(Verdict.LOST, "k>r")}
    story.store(queue="r", headers={"topic": "news"})
    assert story.findings() == set()


@pytest.mark.parametrize(("token", "found"), [("t", set()), ("u", {(Verdict.STATUS, "k")})])
def test_commit_of_a_handler_that_was_cancelled(
    story: Story, token: str, found: set[tuple[Verdict, str]]
) -> None:
    story.plan(kind="transaction")
    story.run("w", 1, "cancelled", token="t")
    story.store(lease_token=token)
    assert story.findings() == found


@pytest.mark.parametrize("kind", ["processes", "connections", "cursors", "threads"])
def test_leaks(story: Story, kind: str) -> None:
    story.leaks[kind] = ["one"]
    assert story.findings() == {(Verdict.LEAK, None)}


# Processes


SIGTERM, SIGKILL = 15, 9
ENDINGS: dict[str, tuple[int, list[int], bool, bool, bool]] = {
    "crash": (70, [], False, False, True),
    "crash after SIGTERM": (70, [SIGTERM], False, False, True),
    "segmentation fault": (-11, [], False, False, True),
    "killed by another": (-9, [], False, False, True),
    "killed by the harness": (-9, [SIGKILL], False, False, False),
    "SIGTERM before it could handle that": (-15, [SIGTERM], False, False, False),
    "stopped": (0, [SIGTERM], False, True, False),
    "stopped without a last line": (0, [SIGTERM], False, False, True),
    "its work is done": (0, [], True, True, False),
    "its work is not done": (0, [], False, True, True),
    "a handler's status that no handler has noted": (3, [], False, False, True),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_process_that_ends_by_itself(story: Story, name: str) -> None:
    status, sent, ends, left, wrong = ENDINGS[name]
    if left:
        story.say("w", 2, "left", threads=[])
    story.say("harness", 3, "died", target="w", reason="any", status=status, sent=sent, ends=ends)
    assert story.findings() == ({(Verdict.ENDED, "w")} if wrong else set())


def _ended(story: Story, status: int, at: float = 3.0) -> None:
    fields = {"status": status, "sent": [], "ends": False, "reason": f"exit {status}"}
    story.say("harness", at, "died", target="w", **fields)


@pytest.mark.parametrize("noted", [True, False])
def test_repeat_by_a_worker_that_crashed(story: Story, noted: bool) -> None:
    """A handler that ends its process explains it; a crash explains nothing."""
    story.plan()
    story.run("w", 1)
    if noted:
        story.happy("fatal")
        story.run("w", 1.2, "exit", key="fatal", took=1.0, token="z")
        story.run("v", 9, "done", key="fatal", settled="done", attempt=2)
        story.documents["tasks"].pop()
        story.store("fatal", attempts=2, history=[{"outcome": "crashed"}])
    _ended(story, 3)
    _again(story)
    found = story.findings()
    assert ((Verdict.ENDED, "w") in found) != noted
    assert ((Verdict.UNEXPLAINED, "k") in found) != noted


@pytest.mark.parametrize(("at", "wrong"), [(2.5, False), (14.0, True)])
def test_process_whose_handler_used_up_its_memory(story: Story, at: float, wrong: bool) -> None:
    story.fault("handler_memory", "w", 2, 2.1)
    _ended(story, -6, at)
    assert story.findings() == ({(Verdict.ENDED, "w")} if wrong else set())


def test_crash_names_its_error(story: Story) -> None:
    story.say("w", 2.9, "crashed", error="KeyError('x')")
    _ended(story, 70)
    (finding,) = story.verify().findings
    assert "KeyError" in finding.detail


CHILDREN: dict[str, tuple[str | None, bool]] = {
    "it wrote a last line": ("left", False),
    "it was killed": ("sigkill", False),
    "it crashed": (None, True),
    "SIGTERM while it started": ("young", False),
    "SIGTERM": ("sigterm", True),
    "ended by its watchdog, for a handler": ("handler", False),
    "ended by its watchdog": ("exited", True),
    "ended by its watchdog, in an outage": ("slow", False),
    "ended by its watchdog, long after an outage": ("slow before", True),
}


@pytest.mark.parametrize("name", CHILDREN)
def test_child_of_a_supervisor_that_ends_by_itself(story: Story, name: str) -> None:
    what, wrong = CHILDREN[name]
    child = "supervisor-1/8"
    story.say("harness", 0, "born", target="supervisor-1", of=7)
    story.say(child, 1, "born", target=child, parent="supervisor-1")
    story.beats(child, 1, 2 if what == "young" else 20)
    if what == "left":
        story.say(child, 20, "left", threads=[])
    elif what == "sigkill":
        story.fault("sigkill", child, 20, 20.1)
    elif what in {"sigterm", "young"}:
        story.died(child, 20, "sigterm")
    elif what is not None:
        story.say(child, 20, "exited", status=1)
    if what in {"slow", "slow before"}:
        story.trouble(child, 10, 19.5 if what == "slow" else 18.5, None)
    if what == "handler":
        story.plan(kind="long")
        story.run(child, 12)
        story.died(child, 20, "sigkill")
        _again(story, 30)
    assert story.findings() == ({(Verdict.ENDED, child)} if wrong else set())


def test_empty_run_shows_nothing(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for path in (tmp_path / ledger.LEDGER).iterdir():
        path.unlink()
    story.documents = {}
    assert story.findings() == {(Verdict.LEDGER, None)}


def test_torn_line(story: Story) -> None:
    with (story.folder / ledger.LEDGER / "w-7.jsonl").open("a") as file:
        file.write('{"at": 1, "who": "w"')
    assert story.findings() == {(Verdict.LEDGER, None)}


# Repeats


def _again(story: Story, at: float = 15.0, **document: Any) -> None:
    """Record a second run, which succeeds."""
    story.run("v", at, "done", settled="done", attempt=2)
    if not document:
        document = {"attempts": 2, "history": [{"outcome": "lease_expired"}]}
    story.store(**document)


# The boundaries of the rules


def _renewed(story: Story) -> None:
    """Tell of a run from 1 on, whose last lease is from 20 to 30."""
    story.plan()
    story.run("w", 1)
    story.say("w", 20, "renewed", key="k", token="w@1", lease_until=30.0)


@pytest.mark.parametrize(("until", "explained"), [(20.1, True), (19.9, False)])
def test_trouble_before_the_last_lease_explains_nothing(
    story: Story, until: float, explained: bool
) -> None:
    _renewed(story)
    story.fault("cut", "proxy-0", 18, until)
    story.trouble("w", 18.5, until)
    _again(story, 31)
    assert story.findings() == (set() if explained else {(Verdict.UNEXPLAINED, "k")})


@pytest.mark.parametrize(("gap", "explained"), [(1.4, True), (1.6, False)])
def test_troubles_that_are_apart_are_two(story: Story, gap: float, explained: bool) -> None:
    """The fault was over when the second one began."""
    _renewed(story)
    story.fault("cut", "proxy-0", 18, 19)
    story.trouble("w", 18, 19)
    story.trouble("w", 19 + gap, 19.3 + gap)
    _again(story, 31)
    assert story.findings() == (set() if explained else {(Verdict.UNEXPLAINED, "k")})


@pytest.mark.parametrize(
    ("at", "explained"), [(0.9, False), (1.0, True), (14.9, True), (15.1, False)]
)
def test_signal_explains_a_repeat_only_between_both_runs(
    story: Story, at: float, explained: bool
) -> None:
    story.plan()
    story.run("w", 1)
    story.fault("sigkill", "w", at, at)
    _again(story)
    assert story.findings() == (set() if explained else {(Verdict.UNEXPLAINED, "k")})


@pytest.mark.parametrize(("until", "explained"), [(0.95, False), (1.05, True)])
def test_signal_that_was_under_way_at_the_start(
    story: Story, until: float, explained: bool
) -> None:
    story.plan()
    story.run("w", 1)
    story.fault("sigkill", "w", 0.8, until)
    _again(story)
    assert story.findings() == (set() if explained else {(Verdict.UNEXPLAINED, "k")})


@pytest.mark.parametrize(("at", "explained"), [(11.0, True), (11.1, False)])
def test_death_explains_a_repeat_only_within_the_lease(
    story: Story, at: float, explained: bool
) -> None:
    """No line says when the worker last ran."""
    story.plan()
    story.run("w", 1)
    story.died("w", at, "SIGKILL")
    _again(story)
    assert story.findings() == (set() if explained else {(Verdict.UNEXPLAINED, "k")})


@pytest.mark.parametrize(("begin", "explained"), [(3.0, True), (3.1, False)])
def test_silence_must_last_until_a_worker_counts_as_dead(
    story: Story, begin: float, explained: bool
) -> None:
    story.plan()
    story.run("w", 1)
    story.fault("cut", "proxy-0", begin, begin + 0.5)
    story.trouble("w", begin, begin + 0.5)
    _again(story, 5)
    wrong = {(Verdict.UNEXPLAINED, "k"), (Verdict.OVERLAP, "k")}
    assert story.findings() == (set() if explained else wrong)


@pytest.mark.parametrize(("at", "overlaps"), [(10.9, True), (10.97, False)])
def test_lease_that_had_little_time_left(story: Story, at: float, overlaps: bool) -> None:
    story.plan()
    story.run("w", 1, "done", took=15)
    _again(story, at)
    assert ((Verdict.OVERLAP, "k") in story.findings()) is overlaps


@pytest.mark.parametrize(
    ("attempts", "above"),
    [((1, 2, 3), False), ((4,), True), ((1, 1, 1), False), ((1, 1, 1, 1), True)],
)
def test_attempts_are_those_of_the_claims_and_those_of_the_runs(
    story: Story, attempts: tuple[int, ...], above: bool
) -> None:
    story.plan()
    for number, attempt in enumerate(attempts):
        story.run("w", 1 + number * 20, "raise", settled="retried", attempt=attempt)
    story.store(status="failed", attempts=3, history=[{"outcome": "retried"}] * 3)
    assert ((Verdict.ATTEMPTS, "k") in story.findings()) is above


@pytest.mark.parametrize(("attempts", "impossible"), [(3, False), (4, True)])
def test_document_with_attempts_above_the_limit(
    story: Story, attempts: int, impossible: bool
) -> None:
    story.plan()
    for number in range(attempts):
        story.run("w", 1 + number * 20, "raise", settled="retried", attempt=number + 1)
    history = [{"outcome": "retried"}] * attempts
    story.store(status="failed", attempts=attempts, history=history)
    assert ((Verdict.IMPOSSIBLE, "k") in story.findings()) is impossible


@pytest.mark.parametrize(("deaths", "explained"), [(2, True), (1, False), (0, False)])
def test_poison_needs_as_many_deaths_as_the_setting(
    story: Story, deaths: int, explained: bool
) -> None:
    story.settings["max_crashes"] = {"q": 2}
    story.plan()
    for number in range(2):
        who = f"w{number}"
        story.run(who, 1 + number * 20, attempt=number + 1)
        if number < deaths:
            story.died(who, 2 + number * 20, "SIGKILL")
    poison: dict[str, Any] = {"error": {"code": "poison"}, "history": [{"outcome": "crashed"}] * 2}
    story.store(status="failed", attempts=2, **poison)
    assert ((Verdict.STATUS, "k") not in story.findings()) is explained


@pytest.mark.parametrize(("at", "explained"), [(15.9, True), (16.1, False)])
def test_replay_of_a_process_that_died_goes_on_for_one_call(
    story: Story, at: float, explained: bool
) -> None:
    story.plan()
    story.say("operator", 5, "replay", phase="begin", queue="q")
    story.died("operator", 6, "SIGKILL")
    story.run("w", at, "raise", settled="failed")
    story.run("w", 20, "done", settled="done")
    story.store(replays=1)
    assert ((Verdict.UNEXPLAINED, "k") not in story.findings()) is explained


def test_repeat_that_nothing_explains(story: Story) -> None:
    story.plan()
    story.run("w", 1, "done")
    _again(story)
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


def test_two_starts_under_one_lease(story: Story) -> None:
    story.plan()
    story.run("w", 1, token="t")
    story.run("w", 1.5, "done", settled="done", token="t")
    story.store()
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


@pytest.mark.parametrize("outcome", [None, "done"])
def test_repeat_by_a_killed_worker(story: Story, outcome: str | None) -> None:
    story.plan()
    story.run("w", 1, outcome)
    story.fault("kill worker", "w", 2.2)
    story.died("w", 2.3, "SIGKILL")
    _again(story)
    assert story.reasons() == [Reason.KILLED]


def test_repeat_by_a_killed_supervisor(story: Story) -> None:
    story.plan()
    story.say("injector", 0, "born", target="child", parent="supervisor")
    story.run("child", 1)
    story.died("supervisor", 2.3, "SIGKILL")
    _again(story)
    assert story.reasons() == [Reason.KILLED]


def test_death_of_another_worker_explains_nothing(story: Story) -> None:
    story.plan()
    story.run("w", 1, "done")
    story.fault("kill worker", "bystander", 2.2)
    story.died("bystander", 2.3, "SIGKILL")
    _again(story)
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


def test_worker_that_stops_settles_what_is_finished(story: Story) -> None:
    story.plan()
    story.run("w", 1, "done")
    story.died("w", 3, "SIGTERM")
    _again(story)
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


def test_repeat_after_a_release(story: Story) -> None:
    story.plan()
    story.run("w", 1, settled="released")
    story.died("w", 3, "SIGTERM")
    story.run("v", 5, "done", settled="done")
    story.store(history=[{"outcome": "released"}])
    assert story.reasons() in ([Reason.RELEASED], [Reason.KILLED])


@pytest.mark.parametrize(
    ("born", "at", "explained"),
    [
        (-9.0, -1.2, False),
        (-9.0, -1.1, True),
        (-9.0, 0.9, True),
        (0.8, 0.7, False),
        (0.8, 0.9, True),
        (-9.0, 2.1, True),
        (-9.0, 2.2, False),
    ],
)
@pytest.mark.parametrize("target", ["w", "w/5"])
def test_release_needs_a_signal_to_a_process_that_stops_or_runs_the_handler(
    story: Story, born: float, at: float, target: str, explained: bool
) -> None:
    story.plan()
    story.say("w/5", born, "born", target="w/5", parent="w")
    story.run("w/5", 1, settled="released")
    story.say("harness", at, "signal", target=target, number=15)
    story.run("v", 5, "done", settled="done")
    story.store(history=[{"outcome": "released"}])
    if explained:
        assert story.reasons() == [Reason.RELEASED]
    else:
        assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


def test_a_signal_is_forwarded_within_the_time_that_the_verifier_allows() -> None:
    assert FORWARD_SEC >= TICK_SEC


@pytest.mark.parametrize(
    ("kind", "explained"), [("sigterm", True), ("handler_memory", True), ("sigcont", False)]
)
def test_release_after_a_fault(story: Story, kind: str, explained: bool) -> None:
    story.plan()
    story.run("w", 1, settled="released")
    story.fault(kind, "w", 1.5, 1.5)
    story.run("v", 5, "done", settled="done")
    story.store(history=[{"outcome": "released"}])
    assert story.findings() == (set() if explained else {(Verdict.UNEXPLAINED, "k")})


@pytest.mark.parametrize(("begin", "explained"), [(1.5, True), (2.3, False)])
def test_release_by_a_worker_in_trouble(story: Story, begin: float, explained: bool) -> None:
    story.settings["dead_after_sec"] = 9.0
    story.plan()
    story.run("w", 1, settled="released")
    story.fault("cut", "proxy-0", begin, begin + 0.2)
    story.trouble("w", begin, begin + 0.2)
    story.run("v", 5, "done", settled="done")
    story.store(history=[{"outcome": "released"}])
    assert story.findings() == (set() if explained else {(Verdict.UNEXPLAINED, "k")})


def test_repeat_by_a_worker_stopped_past_its_lease(story: Story) -> None:
    story.plan()
    story.run("w", 1, "done", took=25)
    story.fault("sigstop", "w", 2, 25)
    story.beats("w", 0, 2)
    story.beats("w", 25, 27)
    _again(story)
    assert story.reasons() == [Reason.STOPPED]


def test_fault_that_was_skipped_is_none(story: Story) -> None:
    """The process had just ended, so the signal was never sent."""
    story.fault("sigkill", "w", 2, 2.01, phase="aborted")
    story.fault("disk_full", "mongod-1", 3, 4, writes_failed=True)
    story.fault("disk_full", "mongod-1", 5, 6, writes_failed=False)
    story.plan()
    story.run("w", 1)
    story.run("v", 4, "done", settled="done", attempt=2)
    story.store(attempts=2, history=[{"outcome": "lease_expired"}])
    result = story.verify()
    assert {(one.verdict, one.key) for one in result.findings} >= {(Verdict.UNEXPLAINED, "k")}
    assert result.faults == {"disk_full": 2}
    assert result.failed_writes == 1


@pytest.mark.parametrize(
    ("needs", "found"),
    [
        ({"least": 1, "least_faults": 3, "least_kinds": 2}, 0),
        ({"least": 2}, 1),
        ({"least_faults": 4}, 1),
        ({"least_kinds": 3}, 1),
    ],
)
def test_run_in_which_too_little_happened(story: Story, needs: dict[str, int], found: int) -> None:
    story.needs = needs
    for at, kind in enumerate(("cut", "cut", "sigkill", "handler_memory")):
        story.fault(kind, "x", at, at + 0.5)
    story.fault("sigterm", "x", 9, 9.5, phase="aborted")
    assert [one.verdict for one in story.verify().findings] == [Verdict.LEDGER] * found


PARTS: dict[str, list[str]] = {
    "schedule": ["no schedule was judged"],
    "topic": ["nothing was published", "no one subscribed to the topic"],
    "celery": ["no Celery task has finished"],
    "archive": ["no run of the archive has ended"],
}


@pytest.mark.parametrize("part", PARTS)
def test_part_that_no_line_shows(story: Story, part: str) -> None:
    assert story.findings() == set()
    story.needs = {"parts": [part]}
    found = story.verify().findings
    assert [(one.verdict, one.detail) for one in found] == [
        (Verdict.LEDGER, missing) for missing in PARTS[part]
    ]


def test_parts_that_lines_show(sent: Story) -> None:
    sent.needs = {"parts": [*PARTS]}
    sent.happy("archived")
    sent.documents[ledger.ARCHIVED].append(sent.documents["tasks"].pop())
    sent.say("archiver", 6, "archive", phase="end", archived=1)
    sent.say("publisher-1", 1.0, "published", number=1)
    sent.say("reader-1", 1.0, "subscribed")
    sent.say("reader-1", 2.0, "received", publisher="publisher-1", number=1, position="p1")
    for wall, phase in ((100.0, "put"), (100.5, "over")):
        sent.say("scheduler-1", wall, "schedule", name="q:tick", phase=phase, wall=wall)
    assert sent.findings() == set()


@pytest.mark.parametrize("phase", [None, "put"])
def test_schedule_that_does_not_end_is_not_judged(story: Story, phase: str | None) -> None:
    story.needs = {"parts": ["schedule"]}
    if phase is not None:
        story.say("scheduler-1", 1.0, "schedule", name="q:tick", phase=phase, wall=1.0)
    assert story.findings() == {(Verdict.LEDGER, None)}


@pytest.mark.parametrize("settled", [None, "done"])
def test_run_without_a_confirmed_settlement(tmp_path: Path, settled: str | None) -> None:
    story = Story(tmp_path)
    for path in (tmp_path / ledger.LEDGER).iterdir():
        path.unlink()
    story.documents["tasks"].clear()
    story.plan()
    story.run("w", 1, "done", settled=settled)
    story.store()
    found = [one.detail for one in story.verify().findings]
    assert found == ([] if settled else ["no settlement was confirmed"])


def test_worker_that_stalls(story: Story) -> None:
    """The machine did not let it run for longer than its lease."""
    story.plan()
    story.run("w", 1, "done", took=25)
    story.beats("w", 0, 2)
    story.beats("w", 25, 27)
    _again(story)
    assert story.reasons() == [Reason.STOPPED]


def test_worker_that_runs_was_not_stopped(story: Story) -> None:
    """The ledger says that a signal was sent, and that the worker ran all the time."""
    story.plan()
    story.run("w", 1, "done", took=25)
    story.fault("sigstop", "w", 2, 25)
    story.beats("w", 0, 27)
    _again(story)
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


def test_stop_within_the_lease_explains_nothing(story: Story) -> None:
    story.plan()
    story.run("w", 1, "done", took=2)
    story.fault("stop", "w", 2, 2.5)
    story.run("v", 4, "done", settled="done", attempt=2)
    story.store(attempts=2, history=[{"outcome": "lease_expired"}])
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


@pytest.mark.parametrize(
    ("outcome", "reason"), [(None, Reason.OUTAGE), ("done", Reason.LOST_REPLY)]
)
def test_repeat_by_an_outage(story: Story, outcome: str | None, reason: Reason) -> None:
    story.plan()
    story.run("w", 1, outcome)
    story.fault("kill mongod", "mongod-1", 2.5, 8)
    story.trouble("w", 3, 7)
    _again(story)
    assert story.reasons() == [reason]
    (repeat,) = (json.loads(line) for line in _repeats_of(story.folder))
    assert repeat["key"] == "k"
    assert (repeat["before"]["who"], repeat["after"]["who"]) == ("w", "v")
    assert (repeat["fault"], repeat["target"]) == ("kill mongod", "mongod-1")
    assert (repeat["begin"], repeat["until"]) == (2.5, 8)


def _repeats_of(folder: Path) -> list[str]:
    report.report(folder)
    return (folder / report.REPEATS).read_text(encoding="utf-8").splitlines()


UNTROUBLED: dict[str, tuple[str, float, float, str | None]] = {
    "another worker": ("v", 3, 7, "NetworkTimeout"),
    "before the fault": ("w", 1, 2, "NetworkTimeout"),
    "long after the fault": ("w", 19, 19.1, "NetworkTimeout"),
}


@pytest.mark.parametrize("name", UNTROUBLED)
def test_outage_that_did_not_trouble_the_worker(story: Story, name: str) -> None:
    story.plan(at=0)
    story.run("w", 1, "done", took=20)
    story.say("w", 20, "renewed", key="k", token="w@1", lease_until=30)
    story.fault("kill mongod", "mongod-1", 2.5, 8)
    who, begin, until, error = UNTROUBLED[name]
    story.trouble(who, begin, until, error)
    _again(story, 35)
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


@pytest.mark.parametrize(("kind", "until"), [("cut", 4.0), ("mongod_kill", 13.0)])
@pytest.mark.parametrize("late", [-0.5, 0.5])
def test_effects_of_a_fault_last_as_long_as_its_kind_says(
    story: Story, kind: str, until: float, late: float
) -> None:
    target = "proxy-0" if kind == "cut" else "mongod-1"
    story.plan()
    story.run("w", 1, took=20)
    story.say("w", 9, "renewed", key="k", token="w@1", lease_until=19)
    story.fault(kind, target, 3, 3)
    story.trouble("w", until + late if kind != "cut" else 9.5, until + late + 0.1)
    _again(story, 21)
    if kind == "cut" or late > 0:
        assert story.findings() == {(Verdict.UNEXPLAINED, "k")}
    else:
        assert story.reasons() == [Reason.OUTAGE]


@pytest.mark.parametrize(("sec", "explained"), [(4.0, True), (1.0, False)])
def test_calls_that_take_long_without_a_fault(story: Story, sec: float, explained: bool) -> None:
    """The machine has stalled: for a third of a lease, or that explains nothing."""
    story.plan()
    story.run("w", 1)
    story.trouble("w", 3, 3 + sec, None)
    _again(story)
    if explained:
        assert story.reasons() == [Reason.STOPPED]
    else:
        assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


def test_call_that_fails_without_a_fault_explains_nothing(story: Story) -> None:
    story.plan()
    story.run("w", 1)
    story.trouble("w", 3, 3.1)
    _again(story)
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


def test_death_after_the_lease_explains_nothing(story: Story) -> None:
    story.plan()
    story.run("w", 1)
    story.beats("w", 0, 14)
    story.died("w", 14, "SIGKILL")
    _again(story)
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


def test_child_without_a_line_is_no_server(story: Story) -> None:
    """It was killed before it wrote anything: that explains nothing about others."""
    story.plan()
    story.run("w", 1)
    story.fault("sigkill", "supervisor-1/99", 2, 3)
    story.trouble("w", 3, 4)
    _again(story)
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


def test_share_of_time_in_which_a_fault_would_explain_a_repeat(story: Story) -> None:
    story.plan()
    story.run("w", 1, "done", settled="done")
    story.store()
    story.beats("w", 0, 100)
    story.fault("kill mongod", "mongod-1", 20, 25)
    story.trouble("w", 20, 25)
    assert story.verify().excused == pytest.approx((5 + LEASE_SEC) / 100)


def test_outage_that_was_over_explains_nothing(story: Story) -> None:
    story.plan(at=20)
    story.run("w", 21, "done")
    story.fault("kill mongod", "mongod-1", 2, 8)
    _again(story, 35)
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


def test_outage_after_the_end_of_the_lease_explains_nothing(story: Story) -> None:
    story.plan()
    story.run("w", 1, "done")
    story.fault("kill mongod", "mongod-1", 13, 14)
    _again(story, 20)
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


@pytest.mark.parametrize("kind", ["clock", "sweepers"])
def test_some_faults_explain_no_repeat(story: Story, kind: str) -> None:
    story.plan()
    story.run("w", 1, "done")
    story.fault(kind, "everything", 2, 8)
    _again(story)
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


@pytest.mark.parametrize("settled", ["timeout", None])
def test_repeat_by_a_handler_past_its_timeout(story: Story, settled: str | None) -> None:
    story.plan(kind="hang")
    story.run("w", 1, token="t")
    if settled:
        story.say("w", 3, "settled", key="k", token="t", outcome=settled)
    story.say("w", 30, "finish", key="k", token="t", outcome="done")
    _again(story, 5, attempts=2, history=[{"outcome": "retried"}])
    assert story.reasons() == [Reason.TIMEOUT]


@pytest.mark.parametrize(("at", "explained"), [(12.9, False), (13.1, True)])
def test_handler_that_hangs_explains_nothing_before_its_timeout(
    story: Story, at: float, explained: bool
) -> None:
    story.settings["timeout_sec"] = 12.0
    story.plan(kind="hang")
    story.run("w", 1, token="t")
    story.say("w", 30, "finish", key="k", token="t", outcome="raise")
    _again(story, at)
    if explained:
        assert story.reasons() == [Reason.TIMEOUT]
    else:
        assert (Verdict.UNEXPLAINED, "k") in story.findings()


def test_outcome_explains_no_repeat_before_it(story: Story) -> None:
    story.plan()
    story.run("w", 1, "raise", took=20)
    _again(story)
    assert story.findings() == {(Verdict.UNEXPLAINED, "k")}


@pytest.mark.parametrize("outcome", ["raise", "retry", "snooze"])
def test_repeat_by_outcome(story: Story, outcome: str) -> None:
    story.plan()
    story.run("w", 1, outcome)
    refunded = outcome == "snooze"
    entry = {"outcome": "snoozed" if refunded else "retried"}
    _again(story, attempts=1 if refunded else 2, history=[entry])
    assert story.reasons() == [Reason.OUTCOME]


def test_handler_that_ends_its_process_takes_others_with_it(story: Story) -> None:
    story.plan()
    story.run("w", 1)
    story.happy("fatal")
    story.run("w", 1.2, "exit", key="fatal", took=0.1)
    story.documents["tasks"].pop()
    story.run("v", 0.1, key="fatal", settled="released", took=0.1)
    _again(story)
    repeats = {one.key: one.cause.reason for one in story.verify().repeats}
    assert repeats["k"] == Reason.KILLED


def test_insert_repeated_after_the_task_was_deleted(story: Story) -> None:
    story.plan(stored=False)
    story.run("w", 1, "done", settled="done")
    story.run("v", 5, "done", settled="done")
    story.say("producer", 4, "uncertain", key="k", error="no answer")
    assert story.findings() != set()
    story.settings["deleted_when_done"] = ["q"]
    assert story.reasons() == [Reason.INSERT_REPEATED]


# Celery


CELERY_MESSAGE: dict[str, Any] = {"body": "", "headers": {"id": "c"}, "properties": {}}


@pytest.fixture
def sent(story: Story) -> Story:
    """A Celery task that was sent, and ran once; its message is done."""
    story.plan("c", how="celery", expect="done", max_attempts=1000)
    story.run("celery-1/7", 1, "done", key="c", settled="done", token="t1")
    story.store("c", payload=CELERY_MESSAGE)
    return story


@pytest.mark.parametrize(("settled", "lost"), [("done", True), ("failed", False), (None, False)])
def test_discard_that_failed_explains_no_lost_task_that_was_done(
    story: Story, settled: str | None, lost: bool
) -> None:
    story.plan()
    story.run("w", 1, "done", settled=settled)
    story.say("operator", 5, "discarding", key="k")
    story.say("operator", 6, "perhaps discarded", key="k")
    assert story.findings() == ({(Verdict.LOST, "k")} if lost else set())


@pytest.mark.parametrize(
    "changed",
    [
        {"queue": "r"},
        {"priority": 0},
        {"max_attempts": 3},
        {"payload": {"key": "k", "kind": "slow"}},
        {"payload": {"key": "k"}},
    ],
)
def test_document_that_is_not_as_planned(story: Story, changed: dict[str, Any]) -> None:
    story.plan(priority=5, max_attempts=4, how="many")
    story.run("w", 1, "done", settled="done")
    story.store()
    assert story.findings() == set()
    story.documents["tasks"][-1].update(changed)
    assert story.findings() == {(Verdict.IMPOSSIBLE, "k")}


def test_celery_task_is_known_by_its_id(sent: Story) -> None:
    result = sent.verify()
    assert result.findings == []
    assert result.counts["celery"] == 1


def test_celery_task_lost(sent: Story) -> None:
    sent.documents["tasks"].pop()
    assert sent.findings() == {(Verdict.LOST, "c")}


def test_celery_task_left_in_its_queue(sent: Story) -> None:
    sent.documents["tasks"].pop()
    sent.store("c", "pending", payload=CELERY_MESSAGE)
    assert sent.findings() == {(Verdict.NEVER_SETTLED, "c")}


def test_celery_message_stored_twice(sent: Story) -> None:
    sent.store("c", payload=CELERY_MESSAGE)
    assert sent.findings() == {(Verdict.IMPOSSIBLE, "c")}


def test_celery_task_runs_after_its_acknowledgement(sent: Story) -> None:
    sent.died("celery-1", 5, "sigkill")
    sent.run("celery-2/8", 9, "done", key="c", settled="done", token="t2")
    assert sent.findings() == {(Verdict.AFTER_SETTLEMENT, "c")}


@pytest.mark.parametrize("killed", [True, False])
def test_celery_task_repeated(story: Story, killed: bool) -> None:
    story.plan("c", how="celery", expect="done", max_attempts=1000)
    story.run("celery-1/7", 1, key="c", token="t1")
    if killed:
        story.fault("sigkill", "celery-1", 2, 2.1)
        story.died("celery-1", 2.1, "sigkill")
    story.run("celery-2/8", 9 + LEASE_SEC, "done", key="c", settled="done", token="t2")
    story.store("c", payload=CELERY_MESSAGE)
    if killed:
        assert story.reasons() == [Reason.KILLED]
    else:
        assert story.findings() == {(Verdict.UNEXPLAINED, "c")}


def test_celery_took_no_part(story: Story) -> None:
    story.plan("c", stored=False, how="celery")
    assert story.findings() == {(Verdict.LEDGER, None)}


# The archive


@pytest.fixture
def archived(story: Story) -> Story:
    """A task that was done, and moved to the archive."""
    story.plan()
    story.run("w", 1, "done", settled="done")
    story.store(archived=True)
    story.say("archiver", 5, "archive", phase="begin")
    story.say("archiver", 6, "archive", phase="end", archived=1)
    return story


def test_archived_task_is_not_lost(archived: Story) -> None:
    result = archived.verify()
    assert result.findings == []
    assert result.counts["archived"] == 1


def test_task_missing_from_the_archive(archived: Story) -> None:
    archived.happy("other")
    archived.documents[ledger.ARCHIVED].append(archived.documents["tasks"].pop())
    archived.documents[ledger.ARCHIVED].pop(0)
    assert archived.findings() == {(Verdict.LOST, "k")}


@pytest.mark.parametrize("again", [True, False])
def test_archived_task_is_in_one_place(archived: Story, again: bool) -> None:
    archived.store(archived=again)
    assert archived.findings() == {(Verdict.ARCHIVE, "k")}


def test_task_archived_before_it_was_done(archived: Story) -> None:
    archived.documents[ledger.ARCHIVED].clear()
    archived.store(status="pending", archived=True)
    assert (Verdict.NEVER_SETTLED, "k") in archived.findings()


@pytest.mark.parametrize("phase", ["begin", "failed"])
def test_archive_that_does_not_end(archived: Story, phase: str) -> None:
    archived.say("archiver", 7, "archive", phase=phase)
    assert archived.findings() == {(Verdict.ARCHIVE, None)}
    archived.say("archiver", 8, "archive", phase="end")
    assert archived.findings() == set()


def test_damaged_archive(archived: Story) -> None:
    error = "ArchiveDamaged('2 rows differ')"
    archived.say("archiver", 5.5, "archive", phase="failed", error=error)
    assert archived.findings() == {(Verdict.ARCHIVE, None)}


def test_archive_took_no_part(story: Story) -> None:
    story.say("archiver", 6, "archive", phase="end", archived=0)
    assert story.findings() == {(Verdict.LEDGER, None)}


# The package


def test_report_has_every_finding(story: Story) -> None:
    story.plan()
    result = story.verify()
    assert "k" in report.as_text(result)
    assert report.as_json(result)["verdicts"] == {"lost": 1}
    assert report.as_markdown([result]).count("\n") == 3


def test_table_counts_stalls_by_themselves(story: Story) -> None:
    story.plan()
    story.run("w", 1)
    story.beats("w", 0, 2)
    story.beats("w", 25, 27)
    _again(story)
    result = story.verify()
    header, _, row = report.as_markdown([result]).splitlines()
    cells = dict(zip(header.split(" | "), row.split(" | "), strict=True))
    assert cells["tasks acknowledged"] == "2"
    assert (cells["by a fault"], cells["by a stall"]) == ("0", "1")
    assert report.as_json(result)["excused"] > 0


def test_writer_and_reader_agree(tmp_path: Path) -> None:
    writer = ledger.Ledger(tmp_path, "worker-1/2")
    writer.write("start", key="k", token="t")
    writer.write_all([{"event": "finish", "key": "k", "at": 3.0}])
    writer.close()
    start, finish = ledger.read_lines(tmp_path)
    assert (start.who, start.event, start.fields["token"]) == ("worker-1/2", "start", "t")
    assert start.at <= ledger.now()
    assert finish.at == 3.0


INDEPENDENT = ["ledger", "history", "causes", "verifier", "report"]


@pytest.mark.parametrize("name", INDEPENDENT)
def test_verifier_shares_no_code_with_the_queue(name: str) -> None:
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{one.name}" for one in node.names}
    own = {f"tests.chaos.{one}" for one in INDEPENDENT}
    for module in imported:
        top = module.partition(".")[0]
        assert top != "microqueue"
        assert top != "tests" or any((module + ".").startswith(f"{one}.") for one in own), module
