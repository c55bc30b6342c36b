"""Log to stderr: as text for people, or as JSON for machines."""

from __future__ import annotations

import copy
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import TextIO

from microqueue.cli import formats
from microqueue.masking import without_mongodb_user, without_password

LIBRARIES = ("pymongo", "motor", "asyncio", "watchfiles")
"""Libraries that a worker uses. At the app's log level they would drown its own messages."""
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogLevel(StrEnum):
    """The lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """The format of a log line."""

    TEXT = "text"
    JSON = "json"


class TextFormatter(logging.Formatter):
    """Formats one line per record, without passwords; microqueue's tracebacks only on request."""

    def __init__(self, *, tracebacks: bool) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as a line."""
        record = copy.copy(record)  # Other handlers still need the traceback.
        record.exc_text = None  # Another handler may have cached its own.
        if _is_of(record.name, "microqueue") and not self._tracebacks:
            record.exc_info = None
        return _without_secrets(record, super().format(record).rstrip("\n"))


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: time, level, logger, message, and extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as JSON."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS},
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return _without_secrets(record, formats.json_text(fields))


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes records to stderr, except those that a handler of the app prints."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless a handler of the app prints it."""
        # Checked per record, because the app may configure its logging at any time.
        if not self._is_printed_elsewhere(record):
            super().emit(record)

    def _is_printed_elsewhere(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            for one in logger.handlers:
                if one is not self and record.levelno >= one.level and _prints(one):
                    return True
            logger = logger.parent if logger.propagate else None
        return False


def configure_logging(
    level: LogLevel, form: LogFormat, *, debug: bool, of_app: bool = False
) -> None:
    """Log microqueue's records to stderr.

    Args:
        level: The lowest level to log.
        form: Text or JSON.
        debug: Also log tracebacks, and the debug records of libraries.
        of_app: Log all loggers. Of :data:`LIBRARIES`, only warnings are logged; tracebacks are
            logged, because those of failed handlers belong to the app.
    """
    handler = StderrHandler()
    text = TextFormatter(tracebacks=debug or of_app)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else text)
    own, root = logging.getLogger("microqueue"), logging.getLogger()
    for logger in (own, root):
        logger.handlers = [one for one in logger.handlers if not isinstance(one, StderrHandler)]
    number = logging.getLevelNamesMapping()[level.value.upper()]
    own.setLevel(number)
    if not of_app:
        own.addHandler(handler)
        return
    root.addHandler(handler)
    root.setLevel(number)
    for name in LIBRARIES:
        quiet = logging.NOTSET if debug else max(number, logging.WARNING)
        logging.getLogger(name).setLevel(quiet)


def _prints(handler: logging.Handler) -> bool:
    """Return whether a handler writes to stdout or stderr; rich's handler has a console."""
    stream = getattr(handler, "stream", None) or getattr(
        getattr(handler, "console", None), "file", None
    )
    terminals = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return stream is not None and any(stream is one for one in terminals)


def _is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _without_secrets(record: logging.LogRecord, text: str) -> str:
    """Mask secrets; in records of the app, only credentials in MongoDB URIs."""
    if any(_is_of(record.name, package) for package in ("microqueue", *LIBRARIES)):
        return without_password(text)
    return without_mongodb_user(text)
