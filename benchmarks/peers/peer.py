"""What a queue must offer to be measured beside others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

from benchmarks.peers.notes import Notes

PROCESSES = 2
"""Processes that handle tasks, of every peer."""


class Server(Enum):
    """A kind of server."""

    MONGODB = "MongoDB"
    POSTGRESQL = "PostgreSQL"
    REDIS = "Redis"


class Producer(Protocol):
    """Adds tasks, as fast as the peer can."""

    def one(self, payload: dict[str, Any]) -> None:
        """Add one task."""

    def many(self, payloads: list[dict[str, Any]]) -> None:
        """Add many tasks."""


@dataclass(frozen=True)
class Peer(ABC):
    """A queue on a running server. Plain data, so that it can be passed to other processes.

    Attributes:
        server: The address of the server.
        name: What the table calls it.
        runs_on: The kind of server.
        settings: What differs from its defaults, and when tasks are acknowledged.
        worker_processes: Processes to start; each calls ``work``.
        acknowledges: Whether tasks are acknowledged after the handler, so that a crash loses none.
        max_tasks: Tasks per drain at most, because it is slow.
    """

    server: str
    name: ClassVar[str]
    runs_on: ClassVar[Server]
    settings: ClassVar[str]
    worker_processes: ClassVar[int] = PROCESSES
    acknowledges: ClassVar[bool] = True
    max_tasks: ClassVar[int | None] = None

    @abstractmethod
    def fresh(self) -> AbstractContextManager[Any]:
        """Yield the address of an empty queue, and delete it afterwards."""

    @abstractmethod
    def producer(self, address: Any) -> AbstractContextManager[Producer]:
        """Yield a producer that is connected."""

    @abstractmethod
    def work(self, address: Any, notes: Notes, *, drain: bool) -> None:
        """Handle tasks: note each start, and each acknowledgement if it comes after the handler.

        Args:
            address: The queue.
            notes: Where to note. ``notes.await_go()`` is called before the first task is taken.
            drain: Return when no task is left, if the peer can; else run until terminated.
        """
