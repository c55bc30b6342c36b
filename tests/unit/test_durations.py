from __future__ import annotations

import re
from datetime import timedelta

import pytest

from microqueue.durations import (
    FORMS,
    NEGATIVE,
    TOO_LONG,
    check_duration,
    read_duration,
    write_duration,
)
from microqueue.model import shorten
from tests.rejection import rejecting


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (timedelta(0), "0 s"),
        (timedelta(seconds=1.5), "1.5 s"),
        (timedelta(seconds=20), "20 s"),
        (timedelta(microseconds=1), "0.000001 s"),
        (timedelta(minutes=90), "1 h 30 m"),
        (timedelta(days=36_501, seconds=1), "36501 d 1 s"),
        (timedelta(seconds=-5), "-5 s"),
    ],
)
def test_durations_are_told_exactly_and_as_people_write_them(
    duration: timedelta, text: str
) -> None:
    assert write_duration(duration) == shorten(duration) == text
    if duration >= timedelta(0) and duration.days < 36_500:
        assert read_duration(text) == duration


def test_rejected_duration_is_shown_as_people_write_it() -> None:
    with rejecting("delay", timedelta(seconds=-5)) as caught:
        check_duration("delay", timedelta(seconds=-5))
    assert "delay=-5 s" in str(caught.value)
    assert str(caught.value.__cause__) == NEGATIVE


@pytest.mark.parametrize(("text", "says"), [("5x", FORMS), ("99999d", TOO_LONG)])
def test_text_that_is_no_duration_is_rejected(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        read_duration(text)
