"""What a run leaves behind: processes, threads, connections and cursors. It should be nothing.

A process that ends takes its connections and cursors with it. So they are also counted while the
processes live, and have nothing to do any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pymongo.errors import PyMongoError

from tests.chaos.fleet import processes_of
from tests.chaos.ledger import read_lines
from tests.chaos.servers import Servers
from tests.chaos.setup import CELERY, DATABASES, FILE, POOL_SIZE
from tests.integration.replica_set import APP_NAME, Member
from tests.waiting import wait_for

CLOSED_SEC = 60.0
"""How long servers on a busy machine may take to notice that a connection is closed."""
MOST_CURSORS = 120
"""Each process has a few streams, and MongoDB keeps those of a killed one for ten minutes."""
LONG_AGO = datetime(1970, 1, 1)  # noqa: DTZ001 (as the driver returns dates)
OWN = {*DATABASES, CELERY}
"""The databases of a run."""
MONITORS = 2
"""The connections with which a client watches each member."""
MOST_CLIENTS = 2
"""A process has a client for each database that it uses."""
OTHER_SOCKETS = 16
"""Of its event loop, and of a dashboard that is read."""


def most_sockets(members: int) -> int:
    """Return how many sockets a process may have, however often its connections were cut."""
    return MOST_CLIENTS * members * (POOL_SIZE + MONITORS) + OTHER_SOCKETS


def find_in_living(pids: Mapping[str, int], members: Collection[Member]) -> dict[str, Any]:
    """Look for what living processes without work keep open, and should not."""
    counts = {who: count_sockets(pid) for who, pid in pids.items()}
    most = most_sockets(len(members))
    many = [f"{who}: {count} of {most} sockets" for who, count in counts.items() if count > most]
    idle = _at_last(
        lambda: [
            f"{len(some)} idle cursors, such as {some[0]}"
            for member in members
            if len(some := cursors(member)) > MOST_CURSORS
        ]
    )
    return {"open sockets": many, "idle cursors": idle}


def count_sockets(pid: int) -> int:
    """Return how many sockets a process has; 0 if it has ended."""
    count = 0
    with contextlib.suppress(OSError):
        for one in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                count += str(one.readlink()).startswith("socket:")
    return count


def find(
    folder: Path, servers: Servers, stubborn: list[str], *, since: datetime = LONG_AGO
) -> dict[str, Any]:
    """Look for what is left, after all processes were asked to end.

    Cursors count if they were opened since an instant: the last fault that may have left some.
    """
    mark = str(folder / FILE)
    found: dict[str, Any] = {"stubborn": stubborn}
    found["processes"] = _at_last(lambda: processes_of(mark))
    found["threads"] = [
        f"{line.who}: {name}"
        for line in read_lines(folder)
        if line.event == "left"
        for name in line.fields["threads"]
    ]
    members = servers.members
    found["connections"] = _at_last(lambda: [one for it in members for one in connections(it)])
    found["cursors"] = _at_last(lambda: [one for it in members for one in cursors(it, since)])
    return found


def _at_last(look: Any) -> list[Any]:
    """Look again and again, until there is nothing or the time is over."""
    left: list[Any] = []

    def is_clean() -> bool:
        left[:] = look()
        return not left

    with contextlib.suppress(AssertionError):
        wait_for(is_clean, CLOSED_SEC, ignoring=(PyMongoError,))
    return left


def connections(member: Member) -> list[str]:
    """Return the connections of clients of the run, whether they do something or not."""
    found = []
    for one in _current(member, idleConnections=True):
        name = one.get("clientMetadata", {}).get("driver", {}).get("name", "")
        if "PyMongo" in name and one.get("appName") != APP_NAME:
            last = next(iter(one.get("command") or {}), "idle")
            found.append(
                f"{member.port}: {one.get('appName')} {name} {one.get('client', '')} {last}"
            )
    return found


def cursors(member: Member, since: datetime = LONG_AGO) -> list[str]:
    """Return the open cursors in the databases of the run that were opened since an instant.

    An idle cursor has no metadata of its client, only the name of its collection.
    """
    found = []
    for one in _current(member, idleCursors=True):
        cursor, is_own = one.get("cursor", {}), one.get("ns", "").partition(".")[0] in OWN
        if one.get("type") == "idleCursor" and is_own and cursor["createdDate"] >= since:
            opened_at = f"opened at {cursor['createdDate']:%H:%M:%S}"
            command = cursor.get("originatingCommand")
            found.append(f"{member.port}: {opened_at}: {one['ns']} {command}"[:300])
    return found


def _current(member: Member, **options: bool) -> list[dict[str, Any]]:
    stage = {"$currentOp": {"allUsers": True, **options}}
    return list(member.client.admin.aggregate([stage]))
