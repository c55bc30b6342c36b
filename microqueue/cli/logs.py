"""How log lines look on stderr: for people, or as JSON for machines."""

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
"""What workers use; at the level of an app they would say more than the app does."""
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
    """One line per record, without passwords; tracebacks of our own only if they are wanted."""

    def __init__(self, *, tracebacks: bool) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        """Write a record as a line."""
        record = copy.copy(record)  # Other handlers get the traceback.
        record.exc_text = None  # Another handler may have kept its own.
        if _is_of(record.name, "microqueue") and not self._tracebacks:
            record.exc_info = None
        return _without_secrets(record, super().format(record).rstrip("\n"))


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
        return _without_secrets(record, formats.to_json(fields))


class Handler(logging.StreamHandler[TextIO]):
    """Writes records to stderr, but for those that a handler of the app prints, too."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless somebody else does."""
        # At each record: an app may set its logging up at any time after us.
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
    """Log to stderr what microqueue says, or, with ``of_app``, what all loggers say.

    Of the libraries that a worker uses, only warnings are logged, unless debugging. The traceback
    of a handler that failed is the app's own matter, and is shown.
    """
    handler = Handler()
    text = TextFormatter(tracebacks=debug or of_app)
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else text)
    own, root = logging.getLogger("microqueue"), logging.getLogger()
    for logger in (own, root):
        logger.handlers = [one for one in logger.handlers if not isinstance(one, Handler)]
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
    """Tell whether a handler writes to stdout or stderr; one of rich has a console for that."""
    stream = getattr(handler, "stream", None) or getattr(
        getattr(handler, "console", None), "file", None
    )
    terminals = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return stream is not None and any(stream is one for one in terminals)


def _is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _without_secrets(record: logging.LogRecord, text: str) -> str:
    """Mask secrets; of what an app says, only those in addresses of MongoDB."""
    if any(_is_of(record.name, package) for package in ("microqueue", *LIBRARIES)):
        return without_password(text)
    return without_mongodb_user(text)
