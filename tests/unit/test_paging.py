"""Reading that ends early, in one place or in several."""

from __future__ import annotations

from typing import Any

from microqueue.operations.call import ENOUGH, apply_each
from microqueue.operations.paging import MAPPED, mapping_each, merge_replies


def documents(*ids: Any) -> list[dict[str, Any]]:
    return [{"_id": one, "payload": "large"} for one in ids]


def by_id(document: dict[str, Any]) -> Any:
    return document["_id"]


def test_reading_ends_when_it_is_enough_but_reads_at_least_one() -> None:
    each = mapping_each(lambda document: document["_id"] * 10, lambda: True)
    for _ in range(2):  # A repeated call starts again.
        first, last = apply_each(documents(1, 2, 3), each())
        assert (first["_id"], first[MAPPED]) == (1, 10)
        assert "payload" not in first
        assert last is ENOUGH


def test_replies_of_several_collections_are_merged_in_order_and_once() -> None:
    found, ended = merge_replies([documents(1, 4), documents(2, 4, 5)], by_id)
    assert [one["_id"] for one in found] == [1, 2, 4, 5]
    assert not ended


def test_documents_beyond_the_end_of_a_short_reply_are_left_out() -> None:
    found, ended = merge_replies([[*documents(1, 3), ENOUGH], documents(2, 4, 5)], by_id)
    assert [one["_id"] for one in found] == [1, 2, 3]
    assert ended
