"""The options of ``MongoClient`` that ``from_uri`` passes on, for type checkers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import tzinfo
from typing import Any, TypedDict


class ClientOptions(TypedDict, total=False):
    """The options of ``MongoClient`` and ``AsyncMongoClient``, as PyMongo documents them.

    An older PyMongo may lack some of them, and rejects them.
    """

    # The server, and how it is found.
    port: int
    directConnection: bool
    replicaSet: str | None
    loadBalanced: bool
    srvServiceName: str
    srvMaxHosts: int
    srvAllowedHostsSuffix: str
    srv_host_validator: Callable[..., Any] | None
    server_selector: Callable[..., Any] | None
    connect: bool
    # Time limits.
    timeoutMS: float | None
    serverSelectionTimeoutMS: float
    connectTimeoutMS: float | None
    socketTimeoutMS: float | None
    waitQueueTimeoutMS: float | None
    heartbeatFrequencyMS: float
    localThresholdMS: float
    serverMonitoringMode: str
    # The pool.
    maxPoolSize: int | None
    minPoolSize: int
    maxConnecting: int
    maxIdleTimeMS: float | None
    waitQueueMultiple: int | None
    # Reads, writes and retries.
    readConcernLevel: str | None
    readPreference: str
    readPreferenceTags: Any
    read_preference: Any
    maxStalenessSeconds: int
    w: int | str
    wTimeoutMS: int
    journal: bool
    fsync: bool
    retryReads: bool
    retryWrites: bool
    maxAdaptiveRetries: int
    max_adaptive_retries: int
    enableOverloadRetargeting: bool
    enable_overload_retargeting: bool
    # Authentication, TLS and encryption.
    username: str | None
    password: str | None
    authSource: str
    authMechanism: str
    authMechanismProperties: Mapping[str, Any] | str
    authOIDCAllowedHosts: Sequence[str]
    tls: bool
    ssl: bool
    tlsCAFile: str
    tlsCRLFile: str
    tlsCertificateKeyFile: str
    tlsCertificateKeyFilePassword: str | None
    tlsAllowInvalidCertificates: bool
    tlsAllowInvalidHostnames: bool
    tlsDisableOCSPEndpointCheck: bool
    tlsInsecure: bool
    auto_encryption_opts: Any
    # BSON.
    document_class: type[Any]
    type_registry: Any
    tz_aware: bool
    tzinfo: tzinfo | None
    uuidRepresentation: str
    datetime_conversion: Any
    unicode_decode_error_handler: str
    # The rest.
    appname: str | None
    driver: Any
    server_api: Any
    event_listeners: Sequence[Any]
    compressors: Any
    zlibCompressionLevel: int
