"""What the hot operations cost with a large backlog, counted in index keys by the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from benchmarks.flatness import HOT, examined
from microqueue import Queue, Sweeper
from microqueue.core import core_of
from microqueue.new_task import NewTask
from microqueue.operations.enqueue import new_document
from microqueue.settings import QueueSettings
from microqueue.testing import FakeClock
from tests.integration.queues import fill, profiled

EACH = 100_000


def stored_task(queue: str, now: datetime) -> dict[str, Any]:
    """Return a ready task as it is stored, without its id."""
    task = new_document(
        NewTask.model_construct(payload={}),
        queue=queue,
        payload={},
        settings=QueueSettings(),
        now=now,
        position=0,
    )
    return {name: value for name, value in task.items() if name != "_id"}


@pytest.fixture(scope="module")
def large_queue(new_database: Callable[[], Any]) -> Iterator[Queue[Any]]:
    """100,000 tasks each that are ready, delayed after a failure, and done.

    Half of the ready ones may expire.
    """
    database = new_database()
    queue: Queue[Any] = Queue(database, clock=FakeClock())
    now = queue.now() - timedelta(hours=1)  # What is fresh is read once more by a batch claim.
    end = {"$dateAdd": {"startDate": now + timedelta(days=1), "unit": "second", "amount": "$n"}}
    end_of_odd = {"$cond": [{"$mod": ["$n", 2]}, end, None]}
    task = {
        **stored_task("default", now),
        "priority": {"$mod": ["$n", 3]},
        "position": "$n",
        "payload": {"n": "$n"},
    }
    ready = {**task, "expires_at": end_of_odd, "deadline_at": end_of_odd}
    due = {"$dateAdd": {"startDate": now + timedelta(hours=2), "unit": "second", "amount": "$n"}}
    later = {"next_retry_at": due, "deadline_at": due, "attempts": 1}
    later |= {"expires_at": now + timedelta(days=1)}
    done = {"status": "done", "finished_at": now, "deadline_at": now, "attempts": 1}
    fill(database.tasks, ready, {**task, **later}, {**task, **done}, each=EACH)
    queue.ensure_indexes()
    yield queue
    database.drop_collection("tasks")


@pytest.mark.parametrize("name", HOT)
def test_examines_few_keys_whatever_the_backlog(large_queue: Queue[Any], name: str) -> None:
    found = examined(large_queue, HOT[name])
    assert not any("COLLSCAN" in plan for plan in found.plans)
    assert found.keys <= HOT[name].most
    assert found.documents <= HOT[name].most


MANY = 40
EACH_OF_MANY = 50


@pytest.fixture(scope="module")
def many_queues(new_database: Callable[[], Any]) -> Iterator[Queue[Any]]:
    """40 queues with 50 tasks each that are delayed, held under a live lease, and done."""
    database = new_database()
    queue: Queue[Any] = Queue(database, clock=FakeClock())
    queue.ensure_indexes()
    now = queue.now()
    later, earlier = now + timedelta(minutes=9), now - timedelta(hours=1)
    states: list[dict[str, Any]] = [
        {"next_retry_at": later, "deadline_at": later},
        {"status": "processing", "deadline_at": later, "lease_token": "t", "worker_id": "w"},
        {"status": "done", "finished_at": earlier, "deadline_at": earlier},
    ]
    documents = [
        new_document(
            NewTask.model_construct(payload={}),
            queue=f"q{number}",
            payload={"n": n},
            settings=QueueSettings(),
            now=now,
            position=n,
        )
        | state
        for number in range(MANY)
        for state in states
        for n in range(EACH_OF_MANY)
    ]
    database.tasks.insert_many(documents, ordered=False)
    yield queue
    database.client.drop_database(database)


SWEEPS = ["promote_due", "reclaim_stuck", "bury_exhausted", "expire_undelivered", "purge_finished"]


@pytest.mark.parametrize("job", SWEEPS)
@pytest.mark.parametrize("queues", [None, ["q0", "q1"]], ids=["all queues", "some queues"])
def test_sweep_skips_from_queue_to_queue(
    many_queues: Queue[Any], job: str, queues: list[str] | None
) -> None:
    with profiled(core_of(many_queues).collections.database) as recorded:
        assert getattr(Sweeper(many_queues, queues=queues), job)() == 0
    assert "COLLSCAN" not in {str(entry.get("planSummary")) for entry in recorded}
    keys = sum(entry.get("keysExamined", 0) for entry in recorded)
    assert 0 < keys <= 2 * (MANY if queues is None else len(queues)) + 1
    assert sum(entry.get("docsExamined", 0) for entry in recorded) == 0


def test_moving_old_dead_letters_does_not_read_the_runs_that_stay(
    new_database: Callable[[], Any],
) -> None:
    database, runs, old = new_database(), 500, 60  # The profiler keeps no more than 1 MB.
    settings = QueueSettings(dead_letters="collection")
    queue: Queue[Any] = Queue(database, settings=settings, clock=FakeClock())
    now = queue.now()
    failed = {**stored_task("default", now), "status": "failed"}
    earlier = now - timedelta(days=1)
    queue.ensure_indexes()
    instants = [f"2026-05-01T00:00:00.{n:03}Z" for n in range(runs)]
    ended = [
        *[(f"schedule:default:often:{one}", now) for one in instants],
        *[(n, earlier) for n in range(old)],
    ]
    database.tasks.insert_many(
        {**failed, "_id": one, "updated_at": at, "finished_at": at} for one, at in ended
    )
    with profiled(database) as recorded:
        Sweeper(queue, jobs=["move_dead_letters"]).run_once()
    assert database.tasks.count_documents({}) == runs
    assert database.tasks_dlq.count_documents({}) == old
    reads = [entry for entry in recorded if "replaying" in entry["command"].get("filter", {})]
    assert sum(entry["docsExamined"] for entry in reads) == runs + old
    database.client.drop_database(database)


def test_what_expired_does_not_keep_what_is_due_from_being_ready(
    microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    settings = QueueSettings(promote_limit=100, batch_size=1000)
    queue: Queue[Any] = Queue(microqueue_database, settings=settings, clock=microqueue_clock)
    queue.enqueue_many([{}] * 250, expires_in=1, delay=60)
    due = queue.enqueue({}, delay=5)
    microqueue_clock.advance(5)
    pops = 0
    while (task := queue.pop()) is None:
        pops += 1
        assert pops <= 3
    assert task.id == due.id
    assert queue.stats().failed == 250


def test_batch_claim_examines_only_what_it_claims(large_queue: Queue[Any]) -> None:
    with profiled(core_of(large_queue).collections.database) as recorded:
        assert len(large_queue.pop_many(100)) == 100
    keys = {entry["op"]: entry["keysExamined"] for entry in recorded if entry["keysExamined"]}
    assert keys["query"] == 100
    # The update looks the ids up one by one: a key to find each, and one to pass it.
    assert keys["update"] <= 201


def test_settling_finds_the_task_by_its_id(large_queue: Queue[Any]) -> None:
    task = large_queue.pop()
    assert task is not None
    with profiled(core_of(large_queue).collections.database) as recorded:
        large_queue.mark_done(task)
    assert [entry["planSummary"] for entry in recorded] == ["IDHACK"] or all(
        entry["keysExamined"] == 1 for entry in recorded
    )


def test_duplicate_is_found_by_its_key(large_queue: Queue[Any]) -> None:
    large_queue.enqueue({}, dedupe_key="k", eta=datetime.now(UTC) + timedelta(days=1))
    with profiled(core_of(large_queue).collections.database) as recorded:
        report = large_queue.enqueue_many([{}], dedupe_key="k")
        assert len(report.duplicates) == 1
    assert "COLLSCAN" not in {str(entry.get("planSummary")) for entry in recorded}


LETTERS = 50_000
LETTER_QUEUES = 5
PAGE = 50


@pytest.fixture(scope="module", params=["status", "collection"])
def many_dead_letters(
    request: pytest.FixtureRequest, new_database: Callable[[], Any]
) -> Iterator[Queue[Any]]:
    """50,000 dead letters in five queues; the newest half of each queue failed in one instant."""
    database = new_database()
    settings = QueueSettings(dead_letters=request.param)
    queue: Queue[Any] = Queue(database, "q0", settings=settings, clock=FakeClock())
    at = queue.now() - timedelta(hours=1)
    ago = {"$dateSubtract": {"startDate": at, "unit": "second", "amount": "$n"}}
    failed_at = {"$cond": [{"$lt": ["$n", LETTERS // 2]}, at, ago]}
    code = {"$concat": ["c", {"$toString": {"$mod": ["$n", 2]}}]}
    message = {"$concat": ["row ", {"$toString": "$n"}, " is bad"]}
    letter = {
        **stored_task("q0", at),
        "queue": {"$concat": ["q", {"$toString": {"$mod": ["$n", LETTER_QUEUES]}}]},
        "payload": {"n": "$n"},
        "position": "$n",
        "status": "failed",
        "attempts": 1,
        "error": {"code": code, "message": message, "at": failed_at},
        "updated_at": failed_at,
        "finished_at": failed_at,
    }
    collections = core_of(queue).collections
    if settings.separate_dlq:
        fill(collections.dead_letters, {**letter, "version": {"$literal": 0}}, each=LETTERS)
    else:
        fill(collections.tasks, letter, each=LETTERS)
    queue.ensure_indexes()
    yield queue
    database.client.drop_database(database)


CURSORS: dict[tuple[str, bool, int], str] = {}
IN_ORDER: dict[str, Callable[[datetime], dict[str, Any]]] = {
    "all": lambda _at: {},
    "since": lambda at: {"since": at - timedelta(seconds=LETTERS - 1000)},
    "until": lambda at: {"until": at + timedelta(seconds=1)},
    "both": lambda at: {"since": at - timedelta(days=9), "until": at + timedelta(seconds=1)},
    "code": lambda _at: {"code": "c0"},
    "text": lambda _at: {"text": "IS BAD"},
    "code and text": lambda _at: {"code": "c1", "text": "row"},
}


@pytest.mark.parametrize("which", IN_ORDER)
@pytest.mark.parametrize("all_queues", [False, True], ids=["one queue", "all queues"])
@pytest.mark.parametrize("skipped", [1, 4_000, 7_000])
def test_page_of_dead_letters_examines_about_a_page(
    many_dead_letters: Queue[Any], which: str, all_queues: bool, skipped: int
) -> None:
    queue = many_dead_letters
    dead_letters = queue.dead_letters.all_queues if all_queues else queue.dead_letters
    place = (queue.settings.dead_letters, all_queues, skipped)
    if place not in CURSORS:
        CURSORS[place] = str(dead_letters.list(limit=skipped).next_cursor)
    options = IN_ORDER[which](queue.now() - timedelta(hours=1))
    with profiled(core_of(queue).collections.database, "tasks", "tasks_dlq") as recorded:
        page = dead_letters.list(limit=PAGE, cursor=CURSORS[place], **options)
    assert len(page) == PAGE
    assert page.next_cursor is not None
    plans = {str(entry.get("planSummary")) for entry in recorded}
    assert "COLLSCAN" not in plans
    # Every second letter has a code; each range of the index adds a key per queue.
    most = 2 * (PAGE + 1) * (2 if all_queues else 1) + 10 * LETTER_QUEUES
    assert sum(entry.get("keysExamined", 0) for entry in recorded) <= most
    assert sum(entry.get("docsExamined", 0) for entry in recorded) <= most
