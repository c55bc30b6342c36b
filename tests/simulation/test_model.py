"""The model of MongoDB does what a real server does, for the calls that operations make."""

from __future__ import annotations

import copy
import random
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from pymongo.errors import BulkWriteError, OperationFailure, PyMongoError

from microqueue.drivers.collections import Collections
from microqueue.drivers.driver import SyncDriver
from microqueue.operations.call import Call, Operation, Target
from microqueue.operations.indexes import task_indexes
from microqueue.operations.schedules import due_index
from microqueue.settings import QueueSettings
from tests.simulation.documents import in_order, key_of
from tests.simulation.mongodb import Server
from tests.simulation.runs import FAULTS, simulate

SEEDS = {"dead letters in tasks": 1, "deleted when done": 7, "dead letters apart": 3}
STEPS = 1200
SHUFFLED = 900
WITHOUT_ROLLBACK = {
    kind: 2 * likely for kind, likely in FAULTS.items() if kind not in {"failover", "partial"}
}
NOT_COMPARED = frozenset({"command", "index_information"})
COUNTS = ("matched_count", "modified_count", "deleted_count")


class Made(NamedTuple):
    """A call that an operation made, and when."""

    call: Call
    now: datetime


def recorded(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[Made]:
    """Return the calls of a run, with copies of their arguments."""
    calls: list[Made] = []
    perform = Server.perform

    def record(server: Server, call: Call, most: int = -1) -> Any:
        if call.method not in NOT_COMPARED:
            made = copy.copy(call)
            made.arguments, made.after = copy.deepcopy(call.arguments), None
            calls.append(Made(made, server._now()))  # noqa: SLF001
        return perform(server, call, most)

    with monkeypatch.context() as patched:
        patched.setattr(Server, "perform", record)
        simulate(seed, STEPS, faults=WITHOUT_ROLLBACK)
    return calls


class Both:
    """The model and a real server, which perform the same calls."""

    def __init__(self, database: Any) -> None:
        self._now = datetime.min.replace(tzinfo=UTC)
        self.model = Server(lambda: self._now)
        self._collections = Collections(database)
        self._collections.tasks.create_indexes(task_indexes())
        self._collections.schedules.create_indexes([due_index()])
        self._driver = SyncDriver(
            self._collections, settings=QueueSettings(), on_retry=lambda: None
        )

    def perform(self, made: Made) -> None:
        """Perform a call on both, and compare the replies."""
        self._now = made.now
        expected = self._expected(made.call)
        found = self._driver.run(_only(_with_date(made)))
        assert _shown(made.call, found) == _shown(made.call, expected), made.call
        if isinstance(found, list):
            self._compare_order(made.call, found)

    def _expected(self, call: Call) -> Any:
        options = call.options
        if call.method == "find" and options.get("limit") and not options.get("sort"):
            # Any of those that match may be returned.
            unlimited = copy.copy(call)
            unlimited.options = {**options, "limit": 0}
            self._all = [key_of(one["_id"]) for one in self.model.perform(unlimited)[0]]
        try:
            return self.model.perform(copy.copy(call))[0]
        except PyMongoError as exc:
            return exc

    def _compare_order(self, call: Call, found: list[Any]) -> None:
        options = call.options
        if options.get("sort"):
            assert found == in_order(list(found), options["sort"])
        elif options.get("limit"):
            assert {key_of(one["_id"]) for one in found} <= set(self._all)

    def compare_documents(self) -> None:
        """Compare all documents of all collections."""
        for target, collection in self.model.collections.items():
            if target in {Target.CLAIMS, Target.DATABASE}:
                continue
            stored = getattr(self._collections, target).find()
            found = {key_of(one["_id"]): one for one in stored}
            assert found == collection.documents, target


def _only(call: Call) -> Operation[Any]:
    """Return the reply to a call, or its error."""
    try:
        return (yield call)
    except PyMongoError as exc:
        return exc


def _with_date(made: Made) -> Call:
    """Return the call with the time of the model, where the server would use its own."""
    call = copy.copy(made.call)
    if call.method == "find_one_and_update" and "$currentDate" in call.arguments[1]:
        selection, update = call.arguments
        changes = {**update["$set"], **dict.fromkeys(update["$currentDate"], made.now)}
        rest = {name: value for name, value in update.items() if name != "$currentDate"}
        call.arguments = (selection, {**rest, "$set": changes})
    return call


def _shown(call: Call, reply: Any) -> Any:  # noqa: PLR0911 (a kind of reply each)
    """Return a reply so that it can be compared."""
    if isinstance(reply, BulkWriteError):
        details: Any = reply.details
        counts = {
            name: details[name] for name in ("nInserted", "nMatched", "nModified", "nRemoved")
        }
        return counts, sorted((one["index"], one["code"]) for one in details["writeErrors"])
    if isinstance(reply, OperationFailure):
        return type(reply).__name__, reply.code
    if isinstance(reply, list):
        if call.options.get("limit") and not call.options.get("sort"):
            return len(reply)
        return {key_of(one.get("_id")): one for one in reply}
    if reply is None or isinstance(reply, dict | int):
        return reply
    if call.method.startswith("insert"):
        return "inserted"
    return {name: getattr(reply, name) for name in COUNTS if hasattr(reply, name)}


@pytest.fixture
def both(microqueue_database: Any) -> Both:
    return Both(microqueue_database)


@pytest.mark.parametrize("name", SEEDS)
def test_replies_and_documents_are_those_of_a_real_server(
    name: str, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = recorded(SEEDS[name], monkeypatch)
    for one in calls:
        both.perform(one)
    both.compare_documents()
    assert {one.call.method for one in calls} >= {"find", "update_many", "insert_one"}


def test_so_are_those_of_calls_in_any_order(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [one for seed in SEEDS.values() for one in recorded(seed, monkeypatch)]
    writes = [one for one in calls if one.call.method.startswith("insert")]
    choose = random.Random(1)
    # A document must be there before a call can change it.
    mixed = choose.sample(writes, len(writes) // 2) + choose.sample(calls, SHUFFLED)
    choose.shuffle(mixed)
    for one in mixed:
        both.perform(one)
    both.compare_documents()


def _missing_is_not_null(wanted: Any) -> Any:
    return lambda value: value == wanted


def _keeps_the_first(given: Any, how: Any) -> list[Any]:
    return [*given, *how["$each"]][:1] if "$each" in how else [*given, how]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("documents._equal", _missing_is_not_null),
        ("documents._pushed", _keeps_the_first),
        ("mongodb.Collection._live_key", lambda _self, _document: None),
    ],
)
def test_difference_would_be_found(
    name: str, wrong: Any, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = recorded(1, monkeypatch)
    monkeypatch.setattr(f"tests.simulation.{name}", wrong)
    with pytest.raises(AssertionError):
        for one in calls:
            both.perform(one)
        both.compare_documents()
