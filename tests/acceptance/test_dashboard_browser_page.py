"""The page itself: who may see it, on which screens, with which keys, and what it is made of."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from starlette.applications import Starlette
from starlette.routing import Mount

from microqueue import Queue, QueueSettings, Topic
from microqueue.dashboard import dashboard
from tests.acceptance.browser import Served, action, is_live

Visit = Callable[..., Page]

STATIC = Path(dashboard.__code__.co_filename).parent / "static"
VIEWS = (
    "overview",
    "processing",
    "tasks",
    "dead-letters",
    "names",
    "schedules",
    "schedules/mail/a-schedule-with-a-rather-long-name-of-many-words",
    "topics",
    "topics/prices?position=first",
    "events",
    "audit",
)


@pytest.fixture
def queue(microqueue_database: Any) -> Any:
    """A queue in which there is something to see in every view."""
    queue: Any = Queue(microqueue_database, settings=QueueSettings(max_attempts=3))
    queue.enqueue_many([{"n": n, "to": f"ada{n}@example.org"} for n in range(4)])
    for n in range(2):
        queue.mark_failure(queue.pop(), f"order {n} timed out", code="Timeout")
    queue.pop(worker_id="a-worker-with-a-rather-long-name:4711:0123456789abcdef")
    queue.enqueue({"n": "later"}, delay=3600)
    mail: Any = Queue(microqueue_database, "mail")
    mail.schedules.put(
        "a-schedule-with-a-rather-long-name-of-many-words",
        cron="*/15 8-18 1,15 JAN-JUN,SEP-DEC MON-FRI",
        timezone="America/Argentina/ComodRivadavia",
        task="a_function_with_a_rather_long_name",
        payload={"text": "x" * 200},
    )
    mail.schedules.trigger("a-schedule-with-a-rather-long-name-of-many-words")
    mail.enqueue({"to": "grace@example.org"})
    mail.schedules.put("paused", every=60, paused=True)
    topic = Topic(queue, "prices")
    topic.bind("mail", {"order.customer.address.country": "a value that is rather long"})
    topic.bind("a-queue-with-a-rather-long-name-of-one-word", "shop.*")
    topic.publish({"text": "x" * 500}, key="a.rather.long.key.of.many.words", message_id="first")
    topic.publish({"n": 2})
    return queue


def test_estimates_are_marked(visit: Any, microqueue_database: Any) -> None:
    queue: Any = Queue(microqueue_database, settings=QueueSettings(count_limit=10))
    queue.enqueue_many([{}] * 60)
    for task in queue.pop_many(12):
        queue.mark_failure(task, "no")
    queue.pop()
    page = visit(queue, "overview")
    figures = page.locator("[data-queue=default]")
    for name in ("ready", "failed"):
        expect(figures.locator(f"[data-figure={name}] a")).to_have_text(re.compile(r"^~\d+$"))
    expect(figures.locator("[data-figure=processing] a")).to_have_text("1")
    expect(figures.locator(".oldest")).to_contain_text("at least")
    navigation = page.get_by_role("navigation", name="Views")
    expect(navigation.locator(".count.alarming")).to_have_text(re.compile(r"^~\d+$"))
    expect(navigation.locator(".count").first).to_have_text("1")


def test_the_login_form_lets_in_who_knows_the_token(serve: Any, new_page: Any, queue: Any) -> None:
    served = serve(queue, token="open sesame, please")
    page = new_page()
    page.goto(served.url)
    expect(page).to_have_title(re.compile("Log in"))
    page.get_by_label("Token").fill("open barley")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_have_text("Wrong token.")

    page.get_by_label("Token").fill("open sesame, please")
    page.get_by_label("Token").press("Enter")
    is_live(page)
    expect(page.locator("[data-queue=default]")).to_be_visible()
    [cookie] = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert page.evaluate("document.cookie") == ""

    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_title(re.compile("Log in"))
    assert page.context.cookies() == []


def test_the_login_form_says_for_how_long_it_is_closed(
    serve: Any, new_page: Any, queue: Any
) -> None:
    served = serve(queue, token="open sesame, please", login_failures=2, login_period=3000)
    page = new_page(ignoring=("429",))
    page.goto(served.url)
    for guess in ("open barley", "open rye", "open sesame, please"):
        page.get_by_label("Token").fill(guess)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_label("Token")).to_have_value("")
    expect(page.get_by_role("alert")).to_contain_text(re.compile(r"\d{4} s"))


def test_a_page_whose_login_has_ended_asks_again_and_comes_back(
    serve: Any, new_page: Any, queue: Any
) -> None:
    page = new_page(ignoring=("401",))
    page.goto(f"{serve(queue, token='open sesame, please').url}#/tasks?status=failed")
    for _ in range(2):
        expect(page).to_have_title(re.compile("Log in"))
        page.get_by_label("Token").fill("open sesame, please")
        page.get_by_label("Token").press("Enter")
        is_live(page)
        expect(page.locator("[data-row]")).to_have_count(2)
        expect(page.get_by_label("Status")).to_have_value("failed")
        page.context.clear_cookies()
        page.keyboard.press("r")
    expect(page).to_have_title(re.compile("Log in"))  # none closes while it goes elsewhere


def test_a_read_only_page_has_no_button_that_acts(visit: Visit, queue: Any) -> None:
    page = visit(queue, read_only=True)
    expect(page.locator(".chip")).to_have_text("Read-only")
    task = queue.peek(1)[0]
    for view in (*VIEWS, f"tasks/{task.id}"):
        page.goto(page.url.split("#")[0] + f"#/{view}")
        expect(page.locator(".loading")).to_have_count(0)
        names = page.locator("main button").evaluate_all(
            "all => all.map(one => one.dataset.action)"
        )
        assert set(names) <= {"export", "select-all", "clear-selection", "continue-search"}, view


def test_it_works_wherever_it_is_mounted(new_page: Any, queue: Any) -> None:
    def make_app() -> Starlette:
        return Starlette(routes=[Mount("/ops/queue", dashboard(queue))])

    with Served(make_app, path="/ops/queue/") as served:
        page = new_page()
        page.goto(served.url)
        is_live(page)
        expect(page.locator("[data-queue=mail]")).to_be_visible()
        action(page, "sweep").click()
        expect(page.locator(".toast-done")).to_contain_text("Swept: ")
        expect(page.locator("[data-empty=never-swept]")).to_have_count(0)
        page.context.close()


def test_keys_lead_through_the_page(visit: Visit, queue: Any) -> None:
    page = visit(queue)
    press = page.keyboard.press
    press("g")
    press("d")
    expect(page.get_by_role("heading", level=1)).to_have_text("Dead letters in all queues")
    expect(page.locator("[data-row]")).to_have_count(2)
    press("j")
    press("x")
    expect(page.locator(".selected")).to_have_attribute("data-selected", "1")
    press("j")
    press("Shift+X")
    expect(page.locator(".selected")).to_have_attribute("data-selected", "2")
    press("Enter")
    expect(page.locator(".heading .badge")).to_have_text("failed")
    press("g")
    press("t")
    expect(page.get_by_role("heading", level=1)).to_have_text("Tasks")
    press("/")
    page.keyboard.type("gd?")  # Typed, not obeyed.
    expect(page.get_by_label("Text")).to_have_value("gd?")
    expect(page.get_by_role("heading", level=1)).to_have_text("Tasks")
    page.get_by_label("Text").blur()
    press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Dead letters")
    press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_everything_can_be_reached_by_tab(visit: Visit, queue: Any) -> None:
    page = visit(queue, "dead-letters")
    expect(page.locator("[data-row]")).to_have_count(2)
    wanted = page.locator(
        "a:visible, button:visible:enabled, input:visible, select:visible"
    ).count()
    reached = set()
    for _ in range(wanted * 4):  # A field for a time has several stops.
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)")
        )
    assert len(reached - {-1}) >= wanted


SCROLLS_SIDEWAYS = """
    [...document.querySelectorAll(".scrolls")].some((card) => card.scrollWidth > card.clientWidth)
"""


@pytest.mark.parametrize("width", [360, 768])
def test_nothing_sticks_out_of_a_small_screen(
    serve: Any, new_page: Any, queue: Any, width: int
) -> None:
    url = serve(queue).url
    page = new_page(viewport={"width": width, "height": 800})
    for view in (*VIEWS, f"tasks/{queue.dead_letters.list()[0].id}"):
        page.goto(f"{url}#/{view}")
        is_live(page)
        expect(page.locator(".loading")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        assert not page.evaluate(SCROLLS_SIDEWAYS), view


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(
    serve: Any, new_page: Any, queue: Any, scheme: str
) -> None:
    url = serve(queue).url
    page = new_page(color_scheme=scheme)
    for view in (*VIEWS, f"tasks/{queue.dead_letters.list()[0].id}"):
        page.goto(f"{url}#/{view}")
        is_live(page)
        expect(page.locator(".loading")).to_have_count(0)
        assert page.evaluate(POOR_CONTRAST) == [], view
    page.keyboard.press("?")
    assert page.evaluate(POOR_CONTRAST) == []
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == (
        "rgb(246, 246, 244)" if scheme == "light" else "rgb(18, 19, 22)"
    )


# Compares every visible text with what it stands on; disabled buttons are exempt, as in WCAG.
POOR_CONTRAST = """() => {
    const channels = (color) => color.match(/[\\d.]+/g).map(Number);
    const luminance = (rgb) => {
        const [r, g, b] = rgb.map((value) => {
            const share = value / 255;
            return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const groundOf = (element) => {
        for (let node = element; node; node = node.parentElement) {
            const [r, g, b, alpha = 1] = channels(getComputedStyle(node).backgroundColor);
            if (alpha === 1) return [r, g, b];
        }
        return [255, 255, 255];
    };
    const poor = new Set();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
        if (element.closest(":disabled, noscript, option, .skip")) continue;
        const style = getComputedStyle(element);
        const [dark, bright] = [channels(style.color).slice(0, 3), groundOf(element)]
            .map(luminance).sort((one, other) => one - other);
        const ratio = (bright + 0.05) / (dark + 0.05);
        if (ratio < 4.5) poor.add(`${element.textContent}: ${ratio.toFixed(2)}`);
    }
    return [...poor];
}"""


def test_the_page_names_all_of_its_modules_so_that_they_load_at_once() -> None:
    page = (STATIC / "index.html").read_text()
    named = set(re.findall(r'"static/(scripts/[^"]+)"', page)) | {"scripts/login.js"}
    assert named == {str(file.relative_to(STATIC)) for file in STATIC.rglob("*.js")}


def test_the_page_holds_no_inline_script_style_or_foreign_address() -> None:
    for file in STATIC.rglob("*"):
        if file.suffix not in {".html", ".js", ".css", ".svg"}:
            continue
        text = file.read_text()
        foreign = set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
        assert foreign == set(), file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        if file.suffix == ".html":
            assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", text), file


# Functions of the page that decide something, as tables: module, expression, result.
DECISIONS = [
    ("countdown", "m.secondsLeft(10000, 9001)", 1),
    ("countdown", "m.secondsLeft(10000, 9000)", 1),
    ("countdown", "m.secondsLeft(10000, 8999)", 2),
    ("countdown", "m.secondsLeft(10000, 10000)", 0),
    ("countdown", "m.secondsLeft(10000, 99000)", 0),
    ("countdown", "m.countdown({startedAt: NaN, deadline: 5}, 1).text", "—"),
    ("countdown", "m.countdown({startedAt: NaN, deadline: 5}, null).text", "—"),
    ("countdown", "m.countdown({startedAt: 0, deadline: 5000}, null).text", "…"),
    ("countdown", "m.countdown({startedAt: 0, deadline: 5000}, 1).text", "5 s"),
    ("countdown", "m.countdown({startedAt: 0, deadline: 5000}, 4999).text", "1 s"),
    ("countdown", "m.countdown({startedAt: 0, deadline: 5000}, 5000).text", "Overdue"),
    ("countdown", "m.countdown({startedAt: 0, deadline: NaN, timeout: 60}, 1000).text", "59 s"),
    ("countdown", "m.countdown({startedAt: 0, deadline: 10000}, 5000).share", 0.5),
    ("format", "m.duration(0.9)", "0 s"),
    ("format", "m.duration(59.9)", "59 s"),
    ("format", "m.duration(60)", "1 m"),
    ("format", "m.duration(200)", "3 m 20 s"),
    ("format", "m.duration(7500)", "2 h 5 m"),
    ("format", "m.duration(86400 * 3 + 4 * 3600)", "3 d 4 h"),
    ("format", "m.duration(null)", "—"),
    ("format", "m.period(90)", "1 m 30 s"),
    ("format", "m.period(86400 + 3661.5)", "1 d 1 h 1 m 1 s 500 ms"),
    ("format", "m.period(0)", "0 s"),
    ("format", "m.period(null)", "—"),
    ("format", "m.size(999)", "999 B"),
    ("format", "m.size(1234)", "1.2 kB"),
    ("format", "m.size(64e6)", "64.0 MB"),
    ("format", "m.size(5e12)", "5000.0 GB"),
    ("format", "m.size(null)", "—"),
    ("format", "m.took(85.4)", "85 ms"),
    ("format", "m.took(3210)", "3.2 s"),
    ("format", "m.until(10500, 10000)", "in 1 s"),
    ("format", "m.until(10000, 10000)", "now"),
    ("format", "m.ago('1970-01-01T00:00:10Z', 75000)", "1 m 5 s ago"),
    ("format", "m.short(9999)", "9,999"),
    ("format", "m.short(18234)", "18.2K"),
    ("format", "m.short(18234, true)", "~18.2K"),
    ("format", "m.about(1234567)", "~1,230,000"),
    ("format", "m.about(87)", "~87"),
    ("format", "m.count(1234, 'task', 'tasks', true)", "~1,230 tasks"),
    ("format", "m.isEstimate({estimated: ['ready']}, 'ready')", True),
    ("format", "m.isEstimate({}, 'ready')", False),
    ("format", "m.percent(0.004)", "0.4 %"),
    ("format", "m.percent(NaN)", "—"),
    ("format", "m.brief('x'.repeat(500)).length", 160),
    ("routes", "m.parse('').view", "overview"),
    ("routes", "m.parse('#/tasks/a%2Fb?x=1').rest", ["a/b"]),
    ("routes", "m.parse('#/tasks/%E0%A4%A').rest", ["%E0%A4%A"]),
    ("routes", "m.parse('#/tasks?text=a%3Fb%26c&queue=').query", {"text": "a?b&c"}),
    ("routes", "m.href('tasks', {queue: 'a b', code: '', text: null})", "#/tasks?queue=a+b"),
    ("routes", "m.href(['tasks', 'a/b'])", "#/tasks/a%2Fb"),
    ("selection", "(s => (s.toggle(2, {on: true}), s.ids))(new m.Selection())", [2]),
    (
        "selection",
        "(s => (s.toggle(3, {on: true, order: [1,2,3,4]}),"
        " s.toggle(1, {on: true, range: true, order: [1,2,3,4]}), s.ids.sort()))"
        "(new m.Selection())",
        [1, 2, 3],
    ),
    (
        "selection",
        "(s => (s.all('t'), [s.has(7), s.everything, s.size]))(new m.Selection())",
        [True, True, 0],
    ),
    (
        "selection",
        "(s => (s.all('t'), s.toggle(2, {on: false, order: [1,2,3]}), [s.everything, s.ids]))"
        "(new m.Selection())",
        [False, [1, 3]],
    ),
    ("clock", "(c => (c.learn(5000, 0, 10), c.now()))(new m.ServerClock(() => 105))", 5100),
    (
        "clock",  # A slow answer does not spoil what a quick one told.
        "(c => (c.learn(5000, 0, 10), c.learn(9900, 100, 9900), c.now()))"
        "(new m.ServerClock(() => 9900))",
        14895,
    ),
    (
        "clock",  # A server whose clock was set is believed.
        "(c => (c.learn(5000, 0, 10), c.learn(90000, 100, 110), c.now()))"
        "(new m.ServerClock(() => 105))",
        90000,
    ),
]


def test_the_pages_decisions_are_as_tabled(visit: Visit, queue: Any) -> None:
    page = visit(queue)
    for module, expression, expected in DECISIONS:
        result = page.evaluate(
            f"async () => {{ const m = await import('./static/scripts/{module}.js');"
            f" return {expression}; }}"
        )
        assert result == expected, expression
