"""How a read is split, tested by its calls, without a server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pymongo.errors import ExecutionTimeout

from microqueue.operations import export
from microqueue.operations.export import WHOLE, IdRange


@given(st.lists(st.integers(), max_size=60), st.integers(2, 12))
def test_every_id_is_in_exactly_one_part(sample: list[int], parts: int) -> None:
    found = export.ranges(export.boundaries(sorted(sample), parts))
    assert len(found) <= max(parts, len(sample) + 1)
    for task_id in range(-70, 70):
        inside = [
            part
            for part in found
            if (part.first is None or part.first <= task_id)
            and (part.last is None or task_id < part.last)
        ]
        assert len(inside) == 1


def test_the_sample_comes_before_the_filter() -> None:
    operation = export.split_by_id({"queue": "mail"}, 2)
    assert next(operation).method == "estimated_document_count"
    call = operation.send(1_000_000)
    stages = [next(iter(stage)) for stage in call.arguments[0]]
    assert stages == ["$sample", "$match", "$project", "$sort"]
    assert call.arguments[0][0] == {"$sample": {"size": 200}}
    with pytest.raises(StopIteration) as stopped:
        operation.send([{"_id": n} for n in range(10)])
    assert stopped.value.value == [IdRange(None, 5), IdRange(5, None)]


def test_a_small_collection_is_not_sampled() -> None:
    operation = export.split_by_id({}, 8)
    next(operation)
    with pytest.raises(StopIteration) as stopped:
        operation.send(100)
    assert stopped.value.value == [WHOLE]


def test_a_part_is_read_by_bounds_of_the_index() -> None:
    call = next(export.read_part({}, ["_id"], IdRange("a", None), batch_rows=5))
    assert call.options == {"batch_size": 5, "hint": [("_id", 1)], "min": {"_id": "a"}}
    whole = next(export.read_part({}, ["_id"], WHOLE, batch_rows=5))
    assert whole.options == {"batch_size": 5}


@pytest.mark.parametrize(
    ("selection", "replies", "counted"),
    [
        ({}, [500], 500),
        ({}, [5_000], 1_000),
        ({"queue": "a"}, [900], 900),
        ({"queue": "a"}, [5_000, 7], 7),
        ({"queue": "a"}, [5_000, ExecutionTimeout("slow")], 1_000),
    ],
)
def test_a_count_stops_at_its_limit(
    selection: dict[str, Any], replies: list[Any], counted: int
) -> None:
    operation = export.count_up_to(selection, 1_000)
    next(operation)
    with pytest.raises(StopIteration) as stopped:
        for reply in replies:
            throws = isinstance(reply, Exception)
            operation.throw(reply) if throws else operation.send(reply)
    assert stopped.value.value == counted
