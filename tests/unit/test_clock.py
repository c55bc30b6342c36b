from __future__ import annotations

import copy
import pickle
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import bson
import pytest
from pymongo.errors import AutoReconnect

from microqueue.clock import ServerClock, later
from microqueue.drivers.driver import AsyncDriver, SyncDriver
from microqueue.operations.call import Operation, Timed
from microqueue.operations.server_clock import read_clock
from microqueue.positions import Positions, front_position, microseconds, original_position
from microqueue.settings import QueueSettings
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


def test_time_is_this_machines_before_any_reading() -> None:
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    assert before <= ServerClock().now() <= datetime.now(UTC)


def test_wall_clock_set_back_does_not_move_the_time(dials: Dials) -> None:
    clock = synchronised(dials)
    before = clock.now()
    dials.wall -= 3600
    assert clock.now() == before
    assert clock.stale  # A jump may also mean that the machine slept.


@pytest.mark.parametrize("took_sec", [0.0, 0.2, 12.0])
@pytest.mark.parametrize("read_after", [0.0, 0.5, 1.0])
def test_time_is_never_ahead_of_the_server_and_a_delay_never_ends_early(
    dials: Dials, took_sec: float, read_after: float
) -> None:
    """Whenever the server read its clock while the call was under way."""
    clock = ServerClock()
    sent = dials.monotonic
    dials.pass_time(took_sec)
    clock.observe(SERVER_TIME, sent=sent, received=dials.monotonic)
    passed = timedelta(seconds=took_sec * (1 - read_after))  # Since the server read its clock.
    for _ in range(3):
        true_time = SERVER_TIME + passed
        assert clock.now() <= true_time
        # Somebody with a perfect clock does not see the end before its time.
        assert later(clock.now(), timedelta(seconds=10)) >= true_time + timedelta(seconds=10)
        dials.pass_time(7)
        passed += timedelta(seconds=7)


@pytest.mark.parametrize("rate", [1 - 9e-5, 1 + 9e-5])
def test_clock_that_runs_at_another_rate_than_the_servers_keeps_the_bounds(
    dials: Dials, rate: float
) -> None:
    clock = synchronised(dials)
    for second in range(1, 60):
        dials.pass_time(rate)
        true_time = SERVER_TIME + timedelta(seconds=second)
        assert clock.now() <= true_time
        assert later(clock.now(), timedelta(0)) >= true_time
        assert later(clock.now(), timedelta(0)) - clock.now() < timedelta(milliseconds=20)


def test_end_of_a_delay_is_counted_from_the_latest_time_that_it_may_be(dials: Dials) -> None:
    clock = ServerClock()
    clock.observe(SERVER_TIME, sent=dials.monotonic - 4, received=dials.monotonic)
    now = clock.now()
    assert now == SERVER_TIME.replace(microsecond=123000)
    assert later(now, timedelta(seconds=10)) == now + timedelta(seconds=14, milliseconds=2)
    exact = FakeClock(SERVER_TIME).now()
    assert later(exact, timedelta(seconds=10)) == exact + timedelta(seconds=10)


def test_instant_is_stored_copied_and_shown_as_any_other(dials: Dials) -> None:
    now = synchronised(dials).now()
    plain = datetime(2031, 5, 6, 7, 8, 9, 123000, tzinfo=UTC)
    assert now == plain
    assert repr(now) == repr(plain)
    assert type(copy.deepcopy(now)) is type(pickle.loads(pickle.dumps(now))) is datetime
    assert bson.encode({"at": now}) == bson.encode({"at": plain})


def drive(operation: Operation[datetime], dials: Dials, replies: list[Any]) -> datetime:
    """Answer each call after a while: seconds, or an error."""
    call = next(operation)
    try:
        for reply in replies:
            assert call.timed
            if isinstance(reply, BaseException):
                call = operation.throw(reply)
                continue
            took_sec, server_time = reply
            sent = dials.monotonic
            dials.pass_time(took_sec)
            timed = Timed({"localTime": server_time}, sent, dials.monotonic)
            call = operation.send(timed)
    except StopIteration as stop:
        assert reply is replies[-1]
        result: datetime = stop.value
        return result
    raise AssertionError("it asks on")


def test_slow_reply_is_discarded_and_the_server_is_asked_again(dials: Dials) -> None:
    clock = ServerClock()
    quick = SERVER_TIME + timedelta(seconds=3)
    now = drive(read_clock(clock), dials, [(3.0, SERVER_TIME), (0.01, quick)])
    assert now == quick.replace(microsecond=123000)
    assert later(now, timedelta(0)) - now < timedelta(milliseconds=15)


def test_if_all_replies_are_slow_the_quickest_counts(dials: Dials) -> None:
    clock = ServerClock()
    took = [3.0, 0.2, 2.0, 1.0]
    at = [SERVER_TIME + timedelta(seconds=second) for second in (3, 3.2, 5.2, 6.2)]
    now = drive(read_clock(clock), dials, list(zip(took, at, strict=True)))
    assert now == (at[1] + timedelta(seconds=3 * (1 - 1e-4))).replace(microsecond=323000)
    assert not clock.stale


def test_slow_reply_is_better_than_none(dials: Dials) -> None:
    lost = AutoReconnect("connection closed")
    now = drive(read_clock(ServerClock()), dials, [(3.0, SERVER_TIME), lost])
    assert now == SERVER_TIME.replace(microsecond=123000)
    with pytest.raises(AutoReconnect):
        drive(read_clock(ServerClock()), dials, [lost])


def topology(**kinds: str) -> Any:
    servers = {name: SimpleNamespace(server_type_name=kind) for name, kind in kinds.items()}
    return SimpleNamespace(server_descriptions=lambda: servers)


class Server:
    """Answers the calls of a driver: with an error, or with the time, each after a while."""

    def __init__(self, dials: Dials, replies: list[Any]) -> None:
        self.in_memory = False
        self.timeout_sec = None
        self.selection_sec = 30.0
        self.database = self
        self.client = SimpleNamespace(topology_description=topology(a="Standalone"))
        self._dials = dials
        self._replies = replies

    def command(self, _name: str) -> dict[str, Any]:
        took_sec, reply = self._replies.pop(0)
        self._dials.pass_time(took_sec)
        if isinstance(reply, BaseException):
            raise reply
        return {"localTime": reply}


@pytest.mark.parametrize("kind", [SyncDriver, AsyncDriver])
async def test_only_the_attempt_that_succeeded_is_timed(
    kind: Any, dials: Dials, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = [(12.0, AutoReconnect("gone")), (0.01, SERVER_TIME)]
    server: Any = Server(dials, list(replies))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    driver = kind(server, settings=QueueSettings(), on_retry=lambda: None)
    clock = ServerClock()
    running = driver.run(read_clock(clock))
    now = await running if kind is AsyncDriver else running
    assert now == SERVER_TIME.replace(microsecond=123000)
    assert later(now, timedelta(0)) - now < timedelta(milliseconds=15)


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
    assert original_position(late, SERVER_TIME) > 0
    assert original_position(42, SERVER_TIME) == 42


@pytest.mark.parametrize("position", [None, "x", True, float("nan"), [1], -7])
def test_place_that_is_no_number_counts_as_one_at_the_front(position: Any) -> None:
    assert original_position(position, SERVER_TIME) == microseconds(SERVER_TIME)
    assert original_position(position, None) == 0


def test_time_is_read_again_when_another_server_became_the_primary() -> None:
    """Also if there was no call while that happened, or the driver itself repeated the call."""
    forgotten: list[bool] = []
    client = SimpleNamespace(topology_description=topology(a="Unknown", b="Unknown"))
    collections: Any = SimpleNamespace(
        in_memory=False, timeout_sec=None, selection_sec=1.0, client=client
    )
    driver = SyncDriver(
        collections, settings=QueueSettings(), on_retry=lambda: forgotten.append(True)
    )

    def changed() -> bool:
        forgotten.clear()
        driver.run(read_clock(FakeClock(SERVER_TIME)))
        return bool(forgotten)

    told = []
    for description in (
        topology(a="RSPrimary", b="RSSecondary"),
        topology(a="RSPrimary", b="RSSecondary"),
        topology(a="Unknown", b="RSSecondary"),
        topology(a="RSSecondary", b="RSPrimary"),
        topology(a="RSSecondary", b="RSPrimary"),
    ):
        client.topology_description = description
        told.append((changed(), changed()))
    assert told == [(False, False)] * 3 + [(True, False)] + [(False, False)]
