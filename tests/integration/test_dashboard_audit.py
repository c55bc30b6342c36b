"""Every action of a viewer is in the audit log."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from microqueue import TaskStatus
from microqueue.operations.indexes import NEVER_SEC
from tests.integration.dashboard_site import opened


async def actions(site: Any) -> list[tuple[str, str, int]]:
    items = (await site.get("/audit"))["items"]
    return [(one["action"], one["outcome"], one["count"]) for one in items]


async def test_retention_is_no_longer_than_an_index_takes(microqueue_database: Any) -> None:
    async with opened(microqueue_database, audit_retention=timedelta(days=36_500)) as site:
        await site.post("/queues/default/pause")
        assert await actions(site) == [("queue.pause", "ok", 1)]
    index = microqueue_database.microqueue_audit.index_information()["kept"]
    assert index["expireAfterSeconds"] == NEVER_SEC


async def test_action_is_recorded_even_if_the_log_has_no_index(
    microqueue_database: Any, caplog: pytest.LogCaptureFixture
) -> None:
    microqueue_database.microqueue_audit.create_index([("who", 1)], name="kept")
    async with opened(microqueue_database) as site:
        await site.post("/queues/default/pause")
        assert await actions(site) == [("queue.pause", "ok", 1)]
    [record] = [one for one in caplog.records if one.name == "microqueue.dashboard"]
    assert record.levelname == "ERROR"
    assert record.exc_info is not None
    assert "'kept'" in str(record.exc_info[1])


def unknown(_request: Any) -> str:
    raise RuntimeError("the directory is away")


@pytest.mark.parametrize("identify", [unknown, lambda _request: 5])
async def test_nothing_is_done_for_somebody_who_cannot_be_named(
    microqueue_database: Any, identify: Any
) -> None:
    async with opened(microqueue_database, identify=identify) as site:
        task = site.queue.enqueue({})
        await site.post(f"/tasks/{task.id}/cancel", expect=500)
        await site.post("/queues/default/pause", expect=500)
        (waiting,) = site.queue.peek()
        assert waiting.status is TaskStatus.PENDING
        assert site.queue.paused() is None
        assert await actions(site) == []


async def test_name_is_asked_for_once_and_recorded_whatever_its_letters(
    microqueue_database: Any,
) -> None:
    asked = []

    def identify(request: Any) -> str:
        asked.append(request)
        return "ada \ud800"

    async with opened(microqueue_database, identify=identify) as site:
        await site.post("/queues/default/pause")
        (entry,) = (await site.get("/audit"))["items"]
        pause = site.queue.paused()
        assert pause is not None
        assert (entry["who"], pause.reason) == ("ada ?", "by ada ?")
    assert len(asked) == 1
