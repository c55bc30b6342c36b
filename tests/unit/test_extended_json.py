"""BSON values as JSON, and back."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from bson import ObjectId

from microqueue.extended_json import from_json, to_json

INSTANT = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ({"a": [1, 2.5, "ü", None, True]}, '{"a": [1, 2.5, "ü", null, true]}'),
        ({"at": INSTANT}, '{"at": {"$date": "2031-05-06T07:08:09Z"}}'),
        ([ObjectId("6650c0" + "0" * 18)], '[{"$oid": "6650c0000000000000000000"}]'),
        ({"a": math.inf}, '{"a": {"$numberDouble": "Infinity"}}'),
    ],
)
def test_values_are_plain_where_json_has_a_type(value: Any, written: str) -> None:
    assert to_json(value) == written
    assert from_json(written) == value


def test_number_that_is_not_one_is_written_as_such() -> None:
    assert json.loads(to_json(math.nan)) == {"$numberDouble": "NaN"}


@pytest.mark.parametrize("text", ["1e999", '{"$numberLong": "1", "a": 1e999}'])
def test_number_that_would_become_infinite_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="1e999"):
        from_json(text)
