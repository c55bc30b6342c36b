"""The view by name in the browser, and the lists that it leads to."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from microqueue import Queue, QueueSettings
from microqueue.core import core_of
from microqueue.testing import FakeClock
from tests.acceptance.browser import expect_empty

Visit = Callable[..., Page]

NASTY = "<img src=x onerror='window.broken = 1'>"


@pytest.fixture
def queue(microqueue_database: Any, microqueue_clock: FakeClock) -> Queue[Any]:
    settings = QueueSettings(count_limit=100)
    return Queue(microqueue_database, settings=settings, clock=microqueue_clock)


def end(queue: Queue[Any], *, failing: bool) -> None:
    task = queue.pop()
    assert task is not None
    if failing:
        queue.mark_failure(task, f"no {task.name}", code="c")
    else:
        queue.mark_done(task)


def cells(page: Page, name: str) -> list[str]:
    row = page.locator(f'[data-row="{name}"]')
    texts: list[str] = row.locator("td").all_inner_texts()
    return [text.strip() for text in texts]


def test_names_lead_to_their_tasks_and_dead_letters(
    visit: Visit, queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    for name, failing in (("pay", False), ("pay", True), ("ship", False), (None, True)):
        queue.enqueue({"of": name}, name=name, priority=9)
        microqueue_clock.advance(2)
        end(queue, failing=failing)
    queue.enqueue_many([{"of": "pay"}, {"of": "pay"}], name="pay")
    queue.enqueue({}, name=NASTY, delay=60)
    page = visit(queue, "overview")
    page.keyboard.press("g")
    page.keyboard.press("n")
    expect(page.get_by_role("heading", level=1)).to_have_text("Names")
    expect(page.locator("[data-row]")).to_have_count(4)
    wait = r"[12]\.\d s"
    for found, expected in zip(
        cells(page, "pay"),
        ["pay", "2", "0", "1", "1", "50 %", wait, wait, r"\d+ ms", r"\d+ ms"],
        strict=True,
    ):
        assert re.fullmatch(expected, found), found
    assert cells(page, "")[:6] == ["no name", "0", "0", "0", "1", "100 %"]
    expect(page.locator("tbody")).to_contain_text(NASTY)
    assert page.evaluate("window.broken") is None

    pay = page.locator("[data-row=pay]")
    pay.locator("[data-label=Waiting] a").click()
    expect(page).to_have_url(re.compile(r"#/tasks\?name=pay&status=pending"))
    expect(page.locator("[data-row]")).to_have_count(2)
    expect(page.get_by_label("Name")).to_have_value("pay")
    page.get_by_label("Name").fill("ship")
    page.get_by_label("Status").select_option("")
    expect(page.locator("[data-row]")).to_have_count(1)
    expect(page.locator("[data-row] .name")).to_have_text("ship")

    page.goto(page.url.split("#")[0] + "#/names")
    pay.locator("[data-label=Failed] a").click()
    expect(page).to_have_url(re.compile(r"#/dead-letters\?name=pay"))
    expect(page.locator(".rows.dead [data-row]")).to_have_count(1)
    expect(page.locator(".groups li")).to_have_count(1)
    page.locator(".groups li a").click()  # A group keeps the name.
    expect(page).to_have_url(re.compile("name=pay.*group="))
    expect(page.locator(".rows.dead [data-row]")).to_have_count(1)

    page.goto(page.url.split("#")[0] + "#/names")
    page.get_by_role("link", name="no name").click()
    expect(page).to_have_url(re.compile(r"#/tasks\?no_name=1"))
    expect(page.locator("[data-row]")).to_have_count(1)


def test_period_and_queue_are_chosen_and_kept_in_the_address(
    visit: Visit, queue: Queue[Any], microqueue_clock: FakeClock
) -> None:
    page = visit(queue, "names")
    expect_empty(page, "no-names")
    other: Queue[Any] = Queue(core_of(queue).collections.tasks, "other", clock=microqueue_clock)
    other.enqueue({}, name="bill")
    queue.enqueue({}, name="pay")
    end(queue, failing=False)
    microqueue_clock.advance(7200)
    page.keyboard.press("r")
    expect(page.locator("[data-row]")).to_have_count(1)
    page.get_by_label("Period").select_option("Last day")
    expect(page.locator("[data-row]")).to_have_count(2)
    page.get_by_label("Queue").select_option("default")
    expect(page.locator("[data-row]")).to_have_count(1)
    expect(page).to_have_url(re.compile(r"queue=default&period=86400"))
    page.reload()
    expect(page.locator("[data-row=pay] [data-label=Done]")).to_have_text("1")


def test_estimates_are_marked(visit: Visit, queue: Queue[Any]) -> None:
    queue.enqueue_many([{} for _ in range(400)], name="pay")
    page = visit(queue, "names")
    waiting = page.locator("[data-row=pay] [data-label=Waiting] a")
    expect(waiting).to_have_text(re.compile("^~"))
    expect(waiting).to_have_attribute("data-estimated", "true")
    expect(page.locator("[data-row=pay] [data-label=Running] a")).to_have_text("0")
