"""Topics: what a publish costs by the number of bound queues, and how soon a subscriber has it."""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

from pymongo import WriteConcern

from benchmarks.database import Database, payloads
from microqueue import Topic
from microqueue.topic import MAX_BYTES, MAX_MESSAGES

BOUND = (0, 1, 10)
EVERY_SEC = 0.02
WARM_UP = 5
PATIENCE_SEC = 60


def publish_ms(database: Database, count: int) -> tuple[float, dict[int, float]]:
    """Publish to topics with 0, 1 and 10 bound queues, and insert plain documents, alternately.

    Returns:
        The median time of an insert into a capped collection, and of a publish by bound queues.
    """
    plain: list[float] = []
    took: dict[int, list[float]] = {bound: [] for bound in BOUND}
    with database.client() as client:
        shop = client[database.name]
        shop.create_collection("bare", capped=True, size=MAX_BYTES, max=MAX_MESSAGES)
        bare = shop.get_collection("bare", write_concern=WriteConcern("majority"))
        topics = {bound: Topic(shop, f"bound_{bound}") for bound in BOUND}
        for bound, topic in topics.items():
            for number in range(bound):
                topic.bind(f"queue_{number}")
        for number, payload in enumerate(payloads(count + WARM_UP)):
            began = time.perf_counter()
            bare.insert_one(dict(payload))
            plain.append(time.perf_counter() - began)
            for bound, topic in topics.items():
                began = time.perf_counter()
                topic.publish(payload)
                took[bound].append(time.perf_counter() - began)
            if number < WARM_UP:
                for values in (plain, *took.values()):
                    values.clear()
    medians = {bound: statistics.median(values) * 1000 for bound, values in took.items()}
    return statistics.median(plain) * 1000, medians


def delivery_ms(database: Database, count: int, subscribers: int) -> float:
    """Publish a message now and then; return the median time until each subscriber has it."""
    waits: list[float] = []
    with database.client() as client:
        topic = Topic(client[database.name], "prices")
        subscriptions = [topic.subscribe(timeout=PATIENCE_SEC) for _ in range(subscribers)]

        def read(subscription: Any) -> None:
            for _, message in zip(range(count), subscription, strict=False):
                waits.append(time.perf_counter() - message.body["sent"])

        threads = [threading.Thread(target=read, args=(one,)) for one in subscriptions]
        for thread in threads:
            thread.start()
        for payload in payloads(count):
            time.sleep(EVERY_SEC)
            topic.publish({**payload, "sent": time.perf_counter()})
        for thread, subscription in zip(threads, subscriptions, strict=True):
            thread.join()
            subscription.close()
    return statistics.median(waits) * 1000
