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

from pyspark.errors import IllegalArgumentException
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
        self._hadoop = _jvm(spark).org.apache.hadoop.fs
        given = self._hadoop.Path(str(root))
        self._system = given.getFileSystem(_configuration(spark))
        self._base = self._system.makeQualified(given)
        self.root: str = self._base.toString()
        self._prefix = self.root.removesuffix("/") + "/"

    @classmethod
    def of_file(cls, spark: SparkSession, file: str | Path) -> tuple[Storage, str]:
        """Give the directory that a file is in, and its name there, or raise ``ValueError``.

        It is no file whose name is empty, or has a colon, which Hadoop cannot take.
        """
        try:
            path = _jvm(spark).org.apache.hadoop.fs.Path(str(file))
        except IllegalArgumentException as exc:
            raise ValueError(str(exc)) from exc
        parent, name = path.getParent(), str(path.getName())
        if not name or parent is None or str(file).endswith("/"):
            raise ValueError("it has no name")
        if ":" in name:
            raise ValueError("Hadoop takes no colon in it")
        return cls(spark, parent.toString() or "."), name

    @property
    def disk(self) -> str | None:
        """The directory, if it is on a disk that Python sees as well; else nothing."""
        return self._local("") if urlsplit(self.root).scheme == "file" else None

    def path(self, name: str) -> str:
        """Give the full path of a name, as Spark reads and writes it."""
        return f"{self._prefix}{name}"

    def exists(self, name: str = "") -> bool:
        """Tell whether there is a file or a directory."""
        return bool(self._system.exists(self._path(name)))

    def is_directory(self, name: str = "") -> bool:
        """Tell whether there is a directory."""
        path = self._path(name)
        return bool(self._system.exists(path) and self._system.getFileStatus(path).isDirectory())

    def list(self, under: str = "") -> Iterator[FileInfo]:
        """Give all files below a directory; none, if it does not exist."""
        top = self._path(under)
        if not self._system.exists(top):
            return
        found = self._system.listFiles(top, True)  # noqa: FBT003 (Java has no names here)
        while found.hasNext():
            status = found.next()
            full = status.getPath().toString()
            yield FileInfo(full.removeprefix(self._prefix), int(status.getLen()))

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

    def delete_file(self, name: str) -> None:
        """Delete a file, and never a directory in which something is; it may be gone already."""
        self._system.delete(self._path(name), False)  # noqa: FBT003 (as above)

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
        return self._hadoop.Path(self._base, name) if name else self._base

    def _local(self, name: str) -> str:
        return str(self._path(name).toUri().getPath())


def qualified(spark: SparkSession, path: str) -> str:
    """Give the full name of a path: the same from wherever it is named."""
    return Storage(spark, path).root


def decoded(spark: SparkSession, uri: str) -> str:
    """Give the path that Spark names by a URI, where spaces and others are written in hex."""
    jvm = _jvm(spark)
    return str(jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(uri)).toString())


def first_line(spark: SparkSession, path: str) -> str | None:
    """Read the first line of a file, compressed or not; each byte is a character."""
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
    return spark.sparkContext._jvm  # noqa: SLF001 (Spark offers its file systems in no other way)


def _configuration(spark: SparkSession) -> Any:
    return spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001 (as above)


def sync(path: Path) -> None:
    """Have the disk hold what was written, before anything relies on it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
