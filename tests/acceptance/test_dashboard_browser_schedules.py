"""Schedules in the browser: see them, add and edit one, run it now, pause, resume, remove it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from microqueue import BackoffPolicy, Queue, Tasks, Worker
from tests.acceptance.browser import action, expect_empty

Visit = Callable[..., Page]


@pytest.fixture
def queue(microqueue_database: Any) -> Queue[Any]:
    return Queue(microqueue_database)


def test_schedule_is_added_run_paused_resumed_and_removed(visit: Visit, queue: Queue[Any]) -> None:
    # The page of a schedule may ask for it again when it is removed.
    page = visit(queue, "schedules", ignoring=("422", "404"))
    expect_empty(page, "no-schedules")
    action(page, "add-schedule").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("nightly")
    dialog.get_by_label("Cron expression").fill("0 25 * * *")
    dialog.get_by_label("Time zone").fill("Europe/Berlin")
    dialog.get_by_label("Payload").fill('{"kind": "full"}')
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.locator("[data-field=cron] .field-note")).to_contain_text("25")
    dialog.get_by_label("Cron expression").fill("0 3 * * *")
    dialog.get_by_role("button", name="Save").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    row = page.locator("[data-row=nightly]")
    expect(row.locator("[data-label=Runs]")).to_have_text("0 3 * * * Europe/Berlin")
    expect(row.locator("[data-label='Last run']")).to_have_text("—")
    schedule = queue.schedules.get("nightly")
    assert schedule is not None
    assert (schedule.cron, schedule.payload) == ("0 3 * * *", {"kind": "full"})

    action(row, "trigger").click()
    expect(row.locator("[data-part=outcome]")).to_contain_text("pending")
    task = queue.pop()
    assert task is not None
    assert task.payload == {"kind": "full"}
    queue.mark_done(task)
    expect(row.locator("[data-part=outcome]")).to_contain_text("done")
    row.locator("[data-part=outcome] a").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(str(task.id))
    page.go_back()

    action(row, "pause-schedule").click()
    expect(row.locator("[data-label='Next run']")).to_have_text("paused")
    action(row, "resume-schedule").click()
    expect(row.locator("[data-label='Next run'] time")).to_be_visible()
    row.get_by_role("link", name="nightly").click()
    action(page, "remove-schedule").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect_empty(page, "no-schedules")
    assert queue.schedules.list() == []


def test_edited_schedule_keeps_what_is_not_edited(visit: Visit, queue: Queue[Any]) -> None:
    before = queue.schedules.put(
        "nightly",
        cron="0 3 * * *",
        timezone="Europe/Berlin",
        task="clean",
        payload={"password": "letmein", "days": 7},
        headers={"token": "abc", "tenant": "a"},
        catch_up="all",
        grace=90,
        overlap="skip",
        jitter=0.5,
        priority=3,
        max_attempts=4,
        backoff=BackoffPolicy(base_sec=7.5, factor=1.5, max_sec=60, jitter="none"),
        visibility_timeout=900,
        expires_in=2 * 86_400,
        paused=True,
    )
    page = visit(queue, "schedules", ignoring=("422",))
    row = page.locator("[data-row=nightly]")
    action(row, "edit-schedule").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".warning")).to_have_count(0)
    dialog.get_by_role("button", name="Save").click()
    expect(dialog).to_have_count(0)
    assert queue.schedules.get("nightly") == before

    action(row, "edit-schedule").click()
    dialog.get_by_label("Cron expression").fill("30 4 * * *")
    dialog.locator("[name=jitter]").evaluate("field => { field.value = '-1'; }")
    save = dialog.get_by_role("button", name="Save")
    save.click()  # The browser shows the field, which was closed.
    expect(dialog.locator("[name=jitter]")).to_be_focused()
    dialog.locator("[name=jitter]").fill("0.5")
    dialog.locator("[name=base_sec]").fill("61")
    dialog.locator(".more-options").evaluate("part => { part.open = false; }")
    save.click()
    expect(dialog.locator("[data-field=backoff] > .field-note")).to_be_visible()
    dialog.locator("[name=base_sec]").fill("7.5")
    save.click()
    expect(dialog).to_have_count(0)
    after = queue.schedules.get("nightly")
    assert after is not None
    changes = {"cron": "30 4 * * *", "starts_at": after.starts_at, "updated_at": after.updated_at}
    assert after == before.model_copy(update=changes)


def test_existing_schedule_is_not_added_again(visit: Visit, queue: Queue[Any]) -> None:
    queue.schedules.put("nightly", every=60, payload={"n": 1})
    page = visit(queue, "schedules")
    action(page, "add-schedule").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("nightly")
    dialog.locator("[name=every]").fill("5")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.locator("[data-field=name] .field-note")).to_be_visible()
    dialog.locator("[name=name]").fill("other")
    dialog.get_by_role("button", name="Save").click()
    expect(page.locator("[data-row]")).to_have_count(2)
    stored = {one.name: (one.every, one.payload) for one in queue.schedules.list()}
    assert stored["nightly"] == (timedelta(minutes=1), {"n": 1})
    assert stored["other"] == (timedelta(minutes=5), {})


def test_viewer_is_warned_before_a_schedule_in_code_is_changed(
    visit: Visit, queue: Queue[Any]
) -> None:
    declared = Tasks(app="billing")
    declared.task("ping", every=300)(lambda: None)
    Worker(queue, declared).run(burst=True)
    page = visit(queue, "schedules")
    row = page.locator("[data-row=ping]")
    expect(row.locator("[data-label=Schedule]")).to_contain_text("billing")
    action(row, "edit-schedule").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".warning")).to_contain_text("billing")
    dialog.get_by_role("button", name="Cancel").click()
    row.get_by_role("link", name="ping").click()
    action(page, "remove-schedule").click()
    expect(dialog).to_contain_text("billing")
    dialog.get_by_role("button", name="Cancel").click()
    action(page, "edit-schedule").click()
    dialog.get_by_role("button", name="Save").click()
    expect(page.locator("[data-part=options]")).not_to_contain_text("billing")
    action(page, "remove-schedule").click()
    expect(dialog).to_be_visible()
    expect(dialog).not_to_contain_text("billing")


def test_page_of_a_schedule_shows_its_options_and_next_runs(
    visit: Visit, queue: Queue[Any]
) -> None:
    queue.schedules.put(
        "a/b",
        cron="0 3 * * *",
        timezone="Asia/Tokyo",
        payload={"password": "letmein", "n": 1},
        headers={"tenant": "a"},
        catch_up="skip",
        overlap="skip",
        jitter=90,
        visibility_timeout=1800,
    )
    task = queue.schedules.trigger("a/b")
    page = visit(queue, "schedules/default/a%2Fb")
    expect(page.get_by_role("heading", level=1)).to_have_text("Schedule a/b")
    runs = page.locator("[data-part=next-runs] li")
    expect(runs).to_have_count(5)
    shown = queue.schedules.next_runs("a/b")[0]
    expect(runs.first).to_contain_text(f"{shown:%Y-%m-%d} 03:00:00 +09:00")
    expect(page.locator("[data-part=payload]")).not_to_contain_text("letmein")
    expect(page.locator("[data-part=headers]")).to_contain_text("tenant")
    expect(page.locator("[data-part=runs]").get_by_role("link", name=str(task.id))).to_be_visible()
    options = page.locator("[data-part=options]")
    for text in ("1 m 30 s", "30 m", "at most 30 m"):
        expect(options).to_contain_text(text)
    action(page, "pause-schedule").click()
    expect(page.locator(".heading .badge")).to_have_text("paused")
    expect(runs).to_have_count(5)


def test_unknown_schedule_is_named(visit: Visit, queue: Queue[Any]) -> None:
    page = visit(queue, "schedules/default/gone", ignoring=("404",))
    expect_empty(page, "no-such-schedule")


def test_schedules_are_filtered_by_queue(
    visit: Visit, queue: Queue[Any], microqueue_database: Any
) -> None:
    queue.schedules.put("hourly", every=3600, task="tidy")
    mail: Queue[Any] = Queue(microqueue_database, "mail")
    mail.enqueue({})
    mail.schedules.put("<b>daily</b>", cron="@daily")
    page = visit(queue, "schedules")
    expect(page.locator("[data-row]")).to_have_count(2)
    expect(page.locator("[data-row=hourly]")).to_contain_text("every 1 h")
    page.get_by_label("Queue").select_option("mail")
    expect(page.locator("[data-row]")).to_have_count(1)
    expect(page.locator("[data-row] .schedule-name")).to_have_text("<b>daily</b>")


def test_viewer_of_a_read_only_page_sees_no_actions(visit: Visit, queue: Queue[Any]) -> None:
    queue.schedules.put("hourly", every=3600)
    page = visit(queue, "schedules", read_only=True)
    expect(page.locator("[data-row=hourly]")).to_be_visible()
    expect(page.locator("[data-row=hourly] button")).to_have_count(0)
