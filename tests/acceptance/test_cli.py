from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import typer
from bson import Decimal128, ObjectId

import microqueue
from microqueue import BackoffPolicy, Queue, QueueSettings, Sweeper, TaskStatus
from microqueue import sweeper as sweeper_core
from microqueue.cli import app as cli_app
from microqueue.cli import formats, values
from microqueue.cli.logs import LogFormat, LogLevel, configure_logging
from microqueue.core import core_of
from microqueue.embedded import running
from microqueue.operations.call import Operation
from tests.acceptance.command_line import PROGRAM, Cli, bury
from tests.waiting import lasts, wait_for, wait_until_over

# Enqueuing and inspecting


def test_enqueue_stores_the_task_with_all_its_options(cli: Cli, queue: Queue[Any]) -> None:
    said = cli(
        *("enqueue", '{"to": "anna"}', "-q", "mails", "--priority", "7", "--delay", "1h30m"),
        *("--max-attempts", "3", "--dedupe-key", "anna-1", "--expires-in", "2d", "--id", "mail-1"),
        *("--header", "trace=abc", "--header", "empty="),
        *("--backoff", "base=1,jitter=none", "--visibility-timeout", "10m"),
    )
    assert said == "Enqueued mail-1 in queue 'mails', due in 1 h 30 m.\n"
    task = queue.get("mail-1")
    assert task is not None
    assert (task.queue, task.payload, task.priority) == ("mails", {"to": "anna"}, 7)
    assert (task.max_attempts, task.dedupe_key) == (3, "anna-1")
    assert task.next_retry_at is not None
    assert task.expires_at is not None
    assert lasts(task.next_retry_at - task.created_at, 90 * 60)
    assert lasts(task.expires_at - task.created_at, 2 * 86_400)
    assert task.headers == {"trace": "abc", "empty": ""}
    assert task.backoff == BackoffPolicy(base_sec=1, jitter="none")
    assert task.visibility_timeout_sec == 600


def test_enqueue_gives_the_task_as_json(cli: Cli) -> None:
    stored = cli.json("enqueue", '{"n": 1}', "--eta", "2100-01-01T01:00:00+01:00")
    assert ObjectId.is_valid(stored["id"])
    assert (stored["status"], stored["payload"]) == ("pending", {"n": 1})
    assert stored["next_retry_at"] == "2100-01-01T00:00:00+00:00"


def test_enqueue_reads_a_payload_from_stdin(cli: Cli, queue: Queue[Any]) -> None:
    cli("enqueue", "-", stdin='{"n": "ü"}')
    assert [task.payload for task in queue.peek()] == [{"n": "ü"}]


def test_enqueue_many_adds_a_task_per_line_in_order(cli: Cli, queue: Queue[Any]) -> None:
    assert cli("enqueue", "--many", stdin='{"n": 1}\n\n{"n": 2}\n') == (
        "Enqueued 2 tasks in queue 'default'.\n"
    )
    added = cli.json("enqueue", "--many", "--priority", "0", stdin='{"n": "3\u2028"}')
    assert [task["payload"] for task in added] == [{"n": "3\u2028"}]
    popped = [queue.pop() for _ in range(3)]
    assert [task.payload["n"] for task in popped if task] == [1, 2, "3\u2028"]


def test_wrong_line_of_many_is_named_and_nothing_is_added(cli: Cli, queue: Queue[Any]) -> None:
    cli("enqueue", "--many", stdin='{"n": 1}\n{"n": 2\n', status=1)
    assert "line 2 is not JSON" in cli.stderr
    assert queue.peek() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (['{"n": '], "the payload is not JSON"),
        (["[1]"], "must be a JSON object"),
        (['{"n": NaN}'], "NaN is not a JSON value"),
        (['{"n": 1000000000000000000000}'], "MongoDB cannot store this task"),
        (["{}", "--priority", "256"], "priority=256 is not valid"),
        (["{}", "--max-attempts", "0"], "max_attempts=0 is not valid"),
        (["{}", "--header", "trace"], "header='trace' is not valid: give key=value"),
        (["{}", "--delay", "1", "--eta", "2100-01-01T00:00:00Z"], "give delay or eta, not both"),
        (["{}", "-q", ""], "name='' is not valid"),
        (["{}", "--many"], "--many reads stdin"),
        (["--many", "--id", "1"], "need a single task"),
    ],
)
def test_value_that_cannot_be_accepted_is_one_line_and_status_1(
    cli: Cli, queue: Queue[Any], arguments: list[str], message: str
) -> None:
    cli("enqueue", *arguments, status=1)
    assert re.fullmatch(r"Error: .*\n", cli.stderr)
    assert message in cli.stderr
    assert queue.peek() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["enqueue", "{}", "--eta", "2026-05-01T12:00:00"], "has no timezone"),
        (["enqueue", "{}", "--eta", "2026-05-01"], "has no time and timezone"),
        (["enqueue", "{}", "--eta", "soon"], "is not a time"),
        (["enqueue", "{}", "--delay", "5x"], "is not a duration"),
        (["enqueue", "{}", "--delay", "-5"], "is not a duration"),
        (["enqueue", "{}", "--delay", "99999d"], "at most 36500 days"),
        (["dlq", "list", "--since", "2026-05-01T12:00:00"], "has no timezone"),
        (["dlq", "list", "--since", "yesterday"], "is not a time"),
        (["peek", "--status", "lost"], "lost"),
        (["peek", "--no-such-option"], "No such option"),
        (["dlq", "replay"], "which dead letters? Give: ids, or filters"),
        (["dlq", "replay", "1", "--code", "x"], "give only one of"),
        (["dlq", "discard", "--all", "--code", "x"], "give only one of"),
        (["dlq", "replay", "--all"], "Give --queue NAME, or --all-queues"),
        (["dlq", "discard", "--code", "x"], "Give --queue NAME, or --all-queues"),
        (["dlq", "discard", "--all", "-q", "x", "--all-queues"], "not both"),
        (["purge", "--yes"], "Give --queue NAME, or --all-queues"),
        (["purge", "-q", "x", "--all-queues"], "not both"),
        (["pipeline", "archive", "kept"], "Give --queue NAME, or --all-queues"),
        (["pipeline", "replay", "--where", "true"], "Give --queue NAME, or --all-queues"),
        (["enqueue", "{}", "--if-absent"], "--if-absent needs --id or --dedupe-key"),
        (["sweep", "--once", "--every", "5"], "not both"),
        (["sweep", "--metrics-port", "9"], "--metrics-port needs --every"),
        (["stats", "--every", "5"], "--every needs --watch"),
    ],
)
def test_wrong_usage_is_reported_before_connecting_with_status_2(
    absent: str, arguments: list[str], message: str
) -> None:
    cli = Cli()
    cli(*arguments, "--uri", absent, status=2)
    assert message in re.sub(r"[\s│]+", " ", cli.stderr)


def test_duplicate_is_rejected_with_the_id_that_is_in_the_way(cli: Cli) -> None:
    first = cli.json("enqueue", "{}", "--dedupe-key", "k")
    cli("enqueue", "{}", "--dedupe-key", "k", status=1)
    assert first["id"] in cli.stderr


def test_shared_options_work_before_and_after_the_command(cli: Cli, queue: Queue[Any]) -> None:
    cli("-q", "one", "enqueue", "{}")
    cli("-q", "one", "enqueue", "{}", "-q", "two")
    assert json.loads(cli("--json", "peek", "-q", "one"))[0]["queue"] == "one"
    assert [task.queue for task in queue.peek(queue="two")] == ["two"]


def test_peek_shows_the_newest_first_and_is_read_only(
    cli: Cli, queue: Queue[Any], microqueue_database: Any
) -> None:
    queue.enqueue_many([{"n": number} for number in range(12)])
    before = list(microqueue_database.tasks.find())
    assert [task["payload"]["n"] for task in cli.json("peek")] == list(range(11, 1, -1))
    assert len(cli.json("peek", "-n", "12")) == 12
    assert cli.json("peek", "--status", "done") == []
    assert list(microqueue_database.tasks.find()) == before


def test_pipe_gets_whole_ids_and_payloads_however_narrow(
    cli: Cli, queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    task = queue.enqueue({"text": "x" * 500})
    shown = cli("peek")
    assert str(task.id) in shown
    assert "x" * 500 in shown


def test_empty_queue_is_said_so_with_the_names_of_others(cli: Cli, queue: Queue[Any]) -> None:
    assert cli("peek") == "No tasks in any queue.\n"
    assert cli("peek", "-q", "default") == "No tasks in queue 'default'.\n"
    queue.enqueue({})
    done = ("peek", "--status", "done")
    assert cli(*done) == "No done tasks in any queue.\n"
    assert cli(*done, "-q", "default") == "No done tasks in queue 'default'.\n"
    assert "Other queues: default" in cli("peek", "-q", "mails")
    assert "Other queues: default" in cli("stats", "-q", "mails")


@pytest.mark.parametrize(
    "task_id",
    [
        ObjectId("6650c0ffee0123456789abcd"),
        "order-7",
        "0" * 24,
        "42",
        43,
        -2,
        2**62,
        UUID("6f9619ff-8b86-4d01-b42d-00cf4fc964ff"),
    ],
    ids=repr,
)
def test_show_finds_an_id_of_any_type(cli: Cli, queue: Queue[Any], task_id: Any) -> None:
    queue.enqueue({"n": 1}, task_id=task_id)
    shown = json.loads(cli("--json", "show", "--", str(task_id)))
    assert shown["id"] == (task_id if isinstance(task_id, int) else str(task_id))


def test_an_id_in_double_quotes_is_text(cli: Cli, queue: Queue[Any]) -> None:
    queue.enqueue({"stored": "as a number"}, task_id=17)
    queue.enqueue({"stored": "as text"}, task_id="17")
    assert cli.json("show", "17")["payload"] == {"stored": "as a number"}
    assert cli.json("show", '"17"')["payload"] == {"stored": "as text"}


def test_show_tells_the_history_of_a_task(cli: Cli, queue: Queue[Any]) -> None:
    task = queue.enqueue({"n": 1}, headers={"trace": "abc"})
    popped = queue.pop(worker_id="worker-7")
    assert popped is not None
    queue.mark_retry(popped, ValueError("no [bold]paper[/bold]\nleft \x1b[31mred"))
    shown = cli("show", str(task.id))
    assert '"n": 1' in shown
    assert 'trace  "abc"' in shown
    row = next(line for line in shown.splitlines() if "retried" in line)
    assert "worker-7" in row
    assert "ValueError: no [bold]paper[/bold] left \\x1b[31mred" in row
    assert "\x1b" not in shown


def test_show_prints_an_outcome_of_another_version(
    cli: Cli, queue: Queue[Any], microqueue_database: Any
) -> None:
    task = queue.enqueue({"n": 1})
    popped = queue.pop(worker_id="worker-7")
    assert popped is not None
    queue.mark_retry(popped, "no paper")
    microqueue_database.tasks.update_one(
        {"_id": task.id}, {"$set": {"history.0.outcome": "vaporised"}}
    )
    row = next(line for line in cli("show", str(task.id)).splitlines() if "vaporised" in line)
    assert "worker-7" in row
    assert cli.json("show", str(task.id))["history"][0]["outcome"] == "vaporised"


def test_json_has_what_it_has_no_type_for_as_strings(
    cli: Cli, queue: Queue[Any], microqueue_database: Any
) -> None:
    reference = ObjectId()
    payload = {
        "reference": reference,
        "at": datetime(2026, 5, 1, 12, tzinfo=UTC),
        "bytes": b"\x00\xff",
        "price": Decimal128("1.10"),
        "nan": float("nan"),
        "list": [1, 2.5, None, True],
    }
    task = queue.enqueue(payload)
    assert cli.json("show", str(task.id))["payload"] == {
        "reference": str(reference),
        "at": "2026-05-01T12:00:00+00:00",
        "bytes": "AP8=",
        "price": "1.10",
        "nan": "nan",
        "list": [1, 2.5, None, True],
    }


def test_unknown_id_is_an_error(cli: Cli) -> None:
    for command in (["show"], ["dlq", "show"], ["dlq", "replay"], ["dlq", "discard"]):
        cli(*command, "missing", status=1)
        assert cli.stderr == "Error: there is no task 'missing'\n"


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_all_unknown_ids_are_named_and_nothing_is_done(
    cli: Cli, queue: Queue[Any], verb: str
) -> None:
    bury(queue, task_id="known")
    assert cli("dlq", verb, "first", "known", "second", status=1) == ""
    assert cli.stderr == "Error: there are no tasks 'first', 'second'\n"
    assert queue.dead_letters.stats().total == 1


# Dead letters


def test_no_dead_letters_is_good_news(cli: Cli, queue: Queue[Any]) -> None:
    assert cli("dlq", "list", "-q", "default") == "No dead letters in queue 'default'.\n"
    assert cli("dlq", "list") == "No dead letters in any queue.\n"
    bury(queue, code="timeout")
    none = "No match among the 1 dead letters of all queues.\n"
    assert cli("dlq", "list", "--code", "other") == none


def test_dead_letters_are_listed_by_code_text_and_time(cli: Cli, queue: Queue[Any]) -> None:
    late = bury(queue, "the gateway is down", code="timeout")
    poor = bury(queue, "no money", code="declined")

    def listed(*filters: str) -> set[str]:
        return {letter["id"] for letter in cli.json("dlq", "list", *filters)["tasks"]}

    both = {str(late), str(poor)}
    assert listed() == both
    assert listed("--code", "declined") == {str(poor)}
    assert listed("--text", "GATEWAY") == {str(late)}
    assert listed("--since", "1h") == both
    assert listed("--until", "1h ago") == set()
    assert listed("--since", "2100-01-01T00:00:00Z") == set()
    assert listed("--until", "2100-01-01T00:00:00Z") == both
    assert "no money" in cli("dlq", "list")


def test_dead_letters_are_paged_by_the_cursor_that_the_page_names(
    cli: Cli, queue: Queue[Any]
) -> None:
    ids = [str(bury(queue, task_id=f"letter-{number}")) for number in range(3)]
    first = cli.json("dlq", "list", "--limit", "2")
    rest = cli.json("dlq", "list", "--limit", "2", "--cursor", first["next_cursor"])
    assert [task["id"] for task in first["tasks"] + rest["tasks"]] == ids[::-1]
    assert rest["next_cursor"] is None
    assert "add --cursor" in cli("dlq", "list", "--limit", "2")
    cli("dlq", "list", "--cursor", "nonsense", status=1)
    assert "cursor='nonsense' is not valid" in cli.stderr


def test_dead_letter_commands_reject_a_task_that_is_alive(cli: Cli, queue: Queue[Any]) -> None:
    queue.enqueue({}, task_id="alive")
    for command in ("show", "replay", "discard"):
        cli("dlq", command, "alive", status=1)
        assert "task 'alive' is pending; it must be failed" in cli.stderr
    assert queue.get("alive") is not None


def test_dead_letter_is_shown_like_a_task(cli: Cli, queue: Queue[Any]) -> None:
    letter = bury(queue, "no money", code="declined")
    assert "declined: no money" in cli("dlq", "show", str(letter))


def test_replay_by_id_sends_letters_of_any_queue_back(cli: Cli, queue: Queue[Any]) -> None:
    mails: Queue[Any] = Queue(core_of(queue).collections.tasks, "mails")
    ids = [bury(queue, task_id=7), bury(mails, task_id="mail")]
    other = bury(queue)
    report = cli.json("dlq", "replay", "7", "mail", "--delay", "1h")
    assert (report["matched"], report["replayed"]) == (2, 2)
    for task_id in ids:
        task = queue.get(task_id)
        assert task is not None
        assert (task.status, task.attempts, task.replays) == (TaskStatus.PENDING, 0, 1)
        assert task.next_retry_at is not None
    left = queue.get(other)
    assert left is not None
    assert left.status is TaskStatus.FAILED


def test_replay_can_keep_the_attempts_and_stop_at_a_limit(cli: Cli, queue: Queue[Any]) -> None:
    oldest = bury(queue)
    bury(queue)
    options = ("--all", "-q", "default", "--keep-attempts", "--limit", "1", "--yes")
    assert cli("dlq", "replay", *options) == "Replayed 1 dead letter of queue 'default'.\n"
    task = queue.get(oldest)
    assert task is not None
    assert (task.status, task.attempts) == (TaskStatus.PENDING, 1)
    assert queue.dead_letters.stats().total == 1


def test_replay_can_be_spread_over_a_period(cli: Cli, queue: Queue[Any]) -> None:
    for n in range(4):
        queue.enqueue({"n": n})
        task = queue.pop()
        assert task is not None
        queue.mark_failure(task, "no")
    cli("dlq", "replay", "--all", "-q", "default", "--spread", "1h", "--yes")
    stats = queue.stats()
    assert (stats.ready, stats.delayed) == (1, 3)
    instants = [task.next_retry_at for task in queue.peek() if task.next_retry_at]
    assert max(instants) - min(instants) == timedelta(minutes=30)


def test_replay_tells_which_letters_could_not_go_back(cli: Cli, queue: Queue[Any]) -> None:
    letter = bury(queue, dedupe_key="k")
    queue.enqueue({}, dedupe_key="k")
    assert str(letter) in cli("dlq", "replay", "--all", "-q", "default", "--yes")
    assert queue.dead_letters.stats().total == 1


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_filter_needs_a_yes_where_nobody_can_be_asked(
    cli: Cli, queue: Queue[Any], verb: str
) -> None:
    bury(queue, code="declined")
    bury(queue, code="timeout")
    declined = ("dlq", verb, "--code", "declined", "-q", "default")
    cli(*declined, status=1)
    assert "add --yes" in cli.stderr
    assert cli(*declined, "--dry-run").startswith("1 dead letter of queue 'default' would be")
    assert queue.dead_letters.stats().total == 2
    cli(*declined, "--yes")
    assert queue.dead_letters.stats().by_code == {"timeout": 1}


@pytest.mark.parametrize("verb", ["replay", "discard"])
def test_filter_asks_at_a_terminal(
    cli: Cli, queue: Queue[Any], verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.cli.prompts.at_terminal", lambda: True)
    bury(queue)
    cli("dlq", verb, "--all", "-q", "default", stdin="n\n", status=1)
    assert "1 dead letter of queue 'default'?" in cli.stderr
    assert queue.dead_letters.stats().total == 1
    cli("dlq", verb, "--all", "-q", "default", stdin="y\n")
    assert queue.dead_letters.stats().total == 0


def test_discard_deletes_the_named_letters_for_good(cli: Cli, queue: Queue[Any]) -> None:
    gone, kept = bury(queue), bury(queue)
    assert cli.json("dlq", "discard", str(gone)) == {
        "matched": 1,
        "discarded": 1,
        "dry_run": False,
        "queues": ["default"],
    }
    assert queue.get(gone) is None
    assert queue.get(kept) is not None
    none = ("dlq", "discard", "--text", "no such text", "-q", "default", "--yes")
    assert cli(*none) == "Nothing to discard in queue 'default'.\n"


# Running and watching


def test_worker_works_off_the_queue_with_a_handler_of_the_current_directory(
    cli: Cli, queue: Queue[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def handle(payload):\n    return {'half': 1 / payload['n']}\n"
    (tmp_path / "shop_handlers.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    good = queue.enqueue({"n": 2})
    bad = queue.enqueue({"n": 0}, max_attempts=1)
    options = ["--burst", "--worker-id", "anna", "--keep-result", "--log-level", "debug"]
    said = cli("worker", "shop_handlers:handle", *options)
    assert said == "Handled 2 tasks.\n"
    assert f"task {good.id}: done" in cli.stderr
    assert re.search(f"task {bad.id}: .* dead letter", cli.stderr)
    done, failed = queue.get(good.id), queue.get(bad.id)
    assert done is not None
    assert failed is not None
    assert done.result == {"half": 0.5}
    worker_id = done.history[0].worker_id
    assert worker_id is not None
    assert worker_id.startswith("anna:")
    assert failed.error is not None
    assert failed.error.code == "ZeroDivisionError"
    cli("worker", "shop_handlers:missing", status=1)
    assert "has no 'missing'" in cli.stderr


def test_worker_awaits_a_coroutine(
    cli: Cli, queue: Queue[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import asyncio\nasync def later(payload):\n    await asyncio.sleep(0.01)\n"
    (tmp_path / "later_handlers.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    queue.enqueue_many([{}] * 30)
    said = cli("worker", "later_handlers:later", "--burst", "--concurrency", "4", "--json")
    assert json.loads(said) == {"handled": 30}
    assert queue.stats().done == 30


def test_sweep_reports_what_it_did(
    cli: Cli, microqueue_database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROQUEUE_BACKOFF", '{"base_sec": 60, "jitter": "none"}')
    brief = Queue[Any](microqueue_database, settings=QueueSettings(visibility_timeout=0.001))
    other = Queue[Any](microqueue_database, "other", settings=brief.settings)
    for queue in (brief, other):
        queue.enqueue({})
        queue.pop()
    wait_until_over(brief)
    assert cli.json("sweep", "--job", "promote_due")["reclaimed"] == 0
    assert cli.json("sweep", "-q", "other")["reclaimed"] == 1
    assert re.fullmatch(r"Swept in .*: 1 reclaimed\.\n", cli("sweep", "--once"))
    assert re.fullmatch(r"Swept in .*: no changes\.\n", cli("sweep", "--once"))
    cli("sweep", "--job", "nonsense", status=1)
    assert "'nonsense'" in cli.stderr


def test_sweep_skips_its_turn_while_another_one_sweeps(
    cli: Cli, queue: Queue[Any], microqueue_database: Any
) -> None:
    later = datetime.now(UTC) + timedelta(minutes=10)
    lock = {"_id": "sweeper:tasks", "token": "other", "expires_at": later}
    microqueue_database.microqueue_locks.insert_one(lock)
    assert cli("sweep") == "Skipped: another sweeper is running.\n"
    assert cli.json("sweep")["skipped"] is True


def test_sweep_fails_when_a_job_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Operation[None]:
        raise microqueue.OperationFailed("out of order")
        yield

    jobs = {**sweeper_core.JOB_TABLE, "promote_due": sweeper_core.Job(("promoted",), broken)}
    monkeypatch.setattr(sweeper_core, "JOB_TABLE", jobs)
    cli("sweep", status=1)
    assert "promote_due: out of order" in cli.stderr


def test_stats_count_the_tasks_and_the_reasons_of_failures(cli: Cli, queue: Queue[Any]) -> None:
    bury(queue, code="declined")
    queue.enqueue({}, delay=3600)
    queue.enqueue({})
    found = cli.json("stats")
    counts = {name: found[name] for name in ("ready", "delayed", "pending", "done", "failed")}
    assert counts == {"ready": 1, "delayed": 1, "pending": 2, "done": 0, "failed": 1}
    assert found["dead_letters"]["by_code"] == {"declined": 1}
    shown = cli("stats")
    assert re.search(r"^ready +1 +oldest: \d", shown, re.MULTILINE)
    assert re.search(r"^delayed +1 +next in (1 h|59 m)", shown, re.MULTILINE)
    assert re.search(r"^failed +1 +1 declined", shown, re.MULTILINE)


def test_stats_above_the_limit_are_marked_and_exact_on_request(
    cli: Cli, queue: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROQUEUE_COUNT_LIMIT", "3")
    for code in ("a", "b", "b", "b", "b", "b"):
        bury(queue, code=code)
    queue.enqueue_many([{}] * 3)
    found = cli.json("stats")
    assert (found["estimated"], found["ready"]) == (["failed"], 3)
    assert (found["dead_letters"]["estimated"], found["failed"] >= 4) == (True, True)
    assert re.search(r"^failed +~[45678] +of the newest 4: 4 b", cli("stats"), re.MULTILINE)
    found = cli.json("stats", "--exact")
    assert (found["estimated"], found["failed"]) == ([], 6)
    assert found["dead_letters"]["by_code"] == {"b": 5, "a": 1}
    assert re.search(r"^failed +6 +5 b, 1 a", cli("stats", "--exact"), re.MULTILINE)
    assert re.search(
        r"No match among the ~\d dead letters of", cli("dlq", "list", "--code", "other")
    )


@pytest.mark.parametrize(
    ("value", "estimated", "shown"),
    [(1234, False, "1,234"), (1_234_567, True, "~1,230,000"), (87, True, "~87"), (0, True, "~0")],
)
def test_estimate_is_written_as_one(value: int, *, estimated: bool, shown: str) -> None:
    assert formats.figure(formats.number(value, estimated=estimated)) == shown


def test_indexes_are_created_and_shown_with_the_one_that_a_claim_uses(cli: Cli) -> None:
    first = cli.json("indexes")
    assert "ready" in first["created"]
    assert first["pop_uses"] == ["ready"]
    again = cli("indexes")
    assert cli.json("indexes")["created"] == []
    assert "All indexes exist." in again
    assert "A claim uses: ready." in again
    assert re.search(r"^ready +queue, -priority, position, _id +\{", again, re.MULTILINE)


def test_doctor_is_green_or_says_what_to_do(
    cli: Cli, queue: Queue[Any], microqueue_database: Any
) -> None:
    queue.ensure_indexes()
    Sweeper(queue).run_once()
    healthy = cli("doctor")
    assert {line[0] for line in healthy.splitlines()} == {"✓"}
    microqueue_database.tasks.drop_index("ready")
    sick = cli("doctor", status=1)
    assert "✗ indexes of tasks: missing: ready\n  run: microqueue indexes" in sick
    found = cli.json("doctor", status=1)
    assert found["ok"] is False
    assert {check["name"]: check["ok"] for check in found["checks"]}["server version"] is True


def test_backoff_is_shown_without_a_server(absent: str) -> None:
    cli = Cli()
    policy = ("--base-sec", "3", "--factor", "2", "--max-sec", "20", "--jitter", "equal")
    found = cli.json("backoff", *policy, "--attempts", "4")
    spans = [(wait["shortest_sec"], wait["longest_sec"]) for wait in found["waits"]]
    assert spans == [(1.5, 3.0), (3.0, 6.0), (6.0, 12.0), (10.0, 20.0)]
    assert found["waits"][-1]["longest_total_sec"] == 41.0
    shown = cli("backoff", *policy, "--attempts", "4")
    assert re.search(r"^ +4 +10 s to 20 s +█{20}░{20} +41 s", shown, re.MULTILINE)
    cli("backoff", "--factor", "0.5", status=1)
    assert "factor=0.5 is not valid" in cli.stderr


# Errors and secrets


@pytest.mark.parametrize("debug", [False, True])
def test_missing_server_is_told_in_time_and_without_the_password(absent: str, debug: bool) -> None:
    cli = Cli()

    def took_sec() -> float:
        started = time.monotonic()
        cli("stats", "--uri", absent, *(["--debug"] if debug else []), status=1)
        return time.monotonic() - started

    assert min(took_sec() for _ in range(3)) < 5  # The machine may be busy with something else.
    assert "no MongoDB server answered in time" in cli.stderr
    assert "sesame" not in cli.stderr
    assert ("Traceback" in cli.stderr) is debug
    assert debug or len(cli.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        "mongodb://anna:sesame@host:port/",
        "mongodb://anna:ses/same@host/",
        "mongodb://anna:12/same@host/",
        "mongodb://anna:ses@same@host/",
        "mongodb://anna:sesame?same@host/",
        "mongodb://anna:ses same@host/a b",
        "http://anna:sesame@host/",
    ],
)
@pytest.mark.parametrize("debug", [False, True])
def test_wrong_uri_is_told_without_the_password(wrong: str, debug: bool) -> None:
    cli = Cli()
    cli("stats", "--uri", wrong, *(["--debug"] if debug else []), status=1)
    assert "cannot use the MongoDB URI" in cli.stderr
    assert "same" not in cli.stderr
    with pytest.raises(microqueue.InvalidArgument) as caught:
        Queue.from_uri(wrong)
    assert "same" not in str(caught.value)


def test_log_has_no_password_and_no_traceback_unless_debugging(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger = logging.getLogger("microqueue.test")
    for debug in (False, True):
        configure_logging(LogLevel.INFO, LogFormat.TEXT, debug=debug)
        try:
            int("mongodb://anna:sesame@host")
        except ValueError:
            logger.exception(
                "lost mongodb://anna:sesame@host/?tlsCertificateKeyFilePassword=sesame"
            )
        logged = capsys.readouterr().err
        assert "lost mongodb://***@host" in logged
        assert "sesame" not in logged
        assert ("Traceback" in logged) is debug


def test_unexpected_error_is_shown_without_a_password(capsys: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError("no way to mongodb://anna:sesame@host")
    cli_app.print_unexpected(RuntimeError, error, None)
    assert capsys.readouterr().err == "RuntimeError: no way to ***@host\n"


@pytest.mark.measured
def test_missing_extra_is_told_in_one_sentence() -> None:
    code = "import sys; sys.modules['typer'] = None; from microqueue.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "pip install 'microqueue[cli]'" in result.stderr


def test_version_is_told() -> None:
    assert Cli()("--version") == f"microqueue {microqueue.__version__}\n"


# As a separate process


@pytest.mark.measured
def test_up_serves_the_other_commands_until_sigterm_and_keeps_the_tasks(home: Path) -> None:
    cli = Cli()
    process = subprocess.Popen(
        [*PROGRAM, "up", "--every", "100ms"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(8)]
        assert lines[0].rstrip().endswith(str(home))
        assert lines[1].strip() == running(home)
        assert any("microqueue enqueue" in line for line in lines)
        kept = cli.json("enqueue", "{}", "--id", "kept")["id"]
        cli("enqueue", "{}", "--id", "brief", "--expires-in", "10ms")
        # By the sweeper of `up`.
        wait_for(lambda: cli.json("show", "brief")["status"] == "failed", 90)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
        assert running(home) is None
    finally:
        process.kill()
        process.communicate()
    assert cli.json("show", kept)["status"] == "pending"  # From a server for this command alone.
    assert running(home) is None


def test_up_takes_no_uri(absent: str) -> None:
    cli = Cli()
    cli("up", "--uri", absent, status=1)
    assert "leave --uri out" in cli.stderr


@pytest.mark.measured
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_watching_stats_ends_cleanly_on_a_signal(
    database_uri: str, queue: Queue[Any], stop: signal.Signals
) -> None:
    queue.enqueue({})
    command = [*PROGRAM, "stats", "--watch", "--every", "0.05", "--json", "--uri", database_uri]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = [json.loads(process.stdout.readline())["ready"] for _ in range(2)]
    process.send_signal(stop)
    _, errors = process.communicate(timeout=90)
    assert (process.returncode, errors, seen) == (0, "", [1, 1])


def test_worker_finishes_its_task_when_it_is_terminated(
    database_uri: str, queue: Queue[Any], tmp_path: Path
) -> None:
    code = (
        "import time\ndef handle(payload):\n    print('at it', flush=True)\n    time.sleep(0.5)\n"
    )
    (tmp_path / "slow_handlers.py").write_text(code, encoding="utf-8")
    task = queue.enqueue({})
    process = subprocess.Popen(
        [*PROGRAM, "worker", "slow_handlers:handle", "--uri", database_uri],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(microqueue.__file__).parents[1])},
    )
    assert process.stdout is not None
    while "at it" not in process.stdout.readline():
        assert process.poll() is None
    process.terminate()
    said, _ = process.communicate(timeout=90)
    assert (process.returncode, said) == (0, "Handled 1 task.\n")
    done = queue.get(task.id)
    assert done is not None
    assert done.status is TaskStatus.DONE


def test_second_signal_releases_the_running_task_at_once(
    database_uri: str, queue: Queue[Any], tmp_path: Path
) -> None:
    code = "import time\ndef handle(payload):\n    print('at it', flush=True)\n    time.sleep(60)\n"
    (tmp_path / "stuck_handlers.py").write_text(code, encoding="utf-8")
    task = queue.enqueue({})
    process = subprocess.Popen(
        [*PROGRAM, "worker", "stuck_handlers:handle", "--uri", database_uri, "--grace", "5m"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(microqueue.__file__).parents[1])},
    )
    assert process.stdout is not None
    while "at it" not in process.stdout.readline():
        assert process.poll() is None
    process.terminate()
    process.send_signal(signal.SIGINT)  # Another one: two of a kind may arrive as one.
    process.communicate(timeout=90)
    assert process.returncode == 0
    back = queue.get(task.id)
    assert back is not None
    assert (back.status, back.attempts) == (TaskStatus.PENDING, 0)


def test_sweep_repeats_until_a_signal(database_uri: str, queue: Queue[Any]) -> None:
    command = [*PROGRAM, "sweep", "--every", "0.05", "--json", "--uri", database_uri]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    reports = [json.loads(process.stdout.readline()) for _ in range(3)]
    process.terminate()
    process.communicate(timeout=90)
    assert process.returncode == 0
    assert len({report["at"] for report in reports}) == 3
    assert Sweeper(queue).run_once().skipped is False  # It gave its lock back.


# Reading and writing values


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5),
        ("0.5", 0.5),
        (".5", 0.5),
        ("30s", 30),
        ("5m", 300),
        ("2h", 7200),
        ("1d", 86_400),
        ("1w", 604_800),
        ("250ms", 0.25),
        ("1h30m", 5400),
        ("1 h 30 m", 5400),
        ("2H", 7200),
    ],
)
def test_durations_are_seconds_or_have_units(text: str, seconds: float) -> None:
    assert values.read_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "h", "5 x", "-1", "1e3", "inf", "nan", "1h-30m", "5,5"])
def test_other_durations_are_rejected(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a duration"):
        values.read_duration(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123, "12 ms"),
        (3.42, "3.4 s"),
        (42.4, "42 s"),
        (59.9, "60 s"),
        (75, "1 m 15 s"),
        (3600, "1 h"),
        (3725, "1 h 2 m"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations_are_written_for_people(value: float, text: str) -> None:
    assert formats.seconds(value) == text


def test_text_that_plays_with_the_terminal_is_escaped() -> None:
    assert formats.printable("a\x1b[2Jb\x9b\u202e\tc\nd") == "a\\x1b[2Jb\\x9b\\u202e\\tc\nd"


def test_type_of_an_error_without_a_text_is_shown_once(cli: Cli, queue: Queue[Any]) -> None:
    task = queue.enqueue({})
    claimed = queue.pop()
    assert claimed is not None
    queue.mark_failure(claimed, LookupError())
    (row,) = (line for line in cli("dlq", "list").splitlines() if str(task.id) in line)
    assert row.split()[-2:] == ["LookupError", "-"]
    assert "LookupError: LookupError" not in cli("show", str(task.id))
    assert "LookupError" in cli("show", str(task.id))
