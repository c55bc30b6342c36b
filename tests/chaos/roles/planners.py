"""Planners: a schedule that fires every second, a topic with bound queues, and its subscribers.

The scheduler and the publisher end by SIGTERM before the queues are drained, the subscribers after
that. One that is killed is replaced: a publisher continues, a scheduler puts the same schedule
again, and a subscriber resumes behind the last message that its predecessor wrote to the ledger.
"""

from __future__ import annotations

import json
import signal
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pymongo.errors import PyMongoError

from microqueue import MicroqueueError, Queue, Topic
from tests.chaos.handlers import Participant
from tests.chaos.ledger import LEDGER
from tests.chaos.setup import BATCHED, MAIN

BOUND = (MAIN, BATCHED)
TOPIC = "news"
SCHEDULE = "tick"
PERIOD = timedelta(seconds=1)
AGAIN_SEC = 0.5
CAUGHT_UP_SEC = 25.0
"""How long the last runs of a schedule may take, before it is removed anyway."""


def _payload(database: str) -> dict[str, Any]:
    return {"kind": "ok", "sec": 0.0, "times": 1, "database": database}


def _until_asked() -> threading.Event:
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    return stopping


def _insist(call: Any) -> Any:
    """Repeat a call until the server answers."""
    while True:
        try:
            return call()
        except (MicroqueueError, PyMongoError):
            threading.Event().wait(AGAIN_SEC)


def run_scheduler(me: Participant, database: str) -> None:
    """Have a schedule until SIGTERM: workers and sweepers fire it."""
    stopping = _until_asked()
    settings = me.setup.settings(database)
    with Queue[Any].from_uri(me.setup.address(database), MAIN, settings=settings) as queue:
        _insist(
            lambda: queue.schedules.put(
                SCHEDULE, every=PERIOD, catch_up="all", payload=_payload(database)
            )
        )
        name = f"{MAIN}:{SCHEDULE}"
        me.ledger.write("schedule", name=name, phase="put", wall=me.setup.wall())
        stopping.wait()
        last = me.setup.wall()
        _await_runs(me, queue, datetime.fromtimestamp(last, UTC))
        me.ledger.write("schedule", name=name, phase="over", wall=last)
        _insist(lambda: queue.schedules.remove(SCHEDULE))


def _await_runs(me: Participant, queue: Queue[Any], last: datetime) -> None:
    """Wait until the schedule has fired up to an instant; if it does not, its runs are missed."""
    ends = me.setup.wall() + CAUGHT_UP_SEC
    while me.setup.wall() < ends:
        found = _insist(lambda: queue.schedules.get(SCHEDULE))
        if found is not None and found.next_at is not None and found.next_at > last:
            return
        threading.Event().wait(AGAIN_SEC)


def run_publisher(me: Participant, database: str, *, rate: float = 5.0) -> None:
    """Publish messages until SIGTERM, each of which becomes a task of each bound queue."""
    stopping = _until_asked()
    settings = me.setup.settings(database)
    with Queue[Any].from_uri(me.setup.address(database), MAIN, settings=settings) as queue:
        topic = Topic(queue, TOPIC)
        for name in BOUND:
            _insist(lambda name=name: topic.bind(name))
        number = 0
        while not stopping.is_set():
            number += 1
            key = f"{me.ledger.who}-{number}"
            keys = [f"{key}>{name}" for name in BOUND]
            plan = {"due_at": None, "max_attempts": me.setup.max_attempts, "kind": "ok"}
            me.ledger.write_all(
                {"event": "plan", "key": one, "queue": name, "expect": "done", **plan}
                for one, name in zip(keys, BOUND, strict=True)
            )
            try:
                message = {**_payload(database), "key": key, "number": number}
                topic.publish({**message, "publisher": me.ledger.who}, message_id=key)
            except (MicroqueueError, PyMongoError) as exc:
                error = repr(exc)[:200]
                me.ledger.write_all(
                    {"event": "uncertain", "key": one, "error": error} for one in keys
                )
            else:
                me.ledger.write("published", number=number)
                me.ledger.write_all({"event": "stored", "key": one} for one in keys)
            stopping.wait(1 / rate)


def run_subscriber(me: Participant, database: str) -> None:
    """Read the topic, and write what arrives. After an error, resume at the last position."""
    stopping = _until_asked()
    settings = me.setup.settings(database)
    position: Any = _last_position(me) or "start"
    me.ledger.write("subscribed", position=position)
    with Queue[Any].from_uri(me.setup.address(database), MAIN, settings=settings) as queue:
        topic = Topic(queue, TOPIC)
        while not stopping.is_set():
            try:
                with topic.subscribe(from_=position, timeout=1) as messages:
                    gaps = 0
                    while not stopping.is_set():
                        message = next(messages, None)
                        for gap in messages.gaps[gaps:]:
                            me.ledger.write("gap", after=gap.after, first=gap.first)
                            gaps += 1
                        if message is not None:
                            _receive(me, message)
                        position = messages.position or position
            except (MicroqueueError, PyMongoError):
                # What was delivered before the error is not delivered again.
                position = messages.position or position
                stopping.wait(AGAIN_SEC)


def _receive(me: Participant, message: Any) -> None:
    body, position = message.body, message.position
    publisher, number = body["publisher"], body["number"]
    me.ledger.write("received", publisher=publisher, number=number, position=position)


def _last_position(me: Participant) -> str | None:
    """Return where the predecessors of this process were, as they wrote it to the ledger."""
    slot = me.ledger.who.rpartition("-")[0]
    last: dict[str, Any] = {}
    for path in (Path(me.setup.folder) / LEDGER).glob(f"{slot}-*.jsonl"):
        for raw in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(raw)
            if line["event"] == "received" and line["at"] >= last.get("at", 0.0):
                last = line
    return last.get("position")
