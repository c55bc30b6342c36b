"""Filters of bindings: patterns of keys, and values of fields."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from itertools import product
from typing import Any

import pytest
from bson import ObjectId

from microqueue import BackoffPolicy, Binding, InvalidArgument
from microqueue.binding import check_filter, key_matches

AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("shop.eu", ["shop.eu"], ["shop", "shop.eu.fr", "shopXeu", ""]),
        ("shop.*", ["shop.eu", "shop."], ["shop", "shop.eu.fr", "a.shop.eu"]),
        ("shop.#", ["shop", "shop.eu", "shop.eu.fr"], ["shops", "a.shop", ""]),
        ("*.eu", ["shop.eu", ".eu"], ["eu", "a.shop.eu"]),
        ("#.eu", ["eu", "shop.eu", "a.shop.eu"], ["eu.shop"]),
        ("a.#.z", ["a.z", "a.b.z", "a.b.c.z", "a.z.z"], ["a", "z", "a.b"]),
        ("#", ["", "a", "a.b"], []),
        ("*", ["a"], ["", "a.b"]),
        ("", [""], ["a", "."]),
    ],
)
def test_key_matches_a_pattern(pattern: str, matching: list[str], others: list[str]) -> None:
    assert check_filter(pattern) == pattern
    assert [key for key in matching if not key_matches(pattern, key)] == []
    assert [key for key in others if key_matches(pattern, key)] == []


def test_patterns_mean_what_a_regular_expression_means() -> None:
    """Compare with an expression over words that end with a dot, for all short patterns."""
    meaning = {"a": r"a\.", "b": r"b\.", "*": r"[^.]+\.", "#": r"([^.]+\.)*"}
    keys = [".".join(words) for n in range(1, 5) for words in product("ab", repeat=n)]
    for n in range(1, 5):
        for words in product(meaning, repeat=n):
            expression = re.compile("".join(meaning[word] for word in words))
            expected = [key for key in keys if expression.fullmatch(key + ".")]
            assert [key for key in keys if key_matches(".".join(words), key)] == expected


def test_pattern_of_many_wildcards_is_quick() -> None:
    assert not key_matches(".".join(["#", "a"] * 60), ".".join(["a"] * 59 + ["b"]))


def accepts(given: Any, body: Any) -> bool:
    binding = Binding(
        topic="t",
        queue="q",
        filter=check_filter(given),
        bound_at=AT,
        max_attempts=1,
        backoff=BackoffPolicy(),
    )
    return binding.accepts("", body)


@pytest.mark.parametrize(
    ("conditions", "body", "expected"),
    [
        ({"country": "FR"}, {"country": "FR", "n": 1}, True),
        ({"country": "FR"}, {"country": "DE"}, False),
        ({"country": "FR"}, {}, False),
        ({"country": "FR", "n": 1}, {"country": "FR", "n": 2}, False),
        ({"order.country": "FR"}, {"order": {"country": "FR"}}, True),
        ({"order.country": "FR"}, {"order.country": "FR"}, False),
        ({"order.country": "FR"}, {"order": "FR"}, False),
        ({"order.0": 1}, {"order": [1]}, False),
        ({"n": 1}, {"n": 1.0}, True),
        ({"n": 1}, {"n": True}, False),
        ({"n": False}, {"n": 0}, False),
        ({"n": True}, {"n": True}, True),
        ({"n": None}, {"n": None}, True),
        ({"n": None}, {}, False),
        ({"n": "$x"}, {"n": "$x"}, True),
        ({"at": AT.replace(microsecond=1)}, {"at": AT}, True),
        ({"id": ObjectId("a" * 24)}, {"id": ObjectId("a" * 24)}, True),
    ],
)
def test_conditions_compare_fields(conditions: Any, body: Any, expected: bool) -> None:
    assert accepts(conditions, body) is expected


@pytest.mark.parametrize(
    "given",
    [
        7,
        [],
        {},
        "shop*",
        "a.#b",
        "k" * 256,
        {"$where": "1"},
        {"a.$b": 1},
        {"": 1},
        {"a..b": 1},
        {3: 1},
        {"a": {"$gt": 1}},
        {"a": [1]},
        {"a": float("nan")},
        {"a": 2**63},
        {"a": "x" * 256},
        {"a" * 256: 1},
        {str(n): n for n in range(21)},
    ],
)
def test_filter_that_is_not_valid(given: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_filter(given)
    assert raised.value.argument == "filter"
