"""Operations are generators: what they ask of MongoDB can be read without a database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from mongomock.filtering import filter_applies
from pymongo.errors import AutoReconnect, BulkWriteError, DuplicateKeyError, OperationFailure

from microqueue import (
    DuplicateTask,
    IndexConflict,
    LeaseLost,
    ServerUnavailable,
    Task,
    TaskNotFound,
)
from microqueue.clock import Instant
from microqueue.operations import (
    administration,
    archive,
    bulk_load,
    change_cursor,
    claim,
    confirm,
    dlq_collection,
    enqueue,
    export,
    filters,
    indexes,
    replay,
    settle,
    stats,
    workers,
)
from microqueue.operations.batches import Batches, SweepProgress, not_after
from microqueue.operations.call import Call, Operation, RepeatDue, Target, reporting
from microqueue.settings import QueueSettings
from microqueue.task import Lease, Outcome, TaskError, read_task

NOW = datetime(2026, 5, 1, tzinfo=UTC)
EARLIER = NOW - timedelta(seconds=2)
LEASE = Lease(
    token="token", worker_id="worker", started_at=NOW, expires_at=NOW + timedelta(seconds=60)
)


def drive(operation: Operation[Any], replies: Iterator[Any]) -> tuple[list[Call], Any]:
    """Answer each call with the next reply; give the calls and the result."""
    calls: list[Call] = []
    operation = reporting(operation, lambda letters: None)
    try:
        call = next(operation)
        while True:
            calls.append(call)
            reply = next(replies)
            call = (
                operation.throw(reply)
                if isinstance(reply, BaseException)
                else operation.send(reply)
            )
    except StopIteration as stop:
        return calls, stop.value


def claimed_task(**fields: Any) -> Task[Any]:
    document = {
        "_id": 1, "status": "processing", "attempts": 1, "max_attempts": 3, "created_at": NOW,
        "updated_at": NOW, "lease_token": "token", "worker_id": "worker", "started_at": NOW,
        "deadline_at": LEASE.expires_at, "position": 5,
    }  # fmt: skip
    return read_task({**document, **fields})


def test_pop_is_one_atomic_write_in_ready_order() -> None:
    calls, document = drive(claim.pop("q", LEASE), iter([{"_id": 1}]))
    assert document == {"_id": 1}
    (call,) = calls
    assert call.method == "find_one_and_update"
    assert call.arguments[0] == {"queue": "q", "status": "pending", "next_retry_at": None}
    assert call.arguments[1]["$inc"] == {"attempts": 1}
    assert call.options["sort"] == [("priority", -1), ("position", 1), ("_id", 1)]
    assert "projection" not in call.options  # A retried findAndModify would drop it.
    assert not call.repeatable


def test_pop_looks_its_claim_up_after_a_lost_reply() -> None:
    calls, document = drive(claim.pop("q", LEASE), iter([AutoReconnect(), {"_id": 7}]))
    assert document == {"_id": 7}
    assert calls[1].method == "find_one_and_update"  # A majority must have it.
    assert calls[1].arguments[0]["lease_token"] == "token"
    assert calls[1].arguments[1] == confirm.NOTHING
    assert "projection" not in calls[1].options


def test_batch_won_whole_takes_two_round_trips() -> None:
    window = [{"_id": n, "attempts": 0, "updated_at": EARLIER} for n in range(3)]
    replies = iter([window, SimpleNamespace(modified_count=3)])
    calls, documents = drive(claim.pop_many("q", LEASE, limit=3), replies)
    assert [call.method for call in calls] == ["find", "update_many"]
    assert [document["attempts"] for document in documents] == [1, 1, 1]
    assert calls[1].arguments[0]["updated_at"] == {"$lte": EARLIER}


def test_batch_with_fresh_stamps_is_read_back_as_it_may_have_gone_round() -> None:
    window = [{"_id": n, "attempts": 0, "updated_at": NOW} for n in range(2)]
    stored = [{"_id": 0, "attempts": 2}, {"_id": 1, "attempts": 1}]
    replies = iter([window, SimpleNamespace(modified_count=2), stored])
    _, documents = drive(claim.pop_many("q", LEASE, limit=2), replies)
    assert [document["attempts"] for document in documents] == [2, 1]


@pytest.mark.parametrize("reply", [SimpleNamespace(modified_count=2), AutoReconnect()])
@pytest.mark.parametrize(
    ("updated_at", "whole", "attempts"),
    [(NOW, True, [7, 7]), (EARLIER, False, [1, 1])],
    ids=["fresh: read again", "settled: ids tell"],
)
def test_batch_won_in_part_is_found_by_its_token(
    reply: Any, updated_at: datetime, whole: bool, attempts: list[int]
) -> None:
    window = [{"_id": n, "attempts": 0, "updated_at": updated_at} for n in range(3)]
    won = [{"_id": 2, "attempts": 7}, {"_id": 0, "attempts": 7}]
    confirmed = SimpleNamespace(matched_count=2)
    replies = iter([window, reply, won, confirmed])
    calls, documents = drive(claim.pop_many("q", LEASE, limit=3), replies)
    methods = ["find", "update_many", "find"]
    if isinstance(reply, AutoReconnect):  # Nobody knows what a majority has of it.
        methods.append("update_many")
        assert calls[3].arguments[0]["$and"][0] == {"_id": {"$in": [2, 0]}}
        assert calls[3].arguments[1] == confirm.NOTHING
    assert [call.method for call in calls] == methods
    assert calls[2].arguments[0]["lease_token"] == "token"
    assert (len(calls[2].arguments) == 1) is whole
    assert [document["_id"] for document in documents] == [0, 2]
    assert [document["attempts"] for document in documents] == attempts


def test_batch_lost_whole_moves_to_another_window() -> None:
    window = [
        {"_id": n, "attempts": 0, "updated_at": NOW, "priority": 3, "position": 100 + n}
        for n in (1, 2)
    ]
    lost = [window, SimpleNamespace(modified_count=0), []]
    calls, documents = drive(claim.pop_many("q", LEASE, limit=2), iter([*lost * 300, *[[]] * 500]))
    assert documents == []
    reads = [call.arguments[0] for call in calls if call.options.get("limit")]
    starts = {read["position"]["$gt"] for read in reads if "position" in read}
    assert len(starts) > 2
    assert min(starts) == 102  # Right behind the window that was lost.
    assert max(starts) < 102 + 2 * claim.WINDOWS
    assert all(read["priority"] == 3 for read in reads if "position" in read)
    assert any("position" not in read for read in reads)  # The head is not forgotten.


def test_every_settlement_is_fenced_by_status_and_token() -> None:
    task = claimed_task()
    error = TaskError(message="no", at=NOW)
    for settlement in (
        settle.done(NOW),
        settle.failed(NOW, error),
        settle.retried(task, NOW, error, delay_sec=1),
        settle.released(task, NOW, front=True),
    ):
        operation = settle.settle(task, settlement, now=NOW, settings=QueueSettings())
        (call,), _ = drive(operation, iter([SimpleNamespace(matched_count=1)]))
        fence = {"_id": {"$eq": 1}, "status": "processing", "lease_token": {"$eq": "token"}}
        assert call.arguments[0] == fence
        # A done task keeps the token as its receipt; every other one is free for the next claim.
        kept = settlement.outcome is Outcome.DONE
        assert call.arguments[1]["$set"].get("lease_token", "kept") == ("kept" if kept else None)
        assert call.repeatable


def test_call_inside_a_transaction_is_never_repeated_alone() -> None:
    operation = settle.settle(
        claimed_task(), settle.done(NOW), now=NOW, settings=QueueSettings(), session="session"
    )
    call = next(operation)
    assert call.in_transaction
    assert not call.repeatable


@pytest.mark.parametrize(
    ("stored", "status", "holder"),
    [
        (None, None, None),
        ({"_id": 1, "status": "processing", "worker_id": "other"}, "processing", "other"),
        ({"_id": 1, "status": "pending"}, "pending", None),
    ],
)
def test_lost_lease_says_why(stored: Any, status: str | None, holder: str | None) -> None:
    operation = settle.touch(claimed_task(), NOW, NOW)
    with pytest.raises(LeaseLost) as caught:
        drive(operation, iter([SimpleNamespace(matched_count=0), stored]))
    assert (caught.value.status, caught.value.holder) == (status, holder)
    assert (holder or status or "") in str(caught.value)


@pytest.mark.parametrize(
    ("attempts", "status"), [(1, "pending"), (2, "pending"), (3, "failed"), (4, "failed")]
)
def test_last_allowed_attempt_is_buried_where_the_failure_is_seen(
    attempts: int, status: str
) -> None:
    error = TaskError(message="no", at=NOW)
    settlement = settle.retried(claimed_task(attempts=attempts), NOW, error, delay_sec=1)
    assert settlement.changes["status"] == status


def test_many_claimed_together_are_settled_by_one_write() -> None:
    tasks = [claimed_task(_id=n) for n in range(5)]
    operation = settle.mark_all_done(tasks, now=NOW, settings=QueueSettings())
    (call,), lost = drive(operation, iter([SimpleNamespace(matched_count=5)]))
    assert lost == []
    assert call.method == "update_many"
    assert call.arguments[0]["_id"] == {"$in": [0, 1, 2, 3, 4]}
    assert call.arguments[0]["lease_token"] == {"$eq": "token"}
    # As few fields as possible; no history, and the token stays for a repeat.
    written = {"status": "done", "finished_at": NOW, "deadline_at": NOW, "updated_at": NOW}
    assert call.arguments[1] == {"$set": written, "$unset": {"error": ""}}


@pytest.mark.parametrize("changed", [0, 1, 4])
def test_what_changed_between_a_read_and_its_confirmation_is_read_again(changed: int) -> None:
    other, same = SimpleNamespace(matched_count=1), SimpleNamespace(matched_count=2)
    found = [{"_id": 1}, {"_id": 2}]
    replies = iter([*[found, other] * changed, found, same])
    calls, documents = drive(confirm.some({"a": 1}), replies)
    assert documents == found
    assert len(calls) == 2 * (changed + 1)


def test_confirmation_ends_when_what_is_stored_never_stays_the_same() -> None:
    other = SimpleNamespace(matched_count=1)
    found = [{"_id": 1}, {"_id": 2}]
    with pytest.raises(ServerUnavailable):
        drive(confirm.some({"a": 1}), iter([found, other] * 99))


class Replaced:
    """Two collections in memory, in which another producer replaces the task before a write."""

    def __init__(self, ours: dict[str, Any], target: Target, theirs: dict[str, Any]) -> None:
        self.stored: dict[Target, Any] = {Target.TASKS: None, Target.DEAD_LETTERS: None}
        self.ours, self.target, self.theirs = ours, target, theirs
        self.inserted = 0

    def reply(self, call: Call) -> Any:
        stored = self.stored[call.target]
        if call.method == "insert_one":
            self.inserted += 1
            if self.inserted == 1:  # Stored, but the reply is lost; no majority has it.
                self.stored[self.target] = self.ours
                return RepeatDue(AutoReconnect("lost"), None)
            return DuplicateKeyError("taken") if self.stored[Target.TASKS] else None
        if call.method == "find":
            return [] if stored is None else [stored]
        if call.target is self.target:  # A failover rolls ours back.
            stored = self.stored[self.target] = self.theirs
        asked = call.arguments[0]
        fences = [asked] if call.method == "update_many" else [one._filter for one in asked]  # noqa: SLF001
        matched = sum(filter_applies(fence, stored) for fence in fences)  # type: ignore[no-untyped-call]
        return SimpleNamespace(matched_count=matched)

    def run(self, operation: Operation[Any]) -> Any:
        try:
            call = next(operation)
            while True:
                reply = self.reply(call)
                failed = isinstance(reply, BaseException)
                call = operation.throw(reply) if failed else operation.send(reply)
        except StopIteration as stop:
            return stop.value


@pytest.mark.parametrize(
    ("target", "status"), [(Target.TASKS, "pending"), (Target.DEAD_LETTERS, "failed")]
)
def test_a_task_that_took_the_id_of_ours_is_not_ours(target: Target, status: str) -> None:
    document = {"_id": "one", "queue": "q", "insert_token": "ours", "status": "pending"}
    ours = {**document, "status": status}
    scene = Replaced(ours, target, {**ours, "insert_token": "theirs"})
    settings = QueueSettings(dead_letters="collection")
    with pytest.raises(DuplicateTask) as raised:
        scene.run(enqueue.enqueue(document, encoded=document, settings=settings))
    assert raised.value.existing_id == "one"


def test_a_dead_letter_that_is_replayed_before_it_is_confirmed_takes_no_id() -> None:
    document = {"_id": "one", "queue": "q", "insert_token": "ours", "status": "pending"}
    theirs = {**document, "insert_token": "theirs"}
    scene = Replaced(document, Target.DEAD_LETTERS, {**theirs, "status": "replayed"})
    scene.stored[Target.DEAD_LETTERS] = {**theirs, "status": "failed"}
    settings = QueueSettings(dead_letters="collection")
    known = scene.run(enqueue.find_dead_letters([document], settings))
    assert not known.taken


def test_an_insert_that_nothing_blocks_any_more_is_tried_with_a_new_deadline() -> None:
    document = {"_id": "one", "queue": "q", "insert_token": "ours", "status": "pending"}
    settings = QueueSettings(dead_letters="collection")
    due = RepeatDue(AutoReconnect("lost"), None)
    replies: Iterator[Any] = iter([[], due, [], [], DuplicateKeyError("taken"), [], [], [], None])
    calls, _ = drive(enqueue.enqueue(document, encoded=document, settings=settings), replies)
    inserts = [call.after for call in calls if call.method == "insert_one"]
    assert inserts == [None, due, None]

    refused = BulkWriteError({"writeErrors": [{"index": 0, "code": 11000}]})
    replies = iter([[], due, [], [], refused, [], [], [], None])
    calls, left_out = drive(
        enqueue.enqueue_many([document], encoded=[document], settings=settings), replies
    )
    inserts = [call.after for call in calls if call.method == "insert_many"]
    assert inserts == [None, due, None]
    assert left_out == set()


class Unread(Sequence[Any]):
    """Documents that are costly to make."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError(index)


def test_documents_that_are_encoded_are_not_read_if_nothing_blocks_them() -> None:
    encoded = [{"_id": 1}, {"_id": 2}]
    operation = enqueue.enqueue_many(Unread(), encoded=encoded, settings=QueueSettings())
    (call,), left_out = drive(operation, iter([None]))
    assert call.arguments == (encoded,)
    assert left_out == set()


@pytest.mark.parametrize("read", [set(), {1, 2, 3}, {0, 5}, {7}], ids=repr)
@pytest.mark.parametrize("stored", [set(), {3}, {0, 5}, {1, 2, 4, 6}, set(range(8))], ids=repr)
@pytest.mark.parametrize("alike", [True, False], ids=["one condition", "one each"])
def test_which_of_many_a_majority_has_does_not_depend_on_what_was_read(
    read: set[int], stored: set[int], alike: bool
) -> None:
    tokens = ["token"] * 8 if alike else list("abcdefgh")
    operation = confirm.which(
        [{"_id": {"$eq": number}, "insert_token": tokens[number]} for number in range(8)]
    )
    call = next(operation)
    assert call.method == "find"
    reply: Any = [{"_id": number} for number in read]
    calls = 1
    try:
        while True:
            call = operation.send(reply)
            if alike and call.method == "update_many":
                assert call.arguments[0]["insert_token"] == "token"
                asked = set(call.arguments[0]["_id"]["$in"])
            else:
                assert call.method == "bulk_write"
                asked = {one._filter["_id"]["$eq"] for one in call.arguments[0]}  # noqa: SLF001
            reply = SimpleNamespace(matched_count=len(asked & stored))
            calls += 1
    except StopIteration as stop:
        answers = stop.value
    assert {number for number, sure in enumerate(answers) if sure} == stored
    if read == stored:
        assert calls <= 3


def test_queries_contain_the_filter_of_the_index_they_need() -> None:
    partial = {
        model.document["name"]: model.document.get("partialFilterExpression", {})
        for model in indexes.task_indexes()
    }
    timed = partial["deadline"]["deadline_at"]
    assert timed == {"$type": "date"}
    for query in (
        filters.WAITING,
        filters.DELAYED,
        filters.LEASED,
        filters.SUCCEEDED,
        filters.due(NOW),
        filters.expired(NOW),
        filters.lease_expired(NOW),
        filters.finished_by(NOW),
        claim.claimed_under(LEASE),
        bulk_load.HELD,
    ):
        assert {**query["deadline_at"], **timed} == query["deadline_at"]
        assert isinstance(query["status"], str)
    assert {**filters.READY, **partial["ready"]} == filters.READY


def test_calls_print_as_what_they_ask() -> None:
    call = Call("find", {"a": 1}, limit=2)
    assert repr(call) == "tasks.find({'a': 1}, limit=2)"


def test_clock_that_is_behind_leaves_out_nothing_that_failed_before() -> None:
    """Another client's clock may be less behind the server's than ours."""
    now = Instant.between(NOW, NOW + timedelta(seconds=3))
    stamp = NOW + timedelta(seconds=2)
    assert not_after("updated_at", now)["$nor"][0]["updated_at"]["$gt"] >= stamp
    replaying = replay.replay(
        [{"_id": 1}],
        now=now,
        position=1,
        reset_attempts=True,
        delay=timedelta(0),
        limit=None,
        settings=QueueSettings(),
    )
    (query,) = (part for part in next(replaying).arguments[0]["$and"] if "$nor" in part)
    assert query["$nor"][0]["updated_at"]["$gt"] >= stamp


# What another process does between a read and a write

DOCUMENT = {"_id": "one", "queue": "q", "insert_token": "ours", "status": "pending"}
FAILED = {**DOCUMENT, "insert_token": "theirs", "status": "failed"}
SEPARATE_DLQ = QueueSettings(dead_letters="collection")
MATCHED, UNMATCHED = SimpleNamespace(matched_count=1), SimpleNamespace(matched_count=0)


@pytest.mark.parametrize(
    ("settings", "rejection", "found"),
    [(QueueSettings(), [DuplicateKeyError("taken")], DOCUMENT), (SEPARATE_DLQ, [], FAILED)],
    ids=["in tasks", "in the dead letters"],
)
def test_enqueue_ends_when_what_blocks_it_never_stays_the_same(
    settings: QueueSettings, rejection: list[Any], found: dict[str, Any]
) -> None:
    operation = enqueue.enqueue(DOCUMENT, encoded=DOCUMENT, settings=settings)
    with pytest.raises(ServerUnavailable):
        drive(operation, iter([*rejection, *[[found], UNMATCHED] * 99]))


def test_batch_inside_a_transaction_names_the_id_of_a_dead_letter() -> None:
    operation = enqueue.enqueue_many(
        [DOCUMENT], encoded=[DOCUMENT], settings=SEPARATE_DLQ, session="session"
    )
    with pytest.raises(DuplicateTask) as raised:
        drive(operation, iter([[FAILED]]))
    assert (raised.value.task_id, raised.value.existing_id) == ("one", "one")


def replaying_one() -> Operation[Any]:
    return replay.replay(
        [{"_id": 1}],
        now=NOW,
        position=1,
        reset_attempts=True,
        delay=timedelta(0),
        limit=1,
        settings=QueueSettings(),
    )


def test_dead_letter_is_skipped_whose_key_is_taken_and_free_again_and_again() -> None:
    letter = {"_id": 1, "queue": "q", "dedupe_key": "k", "status": "failed", "updated_at": NOW}
    taken = DuplicateKeyError("taken")
    calls, report = drive(replaying_one(), iter([[letter], *[taken, UNMATCHED] * confirm.ROUNDS]))
    assert (report.matched, report.replayed, report.skipped) == (1, 0, [1])
    assert len(calls) == 1 + 2 * confirm.ROUNDS


def test_dead_letter_whose_key_is_free_after_all_is_replayed_by_its_run() -> None:
    letter = {"_id": 1, "queue": "q", "dedupe_key": "k", "status": "failed", "updated_at": NOW}
    rejected = BulkWriteError({"writeErrors": [{"index": 0, "code": 11000}], "nModified": 0})
    operation = replay.requeue(
        [replay.PlannedReplay(letter, NOW)],
        run="run",
        queue=None,
        position=1,
        now=NOW,
        settings=QueueSettings(),
    )
    replies = iter([rejected, UNMATCHED, SimpleNamespace(modified_count=1)])
    calls, done = drive(operation, replies)
    assert done == 1
    assert [call.method for call in calls] == ["bulk_write", "update_one", "bulk_write"]


def test_replay_continues_from_a_task_that_a_killed_move_left() -> None:
    letter = {"_id": 1, "queue": "q", "status": "failed", "version": 2, "moves": 1}
    begun = SimpleNamespace(matched_count=1)
    replaced = SimpleNamespace(matched_count=1)
    finished = SimpleNamespace(modified_count=1)
    operation = dlq_collection.move_back(letter, {"status": "pending"}, NOW)
    replies = iter([begun, DuplicateKeyError("it is here"), MATCHED, replaced, finished, None])
    calls, done = drive(operation, replies)
    assert done is True
    assert [call.method for call in calls] == [
        "update_one", "insert_one", "update_one", "replace_one", "update_one", "update_one",
    ]  # fmt: skip


# A sweep that has lost its lock stops before the next task


def stopping_after(batches: int) -> SweepProgress:
    answers = iter([*[True] * batches, *[False] * 9])

    def may_proceed() -> Operation[bool]:
        yield from ()
        return next(answers)

    return SweepProgress(may_proceed)


def test_batches_end_when_the_sweep_may_not_continue() -> None:
    batches = Batches.of({}, progress=stopping_after(1))
    assert drive(batches.next(5), iter([[{"_id": 1}]]))[1] == [{"_id": 1}]
    assert drive(batches.next(5), iter(()))[1] == []


def test_no_more_dead_letters_are_moved_when_the_sweep_may_not_continue() -> None:
    letters = [{"_id": number, "status": "failed"} for number in range(2)]
    progress = stopping_after(2)
    operation = dlq_collection.move_all_out(NOW, progress=progress)
    calls, _ = drive(operation, iter([letters, MATCHED, None, None]))
    assert [call.method for call in calls] == ["find", "update_one", "replace_one", "delete_one"]
    assert progress.counts["moved"] == 1


def test_no_more_dead_workers_are_handled_when_the_sweep_may_not_continue() -> None:
    worker = {
        "_id": "w@tasks", "collection": "tasks", "heartbeat_at": EARLIER, "gone_at": EARLIER,
        "missed_at": EARLIER, "heartbeat_sec": 0.1,
    }  # fmt: skip
    operation = workers.reclaim_orphaned("tasks", NOW, QueueSettings(), progress=stopping_after(0))
    calls, _ = drive(operation, iter([[worker], *[[worker], MATCHED] * 9]))
    assert {call.target for call in calls} == {Target.WORKERS}


# Errors that an operation does not handle


def test_other_errors_of_the_server_are_raised() -> None:
    rejected = OperationFailure("not allowed", 13)
    tasks = [claimed_task(_id=n) for n in range(2)]
    with pytest.raises(OperationFailure, match="not allowed"):
        drive(settle.mark_all_done(tasks, now=NOW, settings=QueueSettings()), iter([rejected]))
    creating = indexes.ensure_indexes(indexes.task_indexes(), "tasks")
    with pytest.raises(OperationFailure, match="not allowed"):
        drive(creating, iter([{}, rejected]))


def test_conflict_with_an_index_that_is_gone_again_names_the_wanted_one() -> None:
    operation = indexes.ensure_indexes(indexes.task_indexes(), "tasks")
    with pytest.raises(IndexConflict) as raised:
        drive(operation, iter([{}, OperationFailure("conflict", 85)]))
    assert raised.value.index == "ready"


def test_claim_of_a_task_that_was_deleted_in_between_does_not_find_it() -> None:
    with pytest.raises(TaskNotFound) as raised:
        drive(administration.claim_one(1, LEASE), iter([None, None]))
    assert raised.value.task_ids == [1]


def test_task_that_cannot_be_changed_at_all_stops_no_sweep_and_is_raised_last() -> None:
    task = claimed_task()
    reclaimed = settle.FencedSettlement(
        task, settle.released(task, NOW, front=False), filters.claimed(task)
    )
    too_large = {"index": 0, "code": 17419, "errmsg": "the document is too large"}
    rejected = BulkWriteError({"writeErrors": [too_large], "nMatched": 0})
    progress = SweepProgress()
    operation = settle.settle_reclaimed(
        [reclaimed], now=NOW, settings=QueueSettings(), progress=progress
    )
    calls, written = drive(operation, iter([rejected, rejected]))
    assert (len(calls), written) == (2, 0)
    with pytest.raises(OperationFailure, match="too large"):
        progress.raise_rejection()
    progress.raise_rejection()  # Once.


# Small answers


@pytest.mark.parametrize(
    ("status", "dated", "kind"),
    [("pending", True, "delayed"), ("failed", False, "failed"), ("done", False, ""), (7, True, "")],
)
def test_documents_that_no_count_has_are_left_out_of_estimates(
    status: Any, dated: bool, kind: str
) -> None:
    assert stats.kind_of(status, dated=dated) == kind


def test_tasks_are_selected_by_a_query_alone_or_with_other_conditions() -> None:
    query = {"a": 1}
    assert export.selection(query=query) == query
    assert export.selection(queues=["q"], query=query) == {"$and": [{"queue": "q"}, query]}


def test_part_of_an_export_is_bounded_at_both_ends() -> None:
    part = export.IdRange(first=1, last=5)
    call = next(export.read_part({}, ["_id"], part, batch_rows=9))
    assert (call.options["min"], call.options["max"]) == ({"_id": 1}, {"_id": 5})


def test_no_change_is_looked_for_after_the_horizon() -> None:
    start = change_cursor.ChangeCursor.behind(NOW)
    everything = change_cursor.ChangeQuery(queues=None, statuses=None, query={})
    operation = change_cursor.find_end(everything, start, horizon=EARLIER, rows=None)
    assert drive(operation, iter(())) == ([], None)


def test_finished_tasks_are_counted_in_the_chosen_queues() -> None:
    operation = archive.count_finished(["a", "b"], statuses=["done"], before=NOW)
    (call,), _ = drive(operation, iter([[]]))
    assert call.arguments[0][0]["$match"]["queue"] == {"$in": ["a", "b"]}
