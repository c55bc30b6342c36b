"""The Spark data source ``microqueue``."""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from microqueue.arguments import invalid_argument
from microqueue.spark import error_codes
from microqueue.spark.columns import ALL_COLUMNS, COMPUTED_COLUMNS, ddl
from microqueue.spark.error_notes import noting
from microqueue.spark.options import SelectionOptions, SinkOptions
from microqueue.spark.value_conversion import reader_of


class MicroqueueSource(DataSource):
    """Tasks as rows. ``docs/spark.md`` describes the options."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = {name.lower(): value for name, value in options.items()}

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "microqueue"

    @noting()
    def schema(self) -> str:
        """Return the columns that the options select, as Spark DDL."""
        options = SelectionOptions.of(self._given)
        return ddl(options.selected_columns, options.payload)

    @noting()
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for a batch."""
        from microqueue.spark.read.batch import TaskReader  # noqa: PLC0415 (pyarrow is slow to load)

        return TaskReader(_check_schema(schema), SelectionOptions.of(self._given))

    @noting()
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (the name is Spark's)
        """Return the reader for a stream."""
        try:
            from microqueue.spark.read.stream import TaskStreamReader  # noqa: PLC0415 (as above)
        except ImportError as exc:
            raise ImportError("streams need PySpark 4.2 or newer") from exc

        return TaskStreamReader(_check_schema(schema), SelectionOptions.of(self._given))

    @noting()
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 (Spark's signature)
        """Return the writer for a DataFrame."""
        from microqueue.spark.write.sink import TaskWriter  # noqa: PLC0415 (pyarrow is slow to load)

        _check_append(overwrite=overwrite)
        return TaskWriter(schema, SinkOptions.of(self._given))

    @noting()
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: FBT001, N802 (as above)
        """Return the writer for a stream."""
        from microqueue.spark.write.sink import TaskStreamWriter  # noqa: PLC0415 (as above)

        _check_append(overwrite=overwrite)
        return TaskStreamWriter(schema, SinkOptions.of(self._given))


def _check_append(*, overwrite: bool) -> None:
    if overwrite:
        raise invalid_argument(
            "mode",
            "overwrite",
            "a queue cannot be overwritten; use append",
            code=error_codes.APPEND_ONLY,
        )


def _check_schema(schema: StructType) -> StructType:
    """Return the schema; raise ``InvalidArgument`` if tasks cannot be read with it."""
    for field in schema.fields:
        if field.name not in ALL_COLUMNS:
            raise invalid_argument(
                "schema",
                field.name,
                f"the columns are {', '.join(ALL_COLUMNS)}",
                code=error_codes.UNKNOWN_COLUMN,
            )
        if field.name in COMPUTED_COLUMNS and field.dataType != ALL_COLUMNS[field.name]:
            kind = ALL_COLUMNS[field.name].simpleString()
            raise invalid_argument(
                "schema",
                f"{field.name} {field.dataType.simpleString()}",
                f"its type is {kind}",
                code=error_codes.WRONG_TYPE,
            )
        reader_of(field.dataType, field.name)  # Fail before a Spark job starts.
    return schema
