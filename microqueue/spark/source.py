"""The data source that Spark knows as ``microqueue``."""

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

from microqueue.arguments import refused
from microqueue.spark.columns import COMPUTED, KNOWN, ddl
from microqueue.spark.options import SelectionOptions, SinkOptions
from microqueue.spark.value_conversion import reader_of


class MicroqueueSource(DataSource):
    """Tasks as rows. The options are explained in docs/spark.md."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = {name.lower(): value for name, value in options.items()}

    @classmethod
    def name(cls) -> str:
        """Give the name for ``format``."""
        return "microqueue"

    def schema(self) -> str:
        """Give the columns that the options choose, as Spark's DDL."""
        options = SelectionOptions.of(self._given)
        return ddl(options.chosen, options.payload)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make the reader of a batch."""
        from microqueue.spark.read.batch import TaskReader  # noqa: PLC0415 (pyarrow is slow to load)

        return TaskReader(_checked(schema), SelectionOptions.of(self._given))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (the name is Spark's)
        """Make the reader of a stream."""
        try:
            from microqueue.spark.read.stream import TaskStreamReader  # noqa: PLC0415 (as above)
        except ImportError as exc:
            raise ImportError("streams of microqueue need PySpark 4.2 or newer") from exc

        return TaskStreamReader(_checked(schema), SelectionOptions.of(self._given))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 (Spark gives it so)
        """Make the writer of a DataFrame."""
        from microqueue.spark.write.sink import TaskWriter  # noqa: PLC0415 (pyarrow is slow to load)

        _refuse(overwrite=overwrite)
        return TaskWriter(schema, SinkOptions.of(self._given))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: FBT001, N802 (as above)
        """Make the writer of a stream."""
        from microqueue.spark.write.sink import TaskStreamWriter  # noqa: PLC0415 (as above)

        _refuse(overwrite=overwrite)
        return TaskStreamWriter(schema, SinkOptions.of(self._given))


def _refuse(*, overwrite: bool) -> None:
    if overwrite:
        raise refused("mode", "overwrite", "a queue is never overwritten; use append")


def _checked(schema: StructType) -> StructType:
    """Refuse a schema of the caller's own that no task could fill."""
    for field in schema.fields:
        if field.name not in KNOWN:
            raise refused("schema", field.name, f"columns are {', '.join(KNOWN)}")
        if field.name in COMPUTED and field.dataType != KNOWN[field.name]:
            kind = KNOWN[field.name].simpleString()
            raise refused(
                "schema", f"{field.name} {field.dataType.simpleString()}", f"it is {kind}"
            )
        reader_of(field.dataType, field.name)  # Refused here, it costs no job.
    return schema
