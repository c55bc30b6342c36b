"""Dead letters in the browser: find them, select them, and deal with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from microqueue import Queue, QueueSettings
from microqueue.testing import FakeClock
from tests.acceptance.browser import HeldBack, action, expect_empty

Visit = Callable[..., Page]


@pytest.fixture
def queue(microqueue_database: Any, microqueue_clock: FakeClock) -> Any:
    return Queue(
        microqueue_database, settings=QueueSettings(max_attempts=2), clock=microqueue_clock
    )


def bury(queue: Any, number: int, *, code: str, message: str) -> list[Any]:
    """Make dead letters; ``{n}`` of the message is their number. Give their ids, oldest first."""
    buried = []
    for n in range(number):
        queue.enqueue({"n": n, "code": code})
        task = queue.pop()
        assert task is not None
        queue.mark_failure(task, message.format(n=n), code=code)
        queue.clock.advance(1)
        buried.append(task.id)
    return buried


def rows(page: Page) -> Locator:
    return page.locator("[data-row]")


def selected(page: Page) -> Locator:
    return page.locator(".selected")


def expect_selected(page: Page, number: int) -> None:
    """Check how many rows are selected."""
    expect(selected(page)).to_have_attribute("data-selected", str(number))
    expect(selected(page)).to_have_text(f"{number or 'None'} selected")


def scope(page: Page) -> Locator:
    """Find where the heading names the queue, or all queues."""
    return page.locator("h1 [data-scope]")


def select_all(page: Page, number: int) -> None:
    """Select everything that matches; the button says how many that is."""
    button = action(page, "select-all")
    expect(button).to_have_text(f"Select all {number} matching")
    button.click()


def submit(page: Page, label: str) -> None:
    """Submit the open dialog, whose button says what it will do."""
    button = action(page.get_by_role("dialog"), "submit")
    expect(button).to_have_text(label)
    button.click()


def expect_matched(page: Page, number: int) -> None:
    """Check how many dead letters the dry run of a dialog matched."""
    dry_run = page.get_by_role("dialog").locator("[data-matched]")
    expect(dry_run).to_have_attribute("data-matched", str(number))
    expect(dry_run).to_contain_text(f"Dry run: {number} dead letters matched.")


def box(page: Page, letter: Any) -> Locator:
    return page.get_by_label(f"Select {letter}")


def test_no_dead_letters_is_an_empty_state(visit: Visit, queue: Any) -> None:
    page = visit(queue, "dead-letters")
    expect_empty(page, "no-dead-letters")
    expect(scope(page)).to_have_text("all queues")


def test_letters_of_all_queues_are_shown_and_the_page_says_of_which(
    visit: Visit, queue: Any, microqueue_database: Any
) -> None:
    """The dashboard's own queue has none; that is not all that there is to say."""
    options = {"settings": queue.settings, "clock": queue.clock}
    mail: Queue[Any] = Queue(microqueue_database, "mail", **options)
    billing: Queue[Any] = Queue(microqueue_database, "billing", **options)
    bury(mail, 3, code="Timeout", message="late {n}")
    (bill,) = bury(billing, 1, code="Denied", message="no")
    page = visit(queue, "dead-letters")
    expect(rows(page)).to_have_count(4)
    expect(scope(page)).to_have_text("all queues")
    expect(rows(page).filter(has_text=str(bill))).to_contain_text("billing")
    tabs = page.get_by_label("Queues")
    expect(tabs.locator("[aria-current]")).to_have_text("All queues")

    tabs.get_by_role("link", name="mail").click()
    expect(rows(page)).to_have_count(3)
    expect(scope(page)).to_have_text("mail")
    page.evaluate("location.hash = '#/dead-letters?queue=default'")
    expect_empty(page, "no-dead-letters-in-queue")
    expect(page.locator(".empty")).to_contain_text("default")
    page.get_by_role("link", name="Show all queues").click()
    expect(rows(page)).to_have_count(4)

    select_all(page, 4)
    action(page, "discard").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading")).to_have_text("Discard 4 dead letters in all queues?")
    action(dialog, "dismiss").click()
    tabs.get_by_role("link", name="mail").click()
    select_all(page, 3)
    action(page, "discard").click()
    expect(dialog.get_by_role("heading")).to_have_text("Discard 3 dead letters in mail?")
    submit(page, "Discard 3 permanently")
    expect_empty(page, "no-dead-letters-in-queue")
    expect(page.locator(".empty")).to_contain_text("mail")
    assert (mail.stats().failed, billing.stats().failed) == (0, 1)


def test_a_filtered_group_is_replayed_after_a_dry_run(visit: Visit, queue: Any) -> None:
    late = bury(queue, 9, code="Timeout", message="order {n}7 timed out")
    other = bury(queue, 3, code="bad_address", message="nobody@{n} is not an address")
    page = visit(queue, "dead-letters")
    groups = page.get_by_label("Groups").locator("li")
    expect(groups).to_have_count(2)
    timeouts = groups.filter(has_text="Timeout")
    expect(timeouts).to_contain_text("9")

    timeouts.locator("a").click()
    expect(rows(page)).to_have_count(9)
    select_all(page, 9)
    expect(selected(page)).to_contain_text("9")
    action(page, "replay").click()
    expect_matched(page, 9)
    assert queue.stats().failed == 12  # The dry run moved nothing.
    submit(page, "Replay 9")

    expect(page.locator(".toast-done")).to_have_text("9 dead letters replayed.")
    expect(rows(page)).to_have_count(0)
    assert {task.id for task in queue.peek(50, status="pending")} == set(late)
    assert {task.id for task in queue.dead_letters.list()} == set(other)


def test_everything_means_what_was_there_when_it_was_selected(visit: Visit, queue: Any) -> None:
    bury(queue, 3, code="Timeout", message="late")
    page = visit(queue, "dead-letters")
    select_all(page, 3)
    queue.clock.advance(60)
    unseen = bury(queue, 2, code="Timeout", message="late")
    expect(rows(page)).to_have_count(5)

    action(page, "discard").click()
    expect_matched(page, 3)
    submit(page, "Discard 3 permanently")

    expect(page.locator(".toast-done")).to_have_text("3 dead letters discarded.")
    assert [task.id for task in queue.dead_letters.list()] == unseen[::-1]


def test_one_a_page_and_a_shift_range_can_be_selected(visit: Visit, queue: Any) -> None:
    newest_first = bury(queue, 8, code="Timeout", message="late {n}")[::-1]
    page = visit(queue, "dead-letters")
    expect_selected(page, 0)
    expect(action(page, "replay")).to_be_disabled()

    box(page, newest_first[1]).check()
    expect_selected(page, 1)
    box(page, newest_first[5]).click(modifiers=["Shift"])
    expect_selected(page, 5)
    for place, letter in enumerate(newest_first):
        expect(box(page, letter)).to_be_checked(checked=1 <= place <= 5)
    whole_page = page.get_by_label("Select all on this page")
    assert whole_page.evaluate("box => box.indeterminate")

    box(page, newest_first[3]).uncheck()
    box(page, newest_first[2]).click(modifiers=["Shift"])  # A range can be deselected.
    expect_selected(page, 3)

    whole_page.click()
    expect_selected(page, 8)
    whole_page.click()
    expect_selected(page, 0)


def test_letters_of_the_filter_before_cannot_be_selected(
    serve: Any, new_page: Any, queue: Any
) -> None:
    bury(queue, 2, code="Timeout", message="late")
    other = bury(queue, 2, code="bad_address", message="nobody")
    page = new_page()
    page.goto(f"{serve(queue).url}#/dead-letters")
    expect(rows(page)).to_have_count(4)
    letters = HeldBack(page, "**/dead-letters?*code=Timeout*")
    page.get_by_label("Groups").locator("a").filter(has_text="Timeout").click()
    page.wait_for_url("**code=Timeout*")
    box(page, other[0]).click(force=True)  # Still shown, while the answer is on its way.
    expect_selected(page, 0)
    letters.release()  # The address changes before the page asks.
    expect(rows(page)).to_have_count(2)
    expect_selected(page, 0)


def test_a_selection_is_kept_when_letters_arrive(visit: Visit, queue: Any) -> None:
    first = bury(queue, 3, code="Timeout", message="late {n}")
    page = visit(queue, "dead-letters")
    box(page, first[1]).check()
    later = bury(queue, 2, code="Timeout", message="later {n}")
    expect(rows(page)).to_have_count(5)
    expect(box(page, first[1])).to_be_checked()
    expect(box(page, later[0])).not_to_be_checked()
    action(page, "replay").click()
    submit(page, "Replay 1")
    expect(rows(page)).to_have_count(4)
    assert queue.get(first[1]).status == "pending"


def test_a_replay_can_be_delayed_or_spread(visit: Visit, queue: Any) -> None:
    spread = bury(queue, 5, code="Timeout", message="late")
    page = visit(queue, "dead-letters")

    def replay(kind: str, minutes: int, count: int) -> None:
        select_all(page, count)
        action(page, "replay").click()
        page.locator(f"[name={kind}]").fill(str(minutes))
        expect(page.locator(f"[name=when][value={kind}]")).to_be_checked()
        submit(page, f"Replay {count}")
        expect_empty(page, "no-dead-letters")

    now = queue.clock.now()
    replay("spread", 20, 5)
    waits = sorted((queue.get(one).next_retry_at or now) - now for one in spread)
    assert waits[0].total_seconds() < waits[-1].total_seconds() <= 20 * 60
    assert len(set(waits)) == 5, "a replay that comes all at once would be a new storm"

    delayed = bury(queue, 2, code="Timeout", message="late")
    expect(rows(page)).to_have_count(2)
    now = queue.clock.now()
    replay("delay", 7, 2)
    assert {(queue.get(one).next_retry_at - now).total_seconds() for one in delayed} == {420}


def test_a_payload_is_edited_and_replayed(visit: Visit, queue: Any) -> None:
    queue.enqueue({"to": "nobody", "password": "secret"})
    task = queue.pop()
    queue.mark_failure(task, "not an address", code="bad_address")
    page = visit(queue, "dead-letters")
    page.get_by_role("button", name=f"Edit and replay {task.id}").click()
    payload = page.get_by_role("dialog").locator("textarea")
    shown = json.loads(payload.input_value())
    assert shown["password"] != "secret"

    payload.fill("{not json")
    submit(page, "Replay")
    note = page.locator("[data-field=payload]").get_by_role("alert")
    expect(note).to_contain_text("Not valid JSON: ")
    expect(payload).to_have_attribute("aria-invalid", "true")

    payload.fill(json.dumps({**shown, "to": "ada@example.org"}))
    submit(page, "Replay")
    expect_empty(page, "no-dead-letters")
    assert queue.get(task.id).payload == {"to": "ada@example.org", "password": "secret"}
    assert queue.get(task.id).status == "pending"


def test_numbers_are_read_plainly_and_replayed_as_they_were(visit: Visit, queue: Any) -> None:
    numbers = {"order": 1234567890123456789, "price": 10.0, "n": 1, "half": 0.5}
    queue.enqueue(numbers, task_id="big")
    queue.mark_failure(queue.pop(), "boom")
    page = visit(queue, "tasks/big")
    shown = page.locator("[data-part=payload]")
    expect(shown).to_contain_text('"order": 1234567890123456789,')
    expect(shown).to_contain_text('"price": 10.0,')
    action(page, "edit").click()
    submit(page, "Replay")
    expect(page.locator(".toast-done")).to_have_text("Task big replayed with the new payload.")
    assert queue.get("big").status == "pending"
    assert repr(queue.get("big").payload) == repr(numbers)


def test_of_two_ids_that_look_alike_the_ticked_one_is_meant(visit: Visit, queue: Any) -> None:
    for task_id in ("17", 17):
        queue.enqueue({"kind": type(task_id).__name__}, task_id=task_id)
        queue.mark_failure(queue.pop(), "boom")
        queue.clock.advance(1)
    page = visit(queue, "dead-letters")
    expect(rows(page)).to_have_count(2)
    text = rows(page).filter(has_text='"str"')
    text.get_by_role("link", name="17").click()
    expect(page.locator("[data-part=payload]")).to_contain_text('"str"')
    page.go_back()
    text.get_by_role("checkbox").check()
    expect_selected(page, 1)
    action(page, "discard").click()
    submit(page, "Discard 1 permanently")
    expect(rows(page)).to_have_count(1)
    assert [task.id for task in queue.dead_letters.list()] == [17]
    rows(page).get_by_role("link", name="17").click()
    expect(page.locator("[data-part=payload]")).to_contain_text('"int"')


def test_letters_are_exported_as_json_lines(visit: Visit, queue: Any) -> None:
    timeouts = bury(queue, 3, code="Timeout", message="late {n}")
    bury(queue, 2, code="bad_address", message="nobody")
    page = visit(queue, "dead-letters?code=Timeout")
    expect(rows(page)).to_have_count(3)
    with page.expect_download() as download:
        action(page, "export").click()
    assert download.value.suggested_filename.endswith(".jsonl")
    assert {str(one) for one in timeouts} == exported(download.value.path())
    fields = exported_fields(download.value.path())
    assert {"payload", "error", "history"} <= fields

    box(page, timeouts[1]).check()
    with page.expect_download() as download:
        action(page, "export").click()
    assert exported(download.value.path()) == {str(timeouts[1])}
    assert exported_fields(download.value.path()) == fields


def exported(path: Path) -> set[str]:
    return {str(json.loads(line)["id"]) for line in path.read_text().splitlines()}


def exported_fields(path: Path) -> set[str]:
    return set(json.loads(path.read_text().splitlines()[0]))


def test_pages_of_letters_keep_the_selection(visit: Visit, queue: Any) -> None:
    oldest = bury(queue, 55, code="Timeout", message="late {n}")
    page = visit(queue, "dead-letters")
    expect(rows(page)).to_have_count(50)
    box(page, oldest[-1]).check()
    page.get_by_role("link", name="Older").click()
    expect(rows(page)).to_have_count(5)
    expect_selected(page, 1)
    box(page, oldest[0]).check()
    expect_selected(page, 2)
    page.go_back()
    expect(rows(page)).to_have_count(50)
    expect(box(page, oldest[-1])).to_be_checked()
    page.goto(page.url.split("#")[0] + "#/dead-letters?code=Timeout")
    expect_selected(page, 0)  # Other letters, another selection.
