"""Files on any file system that Spark can use: a disk, HDFS, an object store."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from pyspark.errors import IllegalArgumentException
from pyspark.sql import SparkSession


@dataclass(frozen=True)
class FileInfo:
    """A file: its name from the root of the storage, and its size in bytes."""

    name: str
    size: int


class Storage:
    """A directory, through the Hadoop file systems that come with Spark.

    Names are relative to the root, with slashes.
    """

    def __init__(self, spark: SparkSession, root: str | Path) -> None:
        self._hadoop = _jvm(spark).org.apache.hadoop.fs
        given = self._hadoop.Path(str(root))
        self._system = given.getFileSystem(_configuration(spark))
        self._base = self._system.makeQualified(given)
        self.root: str = self._base.toString()
        self._prefix = self.root.removesuffix("/") + "/"

    @classmethod
    def of_file(cls, spark: SparkSession, file: str | Path) -> tuple[Storage, str]:
        """Return the directory of a file, and its name there.

        Raises:
            ValueError: The name is empty, or has a colon, which Hadoop does not support.
        """
        try:
            path = _jvm(spark).org.apache.hadoop.fs.Path(str(file))
        except IllegalArgumentException as exc:
            raise ValueError(str(exc)) from exc
        parent, name = path.getParent(), str(path.getName())
        if not name or parent is None or str(file).endswith("/"):
            raise ValueError("the path has no file name")
        if ":" in name:
            raise ValueError("Hadoop allows no colon in file names")
        return cls(spark, parent.toString() or "."), name

    @property
    def disk(self) -> str | None:
        """The directory, if it is on a local or mounted disk; ``None`` otherwise."""
        return self._local("") if urlsplit(self.root).scheme == "file" else None

    def path(self, name: str) -> str:
        """Return the full path of a name, as Spark uses it."""
        return f"{self._prefix}{name}"

    def exists(self, name: str = "") -> bool:
        """Return whether there is a file or a directory."""
        return bool(self._system.exists(self._path(name)))

    def is_directory(self, name: str = "") -> bool:
        """Return whether there is a directory."""
        path = self._path(name)
        return bool(self._system.exists(path) and self._system.getFileStatus(path).isDirectory())

    def list(self, under: str = "") -> Iterator[FileInfo]:
        """Yield all files below a directory; none, if it does not exist."""
        top = self._path(under)
        if not self._system.exists(top):
            return
        found = self._system.listFiles(top, True)  # noqa: FBT003 (Java has no names here)
        while found.hasNext():
            status = found.next()
            full = status.getPath().toString()
            yield FileInfo(full.removeprefix(self._prefix), int(status.getLen()))

    def children(self, under: str) -> Sequence[str]:
        """Return the names of the files and directories in a directory, if it exists."""
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
        """Move a file to a name that does not exist, and create missing directories."""
        destination = self._path(target)
        self._system.mkdirs(destination.getParent())
        if not self._system.rename(self._path(source), destination):
            raise FileExistsError(f"cannot move {source} to {target} in {self.root}")

    def sync_files(self, names: Iterable[str]) -> None:
        """Flush files and their directories to disk; other file systems do so themselves."""
        if self.disk is None:
            return
        files = [Path(self._local(name)) for name in names]
        for file in files:
            sync(file)
        for directory in {parent for file in files for parent in file.parents}:
            # A directory that cannot be read was not created by this run.
            with suppress(PermissionError):
                sync(directory)

    def delete(self, name: str) -> None:
        """Delete a file or a whole directory, if it exists."""
        self._system.delete(self._path(name), True)  # noqa: FBT003 (as above)

    def delete_file(self, name: str) -> None:
        """Delete a file, if it exists; never a directory that is not empty."""
        self._system.delete(self._path(name), False)  # noqa: FBT003 (as above)

    def write_new(self, name: str, text: str) -> bool:
        """Write a whole file, and return whether this call created it.

        Of several callers at the same time exactly one succeeds, on a disk and in HDFS. An object
        store must have a rename that fails if the target exists.
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
            local_draft = Path(self._local(draft))
            sync(local_draft)
            try:
                os.link(local_draft, self._local(name))
            except FileExistsError:
                return False
            self.sync_files([name])
            return True
        return bool(self._system.rename(self._path(draft), self._path(name)))

    def _path(self, name: str) -> Any:
        # With two arguments, a colon in a name is not taken for a scheme.
        return self._hadoop.Path(self._base, name) if name else self._base

    def _local(self, name: str) -> str:
        return str(self._path(name).toUri().getPath())


def qualified(spark: SparkSession, path: str) -> str:
    """Return the full name of a path, independent of the working directory."""
    return Storage(spark, path).root


def decoded(spark: SparkSession, uri: str) -> str:
    """Return the path of a URI, in which spaces and others are percent-encoded."""
    jvm = _jvm(spark)
    return str(jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(uri)).toString())


def first_line(spark: SparkSession, path: str) -> str | None:
    """Read the first line of a file, compressed or not, as ISO-8859-1."""
    jvm, configuration = _jvm(spark), _configuration(spark)
    file = jvm.org.apache.hadoop.fs.Path(path)
    codec = jvm.org.apache.hadoop.io.compress.CompressionCodecFactory(configuration).getCodec(file)
    stream = file.getFileSystem(configuration).open(file)
    plain = stream if codec is None else codec.createInputStream(stream)
    reader = jvm.java.io.BufferedReader(jvm.java.io.InputStreamReader(plain, "ISO-8859-1"))
    try:
        line: str | None = reader.readLine()
    finally:
        reader.close()
    return line


def _jvm(spark: SparkSession) -> Any:
    return spark.sparkContext._jvm  # noqa: SLF001 (Spark has no other way to its file systems)


def _configuration(spark: SparkSession) -> Any:
    return spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001 (as above)


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
