"""Take the screenshots of the dashboard in docs/: python -m scripts.screenshots."""

from __future__ import annotations

import linecache
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from playwright.sync_api import Browser, Page, expect

from microqueue import BackoffPolicy, Queue, QueueSettings, Sweeper, Tasks, Worker
from microqueue.core import core_of
from microqueue.dashboard import dashboard
from microqueue.embedded import EmbeddedServer
from microqueue.insights import Insights
from microqueue.testing import FakeClock
from tests.acceptance.browser import Served, is_live, open_browser

DOCS = Path(__file__).parent.parent / "docs"
DESKTOP = {"width": 1280, "height": 800}
OUTAGE = range(34, 44)  # In minutes of the hour.
CONCURRENCY = 3
PHONE = {"width": 390, "height": 844}
SHORT = {"width": 1280, "height": 520}
NAMES = {
    "orders": {"charge": 0.5, "ship": 0.3, "send_invoice": 0.2},
    "mail": {"send_email": 0.9, "send_digest": 0.1},
}
"""The names of the tasks of each queue, and their shares."""
ERRORS = [
    ("Timeout", "order {n} timed out after 30 s"),
    ("Timeout", "order {n} timed out after 30 s"),
    ("bad_address", "user{n}@example is not an address"),
    ("SMTPServerDisconnected", "Connection unexpectedly closed"),
]


FAILING = """
from smtplib import SMTPServerDisconnected


def deliver(message):
    raise SMTPServerDisconnected("Connection unexpectedly closed")


def send_email(message):
    if not message:
        return
    try:
        deliver(message)
    except SMTPServerDisconnected as error:
        raise RuntimeError(f"{message['to']} gets no mail") from error
"""
"""A module whose function fails."""


def main() -> None:
    """Create an hour of history, open the dashboard in a browser, and save screenshots."""
    clock = FakeClock(datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=1))
    settings = QueueSettings(
        visibility_timeout=90,
        max_attempts=3,
        backoff=BackoffPolicy(base_sec=40, jitter="none"),
        count_limit=10_000,
    )
    with EmbeddedServer.start() as server:
        orders: Any = Queue.from_uri(server.uri, name="orders", settings=settings, clock=clock)
        mail: Any = Queue(core_of(orders).collections.tasks, "mail", settings=settings, clock=clock)
        create_schedules(orders, mail)
        create_history([(orders, 40), (mail, 12)], clock)
        failing = fail_in_a_handler(mail)
        with (
            busy_queues(orders, mail, clock=clock),
            Served(lambda: dashboard(orders)) as served,
            open_browser() as browser,
        ):
            take(browser, served.url, failing)


def create_schedules(orders: Any, mail: Any) -> None:
    """Put schedules of several kinds: in code, made at run time, paused."""
    code = Tasks(app="mailer")
    code.task("send_digest", schedule="0 7 * * MON-FRI", timezone="Europe/Berlin")(send_digest)
    code.task("poll_bounces", every=300)(poll_bounces)
    Worker(mail, code).run(burst=True)
    orders.schedules.put(
        "nightly-reconciliation",
        cron="30 2 * * *",
        timezone="Europe/Berlin",
        task="reconcile",
        payload={"days": 7, "ledger": "main"},
        catch_up="all",
        overlap="skip",
        jitter=60,
        visibility_timeout=1800,
    )
    orders.schedules.trigger("nightly-reconciliation")
    orders.schedules.put("refresh-rates", every=900, task="refresh_rates", payload={"base": "EUR"})
    orders.schedules.put("close-month", cron="0 0 L * *", task="close_month", paused=True)


def send_digest() -> None:
    """Stand in for a task in code."""


def poll_bounces() -> None:
    """Stand in for a task in code."""


def fail_in_a_handler(queue: Any) -> str:
    """Let a handler fail, and return the id of its task, which then has a traceback."""
    path, app = "/srv/shop/mail.py", ModuleType("shop.mail")
    linecache.cache[path] = (len(FAILING), None, FAILING.splitlines(keepends=True), path)
    exec(compile(FAILING, path, "exec"), app.__dict__)
    task = queue.enqueue(payload(random.Random(1)), name="send_email", max_attempts=1)
    Worker(queue, app.send_email).run(burst=True)
    return str(task.id)


def create_history(queues: list[tuple[Any, int]], clock: FakeClock) -> None:
    """Enqueue and process tasks for an hour of fake time; some fail."""
    chance = random.Random(7)
    for minute in range(60):
        Sweeper(queues[0][0]).run_once()  # It fires the schedules.
        for queue, pace in queues:
            number = max(int(chance.gauss(pace, pace / 4)), 1)
            for name, share in NAMES[queue.name].items():
                some = max(round(number * share), 1)
                queue.enqueue_many([payload(chance) for _ in range(some)], name=name)
            tasks = queue.pop_many(2 * number)
            clock.advance(0.2)
            orders = [task for task in tasks if "order" in task.payload]
            unlucky = [task for task in orders if chance.random() < failure_rate(minute)]
            queue.mark_done_many([task for task in tasks if task not in unlucky])
            for task in unlucky:
                code, message = chance.choice(ERRORS)
                number = task.payload["order"]
                queue.mark_failure(task, message.format(n=number), code=code)
                clock.advance(0.1)
        clock.advance(60 - clock.now().second - clock.now().microsecond / 1e6)
    Sweeper(queues[0][0]).run_once()


def failure_rate(minute: int) -> float:
    """Return the probability of a failure, which is higher during the outage."""
    return 0.06 if minute in OUTAGE else 0.004


def payload(chance: random.Random) -> dict[str, Any]:
    """Return a random order."""
    number = chance.randrange(1000, 9999)
    return {"order": number, "to": f"user{number}@example.org", "password": "hunter2"}


@contextmanager
def busy_queues(*queues: Any, clock: FakeClock) -> Iterator[None]:
    """Create ready, delayed, running, overdue and paused tasks, with two live workers."""
    first, *_ = queues
    for queue in queues:
        name = next(iter(NAMES[queue.name]))
        queue.enqueue_many([payload(random.Random(n)) for n in range(9)], name=name)
    first.mark_retry(first.pop(), "order 4711 timed out after 30 s", code="Timeout")
    first.pop(worker_id="web-3:1290")
    clock.advance(91)
    Sweeper(first).run_once()
    first.pop(worker_id="web-3:1290")
    clock.advance(75)
    ends = threading.Event()
    workers = [
        Worker(
            queue,
            lambda _payload: ends.wait(),
            worker_id=f"web-{place}:4711",
            concurrency=CONCURRENCY,
        )
        for place, queue in enumerate(queues, start=1)
    ]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    while sum(queue.stats().processing for queue in queues) <= CONCURRENCY * len(queues):
        threading.Event().wait(0.05)
    clock.advance(16)  # One lease has expired, the others have not.
    insights = Insights(first)
    while not all(one.alive for one in insights.overview().workers):  # Until the next heartbeats.
        threading.Event().wait(0.05)
    reports: Any = Queue(core_of(first).collections.tasks, "reports", clock=clock)
    reports.enqueue({"month": "May"})
    reports.pause()
    try:
        yield
    finally:
        ends.set()
        for worker, thread in zip(workers, threads, strict=True):
            worker.stop()
            thread.join()


def take(browser: Browser, url: str, failing: str) -> None:
    """Save most views in light, dead letters in dark, running tasks on a phone."""
    with open_page(browser, f"{url}#/overview", viewport=DESKTOP) as page:
        page.screenshot(path=DOCS / "dashboard-light.png")
    with open_page(browser, f"{url}#/names", viewport=SHORT) as page:
        page.screenshot(path=DOCS / "dashboard-names.png")
    with open_page(browser, f"{url}#/schedules", viewport=SHORT) as page:
        page.screenshot(path=DOCS / "dashboard-schedules.png")
    schedule = f"{url}#/schedules/orders/nightly-reconciliation"
    with open_page(browser, schedule, viewport=DESKTOP) as page:
        page.screenshot(path=DOCS / "dashboard-schedule.png")
    with open_page(browser, f"{url}#/tasks/{failing}", viewport=DESKTOP) as page:
        page.get_by_text("Traceback", exact=True).click()
        page.mouse.move(0, 0)
        page.screenshot(path=DOCS / "dashboard-traceback.png")
    with open_page(browser, f"{url}#/dead-letters", viewport=DESKTOP, color_scheme="dark") as page:
        page.get_by_label("Groups").locator("a").first.click()
        expect(page.locator(".groups [aria-current]")).to_be_visible()
        boxes = page.locator("[data-row] input")
        boxes.nth(1).click()
        boxes.nth(4).click(modifiers=["Shift"])
        page.mouse.move(0, 0)
        page.screenshot(path=DOCS / "dashboard-dark.png")
    phone: dict[str, Any] = {"viewport": PHONE, "device_scale_factor": 2, "has_touch": True}
    with open_page(browser, f"{url}#/processing", **phone) as page:
        page.screenshot(path=DOCS / "dashboard-phone.png")


@contextmanager
def open_page(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """Open a page in its own browser context, and wait until it has loaded."""
    context = browser.new_context(timezone_id="UTC", **options)
    page = context.new_page()
    page.goto(url)
    is_live(page)
    expect(page.locator(".loading")).to_have_count(0)
    page.evaluate("document.fonts.ready")
    yield page
    context.close()


if __name__ == "__main__":
    main()
