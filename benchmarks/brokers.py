"""The brokers that Celery is measured with: microqueue's transport, and two of Kombu's own."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pymongo import MongoClient

from benchmarks.database import fresh_database

MICROQUEUE = "microqueue"
KOMBU_MONGODB = "Kombu MongoDB"
KOMBU_REDIS = "Kombu Redis"
INSTALL = "./scripts/setup dev,bench"
"""The command that installs what is missing."""
PACKAGES = ("celery", "kombu", "pymongo", "redis")
START_SEC = 15.0
STOP_SEC = 5.0


@dataclass(frozen=True)
class Broker:
    """A broker on this machine.

    Attributes:
        name: What the tables call it.
        fresh: Yields the URL of an empty broker, and empties it afterwards.
    """

    name: str
    fresh: Callable[[], AbstractContextManager[str]]


@contextmanager
def brokers(uri: str) -> Iterator[list[Broker]]:
    """Yield the brokers that are installed; the last one, Redis, runs until the end.

    Args:
        uri: The MongoDB server.
    """
    found = [
        Broker(MICROQUEUE, lambda: _fresh_mongodb(uri, "microqueue+")),
        Broker(KOMBU_MONGODB, lambda: _fresh_mongodb(uri, "")),
    ]
    if missing_redis() is not None:
        yield found
        return
    with redis_server() as url:
        yield [*found, Broker(KOMBU_REDIS, lambda: fresh_redis(url))]


def describe(uri: str) -> list[str]:
    """Return the versions of packages and servers, and what is not measured and why."""
    packages = [f"{name} {version}" for name in PACKAGES if (version := installed_version(name))]
    lines = [
        ", ".join([*packages, f"{os.cpu_count()} processors"]),
        f"{MICROQUEUE} and {KOMBU_MONGODB}: {describe_mongodb(uri)}",
    ]
    if (reason := missing_redis()) is not None:
        return [*lines, f"{KOMBU_REDIS} is not measured: {reason}. To install it: {INSTALL}"]
    return [*lines, f"{KOMBU_REDIS}: {describe_redis()}"]


def missing_celery() -> str | None:
    """Return why Celery cannot be measured; None if it can."""
    return None if installed_version("celery") else "the package celery is not installed"


def missing_redis() -> str | None:
    """Return why Redis cannot be measured; None if it can."""
    if not installed_version("redis"):
        return "the package redis is not installed"
    if shutil.which("redis-server") is None:
        return "redis-server is not on the PATH"
    return None


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# MongoDB


def describe_mongodb(uri: str) -> str:
    """Return the version and the kind of a server."""
    client: MongoClient[Any] = MongoClient(uri)
    try:
        version = client.server_info()["version"]
        hosts = client.admin.command("hello").get("hosts", ())
    finally:
        client.close()
    kind = f"a replica set of {len(hosts)}" if hosts else "standalone"
    return f"MongoDB {version}, {kind}"


@contextmanager
def _fresh_mongodb(uri: str, prefix: str) -> Iterator[str]:
    address, _, options = uri.partition("?")
    scheme, _, rest = address.partition("://")
    with fresh_database(uri) as database:
        yield f"{prefix}{scheme}://{rest.partition('/')[0]}/{database.name}?{options}".rstrip("?")


# Redis


def describe_redis() -> str:
    """Return the version of Redis, and how it keeps data."""
    said = subprocess.run(
        ["redis-server", "--version"], capture_output=True, text=True, check=True
    ).stdout
    version = said.partition("v=")[2].partition(" ")[0]
    return f"Redis {version}, snapshots, no append-only file"


@contextmanager
def redis_server() -> Iterator[str]:
    """Run a Redis server on 127.0.0.1, and yield its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="microqueue-redis-") as directory:
        log = Path(directory, "log")
        options = {"bind": "127.0.0.1", "port": port, "dir": directory, "logfile": log}
        arguments = [one for name, value in options.items() for one in (f"--{name}", str(value))]
        process = subprocess.Popen(
            ["redis-server", *arguments, "--appendonly", "no"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end it before its users.
        )
        try:
            _wait_for_redis(process, port, log)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            try:
                process.wait(STOP_SEC)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_redis(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SEC
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(encoding="utf-8") if log.exists() else ""
                raise RuntimeError(f"redis-server did not start: {said}") from None
            time.sleep(0.05)
        else:
            return


@contextmanager
def fresh_redis(url: str) -> Iterator[str]:
    """Empty a Redis server, yield its URL, and empty it again."""
    client = importlib.import_module("redis").Redis.from_url(url)
    try:
        client.flushall()
        yield url
    finally:
        client.flushall()
        client.close()
