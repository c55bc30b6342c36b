"""Celery on the Kombu transport: the application of its worker, and of a process that sends tasks.

The id of a Celery task is its key, and the lease token of its message is the token of its run. A
worker writes acknowledgements to the ledger when MongoDB has confirmed them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from random import Random
from typing import Any

from celery import Celery, Task

import microqueue.contrib.kombu  # noqa: F401 (it registers the schemes)
from microqueue.contrib.kombu import broker as brokers
from microqueue.contrib.kombu.deliveries import Deliveries, Settle
from microqueue.task_ids import id_key
from tests.chaos.handlers import Participant, participant
from tests.chaos.ledger import now
from tests.chaos.roles.guests import MOST_ATTEMPTS, QUEUE, WHO
from tests.chaos.setup import CELERY, Setup

NAME = "chaos.handle"
LEASES: dict[str, float] = {}
"""When the leases of deliveries end, by their tokens, unless they are renewed."""
SETTLED = {Settle.ACK: "done", Settle.REQUEUE: "retried", Settle.RELEASE: "released"}


def application(setup: Setup) -> Celery:
    """Return the application, with one task."""
    app = Celery("chaos", set_as_current=False)
    app.conf.update(
        broker_url=f"microqueue+{setup.address(CELERY)}",
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "visibility_timeout": setup.lease_sec,
            "sweep_interval": 1,
            "delivery_limit": None,
        },
        task_default_queue=QUEUE,
        task_acks_late=True,
        task_ignore_result=True,
        # A message that is sent again would be a second one, with the same key.
        task_publish_retry=False,
        worker_hijack_root_logger=False,
    )

    @app.task(name=NAME, bind=True, shared=False)  # type: ignore[untyped-decorator]  # Celery's.
    def handle(self: Task, sec: float) -> None:
        me, key = participant(), self.request.id
        token = self.request.properties["delivery_tag"].rpartition(".")[0]
        until = LEASES.get(token)
        me.ledger.write("start", key=key, token=token, attempt=0, lease_until=until)
        time.sleep(sec)
        me.ledger.write("finish", key=key, token=token, outcome="done")

    return app


def observe_deliveries(me: Participant) -> None:
    """Let the transport of this process write what it has settled and renewed."""
    ledger = me.ledger
    settle_all = Deliveries._settle_all  # noqa: SLF001 (that is the purpose)
    renew_all, add = Deliveries._renew_all, Deliveries.add  # noqa: SLF001

    def observed(self: Deliveries, requests: Iterable[Any]) -> Any:
        requests = list(requests)
        lost = yield from settle_all(self, requests)
        refused = {id_key(error.task_id) for error in lost}
        ledger.write_all(
            {
                "event": "settled",
                "key": one.claimed.payload["headers"]["id"],
                "token": one.claimed.lease.token,
                "outcome": SETTLED[one.how],
            }
            for one in requests
            if one.how in SETTLED and id_key(one.claimed.id) not in refused
        )
        return lost

    def renewed(self: Deliveries, claims: Iterable[Any]) -> Any:
        claims, until = list(claims), now() + me.setup.lease_sec
        lost = yield from renew_all(self, claims)
        refused = {id_key(task.id) for task in lost}
        for one in claims:
            if id_key(one.id) not in refused:
                LEASES[one.lease.token] = until
        ledger.write_all(
            {
                "event": "renewed",
                "key": one.payload["headers"]["id"],
                "token": one.lease.token,
                "lease_until": until,
            }
            for one in claims
            if id_key(one.id) not in refused
        )
        return lost

    def added(self: Deliveries, tag: str, claimed: Any, **options: Any) -> None:
        expires_at = claimed.task.lease.expires_at.timestamp()
        LEASES[claimed.lease.token] = me.setup.monotonic(expires_at)
        add(self, tag, claimed, **options)

    Deliveries._settle_all = observed  # type: ignore[method-assign]  # noqa: SLF001
    Deliveries._renew_all = renewed  # type: ignore[method-assign]  # noqa: SLF001
    Deliveries.add = added  # type: ignore[method-assign]


def send(me: Participant, *, seed: int, for_sec: float, rate: float) -> None:
    """Send tasks for a while, some of them with a countdown."""
    rng = Random(f"{seed}/celery")
    app = application(me.setup)
    ends, number = now() + for_sec, 0
    while now() < ends:
        number += 1
        key = f"{me.ledger.who}-{number}"
        sec = rng.choice((0.0, 0.0, 0.005, 0.02, 0.3))
        countdown = round(rng.uniform(0.5, 5.0), 2) if rng.random() < 0.15 else None
        due_at = None if countdown is None else now() + countdown
        plan: dict[str, Any] = {"queue": QUEUE, "due_at": due_at, "max_attempts": MOST_ATTEMPTS}
        plan |= {"kind": "ok", "how": "celery", "expect": "done"}
        me.ledger.write("plan", key=key, **plan)
        try:
            app.send_task(NAME, kwargs={"sec": sec}, task_id=key, countdown=countdown)
        except Exception as exc:  # noqa: BLE001 (of Kombu, the queue or the driver: an outage)
            me.ledger.write("uncertain", key=key, error=repr(exc)[:200])
        else:
            me.ledger.write("stored", key=key)
        threading.Event().wait(1 / rate)
    app.amqp.producer_pool.force_close_all()
    app.pool.force_close_all()
    app.close()
    brokers._close_all()  # noqa: SLF001 (as at the exit of a process that the nursery did not fork)


if WHO in os.environ:
    app = application(Setup.read())
    observe_deliveries(participant())
