"""What the page says where there is more than it shows, in the browser."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from microqueue import Queue
from microqueue.operations import paging
from microqueue.testing import FakeClock
from tests.acceptance.browser import action, expect_empty

Visit = Callable[..., Page]


@pytest.fixture
def queue(microqueue_database: Any, microqueue_clock: FakeClock) -> Any:
    return Queue(microqueue_database, clock=microqueue_clock)


def bury(queue: Any, *messages: str) -> None:
    for message in messages:
        queue.enqueue({"message": message})
        queue.mark_failure(queue.pop(), message, code="X")
        queue.clock.advance(1)


def test_search_of_letters_that_stopped_goes_on_by_a_button(
    visit: Visit, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bury(queue, "a needle", *["hay"] * 9)
    monkeypatch.setattr(paging, "STEP", 4)
    monkeypatch.setattr(paging, "SCAN_SEC", -1.0)
    page = visit(queue, "dead-letters?text=needle")
    expect_empty(page, "no-match-yet")
    action(page, "continue-search").click()
    expect(page.locator("[data-row]")).to_have_count(1)
    expect(page.locator("[data-row]")).to_contain_text("a needle")


def test_groups_that_are_not_shown_are_counted(
    visit: Visit, queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("microqueue.dashboard.routes_read.MAX_GROUPS", 1)
    bury(queue, "common", "common", "rare", "odd")
    page = visit(queue, "dead-letters")
    groups = page.get_by_label("Groups")
    expect(groups.locator("li")).to_have_count(1)
    hidden = groups.locator("[data-hidden-groups]")
    expect(hidden).to_have_attribute("data-hidden-groups", "2")
    expect(hidden).to_contain_text("2")
    expect(action(page, "select-all")).to_have_text("Select all 4 matching")
    page.evaluate("location.hash = '#/dead-letters?group=rare&code=X'")
    expect(page.locator("[data-row]")).to_have_count(1)
    expect(action(page, "select-all")).to_have_text("Select all matching")


def test_buttons_of_a_queue_with_a_slash_in_its_name_work(
    visit: Visit, queue: Any, microqueue_database: Any, microqueue_clock: FakeClock
) -> None:
    other: Queue[Any] = Queue(microqueue_database, "mail/eu", clock=microqueue_clock)
    other.enqueue_many([{}, {}])
    page = visit(queue, manual_actions=True)
    card = page.locator("[data-queue='mail/eu']")
    action(card, "succeed-next").click()
    action(page.get_by_role("dialog"), "submit").click()
    expect(card.locator("[data-figure=ready] a")).to_have_text("1")
    action(card, "pause").click()
    action(page.get_by_role("dialog"), "submit").click()
    expect(card.locator(".badge")).to_have_text("paused")
    action(card, "resume").click()
    expect(card.locator(".badge")).to_have_count(0)


def test_counts_that_are_old_are_shown_with_their_age(
    serve: Any, new_page: Any, queue: Any
) -> None:
    queue.enqueue({})

    def age(route: Route) -> None:
        reply = route.fetch()
        overview = reply.json()
        overview["at"] = str(datetime.fromisoformat(overview["at"]) - timedelta(minutes=5))
        route.fulfill(response=reply, body=json.dumps(overview))

    page = new_page()
    page.goto(serve(queue).url)
    expect(page.locator("[data-figure=ready] a")).to_have_text("1")
    expect(page.locator("main .note")).to_have_count(0)
    page.route("**/api/v1/overview", age)
    page.reload()
    expect(page.locator("main [data-stale-counts] time")).to_contain_text("5 m")
