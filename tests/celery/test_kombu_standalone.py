"""A standalone server that accepts only TLS: no change streams, and every option of TLS."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import kombu
import pytest
from pymongo import MongoClient

from microqueue.contrib.kombu import Transport
from microqueue.embedded import find_mongod
from tests.celery.kombu_tools import Receiver, publish
from tests.ports import free_port
from tests.waiting import wait_for

MAIL = kombu.Queue("mail", routing_key="mail")
PASSWORD = "s3cret"
NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")


class Keys:
    """An authority, and the certificates of the server and of a client that it signed."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.authority = place / "ca.pem"
        authority_key = place / "ca.key"
        self._run("req", "-x509", "-nodes", *NEW_KEY, "-subj", "/CN=ca", "-days", "2",
                  "-keyout", authority_key, "-out", self.authority)  # fmt: skip
        self.server = self._certificate("server", "-nodes")
        self.client = self._certificate("client", "-passout", f"pass:{PASSWORD}")

    def _certificate(self, name: str, *options: str) -> Path:
        request, key, signed, names = (
            self._place / f"{name}.{end}" for end in ("csr", "key", "crt", "ext")
        )
        names.write_text("subjectAltName=DNS:localhost\n")
        self._run("req", *NEW_KEY, *options, "-subj", f"/CN=localhost/O={name}",
                  "-keyout", key, "-out", request)  # fmt: skip
        self._run("x509", "-req", "-in", request, "-CA", self.authority, "-CAkey",
                  self._place / "ca.key", "-set_serial", str(len(name)), "-days", "2",
                  "-extfile", names, "-out", signed)  # fmt: skip
        both = self._place / f"{name}.pem"
        both.write_bytes(key.read_bytes() + signed.read_bytes())
        return both

    @staticmethod
    def _run(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    @property
    def options(self) -> dict[str, Any]:
        """What a client needs."""
        return {
            "tls": True,
            "tls_ca_file": str(self.authority),
            "tls_certificate_key_file": str(self.client),
            "tls_certificate_key_file_password": PASSWORD,
        }


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def port(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A standalone server that wants a certificate of each client."""
    port = free_port()
    command = [str(find_mongod()), "--bind_ip", "127.0.0.1", "--port", str(port)]
    command += ["--dbpath", str(tmp_path_factory.mktemp("data")), "--nounixsocket", "--quiet"]
    command += ["--tlsMode", "requireTLS", "--tlsCertificateKeyFile", str(keys.server)]
    command += ["--tlsCAFile", str(keys.authority)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with client(keys, port) as admin:
            wait_for(lambda: admin.admin.command("ping"), 60, ignoring=(Exception,))
        yield port
    finally:
        process.kill()
        process.wait()


def client(keys: Keys, port: int) -> MongoClient[Any]:
    return MongoClient(
        f"mongodb://localhost:{port}",
        tls=True,
        tlsCAFile=str(keys.authority),
        tlsCertificateKeyFile=str(keys.client),
        tlsCertificateKeyFilePassword=PASSWORD,
        serverSelectionTimeoutMS=30_000,
    )


def connection(port: int, options: dict[str, Any], host: str = "localhost") -> Any:
    return kombu.Connection(
        f"microqueue+mongodb://{host}:{port}/test_{uuid4().hex[:12]}", transport_options=options
    )


def test_a_consumer_polls_where_there_is_no_change_stream(keys: Keys, port: int) -> None:
    options = {**keys.options, "polling_interval": 0.01, "poll_timeout": 3600}
    with connection(port, options) as connected:
        receiver = Receiver(connected, MAIL)
        name = connected.transport.broker.core.collections.database.name
        with client(keys, port) as other:
            other[name].command("profile", 2)
            reads = {"ns": f"{name}.tasks", "op": {"$in": ["query", "command"]}}
            wait_for(lambda: other[name]["system.profile"].count_documents(reads) > 100, 90)
            other[name].command("profile", 0)
        publish(connected, 1)
        assert receiver.receive(1) == [1]
        receiver.messages[0].ack()


def test_broadcasts_need_no_replica_set(keys: Keys, port: int) -> None:
    exchange = kombu.Exchange("news", type="fanout")
    with connection(port, keys.options) as connected:
        receivers = [
            Receiver(connected, kombu.Queue(f"bcast.{n}", exchange, auto_delete=True))
            for n in range(2)
        ]
        connected.Producer().publish(1, exchange=exchange)
        assert [one.receive(1) for one in receivers] == [[1], [1]]


def connects(port: int, options: dict[str, Any], host: str = "localhost") -> None:
    """Check that a client with these options can connect."""
    with connection(port, {"socket_connect_timeout": 60, **options}, host) as connected:
        assert connected.connect()


def is_refused(port: int, options: dict[str, Any], host: str = "localhost") -> None:
    """Check that a client with these options cannot connect."""
    refused = connection(port, {"socket_connect_timeout": 0.3, **options}, host)
    with pytest.raises(Transport.connection_errors):
        refused.transport.establish_connection()


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def test_each_option_of_tls_is_needed(keys: Keys, port: int) -> None:
    is_refused(port, {})
    is_refused(port, without(keys.options, "tls_ca_file"))
    own = ("tls_certificate_key_file", "tls_certificate_key_file_password")
    is_refused(port, without(keys.options, *own))
    # Another host than that of the certificate.
    is_refused(port, keys.options, "127.0.0.1")


@pytest.mark.parametrize("option", ["tls_allow_invalid_hostnames", "tlsAllowInvalidHostnames"])
def test_another_host_name(keys: Keys, port: int, option: str) -> None:
    connects(port, {**keys.options, option: True}, "127.0.0.1")


@pytest.mark.parametrize(
    "option", ["tls_allow_invalid_certificates", "tlsAllowInvalidCertificates"]
)
def test_an_unknown_authority(keys: Keys, port: int, option: str) -> None:
    connects(port, {**without(keys.options, "tls_ca_file"), option: True})


def test_broker_use_ssl(keys: Keys, port: int, tmp_path: Path) -> None:
    opened = tmp_path / "open.pem"
    key = tmp_path / "open.key"
    Keys._run(  # noqa: SLF001
        "ec", "-in", keys.client, "-passin", f"pass:{PASSWORD}", "-out", key
    )
    opened.write_bytes(key.read_bytes() + keys.client.read_bytes())
    given = {"ca_certs": str(keys.authority), "certfile": str(opened)}
    with kombu.Connection(
        f"microqueue+mongodb://localhost:{port}/test_ssl", ssl=given
    ) as connected:
        assert connected.connect()
