"""Check the server of a directory, and repair a replica set that rejects writes."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from microqueue.embedded import keeper
from microqueue.errors import EmbeddedServerError, InvalidArgument

POLL_SECONDS = 0.01
PROBE_MILLISECONDS = 1000  # Our server answers within a few; another program on the port may never.
COMMAND_MILLISECONDS = 10_000
LARGEST_PORT = 65_535


def running(directory: Path | str) -> str | None:
    """Look for the running server of a directory. It is read-only.

    Args:
        directory: The directory of the server.

    Returns:
        Its URI, or ``None`` if none runs.
    """
    home = Path(directory).expanduser().resolve()
    state = keeper.read_state(home)
    if state is None or not keeper.is_locked(home / keeper.SERVER_LOCK):
        return None
    if not accepts(state.port):
        return None
    with connect(state.port) as client:
        try:
            return uri_of(state.port) if serves(client, home) else None
        except PyMongoError:
            return None


def uri_of(port: int) -> str:
    """Return the connection string of an embedded server."""
    # A direct connection does not need the name of the set, which has no other member.
    return f"mongodb://{keeper.HOST}:{port}/?directConnection=true"


def connect(port: int) -> MongoClient[dict[str, Any]]:
    """Return a client with short timeouts."""
    return MongoClient(
        uri_of(port),
        serverSelectionTimeoutMS=PROBE_MILLISECONDS,
        connectTimeoutMS=PROBE_MILLISECONDS,
        socketTimeoutMS=COMMAND_MILLISECONDS,
    )


def accepts(port: int) -> bool:
    """Return whether any program listens on a port."""
    # Cheap, while the driver tries to reach an absent server only twice a second.
    try:
        socket.create_connection((keeper.HOST, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def serves(client: MongoClient[dict[str, Any]], home: Path) -> bool:
    """Return whether the connected server is the one of this directory."""
    options = client.admin.command("getCmdLineOpts")["parsed"]
    return bool(options.get("storage", {}).get("dbPath") == str(home / keeper.DATA_DIRECTORY))


def is_writable(client: MongoClient[dict[str, Any]], port: int) -> bool:
    """Return whether the server accepts writes. If its replica set prevents that, repair it."""
    hello = client.admin.command("hello")
    if hello.get("isreplicaset"):  # No configuration, or one without this server.
        if stored := client.local["system.replset"].find_one():
            client.admin.command("replSetReconfig", with_port(stored, port), force=True)
        else:
            member = {"_id": 0, "host": f"{keeper.HOST}:{port}"}
            initial = {"_id": keeper.REPLICA_SET, "members": [member]}
            client.admin.command("replSetInitiate", initial)
    return bool(hello["isWritablePrimary"])


def with_port(configuration: dict[str, Any], port: int) -> dict[str, Any]:
    """Return a replica set's configuration with its only member on this port."""
    member = {**configuration["members"][0], "host": f"{keeper.HOST}:{port}"}
    return {**configuration, "version": configuration["version"] + 1, "members": [member]}


def await_writable(home: Path, deadline: float) -> keeper.ServerState | None:
    """Wait until the server of a directory accepts writes; return None if there is no server."""
    reason: object = "no connection"
    while keeper.is_locked(home / keeper.SERVER_LOCK):
        if time.monotonic() > deadline:
            raise EmbeddedServerError(
                f"the MongoDB server of {home} does not answer: {reason}", code="no_answer"
            )
        state = keeper.read_state(home)
        if state is not None and accepts(state.port):
            with connect(state.port) as client:
                try:
                    if serves(client, home) and is_writable(client, state.port):
                        return state
                except PyMongoError as error:  # It is starting, or another program has the port.
                    reason = error
        time.sleep(POLL_SECONDS)
    return None


def check_port(port: int | None, argument: str = "port") -> None:
    """Raise ``InvalidArgument`` for a port out of range; None and 0 mean any free port."""
    if port is not None and not 0 <= port <= LARGEST_PORT:
        raise InvalidArgument(
            f"{argument}={port} is not valid: give one of 1 to {LARGEST_PORT}, or none for a free "
            "one",
            argument=argument,
            value=port,
        )


def is_free(port: int) -> bool:
    """Return whether mongod could listen on a port."""
    with socket.socket() as probe:
        # As mongod does, so that lingering connections of a former server do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((keeper.HOST, port))
            probe.listen()
        except OSError:
            return False
        return True


def any_free_port() -> int:
    """Return a port that no program listens on now."""
    with socket.socket() as probe:
        probe.bind((keeper.HOST, 0))
        return int(probe.getsockname()[1])
