"""The options of the transport, ``broker_transport_options``, and the address of the broker."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Self
from urllib.parse import quote, urlsplit

from kombu import Connection
from pydantic import ConfigDict, Field, model_validator
from pymongo.errors import ConfigurationError, InvalidURI, PyMongoError
from pymongo.uri_parser import split_options

from microqueue.backoff import BackoffPolicy
from microqueue.durations import NonNegativeDuration, PositiveDuration
from microqueue.errors import InvalidArgument
from microqueue.model import UNKNOWN_OPTION, Model, closest_option
from microqueue.settings import QueueSettings
from microqueue.topic import MAX_MESSAGES

SCHEME = "microqueue"
SCHEMES = (SCHEME, f"{SCHEME}+mongodb", f"{SCHEME}+mongodb+srv")
"""The schemes of URLs that Kombu knows after an import of this package."""
OTHER_SCHEMES = ("mongodb", "mongodb+srv")
DEFAULT_PORT = 27017
SECRETS = re.compile(r"((?:password|session_token)(?:=|:|%3A))[^&,]*", re.IGNORECASE)
"""Options of a URI that are secret."""
SHORTEST_CHECK = timedelta(seconds=0.5)
"""How often MongoDB's clients check a server at most."""
UNLIMITED_DELIVERIES = 1_000_000
"""The largest ``max_attempts`` of a task."""


class TransportOptions(Model):
    """The options of the transport. Durations are a ``timedelta`` or seconds.

    The names are those of Kombu's Redis transport where it has the option. Those of TLS are also
    accepted as MongoDB spells them, such as ``tlsCAFile``.
    """

    model_config = ConfigDict(populate_by_name=True)
    _owner: ClassVar[str | None] = "transport_options"

    visibility_timeout: PositiveDuration = timedelta(minutes=5)
    """How long a lease on a message lasts. It is renewed while the process lives."""
    renew_interval: PositiveDuration | None = None
    """How often leases are renewed, more often than they expire. Default: a third of
    ``visibility_timeout``."""
    delivery_limit: int | None = Field(default=20, ge=1, le=UNLIMITED_DELIVERIES, strict=True)
    """Deliveries in all, before a message is a dead letter; ``None``: no limit."""
    message_ttl: PositiveDuration | None = None
    """How long a message may wait, from when it is due; a shorter limit of its queue or its own
    also holds."""
    dead_letter_rejected: bool = False
    """Keep messages that are rejected without requeue as dead letters."""
    dead_letter_expired: bool = False
    """Keep messages whose time to live is over as dead letters."""

    hooks: tuple[Any, ...] | None = Field(default=None, exclude=True)
    """Called with each message that becomes a dead letter: a list of ``microqueue.Hooks``."""

    fanout_messages: int = Field(default=MAX_MESSAGES, ge=1, strict=True)
    """How many messages are kept for the transient queues of one fanout or topic exchange. The
    first process to use an exchange decides."""

    database: str | None = Field(default=None, min_length=1)
    """The database. Default: that of the URL, or ``microqueue``."""
    collection: str = Field(default="tasks", min_length=1)
    """The collection of tasks."""
    global_keyprefix: str = ""
    """A prefix of all names of queues and exchanges."""

    sweep_interval: PositiveDuration = timedelta(minutes=1)
    """How often a consuming process sweeps: expired leases, messages and queues."""
    batch_size: int = Field(default=1000, ge=1, le=100_000, strict=True)
    """How many documents one step of a sweep or purge changes."""
    poll_timeout: PositiveDuration = timedelta(seconds=10)
    """How long a consumer waits for the change stream before it reads its queues anyway."""
    polling_interval: PositiveDuration = timedelta(seconds=1)
    """How often a consumer reads its queues where the server has no change streams."""

    max_connections: int = Field(default=10, ge=1, strict=True)
    """The size of the connection pool of a process."""
    health_check_interval: PositiveDuration = timedelta(seconds=25)
    """How often the server is checked in the background, at most twice a second."""
    socket_timeout: PositiveDuration | None = None
    """How long a reply may take. Default: the limits of the queue's settings."""
    socket_connect_timeout: PositiveDuration | None = None
    """How long connecting may take. Default: Kombu's ``connect_timeout``."""
    tls: bool | None = None
    """Use TLS; also with ``broker_use_ssl``, or in the URL."""
    tls_ca_file: str | None = Field(default=None, alias="tlsCAFile")
    tls_certificate_key_file: str | None = Field(default=None, alias="tlsCertificateKeyFile")
    tls_certificate_key_file_password: str | None = Field(
        default=None, alias="tlsCertificateKeyFilePassword"
    )
    tls_crl_file: str | None = Field(default=None, alias="tlsCRLFile")
    tls_allow_invalid_certificates: bool | None = Field(
        default=None, alias="tlsAllowInvalidCertificates"
    )
    tls_allow_invalid_hostnames: bool | None = Field(default=None, alias="tlsAllowInvalidHostnames")

    # Kombu's own options, which it passes to every transport.
    body_encoding: str | None = None
    deadletter_queue: str | None = None
    max_retries: int | None = None
    interval_start: float | None = None
    interval_step: float | None = None
    interval_max: float | None = None
    connect_retries_timeout: NonNegativeDuration | None = None

    @model_validator(mode="after")
    def _durations_fit(self) -> Self:
        interval, timeout = self.renew_interval, self.visibility_timeout
        if interval is not None and interval >= timeout:
            reason = (
                f"renew_interval {interval.total_seconds():g} s is not shorter than "
                f"visibility_timeout {timeout.total_seconds():g} s: leases would expire before "
                "they are renewed"
            )
            raise InvalidArgument(reason, argument="renew_interval", value=interval)
        check = self.health_check_interval
        if check < SHORTEST_CHECK:
            reason = (
                f"health_check_interval {check.total_seconds():g} s is too short; give at least "
                f"{SHORTEST_CHECK.total_seconds():g} s"
            )
            raise InvalidArgument(reason, argument="health_check_interval", value=check)
        return self

    @property
    def renew_sec(self) -> float:
        """How often leases are renewed, in seconds."""
        interval = self.renew_interval or self.visibility_timeout / 3
        return interval.total_seconds()

    def queue_settings(self) -> QueueSettings:
        """Return the settings of the queues; the environment has what is not an option here."""
        return QueueSettings.from_environment(
            visibility_timeout=self.visibility_timeout,
            max_attempts=self.delivery_limit or UNLIMITED_DELIVERIES,
            batch_size=self.batch_size,
            poll_interval=self.polling_interval,
            # A message that comes back is ready at once: delays are the publisher's matter.
            backoff=BackoffPolicy(base_sec=0.0, max_sec=0.0, jitter="none"),
        )

    def client_options(self, connection: Connection) -> dict[str, Any]:
        """Return the options of the MongoDB client."""
        connect = self.socket_connect_timeout
        if connect is None:
            # Kombu's limit is for all addresses that it tries in turn.
            total = timedelta(seconds=connection.connect_timeout or 5)
            connect = total / max(len(connection.alt), 1)
        options: dict[str, Any] = {
            "serverSelectionTimeoutMS": _to_milliseconds(connect),
            "connectTimeoutMS": _to_milliseconds(connect),
            "heartbeatFrequencyMS": _to_milliseconds(self.health_check_interval),
            "maxPoolSize": self.max_connections,
            **_tls_options(connection.ssl),
        }
        if self.socket_timeout is not None:
            options["socketTimeoutMS"] = _to_milliseconds(self.socket_timeout)
        given = self.model_dump(by_alias=True, exclude_none=True)
        return options | {name: given[name] for name in given if name.startswith("tls")}


def _to_milliseconds(duration: timedelta) -> int:
    return max(int(duration.total_seconds() * 1000), 1)


def _tls_options(given: Any) -> dict[str, Any]:
    """Translate Kombu's ``ssl``, which is Celery's ``broker_use_ssl``, for MongoDB."""
    if not given:
        return {}
    if not isinstance(given, Mapping):
        return {"tls": True}
    options: dict[str, Any] = {"tls": True}
    values = {str(name).removeprefix("ssl_"): value for name, value in given.items()}
    key = values.pop("keyfile", None)
    certificate = values.pop("certfile", None)
    if key not in {None, certificate}:
        raise InvalidArgument(
            "broker_use_ssl has a keyfile: MongoDB needs key and certificate in one file; "
            "give it as certfile, or as the option tlsCertificateKeyFile",
            argument="broker_use_ssl",
        )
    if certificate is not None:
        options["tlsCertificateKeyFile"] = certificate
    if (authorities := values.pop("ca_certs", None)) is not None:
        options["tlsCAFile"] = authorities
    if values.pop("cert_reqs", ssl.CERT_REQUIRED) in {ssl.CERT_NONE, "none", "CERT_NONE"}:
        options["tlsAllowInvalidCertificates"] = True
    elif values.pop("check_hostname", True) is False:
        options["tlsAllowInvalidHostnames"] = True
    values.pop("check_hostname", None)
    if values:
        raise InvalidArgument(
            f"broker_use_ssl has no option {next(iter(values))!r}; give ca_certs, certfile, "
            "cert_reqs or check_hostname",
            argument="broker_use_ssl",
        )
    return options


def mongodb_uri(connection: Connection) -> str:
    """Return the MongoDB URI of a Kombu connection.

    Kombu passes a URL on as it is after ``microqueue+``, or for a transport that was named. It
    splits ``microqueue://host:port/db``, and each URL to which it fails over.
    """
    host = connection.hostname or "localhost"
    while host.startswith(f"{SCHEME}+"):  # A copy of a connection that failed over has it.
        host = host.removeprefix(f"{SCHEME}+")
    database = quote((connection.virtual_host or "").strip("/"), safe="")
    if "://" not in host:
        named = connection.transport_cls if isinstance(connection.transport_cls, str) else ""
        is_srv = named.endswith("+srv")
        host = f"[{host}]" if ":" in host else host  # IPv6
        uri = f"mongodb+srv://{host}" if is_srv else f"mongodb://{host}:{_port(connection)}"
        return _with_user(f"{uri}/{database}", connection)
    scheme, _, rest = host.partition("://")
    scheme = "mongodb" if scheme == SCHEME else scheme
    place, mark, query = (rest or f"localhost:{_port(connection)}/").partition("?")
    authority, _, path = place.partition("/")
    if database and not path:
        place = f"{authority}/{database}"
    uri = f"{scheme}://{place}{mark}{query}"
    return uri if "@" in place else _with_user(uri, connection)


def _port(connection: Connection) -> int:
    return connection.port or DEFAULT_PORT


def check_uri_options(uri: str) -> None:
    """Reject options of a URI that MongoDB's client would ignore.

    Raises:
        InvalidArgument: It does not know an option.
    """
    for option in filter(None, re.split("[&;]", uri.partition("?")[2])):
        name = option.partition("=")[0]
        try:
            split_options(option, warn=False)
        except InvalidURI:
            continue  # The client says what is wrong with the form of it.
        except ConfigurationError:
            close = closest_option(name, list(TransportOptions.model_fields))
            hint = f"; give {close[0]} in broker_transport_options" if close else ""
            raise InvalidArgument(
                f"broker_url has the option {name!r}, which MongoDB does not know{hint}",
                argument=name,
                code=UNKNOWN_OPTION,
                closest=close,
            ) from None
        except (PyMongoError, OSError, ValueError, TypeError):
            continue  # The client says what is wrong with its value.


def use_alternates(connection: Connection) -> None:
    """Check the URLs of a connection, without those that are empty. One alone is no alternate.

    Kombu switches to the next URL even if that is the same one, and would lose its options.

    Raises:
        InvalidArgument: Kombu cannot switch to one of several.
    """
    urls = [one for one in connection.alt if one.strip()]
    if len(urls) > 1:
        check_alternates(urls)
    if len(urls) == len(connection.alt) > 1:
        return
    connection.alt = urls if len(urls) > 1 else []
    connection.cycle = None
    if connection.alt:
        connection.cycle = connection.failover_strategy(connection.alt)
        next(connection.cycle)


def check_alternates(urls: Sequence[str]) -> None:
    """Reject URLs that Kombu cannot switch to, before it has to.

    Kombu splits the URL to which it fails over into a host, a port, a user and a database. It takes
    the scheme for the name of the transport. A port or a database that is missing is that of the
    URL before.

    Raises:
        InvalidArgument: A URL has options or several hosts, or is one of Kombu's own transport to
            MongoDB; or some have a port or a database, and others do not.
    """
    parts = [urlsplit(url) for url in urls]
    ours = [one for one in parts if one.scheme in SCHEMES]
    for one in parts:
        shown = masked_uri(one.geturl(), "**")
        if one.scheme in OTHER_SCHEMES:
            raise _cannot_switch_to(
                shown,
                "with this scheme Kombu would switch to its own transport to MongoDB; begin the "
                f"URL with {SCHEME}+",
            )
        if one in ours and (one.query or "," in one.netloc):
            raise _cannot_switch_to(
                shown,
                "of several URLs none can have options or several hosts; list the members of a "
                "replica set in one URL, as in microqueue+mongodb://h1,h2,h3/database?replicaSet=rs",
            )
    hosts = [one for one in ours if not one.scheme.endswith("+srv")]
    ports = [re.search(r":(\d+)$", one.netloc) for one in hosts]
    for name, some, usual, given in (
        ("a port", hosts, str(DEFAULT_PORT), [one and one[1] for one in ports]),
        ("a database", ours, None, [one.path.strip("/") or None for one in ours]),
    ):
        if None in given and set(given) - {None, usual}:
            shown = masked_uri(some[given.index(None)].geturl(), "**")
            raise _cannot_switch_to(shown, f"give each of the URLs {name}, or none")


def _cannot_switch_to(url: str, reason: str) -> InvalidArgument:
    text = f"broker_url lists {url}, to which the connection cannot fail over: {reason}"
    return InvalidArgument(text, argument="broker_url", value=url)


def _with_user(uri: str, connection: Connection) -> str:
    if not connection.userid:
        return uri
    scheme, _, rest = uri.partition("://")
    password = f":{quote(connection.password, safe='')}" if connection.password else ""
    return f"{scheme}://{quote(connection.userid, safe='')}{password}@{rest}"


def masked_uri(uri: str, mask: str) -> str:
    """Return a URI without its password, for logs."""
    scheme, _, rest = uri.partition("://")
    place, question, query = rest.partition("?")
    if "@" not in place and "/" not in place:
        place, question, query = rest, "", ""  # A question mark in a password: it is not valid.
    user, at, host = place.rpartition("@")
    if at and ":" in user:
        user = f"{user.partition(':')[0]}:{mask}"
    return SECRETS.sub(rf"\1{mask}", f"{scheme}://{user}{at}{host}{question}{query}")
