"""What tests need to know about the server they run on: the embedded one, or a given one."""

from __future__ import annotations

import fcntl
import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from pymongo import MongoClient
from pymongo.errors import OperationFailure

from microqueue.embedded import EmbeddedServer
from microqueue.testing.given_server import GivenServer, given_server


@cache
def given() -> GivenServer | None:
    """Return the server of ``MICROQUEUE_TEST_URI``, asked once per process."""
    return given_server()


def direct_uri(server: EmbeddedServer | GivenServer) -> str:
    """Return the address of the primary alone, for a proxy in front of it.

    Otherwise a client would learn the address of the server, and go round the proxy.
    """
    if isinstance(server, EmbeddedServer):
        return server.uri
    parts = urlsplit(server.uri)
    if parts.scheme != "mongodb":
        pytest.skip("a proxy needs a mongodb:// URI")
    with MongoClient[Any](server.uri) as client:
        client.admin.command("ping")
        address = client.address
    assert address is not None
    user = "".join(parts.netloc.rpartition("@")[:2])
    replaced = ("replicaset=", "directconnection=")
    kept = [one for one in parts.query.split("&") if not one.lower().startswith(replaced)]
    if {"tls=true", "ssl=true"} & {one.lower() for one in kept}:
        kept.append("tlsAllowInvalidHostnames=true")  # The certificate does not name the proxy.
    options = "&".join([*kept, "directConnection=true"])
    return f"mongodb://{user}{address[0]}:{address[1]}/?{options}"


@contextmanager
def fail_command(client: MongoClient[Any], mode: Any, **data: Any) -> Iterator[None]:
    """Make the server fail or delay some commands, until the end of the block.

    Give an ``appName`` or a ``namespace``, so that no other commands fail. A server has one
    such fail point: processes that share a given server take turns.
    """
    server = given()
    if server is None:
        with _failing(client, mode, data):
            yield
        return
    name = hashlib.sha256(server.uri.encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"microqueue-fail-point-{name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _has_fail_points(client):
            pytest.skip("the server has no fail points, or its user may not set them")
        with _failing(client, mode, data):
            yield


@contextmanager
def _failing(client: MongoClient[Any], mode: Any, data: dict[str, Any]) -> Iterator[None]:
    client.admin.command("configureFailPoint", "failCommand", mode=mode, data=data)
    try:
        yield
    finally:
        client.admin.command("configureFailPoint", "failCommand", mode="off")


def _has_fail_points(client: MongoClient[Any]) -> bool:
    """Return whether test commands are enabled, and this user may use them."""
    try:
        reply = client.admin.command("getParameter", 1, enableTestCommands=1)
        return bool(reply["enableTestCommands"]) and bool(
            client.admin.command("configureFailPoint", "failCommand", mode="off")
        )
    except OperationFailure:
        return False
