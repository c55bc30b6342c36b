from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from microqueue.clock import ServerClock
from microqueue.operations.time import read_clock
from microqueue.positions import Positions, front_position, microseconds, rightful_position
from microqueue.testing import FakeClock

SERVER_TIME = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)


class Dials:
    """The two clocks of a machine, under the test's control."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monotonic = 1000.0
        self.wall = 5_000_000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic)
        monkeypatch.setattr(time, "time", lambda: self.wall)

    def pass_time(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


@pytest.fixture
def dials(monkeypatch: pytest.MonkeyPatch) -> Dials:
    return Dials(monkeypatch)


def synchronised(dials: Dials) -> ServerClock:
    clock = ServerClock()
    clock.observe(SERVER_TIME, sent=dials.monotonic, received=dials.monotonic)
    return clock


def test_time_is_the_servers_whatever_this_machine_says(dials: Dials) -> None:
    clock = synchronised(dials)
    dials.pass_time(2.5)
    assert clock.now() == datetime(2031, 5, 6, 7, 8, 11, 623000, tzinfo=UTC)


def test_wall_clock_set_back_does_not_move_the_time(dials: Dials) -> None:
    clock = synchronised(dials)
    before = clock.now()
    dials.wall -= 3600
    assert clock.now() == before
    assert clock.stale  # A jump may also mean that the machine slept.


def test_server_is_taken_to_answer_half_way_through_the_call(dials: Dials) -> None:
    clock = ServerClock()
    clock.observe(SERVER_TIME, sent=dials.monotonic - 4, received=dials.monotonic)
    assert clock.now() == SERVER_TIME.replace(microsecond=123000) + timedelta(seconds=2)


def test_time_is_read_again_after_a_minute_or_when_told(dials: Dials) -> None:
    assert ServerClock().stale
    clock = synchronised(dials)
    dials.pass_time(59)
    assert not clock.stale
    dials.pass_time(2)
    assert clock.stale
    clock = synchronised(dials)
    clock.forget()
    assert clock.stale


def test_time_goes_on_from_the_last_reading_while_no_server_can_be_asked(dials: Dials) -> None:
    clock = synchronised(dials)
    clock.forget()
    dials.pass_time(2.5)
    assert clock.stale
    assert clock.now() == datetime(2031, 5, 6, 7, 8, 11, 623000, tzinfo=UTC)
    clock.observe(SERVER_TIME, sent=dials.monotonic, received=dials.monotonic)
    assert not clock.stale
    assert clock.now() == SERVER_TIME.replace(microsecond=123000)


def test_naive_time_from_the_driver_is_utc(dials: Dials) -> None:
    clock = ServerClock()
    naive = SERVER_TIME.replace(tzinfo=None)
    clock.observe(naive, sent=dials.monotonic, received=dials.monotonic)
    assert clock.now() == SERVER_TIME.replace(microsecond=123000)


def test_fresh_clock_asks_the_server_nothing() -> None:
    operation = read_clock(FakeClock(SERVER_TIME))
    with pytest.raises(StopIteration) as stop:
        next(operation)
    assert stop.value.value == SERVER_TIME.replace(microsecond=123000)


def test_positions_grow_strictly_within_one_producer() -> None:
    positions = Positions()
    first = positions.take(SERVER_TIME, 1000)
    assert positions.take(SERVER_TIME) == first + 1000
    assert positions.take(SERVER_TIME + timedelta(seconds=1)) == first + 1_000_000


def test_positions_follow_a_clock_that_was_set_back() -> None:
    positions = Positions()
    ahead = positions.take(SERVER_TIME + timedelta(hours=1))
    assert positions.take(SERVER_TIME) < ahead


def test_front_is_before_everything_and_for_once() -> None:
    early, late = front_position(SERVER_TIME), front_position(SERVER_TIME + timedelta(seconds=1))
    assert late < early < 0
    assert rightful_position(late, SERVER_TIME) > 0
    assert rightful_position(42, SERVER_TIME) == 42


@pytest.mark.parametrize("position", [None, "x", True, float("nan"), [1], -7])
def test_place_that_is_no_number_counts_as_one_at_the_front(position: Any) -> None:
    assert rightful_position(position, SERVER_TIME) == microseconds(SERVER_TIME)
    assert rightful_position(position, None) == 0
