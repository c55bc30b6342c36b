"""Crash attribution, and the isolation that makes it certain."""

from __future__ import annotations

from typing import Any

import pytest

from microqueue.model import trusted
from microqueue.operations.workers import CrashRole, Isolation, attribute_crash, isolation_for
from microqueue.task import Claimed, Lease
from microqueue.worker.fetcher import CrashIsolation
from microqueue.worker.in_flight import InFlight, LeasedTask

PLAIN: dict[str, Any] = {"attempts": 1, "max_attempts": 10}
FEW: dict[str, Any] = {"attempts": 2, "max_attempts": 10, "redelivered": True}
ALONE: dict[str, Any] = {**FEW, "attempts": 4, "crashes": 2}
KINDS = {"p": PLAIN, "f": FEW, "a": ALONE, "x": {**ALONE, "position": "x"}}


@pytest.mark.parametrize(
    ("document", "care"),
    [
        (PLAIN, Isolation.NONE),
        ({**PLAIN, "attempts": 9}, Isolation.NONE),
        ({"attempts": 1}, Isolation.NONE),
        ({**PLAIN, "attempts": 10}, Isolation.LIMITED),
        ({**PLAIN, "max_attempts": 1}, Isolation.LIMITED),
        (FEW, Isolation.LIMITED),
        ({**FEW, "crashes": 1}, Isolation.LIMITED),
        ({**FEW, "crashes": 2}, Isolation.ALONE),
        ({**FEW, "attempts": 10}, Isolation.ALONE),
        ({**FEW, "crashes": "many"}, Isolation.LIMITED),
        ({"attempts": "one", "max_attempts": None}, Isolation.NONE),
    ],
    ids=repr,
)
def test_task_that_a_crash_may_harm_is_isolated(document: dict[str, Any], care: Isolation) -> None:
    assert isolation_for(document) is care


@pytest.mark.parametrize(
    ("held", "verdicts"),
    [
        ("", ""),
        ("p", "S"),
        ("ppppp", "SSttt"),  # Some had ended, two ran, some waited; which ones is unknown.
        ("ff", "SS"),
        ("ffff", "SSww"),
        ("pfpp", "SSww"),
        ("pppff", "SStww"),  # It waits for those before it.
        ("appp", "Swww"),
        ("papp", "Swww"),
        ("ppap", "SSww"),
        ("pppap", "SStww"),
        ("fa", "Sw"),
        ("af", "Sw"),
        ("xffff", "tSSww"),
        ("ffffx", "SSwwt"),  # Its place does not tell when it was claimed.
    ],
)
def test_a_crash_is_blamed_on_what_may_have_run(held: str, verdicts: str) -> None:
    names = {"S": CrashRole.SUSPECT, "t": CrashRole.STARTED, "w": CrashRole.WAITED}
    assert list(attribute_crash([KINDS[kind] for kind in held], 2)) == [
        names[one] for one in verdicts
    ]


@pytest.mark.parametrize(("held", "verdicts"), [("pp", "tt"), ("fp", "ww"), ("ap", "ww")])
def test_nobody_is_blamed_once_all_were(held: str, verdicts: str) -> None:
    names = {"t": CrashRole.STARTED, "w": CrashRole.WAITED}
    assert list(attribute_crash([KINDS[kind] for kind in held], 0)) == [
        names[one] for one in verdicts
    ]


class Hands:
    """A worker's hands of concurrency 2: what was claimed, and what of it has started."""

    def __init__(self) -> None:
        self.in_flight = InFlight()
        self.isolation = CrashIsolation(self.in_flight, 2)
        self.started: list[LeasedTask] = []
        self.claimed: list[LeasedTask] = []

    def claim(self, kinds: str) -> None:
        queue: Any = None
        lease: Any = trusted(Lease, token="t", worker_id="w", started_at=None, expires_at=None)
        new = [
            LeasedTask(queue, Claimed({"_id": number, **KINDS[kind]}, lease, None), 0.0)
            for number, kind in enumerate(kinds, len(self.claimed))
        ]
        self.claimed += new
        self.in_flight.add(new)
        self.started += self.isolation.admit(new)

    def settle(self, *numbers: int) -> None:
        for number in numbers:
            self.in_flight.conclude(self.claimed[number])
            self.in_flight.remove([self.claimed[number]])
        self.started += self.isolation.admit_delayed()

    def numbers(self) -> list[int]:
        return [one.claimed.id for one in self.started]


def test_plain_tasks_start_without_isolation() -> None:
    hands = Hands()
    hands.claim("pppp")
    assert hands.numbers() == [0, 1, 2, 3]
    assert not hands.isolation
    assert hands.isolation.max_in_flight() is None


def test_isolated_task_waits_until_few_are_unsettled_and_so_do_later_ones() -> None:
    hands = Hands()
    hands.claim("pppfpp")
    assert hands.numbers() == [0, 1, 2]
    hands.settle(0)
    assert hands.numbers() == [0, 1, 2]
    assert hands.isolation.max_in_flight() == 5  # One of the two that are unsettled must go.
    hands.settle(1)
    assert hands.numbers() == [0, 1, 2, 3]
    hands.settle(2)
    assert hands.numbers() == [0, 1, 2, 3, 4]
    hands.settle(4)
    assert hands.numbers() == [0, 1, 2, 3, 4, 5]
    assert hands.isolation.max_in_flight() == 2  # No more are claimed beside it,
    hands.settle(3)
    assert hands.isolation.max_in_flight() is None  # but after it.


def test_a_task_that_runs_alone_has_nothing_beside_it() -> None:
    hands = Hands()
    hands.claim("fap")
    assert hands.numbers() == [0]
    hands.settle(0)
    assert hands.numbers() == [0, 1]
    assert hands.isolation.admit_delayed() == []
    hands.settle(1)
    assert hands.numbers() == [0, 1, 2]
    hands.claim("a")
    assert hands.isolation.max_in_flight() == 2  # The one before it, and itself.


def test_delayed_task_whose_lease_was_lost_is_not_started() -> None:
    hands = Hands()
    hands.claim("ppffp")
    hands.settle(2)
    hands.settle(0)
    assert hands.numbers() == [0, 1, 3]
    assert [one.claimed.id for one in hands.isolation.withdraw(lambda _held: True)] == [4]
    hands.settle(1)
    assert hands.numbers() == [0, 1, 3]
