"""A Kombu transport on microqueue: Celery with MongoDB as its broker.

After an import of this module, Kombu and Celery know the scheme::

    import microqueue.contrib.kombu

    app = Celery(broker="microqueue+mongodb://localhost/jobs")

Without an import, name the class::

    app = Celery(broker="mongodb://localhost/jobs")
    app.conf.broker_transport = "microqueue.contrib.kombu:Transport"
"""

from __future__ import annotations

from kombu.transport import TRANSPORT_ALIASES

from microqueue.contrib.kombu.channel import Channel
from microqueue.contrib.kombu.options import SCHEMES, TransportOptions
from microqueue.contrib.kombu.transport import Transport

__all__ = ["Channel", "Transport", "TransportOptions"]

for _scheme in SCHEMES:
    TRANSPORT_ALIASES[_scheme] = "microqueue.contrib.kombu.transport:AliasTransport"
