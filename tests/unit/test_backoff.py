from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microqueue import BackoffPolicy, compute_backoff_seconds
from microqueue.backoff import JITTERS, Jitter
from tests.rejection import rejecting


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [(0, 5), (1, 5), (2, 10), (3, 20), (9, 1280), (10, 1800), (1100, 1800), (10**9, 1800)],
)
def test_delay_doubles_from_the_base_up_to_the_maximum(attempts: int, expected: float) -> None:
    assert compute_backoff_seconds(attempts, jitter="none") == expected


@pytest.mark.parametrize(
    ("jitter", "low", "high"),
    [("none", 40, 40), ("full", 0, 40), ("equal", 20, 40), ("additive", 40, 45)],
)
def test_each_jitter_fills_its_own_range(jitter: Jitter, low: float, high: float) -> None:
    rng = random.Random(1)
    delays = [compute_backoff_seconds(4, jitter=jitter, rng=rng) for _ in range(2000)]
    assert low <= min(delays) <= max(delays) <= high
    assert min(delays) - low <= (high - low) * 0.02
    assert high - max(delays) <= (high - low) * 0.02


@pytest.mark.parametrize(("previous", "high"), [(None, 15), (1.0, 15), (20.0, 60), (1e9, 1800)])
def test_decorrelated_jitter_looks_at_the_previous_delay(
    previous: float | None, high: float
) -> None:
    rng = random.Random(2)
    delays = [
        compute_backoff_seconds(3, jitter="decorrelated", previous=previous, rng=rng)
        for _ in range(2000)
    ]
    assert min(delays) >= 5
    assert high * 0.97 <= max(delays) <= high


@given(
    attempts=st.integers(0, 10**9),
    base=st.floats(0, 1e6),
    factor=st.floats(1, 1e6),
    extra=st.floats(0, 1e6),
    jitter=st.sampled_from(JITTERS),
    previous=st.none() | st.floats(0, 1e12),
    seed=st.integers(0, 2**32),
)
def test_delay_is_never_negative_and_never_over_the_maximum(
    attempts: int, base: float, factor: float, extra: float, jitter: Any, previous: Any, seed: int
) -> None:
    delay = compute_backoff_seconds(
        attempts,
        base_sec=base,
        factor=factor,
        max_sec=base + extra,
        jitter=jitter,
        previous=previous,
        rng=random.Random(seed),
    )
    assert 0 <= delay <= base + extra


def test_same_seed_gives_the_same_delays() -> None:
    first = [compute_backoff_seconds(n, rng=random.Random(n)) for n in range(20)]
    assert first == [compute_backoff_seconds(n, rng=random.Random(n)) for n in range(20)]


@pytest.mark.parametrize(
    "options",
    [
        {"factor": 0.5},
        {"base_sec": -1},
        {"base_sec": 10.0, "max_sec": 5},
        {"jitter": "wild"},
        {"max_sec": float("inf")},
        {"factor": float("nan")},
        {"base": 5},
    ],
)
def test_nonsense_is_rejected_when_the_policy_is_made(options: dict[str, Any]) -> None:
    argument, value = next(iter(options.items()))
    with rejecting(argument) as caught:
        BackoffPolicy(**options)
    assert str(caught.value.value) == str(value)  # NaN is not equal to itself.


@pytest.mark.parametrize("attempts", [-1, 1.5, True, "3"])
def test_attempts_that_are_no_count_are_rejected(attempts: Any) -> None:
    with rejecting("attempts"):
        compute_backoff_seconds(attempts)


@pytest.mark.parametrize("previous", ["x", float("nan"), float("inf"), -1, True])
def test_previous_delay_that_is_none_is_rejected(previous: Any) -> None:
    with rejecting("previous"):
        compute_backoff_seconds(3, previous=previous)
    # In a stored task it must not stop a sweep.
    policy = BackoffPolicy(jitter="decorrelated")
    assert 5 <= policy.delay_seconds(3, previous=previous) <= 15


@pytest.mark.parametrize(("argument", "value"), [("rng", 5), ("base_sec", "5"), ("factor", True)])
def test_other_nonsense_is_rejected_by_name(argument: str, value: Any) -> None:
    options: dict[str, Any] = {argument: value}
    with rejecting(argument, value):
        compute_backoff_seconds(3, **options)


@pytest.mark.parametrize(
    ("attempts", "expected"), [(1041, 1e-308 * 2.0**1000 * 2.0**40), (1100, 1e8), (10**9, 1e8)]
)
def test_tiny_base_grows_without_overflow(attempts: int, expected: float) -> None:
    grown = compute_backoff_seconds(attempts, base_sec=1e-308, max_sec=1e8, jitter="none")
    assert grown == pytest.approx(expected)
