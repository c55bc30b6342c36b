"""Processor time of the server, if it runs on this machine."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

PROC = Path("/proc")


def server_pid(uri: str) -> int | None:
    """Return the process of a ``mongod`` on this machine; None if it cannot be seen here."""
    client: MongoClient[Any] = MongoClient(uri)
    try:
        status = client.admin.command("serverStatus")
    except PyMongoError:  # For example, the user may not ask that.
        return None
    finally:
        client.close()
    host, pid = str(status["host"]).partition(":")[0], int(status["pid"])
    if host != socket.gethostname() or _name_of(pid) != "mongod":
        return None
    return pid


def _name_of(pid: int) -> str | None:
    try:
        return (PROC / str(pid) / "comm").read_text(encoding="utf-8").strip()
    except OSError:
        return None


def spent_sec(pid: int) -> float:
    """Return the processor time of a process since its start: of the user and of the system.

    It is the sum of ``utime`` and ``stime`` in ``/proc/PID/stat``, but in nanoseconds instead of
    hundredths of a second. Each process of Linux has such a clock.
    """
    assert sys.platform == "linux"
    return time.clock_gettime((~pid << 3) | 2)  # As clock_getcpuclockid() of the C library does.
