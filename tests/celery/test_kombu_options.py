"""Each option of the transport, at a value that is not its default; URLs, and clear errors."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import kombu
import pytest

from microqueue import InvalidArgument, OperationFailed
from microqueue.contrib.kombu import Transport, TransportOptions
from microqueue.contrib.kombu.options import masked_uri, mongodb_uri
from tests.celery.kombu_tools import Connect, Receiver, get, publish
from tests.ports import free_port
from tests.rejection import rejecting
from tests.waiting import lasts, wait_for

MAIL = kombu.Queue("mail", routing_key="mail")


def lease_of(database: Any) -> datetime:
    found: datetime = database.tasks.find_one()["deadline_at"]
    return found


# Leases and deliveries


def test_visibility_timeout(connect: Connect, microqueue_database: Any) -> None:
    connection = connect(visibility_timeout=1234)
    publish(connection, 1)
    get(connection)
    task = microqueue_database.tasks.find_one()
    assert lasts(task["deadline_at"] - task["updated_at"], 1234)


def test_renew_interval(connect: Connect, microqueue_database: Any) -> None:
    connection = connect(visibility_timeout=30, renew_interval=0.05)
    publish(connection, 1)
    message = get(connection)
    first = lease_of(microqueue_database)
    wait_for(lambda: lease_of(microqueue_database) > first)
    message.ack()


def test_leases_are_renewed_at_a_third() -> None:
    assert TransportOptions(visibility_timeout=6).renew_sec == 2


@pytest.mark.parametrize("limit", [2, None])
def test_delivery_limit(connect: Connect, microqueue_database: Any, limit: int | None) -> None:
    connection = connect(delivery_limit=limit)
    publish(connection, 1)
    for _ in range(2):
        get(connection).requeue()
    assert (get(connection) is None) == (limit == 2)
    if limit:
        task = microqueue_database.tasks.find_one()
        assert (task["status"], task["error"]["code"], task["attempts"]) == ("failed", "poison", 2)


def test_delivery_limit_counts_deliveries_to_processes_that_died(
    connect: Connect, microqueue_database: Any
) -> None:
    connection = connect(delivery_limit=1)
    publish(connection, 1)
    get(connection)
    past = datetime.now(UTC) - timedelta(hours=1)
    microqueue_database.tasks.update_one({}, {"$set": {"deadline_at": past}})
    connection.transport.broker.sweep()
    assert microqueue_database.tasks.find_one()["status"] == "failed"


def test_dead_letter_rejected(connect: Connect, microqueue_database: Any) -> None:
    connection = connect(dead_letter_rejected=True)
    publish(connection, 1)
    get(connection).reject()
    found = wait_for(lambda: microqueue_database.tasks.find_one({"status": "failed"}))
    assert found["error"]["code"] == "rejected"


# Names


def test_collection_and_global_keyprefix(connect: Connect, microqueue_database: Any) -> None:
    connection = connect(global_keyprefix="shop-", collection="jobs")
    publish(connection, 1)
    assert microqueue_database.jobs.find_one()["queue"] == "shop-mail"
    (declared,) = microqueue_database.microqueue_broker.find()
    assert (declared["queue"], declared["collection"]) == ("shop-mail", "jobs")
    assert get(connection).payload == 1
    assert get(connect(collection="jobs")) is None


def test_database(connect: Connect, microqueue_database: Any) -> None:
    name = f"{microqueue_database.name}_x"
    publish(connect(database=name), 1)
    other = microqueue_database.client[name]
    assert other.tasks.find_one()["queue"] == "mail"
    other.client.drop_database(name)


@pytest.mark.parametrize("option", ["database", "collection"])
def test_a_name_that_mongodb_does_not_allow(connect: Connect, option: str) -> None:
    with pytest.raises(InvalidArgument):
        connect(**{option: "a$ b/.."}).connect()


# How often


def test_sweep_interval(connect: Connect, microqueue_database: Any) -> None:
    connection = connect(sweep_interval=0.05)
    publish(connection, 1)
    assert get(connection) is not None
    past = datetime.now(UTC) - timedelta(hours=1)
    microqueue_database.tasks.update_one({}, {"$set": {"deadline_at": past}})
    again = Receiver(connection, MAIL)
    again.receive(1)
    assert again.messages[0].delivery_info["redelivered"] is True


@contextmanager
def profiled(database: Any) -> Iterator[Any]:
    """Record what the server does; yields the collection of records."""
    database.command("profile", 2)
    try:
        yield database["system.profile"]
    finally:
        database.command("profile", 0)


@pytest.mark.parametrize("job", ["sweep", "purge"])
def test_batch_size(connect: Connect, microqueue_database: Any, job: str) -> None:
    connection = connect(batch_size=2, message_ttl=3600)
    for number in range(5):
        publish(connection, number)
    with profiled(microqueue_database) as profile:
        if job == "sweep":
            past = datetime.now(UTC) - timedelta(hours=1)
            microqueue_database.tasks.update_many(
                {}, {"$set": {"expires_at": past, "deadline_at": past}}
            )
            connection.transport.broker.sweep()
        else:
            assert connection.default_channel.queue_purge("mail") == 5
        removed = profile.find(
            {"ns": f"{microqueue_database.name}.tasks", "op": "remove", "ndeleted": {"$gt": 0}}
        )
        assert sorted(one["ndeleted"] for one in removed) == [1, 2, 2]


def test_poll_timeout(connect: Connect, microqueue_database: Any) -> None:
    """An idle consumer reads its queues so often, though the change stream is silent."""
    Receiver(connect(poll_timeout=0.02), MAIL)
    reads = {"ns": f"{microqueue_database.name}.tasks", "op": {"$in": ["query", "command"]}}
    with profiled(microqueue_database) as profile:
        wait_for(lambda: profile.count_documents(reads) > 20)


# The client


def test_options_reach_the_client(connect: Connect) -> None:
    connection = connect(max_connections=3, socket_timeout=11, socket_connect_timeout=13)
    connection.connect()
    client = connection.transport.broker.client
    pool = client.options.pool_options
    assert (pool.max_pool_size, pool.socket_timeout, pool.connect_timeout) == (3, 11, 13)
    assert client.options.server_selection_timeout == 13


def test_options_that_a_client_does_not_show() -> None:
    connection = kombu.Connection("microqueue+mongodb://localhost/x", connect_timeout=3)
    names = ("heartbeatFrequencyMS", "maxPoolSize", "connectTimeoutMS")
    by_default = TransportOptions().client_options(connection)
    assert [by_default[name] for name in names] == [25_000, 10, 3000]
    given = TransportOptions(health_check_interval=7).client_options(connection)
    assert given["heartbeatFrequencyMS"] == 7000
    files = {
        "ca_file": "CAFile",
        "crl_file": "CRLFile",
        "certificate_key_file": "CertificateKeyFile",
    }
    for name, mongodb_name in files.items():
        for spelling in (f"tls_{name}", f"tls{mongodb_name}"):
            options: dict[str, Any] = {spelling: "x.pem"}
            given = TransportOptions(**options).client_options(connection)
            assert given[f"tls{mongodb_name}"] == "x.pem"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (True, {"tls": True}),
        ({"ca_certs": "ca.pem"}, {"tls": True, "tlsCAFile": "ca.pem"}),
        (
            {"ssl_certfile": "c.pem", "ssl_keyfile": "c.pem", "ssl_cert_reqs": ssl.CERT_NONE},
            {"tls": True, "tlsCertificateKeyFile": "c.pem", "tlsAllowInvalidCertificates": True},
        ),
        ({"check_hostname": False}, {"tls": True, "tlsAllowInvalidHostnames": True}),
        (False, {}),
    ],
)
def test_broker_use_ssl(given: Any, expected: dict[str, Any]) -> None:
    connection = kombu.Connection("microqueue+mongodb://localhost/x", ssl=given)
    options = TransportOptions().client_options(connection)
    assert {name: options[name] for name in options if name.startswith("tls")} == expected


@pytest.mark.parametrize("given", [{"keyfile": "k.pem", "certfile": "c.pem"}, {"ciphers": "x"}])
def test_broker_use_ssl_with_what_mongodb_does_not_have(given: dict[str, str]) -> None:
    connection = kombu.Connection("microqueue+mongodb://localhost/x", ssl=given)
    with pytest.raises(InvalidArgument) as caught:
        TransportOptions().client_options(connection)
    assert caught.value.argument == "broker_use_ssl"


# Options of Kombu


def test_body_encoding(connect: Connect, microqueue_database: Any) -> None:
    connection = connect(body_encoding="base64")
    publish(connection, "hello")
    assert microqueue_database.tasks.find_one()["payload"]["body"] == "aGVsbG8="
    assert get(connection).payload == "hello"


def test_deadletter_queue(connect: Connect) -> None:
    connection = connect(deadletter_queue="lost")
    exchange = kombu.Exchange("news", type="direct")
    connection.Producer().publish(1, exchange=exchange, routing_key="x", declare=[exchange])
    assert get(connection, "lost").payload == 1


def test_a_message_without_a_queue_is_dropped(connect: Connect, microqueue_database: Any) -> None:
    exchange = kombu.Exchange("news", type="direct")
    connect().Producer().publish(1, exchange=exchange, routing_key="x", declare=[exchange])
    assert microqueue_database.tasks.count_documents({}) == 0


def test_how_kombu_repeats_connecting(dead_address: str) -> None:
    attempts: list[Any] = []

    class Counted(Transport):
        def establish_connection(self) -> Any:
            attempts.append(None)
            return super().establish_connection()

    options = {
        "max_retries": 2,
        "interval_start": 0,
        "interval_step": 0,
        "interval_max": 0,
        "connect_retries_timeout": 60,
        "socket_connect_timeout": 0.01,
    }
    url = f"mongodb://{dead_address}/x"
    with (
        kombu.Connection(url, transport=Counted, transport_options=options) as connection,
        pytest.raises(kombu.exceptions.OperationalError),
    ):
        _ = connection.default_channel
    assert len(attempts) == 3


# Errors


@pytest.mark.parametrize(
    ("option", "closest"),
    [("visibility_timout", "visibility_timeout"), ("tls_cafile", "tls_ca_file")],
)
def test_an_unknown_option_names_the_closest(connect: Connect, option: str, closest: str) -> None:
    with rejecting(option, 3, closest=closest):
        connect(**{option: 3}).connect()


@pytest.mark.parametrize(
    "options",
    [
        {"visibility_timeout": 0},
        {"delivery_limit": 0},
        {"batch_size": "many"},
        {"fanout_messages": 0},
        {"database": ""},
    ],
)
def test_a_value_that_is_not_valid(connect: Connect, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        connect(**options).connect()
    assert caught.value.argument == next(iter(options))


@pytest.mark.parametrize(
    "options",
    [
        {"renew_interval": 5, "visibility_timeout": 5},
        {"renew_interval": 301},
        {"health_check_interval": 0.4},
    ],
)
def test_durations_that_do_not_fit(options: dict[str, Any]) -> None:
    option, value = next(iter(options.items()))
    with rejecting(option, timedelta(seconds=value)):
        TransportOptions(**options)


@pytest.fixture
def dead_address() -> str:
    return f"localhost:{free_port()}"


def test_a_celery_worker_that_shuts_down_does_not_connect_again_and_again(
    dead_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = kombu.Connection(
        f"microqueue+mongodb://{dead_address}/x",
        transport_options={"socket_connect_timeout": 0.05},
    )
    failures: list[Exception] = []

    def shut_down(error: Exception, _wait_sec: float) -> None:
        failures.append(error)
        monkeypatch.setattr("celery.worker.state.should_stop", 0)

    with pytest.raises(OperationFailed):
        connection.ensure_connection(errback=shut_down, max_retries=3, interval_start=0)
    assert len(failures) == 1  # The next one was not repeated.


@pytest.mark.parametrize("host", ["", "no-such-host.invalid"])
def test_a_server_that_is_away_is_a_connection_error(dead_address: str, host: str) -> None:
    connection = kombu.Connection(
        f"microqueue+mongodb://{host or dead_address}/x",
        transport_options={"socket_connect_timeout": 0.05},
    )
    with pytest.raises(Transport.connection_errors, match="broker_url"):
        connection.transport.establish_connection()


@pytest.mark.parametrize(
    "url",
    [
        "microqueue+http://localhost/x",
        "microqueue+mongodb:///x",
        "microqueue+mongodb://ann:s3cret@localhost:port/x",
    ],
)
def test_a_wrong_url_is_an_error_that_hides_the_password(url: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        kombu.Connection(url).connect()
    assert caught.value.argument == "uri"
    assert "s3cret" not in str(caught.value)


def test_without_a_database_there_is_a_default(database_uri: str) -> None:
    scheme, _, rest = database_uri.partition("://")
    host = rest.partition("/")[0]
    with kombu.Connection(f"microqueue+{scheme}://{host}") as connection:
        assert connection.transport.broker.core.collections.database.name == "microqueue"


@pytest.mark.parametrize(
    ("url", "uri"),
    [
        ("microqueue://", "mongodb://localhost:27017/"),
        ("microqueue+mongodb://", "mongodb://localhost:27017/"),
        ("microqueue://ann:p%40ss@h:1/db", "mongodb://ann:p%40ss@h:1/db"),
        ("microqueue+mongodb://h1:1,h2:2/db?w=1", "mongodb://h1:1,h2:2/db?w=1"),
        ("microqueue+mongodb+srv://h/db", "mongodb+srv://h/db"),
        ("microqueue.contrib.kombu:Transport://h:1/db", "mongodb://h:1/db"),
    ],
)
def test_the_uri_of_a_url(url: str, uri: str) -> None:
    if ":Transport" in url:  # Kombu takes it only as the name of the transport.
        connection = kombu.Connection("mongodb://h:1/db", transport=url.partition("://")[0])
    else:
        connection = kombu.Connection(url)
    assert mongodb_uri(connection) == uri


@pytest.mark.parametrize(
    ("url", "options", "uri"),
    [
        ("microqueue+mongodb://h", {"virtual_host": "shop"}, "mongodb://h/shop"),
        ("microqueue+mongodb://h/?w=1", {"virtual_host": "shop"}, "mongodb://h/shop?w=1"),
        ("microqueue+mongodb://h/db", {"virtual_host": "shop"}, "mongodb://h/db"),
        ("microqueue+mongodb://h", {"virtual_host": "/"}, "mongodb://h"),
        (
            "microqueue+mongodb://h/db?appName=a@b",
            {"userid": "ann", "password": "p@"},
            "mongodb://ann:p%40@h/db?appName=a@b",
        ),
        ("microqueue+mongodb://bob@h/db", {"userid": "ann"}, "mongodb://bob@h/db"),
    ],
)
def test_what_kombu_is_given_beside_a_url(url: str, options: dict[str, Any], uri: str) -> None:
    assert mongodb_uri(kombu.Connection(url, **options)) == uri


@pytest.mark.parametrize(
    ("option", "closest"), [("visibility_timout", ["visibility_timeout"]), ("zzz", [])]
)
def test_an_option_of_a_url_that_mongodb_does_not_know(option: str, closest: list[str]) -> None:
    connection = kombu.Connection(f"microqueue+mongodb://localhost/x?w=1&{option}=5")
    with rejecting(option, code="unknown_option") as caught:
        connection.connect()
    assert caught.value.closest == closest


@pytest.mark.parametrize("option", ["authSource=", "replicaSet", "appName=a=b", "tlsCAFile=/nope"])
def test_an_option_of_a_url_that_mongodb_knows_and_rejects(option: str) -> None:
    connection = kombu.Connection(f"microqueue+mongodb://localhost/x?{option}")
    assert isinstance(connection.transport, Transport)
    with pytest.raises(InvalidArgument) as caught:
        connection.connect()
    assert (caught.value.argument, caught.value.code) == ("uri", None)


@pytest.mark.parametrize(
    "place",
    [
        "h:1/db?authMechanismProperties=A:b,AWS_SESSION_TOKEN:s3cret&w=1",
        "h:1/db?tlsCertificateKeyFilePassword=s3cret&appName=a@b",
        "ann:s3cret@h:1/db?appName=a@b",
        "ann:s3cret@h:1?appName=a:b",
        "ann:x/s3cret@h:1/db",
        "ann:x?s3cret@h:1/db",
    ],
)
def test_secrets_are_masked_and_nothing_else(place: str) -> None:
    shown = masked_uri(f"mongodb://{place}", "**")
    masked = place.replace("x/s3cret", "**").replace("x?s3cret", "**").replace("s3cret", "**")
    assert shown == f"mongodb://{masked}"


def test_the_password_is_masked() -> None:
    url = "microqueue+mongodb://ann:s3cret@h1:1,h2:2/db?replicaSet=rs"
    connection = kombu.Connection(url)
    assert connection.as_uri() == url.replace("s3cret", "**")
    assert connection.as_uri(include_password=True) == url


# Failover


CONNECTING = {"socket_connect_timeout": 5}
"""What a server that is there may take on a busy machine; one that is away takes as long."""


def failover(*urls: str, **options: Any) -> Any:
    return kombu.Connection(";".join(urls), transport_options=CONNECTING, **options)


def test_a_connection_fails_over_to_the_next_url(dead_address: str, database_uri: str) -> None:
    alive = f"microqueue+{database_uri.partition('?')[0]}"
    dead = f"microqueue+mongodb://{dead_address}/x"
    with failover(dead, alive).clone() as connection:
        failures: list[Exception] = []
        connection.ensure_connection(
            errback=lambda error, _: failures.append(error), max_retries=3, interval_start=0
        )
        publish(connection, 1)
        assert (len(failures), get(connection).payload) == (1, 1)


@pytest.mark.parametrize(
    ("number", "uri"), [(1, "mongodb://bob:x@h2:2/db2"), (2, "mongodb://ann:p%40s@h1:1/db1")]
)
@pytest.mark.parametrize("copies", [0, 1, 2])
def test_the_uri_after_a_switch_and_of_its_copies(number: int, uri: str, copies: int) -> None:
    connection = failover(
        "microqueue+mongodb://ann:p%40s@h1:1/db1", "microqueue+mongodb://bob:x@h2:2/db2"
    )
    for _ in range(number):
        connection.maybe_switch_next()
    for _ in range(copies):
        connection = connection.clone()
    assert isinstance(connection.transport, Transport)
    assert mongodb_uri(connection) == uri
    assert connection.as_uri(include_password=True) == f"microqueue+{uri}"


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("//h1/db", "//h2/db?replicaSet=rs"),
        ("//h1:1/db", "//h2:2,h3:3/db"),
        ("//h1:1/db", "//h2/db"),
        ("//h1:1/db", "//h2:2"),
    ],
)
def test_a_url_that_kombu_cannot_switch_to(first: str, second: str, number: int) -> None:
    urls = [f"microqueue+mongodb:{one}" for one in (first, second)]
    connection = failover(*(urls[::-1] if number else urls))
    with rejecting("broker_url", urls[1]):
        connection.connect()


@pytest.mark.parametrize(
    ("urls", "uris"),
    [
        (("//h1:27017/db", "//h2/db"), ("//h1:27017/db", "//h2:27017/db")),
        (("//h1/db", "//h2/db"), ("//h1/db", "//h2:27017/db")),
        (("//[::1]:1/db", "//[::2]:2/db"), ("//[::1]:1/db", "//[::2]:2/db")),
        (("+srv://h1/db", "//h2:2/db"), ("+srv://h1/db", "//h2:2/db")),
    ],
)
def test_ports_that_need_not_be_given(urls: tuple[str, str], uris: tuple[str, str]) -> None:
    first, second = (f"microqueue+mongodb{'' if one.startswith('+') else ':'}{one}" for one in urls)
    connection = failover(first, second)
    for uri in uris:
        assert isinstance(connection.transport, Transport)
        assert mongodb_uri(connection).removeprefix("mongodb").removeprefix(":") == uri
        connection.maybe_switch_next()


def test_a_url_with_which_kombu_would_switch_to_its_own_transport() -> None:
    urls = ["mongodb://h1/db", "mongodb://ann:s3cret@h2/db"]
    connection = failover(*urls, transport="microqueue.contrib.kombu:Transport")
    with rejecting("broker_url", urls[0]):
        connection.connect()
    mixed = failover("microqueue+mongodb://h1/db", urls[1])
    with rejecting("broker_url", "mongodb://ann:**@h2/db"):
        mixed.connect()


@pytest.mark.parametrize("form", ["a list of one", "a semicolon at the end"])
def test_one_url_alone_may_have_options(form: str) -> None:
    url = "microqueue+mongodb://h1,h2/db?replicaSet=rs"
    connection = kombu.Connection([url] if form == "a list of one" else f"{url};")
    for _ in range(2):
        assert isinstance(connection.transport, Transport)
        assert mongodb_uri(connection) == url.removeprefix("microqueue+")
        connection.maybe_switch_next()


def test_empty_urls_are_left_out() -> None:
    connection = kombu.Connection("microqueue://h1/db;;microqueue://h2/db;")
    hosts = []
    for _ in range(3):
        assert isinstance(connection.transport, Transport)
        hosts.append(connection.hostname)
        connection.maybe_switch_next()
    assert hosts == ["h1", "h2", "h1"]
