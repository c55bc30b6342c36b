from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from microqueue.spark.archive.parquet import digest

AT = datetime(2026, 5, 1, 12, tzinfo=UTC)
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("blob", pa.binary()),
        ("count", pa.int32()),
        ("share", pa.float64()),
        ("flag", pa.bool_()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("error", pa.struct([("message", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])),
        ("history", pa.list_(pa.struct([("attempt", pa.int32())]))),
    ]
)
FULL: dict[str, Any] = {
    "text": "ä",
    "blob": b"\0x",
    "count": 3,
    "share": float("nan"),
    "flag": True,
    "at": AT,
    "error": {"message": "m", "at": AT},
    "history": [{"attempt": 1}, None, {"attempt": None}],
}
EMPTY: dict[str, Any] = {"text": "", "blob": b"", "count": 0, "share": 0.0, "flag": False}
EMPTY |= {"error": {"message": None, "at": None}, "history": []}
ROWS = [FULL, {}, EMPTY, {**FULL, "history": None}, {}, FULL]


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def test_equal_rows_have_the_same_digest_in_memory_and_on_disk(
    tmp_path: Path,
) -> None:
    rows = table(ROWS)
    expected = digest(rows)
    pq.write_table(rows, tmp_path / "file.parquet", row_group_size=2)
    assert digest(pq.read_table(tmp_path / "file.parquet")) == expected
    assert digest(pa.concat_tables([table(ROWS[:1]), table([]), table(ROWS[1:])])) == expected
    assert digest(table([{}, *ROWS, {}]).slice(1, len(ROWS))) == expected
    # Anything may stand where a null is.
    hidden = pa.array([1, 2], mask=pa.array([False, True]).to_numpy(zero_copy_only=False))
    assert digest(pa.table({"n": hidden})) == digest(pa.table({"n": pa.array([1, None])}))


@pytest.mark.parametrize(
    "other",
    [
        [*ROWS, {}],
        ROWS[::-1],
        [{**FULL, "text": None}, *ROWS[1:]],
        [{**FULL, "blob": b"\0y"}, *ROWS[1:]],
        [{**FULL, "share": None}, *ROWS[1:]],
        [{**FULL, "error": None}, *ROWS[1:]],
        [{**FULL, "history": [None, {"attempt": 1}, {"attempt": None}]}, *ROWS[1:]],
        [FULL, EMPTY, {}, *ROWS[3:]],
        [FULL, {}, {**EMPTY, "history": None}, *ROWS[3:]],
        [FULL, {}, {**EMPTY, "error": None}, *ROWS[3:]],
    ],
)
def test_any_other_value_has_another_digest(other: list[dict[str, Any]]) -> None:
    assert digest(table(other)) != digest(table(ROWS))


def test_text_that_moves_to_the_next_row_has_another_digest() -> None:
    one, other = (pa.table({"text": texts}) for texts in (["ab", "c"], ["a", "bc"]))
    assert digest(one) != digest(other)
