"""Tasks in the browser: find one, view it, and act on it."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from microqueue import BackoffPolicy, Queue, QueueSettings
from microqueue.core import core_of
from microqueue.operations.workers import beat
from microqueue.reports import WorkerInfo
from microqueue.testing import FakeClock
from microqueue.worker import Tasks
from tests.acceptance.browser import action, expect_empty

Visit = Callable[..., Page]

NASTY = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"


@pytest.fixture
def queue(microqueue_database: Any, microqueue_clock: FakeClock) -> Any:
    settings = QueueSettings(max_attempts=2, backoff=BackoffPolicy(base_sec=90, jitter="none"))
    return Queue(microqueue_database, settings=settings, clock=microqueue_clock)


def test_payloads_errors_and_names_are_text_never_markup(visit: Visit, queue: Any) -> None:
    nasty = Queue(core_of(queue).collections.tasks.database, "<b>bold</b>", clock=queue.clock)
    nasty.enqueue({NASTY: NASTY}, headers={"x": NASTY}, dedupe_key=NASTY)
    task: Any = nasty.pop(worker_id=NASTY)
    nasty.mark_failure(task, NASTY, code=NASTY)
    page = visit(queue, "tasks")
    expect(page.locator("[data-row]")).to_contain_text(NASTY)
    page.locator("[data-row] a").first.click()
    expect(page.locator("[data-part=payload] pre")).to_contain_text(NASTY)
    expect(page.locator(".timeline")).to_contain_text(NASTY)
    for view in ("dead-letters?queue=%3Cb%3Ebold%3C%2Fb%3E", "overview", "events"):
        page.goto(page.url.split("#")[0] + f"#/{view}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.locator(".loading")).to_have_count(0)
    assert page.evaluate("window.broken") is None
    assert page.locator("main b, main img, main script").count() == 0


def test_the_address_holds_the_filter_so_that_a_view_can_be_shared(
    visit: Visit, queue: Any, new_page: Any
) -> None:
    ada = queue.enqueue({"to": "ada@example.org"})
    queue.enqueue({"to": "grace@example.org"})
    queue.enqueue({"to": "ada@example.org"}, delay=60)
    page = visit(queue, "tasks", ignoring=("404",))
    expect(page.locator("[data-row]")).to_have_count(3)
    page.get_by_label("Status").select_option("ready")
    expect(page.locator("[data-row]")).to_have_count(2)
    page.get_by_label("Text").fill("ada@")
    expect(page.locator("[data-row]")).to_have_count(1)
    expect(page).to_have_url(re.compile("status=ready.*text=ada"))

    colleague = new_page()
    colleague.goto(page.url)
    expect(colleague.locator("[data-row]")).to_have_count(1)
    expect(colleague.locator(f"[data-row='{ada.id}']")).to_be_visible()
    expect(colleague.get_by_label("Text")).to_have_value("ada@")
    expect(colleague.get_by_label("Status")).to_have_value("ready")

    page.get_by_role("link", name="Clear").click()
    expect(page.locator("[data-row]")).to_have_count(3)
    page.get_by_label("Id").fill(str(ada.id))
    expect(page.locator("[data-row]")).to_have_count(1)
    page.get_by_label("Id").fill("nonsense")
    expect_empty(page, "no-match")


def test_times_of_the_filter_are_the_viewers_and_the_address_is_in_utc(
    serve: Any, new_page: Any, queue: Any
) -> None:
    queue.enqueue({"n": 1})
    page = new_page(timezone_id="Asia/Tokyo")
    page.goto(f"{serve(queue).url}#/tasks")
    expect(page.locator("[data-row]")).to_have_count(1)
    page.get_by_label("From").fill("2031-02-03T09:00:00")
    expect_empty(page, "no-match")
    assert "since=2031-02-03T00%3A00%3A00.000Z" in page.url
    expect(page.get_by_label("From")).to_have_value("2031-02-03T09:00")


def test_tasks_are_paged_newest_first(visit: Visit, queue: Any) -> None:
    tasks = queue.enqueue_many([{"n": n} for n in range(120)]).tasks
    page = visit(queue, "tasks")
    seen: list[str] = []
    for size in (50, 50, 20):
        expect(page.locator("[data-row]")).to_have_count(size)
        expect(page.locator(f"[data-row='{tasks[119 - len(seen)].id}']")).to_be_visible()
        seen += page.locator("[data-row]").evaluate_all("all => all.map(row => row.dataset.row)")
        if len(seen) < 120:
            page.get_by_role("link", name="Older").click()
    assert seen == [str(task.id) for task in tasks][::-1]


def test_a_tasks_page_shows_its_attempts_and_when_it_is_retried(
    visit: Visit, queue: Any, microqueue_clock: FakeClock
) -> None:
    queue.enqueue({"order": {"id": 17}}, headers={"trace": "abc"})
    task = queue.pop(worker_id="worker-1")
    microqueue_clock.advance(2)
    queue.mark_retry(task, "the printer is on fire", code="fire")
    page = visit(queue, f"tasks/{task.id}")
    expect(page.locator("[data-part=payload] pre")).to_have_text(
        '{\n  "order": {\n    "id": 17\n  }\n}'
    )
    expect(page.locator("[data-part=headers]")).to_contain_text('"trace": "abc"')
    attempt = page.locator(".timeline li")
    expect(attempt).to_have_class("is-retried")
    for text in ("Attempt 1", "failed, retried", "2.0 s", "worker-1", "fire", "on fire"):
        expect(attempt).to_contain_text(text)
    expect(page.locator(".facts")).to_contain_text("in 1 m 30 s")

    action(page, "retry").click()
    expect(page.locator(".heading .badge")).to_have_text("ready")
    queue.mark_done(queue.pop(), result={"pages": 12})
    expect(page.locator(".heading .badge")).to_have_text("done")
    expect(page.locator("[data-part=result]")).to_contain_text('"pages": 12')
    expect(page.locator(".heading .actions button")).to_have_count(0)


def test_a_traceback_is_opened_and_copied_and_the_type_is_shown_once(
    visit: Visit, queue: Any
) -> None:
    queue.enqueue({})
    task = queue.pop()
    try:
        raise ValueError(f"boom {NASTY}, password=sesame")
    except ValueError as exc:
        queue.mark_retry(task, exc, delay=60)
    page = visit(queue, f"tasks/{task.id}")
    expect(page.locator(".notice .error-text")).to_have_text(
        f"ValueError boom {NASTY}, password=•••"
    )
    expect(page.locator(".timeline .error-text")).to_contain_text("ValueError boom")
    shown = page.locator(".traceback pre")
    expect(shown).to_be_hidden()
    page.locator(".traceback summary").click()
    expect(shown).to_be_visible()
    expect(shown).to_contain_text("Traceback (most recent call last):")
    expect(shown).to_contain_text(f"ValueError: boom {NASTY}, password=•••")
    assert "mono" in shown.evaluate("one => getComputedStyle(one).fontFamily").lower()
    whole = shown.inner_text()

    queue.touch(queue.enqueue({}) and queue.pop())  # An event: the page is drawn again.
    expect(shown).to_be_visible()
    page.evaluate("() => void (navigator.clipboard.writeText = async (t) => { copied = t; })")
    action(page, "copy").click()
    expect(page.locator(".toast")).to_be_visible()
    assert page.evaluate("copied") == whole
    page.evaluate("() => void (navigator.clipboard.writeText = () => Promise.reject())")
    action(page, "copy").click()
    page.wait_for_function("text => getSelection().toString() === text", arg=whole)

    queue.mark_failure(queue.enqueue({}, priority=9) and queue.pop(), "no exception", code="c")
    other = queue.dead_letters.list()[0]
    page.goto(page.url.split("#")[0] + f"#/tasks/{other.id}")
    expect(page.locator(".notice .error-text")).to_have_text("c no exception")
    expect(page.locator(".traceback")).to_have_count(0)


def test_a_task_that_does_not_exist_is_said_so(serve: Any, new_page: Any, queue: Any) -> None:
    page = new_page(ignoring=("404",))
    page.goto(f"{serve(queue).url}#/tasks/nonsense%2F1")
    expect_empty(page, "no-such-task")


def mark(page: Page, name: str) -> None:
    """Press the button of a manual action, and confirm it."""
    action(page, name).click()
    action(page.get_by_role("dialog"), "submit").click()
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_next_task_that_is_marked_as_failed_twice_is_a_dead_letter(
    visit: Visit, queue: Any, microqueue_clock: FakeClock
) -> None:
    task = queue.enqueue({"n": 1})
    page = visit(queue, "tasks?queue=default", manual_actions=True)
    row = page.locator(f"[data-row='{task.id}']")
    mark(page, "fail-next")
    expect(row.locator(".badge")).to_have_text("delayed")
    expect(row).to_contain_text("1 of 2")

    microqueue_clock.advance(90)
    mark(page, "fail-next")
    expect(row.locator(".badge")).to_have_text("failed")
    expect(row).to_contain_text("2 of 2")

    page.get_by_role("link", name="Dead letters").click()
    expect(page.locator(f"[data-row='{task.id}']")).to_be_visible()
    assert [letter.id for letter in queue.dead_letters.list()] == [task.id]


def test_chosen_task_is_marked_as_done(visit: Visit, queue: Any) -> None:
    first, second = queue.enqueue({"n": 1}), queue.enqueue({"n": 2})
    page = visit(queue, f"tasks/{second.id}", manual_actions=True)
    mark(page, "succeed")
    expect(page.locator(".heading .badge")).to_have_text("done")
    assert queue.get(first.id).status == "pending"


def test_marking_asks_first_and_says_what_happens_to_which_queue(visit: Visit, queue: Any) -> None:
    task = queue.enqueue({"n": 1})
    page = visit(queue, manual_actions=True)
    for name in ("succeed-next", "fail-next"):
        action(page, name).click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_role("heading")).to_contain_text("default")
        expect(dialog.locator("p").first).to_contain_text("No worker runs it")
        action(dialog, "dismiss").click()
        expect(dialog).to_have_count(0)
    assert queue.get(task.id).attempts == 0


def test_nobody_can_mark_a_task_unless_it_is_allowed(visit: Visit, queue: Any) -> None:
    task = queue.enqueue({"n": 1})
    page = visit(queue)
    for view, button in (
        ("overview", "Pause"), ("tasks?queue=default", "Enqueue…"), (f"tasks/{task.id}", "Cancel…"),
    ):  # fmt: skip
        page.evaluate("view => { location.hash = `#/${view}`; }", view)
        expect(page.get_by_role("button", name=button)).to_be_visible()
        for name in ("succeed", "fail", "succeed-next", "fail-next"):
            expect(action(page, name)).to_have_count(0)
        expect(page.get_by_role("button", name="Mark")).to_have_count(0)


def test_nothing_to_mark_is_said_so(serve: Any, new_page: Any, queue: Any) -> None:
    page = new_page(ignoring=("409",))
    page.goto(f"{serve(queue, manual_actions=True).url}#/tasks?queue=default")
    action(page, "succeed-next").click()
    dialog = page.get_by_role("dialog")
    action(dialog, "submit").click()
    expect(dialog.get_by_role("alert")).to_contain_text("default")


def register(queue: Any, *names: str) -> None:
    """Register a worker that serves tasks of these names."""
    now = queue.now()
    info = WorkerInfo(
        id="w", collection="tasks", host="h", pid=1, queues=[queue.name], concurrency=1, running=0,
        handled=0, started_at=now, heartbeat_at=now, heartbeat_sec=3600, tasks=names,
    )  # fmt: skip
    core_of(queue).run(beat(info))


def test_a_task_is_enqueued_by_its_name_with_headers(visit: Visit, queue: Any) -> None:
    register(queue, "resize", "send_email")
    page = visit(queue, "tasks")
    page.get_by_role("button", name="Enqueue…").click()
    dialog = page.get_by_role("dialog")
    suggested = dialog.locator("#task-names option")
    expect(suggested).to_have_count(2)
    names = suggested.evaluate_all("all => all.map((one) => one.value)")
    assert names == ["resize", "send_email"]
    dialog.locator("[name=name]").fill("send_email")
    dialog.locator("[name=payload]").fill('{"to": "ada"}')
    dialog.locator("[name=headers]").fill('{"trace": "t1"}')
    dialog.get_by_role("button", name="Enqueue").click()
    expect(dialog).to_have_count(0)
    [task] = queue.peek(10)
    assert (task.name, task.payload) == ("send_email", {"to": "ada"})
    assert task.headers == {"trace": "t1"}


def test_a_name_that_no_worker_registered_is_asked_about(visit: Visit, queue: Any) -> None:
    register(queue, "send_email")
    page = visit(queue, "tasks")
    page.get_by_role("button", name="Enqueue…").click()
    dialog = page.get_by_role("dialog")
    note = dialog.locator("[data-field=name] .field-note")
    dialog.get_by_role("button", name="Enqueue").click()
    expect(note).to_contain_text("named tasks")
    dialog.locator("[name=name]").fill("send_mail")
    expect(note).to_be_hidden()
    dialog.get_by_role("button", name="Enqueue", exact=True).click()
    expect(note).to_contain_text("send_mail")
    assert queue.peek(10) == []
    dialog.get_by_role("button", name="Enqueue anyway").click()
    expect(dialog).to_have_count(0)
    assert [task.name for task in queue.peek(10)] == ["send_mail"]


def test_what_is_wrong_is_said_at_its_field_before_it_is_stored(
    serve: Any, new_page: Any, queue: Any
) -> None:
    tasks = Tasks()

    @tasks.task()
    def send_email(to: str, *, copies: int = 1) -> None:
        """Send nothing."""

    page = new_page(ignoring=("422",))
    page.goto(f"{serve(queue, tasks=tasks).url}#/tasks")
    page.get_by_role("button", name="Enqueue…").click()
    dialog = page.get_by_role("dialog")
    notes = {name: dialog.locator(f"[data-field={name}] .field-note") for name in
             ("payload", "headers", "queue")}  # fmt: skip
    boxes = {name: dialog.locator(f"[name={name}]") for name in ("payload", "headers", "name")}
    boxes["payload"].fill('{"to": ')
    boxes["headers"].fill("[]")
    expect(notes["payload"]).to_contain_text("Not valid JSON: ")  # As soon as the field is left.
    dialog.get_by_role("button", name="Enqueue").click()
    expect(notes["payload"]).to_be_visible()
    expect(notes["headers"]).to_contain_text("object")
    expect(boxes["payload"]).to_have_attribute("aria-invalid", "true")
    expect(dialog.locator("> form > .problem")).to_be_hidden()

    boxes["headers"].fill("{}")
    boxes["name"].fill("send_email")
    boxes["payload"].fill('{"copies": "many"}')
    dialog.get_by_role("button", name="Enqueue").click()
    expect(notes["payload"]).to_contain_text("copies: ")
    expect(notes["payload"]).to_contain_text("to: ")
    expect(notes["headers"]).to_be_hidden()
    assert queue.peek(10) == []
    boxes["payload"].fill('{"to": "ada", "copies": 2}')
    expect(notes["payload"]).to_be_hidden()
    dialog.get_by_role("button", name="Enqueue").click()
    expect(dialog).to_have_count(0)
    assert [task.payload for task in queue.peek(10)] == [{"to": "ada", "copies": 2}]


def test_a_duplicate_is_an_error_returned_or_replaced(visit: Visit, queue: Any) -> None:
    page = visit(queue, "tasks", ignoring=("409",))
    dialog = page.get_by_role("dialog")
    for number, choice in enumerate(("raise", "raise", "return", "replace")):
        if not dialog.count():
            page.get_by_role("button", name="Enqueue…").click()
            dialog.get_by_text("More options").click()
            dialog.locator("[name=dedupe_key]").fill("report")
            dialog.locator("[name=dedupe_for]").fill("10")
            dialog.locator("[name=task_id]").fill("mine")
            dialog.locator("[name=expires_in]").fill("30")
            dialog.locator("[name=visibility_timeout]").fill("15")
        dialog.locator("[name=on_duplicate]").select_option(choice)
        dialog.locator("[name=payload]").fill(f'{{"n": {number}}}')
        dialog.get_by_role("button", name="Enqueue").click()
        if number == 1:
            expect(dialog.get_by_role("alert")).to_contain_text("mine")
        else:
            expect(dialog).to_have_count(0)
        [task] = queue.peek(10)
        assert task.payload == {"n": number if number in {0, 3} else 0}
    assert (task.id, task.dedupe_key) == ("mine", "report")
    assert (task.dedupe_until - task.created_at).total_seconds() == 600
    assert (task.expires_at - task.created_at).total_seconds() == 1800
    assert task.visibility_timeout_sec == 900


def test_a_task_is_enqueued_by_hand_and_cancelled_after_a_question(
    visit: Visit, queue: Any
) -> None:
    page = visit(queue, "tasks")
    page.get_by_role("button", name="Enqueue…").click()
    dialog = page.get_by_role("dialog")
    dialog.locator("[name=payload]").fill("[1]")
    dialog.get_by_role("button", name="Enqueue").click()
    expect(dialog.get_by_role("alert")).to_contain_text("object")
    dialog.locator("[name=payload]").fill('{"to": "ada@example.org"}')
    dialog.locator("[name=priority]").fill("7")
    dialog.locator("[name=delay]").fill("5")
    dialog.get_by_role("button", name="Enqueue").click()
    expect(dialog).to_have_count(0)
    expect(page.locator("[data-row]")).to_have_count(1)
    [task] = queue.peek(10)
    assert (task.payload, task.priority) == ({"to": "ada@example.org"}, 7)
    assert (task.next_retry_at - task.created_at).total_seconds() == 300

    page.locator("[data-row] a").first.click()
    action(page, "cancel").click()
    action(page.get_by_role("dialog"), "dismiss").click()
    assert queue.get(task.id).status == "pending"  # The dialog was dismissed.
    action(page, "cancel").click()
    action(page.get_by_role("dialog"), "submit").click()
    expect(page.locator(".heading .badge")).to_have_text("failed")

    page.get_by_role("link", name="Audit").click()
    entries = page.locator("[data-row]")
    expect(entries).to_have_count(2)
    expect(entries.nth(0)).to_contain_text("task.cancel")
    expect(entries.nth(0)).to_contain_text(str(task.id))
    expect(entries.nth(1)).to_contain_text("task.enqueue")


def test_a_running_task_is_released_after_a_question(visit: Visit, queue: Any) -> None:
    queue.enqueue({"n": 1})
    task = queue.pop()
    page = visit(queue, f"tasks/{task.id}")
    action(page, "release").click()
    action(page.get_by_role("dialog"), "submit").click()
    expect(page.locator(".heading .badge")).to_have_text("ready")
    assert queue.get(task.id).attempts == 0


def test_sweep_now_says_what_it_moved(
    visit: Visit, queue: Any, microqueue_clock: FakeClock
) -> None:
    queue.enqueue({"n": 1})
    queue.pop()
    microqueue_clock.advance(601)
    page = visit(queue)
    expect(page.locator("[data-figure=overdue]")).to_contain_text("1")
    action(page, "sweep").click()
    expect(page.locator(".toast")).to_contain_text("1 reclaimed")
    expect(page.locator("[data-figure=overdue]")).to_contain_text("0")
    expect(page.locator(".sweeper")).to_contain_text("1 reclaimed")


def test_the_sweeper_names_what_it_buried(
    visit: Visit, queue: Any, microqueue_clock: FakeClock
) -> None:
    queue.enqueue({"n": 1}, task_id="order-17", max_attempts=1)
    queue.pop()
    microqueue_clock.advance(601)
    page = visit(queue)
    action(page, "sweep").click()
    expect(page.locator(".sweeper")).to_contain_text("lease_expired 1: order-17")


def test_a_filter_over_a_hundred_thousand_tasks_is_answered_at_once(
    visit: Visit, queue: Any
) -> None:
    names = ("ada", "grace", "edsger", "barbara")
    rare = queue.enqueue({"to": "the-oldest-of-all@example.org"})
    queue.clock.advance(1)
    for start in range(0, 100_000, 10_000):
        queue.enqueue_many(
            [{"n": n, "to": f"{names[n % 4]}@example.org"} for n in range(start, start + 10_000)]
        )
    late = queue.pop()
    queue.mark_failure(late, "late", code="Timeout")
    page = visit(queue, "tasks")
    expect(page.locator("[data-row]")).to_have_count(50)

    def answered_in(address: str, shown: Locator) -> float:
        started = time.monotonic()
        page.evaluate("address => { location.hash = address }", address)
        shown.wait_for()
        return time.monotonic() - started

    row = page.locator("[data-row]")
    # A slow server has looked at a part of the tasks only, and says so.
    nothing = page.locator("[data-empty^=no-match]")
    took, unfiltered = [], []
    for name in names[1:]:
        address = f"#/tasks?text={name}%40&status=ready"
        took.append(answered_in(address, row.filter(has_text=f"{name}@").first))
        took.append(answered_in("#/tasks?status=failed", row.filter(has_text="Timeout").first))
        took.append(answered_in("#/tasks?status=delayed", nothing))
        unfiltered.append(answered_in("#/tasks", row.filter(has_text="ada@").first))
    assert statistics.median(took) < max(1.0, 5 * statistics.median(unfiltered)), took

    # What only the oldest of all has is looked for in steps, none of them long.
    page.evaluate("location.hash = '#/tasks?text=the-oldest-of-all'")
    found = page.locator(f"[data-row='{rare.id}']")
    continue_search = action(page, "continue-search")
    for _ in range(20):  # A slow server takes more of the steps.
        expect(continue_search.or_(found).first).to_be_visible()
        if found.is_visible():
            break
        with suppress(PlaywrightTimeout):  # The button goes when the task is found.
            continue_search.click(timeout=3000)
    expect(found).to_be_visible()
