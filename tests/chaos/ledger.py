"""The ledger of a run: what each process did, in append-only files outside of MongoDB.

Each process has its own file of lines, one JSON object each. A line is one ``write`` to a file that
was opened with ``O_APPEND``, so SIGKILL leaves whole lines. ``at`` is the monotonic clock, which
all processes of the machine share. Nothing here imports microqueue.

    RUN/ledger/<who>-<pid>.jsonl   what the processes did
    RUN/documents.jsonl            the tasks at the end, in MongoDB and in the archive:
                                   {"collection": ..., "document": ...}
    RUN/run.json                   profile, seed, versions, settings
    RUN/leaks.json                 what was left at the end: {"processes": [...], ...}
    RUN/effects.json               what transactions wrote besides: {"orders": {key: count}, ...}
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bson import json_util

LEDGER = "ledger"
DOCUMENTS = "documents.jsonl"
RUN = "run.json"
LEAKS = "leaks.json"
EFFECTS = "effects.json"
ARCHIVED = "archive"
"""What stands for the name of the collection of tasks that are in the archive."""


def now() -> float:
    """Return the instant, in seconds, by the clock that all processes of the machine share."""
    return time.monotonic()


class Ledger:
    """Writes the lines of one process. Threads may share it; a forked child opens its own.

    Args:
        folder: The folder of the run.
        who: The unique name of the process, such as ``worker-7``.
    """

    def __init__(self, folder: Path | str, who: str) -> None:
        self.who = who
        self.pid = os.getpid()
        lines = Path(folder) / LEDGER
        lines.mkdir(parents=True, exist_ok=True)
        name = f"{who.replace('/', '.')}-{self.pid}.jsonl"
        self._file = os.open(lines / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def write(self, event: str, *, at: float | None = None, **fields: Any) -> None:
        """Append a line.

        Args:
            event: What happened.
            at: When, by :func:`now`; by default, now.
            **fields: What else the event has.
        """
        self.write_all([{"event": event, "at": now() if at is None else at, **fields}])

    def write_all(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append several lines with one write; each has ``event``, and ``at`` unless it is now."""
        instant = now()
        text = "".join(
            json.dumps({"at": instant, "who": self.who, "pid": self.pid, **line}) + "\n"
            for line in lines
        )
        data = text.encode()
        written = os.write(self._file, data)
        if written != len(data):
            raise OSError(f"the ledger took {written} of {len(data)} bytes")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a ledger; ``fields`` has all of it."""

    at: float
    who: str
    pid: int
    event: str
    fields: Mapping[str, Any]


class UnreadableLedger(Exception):
    """A line that is not what a process wrote."""


def read_lines(folder: Path | str, *processes: str) -> Iterator[Line]:
    """Read all lines, file by file; those of one file are in the order they were written in.

    ``processes`` are patterns of names, if not the lines of all processes are of interest.
    """
    names = processes or ("*",)
    place = Path(folder) / LEDGER
    for path in sorted(one for name in names for one in place.glob(f"{name}.jsonl")):
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    fields = json.loads(raw)
                    yield Line(
                        float(fields["at"]), fields["who"], fields["pid"], fields["event"], fields
                    )
                except (ValueError, KeyError, TypeError) as exc:
                    raise UnreadableLedger(f"{path.name}, line {number}: {raw[:200]!r}") from exc


def write_documents(
    folder: Path | str, collections: Mapping[str, Iterable[Mapping[str, Any]]]
) -> int:
    """Write the stored tasks, by the name of their collection; return how many there are."""
    count = 0
    with (Path(folder) / DOCUMENTS).open("w", encoding="utf-8") as file:
        for collection, documents in collections.items():
            for document in documents:
                line = {"collection": collection, "document": dict(document)}
                options = json_util.RELAXED_JSON_OPTIONS
                file.write(json_util.dumps(line, json_options=options) + "\n")
                count += 1
    return count


def read_documents(folder: Path | str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the stored tasks with the names of their collections.

    Values of BSON stay in extended JSON: the verifier needs to know only whether there is a date.
    """
    with (Path(folder) / DOCUMENTS).open("rb") as file:
        for raw in file:
            line = json.loads(raw)
            yield line["collection"], line["document"]


def write_json(folder: Path | str, name: str, value: Any) -> None:
    """Write :data:`RUN` or :data:`LEAKS`."""
    text = json.dumps(value, indent=2, sort_keys=True, default=str)
    (Path(folder) / name).write_text(text + "\n", encoding="utf-8")


def read_json(folder: Path | str, name: str) -> Any:
    """Read :data:`RUN` or :data:`LEAKS`."""
    return json.loads((Path(folder) / name).read_text(encoding="utf-8"))
