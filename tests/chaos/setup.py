"""What all processes of a run know: the folder, the servers, and the settings of the queues."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from microqueue import BackoffPolicy, QueueSettings
from tests.chaos.ledger import now

VARIABLE = "CHAOS_RUN"
"""The environment variable with the path of :data:`FILE`; it also marks the processes of a run."""
FILE = "setup.json"
ORDERED = "ordered"
"""The queue with a single consumer."""
HOSTILE = "hostile"
"""The queue whose handlers end or exhaust their process."""
BATCHED = "batched"
POPPED = "popped"
"""The queue whose consumers pop and settle several tasks by calls."""
MAIN = "main"
DATABASES = {"chaos": "status", "chaos_dlq": "collection"}
"""The databases, and where each keeps its dead letters."""
POOL_SIZE = 20
"""How many connections a client may have to each member, besides the two that watch it."""
BACKOFF = {"base_sec": 0.4, "max_sec": 2.0, "jitter": "equal"}
"""A delay is at least half of what it is without the jitter: see ``Settings.least_backoff``."""
CELERY = "chaos_celery"
"""The database of the Kombu transport."""


def queue_in(database: str, name: str) -> str:
    """Return the name of a queue: no two databases share one."""
    return name if database == "chaos" else f"{name}-dlq"


@dataclass(frozen=True)
class Setup:
    """The constants of a run.

    Attributes:
        folder: Where the ledger is.
        uri: The address for clients, through the proxies; ``{database}`` stands for a name.
        wall_offset: The wall clock minus the monotonic clock, before any clock was changed.
        lease_sec: The length of a lease.
        timeout_sec: How long a handler may run.
        max_attempts: Deliveries of a task in all.
        transactions: Whether the server has transactions.
        mutant: The deliberate fault in the queue, if there is one.
        call_timeout_sec: How long a call may take, if that is not the default.
        kinds: What handlers of the main queues do, and how often, if not as usual.
        seed: Decides which processes start with a wrong clock.
    """

    folder: str
    uri: str
    wall_offset: float
    lease_sec: float
    timeout_sec: float
    max_attempts: int
    transactions: bool
    mutant: str | None = None
    call_timeout_sec: float | None = None
    kinds: dict[str, float] | None = None
    seed: int = 0

    def write(self) -> Path:
        """Write the file that the processes read."""
        path = Path(self.folder) / FILE
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls) -> Self:
        """Read the setup of the run that this process is a part of."""
        values = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
        return cls(**values)

    def address(self, database: str) -> str:
        """Return the URI of a database."""
        return self.uri.replace("{database}", database)

    def queue_settings(self, database: str) -> dict[str, Any]:
        """Return the settings of the queues of a database, as plain values."""
        timeout = self.call_timeout_sec
        return {
            **({} if timeout is None else {"call_timeout": timeout}),
            "visibility_timeout": self.lease_sec,
            "max_attempts": self.max_attempts,
            "max_crashes": self.max_attempts,
            "backoff": dict(BACKOFF),
            "retention": None,
            "dead_letters": DATABASES[database],
            "lock_ttl": 2,
        }

    def settings(self, database: str) -> QueueSettings:
        """Return the settings of the queues of a database."""
        values = self.queue_settings(database)
        return QueueSettings(**{**values, "backoff": BackoffPolicy(**values["backoff"])})

    def wall(self) -> float:
        """Return the right wall clock, whatever was done to that of this process."""
        return now() + self.wall_offset

    def monotonic(self, wall: float) -> float:
        """Convert a server's time, in seconds since 1970, to the monotonic clock."""
        return wall - self.wall_offset
