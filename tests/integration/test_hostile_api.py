"""Hostile values for each argument of the public API: stored as they are, or rejected by name.

Methods and arguments are found by introspection. A new method fails here until it has a call.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, get_args, get_type_hints

import bson
import pytest
from bson import Regex
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import OperationFailure

from microqueue import (
    BackoffPolicy,
    DeadLetterFilter,
    Fail,
    InvalidArgument,
    MicroqueueError,
    NewTask,
    Queue,
    QueueSettings,
    Retry,
    Sweeper,
    Tasks,
    Topic,
    Worker,
)
from microqueue.dead_letters import DeadLetters
from microqueue.insights import Insights
from microqueue.schedules import Schedules
from microqueue.task_filter import TaskFilter
from microqueue.worker.options import WorkerOptions
from tests.hostile import (
    CONTAINERS,
    EXAMPLES,
    FIRST,
    OBJECTS,
    PLANTS,
    CommandRecorder,
    planted,
    values,
)
from tests.unit.test_public_api import PAIRS, function_of, public

OWN, OTHER = "own", "other"
"""The queue that calls are about, and the one whose tasks no call may change."""
CODEC: CodecOptions[Any] = CodecOptions(
    tz_aware=True, uuid_representation=UuidRepresentation.STANDARD
)
CONSTRUCTOR = "__init__"
CALLBACKS = {"convert", "mask", "stop", "on_report", "handler", "on_gap", "payload_model"}
"""Arguments that are code of the caller: what it raises is no error of ours."""


class Scene:
    """A database with tasks of two queues, schedules, a topic and dead letters."""

    def __init__(self, kind: str, uri: str, plain: Any) -> None:
        self.commands = CommandRecorder()
        self.is_async = kind == "async"
        self.runner = asyncio.Runner()
        self.plain = plain
        self.client: Any = None
        self._queues: dict[str, Any] = {}
        self.run(self._open(uri))
        self._build(OTHER)
        self._build(OWN)
        self.before = self.snapshot()
        self.untouched = self.others()
        self._leased: Any = None
        self.last_leased: Any = None

    async def _open(self, uri: str) -> None:
        client = AsyncMongoClient[Any] if self.is_async else MongoClient[Any]
        self.client = client(uri, event_listeners=[self.commands], uuidRepresentation="standard")
        self.database = self.client[self.plain.name]

    def run(self, awaitable: Any) -> Any:
        """Return a value, or what it evaluates to."""
        if not inspect.isawaitable(awaitable):
            return awaitable

        async def wait() -> Any:
            return await awaitable

        return self.runner.run(wait())

    def queue(self, name: str = OWN) -> Any:
        if name not in self._queues:
            self._queues[name] = self.kind(Queue)(self.database, name)
        return self._queues[name]

    def kind(self, blocking: type) -> Any:
        """Return a class, or its async counterpart."""
        return dict(PAIRS)[blocking] if self.is_async else blocking

    def topic(self, name: str = OWN) -> Any:
        return self.kind(Topic)(self.queue(name), name)

    def _build(self, name: str) -> None:
        queue = self.queue(name)
        self.run(queue.enqueue_many([{"n": 1}, {"n": 2}, {"n": 3}], name="job"))
        dead, done = self.run(queue.pop_many(2))
        self.run(queue.mark_failure(dead, "broken", code="Broken"))
        self.run(queue.mark_done(done))
        self.run(queue.enqueue({}, delay=3600, dedupe_key="key", dedupe_for=3600))
        self.run(queue.schedules.put("nightly", every=3600))
        topic = self.topic(name)
        self.run(topic.bind(name))
        self.run(topic.publish({"n": 1}, message_id=f"first-{name}"))

    def ready(self) -> Any:
        return self.run(self.queue().enqueue({"n": 4}))

    def leased(self) -> Any:
        """Return a task that is claimed; the last one, unless something was written since."""
        if self._leased is None:
            self.ready()
            self._leased = self.last_leased = self.run(self.queue().pop())
        return self._leased

    def dead(self) -> Any:
        task = self.leased()
        self.run(self.queue().mark_failure(task, "broken", code="Broken"))
        self._leased = None
        return task.id

    def done(self) -> Any:
        """Return the id of a done task."""
        tasks = self.before["tasks"]
        return next(one["_id"] for one in tasks if (one["queue"], one["status"]) == (OWN, "done"))

    def perform(self, call: Callable[[], Any]) -> tuple[Any, MicroqueueError | None]:
        """Return the result or the typed error of a call; check what MongoDB got, and its effects.

        Any other error fails the test.
        """
        result, error = None, None
        with self.commands.checked():
            try:
                result = self.run(call())
            except MicroqueueError as exc:
                error = exc
        if self.commands.wrote:
            self._leased = None
        return result, error

    def snapshot(self) -> dict[str, list[Any]]:
        """Return all documents by collection."""
        names = sorted(self.plain.list_collection_names())
        return {name: self.read(name, {}) for name in names if not name.startswith("system.")}

    def read(self, collection: str, which: dict[str, Any]) -> list[Any]:
        found = self.plain[collection].with_options(codec_options=CODEC)
        return list(found.find(which))

    def others(self) -> list[Any]:
        """Return the documents that do not belong to the own queue or topic."""
        kept = self.read("tasks", {"queue": OTHER})
        for name in ("microqueue_schedules", "microqueue_bindings", "microqueue_pauses"):
            kept += self.read(name, {"$or": [{"queue": OTHER}, {"topic": OTHER}]})
        return [*kept, *self.read(f"tasks_topic_{OTHER}", {})]

    def reset(self) -> None:
        """Restore what calls have changed."""
        self._leased = None
        self._queues.clear()
        for name, documents in self.before.items():
            ids = [one["_id"] for one in documents]
            if "_topic_" not in name:
                self.plain[name].delete_many({"_id": {"$nin": ids}})
                for one in documents:
                    self.plain[name].replace_one({"_id": one["_id"]}, one, upsert=True)
        for name in self.plain.list_collection_names():
            if name not in self.before and not name.startswith("system."):
                self.plain.drop_collection(name)

    def close(self) -> None:
        self.run(self.client.close())
        self.runner.close()


@pytest.fixture(scope="module", params=["blocking", "async"])
def scene(
    request: pytest.FixtureRequest,
    replica_set: None,
    microqueue_server: Any,
    new_database: Callable[[], Any],
) -> Iterator[Scene]:
    scene = Scene(request.param, microqueue_server.uri, new_database())
    yield scene
    scene.close()


# Calls


def stopped(sweeper_or_worker: list[Any]) -> Callable[[Any], None]:
    """Return a callback that stops what is in the list."""
    return lambda _: sweeper_or_worker[0].stop()


def new_queue(scene: Scene, hostile: dict[str, Any]) -> Any:
    given = {"database_or_collection": scene.database, "name": OWN, **hostile}
    return scene.kind(Queue)(**given).enqueue({"n": 5})


def queue_from_uri(scene: Scene, hostile: dict[str, Any]) -> Any:
    # Nothing listens there.
    given = {"uri": "mongodb://127.0.0.1:1/shop", **hostile}
    return scene.kind(Queue).from_uri(**given).close()


def new_topic(scene: Scene, hostile: dict[str, Any]) -> Any:
    given = {"database_or_queue": scene.database, "name": "new", **hostile}
    return scene.kind(Topic)(**given).publish({"n": 1})


def new_sweeper(scene: Scene, hostile: dict[str, Any]) -> Any:
    return scene.kind(Sweeper)(**{"queue": scene.queue(), **hostile}).run_once()


def sweep_forever(scene: Scene, hostile: dict[str, Any]) -> Any:
    made: list[Any] = []
    made.append(scene.kind(Sweeper)(scene.queue(), on_report=stopped(made)))
    return made[0].run_forever(**hostile)


def new_insights(scene: Scene, hostile: dict[str, Any]) -> Any:
    return scene.kind(Insights)(**{"queue": scene.queue(), **hostile}).queue_names()


def new_worker(scene: Scene, hostile: dict[str, Any]) -> Any:
    return work(scene, hostile, {"burst": True})


def run_worker(scene: Scene, hostile: dict[str, Any]) -> Any:
    return work(scene, {}, hostile)


def stop_worker(scene: Scene, hostile: dict[str, Any]) -> Any:
    return scene.kind(Worker)(scene.queue(), print).stop(**hostile)


def work(scene: Scene, options: dict[str, Any], run: dict[str, Any]) -> Any:
    """Let a worker do one task."""
    made: list[Any] = []
    stop = stopped(made)

    async def wait(payload: Any) -> None:
        stop(payload)

    given = {"queue": scene.queue(), "handler": wait if scene.is_async else stop, **options}
    made.append(scene.kind(Worker)(**{"flush_interval": 0, **given}))
    scene.ready()
    return made[0].run(**run)


def subscribe(scene: Scene, hostile: dict[str, Any]) -> Any:
    given = {"from_": "start", "timeout": 0.05, **hostile}
    made = scene.run(scene.topic().subscribe(**given))
    try:
        return scene.run(made.read())
    finally:
        scene.run(made.close())


Make = Callable[[Scene], Any]
OWNERS: dict[type, Make] = {
    Queue: lambda scene: scene.queue(),
    DeadLetters: lambda scene: scene.queue().dead_letters,
    Schedules: lambda scene: scene.queue().schedules,
    Insights: lambda scene: scene.kind(Insights)(scene.queue()),
    Topic: lambda scene: scene.topic(),
}
USUAL: dict[type, dict[str, dict[str, Any]]] = {
    Queue: {
        "cancel": {"task_id": lambda scene: scene.ready().id},
        "enqueue": {"payload": {"n": 1}},
        "enqueue_many": {"items": [{"n": 1}]},
        "ensure_indexes": {},
        "get": {"task_id": "first"},
        "mark_done": {"task": Scene.leased},
        "mark_done_many": {"tasks": lambda scene: [scene.leased()]},
        "mark_failure": {"task": Scene.leased, "message": "no"},
        "mark_retry": {"task": Scene.leased},
        "pause": {},
        "peek": {},
        "pop": {},
        "pop_many": {"limit": 1},
        "purge": {},
        "release": {"task": Scene.leased},
        "stats": {},
        "touch": {"task": Scene.leased},
        "wait_for": {"task": Scene.done, "timeout": 5},
    },
    DeadLetters: {
        "count": {},
        "discard": {"which": Scene.dead},
        "edit_and_replay": {"task_id": Scene.dead, "payload": {"n": 6}},
        "groups": {},
        "list": {},
        "missing": {},
        "replay": {"which": Scene.dead},
        "stats": {},
    },
    Schedules: {
        "get": {},
        "list": {},
        "next_runs": {"name": "nightly"},
        "pause": {},
        "put": {"name": "new", "cron": lambda _: "0 3 * * *"},
        "remove": {},
        "resume": {},
        "trigger": {},
    },
    Insights: {
        "by_name": {},
        "dead_letters": {"queue": OWN, "which": DeadLetterFilter()},
        "find": {},
        "latency": {},
        "overview": {},
        "running": {},
        "stats": {},
        "tasks": {},
        "topics": {},
    },
    Topic: {
        "bind": {"queue": OWN},
        "get": {},
        "peek": {},
        "publish": {"message": {"n": 1}},
        "unbind": {},
    },
}
"""The other arguments of each call, or what makes them."""
SPECIAL: dict[tuple[type, str], Callable[[Scene, dict[str, Any]], Any]] = {
    (Queue, CONSTRUCTOR): new_queue,
    (Queue, "from_uri"): queue_from_uri,
    (Topic, CONSTRUCTOR): new_topic,
    (Topic, "subscribe"): subscribe,
    (Sweeper, CONSTRUCTOR): new_sweeper,
    (Sweeper, "run_forever"): sweep_forever,
    (Insights, CONSTRUCTOR): new_insights,
    (Worker, CONSTRUCTOR): new_worker,
    (Worker, "run"): run_worker,
    (Worker, "stop"): stop_worker,
}
NOT_CONSTRUCTED = ("DeadLetters", "Schedules", "Subscription")
"""Queues and topics make them; their constructors are no part of the API."""


def options_of(function: Any) -> list[str]:
    """Return the names of all arguments, those of ``**options`` included."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in {"self", "cls"}:
            continue
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            names.append(parameter.name)
            continue
        (options,) = get_args(get_type_hints(function)[parameter.name]) or (None,)
        names += ["appname"] if options is None else get_type_hints(options)
    return names


def discovered() -> dict[tuple[type, str], list[str]]:
    """Return all public methods with arguments."""
    found: dict[tuple[type, str], list[str]] = {}
    for blocking, _ in PAIRS:
        for name in [CONSTRUCTOR, *public(blocking)]:
            if name == CONSTRUCTOR and blocking.__name__ in NOT_CONSTRUCTED:
                continue
            member = inspect.getattr_static(blocking, name)
            if isinstance(member, property):
                continue
            if names := options_of(function_of(member)):
                found[blocking, name] = names
    return found


METHODS = discovered()
ARGUMENTS = [(kind, method, name) for (kind, method), names in METHODS.items() for name in names]


def call(scene: Scene, kind: type, method: str, hostile: dict[str, Any]) -> Callable[[], Any]:
    """Return the call of a method, with a hostile value for one argument."""
    if (kind, method) in SPECIAL:
        return lambda: SPECIAL[kind, method](scene, hostile)
    usual = {
        name: value(scene) if callable(value) else value
        for name, value in USUAL[kind][method].items()
        if name not in hostile
    }
    return lambda: getattr(OWNERS[kind](scene), method)(**usual, **hostile)


def test_each_public_method_is_called_with_hostile_values() -> None:
    called = {*SPECIAL, *((kind, method) for kind in USUAL for method in USUAL[kind])}
    assert called == set(METHODS)


# Effects

SELECTING = {
    *((Queue, "cancel", "task_id"), (Queue, "purge", "status"), (Topic, "unbind", "queue")),
    *((DeadLetters, method, "which") for method in ("discard", "replay")),
    (DeadLetters, "edit_and_replay", "task_id"),
    *((Schedules, method, "name") for method in ("pause", "remove", "resume", "trigger")),
    *((Queue, method, "task") for method in ("mark_done", "mark_failure", "mark_retry")),
    *((Queue, method, "task") for method in ("release", "touch")),
    (Queue, "mark_done_many", "tasks"),
}
"""Arguments that say what to change: a hostile value is nothing that exists."""


def stored_task(scene: Scene, result: Any) -> dict[str, Any]:
    (found,) = scene.read("tasks", {"_id": result.id})
    return dict(found)


def latest_attempt(scene: Scene, _: Any) -> dict[str, Any]:
    """Return the error of the task that failed last."""
    (found,) = scene.read("tasks", {"_id": scene.last_leased.id})
    return dict(found["error"])


def stored_schedule(scene: Scene, result: Any) -> dict[str, Any]:
    (found,) = scene.read("microqueue_schedules", {"name": result.name, "queue": OWN})
    return {**found, "task": found.get("task")}


def stored_message(scene: Scene, position: str) -> dict[str, Any]:
    message = scene.run(scene.topic().get(position))
    return {"message": message.body, "key": message.key, "headers": message.headers}


STORED: dict[tuple[type, str], tuple[Callable[[Scene, Any], Any], dict[str, str]]] = {
    (Queue, "enqueue"): (
        stored_task,
        {
            **{name: name for name in ("payload", "headers", "name", "dedupe_key", "priority")},
            "task_id": "_id",
        },
    ),
    (Queue, "mark_failure"): (latest_attempt, {"code": "code"}),
    (Queue, "mark_retry"): (latest_attempt, {"code": "code"}),
    (Queue, "mark_done"): (
        lambda scene, _: scene.read("tasks", {"_id": scene.last_leased.id})[0],
        {"result": "result"},
    ),
    (Queue, "pause"): (lambda _, pause: {"reason": pause.reason}, {"reason": "reason"}),
    (Schedules, "put"): (stored_schedule, {"payload": "payload", "headers": "headers"}),
    (Topic, "publish"): (
        stored_message,
        {"message": "message", "key": "key", "headers": "headers"},
    ),
}
"""What has to be read back: how to read it, and the field of each argument."""


def same(one: Any, other: Any) -> bool:
    """Return whether two values are the same in BSON."""
    return encoded(one) == encoded(other)


def encoded(value: Any) -> bytes:
    return bytes(bson.encode({"value": value}, codec_options=CODEC))


def check_value(scene: Scene, kind: type, method: str, name: str, value: Any) -> None:
    """Perform one call; check the commands, its result and what it changed."""
    if name in CALLBACKS and callable(value):
        return
    selecting = (kind, method, name) in SELECTING
    calling = call(scene, kind, method, {name: value})
    before = scene.snapshot() if selecting else None
    result, error = scene.perform(calling)
    if scene.commands.wrote:
        assert scene.others() == scene.untouched
        if before is not None:
            after = scene.snapshot()
            assert encoded({one: after[one] for one in before}) == encoded(before)
    if error is not None:
        assert str(error)
        return
    read, fields = STORED.get((kind, method), (None, {}))
    if read is not None and name in fields:
        assert same(read(scene, result).get(fields[name]), value)


@pytest.mark.parametrize(
    ("kind", "method"), METHODS, ids=[f"{kind.__name__}.{name}" for kind, name in METHODS]
)
def test_hostile_value_is_stored_as_it_is_or_rejected(
    scene: Scene, kind: type, method: str
) -> None:
    scene.reset()
    names = METHODS[kind, method]
    for name in names:
        for value in FIRST:
            check_value(scene, kind, method, name, value)

    @settings(max_examples=EXAMPLES * len(names), suppress_health_check=list(HealthCheck))
    @given(name=st.sampled_from(names), value=values)
    def check_generated(name: str, value: Any) -> None:
        check_value(scene, kind, method, name, value)

    check_generated()


# Models, which are arguments, too


def search(scene: Scene, which: TaskFilter) -> Any:
    return scene.kind(Insights)(scene.queue()).tasks(which)


def count(scene: Scene, which: DeadLetterFilter) -> Any:
    return scene.queue().dead_letters.count(which)


def add(scene: Scene, new: NewTask[Any]) -> Any:
    return scene.queue().enqueue_many([new])


def nothing(_scene: Scene, _made: Any) -> None:
    pass


MODELS: list[tuple[Any, dict[str, Any], Callable[[Scene, Any], Any]]] = [
    (NewTask, {"payload": {}}, add),
    (DeadLetterFilter, {}, count),
    (TaskFilter, {}, search),
    (QueueSettings, {}, nothing),
    (BackoffPolicy, {}, nothing),
    (WorkerOptions, {}, nothing),
]


@pytest.mark.parametrize(("model", "usual", "use"), MODELS)
def test_hostile_field_of_a_model_is_a_value_or_rejected(
    scene: Scene, model: Any, usual: dict[str, Any], use: Callable[[Scene, Any], Any]
) -> None:
    scene.reset()
    names = [name for name in model.model_fields if name != "shown"]

    def check_field(name: str, value: Any) -> None:
        _, error = scene.perform(lambda: use(scene, model(**{**usual, name: value})))
        assert error is None or str(error)
        if scene.commands.wrote:
            assert scene.others() == scene.untouched

    for name in names:
        for value in FIRST:
            check_field(name, value)
    generated = settings(
        max_examples=EXAMPLES * len(names), suppress_health_check=list(HealthCheck)
    )
    generated(given(name=st.sampled_from(names), value=values)(check_field))()


CONDITIONS: list[Any] = [
    {"$ne": ""},
    {"$gt": ""},
    {"$exists": True},
    {"$in": ["Broken", "Other"]},
    re.compile("."),
    Regex("."),
    ["Broken", "Other"],
    None,
]
"""What is a condition, if a filter has it in the place of a value."""
SETTLING: dict[str, dict[str, Any]] = {
    "mark_done": {},
    "mark_failure": {"message": "no"},
    "mark_retry": {},
    "release": {},
    "touch": {},
}


def replaced(model: Any, **fields: Any) -> Any:
    """Return a copy with these values, which pydantic does not validate."""
    return type(model).model_construct(**{**dict(model), **fields})


def copied(model: Any, **fields: Any) -> Any:
    """Return a copy that the method of the model makes."""
    return model.model_copy(update=fields)


Change = Callable[..., Any]
CHANGES = pytest.mark.parametrize("change", [replaced, copied])


@CHANGES
@pytest.mark.parametrize("method", [*SETTLING, "mark_done_many", "wait_for"])
def test_copied_task_selects_no_other_task(scene: Scene, change: Change, method: str) -> None:
    scene.reset()
    stale, _ = scene.leased(), scene.ready()
    scene.run(scene.queue().release(stale))
    assert scene.run(scene.queue().pop()).lease.token != stale.lease.token
    before = scene.snapshot()

    def settle(field: str, value: Any) -> Any:
        lease = stale.lease
        if field == "token":
            task = replaced(stale, lease=change(lease, token=value))
        else:
            task = change(stale, **{field: value})
        if method == "mark_done_many":
            return scene.queue().mark_done_many([task])
        if method == "wait_for":
            return scene.queue().wait_for(task, timeout=0.01)
        return getattr(scene.queue(), method)(task, **SETTLING[method])

    for field in ("id", "token", "lease"):
        for value in CONDITIONS:
            scene.perform(partial(settle, field, value))
            assert encoded(scene.snapshot()) == encoded(before), (field, value)


@CHANGES
@pytest.mark.parametrize("method", ["discard", "replay"])
@pytest.mark.parametrize("field", ["name", "code", "text", "group", "since", "until"])
def test_copied_filter_selects_no_dead_letter(
    scene: Scene, change: Change, method: str, field: str
) -> None:
    scene.reset()
    scene.dead()
    before = scene.snapshot()
    for value in CONDITIONS[:-1]:  # ``None`` is no filter.

        def select(value: Any = value) -> Any:
            which = change(DeadLetterFilter(), **{field: value})
            return getattr(scene.queue().dead_letters, method)(which)

        _, error = scene.perform(select)
        assert isinstance(error, InvalidArgument)
        assert encoded(scene.snapshot()) == encoded(before), value


@CHANGES
@pytest.mark.parametrize("field", ["queue", "name", "code", "status", "text"])
def test_copied_filter_of_a_search_is_rejected(scene: Scene, change: Change, field: str) -> None:
    for value in CONDITIONS[:-1]:

        def find(value: Any = value) -> Any:
            return search(scene, change(TaskFilter(), **{field: value}))

        _, error = scene.perform(find)
        assert isinstance(error, InvalidArgument)


def job(to: str = "") -> None:
    """Do nothing."""


def declared(name: str, value: Any) -> Any:
    tasks = Tasks(app=value) if name == "app" else Tasks()
    return tasks.task(**({} if name == "app" else {name: value}))(job)


@pytest.mark.parametrize("method", [CONSTRUCTOR, "task", "check"])
def test_hostile_option_of_a_named_task_is_rejected_by_name(method: str) -> None:
    tasks = Tasks()
    tasks.task("job")(job)
    usual: dict[str, dict[str, Any]] = {"check": {"name": "job", "payload": {}}}

    def check_option(name: str, value: Any) -> None:
        with suppress(MicroqueueError, Fail, Retry):
            if method in {CONSTRUCTOR, "task"}:
                declared(name, value)
            else:
                getattr(tasks, method)(**{**usual.get(method, {}), name: value})

    for name in options_of(getattr(Tasks, method)):
        for value in [*FIRST, *OBJECTS, *CONTAINERS]:
            check_option(name, value)


def test_each_method_of_named_tasks_with_arguments_is_called() -> None:
    methods = {name for name in public(Tasks) if options_of(getattr(Tasks, name))}
    assert methods == {"task", "check"}


# The check itself


@pytest.mark.parametrize("name", PLANTS)
def test_operation_that_interprets_a_value_is_found(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with planted(name, monkeypatch) as code, suppress(OperationFailure):
        scene.perform(lambda: scene.queue().dead_letters.count(DeadLetterFilter(code=code)))
