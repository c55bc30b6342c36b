"""Read the source of an ingest: files or a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # It has no types.
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from microqueue.arguments import invalid_argument
from microqueue.spark import error_codes
from microqueue.spark.ingest.rows import CORRUPT
from microqueue.spark.storage import decoded, first_line, qualified

Format: TypeAlias = Literal["csv", "json", "parquet", "table"]
FORMATS = ("csv", "json", "parquet", "table")
CORRUPT_OPTION = "columnNameOfCorruptRecord"
SUFFIXES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json"}
SUFFIXES |= {".parquet": "parquet"}

CSV_OPTIONS: dict[str, str | bool] = {"header": True, "escape": '"', "multiLine": True}
"""CSV as in RFC 4180: quotes are doubled, and quoted fields may contain line ends."""
HEADER_OPTIONS = frozenset({"comment", "quote", "linesep"})
"""Options that change where the header ends: the first line may not be all of it."""
PATTERN = re.compile(r"([*?{}\[\]\\])")
"""The characters of patterns in Hadoop paths; a backslash escapes them."""


@dataclass(frozen=True)
class Source:
    """The rows, their files, and the full name of the source."""

    rows: DataFrame
    files: Sequence[str]
    name: str


def guess_format(source: str | Path) -> Format:
    """Return the format that the end of a path stands for."""
    suffix = Path(str(source).rstrip("/").removesuffix(".gz")).suffix.lower()
    if suffix not in SUFFIXES:
        raise invalid_argument(
            "source",
            str(source),
            f"its suffix names no format: give {', '.join(FORMATS)}",
            code=error_codes.UNKNOWN_FORMAT,
        )
    return SUFFIXES[suffix]  # type: ignore[return-value]  # They are all formats.


def read_source(spark: SparkSession, source: str, kind: str, options: Mapping[str, str]) -> Source:
    """Load the source; CSV and JSON as text, so that the model validates the original values."""
    if kind not in FORMATS:
        raise invalid_argument(
            "source_format",
            kind,
            f"give one of {', '.join(FORMATS)}",
            code=error_codes.UNKNOWN_FORMAT,
        )
    try:
        rows = _read(spark, source, kind, options)
        files = sorted(decoded(spark, uri) for uri in rows.inputFiles())
        if kind == "csv":
            _check_headers(spark, source, files, options)
    except (AnalysisException, Py4JJavaError) as exc:
        message = exc.java_exception.getMessage() if isinstance(exc, Py4JJavaError) else exc
        reason = str(message).strip().partition("\n")[0]
        raise invalid_argument(
            "source", source, f"Spark cannot read it; {reason}", code=error_codes.UNREADABLE
        ) from exc
    name = source if kind == "table" else qualified(spark, source)
    return Source(rows, files, name)


def _read(spark: SparkSession, source: str, kind: str, options: Mapping[str, str]) -> DataFrame:
    match kind:
        case "csv":
            names = _columns(spark, source, options)
            if not names:
                raise invalid_argument(
                    "source",
                    source,
                    "it is empty, without even a header",
                    code=error_codes.EMPTY,
                )
            schema = StructType([StructField(name, StringType()) for name in [*names, CORRUPT]])
            given = {**CSV_OPTIONS, **options, CORRUPT_OPTION: CORRUPT}
            return spark.read.schema(schema).options(**given).csv(source)
        case "json":
            return spark.read.options(**options).text(source).where("trim(value) != ''")
        case "parquet":
            return spark.read.options(**options).parquet(source)
        case _:
            return spark.table(source)


def _columns(spark: SparkSession, path: str, options: Mapping[str, str]) -> list[str]:
    return spark.read.options(**{**CSV_OPTIONS, **options}).csv(path).columns


def _check_headers(
    spark: SparkSession, source: str, files: Sequence[str], options: Mapping[str, str]
) -> None:
    """Raise if the headers of files differ, as Spark would use the first one for all.

    Spark is slow to read a header, so it reads only one of the files that begin with the same
    line.
    """
    given = {name.lower(): str(value).lower() for name, value in options.items()}
    if not files[1:] or given.get("header", "true") != "true":
        return
    plain = HEADER_OPTIONS.isdisjoint(given)
    one_per_header: dict[str, str] = {}
    for file in files:
        line = first_line(spark, file)
        if line is not None:
            is_header = plain and line.strip() and line.count('"') % 2 == 0
            one_per_header.setdefault(line if is_header else file, file)
    headers = {
        file: _columns(spark, PATTERN.sub(r"\\\1", file), options)
        for file in one_per_header.values()
    }
    (first, expected), *others = [(file, names) for file, names in headers.items() if names]
    for file, names in others:
        if names != expected:
            raise invalid_argument(
                "source",
                source,
                f"{first} has the columns {', '.join(expected)}, and {file} has "
                f"{', '.join(names)}; ingest them one by one, or make their headers equal",
                code=error_codes.HEADERS_DIFFER,
            )
