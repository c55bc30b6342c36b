from __future__ import annotations

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as usual)

from microqueue.spark.analytics.fingerprint import (
    fingerprint,
    fingerprint_column,
    literals,
    normalise,
    normalised_column,
)

CASES = {
    "order 1234 of 'ada' not found in /var/data/7.csv after 30s": (
        "order <n> of <text> not found in <path> after <n>s"
    ),
    "can't open it, don't try": "can't open it, don't try",
    'user "Ada Lovelace" said `hello`': "user <text> said <text>",
    "HTTP 503 from https://x.example/a?b=1, retry": "HTTP <n> from <url>, retry",
    "user u_8fK29dLm3x4 at 10.0.0.1:8080": "user <id> at <n>",
    "0xDEADbeef in utf8, s3 and ipv4": "<hex> in utf8, s3 and ipv4",
    "task 6650c0ffee0123456789abcd": "task <hex>",
    "task 550e8400-e29b-41d4-a716-446655440000 gone": "task <id> gone",
    r"C:\Users\ada\x.txt is missing": "<path> is missing",
    "late since 2026-05-01T12:00:00.123+02:00": "late since <time>",
    "got -1.5e10 of 3, and order1234": "got -<n> of <n>, and order<n>",
    "ada@example.org bounced": "<email> bounced",
    "either/or, 12/13": "either/or, <n>/<n>",
    "  two\n lines\tand more ": "two lines and more",
    "Zürich 42 — ñandú №7": "Zürich <n> — ñandú №<n>",
    "": "",
}
HOSTILE = [
    "/" * 900,
    "'" * 999,
    "1," * 600,
    "a1b2" * 400,
    "\x00\x1f \u202e\U0001f600 x" * 50,
    "x" * 5000,
    "<n> <text> already masked",
    "ünïcödé1234 ٣٤٥ ४२",
]


@pytest.mark.parametrize(("message", "pattern"), CASES.items())
def test_what_varies_within_a_kind_is_masked(message: str, pattern: str) -> None:
    assert normalise(message) == pattern


def test_spark_and_python_agree_on_every_pattern_and_fingerprint(spark: SparkSession) -> None:
    messages = [*CASES, *HOSTILE, None]
    rows = [(number, message) for number, message in enumerate(messages)]
    frame = spark.createDataFrame(rows, "number int, message string")
    text = F.col("message")
    found = frame.select(
        "number",
        normalised_column(text).alias("pattern"),
        fingerprint_column(F.lit("mail"), F.lit(None).cast("string"), text).alias("fingerprint"),
    ).collect()
    for row in found:
        message = messages[row["number"]]
        assert row["pattern"] == normalise(message)
        assert row["fingerprint"] == fingerprint("mail", None, message)


def test_a_fingerprint_depends_on_queue_code_and_message() -> None:
    kinds = [("a", "x", "m"), ("b", "x", "m"), ("a", "y", "m"), ("a", "x", "k"), ("a", None, "m")]
    assert len({fingerprint(*kind) for kind in kinds}) == len(kinds)
    assert fingerprint("a", "x", "no 1") == fingerprint("a", "x", "no 2")


def test_literals_of_a_pattern_are_in_every_message() -> None:
    assert literals("order <n> of <text> not found") == ["not found", "order", "of"]
    assert literals("<n>") == []
