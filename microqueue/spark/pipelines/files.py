"""Files wherever Spark can write: on a disk, in HDFS, in an object store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from pyspark.sql import SparkSession


@dataclass(frozen=True)
class FileInfo:
    """A file: where it is from the root of its storage, and how many bytes it has."""

    name: str
    size: int


class Storage:
    """A directory, reached through Hadoop's file systems, which come with Spark.

    Names are relative to the root, with slashes.
    """

    def __init__(self, spark: SparkSession, root: str | Path) -> None:
        # Spark offers its file systems to Python in no other way.
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001
        self._hadoop = jvm.org.apache.hadoop.fs
        configuration = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001
        given = self._hadoop.Path(str(root))
        self._system = given.getFileSystem(configuration)
        self._base = self._system.makeQualified(given)
        self.root: str = self._base.toString()

    @property
    def disk(self) -> str | None:
        """The directory, if it is on a disk that Python sees as well; else nothing."""
        return self._local("") if urlsplit(self.root).scheme == "file" else None

    def path(self, name: str) -> str:
        """Give the full path of a name, as Spark reads and writes it."""
        return f"{self.root}/{name}"

    def list(self, under: str = "") -> Iterator[FileInfo]:
        """Give all files below a directory; none, if it does not exist."""
        top = self._path(under) if under else self._base
        if not self._system.exists(top):
            return
        found = self._system.listFiles(top, True)  # noqa: FBT003 (Java has no names here)
        while found.hasNext():
            status = found.next()
            full = status.getPath().toString()
            yield FileInfo(full.removeprefix(f"{self.root}/"), int(status.getLen()))

    def children(self, under: str) -> Sequence[str]:
        """Name the files and directories that lie directly in a directory, if it exists."""
        top = self._path(under)
        if not self._system.exists(top):
            return []
        return [f"{under}/{status.getPath().getName()}" for status in self._system.listStatus(top)]

    def read(self, name: str) -> str:
        """Read a whole text file."""
        stream = self._system.open(self._path(name))
        try:
            return bytes(stream.readAllBytes()).decode()
        finally:
            stream.close()

    def move(self, source: str, target: str) -> None:
        """Move a file to a name that does not exist, making directories on the way."""
        destination = self._path(target)
        self._system.mkdirs(destination.getParent())
        if not self._system.rename(self._path(source), destination):
            raise FileExistsError(f"cannot move {source} to {target} in {self.root}")

    def secure(self, names: Iterable[str]) -> None:
        """Have a disk hold files and the way to them; other file systems see to it themselves."""
        if self.disk is None:
            return
        files = [Path(self._local(name)) for name in names]
        for file in files:
            sync(file)
        for directory in {parent for file in files for parent in file.parents}:
            # One that cannot be read was there before: nobody made it just now.
            with suppress(PermissionError):
                sync(directory)

    def delete(self, name: str) -> None:
        """Delete a file or a directory with all that is in it; it may be gone already."""
        self._system.delete(self._path(name), True)  # noqa: FBT003 (as above)

    def write_new(self, name: str, text: str) -> bool:
        """Write a whole file that must not exist yet; tell whether this call made it.

        All or nothing, whoever else tries at the same time, on a disk and in HDFS. An object
        store has to offer a rename that fails when the target exists.
        """
        draft = f"{name}.{uuid4().hex}.draft"
        stream = self._system.create(self._path(draft), False)  # noqa: FBT003 (as above)
        stream.write(text.encode())
        stream.close()
        try:
            return self._publish(draft, name)
        finally:
            self.delete(draft)

    def _publish(self, draft: str, name: str) -> bool:
        if self.disk is not None:
            # A rename on a disk would replace the target; a link never does.
            place = Path(self._local(draft))
            sync(place)
            try:
                os.link(place, self._local(name))
            except FileExistsError:
                return False
            self.secure([name])
            return True
        return bool(self._system.rename(self._path(draft), self._path(name)))

    def _path(self, name: str) -> Any:
        # Two arguments, so that a colon in a name is not taken for a scheme.
        return self._hadoop.Path(self._base, name)

    def _local(self, name: str) -> str:
        return str((self._path(name) if name else self._base).toUri().getPath())


def sync(path: Path) -> None:
    """Have the disk hold what was written, before anything relies on it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
