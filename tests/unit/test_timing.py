"""When schedules are due: time zones, changes of the clock, leap days, month ends, mistakes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest

from microqueue import InvalidArgument, InvalidCron
from microqueue.timing import Timing, check_cron, check_zone
from tests.rejection import rejecting

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def at(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def cron(expression: str, zone: str = "UTC") -> Timing:
    return Timing(check_cron(expression), None, check_zone(zone), EPOCH)


BERLIN, NEW_YORK, LORD_HOWE = "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"
CASES = [
    # Time zones.
    ("0 3 * * *", "UTC", "2026-01-01T03:00", ["2026-01-02T03:00+00:00", "2026-01-03T03:00+00:00"]),
    ("0 3 * * *", BERLIN, "2026-01-01T00:00+01:00", ["2026-01-01T03:00+01:00"]),
    ("0 3 * * *", "Asia/Kathmandu", "2026-01-01T00:00+05:45", ["2026-01-01T03:00+05:45"]),
    ("0 0 * * *", "Pacific/Kiritimati", "2026-01-01T00:00", ["2026-01-02T00:00+14:00"]),
    # The gap, 02:00 to 03:00: a fixed time in it runs when the gap ends.
    ("30 2 * * *", BERLIN, "2026-03-28T03:00+01:00",
     ["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]),
    ("0 2,3 * * *", BERLIN, "2026-03-28T12:00+01:00",
     ["2026-03-29T03:00+02:00", "2026-03-30T02:00+02:00"]),
    ("59 1 * * *", BERLIN, "2026-03-28T12:00+01:00", ["2026-03-29T01:59+01:00"]),
    ("30 2 * * *", NEW_YORK, "2026-03-07T12:00-05:00", ["2026-03-08T03:00-04:00"]),
    # With a star for minute or hour, the clock decides: what it leaves out does not run.
    ("*/30 * * * *", BERLIN, "2026-03-29T01:00+01:00",
     ["2026-03-29T01:30+01:00", "2026-03-29T03:00+02:00", "2026-03-29T03:30+02:00"]),
    ("*/30 2 * * *", BERLIN, "2026-03-28T12:00+01:00", ["2026-03-30T02:00+02:00"]),
    # A gap of half an hour.
    ("15 2 * * *", LORD_HOWE, "2026-10-03T12:00+10:30", ["2026-10-04T02:30+11:00"]),
    # A gap at midnight.
    ("0 0 * * *", "America/Santiago", "2026-09-05T12:00-04:00", ["2026-09-06T01:00-03:00"]),
    # The fold, 02:00 to 03:00 twice: a fixed time runs the first time only.
    ("30 2 * * *", BERLIN, "2026-10-24T12:00+02:00",
     ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
    ("30 2 * * *", BERLIN, "2026-10-25T02:10+01:00", ["2026-10-26T02:30+01:00"]),
    ("30 1 * * *", NEW_YORK, "2026-10-31T12:00-04:00",
     ["2026-11-01T01:30-04:00", "2026-11-02T01:30-05:00"]),
    # With a star for minute or hour, it runs both times.
    ("30 * * * *", BERLIN, "2026-10-25T01:30+02:00",
     ["2026-10-25T02:30+02:00", "2026-10-25T02:30+01:00", "2026-10-25T03:30+01:00"]),
    ("0 */1 * * *", BERLIN, "2026-10-25T02:00+02:00", ["2026-10-25T02:00+01:00"]),
    # Seconds of 0 are as none. With others, the clock decides.
    ("0 30 2 * * *", BERLIN, "2026-03-28T03:00+01:00",
     ["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]),
    ("00 30 2 * * *", BERLIN, "2026-10-24T12:00+02:00",
     ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
    ("0 */30 * * * *", BERLIN, "2026-10-25T02:00+02:00",
     ["2026-10-25T02:30+02:00", "2026-10-25T02:00+01:00"]),
    ("15 30 2 * * *", BERLIN, "2026-03-28T03:00+01:00", ["2026-03-30T02:30:15+02:00"]),
    ("15 30 2 * * *", BERLIN, "2026-10-24T12:00+02:00",
     ["2026-10-25T02:30:15+02:00", "2026-10-25T02:30:15+01:00"]),
    ("0,30 30 2 * * *", BERLIN, "2026-10-25T02:30:20+02:00",
     ["2026-10-25T02:30:30+02:00", "2026-10-25T02:30:00+01:00"]),
    # Leap days.
    ("0 0 29 2 *", "UTC", "2026-01-01", ["2028-02-29", "2032-02-29"]),
    ("0 0 29 2 *", "UTC", "2096-03-01", ["2104-02-29"]),  # 2100 is no leap year.
    ("0 12 28 2 *", "UTC", "2028-01-01", ["2028-02-28T12:00", "2029-02-28T12:00"]),
    # Month ends.
    ("0 0 31 * *", "UTC", "2026-01-31", ["2026-03-31", "2026-05-31", "2026-07-31", "2026-08-31"]),
    ("0 0 30 * *", "UTC", "2026-01-30", ["2026-03-30"]),
    ("0 0 L * *", "UTC", "2026-01-31", ["2026-02-28", "2026-03-31", "2026-04-30"]),
    ("0 0 L 2 *", "UTC", "2026-03-01", ["2027-02-28", "2028-02-29"]),
    ("0 0 LW * *", "UTC", "2026-01-01", ["2026-01-30", "2026-02-27", "2026-03-31"]),
    ("0 0 1 1 *", "UTC", "2026-12-31T23:59", ["2027-01-01"]),
    # Weekdays. With both days restricted, either is enough.
    ("0 9 * * MON-FRI", "UTC", "2026-01-02T09:00", ["2026-01-05T09:00"]),
    ("0 0 * * 0", "UTC", "2026-01-01", ["2026-01-04"]),
    ("0 0 * * 7", "UTC", "2026-01-01", ["2026-01-04"]),
    ("0 0 * * FRI#2", "UTC", "2026-01-01", ["2026-01-09", "2026-02-13"]),
    ("0 0 * * 5L", "UTC", "2026-01-01", ["2026-01-30"]),
    ("0 0 13 * FRI", "UTC", "2026-02-01", ["2026-02-06", "2026-02-13", "2026-02-20"]),
    # Both must match if one of them begins with a star.
    ("0 0 */2 * FRI", "UTC", "2026-02-01", ["2026-02-13", "2026-02-27", "2026-03-13"]),
    ("0 0 13 * */2", "UTC", "2026-02-01", ["2026-06-13", "2026-08-13", "2026-09-13"]),
    # Steps, seconds, macros, spaces.
    ("5/20 8-9 * * *", "UTC", "2026-01-01", ["2026-01-01T08:05", "2026-01-01T08:25"]),
    ("*/15 * * * * *", "UTC", "2026-01-01T00:00:50", ["2026-01-01T00:01", "2026-01-01T00:01:15"]),
    ("@monthly", "UTC", "2026-01-01", ["2026-02-01"]),
    ("  0   3 * * *  ", "UTC", "2026-01-01", ["2026-01-01T03:00"]),
    # The second in which it is due has begun.
    ("0 3 * * *", "UTC", "2026-01-01T03:00:00.001", ["2026-01-02T03:00"]),
    ("0 3 * * *", "UTC", "2026-01-01T02:59:59.999", ["2026-01-01T03:00"]),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "zone", "after", "expected"), CASES)
def test_expression_is_due(expression: str, zone: str, after: str, expected: list[str]) -> None:
    timing, now = cron(expression, zone), at(after)
    for instant in expected:
        found = timing.after(now)
        assert found is not None
        assert found == at(instant), found.astimezone(ZoneInfo(zone))
        assert found.tzinfo is UTC
        now = found


@pytest.mark.parametrize(("expression", "zone", "after", "expected"), CASES)
def test_latest_instant_is_one_of_those_that_follow_each_other(
    expression: str, zone: str, after: str, expected: list[str]
) -> None:
    timing = cron(expression, zone)
    first = timing.after(at(after) - timedelta(days=1500))
    assert first is not None
    latest = timing.latest(first, at(expected[-1]))
    assert latest == at(expected[-1])
    assert timing.latest(first, first) == first
    between = timing.latest(first, at(expected[-1]) + timedelta(milliseconds=999))
    assert between == latest


def test_period_counts_from_its_start() -> None:
    timing = Timing(None, timedelta(seconds=1.5), "UTC", at("2026-01-01"))
    found = [at("2025-12-31")]
    for _ in range(3):
        found.append(timing.after(found[-1]) or EPOCH)
    assert [one - at("2026-01-01") for one in found[1:]] == [
        timedelta(seconds=1.5), timedelta(seconds=3), timedelta(seconds=4.5)
    ]  # fmt: skip
    assert timing.latest(found[1], at("2026-01-02T00:00:00.2")) == at("2026-01-02T00:00:00")
    assert timing.latest(found[1], at("2026-01-01T00:00:01.6")) == found[1]


@pytest.mark.parametrize(
    ("expression", "field", "position"),
    [
        ("0 25 * * *", "hour", 3),
        ("60 * * * *", "minute", 1),
        ("* * 0 * *", "day of month", 5),
        ("* * 32 * *", "day of month", 5),
        ("* * * 13 *", "month", 7),
        ("* * * * 8", "day of week", 9),
        ("* * * * MUN", "day of week", 9),
        ("* * * Januar *", "month", 7),
        ("0 3x * * *", "hour", 4),
        ("0 1,2,x * * *", "hour", 7),
        ("0 1,,2 * * *", "hour", 5),
        ("0 5-3 * * *", "hour", 5),
        ("0 5- * * *", "hour", 5),
        ("0 5-99 * * *", "hour", 5),
        ("*/0 * * * *", "minute", 3),
        ("*/x * * * *", "minute", 3),
        ("*/ * * * *", "minute", 3),
        ("*x * * * *", "minute", 1),
        ("* * * * 5#6", "day of week", 11),
        ("* * ? * *", "day of month", 5),
        ("61 * * * * *", "second", 1),
        ("0 61 * * * *", "minute", 3),
        ("  0 25 * * *", "hour", 5),
        ("*/70 * * * *", "minute", 3),
        ("0-59/90 * * * *", "minute", 6),
        ("5/70 * * * *", "minute", 3),
        ("0 */25 * * *", "hour", 5),
        ("* * * * SAT-MON", "day of week", 13),
        ("0 0 30 2 *", "day of month", 5),
        ("0 0 31 4,6 *", "day of month", 5),
        ("* * * *", None, 8),
        ("* * * * * * *", None, 13),
        ("", None, 1),
        ("@often", None, 1),
        ("  @dayly", None, 3),
        ("-5 * * * *", "minute", 1),
        ("٣ * * * *", "minute", 1),
    ],
)
def test_mistake_is_rejected_with_its_place(
    expression: str, field: str | None, position: int
) -> None:
    with pytest.raises(InvalidCron) as caught:
        check_cron(expression)
    assert (caught.value.field, caught.value.position) == (field, position), str(caught.value)
    assert (caught.value.argument, caught.value.value) == ("cron", expression)


@pytest.mark.parametrize(
    ("with_sunday", "same"),
    [
        ("MON-SUN", "*"),
        ("sat-sun", "0,6"),
        ("5-SUN", "0,5,6"),
        ("MON-SUN/2", "0,1,3,5"),
        ("TUE,SAT-SUN", "0,2,6"),
        ("SUN-SUN", "0"),
        ("SUN-MON", "0,1"),
    ],
)
@pytest.mark.parametrize("others", ["0 3 * *", "30 0 3 * *"])
def test_range_of_weekdays_may_end_with_sunday(others: str, with_sunday: str, same: str) -> None:
    found, expected = (
        [*islice(cron(f"{others} {one}").between(EPOCH, EPOCH + timedelta(days=30)), 30)]
        for one in (with_sunday, same)
    )
    assert found == expected


@pytest.mark.parametrize("expression", ["*/60 * * * *", "0 */24 * * *", "0 0 */31 * *"])
def test_step_may_be_as_large_as_the_range(expression: str) -> None:
    assert check_cron(expression) == expression


@pytest.mark.parametrize("given", [None, 5, ["0"], "0 " * 500])
def test_expression_is_a_short_text(given: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check_cron(given)
    assert caught.value.argument == "cron"


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("Europe/Berlni", "Europe/Berlin"),
        ("europe/berlin", "Europe/Berlin"),
        ("Berlin", "Europe/Berlin"),
        ("New York", "America/New_York"),
        ("localtime", None),
        ("LocalTime", None),
        ("posixrules", None),
        ("posix/Europe/Berlin", "Europe/Berlin"),
        ("right/Europe/Berlin", "Europe/Berlin"),
        ("../../etc/passwd", None),
        ("Europe", None),
        ("", None),
        (5, None),
        ("x" * 10_000, None),
    ],
)
def test_unknown_zone_is_rejected_with_the_closest_names(
    name: object, suggested: str | None
) -> None:
    with rejecting("timezone", name) as caught:
        check_zone(name)
    assert suggested is None or suggested in caught.value.closest
    assert not any("localtime" in zone or "/posix" in zone for zone in caught.value.closest)
    assert all(zone in str(caught.value) for zone in caught.value.closest)
