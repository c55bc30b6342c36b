"""The servers of a run: what clients connect to, and what can happen to it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

from microqueue.embedded.probe import any_free_port
from tests.chaos.setup import POOL_SIZE
from tests.integration.proxy import Proxy
from tests.integration.replica_set import APP_NAME, MEMORY_DISK, NAME, Member, ReplicaSet
from tests.waiting import wait_for

SERVER_KINDS = ("single", "replica-set", "standalone", "auth-tls")
LOOK_SEC = 0.25
"""How often a connection of the proxy looks up; there are hundreds."""
PATIENCE_SEC = 120.0
USER, PASSWORD = "chaos", "a-password-for-one-run"
DISK_MB = 900


def has_transactions(kind: str) -> bool:
    """Return whether servers of a kind have transactions and change streams."""
    return kind != "standalone"


@dataclass
class Servers:
    """Members with a proxy in front of each.

    Attributes:
        kind: One of :data:`SERVER_KINDS`.
        uri: The address for clients, with ``{database}`` in it.
        members: The mongod processes.
        proxies: The proxy of each member.
        trio: The replica set, if there are three members.
        options: Further options of the address, such as those of TLS.
        disks: Which members have their own file system.
    """

    kind: str
    uri: str
    members: list[Member]
    proxies: list[Proxy]
    trio: ReplicaSet | None = None
    options: dict[str, str] = field(default_factory=dict)
    disks: list[Path] = field(default_factory=list)

    @property
    def transactions(self) -> bool:
        """Whether there are transactions and change streams."""
        return has_transactions(self.kind)

    @property
    def faults(self) -> list[str]:
        """The kinds of faults that can happen to these servers."""
        kinds = ["mongod_kill", "mongod_freeze"]
        if self.trio is not None:
            kinds = ["stepdown", "primary_kill", "primary_freeze", "majority_lost"]
            kinds += ["rolling_restart", "mongod_kill", "rollback"]
        return [*kinds, "disk_full"] if self.disks else kinds

    def primary(self) -> Member:
        """Wait for a member that accepts writes."""
        if self.trio is not None:
            return self.trio.primary()
        member = self.members[0]
        wait_for(lambda: _writable(member), PATIENCE_SEC, what="a server", ignoring=(PyMongoError,))
        return member

    def proxy_of(self, member: Member) -> Proxy:
        """Return the proxy in front of a member."""
        return self.proxies[self.members.index(member)]

    def heal(self) -> None:
        """Start and continue everything, and wait until it is in step."""
        for proxy in self.proxies:
            proxy.request_delay_sec = proxy.reply_delay_sec = 0.0
            proxy.thaw()
        if self.trio is not None:
            self.trio.heal()
            return
        for member in self.members:
            if not member.alive:
                member.start()
            elif member.frozen:
                member.cont()
        self.primary()

    def client(self) -> MongoClient[Any]:
        """Return a client of the run itself, which passes by the proxies where that is possible."""
        if self.trio is not None:
            return MongoClient(self.uri.replace("{database}", "admin"), appname=APP_NAME)
        return self.members[0].client


def _writable(member: Member) -> bool:
    return bool(member.client.admin.command("hello")["isWritablePrimary"])


@contextlib.contextmanager
def started(kind: str, *, disk: bool) -> Iterator[Servers]:
    """Start servers of a kind; with ``disk``, the first has its own small file system."""
    with contextlib.ExitStack() as ending:
        start = _start_trio if kind == "replica-set" else _start_one
        yield start(kind, ending, disk=disk)


def _proxied(member: Member, ending: contextlib.ExitStack) -> Proxy:
    proxy = Proxy(f"mongodb://{member.address}", look_sec=LOOK_SEC)
    ending.callback(proxy.close)
    return proxy


def _start_trio(kind: str, ending: contextlib.ExitStack, *, disk: bool) -> Servers:
    proxies: list[Proxy] = []
    disks: list[Path] = []

    def advertise(member: Member) -> str:
        if disk and not disks and (mounted := _mount(member.place, ending)) is not None:
            disks.append(mounted)
        proxies.append(_proxied(member, ending))
        return f"127.0.0.1:{proxies[-1].port}"

    # The unmounting comes after the end of the servers.
    trio = ending.enter_context(ReplicaSet.started(advertise=advertise))
    uri = trio.uri.replace("/test?", "/{database}?") + f"&maxPoolSize={POOL_SIZE}"
    return Servers(kind, uri, trio.members, proxies, trio, disks=disks)


def _start_one(kind: str, ending: contextlib.ExitStack, *, disk: bool) -> Servers:
    base = MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else None
    place = Path(tempfile.mkdtemp(prefix="microqueue-chaos-", dir=base))
    ending.callback(shutil.rmtree, place, ignore_errors=True)
    data = place / "data"
    mounted = _mount(data, ending) if disk else None
    arguments, options = _security(place) if kind == "auth-tls" else ([], "")
    name = None if kind == "standalone" else NAME
    port = any_free_port()
    member = Member(port, data, arguments, replica_set=name, options=options)
    ending.callback(member.end)
    member.start()
    wait_for(lambda: member.client.admin.command("ping"), PATIENCE_SEC, ignoring=(PyMongoError,))
    if name is not None:
        hosts = [{"_id": 0, "host": member.address}]
        member.client.admin.command("replSetInitiate", {"_id": name, "members": hosts})
    user = ""
    servers = Servers(kind, "", [member], [])
    servers.primary()
    if kind == "auth-tls":
        roles = ["root"]
        member.client.admin.command("createUser", USER, pwd=PASSWORD, roles=roles)
        user = f"{USER}:{PASSWORD}@"
        options += "&authSource=admin"
        member.log_in(options, username=USER, password=PASSWORD)
    servers.proxies.append(_proxied(member, ending))
    address = f"127.0.0.1:{servers.proxies[0].port}"
    servers.uri = f"mongodb://{user}{address}/{{database}}?directConnection=true{options}"
    servers.uri += f"&maxPoolSize={POOL_SIZE}"
    if mounted is not None:
        servers.disks.append(mounted)
    return servers


def _security(place: Path) -> tuple[list[str], str]:
    """Make a certificate and a key; return the arguments of mongod and the options of clients."""
    key, certificate, both = place / "tls.key", place / "tls.crt", place / "tls.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    secret = place / "members.key"
    secret.write_text("a key of the members", encoding="ascii")
    secret.chmod(0o600)
    arguments = ["--tlsMode", "requireTLS", "--tlsCertificateKeyFile", str(both)]
    arguments += ["--tlsCAFile", str(certificate), "--tlsAllowConnectionsWithoutCertificates"]
    arguments += ["--auth", "--keyFile", str(secret)]
    return arguments, f"&tls=true&tlsCAFile={certificate}"


def _mount(place: Path, ending: contextlib.ExitStack) -> Path | None:
    """Mount a small file system in memory for one server; None if that is not allowed here."""
    place.mkdir(parents=True, exist_ok=True)
    if resize(place, DISK_MB * 1024, how="mount") is not None:
        return None
    ending.callback(shutil.rmtree, place.parent, ignore_errors=True)
    ending.callback(subprocess.run, ["umount", "-l", str(place)], check=False, capture_output=True)
    return place


def resize(place: Path, size_kb: int, *, how: str = "remount") -> str | None:
    """Mount a memory disk, or change its size; return why that failed."""
    options = f"size={size_kb}k" if how == "mount" else f"remount,size={size_kb}k"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except OSError as exc:
        return str(exc)
    return None if done.returncode == 0 else re.sub(r"\s+", " ", done.stderr.strip())


def used_kb(place: Path) -> int:
    """Return how much of a file system is used."""
    return shutil.disk_usage(place).used // 1024
