"""Many tabs of one browser: a hidden one holds no connection, and catches up when it is shown."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from microqueue import Queue
from tests.acceptance.browser import HeldBack, expect_connection, is_live
from tests.waiting import wait_for

# A headless browser takes every tab for visible.
SHOW = """(visible) => {
    Object.defineProperty(document, "hidden", { value: !visible, configurable: true });
    const value = visible ? "visible" : "hidden";
    Object.defineProperty(document, "visibilityState", { value, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""
BEGIN_HIDDEN = """
    Object.defineProperty(document, "hidden", { value: true, configurable: true });
    Object.defineProperty(document, "visibilityState", { value: "hidden", configurable: true });
"""
NOTE_STATES = """() => {
    const top = document.getElementById("top");
    window.states = new Set();
    const state = () => top.querySelector("[data-connection]")?.dataset.connection;
    new MutationObserver(() => window.states.add(state()))
        .observe(top, { subtree: true, childList: true, characterData: true, attributes: true });
}"""


@pytest.fixture
def queue(microqueue_database: Any) -> Any:
    return Queue(microqueue_database)


def show(page: Page, *, visible: bool) -> None:
    page.evaluate(SHOW, visible)


def ready(page: Page) -> Any:
    return page.locator("[data-figure=ready] a")


def test_a_tab_works_however_many_others_are_open_behind_it(
    serve: Any, new_page: Any, queue: Any
) -> None:
    """A browser has six connections to a server, and each visible page holds one."""
    served = serve(queue)
    first = new_page()
    tabs = [first]
    for _ in range(7):
        tabs[-1].goto(served.url)
        is_live(tabs[-1])
        show(tabs[-1], visible=False)
        tabs.append(first.context.new_page())
    last = tabs[-1]
    last.goto(served.url)
    is_live(last)
    queue.enqueue({"n": 1})
    expect(ready(last)).to_have_text("1")
    context = served.app.state.context
    wait_for(lambda: context.events.subscribers == 1, what="that hidden tabs let go")

    show(last, visible=False)
    show(first, visible=True)
    expect(ready(first)).to_have_text("1")
    queue.enqueue({"n": 2})
    expect(ready(first)).to_have_text("2")


def test_a_tab_that_was_hidden_hears_what_it_missed_and_never_says_disconnected(
    serve: Any, new_page: Any, queue: Any
) -> None:
    served = serve(queue)
    page = new_page()
    page.goto(f"{served.url}#/events")
    is_live(page)
    page.evaluate(NOTE_STATES)
    for n in range(5):
        show(page, visible=False)
        task = queue.enqueue({"n": n})
        show(page, visible=True)
        expect(page.locator(".feed")).to_contain_text(str(task.id))
        is_live(page)
    assert page.evaluate("[...window.states]") in ([], ["live"])


def test_a_tab_that_is_opened_behind_another_listens_when_it_is_shown(
    serve: Any, new_page: Any, queue: Any
) -> None:
    served = serve(queue)
    page = new_page()
    page.add_init_script(BEGIN_HIDDEN)
    page.goto(served.url)
    expect(page.locator("[data-figure=ready]")).to_be_visible()
    assert served.app.state.context.events.subscribers == 0
    show(page, visible=True)
    is_live(page)
    queue.enqueue({})
    expect(ready(page)).to_have_text("1")


def test_a_request_without_an_answer_shows_the_page_as_disconnected_until_one_comes(
    serve: Any, new_page: Any, queue: Any
) -> None:
    page = new_page()
    page.clock.install()
    page.goto(f"{serve(queue).url}#/tasks")
    is_live(page)
    answers = HeldBack(page, "**/api/v1/tasks?*")
    page.keyboard.press("r")
    answers.wait()
    page.clock.run_for(25_000)
    expect_connection(page, "lost")
    page.unroute("**/api/v1/tasks?*")
    page.keyboard.press("r")
    is_live(page)


LISTEN_IN_VAIN = """async () => {
    const { Events } = await import("./static/scripts/events.js");
    class Source extends EventTarget { close() {} }
    window.opened = [];
    window.EventSource = class extends Source {
        constructor(address) {
            super();
            if (address.hash === "#listened") window.opened.push(this);
        }
    };
    window.states = [];
    new Events({ address: "events#listened", onBurst() {}, onGap() {},
                 onState: (state) => window.states.push(state) }).open();
}"""


def test_a_connection_that_never_begins_is_told_and_tried_again(
    serve: Any, new_page: Any, queue: Any
) -> None:
    page = new_page()
    page.clock.install()
    page.goto(serve(queue).url)
    is_live(page)
    page.clock.pause_at("2090-01-01")
    page.evaluate(LISTEN_IN_VAIN)
    page.clock.run_for(9_000)
    assert page.evaluate("[window.opened.length, window.states]") == [1, []]
    page.clock.run_for(2_000)
    assert page.evaluate("[window.opened.length, window.states]") == [2, ["lost"]]
