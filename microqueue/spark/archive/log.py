"""The log of an archive: which files count, said by one numbered entry after the other.

    _log/00000001.json   begun      a run has taken over; whoever came before can commit no more
    _log/00000002.json   archived   these files hold these tasks, read back and found right
    _log/00000003.json   purged     what the run archived is no longer in MongoDB
    _log/00000004.json   compacted  these files stand for those

An entry counts from the moment its file exists, and a number can be taken once. A run commits
under the number after its own last one: if another run has begun meanwhile, the number is
taken, and the run stops before it could delete what it has not committed. Files that no entry
names do not count, so a run that is killed leaves nothing that is seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal
from urllib.parse import unquote

from pydantic import Field, ValidationError

from microqueue.errors import MicroqueueError
from microqueue.model import Model
from microqueue.spark.storage import Storage

DIRECTORY = "_log"
DAY, QUEUE = "day=", "queue="


class ArchiveConflict(MicroqueueError):
    """Another run of the archive has taken over; nothing of this one is lost."""


class ArchivedFile(Model):
    """A Parquet file of the archive, and how many tasks it holds."""

    name: str
    rows: int
    size: int
    long_queue: str | None = None
    """The queue's whole name, where the path has it shortened."""

    @property
    def day(self) -> str:
        """The day of its tasks, as in its path."""
        return _part(self.name, DAY)

    @property
    def queue(self) -> str:
        """The queue of its tasks."""
        return self.queue_in_path if self.long_queue is None else self.long_queue

    @property
    def queue_in_path(self) -> str:
        """The queue's name in the path, which may be shortened."""
        return _part(self.name, QUEUE)


def _part(name: str, prefix: str) -> str:
    found = next(part for part in name.split("/") if part.startswith(prefix))
    return unquote(found.removeprefix(prefix))


class Version(Model):
    """A task as it was archived: its id, and when it had last changed, in ms from 1970."""

    id: str
    id_type: str | None
    updated_ms: int


class Entry(Model):
    """One step of the archive's history."""

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
    """Where the run found dead letters; old entries do not say."""


@dataclass
class ArchiveState:
    """What all entries together say."""

    number: int = 0
    runs: set[str] = field(default_factory=set)
    files: dict[str, ArchivedFile] = field(default_factory=dict)
    unpurged: dict[str, Entry] = field(default_factory=dict)
    superseded: set[tuple[str, Version]] = field(default_factory=set)
    """Versions that do not count in the files of the run that archived them; they do in others."""

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> ArchiveState:
        """Go through the entries in their order."""
        state = cls()
        for entry in entries:
            state.add(entry)
        return state

    def add(self, entry: Entry) -> None:
        """Take one more entry in."""
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

    @property
    def rows(self) -> int:
        """How many tasks the files hold, superseded ones included."""
        return sum(file.rows for file in self.files.values())


class ArchiveLog:
    """The entries in a storage, as one run reads and writes them."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.state = self.read()

    @classmethod
    def of_archive(cls, storage: Storage) -> ArchiveLog:
        """Open the log of an archive to read; a path that has none is refused."""
        log = cls(storage)
        if not log.state.number:
            raise MicroqueueError(
                f"there is no archive at {storage.root}: it has no {DIRECTORY}; "
                "give the path that was given to `microqueue pipeline archive`"
            )
        return log

    def read(self) -> ArchiveState:
        """Read all entries afresh."""
        names = sorted(
            info.name for info in self._storage.list(DIRECTORY) if info.name.endswith(".json")
        )
        return ArchiveState.of(self._entry(name) for name in names)

    def commit(self, entry: Entry) -> None:
        """Add an entry under the next number, or raise :class:`ArchiveConflict`."""
        name = f"{DIRECTORY}/{self.state.number + 1:08}.json"
        text = entry.model_dump_json(exclude_defaults=True)
        if not self._storage.write_new(name, text):
            raise ArchiveConflict(
                f"another run has taken over the archive {self._storage.root}; this one stopped "
                "before its next step, and running it again finishes what is left"
            )
        self.state.add(entry)

    def _entry(self, name: str) -> Entry:
        try:
            return Entry.model_validate_json(self._storage.read(name))
        except (ValidationError, UnicodeDecodeError) as exc:
            raise MicroqueueError(
                f"{self._storage.path(name)} is not an entry of an archive's log: {exc}"
            ) from exc
