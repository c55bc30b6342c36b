"""The Celery application of the tests: of the worker processes, and of the tests that send to them.

A task writes each run to a ledger: a file of one JSON object per line, which no crash of the worker
and no error of the broker can undo.
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject
from kombu import Exchange, Queue
from kombu.common import Broadcast

import microqueue.contrib.kombu  # noqa: F401 (it registers the schemes)

CONFIG = "CELERY_TESTS_CONFIG"
LEDGER = "CELERY_TESTS_LEDGER"
NEWS = Exchange("news", type="topic")
QUEUES = [
    Queue("celery", Exchange("celery"), routing_key="celery"),
    Queue("slow", Exchange("slow"), routing_key="slow"),
    Queue("sport", NEWS, routing_key="sport.#"),
    Queue("finals", NEWS, routing_key="*.final"),
    Broadcast("everyone"),
]


def note(task: Task, what: str, value: Any = None) -> None:
    """Write a line to the ledger."""
    line = {
        "what": what,
        "name": task.name,
        "id": task.request.id,
        "value": value,
        "at": time.time(),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "worker": task.request.hostname,
        "redelivered": (task.request.delivery_info or {}).get("redelivered"),
    }
    file = os.open(os.environ[LEDGER], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def shop(config: dict[str, Any]) -> Celery:
    """Return the application, with all its tasks."""
    app = Celery("shop", set_as_current=False)
    app.conf.update(task_queues=QUEUES, task_default_queue="celery", **config)
    # Shared tasks would be registered with the application of the next test, too.
    task = partial(app.task, bind=True, shared=False)

    @task(name="shop.add")
    def add(self: Task, left: int, right: int) -> int:
        note(self, "start", [left, right])
        return left + right

    @task(name="shop.total")
    def total(self: Task, numbers: list[int]) -> int:
        note(self, "start", numbers)
        return sum(numbers)

    @task(name="shop.flaky", max_retries=3)
    def flaky(self: Task, failures: int, countdown: float = 3) -> int:
        """Fail so often.

        The process of a run stores the state RETRY after it has sent the next one, which must not
        have stored SUCCESS by then: Celery would replace that.
        """
        note(self, "start", self.request.retries)
        if self.request.retries < failures:
            raise self.retry(countdown=countdown)
        return int(self.request.retries)

    @task(name="shop.quick", rate_limit="2/s")
    def quick(self: Task) -> None:
        note(self, "start")

    @task(name="shop.wait", acks_late=True)
    def wait(self: Task, gate: str) -> str:
        """Run until a file exists."""
        note(self, "start", gate)
        while not Path(gate).exists():
            time.sleep(0.02)
        note(self, "end", gate)
        return gate

    @task(name="shop.nap", acks_late=True)
    def nap(self: Task, number: int, seconds: float) -> int:
        note(self, "start", number)
        time.sleep(seconds)
        note(self, "end", number)
        return number

    @task(name="shop.refuse", acks_late=True)
    def refuse(self: Task, gate: str, *, requeue: bool) -> str:
        """Reject the message unless a file exists."""
        note(self, "start", gate)
        if not Path(gate).exists():
            raise Reject(f"{gate} is closed", requeue=requeue)
        return gate

    return app


if CONFIG in os.environ:
    app = shop(json.loads(os.environ[CONFIG]))
