"""Failed logins: how many are answered per address, and in all, within a period.

While a limit is reached, no token is compared, not even the right one: else guessing could go on
at full speed, and only its failures would look different. Three things keep this from locking out
those who have the token:

- The same wrong token from the same address counts once. It tells a guesser nothing new, and is
  what a scraper or a page with an old token sends again and again.
- An address from which the right token came is held to its own limit alone, not to that of all.
- A session that this process opened is not compared with the token at all; see
  :class:`~microqueue.dashboard.security.Guard`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from fastapi import Request

MOST_ADDRESSES = 1000
IPV6_NETWORK = 64
"""Whoever has one address of an IPv6 network has all of these."""

logger = logging.getLogger("microqueue.dashboard")


class LoginThrottle:
    """Counts failed logins. It remembers a bounded number of addresses.

    Args:
        per_address: How many different wrong tokens an address may give within the period.
        in_all: How many all addresses together may give.
        period_sec: How long a failure counts.
        most_addresses: How many addresses are remembered, of each kind.
    """

    def __init__(
        self,
        *,
        per_address: int,
        in_all: int,
        period_sec: float,
        most_addresses: int = MOST_ADDRESSES,
    ) -> None:
        self.now: Callable[[], float] = time.monotonic
        self._per_address = per_address
        self._in_all = in_all
        self._period_sec = period_sec
        self._most_addresses = most_addresses
        self._salt = secrets.token_bytes(16)
        # By address: when each wrong token came first. The address that failed last is the last.
        self._failures: OrderedDict[str, dict[bytes, float]] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()

    @property
    def size(self) -> int:
        """How many failures and addresses are remembered."""
        return sum(map(len, self._failures.values())) + len(self._known)

    def wait_sec(self, address: str) -> int:
        """Return after how many seconds a login from this address is looked at; 0: now."""
        self._forget()
        own = sorted(self._failures.get(address, {}).values())
        waits = [self._until_below(own, self._per_address)]
        if address not in self._known:
            every = sorted(at for one in self._failures.values() for at in one.values())
            waits.append(self._until_below(every, self._in_all))
        return math.ceil(max(waits))

    def failed(self, address: str, given: str) -> None:
        """Count a wrong token, unless this address gave the same one already; log it."""
        self._forget()
        digest = hashlib.sha256(self._salt + given.encode("utf-8", "replace")).digest()
        own = self._failures.setdefault(address, {})
        if digest in own:
            return
        own[digest] = self.now()
        self._failures.move_to_end(address)
        while len(self._failures) > self._most_addresses:
            self._failures.popitem(last=False)
        logger.warning(
            "failed login from %s: %d in the last %g s, %d from all addresses%s",
            address,
            len(own),
            self._period_sec,
            sum(map(len, self._failures.values())),
            self._consequence(address),
        )

    def succeeded(self, address: str, *, reset: bool = False) -> None:
        """Note that the right token came from this address; ``reset`` forgives its failures."""
        if reset:
            self._failures.pop(address, None)
        self._known[address] = None
        self._known.move_to_end(address)
        while len(self._known) > self._most_addresses:
            self._known.popitem(last=False)

    def _consequence(self, address: str) -> str:
        seconds = self.wait_sec(address)
        return f"; more are rejected for {seconds} s" if seconds else ""

    def _until_below(self, instants: list[float], most: int) -> float:
        """Return how long it takes until fewer than ``most`` of these count."""
        if len(instants) < most:
            return 0.0
        return instants[-most] + self._period_sec - self.now()

    def _forget(self) -> None:
        """Drop the failures whose time is over."""
        oldest = self.now() - self._period_sec
        for address, own in list(self._failures.items()):
            for digest in [digest for digest, at in own.items() if at <= oldest]:
                del own[digest]
            if not own:
                del self._failures[address]


def address_of(request: Request) -> str:
    """Name where a request came from: the peer's address, or its network if that is IPv6.

    ``X-Forwarded-For`` is not read: anybody may write it. A server that is told to trust a proxy
    puts the address of the client in place of the proxy's.
    """
    host = request.client.host if request.client else "unknown"
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, IPV6_NETWORK), strict=False))
