"""Topics in the browser: see them and their messages, publish, bind and unbind."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from microqueue import Queue, Topic
from tests.acceptance.browser import action, expect_empty

Visit = Callable[..., Page]

NASTY = "<img src=x onerror='window.broken = 1'>"


@pytest.fixture
def queue(microqueue_database: Any) -> Queue[Any]:
    return Queue(microqueue_database)


@pytest.fixture
def topic(queue: Queue[Any]) -> Topic:
    return Topic(queue, "prices")


def test_topics_lead_to_their_messages(visit: Visit, queue: Queue[Any], topic: Topic) -> None:
    topic.bind("mail", "shop.*")
    topic.bind("stock", {"country": "FR"})
    for n in range(3):
        topic.publish({"n": n, "password": "letmein"}, key="shop.eu", headers={"trace": "abc"})
    Topic(queue, "a/b").publish({})
    page = visit(queue, "topics")
    expect(page.locator("[data-row]")).to_have_count(2)
    row = page.locator("[data-row=prices]")
    expect(row.locator("[data-label=Messages]")).to_have_text("3")
    expect(row.locator("[data-binding=mail]")).to_contain_text("shop.*")
    expect(row.locator("[data-binding=stock]")).to_contain_text('{"country":"FR"}')
    row.get_by_role("link", name="prices").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Topic prices")
    rows = page.locator(".messages [data-row]")
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text('{"n": 2, "password": "•••"}')
    rows.first.locator("a").click()
    message = page.locator("[data-part=message]")
    expect(message.locator("pre").first).to_contain_text('"password": "•••"')
    expect(page.locator("[data-part=headers] pre")).to_contain_text('"trace": "abc"')
    expect(page).to_have_url(re.compile("position="))
    page.goto(page.url.split("#")[0] + "#/topics/a%2Fb")
    expect(page.get_by_role("heading", level=1)).to_have_text("Topic a/b")
    expect(page.locator(".messages [data-row]")).to_have_count(1)
    expect_empty(page, "no-bindings")


def test_queue_is_bound_gets_a_message_and_is_unbound(
    visit: Visit, queue: Queue[Any], topic: Topic
) -> None:
    page = visit(queue, "topics", ignoring=("422",))
    expect_empty(page, "no-topics")
    action(page, "bind").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Topic").fill("prices")
    dialog.get_by_label("Queue").fill("default")
    dialog.get_by_label("Key pattern").fill("shop*")
    dialog.get_by_role("button", name="Bind").click()
    expect(dialog.locator("[data-field=filter] .field-note")).to_contain_text("shop*")
    dialog.get_by_label("Key pattern").fill("shop.*")
    dialog.get_by_label("Max attempts").fill("4")
    dialog.get_by_role("button", name="Bind").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator("[data-binding=default]")).to_contain_text("shop.*")
    (binding,) = topic.bindings()
    assert (binding.filter, binding.max_attempts) == ("shop.*", 4)

    page.get_by_role("link", name="prices").click()
    action(page, "publish").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Topic")).to_have_value("prices")
    dialog.get_by_label("Key").fill("shop.eu")
    dialog.get_by_label("Message").fill('{"n": 1}')
    dialog.get_by_role("button", name="Publish").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.locator(".messages [data-row]")).to_contain_text('{"n": 1}')
    (task,) = queue.pop_many(10)
    assert (task.payload, task.max_attempts) == ({"n": 1}, 4)

    action(page, "unbind").click()
    page.get_by_role("dialog").get_by_role("button", name="Unbind").click()
    expect_empty(page, "no-bindings")
    assert topic.bindings() == []


def test_names_keys_and_messages_are_text_never_markup(visit: Visit, queue: Queue[Any]) -> None:
    nasty = Topic(queue, NASTY)
    nasty.bind("mail", {NASTY.replace(".", ""): NASTY})
    nasty.publish({NASTY: NASTY}, key=NASTY, headers={NASTY: NASTY}, message_id=NASTY)
    page = visit(queue, "topics")
    page.locator("[data-row] a").first.click()
    page.locator(".messages [data-row] a").first.click()
    expect(page.locator("[data-part=message] pre").first).to_contain_text(NASTY)
    assert page.evaluate("window.broken") is None
    assert page.locator("main img").count() == 0
