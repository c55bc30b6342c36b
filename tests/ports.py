"""Ports for servers that tests start, and addresses where no server is.

The system hands out ports of one range to clients and to servers that ask for any port. A port
of that range that was free a moment ago may be taken when a server starts on it, or starts again.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 10_240
_range = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_OF_THE_SYSTEM = int(_range.read_text().split()[0]) if _range.exists() else 32_768


def free_port(in_a_row: int = 1) -> int:
    """Return a port that is free, and that no one gets by chance; or the first of several."""
    above = FIRST_OF_THE_SYSTEM if FIRST_OF_THE_SYSTEM > 2 * LOWEST else 32_768
    chooser = random.SystemRandom()  # The processes of a test run must not choose the same.
    while True:
        first = chooser.randrange(LOWEST, above - in_a_row)
        if all(is_free(port) for port in range(first, first + in_a_row)):
            return first


def is_free(port: int) -> bool:
    """Return whether a server can be started on a port."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
