"""Large payloads: the page stays quick, and what it holds is bounded in bytes."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from bson import Binary, ObjectId

from microqueue import Queue, QueueSettings
from microqueue.dashboard.payloads import Redactor, to_extended_json
from microqueue.dashboard.task_views import TaskViews
from microqueue.embedded import EmbeddedServer
from microqueue.operations import paging
from tests.integration.dashboard_site import API, Site, opened

LETTERS = 60
BODY = ("lorem ipsum dolor sit amet " * 40_000)[:1_000_000]
MOST_BYTES = 60 * 2**20
NOW = datetime.now(UTC)


@pytest.fixture(scope="module", params=["status", "collection"])
def large_database(
    request: pytest.FixtureRequest, new_database: Callable[[], Any]
) -> Iterator[Any]:
    """A database with large dead letters, which the tests only read."""
    database = new_database()
    Queue(database, settings=QueueSettings(dead_letters=request.param)).ensure_indexes()
    place = database["tasks" if request.param == "status" else "tasks_dlq"]
    for n in range(LETTERS):
        at = NOW - timedelta(milliseconds=n)
        place.insert_one(
            {
                "_id": ObjectId(), "queue": "default", "status": "failed", "attempts": 1,
                "payload": {"n": n, "body": BODY, "text": "zebra" if n == 50 else "horse"},
                "max_attempts": 1, "created_at": at, "updated_at": at, "finished_at": at,
                "error": {"message": "m", "code": "X", "at": at}, "version": 1,
            }
        )  # fmt: skip
    yield database
    database.client.drop_database(database)


@pytest.fixture(params=["blocking", "async", "motor"])
async def site(
    request: pytest.FixtureRequest, large_database: Any, microqueue_server: EmbeddedServer
) -> AsyncIterator[Site]:
    place: Any = "status" if large_database.tasks.estimated_document_count() else "collection"
    options: dict[str, Any] = {
        "kind": request.param,
        "uri": microqueue_server.uri,
        "settings": QueueSettings(dead_letters=place),
    }
    async with opened(large_database, **options) as one:
        await one.get("/config")
        yield one


@pytest.mark.parametrize("path", ["/tasks?status=failed&limit=50", "/dead-letters?limit=50"])
async def test_page_of_large_tasks_does_not_block_the_others(site: Site, path: str) -> None:
    began = time.thread_time()  # What this thread computes, however slow the machine is.
    reply = await site.client.get(f"{API}{path}", timeout=60)
    computed_sec = time.thread_time() - began
    assert [len(one["preview"]) for one in reply.json()["items"]] == [200] * 50
    assert computed_sec < 1, computed_sec


async def test_search_for_a_text_ends_in_time_and_goes_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "SCAN_SEC", 0.0)
    monkeypatch.setattr(paging, "LEAST_SEC", 0.0)
    found: list[Any] = []
    pages = 0
    query: dict[str, Any] = {"status": "failed", "text": "zebra"}
    while True:
        page = await site.get("/tasks", **query)
        pages += 1
        found += page["items"]
        if page["next_cursor"] is None:
            break
        query["cursor"] = page["next_cursor"]
    assert len(found) == 1
    assert pages > LETTERS // 2


async def test_export_is_whole_and_holds_little_at_a_time(site: Site) -> None:
    tracemalloc.start()
    numbers: list[int] = []
    rest = b""
    path = f"{API}/dead-letters/export"
    try:
        # The test's own transport keeps all of an answer, so its lines are taken as they come.
        taken = await lines_of(site.app, path)
        async for chunk in taken:
            *lines, rest = (rest + chunk).split(b"\n")
            numbers += [json.loads(line)["payload"]["n"] for line in lines]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert numbers == list(range(LETTERS))
    assert peak < MOST_BYTES, peak


async def lines_of(app: Any, path: str) -> AsyncIterator[bytes]:
    """Ask an app, and give the parts of its answer as they are sent."""
    parts: asyncio.Queue[Any] = asyncio.Queue(1)
    asked = False

    async def receive() -> Any:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await parts.put(message["body"] or None)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "headers": [(b"host", b"localhost")], "server": ("localhost", 80),
        "client": ("127.0.0.1", 1),
    }  # fmt: skip

    async def answer() -> AsyncIterator[bytes]:
        serving = asyncio.create_task(app(scope, receive, send))
        while (part := await parts.get()) is not None:
            yield part
        await serving

    return answer()


# The preview


PAYLOADS: list[Any] = [
    {},
    {"a": 1, "b": [1, 2, {"c": None}], "d": 'é"\n', "e": 1.5, "f": ObjectId(b"x" * 12)},
    {"password": "x" * 10_000, "order": 5},
    {"login": {"password": {"deep": 1}}, "list": [{"token": "abc"}, "token=abc; next"]},
    {"many": list(range(1000))},
    {"text": "x" * 10_000},
    {"bytes": Binary(b"x" * 10_000, 5), "short": b"abc"},
    {"nested": [[[[["x" * 300]]]]], "after": 1},
    {"text": f"mongodb://user:{'p' * 5000}@host/ and more"},
    {"text": f"see http://host/ then\nmore {'p' * 5000}@host/"},
    {"text": f'password="{"p" * 5000}" and more'},
    "just a text",
    None,
    [1, 2, 3],
    {"empty": {}, "none": [], "tuple": ()},
]


@pytest.mark.parametrize("pattern", ["password|token", None])
@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_preview_is_the_beginning_of_the_whole(payload: Any, pattern: str | None) -> None:
    redactor = Redactor(pattern)
    whole = json.dumps(to_extended_json(redactor.mask(payload)), ensure_ascii=False)
    expected = whole if len(whole) <= 200 else f"{whole[:199]}…"
    assert TaskViews(redactor, read_only=True).preview(payload) == expected


def test_preview_of_a_large_payload_is_quick() -> None:
    payload = {"nested": [{"body": BODY, "n": n} for n in range(50)]}
    views = TaskViews(Redactor("password|token"), read_only=True)
    began = time.thread_time()  # Of the processor: that others use it, too, does not count.
    for _ in range(100):
        views.preview(payload)
    assert time.thread_time() - began < 1
