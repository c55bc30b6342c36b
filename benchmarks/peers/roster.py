"""Which queues can be measured on this machine, and with which versions and settings."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks.brokers import (
    INSTALL,
    describe_mongodb,
    describe_redis,
    installed_version,
    missing_redis,
    redis_server,
)
from benchmarks.peers import postgresql
from benchmarks.peers.mongodb_peers import AsyncMicroqueue, BareCeiling, Microqueue, NaiveLoop
from benchmarks.peers.peer import PROCESSES, Peer, Server

PGQUEUER, HUEY, CELERY = "pgqueuer", "huey", "Celery"
OPTIONAL = {
    PGQUEUER: ("benchmarks.peers.pgqueuer_peer", "Pgqueuer"),
    HUEY: ("benchmarks.peers.huey_peer", "Huey"),
    CELERY: ("benchmarks.peers.celery_peer", "CeleryOnRedis"),
}
"""Where the peers are that need their own packages."""
PACKAGES = {
    PGQUEUER: ("pgqueuer", "asyncpg", "uvloop"),
    HUEY: ("huey", "redis"),
    CELERY: ("celery", "redis"),
}


def missing() -> dict[str, str]:
    """Return which peers cannot be measured, and why."""
    found = {}
    for peer, packages in PACKAGES.items():
        absent = [name for name in packages if installed_version(name) is None]
        if absent:
            found[peer] = f"the package {absent[0]} is not installed"
        elif peer == PGQUEUER and postgresql.find_postgres() is None:
            found[peer] = "there is no PostgreSQL server"
        elif peer != PGQUEUER and (reason := missing_redis()) is not None:
            found[peer] = reason
    return found


def kinds() -> list[type[Peer]]:
    """Return what can be measured, microqueue first."""
    absent = missing()
    others: list[type[Peer]] = [
        getattr(importlib.import_module(module), name)
        for peer, (module, name) in OPTIONAL.items()
        if peer not in absent
    ]
    return [Microqueue, AsyncMicroqueue, *others, BareCeiling, NaiveLoop]


@contextmanager
def peers(uri: str) -> Iterator[list[Peer]]:
    """Yield what can be measured; the servers run until the end.

    Args:
        uri: The MongoDB server.
    """
    start = {Server.POSTGRESQL: postgresql.postgresql_server, Server.REDIS: redis_server}
    running = {Server.MONGODB: uri}
    with ExitStack() as servers:
        found = []
        for kind in kinds():
            if kind.runs_on not in running:
                running[kind.runs_on] = servers.enter_context(start[kind.runs_on]())
            found.append(kind(running[kind.runs_on]))
        yield found


def describe(uri: str) -> list[str]:
    """Return the versions, the settings, and what is not measured and why."""
    lines = [
        f"Python {platform.python_version()}, {os.cpu_count()} processors; {PROCESSES} processes "
        "of each peer run handlers that do nothing"
    ]
    for kind in kinds():
        packages = PACKAGES.get(kind.name, ("pymongo",))
        software = [f"{name} {installed_version(name)}" for name in packages]
        software.append(_server(kind.runs_on, uri))
        lines.append(f"{kind.name}: {', '.join(software)}. {kind.settings}")
    return lines + [
        f"{name} is not measured: {reason}. To install it: {INSTALL}"
        for name, reason in missing().items()
    ]


def _server(kind: Server, uri: str) -> str:
    if kind is Server.POSTGRESQL:
        return postgresql.describe()
    if kind is Server.REDIS:
        return describe_redis()
    return f"{describe_mongodb(uri)}, write concern majority, journaled"
