"""The log of an archive: numbered entries that list the committed files.

    _log/00000001.json   begun      a run has taken over; earlier runs can no longer commit
    _log/00000002.json   archived   these files hold tasks, and have been verified
    _log/00000003.json   purged     the tasks of that run are deleted from MongoDB
    _log/00000004.json   compacted  these files replace those

An entry is committed once its file exists, and each number can be used once. A run commits under
the number after the last entry it knows. If another run has begun since, the number is taken, and
the run stops before it deletes anything that it has not committed. Readers ignore files that no
entry lists, so a killed run leaves nothing that they see.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal
from urllib.parse import unquote

from pydantic import Field, ValidationError

from microqueue.errors import PipelineError
from microqueue.model import Model
from microqueue.spark import error_codes
from microqueue.spark.storage import Storage

DIRECTORY = "_log"
DAY, QUEUE = "day=", "queue="


class ArchiveConflict(PipelineError):
    """Another run has taken over the archive ``path``; nothing of this one is lost."""


class ArchivedFile(Model):
    """A Parquet file of the archive, and how many tasks it holds."""

    name: str
    rows: int
    size: int
    long_queue: str | None = None
    """The queue's whole name, if the path has it shortened."""

    @property
    def day(self) -> str:
        """The day of its tasks, as in its path."""
        return _value_in_path(self.name, DAY)

    @property
    def queue(self) -> str:
        """The queue of its tasks."""
        return self.queue_in_path if self.long_queue is None else self.long_queue

    @property
    def queue_in_path(self) -> str:
        """The queue's name in the path, which may be shortened."""
        return _value_in_path(self.name, QUEUE)


def _value_in_path(name: str, prefix: str) -> str:
    found = next(part for part in name.split("/") if part.startswith(prefix))
    return unquote(found.removeprefix(prefix))


class Version(Model):
    """A version of a task: its id, and when it last changed, in milliseconds since 1970."""

    id: str
    id_type: str | None
    updated_ms: int


class Entry(Model):
    """One entry of the log.

    Attributes:
        kind: What happened; see the top of this module.
        run: The id of the run.
        at: When it was committed.
        place: The database and collection of the tasks.
        cutoff: Tasks that finished before this instant were archived.
        files: The files that are committed.
        removed: The files that they replace.
        superseded: Archived versions that do not count, as the task changed before it could
            be deleted.
        deleted: How many tasks were deleted from MongoDB.
        dead_letters: Where the run found dead letters; entries of old versions lack it.
    """

    kind: Literal["begun", "archived", "purged", "compacted"]
    run: str
    at: datetime
    place: str = ""
    cutoff: datetime | None = None
    files: tuple[ArchivedFile, ...] = ()
    removed: tuple[str, ...] = ()
    superseded: tuple[Version, ...] = Field(default=())
    deleted: int = 0
    dead_letters: Literal["status", "collection"] | None = None


@dataclass
class ArchiveState:
    """The sum of all entries."""

    number: int = 0
    runs: set[str] = field(default_factory=set)
    files: dict[str, ArchivedFile] = field(default_factory=dict)
    unpurged: dict[str, Entry] = field(default_factory=dict)
    superseded: set[tuple[str, Version]] = field(default_factory=set)
    """Runs and the versions that do not count in their files; they may count in those of others."""

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> ArchiveState:
        """Apply the entries in order."""
        state = cls()
        for entry in entries:
            state.add(entry)
        return state

    def add(self, entry: Entry) -> None:
        """Apply one more entry."""
        self.number += 1
        self.runs.add(entry.run)
        for name in entry.removed:
            self.files.pop(name, None)
        self.files.update({file.name: file for file in entry.files})
        self.superseded.update((entry.run, version) for version in entry.superseded)
        if entry.kind == "archived":
            self.unpurged[entry.run] = entry
        elif entry.kind == "purged":
            self.unpurged.pop(entry.run, None)


class ArchiveLog:
    """The log of one archive, as one run reads and writes it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.state = self.read()

    @classmethod
    def of_archive(cls, storage: Storage) -> ArchiveLog:
        """Open the log of an existing archive; raise if the path has none."""
        log = cls(storage)
        if not log.state.number:
            raise PipelineError(
                f"there is no archive at {storage.root}: it has no {DIRECTORY}; "
                "give the path that `microqueue pipeline archive` writes to",
                code=error_codes.NO_ARCHIVE,
                path=storage.root,
            )
        return log

    def read(self) -> ArchiveState:
        """Read all entries from the storage."""
        names = sorted(
            info.name for info in self._storage.list(DIRECTORY) if info.name.endswith(".json")
        )
        return ArchiveState.of(self._entry(name) for name in names)

    def commit(self, entry: Entry) -> None:
        """Add an entry under the next number.

        Raises:
            ArchiveConflict: The number is taken: another run has begun.
        """
        name = f"{DIRECTORY}/{self.state.number + 1:08}.json"
        text = entry.model_dump_json(exclude_defaults=True)
        if not self._storage.write_new(name, text):
            raise ArchiveConflict(
                f"another run has taken over the archive {self._storage.root}; this run stopped "
                "before its next step. Run it again to finish what is left",
                code=error_codes.TAKEN_OVER,
                path=self._storage.root,
            )
        self.state.add(entry)

    def _entry(self, name: str) -> Entry:
        try:
            return Entry.model_validate_json(self._storage.read(name))
        except (ValidationError, UnicodeDecodeError) as exc:
            raise PipelineError(
                f"{self._storage.path(name)} is not a log entry of an archive: {exc}",
                code=error_codes.DAMAGED_LOG,
                path=self._storage.path(name),
            ) from exc
