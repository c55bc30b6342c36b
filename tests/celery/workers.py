"""Worker processes, as ``celery worker`` starts them, and what the tests see of them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pymongo import MongoClient

from tests.celery.shop import CONFIG, LEDGER, shop
from tests.waiting import wait_for

PATIENCE_SEC = 90
"""How long a busy machine may take for what takes a second."""
GEVENT = pytest.param(
    "gevent",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("gevent") is None, reason="gevent is not installed"
    ),
)


class Worker:
    """One ``celery worker`` with its pool."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, log: Path) -> None:
        self.process = process
        self.name = name
        self._log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for_log(self, text: str, times: int = 1) -> None:
        """Wait until the worker has logged something."""

        def logged() -> bool:
            assert self.process.poll() is None, f"the worker ended:\n{self.log}"
            return self.log.count(text) >= times

        wait_for(logged, PATIENCE_SEC, what=f"{text!r} in the log of {self.name}")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the main process alone, as a process manager does."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end, and return the exit status."""
        return self.process.wait(PATIENCE_SEC)

    def stop(self) -> int:
        """Stop it: running tasks end first."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill the main process and its pool, as when a machine loses power."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


class Site:
    """A database with an application, its workers, and the ledger of all runs."""

    def __init__(self, uri: str, directory: Path, **config: Any) -> None:
        self.uri = uri
        self.directory = directory
        self.ledger_file = directory / f"ledger-{uuid4().hex[:8]}"
        self.config: dict[str, Any] = {
            "broker_url": f"microqueue+{uri}",
            "result_backend": uri,
            "broker_connection_retry_on_startup": True,
            "worker_send_task_events": True,
            "result_chord_retry_interval": 0.2,
            **config,
        }
        self.app = shop(self.config)
        self.client: MongoClient[Any] = MongoClient(uri)
        self.database = self.client.get_default_database()

    def close(self) -> None:
        """Close what the tests opened themselves."""
        results = self.app.backend._connection  # noqa: SLF001 (the backend never closes it)
        if results is not None:
            results.close()
        self.app.amqp.producer_pool.force_close_all()
        self.app.pool.force_close_all()
        self.app.close()
        self.client.close()

    def task(self, name: str) -> Any:
        """Return a task by its short name."""
        return self.app.tasks[f"shop.{name}"]

    def result(self, sent: Any) -> Any:
        """Wait for the result of a task, or of a group."""
        return sent.get(timeout=PATIENCE_SEC, interval=0.05)

    def gate(self) -> Path:
        """Return the path of a file that does not exist, for which tasks wait."""
        return self.directory / f"gate-{uuid4().hex[:8]}"

    def ledger(self, what: str = "start", **fields: Any) -> list[dict[str, Any]]:
        """Return the lines of the ledger with these fields, in the order of writing."""
        if not self.ledger_file.exists():
            return []
        # The last line may be half written.
        whole, _, _ = self.ledger_file.read_bytes().rpartition(b"\n")
        lines = [json.loads(line) for line in whole.splitlines()]
        wanted = {"what": what, **fields}
        return [line for line in lines if line.items() >= wanted.items()]

    def wait_for_run(self, sent: Any, what: str = "start", times: int = 1) -> None:
        """Wait until a task has started, or ended."""
        wait_for(
            lambda: len(self.ledger(what, id=sent.id)) >= times,
            PATIENCE_SEC,
            what=f"{what} of {sent.id}",
        )

    def stored(self, sent: Any) -> dict[str, Any]:
        """Return the document of a task's message."""
        found: dict[str, Any] | None = self.database.tasks.find_one(
            {"payload.headers.id": sent.id}, sort=[("_id", -1)]
        )
        assert found is not None
        return found

    def wait_for_status(self, sent: Any, status: str) -> dict[str, Any]:
        """Wait until a task's message is pending, processing, done or failed."""
        wait_for(lambda: self.stored(sent)["status"] == status, PATIENCE_SEC, what=status)
        return self.stored(sent)

    @contextlib.contextmanager
    def worker(
        self,
        *arguments: str,
        pool: str = "prefork",
        concurrency: int = 2,
        queues: str = "celery",
        **config: Any,
    ) -> Iterator[Worker]:
        """Start a worker and wait until it is ready; kill it at the end."""
        name = f"{pool}-{uuid4().hex[:8]}@test"
        log = self.directory / f"{name}.log"
        command = [sys.executable, "-m", "celery", "-A", "tests.celery.shop", "worker"]
        command += ["-P", pool, "-c", str(concurrency), "-Q", queues, "-n", name, "-l", "INFO"]
        environment = os.environ | {
            CONFIG: json.dumps(self.config | config),
            LEDGER: str(self.ledger_file),
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        worker = Worker(process, name, log)
        try:
            worker.wait_for_log(f"{name} ready.")
            yield worker
        finally:
            worker.kill()
