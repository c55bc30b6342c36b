"""Hostile values for what handlers and named tasks call, for a repair and for a migration.

The rest of the public API is in ``test_hostile_api.py``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microqueue import MicroqueueError, Queue, Tasks, Worker
from microqueue.migration import Migration
from microqueue.repair import repair
from microqueue.worker import BatchContext, Context, EnqueuedTask
from microqueue.worker.registry import NamedTask, NamedTaskOptions
from tests.hostile import CONTAINERS, FIRST, MARK, bounded, is_json, values
from tests.integration.test_hostile_api import Scene, options_of, same, scene
from tests.unit.test_public_api import public
from tests.waiting import wait_for

__all__ = ["scene"]

AT_ONCE = 8
"""How many generated values one handler gets."""
CALLBACKS = {"write", "on_batch", "on_part"}
"""Arguments that are code of the caller: what it raises is no error of ours."""
Given = list[tuple[str, Any]]
"""Arguments, and the value of each."""


def methods_of(kind: type) -> dict[str, list[str]]:
    """Return the public methods of a class that have arguments."""
    members = ((name, inspect.getattr_static(kind, name)) for name in public(kind))
    found = {name: options_of(one) for name, one in members if inspect.isfunction(one)}
    return {name: arguments for name, arguments in found.items() if arguments}


def first_values(names: list[str]) -> Given:
    return [(name, value) for name in names for value in FIRST]


def generated(names: list[str]) -> st.SearchStrategy[Given]:
    one = st.tuples(st.sampled_from(names), values)
    return st.lists(one, min_size=AT_ONCE, max_size=AT_ONCE)


@contextmanager
def rejected_or_done(scene: Scene) -> Iterator[None]:
    """Let a call raise an error of ours only, with a message, and change nothing of others."""
    error: MicroqueueError | None = None
    try:
        yield
    except MicroqueueError as exc:
        error = exc
    assert error is None or str(error)
    assert scene.others() == scene.untouched


# Contexts

Call = Callable[[Any, str, Any], Any]
"""Calls a method of a context, with a value for one argument."""


def enqueue(context: Any, name: str, value: Any) -> Any:
    return context.enqueue(**{"payload": {"n": 7}, name: value})


CONTEXT_CALLS: dict[tuple[type, str], Call] = {
    (Context, "enqueue"): enqueue,
    (BatchContext, "enqueue"): enqueue,
    (Context, "progress"): lambda context, name, value: context.progress(
        **{"fraction": 0.5, name: value}
    ),
    (BatchContext, "progress"): lambda context, name, value: context.progress(
        **{"fraction": 0.5, name: value}
    ),
    (BatchContext, "is_cancelled"): lambda context, name, value: context.is_cancelled(
        **{name: value}
    ),
    (Context, "touch"): lambda context, name, value: context.touch(**{name: value}),
    (Context, "transaction"): lambda context, name, value: context.transaction(**{name: value}),
}
CONTEXTS: tuple[type, ...] = (Context, BatchContext)
CONTEXT_METHODS = {
    (kind, name): names for kind in CONTEXTS for name, names in methods_of(kind).items()
}


def test_each_method_of_a_context_is_called() -> None:
    assert set(CONTEXT_CALLS) == set(CONTEXT_METHODS)


class Handled:
    """A worker whose handler makes calls, and the first error that is none of ours."""

    def __init__(self, scene: Scene, *, batch: bool) -> None:
        self._scene = scene
        self._options = {"batch": 1} if batch else {}
        self.error: BaseException | None = None

    def run(self, calls: list[Callable[[Any], Any]]) -> None:
        """Make calls, each with the context, in the handler of one task."""
        made: list[Any] = []

        def handle(_payload: Any, context: Any) -> None:
            self._guarded(context, calls)
            made[0].stop()

        async def handle_async(_payload: Any, context: Any) -> None:
            await self._guarded_async(context, calls)
            made[0].stop()

        scene = self._scene
        handler = handle_async if scene.is_async else handle
        options: dict[str, Any] = {"flush_interval": 0, "concurrency": 1, **self._options}
        made.append(scene.kind(Worker)(scene.queue(), handler, **options))
        scene.reset()
        scene.ready()
        with scene.commands.checked():
            scene.run(made[0].run())
        if self.error is not None:
            raise self.error

    def _guarded(self, context: Any, calls: list[Callable[[Any], Any]]) -> None:
        try:
            for one in calls:
                with rejected_or_done(self._scene):
                    one(context)
        except BaseException as exc:  # noqa: BLE001 (the test raises it)
            self.error = exc

    async def _guarded_async(self, context: Any, calls: list[Callable[[Any], Any]]) -> None:
        try:
            for one in calls:
                with rejected_or_done(self._scene):
                    found = one(context)
                    if isinstance(found, Awaitable):
                        await found
        except BaseException as exc:  # noqa: BLE001 (the test raises it)
            self.error = exc


@pytest.mark.parametrize(
    ("kind", "method"),
    CONTEXT_METHODS,
    ids=[f"{kind.__name__}.{name}" for kind, name in CONTEXT_METHODS],
)
def test_hostile_value_in_a_handler_is_a_value_or_rejected(
    scene: Scene, kind: type, method: str
) -> None:
    call, names = CONTEXT_CALLS[kind, method], CONTEXT_METHODS[kind, method]
    handled = Handled(scene, batch=kind is BatchContext)

    def calling(name: str, value: Any, context: Any) -> Any:
        return call(context, name, value)

    def calls_with(chosen: Given) -> list[Callable[[Any], Any]]:
        return [
            partial(calling, name, value)
            for name, value in chosen
            if not (name in CALLBACKS and callable(value))
        ]

    handled.run(calls_with(first_values(names)))

    @bounded
    @given(chosen=generated(names))
    def check_generated(chosen: Given) -> None:
        handled.run(calls_with(chosen))

    check_generated()


@pytest.mark.parametrize("value", [{"$ne": MARK}, f"${MARK}.b", [{"$set": MARK}]])
def test_handler_stores_a_hostile_payload_as_it_is(scene: Scene, value: Any) -> None:
    Handled(scene, batch=False).run([lambda context: context.enqueue({"a": value})])
    assert same(scene.read("tasks", {"payload.a": {"$exists": True}})[0]["payload"]["a"], value)


def test_hostile_progress_is_stored_as_it_is(scene: Scene) -> None:
    message = f"${MARK}.b"
    stored: list[Any] = []

    def read() -> bool:
        stored[:] = scene.read("tasks", {"progress.message": {"$eq": message}})
        return bool(stored)

    if scene.is_async:

        async def wait(_context: Any) -> None:
            await asyncio.to_thread(wait_for, read)

        calls: list[Callable[[Any], Any]] = [wait]
    else:
        calls = [lambda _context: wait_for(read)]
    Handled(scene, batch=False).run([lambda context: context.progress(0.5, message), *calls])
    assert len(stored) == 1


# Named tasks


def job(to: Any = "", many: list[int] | None = None) -> Any:
    """Return what it gets."""
    return to, many


JOB = Tasks().task("job")(job)
NAMED_CALLS: dict[str, tuple[list[str], Callable[[Scene, str, Any], Any]]] = {
    "check": (
        ["name", "payload"],
        lambda _scene, name, value: JOB.check(**{"name": "job", "payload": {}, name: value}),
    ),
    "options": (
        list(NamedTaskOptions.__annotations__),
        lambda scene, name, value: JOB.options(**{name: value}).enqueue(scene.queue()),
    ),
    "new": (["to", "many"], lambda _scene, name, value: JOB.new(**{name: value})),
    "enqueue": (
        ["queue", "to", "many"],
        lambda scene, name, value: (
            JOB.enqueue(value) if name == "queue" else JOB.enqueue(scene.queue(), **{name: value})
        ),
    ),
}


def check_all(names: list[str], check: Callable[[str, Any], None]) -> None:
    """Check each argument with the first values, and with generated ones."""
    for name, value in first_values(names):
        check(name, value)

    @bounded
    @given(chosen=generated(names))
    def check_generated(chosen: Given) -> None:
        for name, value in chosen:
            check(name, value)

    check_generated()


def test_each_method_of_a_named_task_is_called() -> None:
    assert set(NAMED_CALLS) == set(methods_of(NamedTask))
    assert set(methods_of(EnqueuedTask)) == {"wait"}


@pytest.mark.parametrize("method", NAMED_CALLS)
def test_hostile_value_of_a_named_task_is_a_value_or_rejected(scene: Scene, method: str) -> None:
    scene.reset()
    names, call = NAMED_CALLS[method]

    def check(name: str, value: Any) -> None:
        result, error = scene.perform(lambda: call(scene, name, value))
        assert error is None or str(error)
        assert scene.others() == scene.untouched
        if error is None and (method, name) == ("enqueue", "to") and is_json(value):
            (found,) = scene.read("tasks", {"_id": result.id})
            assert same(found["payload"].get("to"), value)

    check_all(names, check)


def test_hostile_argument_of_wait_is_rejected(scene: Scene) -> None:
    scene.reset()
    task = scene.run(JOB.enqueue(scene.queue()))
    scene.run(scene.queue().cancel(task.id))  # No wait is long.

    def check(name: str, value: Any) -> None:
        _, error = scene.perform(lambda: task.wait(**{name: value}))
        assert error is not None
        assert str(error)
        assert not scene.commands.wrote

    check_all(["timeout"], check)


# Repairs and migrations

blocking = pytest.mark.parametrize("scene", ["blocking"], indirect=True)


def make_malformed(scene: Scene) -> None:
    """Store hostile values in each field that a repair or a migration reads."""
    for place, value in enumerate([*CONTAINERS[:20], f"${MARK}", f"{MARK}.b"]):
        fields = ["attempts", "position", "history", "created_at", "expires_at"]
        document: dict[str, Any] = dict.fromkeys(fields, value)
        document |= {"_id": f"bad-{place}", "queue": "bad", "payload": {}, "status": "pending"}
        if same_in_bson(document):
            scene.plain["tasks"].insert_one(document)


def same_in_bson(document: dict[str, Any]) -> bool:
    """Return whether MongoDB can store a document."""
    try:
        return same(document, document)
    except Exception:  # noqa: BLE001 (whatever the reason is)
        return False


@blocking
def test_hostile_argument_of_a_repair_is_rejected(scene: Scene) -> None:
    scene.reset()

    def check(name: str, value: Any) -> None:
        if name in CALLBACKS and callable(value):
            return
        before = scene.snapshot()
        _, error = scene.perform(lambda: repair(**{"queue": scene.queue(), name: value}))
        assert error is None or str(error)
        assert scene.snapshot() == before

    check_all(options_of(repair), check)


@blocking
def test_repair_writes_no_hostile_value_as_an_operator(scene: Scene) -> None:
    scene.reset()
    make_malformed(scene)
    report, error = scene.perform(lambda: repair(scene.queue(), apply=True))
    assert error is None
    assert report.documents >= 5
    assert scene.others() == scene.untouched


@blocking
def test_hostile_argument_of_a_migration_is_rejected(scene: Scene) -> None:
    scene.reset()
    assert set(methods_of(Migration)) == {"run"}

    def check(name: str, value: Any) -> None:
        if name in CALLBACKS and callable(value):
            return
        queue: Queue[Any] = scene.queue()
        _, error = scene.perform(
            lambda: Migration(value) if name == "queue" else Migration(queue).run(**{name: value})
        )
        assert (error is None) == (name == "force" or value is None)
        assert scene.others() == scene.untouched

    check_all(["queue", *options_of(Migration.run)], check)
