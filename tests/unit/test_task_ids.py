"""Ids as text: each is read as what it was, whatever it looks like."""

from __future__ import annotations

import math
from typing import Any
from uuid import UUID

import pytest
from bson import Decimal128, ObjectId

from microqueue.task_ids import candidate_ids, id_key, reference

HEX = "6650c0ffee0123456789abcd"
DASHED = "123e4567-e89b-12d3-a456-426614174000"
LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("order/7", ["order/7"]), ("", []), ("17", [17, "17"]), ('"17"', ["17", '"17"']),
        ("007", ["007"]), ("-17", [-17, "-17"]), ("0", [0, "0"]), ("-0", ["-0"]), ("+1", ["+1"]),
        ("٣", ["٣"]), (str(LARGEST), [LARGEST, str(LARGEST)]), (str(2**63), [str(2**63)]),
        (str(-(2**63)), [-(2**63), str(-(2**63))]), ("9" * 5000, ["9" * 5000]),
        ("1234567890123456789", [1234567890123456789, "1234567890123456789"]),
        (HEX, [ObjectId(HEX), HEX]), (DASHED, [UUID(DASHED), DASHED]),
        (UUID(DASHED).hex, [UUID(DASHED).hex, UUID(DASHED)]), ('"', ['"']), ('"a', ['"a']),
    ],
)  # fmt: skip
def test_text_may_stand_for_ids_of_several_types(text: str, candidates: list[Any]) -> None:
    found = candidate_ids(text)
    assert found == candidates
    assert [type(one) for one in found] == [type(one) for one in candidates]


@pytest.mark.parametrize(
    ("task_id", "text"),
    [
        (17, "17"), ("17", '"17"'), (LARGEST, str(LARGEST)), (str(LARGEST), f'"{LARGEST}"'),
        (ObjectId(HEX), HEX), (HEX, f'"{HEX}"'), (UUID(DASHED), DASHED), (DASHED, f'"{DASHED}"'),
        (UUID(DASHED).hex, UUID(DASHED).hex), ("a b?c", "a b?c"), ('"17"', r'"\"17\""'),
        ("ä", "ä"), ('"', '"'), ("007", "007"),
    ],
)  # fmt: skip
def test_reference_is_read_as_the_very_id(task_id: Any, text: str) -> None:
    assert reference(task_id) == text
    first = candidate_ids(text)[0]
    assert (type(first), first) == (type(task_id), task_id)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, Decimal128("1.0")),
        (2.5, Decimal128("2.5")),
        (math.inf, Decimal128("Infinity")),
        (float("nan"), float("nan")),
        (float("nan"), Decimal128("NaN")),
        (Decimal128("sNaN"), Decimal128("NaN")),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_ids_that_mongodb_takes_for_equal_have_equal_keys(one: Any, other: Any) -> None:
    assert id_key(one) == id_key(other)
    assert hash(id_key(one)) == hash(id_key(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (0, False), (1, "1"), (Decimal128("NaN"), "nan"), (0.1, Decimal128("0.1"))],
)
def test_different_ids_have_different_keys(one: Any, other: Any) -> None:
    assert id_key(one) != id_key(other)
