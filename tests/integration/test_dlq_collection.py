"""The DLQ collection: dead letters are never lost or doubled, whichever process dies where.

A letter moves in several writes. In memory, every order in which two or three actors can take
their steps is explored, and at every point of it all of them may be dead for good: what a
sweep then finds must be whole. On the real server, processes are killed after each write.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeAlias

import bson
import pytest
from bson.codec_options import CodecOptions
from pymongo.errors import PyMongoError

from microqueue import (
    DeadLetterFilter,
    DeadLetterPage,
    DeadLetterStats,
    DuplicateTask,
    NewTask,
    Queue,
    QueueSettings,
    QueueStats,
    ReplayReport,
    Sweeper,
    TaskNotFound,
)
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.operations import dead_letters, replay, settle
from microqueue.operations.call import Call
from microqueue.operations.settle import settle_batch
from microqueue.task import TaskError
from microqueue.testing import FakeClock, memory_database, memory_queue
from tests.integration.model import EFFORT, Steps, operation_of, perform
from tests.integration.queues import popped
from tests.integration.race_worker import Process

COLLECTION = QueueSettings(dead_letters="collection")
START = datetime(2100, 1, 1, tzinfo=UTC)
ALL = DeadLetterFilter()
LETTER = "letter"

Operation: TypeAlias = Generator[Call, Any, Any]
Document: TypeAlias = dict[str, Any]


# The actors. Each stands for a process, with its own time.


def mover(queue: Queue[Any]) -> Operation:
    """Move as after a failure, or as a sweep at the same time. Return how many were moved."""
    return (yield from operation_of(queue, lambda twin: Sweeper(twin).move_dead_letters()))


def replayer(queue: Queue[Any]) -> Operation:
    """Replay the letter, once it is known to exist: the look for its id only adds reads."""
    report = yield from replay.replay(
        [dead_letters.selection(queue.name, [LETTER])],
        now=queue.clock.now(),
        position=1,
        reset_attempts=True,
        delay=timedelta(0),
        limit=None,
        settings=queue.settings,
    )
    return report.replayed


def discarder(queue: Queue[Any]) -> Operation:
    """Discard the letter, once it is known to exist."""
    query = dead_letters.selection(queue.name, [LETTER])
    now, settings = queue.clock.now(), queue.settings
    return (yield from replay.discard([query], now=now, limit=None, settings=settings))


def replayer_by_id(queue: Queue[Any]) -> Operation:
    report = yield from operation_of(queue, lambda twin: twin.dead_letters.replay(LETTER))
    return report.replayed


def discarder_by_id(queue: Queue[Any]) -> Operation:
    return (yield from operation_of(queue, lambda twin: twin.dead_letters.discard(LETTER)))


def worker(queue: Queue[Any]) -> Operation:
    """Claim the task again, and fail again. Return how often it did."""
    claimed = yield from operation_of(queue, lambda twin: twin.pop())
    if not claimed:
        return 0
    (task,) = claimed
    yield from operation_of(queue, lambda twin: twin.mark_failure(task, "again"))
    return 1


late_sweep = mover
"""A sweep so much later that whatever is half done is taken to be abandoned."""

ACTORS: dict[str, tuple[Callable[[Queue[Any]], Operation], float]] = {
    "mover": (mover, 0),
    "other mover": (mover, 1),
    "replayer": (replayer, 0),
    "other replayer": (replayer, 1),
    "replayer by id": (replayer_by_id, 0),
    "discarder": (discarder, 0),
    "discarder by id": (discarder_by_id, 0),
    "worker": (worker, 2),
    "late sweep": (late_sweep, 300),
}


# The world: a database in memory that can be set back to an earlier state.


@dataclass(frozen=True, eq=False)
class Stored:
    """What is in the two collections, as bytes, so that states can be compared."""

    tasks: tuple[bytes, ...]
    dead: tuple[bytes, ...]

    @cached_property
    def letter(self) -> tuple[Document | None, Document | None]:
        """The letter as it is in ``tasks`` and in ``tasks_dlq``, tombstones left out."""
        tasks = [document for document in map(decode, self.tasks) if document["_id"] == LETTER]
        dead = [document for document in map(decode, self.dead) if "retired_at" not in document]
        assert len(tasks) <= 1
        assert len(dead) <= 1
        return tasks[0] if tasks else None, dead[0] if dead else None


def decode(document: bytes) -> Document:
    return bson.decode(document, CodecOptions(tz_aware=True, tzinfo=UTC))


class World:
    """One letter, in a state to start from, and a queue for each actor."""

    def __init__(self, start: str) -> None:
        self.database = memory_database()
        self.queue = self.queue_at(0)
        self.queue.ensure_indexes()
        self.queue.enqueue({"of": "interest"}, task_id=LETTER, dedupe_key="key")
        task = self.queue.pop()
        assert task is not None
        failing = Steps(self.queue, lambda twin: twin.mark_failure(task, "broken"))
        if start.startswith("buried"):
            failing.until("replace_one")
        elif start.startswith("copied"):
            failing.until("delete_one")
        else:
            failing.finish()
        if start.endswith("blocked"):
            self.queue.enqueue({}, task_id="blocker", dedupe_key="key", delay=3600)

    def queue_at(self, seconds: float) -> Queue[Any]:
        clock = FakeClock(START)
        clock.advance(seconds)
        return memory_queue(clock=clock, settings=COLLECTION, database=self.database)

    def save(self) -> Stored:
        places = (
            core_of(self.queue).collections.tasks,
            core_of(self.queue).collections.dead_letters,
        )
        return Stored(*(tuple(sorted(map(bson.encode, place.find()))) for place in places))

    def load(self, stored: Stored) -> None:
        places = (
            core_of(self.queue).collections.tasks,
            core_of(self.queue).collections.dead_letters,
        )
        for place, documents in zip(places, (stored.tasks, stored.dead), strict=True):
            place.delete_many({})
            if documents:
                place.insert_many([decode(document) for document in documents])


# The explorer


@dataclass(frozen=True, eq=False)
class Progress:
    """How far an actor has come. The replies that it had determine what it does next."""

    known: tuple[str, ...] = ()
    replies: tuple[Any, ...] = ()
    wrote: bool = False
    finished: bool = False
    result: int = 0

    @cached_property
    def visible(self) -> tuple[bool, bool, int]:
        """What the others can know of it."""
        return (self.wrote, self.finished, self.result)


State: TypeAlias = tuple[Any, ...]
"""All there is at one moment: what is stored, and the progress of each actor.

There are millions, so that it is a flat tuple.
"""

visible_of: Callable[[Progress], tuple[bool, bool, int]] = attrgetter("visible")


def summarize(reply: Any) -> str:
    """Write down all that an operation can learn from a reply."""
    counts = ("matched_count", "modified_count", "deleted_count", "upserted_id")
    if any(hasattr(reply, name) for name in counts):
        # mongomock's results answer only what the call was about.
        return repr([getattr(reply, name, None) for name in counts])
    return type(reply).__name__ if isinstance(reply, Exception) else repr(reply)


READS = {"find", "find_one", "aggregate", "count_documents", "index_information", "command"}


class Explorer:
    """Walks through every order in which actors can take their steps."""

    def __init__(self, world: World, names: tuple[str, ...], tokens: Tokens) -> None:
        self._world = world
        self._names = names
        self._tokens = tokens
        self._queues = {name: world.queue_at(ACTORS[name][1]) for name in names}
        # Equal ones are made the same, so that to compare hundreds of thousands is fast.
        self._stored: dict[tuple[Any, ...], Stored] = {}
        self._progress: dict[tuple[Any, ...], Progress] = {}
        self._origins: dict[State, tuple[State, str] | None] = {}
        self._loaded: Stored | None = None

    def states(self) -> Iterator[State]:
        """Yield every state that can be reached, each once."""
        first: State = (self._save(), *(Progress() for _ in self._names))
        origins = self._origins
        origins[first] = None
        waiting = [first]
        # What one actor does next does not depend on the progress of the others.
        steps: dict[tuple[Stored, str, Progress], tuple[Stored, Progress]] = {}
        places = list(enumerate(self._names, start=1))
        while waiting:
            state = waiting.pop()
            yield state
            stored = state[0]
            for place, name in places:
                progress = state[place]
                if progress.finished:
                    continue
                step = stored, name, progress
                if step not in steps:
                    steps[step] = self._step(name, stored, progress)
                changed, after = steps[step]
                following = (changed, *state[1:place], after, *state[place + 1 :])
                if following not in origins:
                    origins[following] = (state, name)
                    waiting.append(following)

    def story(self, state: State) -> str:
        """Describe the steps that led to a state."""
        lines = [f"now: {state[0].letter}"]
        while origin := self._origins[state]:
            state, name = origin
            progress = state[1 + self._names.index(name)]
            lines.append(f"{name}: {self._resume(name, progress.replies)[1]}")
        return "\n".join(reversed(lines))

    def _step(self, name: str, stored: Stored, progress: Progress) -> tuple[Stored, Progress]:
        """Let one actor take one step."""
        self._load(stored)
        after = self._perform(name, progress)
        return (
            self._loaded or self._save(),
            self._progress.setdefault((after.known, *after.visible), after),
        )

    def _load(self, stored: Stored) -> None:
        if stored is not self._loaded:
            self._world.load(stored)
            self._loaded = stored

    def _save(self) -> Stored:
        found = self._world.save()
        self._loaded = self._stored.setdefault((found.tasks, found.dead), found)
        return self._loaded

    def _perform(self, name: str, progress: Progress) -> Progress:
        operation, call = self._resume(name, progress.replies)
        reply: Any
        try:
            reply = perform(self._queues[name], call)
        except PyMongoError as exc:
            reply = exc
        if call.method not in READS:
            self._loaded = None
        wrote = progress.wrote or call.method not in READS
        try:
            answer(operation, reply)
        except StopIteration as stop:
            return Progress(wrote=wrote, finished=True, result=stop.value)
        except TaskNotFound:
            discarding = any(name.startswith("discarder") for name in self._names)
            assert discarding, "a letter that only moves is said to be missing"
            return Progress(wrote=wrote, finished=True)
        known = (*progress.known, summarize(reply))
        return Progress(known, (*progress.replies, reply), wrote=wrote)

    def _resume(self, name: str, replies: tuple[Any, ...]) -> tuple[Operation, Call]:
        """Bring an operation back to where it was, by the replies it had."""
        self._tokens.restart(name)
        operation = ACTORS[name][0](self._queues[name])
        call = next(operation)
        for reply in replies:
            call = answer(operation, reply)
        return operation, call


def answer(operation: Operation, reply: Any) -> Call:
    if isinstance(reply, Exception):
        return operation.throw(reply)
    return operation.send(fresh(reply))


def fresh(reply: Any) -> Any:
    """Copy a reply, as operations may write into the documents that they are given."""
    if isinstance(reply, list):
        return [fresh(document) for document in reply]
    return dict(reply) if isinstance(reply, dict) else reply


class Tokens:
    """Random tokens that are the same each time an actor is brought back to where it was."""

    def __init__(self) -> None:
        self._name = ""
        self._count = 0

    def restart(self, name: str) -> None:
        self._name, self._count = name, 0

    def __call__(self, nbytes: int | None = None) -> str:
        self._count += 1
        return f"{self._name} {self._count}"


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Tokens:
    tokens = Tokens()
    monkeypatch.setattr("secrets.token_hex", tokens)
    return tokens


# What must hold


def check_views(world: World, stored: Stored) -> None:
    """See that every view counts the letter once, wherever it is."""
    world.load(stored)
    task, copied = stored.letter
    dead = copied is not None or (task is not None and task["status"] == "failed")
    queue = world.queue
    views = {
        "list": len(queue.dead_letters.list()),
        "pages": len(queue.dead_letters.list(limit=1)),
        "stats": queue.dead_letters.stats().total,
        "dry run": queue.dead_letters.replay(ALL, dry_run=True).matched,
        "queue": queue.stats().failed,
    }
    assert views == dict.fromkeys(views, int(dead))
    assert (queue.get(LETTER) is None) == (task is None and copied is None)


def recover(world: World, stored: Stored) -> Stored:
    """Leave everything as it lies, and sweep later, as the next sweeper would."""
    world.load(stored)
    Sweeper(world.queue_at(600)).move_dead_letters()
    return world.save()


def check_state(actors: dict[str, Progress], stored: Stored, recovered: Stored) -> None:
    results: Counter[str] = Counter()
    for name, progress in actors.items():
        results[name.removeprefix("other ").removesuffix(" by id")] += progress.result
    discarding = any(one.wrote for name, one in actors.items() if name.startswith("discarder"))
    still_working = "worker" in actors and not actors["worker"].finished

    for found in (stored, recovered):
        task, copied = found.letter
        assert task or copied or discarding, "the letter is lost"
        assert not (task and copied) or task["status"] == "failed", "it is dead and alive"

    task, copied = recovered.letter
    assert not (task and copied), "the letter is in both places after the sweep"
    if task is not None:
        assert task["status"] != "failed", "the sweep left the letter where it was"
        assert "replaying" not in task
    # Each death can be undone once: by a replay, or for good by a discard.
    most_deaths = 1 + results["worker"] + still_working
    assert results["replayer"] + results["discarder"] <= most_deaths, "undone twice"
    if letter := task or copied:
        deaths = sum(entry["outcome"] == "failed" for entry in letter["history"])
        assert not results["discarder"], "the letter came back after it was discarded"
        assert 1 + results["worker"] <= deaths <= most_deaths, "an attempt was forgotten"
        assert letter.get("replays", 0) == deaths - (letter["status"] == "failed")
        assert letter.get("replays", 0) >= results["replayer"]


SCENARIOS = [
    # A letter that has just failed, and is about to be moved.
    ("buried", "mover", "replayer", "discarder"),
    ("buried", "mover", "replayer", "late sweep"),
    ("buried", "mover", "other mover", "replayer", "worker"),
    ("buried", "mover", "discarder", "worker"),
    ("buried", "discarder", "replayer", "worker"),
    # A letter that has arrived.
    ("moved", "mover", "replayer", "other replayer", "worker"),
    ("moved", "replayer", "late sweep", "worker"),
    ("moved", "replayer", "discarder", "late sweep"),
    # A letter that cannot be replayed, because a live task has its dedupe key.
    ("buried and blocked", "mover", "other mover", "replayer"),
    ("buried and blocked", "mover", "replayer", "discarder"),
    ("moved and blocked", "replayer", "discarder", "late sweep"),
    # Those who name the letter by its id look for it first.
    ("buried", "mover", "replayer by id"),
    ("copied", "mover", "discarder by id"),
    ("moved", "replayer by id", "discarder by id"),
]
if EFFORT > 1:  # Millions of states, in a few minutes.
    SCENARIOS += [
        ("buried", "mover", "discarder", "replayer", "worker"),
        ("buried", "mover", "replayer by id", "discarder"),
        ("buried", "mover", "discarder by id", "replayer"),
    ]
    SCENARIOS += [
        (start, *names)
        for start in ("buried", "copied", "moved", "buried and blocked", "moved and blocked")
        for names in (
            ("mover", "replayer", "discarder", "late sweep"),
            ("replayer", "other replayer", "late sweep", "worker"),
            ("replayer", "other replayer", "discarder", "worker"),
        )
    ]


def explore(start: str, names: tuple[str, ...], tokens: Tokens) -> int:
    """Check every state that the actors can reach, and what a sweep makes of it."""
    explorer = Explorer(World(start), names, tokens)
    world = World(start)  # Another one, to look at states in.
    recoveries: dict[Stored, Stored] = {}
    checked: set[tuple[Any, ...]] = set()
    explored = 0
    for state in explorer.states():
        stored, *progress = state
        try:
            if stored not in recoveries:
                check_views(world, stored)
                recoveries[stored] = recover(world, stored)
                check_views(world, recoveries[stored])
            visible = (stored, *map(visible_of, progress))
            if visible not in checked:
                checked.add(visible)
                actors = dict(zip(names, progress, strict=True))
                check_state(actors, stored, recoveries[stored])
        except AssertionError as exc:
            exc.add_note(explorer.story(state))
            raise
        explored += 1
    return explored


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Pause the garbage collector, which would look at millions of states again and again."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.no_cover  # It would take twice as long, and runs only lines that others run, too.
@pytest.mark.usefixtures("without_gc")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=" & ".join)
def test_no_order_of_steps_and_no_crash_loses_or_doubles_a_letter(
    scenario: tuple[str, ...], tokens: Tokens
) -> None:
    start, *names = scenario

    explored = explore(start, tuple(names), tokens)

    assert explored > 100, "the actors never met"


VIEWS: dict[str, Callable[[Queue[Any]], object]] = {
    "get": lambda queue: queue.get(LETTER),
    "list": lambda queue: queue.dead_letters.list(),
    "stats": lambda queue: queue.dead_letters.stats(),
    "dry run": lambda queue: queue.dead_letters.replay(ALL, dry_run=True),
    "queue": lambda queue: queue.stats(),
}


def seen_in(view: Any) -> int:
    """Return how many dead letters a view shows."""
    match view:
        case DeadLetterPage():
            return len(view)
        case DeadLetterStats():
            return view.total
        case ReplayReport():
            return view.matched
        case QueueStats():
            return view.failed
        case _:
            return int(view is not None)


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_taken_while_a_letter_moves_counts_it_once(view: str) -> None:
    # The move takes place as a whole before, between or after any two reads of the view,
    # and from either state that the letter can be in before it has arrived.
    for start in ("buried", "copied"):
        before_step = 0
        while True:
            world = World(start)
            look = Steps(world.queue, VIEWS[view])
            for _ in range(before_step):
                if look.next is not None:
                    look.step()
            over = look.next is None
            Sweeper(world.queue).move_dead_letters()
            assert seen_in(look.finish()) == 1
            if over:
                break
            before_step += 1


def test_batch_that_is_written_again_finds_its_dead_letters_wherever_they_are() -> None:
    queue = memory_queue(clock=FakeClock(START), settings=COLLECTION)
    queue.enqueue_many([{"n": n} for n in range(3)])
    *buried, stolen = queue.pop_many(3)
    queue.release(stolen)
    settlement = settle.failed(START, TaskError(message="no", at=START))
    others = [(task, settlement) for task in (*buried, stolen)]
    for _ in range(2):  # The reply of the first was lost, or a move after it failed.
        lost = core_of(queue).run(settle_batch([], others, now=START, settings=COLLECTION))
        assert [one.task_id for one in lost] == [stolen.id]
    assert core_of(queue).collections.tasks.count_documents({}) == 1
    assert len(queue.dead_letters.list()) == 2


@pytest.mark.parametrize("mode", ["status", "collection"])
def test_the_id_of_a_dead_letter_is_taken_wherever_it_is_kept(mode: Any) -> None:
    queue = memory_queue(clock=FakeClock(START), settings=QueueSettings(dead_letters=mode))
    queue.enqueue({"life": 1}, task_id=LETTER)
    fail(queue)

    with pytest.raises(DuplicateTask):
        queue.enqueue({"life": 2}, task_id=LETTER)
    report = queue.enqueue_many([NewTask(payload={"life": 3}, task_id=LETTER), {"life": 1}])

    assert [duplicate.task_id for duplicate in report.duplicates] == [LETTER]
    assert [task.payload for task in queue.dead_letters.list()] == [{"life": 1}]
    assert queue.stats().pending == 1


@pytest.mark.parametrize("end", ["discarded", "replayed, done and purged"])
def test_an_id_whose_letter_is_gone_can_be_used_again(end: str) -> None:
    queue = memory_queue(clock=FakeClock(START), settings=COLLECTION)
    queue.enqueue({"life": 1}, task_id=LETTER)
    fail(queue)
    if end == "discarded":
        assert queue.dead_letters.discard(LETTER) == 1
    else:
        assert queue.dead_letters.replay(LETTER).replayed == 1
        queue.mark_done(popped(queue))
        assert queue.purge() == 1

    queue.enqueue({"life": 2}, task_id=LETTER)
    for replays in range(3):
        fail(queue)
        Sweeper(queue).run_once()
        assert [task.payload for task in queue.dead_letters.list()] == [{"life": 2}]
        assert queue.dead_letters.stats().total == queue.stats().failed == 1
        report = queue.dead_letters.replay(LETTER)
        assert (report.matched, report.replayed) == (1, 1)
        task = queue.get(LETTER)
        assert task is not None
        assert (task.status, task.replays) == ("pending", replays + 1)


def fail(queue: Queue[Any]) -> None:
    queue.mark_failure(popped(queue), "broken")


# On the real server, with processes that are really killed


@pytest.fixture(scope="module")
def undertaker(microqueue_server: EmbeddedServer) -> Iterator[Process]:
    process = Process("die", uri=microqueue_server.uri)
    yield process
    process.end()


def prepare(action: str, database: Any) -> Queue[Any]:
    """Set up a letter for an action to begin with, on a fresh collection."""
    clock = FakeClock()
    queue = Queue[Any](database, clock=clock, settings=COLLECTION)
    queue.ensure_indexes()
    database.tasks.delete_many({})
    database.tasks_dlq.delete_many({})
    queue.enqueue({}, task_id=LETTER)
    if action == "sweep":
        task = popped(queue)
        Steps(queue, lambda twin: twin.mark_failure(task, "broken")).until("replace_one")
    elif action in {"replay", "discard"}:
        fail(queue)
    # Later than everything that the process will do, so that what it left is abandoned.
    clock.advance(600)
    return queue


def whereabouts(database: Any) -> str:
    """Return where the dead letter is, and its state there."""
    here = database.tasks.find_one({"_id": LETTER}) or {"status": "no"}
    there = database.tasks_dlq.find_one({"_id": LETTER, "retired_at": None}) or {"status": "no"}
    return f"{here['status']} in tasks, {there['status']} in dlq"


KILLS = {
    "mark_failure": "no in tasks, failed in dlq",
    "sweep": "no in tasks, failed in dlq",
    "replay": "pending in tasks, no in dlq",
    "discard": "no in tasks, no in dlq",
}


@pytest.mark.parametrize("action", KILLS)
def test_a_process_killed_after_any_write_leaves_a_letter_that_is_whole(
    action: str, undertaker: Process, microqueue_database: Any
) -> None:
    before = {"mark_failure": "pending in tasks, no in dlq", "sweep": "failed in tasks, no in dlq"}
    untouched = before.get(action, "no in tasks, failed in dlq")
    halfway = set()
    for writes in range(1, 20):
        queue = prepare(action, microqueue_database)
        assert whereabouts(microqueue_database) == untouched
        order = {"database": microqueue_database.name, "action": action, "writes": writes}
        undertaker.tell(order)
        end = undertaker.hear()
        left = whereabouts(microqueue_database)
        views = {name: seen_in(view(queue)) for name, view in VIEWS.items() if name != "get"}
        assert views == dict.fromkeys(views, int("failed" in left))

        Sweeper(queue).run_once()

        swept = whereabouts(microqueue_database)
        assert swept in {KILLS[action], "no in tasks, failed in dlq"}
        views = {name: seen_in(view(queue)) for name, view in VIEWS.items() if name != "get"}
        assert views == dict.fromkeys(views, int("failed" in swept))
        task = queue.get(LETTER)
        assert (task.replays if task else 0) == ("pending" in swept)
        if end == "survived":
            assert (left, swept) == (KILLS[action], KILLS[action])
            break
        halfway.add(left)
    else:
        pytest.fail("the process was killed each time")
    # A letter is discarded by a single write; all else takes more than one.
    least = 0 if action == "discard" else 1
    assert len(halfway) > least, "it was never killed between two writes"
