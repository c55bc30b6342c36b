"""Old public names keep working, and warn with the new name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from microqueue import (
    DeadLetterFilter,
    QueueSettings,
    dead_letter_models,
    insights,
)
from microqueue.dashboard import server
from microqueue.deprecation import renamed_names
from microqueue.insights import AsyncInsights, Insights
from microqueue.testing import memory_async_queue, memory_queue
from microqueue.worker.options import WorkerOptions
from tests.rejection import rejecting


@pytest.mark.parametrize("place", ["status", "collection"])
def test_letters_apart_is_separate_dlq(place: str) -> None:
    settings: Any = QueueSettings(dead_letters=place)  # type: ignore[arg-type]
    with pytest.warns(DeprecationWarning, match="separate_dlq") as warned:
        assert settings.letters_apart is settings.separate_dlq is (place == "collection")
    assert warned[0].filename == __file__


def test_brisk_period_is_hot_poll_period() -> None:
    with pytest.warns(DeprecationWarning, match="hot_poll_period") as warned:
        options: Any = WorkerOptions(brisk_period=0.5)  # type: ignore[call-arg]
    assert warned[0].filename == __file__
    assert options.hot_poll_period == timedelta(seconds=0.5)
    with pytest.warns(DeprecationWarning, match="hot_poll_period"):
        assert options.brisk_period == options.hot_poll_period


def test_an_option_is_not_given_by_both_names() -> None:
    with rejecting("brisk_period", 0.5):
        WorkerOptions(brisk_period=0.5, hot_poll_period=0.5)  # type: ignore[call-arg]


@pytest.fixture
def module() -> Iterator[ModuleType]:
    made = ModuleType("renaming")
    made.__dict__.update(New="the new one", __getattr__=renamed_names("renaming", {"Old": "New"}))
    sys.modules["renaming"] = made
    yield made
    del sys.modules["renaming"]


def test_renamed_name_of_a_module(module: ModuleType) -> None:
    with pytest.warns(DeprecationWarning, match=r"renaming\.New") as warned:
        assert module.Old == "the new one"
    assert warned[0].filename == __file__
    with pytest.raises(AttributeError, match="Odd"):
        _ = module.Odd


def test_insights_letters_is_dead_letters() -> None:
    found: Any = Insights(memory_queue())
    with pytest.warns(DeprecationWarning, match=r"Insights\.dead_letters") as warned:
        page = found.letters(None, DeadLetterFilter())
    assert warned[0].filename == __file__
    assert page.documents == []
    with pytest.raises(AttributeError, match="leters"):
        _ = found.leters


RENAMED_IN_INSIGHTS = [
    ("tasks", "shown", "mask"),
    ("tasks", "made", "convert"),
    ("dead_letters", "shown", "mask"),
    ("dead_letters", "made", "convert"),
    ("dead_letters", "enough", "stop"),
]


@pytest.mark.parametrize(("method", "old", "new"), RENAMED_IN_INSIGHTS)
@pytest.mark.parametrize("kind", [Insights, AsyncInsights])
async def test_old_argument_of_insights_is_the_new_one(
    kind: Any, method: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = kind(memory_queue() if kind is Insights else memory_async_queue())
    operations = vars(found)["_operations"]
    passed: dict[str, Any] = {}
    usual = getattr(operations, method)

    def operation(*args: Any, **options: Any) -> Any:
        passed.update(options)
        return usual(*args, **options)

    def function(*_args: Any) -> str:
        return ""

    monkeypatch.setattr(operations, method, operation)
    positional = [None, DeadLetterFilter()] if method == "dead_letters" else []

    async def call(**options: Any) -> Any:
        page = getattr(found, method)(*positional, **options)
        return await page if inspect.isawaitable(page) else page

    with pytest.warns(DeprecationWarning, match=f"^{old} is deprecated; use {new}$") as warned:
        page = await call(**{old: function})
    assert warned[0].filename == __file__
    assert page.documents == []
    assert passed[new] is function
    with rejecting(old, function):
        await call(**{old: function, new: function})


def test_letters_takes_its_old_arguments() -> None:
    found: Any = Insights(memory_queue())
    with pytest.warns(DeprecationWarning, match="use ") as warned:
        page = found.letters(None, DeadLetterFilter(), shown=str, made=None)
    assert [str(one.message).rpartition(" ")[2] for one in warned] == [
        "Insights.dead_letters",
        "mask",
        "convert",
    ]
    assert page.documents == []


def test_insights_held_is_in_flight_task() -> None:
    with pytest.warns(DeprecationWarning, match="InFlightTask"):
        assert insights.Held is insights.InFlightTask  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("DeadLetterFilter", "DeadLetterFilter"),
        ("DeadLetterGroup", "DeadLetterGroup"),
        ("DeadLetterGroups", "DeadLetterGroups"),
        ("DeadLetterPage", "DeadLetterPage"),
        ("DeadLetterStats", "DeadLetterStats"),
        ("LetterGroup", "DeadLetterGroup"),
        ("LetterGroups", "DeadLetterGroups"),
        ("ReplayReport", "ReplayReport"),
    ],
)
def test_dlq_is_dead_letter_models(old: str, new: str) -> None:
    dlq = import_module("microqueue.dlq")
    with pytest.warns(DeprecationWarning, match=rf"^microqueue\.dlq\.{old} .*\.{new}$") as warned:
        assert getattr(dlq, old) is getattr(dead_letter_models, new)
    assert warned[0].filename == __file__
    place = str(warned[0].message).rpartition(" ")[2].rpartition(".")[0]
    assert getattr(import_module(place), new) is getattr(dead_letter_models, new)
    with pytest.raises(AttributeError, match="Leter"):
        _ = dlq.Leter


def test_dashboard_serving_is_dashboard_server() -> None:
    with pytest.warns(DeprecationWarning, match=r"use microqueue\.dashboard\.server\.") as warned:
        from microqueue.dashboard.serving import DashboardServer as Old  # noqa: PLC0415 (it warns)
    assert warned[0].filename == __file__
    assert Old is server.DashboardServer
