"""The page keeps up with the queue by itself, and tells the time by the server's clock."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from microqueue import Queue, QueueSettings, Sweeper
from microqueue.testing import FakeClock
from microqueue.worker import Context, Worker
from tests.acceptance.browser import (
    DEADLINE_SEC,
    HeldBack,
    Served,
    action,
    expect_connection,
    expect_empty,
    is_live,
)
from tests.ports import free_port

Visit = Callable[..., Page]

COUNT_INTERVALS = """
    window.intervals = new Set();
    const { setInterval: start, clearInterval: stop } = window;
    window.setInterval = (run, period) => {
        const id = start(run, period);
        if (period < 1000) window.intervals.add(id);
        return id;
    };
    window.clearInterval = (id) => { window.intervals.delete(id); stop(id); };
"""


@pytest.fixture
def queue(microqueue_database: Any, microqueue_clock: FakeClock) -> Any:
    """Leases of eight seconds, by a clock that the test moves."""
    settings = QueueSettings(visibility_timeout=8, max_attempts=3)
    return Queue(microqueue_database, settings=settings, clock=microqueue_clock)


def countdown_of(page: Page, task: Any) -> Any:
    return page.locator(f"[data-row='{task.id}'] .countdown")


def tell_the_time_once(page: Page) -> None:
    """Let the page learn the server's time from one answer: the two clocks move apart here."""
    told: list[str] = []

    def answer(route: Route) -> None:
        response = route.fetch()
        headers = dict(response.headers)
        instant = headers.pop("x-server-time")
        if not told:
            headers["x-server-time"] = instant
        told.append(instant)
        route.fulfill(response=response, headers=headers)

    page.route("**/api/v1/**", answer)


def test_countdown_ticks_by_the_servers_clock_and_turns_overdue(
    serve: Any, new_page: Any, queue: Any
) -> None:
    queue.enqueue({"n": 1})
    task = queue.pop(worker_id="worker-1")
    page = new_page()
    # The viewer's clock is wrong by decades, and moves only when the test moves it.
    page.clock.install(time="2001-01-01T00:00:00Z")
    page.clock.pause_at("2001-01-01T00:00:10Z")
    tell_the_time_once(page)
    page.goto(f"{serve(queue).url}#/processing")
    countdown = countdown_of(page, task)
    for left in range(8, 0, -1):
        expect(countdown).to_have_text(f"{left} s")
        page.clock.run_for(1000)
    expect(countdown).to_have_text("Overdue")
    badge = countdown.locator(".countdown-text")
    red, green, blue = map(int, re.findall(r"\d+", badge.evaluate(BACKGROUND))[:3])
    assert red > 2 * green
    assert red > 2 * blue
    assert queue.get(task.id).status == "processing"  # It only displays.


BACKGROUND = "element => getComputedStyle(element).backgroundColor"


def stop_the_time(page: Page) -> None:
    """Let no time pass for the page: a countdown stays as it is however slow the machine is."""
    page.clock.set_fixed_time("2001-01-01T00:00:00Z")


def test_countdown_shows_dots_until_the_configuration_is_loaded(
    serve: Any, new_page: Any, queue: Any
) -> None:
    queue.enqueue({"n": 1})
    task = queue.pop()
    page = new_page()
    stop_the_time(page)
    configuration = HeldBack(page, "**/api/v1/config")
    page.goto(f"{serve(queue).url}#/processing")
    expect(countdown_of(page, task)).to_have_text("…")
    configuration.release()
    expect(countdown_of(page, task)).to_have_text("8 s")


def test_a_task_without_start_time_has_no_countdown(
    visit: Visit, queue: Any, microqueue_database: Any
) -> None:
    queue.enqueue({"n": 1})
    task = queue.pop()
    microqueue_database.tasks.update_one({"_id": task.id}, {"$set": {"started_at": None}})
    expect(countdown_of(visit(queue, "processing"), task)).to_have_text("—")


def test_a_touch_moves_the_countdown(serve: Any, new_page: Any, queue: Any) -> None:
    queue.enqueue({"n": 1})
    task = queue.pop()
    page = new_page()
    stop_the_time(page)
    page.goto(f"{serve(queue).url}#/processing")
    is_live(page)
    expect(countdown_of(page, task)).to_have_text("8 s")
    queue.touch(task, extend=120)
    expect(countdown_of(page, task)).to_have_text("120 s")


def test_the_timer_runs_only_while_there_are_rows(serve: Any, new_page: Any, queue: Any) -> None:
    page = new_page()
    stop_the_time(page)
    page.add_init_script(COUNT_INTERVALS)
    page.goto(f"{serve(queue).url}#/processing")
    is_live(page)
    expect_empty(page, "nothing-running")
    assert page.evaluate("window.intervals.size") == 0

    queue.enqueue({"n": 1})
    task = queue.pop()
    expect(countdown_of(page, task)).to_have_text("8 s")
    assert page.evaluate("window.intervals.size") == 1

    queue.mark_done(task)
    expect(countdown_of(page, task)).to_have_count(0)
    page.wait_for_function("window.intervals.size === 0")


def test_a_reclaim_by_the_sweeper_appears_without_reload(
    visit: Visit, queue: Any, microqueue_clock: FakeClock
) -> None:
    queue.enqueue({"n": 1})
    task = queue.pop(worker_id="worker-1")
    page = visit(queue, "processing")
    row = page.locator(f"[data-row='{task.id}']")
    expect(row).to_contain_text("worker-1")
    page.evaluate("window.isTheSamePage = true")

    microqueue_clock.advance(8)
    assert Sweeper(queue).run_once().reclaimed == 1

    expect(row).to_have_count(0)
    expect_empty(page, "nothing-running")
    page.get_by_role("link", name="Events").click()
    expect(page.locator(".feed")).to_contain_text("task.reclaimed")
    expect(page.locator(".feed")).to_contain_text(str(task.id))
    assert page.evaluate("window.isTheSamePage")


def test_the_page_says_that_it_is_disconnected_and_catches_up(
    serve: Any, new_page: Any, queue: Any
) -> None:
    # A port that no one else gets while nobody listens.
    served: Served = serve(queue, port=free_port())
    refused = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET")
    page = new_page(ignoring=(*refused, "ERR_INCOMPLETE_CHUNKED", "ERR_EMPTY"))
    page.goto(f"{served.url}#/tasks")
    is_live(page)
    expect_empty(page, "no-tasks")

    served.stop()
    expect_connection(page, "lost")
    missed = queue.enqueue({"n": 1})
    expect(page.locator("[data-row]")).to_have_count(0)

    served.start()
    is_live(page)
    expect(page.locator(f"[data-row='{missed.id}']")).to_be_visible()


def test_the_page_is_connected_again_when_a_request_that_failed_works(
    serve: Any, new_page: Any, queue: Any
) -> None:
    """The stream of events was there all the time, and has nothing to tell."""
    page = new_page(ignoring=("ERR_FAILED",))
    page.goto(f"{serve(queue).url}#/tasks")
    is_live(page)
    page.route("**/api/v1/tasks?*", lambda route: route.abort())
    page.keyboard.press("r")
    expect_connection(page, "lost")
    page.unroute("**/api/v1/tasks?*")
    page.keyboard.press("r")
    is_live(page)


def test_an_answer_that_fails_is_told_and_forgotten_when_it_works_again(
    serve: Any, new_page: Any, queue: Any
) -> None:
    page = new_page(ignoring=("503",))
    problem = {"title": "Service Unavailable", "status": 503, "detail": "MongoDB is away"}
    page.goto(f"{serve(queue).url}#/tasks")
    is_live(page)
    page.route("**/api/v1/tasks?*", lambda route: route.fulfill(status=503, json=problem))
    page.keyboard.press("r")
    expect(page.get_by_role("alert")).to_contain_text("MongoDB is away")
    page.unroute("**/api/v1/tasks?*")
    page.keyboard.press("r")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_an_update_keeps_scroll_focus_and_what_is_being_typed(visit: Visit, queue: Any) -> None:
    tasks = queue.enqueue_many([{"n": n} for n in range(60)]).tasks
    page = visit(queue, "tasks")
    oldest_shown = page.locator("[data-row]").nth(45)
    oldest_shown.locator("a").first.focus()
    focused = page.evaluate("document.activeElement.textContent")
    page.evaluate("window.scrollTo(0, 700)")
    page.locator("[name=code]").evaluate("input => input.value = 'half ty'")
    before = page.evaluate("scrollY")
    assert before > 0

    queue.mark_done(queue.pop())
    newest = queue.enqueue({"n": "new"})

    expect(page.locator(f"[data-row='{newest.id}']")).to_be_attached()
    assert page.evaluate("document.activeElement.textContent") == focused
    assert len(tasks) == 60
    # The browser itself may follow what the reader sees by the height of the row above it.
    assert abs(page.evaluate("scrollY") - before) <= 60


LISTEN = """async () => {
    const { Events } = await import("./static/scripts/events.js");
    class Source extends EventTarget { close() {} }
    window.opened = 0;
    window.EventSource = class extends Source {
        constructor(address) {
            super();
            if (address.hash !== "#listened") return; // The page's own.
            window.source = this;
            window.opened += 1;
        }
    };
    window.told = [];
    window.states = [];
    window.say = (type, data, lastEventId) =>
        window.source.dispatchEvent(
            new MessageEvent(type, { data: JSON.stringify(data), lastEventId }));
    new Events({ address: "events#listened", onBurst: (events) => window.told.push(events.length),
                 onState: (state) => window.states.push(state), onGap() {} }).open();
    window.say("hello", { heartbeat_sec: 10 });
}"""
SEND = """() => {
    for (const type of ["task.done", "task.failed", "refresh"]) window.say(type, {}, "1");
}"""


def test_a_burst_of_events_is_told_every_300_ms_and_whole(
    serve: Any, new_page: Any, queue: Any
) -> None:
    page = new_page()
    page.clock.install()
    page.goto(serve(queue).url)
    is_live(page)
    page.clock.pause_at(time.time() + 3600)
    page.evaluate(LISTEN)
    for _ in range(40):
        page.evaluate(SEND)
        page.clock.run_for(50)
    page.clock.run_for(300)
    told = page.evaluate("window.told")
    assert sum(told) == 80
    assert 6 <= len(told) <= 9, told  # Two seconds, and the end.


def test_a_silent_connection_is_reopened(serve: Any, new_page: Any, queue: Any) -> None:
    page = new_page()
    page.clock.install()
    page.goto(serve(queue).url)
    is_live(page)
    page.clock.pause_at(time.time() + 3600)
    page.evaluate(LISTEN)
    for _ in range(5):
        page.clock.run_for(29_000)
        page.evaluate("window.say('heartbeat', {})")
    assert page.evaluate("[window.opened, window.states]") == [1, ["live"]]
    page.clock.run_for(30_000)  # Three heartbeats are missed.
    assert page.evaluate("[window.opened, window.states]") == [2, ["live", "lost"]]


def test_a_storm_of_tasks_is_shown_to_the_last(visit: Visit, queue: Any) -> None:
    page = visit(queue, "overview")
    for start in range(0, 400, 4):
        queue.enqueue_many([{"n": start + n} for n in range(4)])
    expect(page.locator("[data-figure=ready] a")).to_have_text("400")


def test_a_paused_queue_is_shown_and_resumed_by_a_button(visit: Visit, queue: Any) -> None:
    queue.enqueue({"n": 1})
    page = visit(queue)
    card = page.locator("[data-queue=default]")
    action(card, "pause").click()
    action(page.get_by_role("dialog"), "submit").click()
    expect(card.locator(".badge")).to_have_text("paused")
    assert queue.paused()
    queue.resume()  # By somebody else.
    expect(card.locator(".badge")).to_have_count(0)
    queue.pause()
    expect(card.locator(".badge")).to_have_text("paused")
    action(card, "resume").click()
    expect(card.locator(".badge")).to_have_count(0)
    assert queue.paused() is None


def test_workers_and_what_they_hold_are_shown(visit: Visit, queue: Any) -> None:
    page = visit(queue, "overview")
    workers = page.locator(".workers")
    expect_empty(page, "no-workers")
    begun, may_end = threading.Event(), threading.Event()

    def handle(_payload: Any, context: Context) -> None:
        context.progress(0.4, "four of ten")
        begun.set()
        may_end.wait(5 * DEADLINE_SEC)

    worker = Worker(queue, handle, worker_id="worker-1")
    running = threading.Thread(target=worker.run)
    running.start()
    try:
        task = queue.enqueue({"n": 1})
        assert begun.wait(DEADLINE_SEC)
        expect(workers).to_contain_text("1 alive")
        expect(workers).to_contain_text("worker-1")
        expect(workers.locator(".running-tasks")).to_contain_text(str(task.id))
        page.get_by_role("link", name="Processing").click()
        expect(page.locator(f"[data-row='{task.id}']")).to_contain_text("40 % · four of ten")
        page.get_by_role("link", name="Overview").click()
    finally:
        may_end.set()
        worker.stop()
        running.join(DEADLINE_SEC)
    expect_empty(page, "no-workers")
