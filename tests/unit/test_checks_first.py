"""Wrong arguments are rejected before any call to MongoDB, also by a queue that was never used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import mongomock
import pytest

from microqueue import AsyncQueue, Queue, QueueSettings, ServerUnavailable
from microqueue.core import core_of
from microqueue.dead_letter_models import DeadLetterFilter
from microqueue.drivers.driver import awaited
from microqueue.insights import AsyncInsights, Insights
from microqueue.operations.call import Call
from microqueue.task_filter import TaskFilter
from tests.ports import free_port
from tests.rejection import rejecting


class Unreachable:
    """A queue whose server does not exist, and the calls that it tries to make."""

    def __init__(self, kind: Any) -> None:
        self.queue = kind.from_uri(
            f"mongodb://127.0.0.1:{free_port()}/shop",
            settings=QueueSettings(retry_deadline=0),
            serverSelectionTimeoutMS=20,
        )
        self.insights = (Insights if kind is Queue else AsyncInsights)(self.queue)
        self.calls = calls_of(self.queue)


def calls_of(queue: Any) -> list[Call]:
    """Return the calls that a queue makes from now on."""
    calls: list[Call] = []
    core_of(queue)._driver.before_call = calls.append  # noqa: SLF001 (its fault point)
    return calls


@pytest.fixture(params=[Queue, AsyncQueue])
async def unreachable(request: pytest.FixtureRequest) -> AsyncIterator[Unreachable]:
    made = Unreachable(request.param)
    yield made
    await awaited(made.queue.close())


@pytest.fixture
def queue() -> Queue[Any]:
    return Queue[Any](mongomock.MongoClient().shop)


WRONG: list[tuple[str, Callable[[Any], Any]]] = [
    ("payload", lambda queue: queue.enqueue(object())),
    ("session", lambda queue: queue.enqueue({}, session=7)),
    ("prioritty", lambda queue: queue.enqueue_many([{}], prioritty=3)),
    ("items", lambda queue: queue.enqueue_many(7)),
    ("limit", lambda queue: queue.pop_many(0)),
    ("task", lambda queue: queue.mark_done(7)),
    ("tasks", lambda queue: queue.mark_done_many(7)),
    ("task", lambda queue: queue.mark_retry(7)),
    ("task", lambda queue: queue.mark_failure(7, "no")),
    ("task", lambda queue: queue.release(7)),
    ("task", lambda queue: queue.touch(7)),
    ("task_id", lambda queue: queue.get(None)),
    ("task_id", lambda queue: queue.wait_for(None)),
    ("task_id", lambda queue: queue.cancel(None)),
    ("status", lambda queue: queue.peek(status="bad")),
    ("limit", lambda queue: queue.peek(0)),
    ("status", lambda queue: queue.purge(status="processing")),
    ("reason", lambda queue: queue.pause(reason=7)),
    ("limit", lambda queue: queue.dead_letters.list(limit=0)),
    ("cursor", lambda queue: queue.dead_letters.list(cursor="bad")),
    ("limit", lambda queue: queue.dead_letters.all_queues.list(limit=0)),
    ("cursor", lambda queue: queue.dead_letters.all_queues.list(cursor="bad")),
    ("delay", lambda queue: queue.dead_letters.replay([], delay="soon")),
    ("task_id", lambda queue: queue.dead_letters.replay(None)),
    ("payload", lambda queue: queue.dead_letters.edit_and_replay("a", 7)),
    ("which", lambda queue: queue.dead_letters.groups(7)),
    ("limit", lambda queue: queue.dead_letters.discard([], limit=0)),
    ("cron", lambda queue: queue.schedules.put("a", cron="bad")),
    ("name", lambda queue: queue.schedules.get("")),
    ("name", lambda queue: queue.schedules.pause("")),
    ("name", lambda queue: queue.schedules.resume("")),
    ("name", lambda queue: queue.schedules.trigger("")),
    ("name", lambda queue: queue.schedules.remove("")),
    ("n", lambda queue: queue.schedules.next_runs("a", 0)),
]

WRONG_OF_INSIGHTS: list[tuple[str, Callable[[Any], Any]]] = [
    ("limit", lambda insights: insights.running(limit=0)),
    ("limit", lambda insights: insights.tasks(TaskFilter(), limit=0)),
    ("cursor", lambda insights: insights.tasks(TaskFilter(), cursor="bad")),
    ("limit", lambda insights: insights.dead_letters(None, DeadLetterFilter(), limit=0)),
    ("cursor", lambda insights: insights.dead_letters(None, DeadLetterFilter(), cursor="bad")),
]


@pytest.mark.parametrize(("argument", "call"), WRONG)
async def test_wrong_argument_is_rejected_without_a_server(
    unreachable: Unreachable, argument: str, call: Callable[[Any], Any]
) -> None:
    with rejecting(argument):
        await awaited(call(unreachable.queue))
    assert unreachable.calls == []


@pytest.mark.parametrize(("argument", "call"), WRONG_OF_INSIGHTS)
async def test_insights_reject_a_wrong_argument_without_a_server(
    unreachable: Unreachable, argument: str, call: Callable[[Any], Any]
) -> None:
    with rejecting(argument):
        await awaited(call(unreachable.insights))
    assert unreachable.calls == []


async def test_right_arguments_need_the_server(unreachable: Unreachable) -> None:
    with pytest.raises(ServerUnavailable):
        await awaited(unreachable.queue.workers())
    (call,) = unreachable.calls
    assert (call.target, call.method) == ("locks", "find_one")


def test_collection_is_opened_once_before_the_first_call(queue: Queue[Any]) -> None:
    calls = calls_of(queue)
    queue.workers()
    first, *others = [str(call.target) for call in calls]
    assert first == "locks"
    assert others[-1] == "workers"
    queue.workers()
    assert [str(call.target) for call in calls] == [first, *others, "workers"]


def test_operation_that_opens_the_collection_itself_opens_it_once(queue: Queue[Any]) -> None:
    calls = calls_of(queue)
    queue.get("a")
    assert [call.target for call in calls].count(calls[0].target) == 1
    assert calls[0].target == "locks"
