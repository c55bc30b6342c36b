"""How log lines look on stderr: for people, or as JSON for machines."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from microqueue.redaction import without_password

_ORDINARY = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogLevel(StrEnum):
    """What is logged to stderr."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a line looks."""

    TEXT = "text"
    JSON = "json"


class TextFormatter(logging.Formatter):
    """One line per record, without passwords; tracebacks only when debugging."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
        self._debug = debug

    def formatException(self, ei: Any) -> str:  # noqa: N802 (the name is logging's)
        """Leave tracebacks out, unless debugging."""
        return super().formatException(ei) if self._debug else ""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as a line."""
        record.exc_text = None  # Another handler may have kept its own.
        return without_password(super().format(record).rstrip("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as JSON."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _ORDINARY},
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return without_password(json.dumps(fields, default=str, ensure_ascii=False))


def configure_logging(level: LogLevel, form: LogFormat, *, debug: bool) -> None:
    """Log what microqueue says, and nothing of other libraries, to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter(debug=debug))
    logger = logging.getLogger("microqueue")
    logger.handlers = [handler]
    logger.setLevel(level.value.upper())
