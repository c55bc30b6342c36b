"""Programs that users write: a worker that stops by signals, and tests with the fixtures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from microqueue.embedded import EmbeddedServer

THREADS = """
import logging, os, sys, time
from microqueue import Queue
from microqueue.worker import Worker, stopping_by_signal

def note(record):
    if hasattr(record, "grace_sec"):
        print("stopping", flush=True)
    return True

logging.basicConfig(level=logging.INFO)
logging.getLogger("microqueue.worker").addFilter(note)

def handler(payload):
    print("begun", flush=True)
    time.sleep(100)

with Queue.from_uri(os.environ["MICROQUEUE_URI"]) as queue:
    worker = Worker(queue, handler, grace=float(sys.argv[1]))
    with stopping_by_signal(worker.stop):
        worker.run()
print("ended", flush=True)
os._exit(0)  # Its handler still sleeps.
"""

COROUTINES = """
import asyncio, logging, os, sys
from microqueue import AsyncQueue
from microqueue.worker import AsyncWorker, stopping_by_signal

def note(record):
    if hasattr(record, "grace_sec"):
        print("stopping", flush=True)
    return True

logging.basicConfig(level=logging.INFO)
logging.getLogger("microqueue.worker").addFilter(note)

async def handler(payload):
    print("begun", flush=True)
    await asyncio.sleep(100)

async def main():
    async with AsyncQueue.from_uri(os.environ["MICROQUEUE_URI"]) as queue:
        worker = AsyncWorker(queue, handler, grace=float(sys.argv[1]))
        with stopping_by_signal(worker.stop):
            await worker.run()

asyncio.run(main())
print("ended", flush=True)
"""


@pytest.mark.parametrize("grace", ["1", "300"], ids=["within grace", "second signal"])
@pytest.mark.parametrize("program", [THREADS, COROUTINES], ids=["threads", "coroutines"])
def test_worker_in_a_program_releases_its_tasks_on_a_signal(
    program: str,
    grace: str,
    microqueue_server: EmbeddedServer,
    microqueue_database: Any,
    microqueue_queue: Any,
) -> None:
    uri = microqueue_server.uri.replace("/?", f"/{microqueue_database.name}?")
    task = microqueue_queue.enqueue({})
    with subprocess.Popen(
        [sys.executable, "-c", program, grace],
        env={**os.environ, "MICROQUEUE_URI": uri},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = (line.rstrip() for line in process.stdout)
        assert "begun" in said
        process.send_signal(signal.SIGTERM)
        assert "stopping" in said
        if grace == "300":
            process.send_signal(signal.SIGTERM)
        assert "ended" in said
        assert process.wait(90) == 0
    found = microqueue_queue.get(task.id)
    assert (found.status, found.attempts, found.history[-1].outcome) == ("pending", 0, "released")


TESTS = """
pytest_plugins = ["microqueue.testing.fixtures"]

def test_queue(microqueue_queue):
    microqueue_queue.enqueue({"n": 1})
    assert microqueue_queue.pop().payload == {"n": 1}
"""


@pytest.mark.measured
@pytest.mark.parametrize(("uri", "status"), [(True, 0), (False, 1)], ids=["given", "not given"])
def test_fixtures_use_the_server_of_the_test_uri(
    tmp_path: Path, microqueue_server: EmbeddedServer, uri: bool, status: int
) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS, encoding="utf-8")
    variables = {**os.environ, "MICROQUEUE_MONGOD": str(tmp_path / "none")}
    if uri:
        variables["MICROQUEUE_TEST_URI"] = microqueue_server.uri
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    result = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert result.returncode == status, result.stdout
    assert ("EmbeddedServerError" in result.stdout) is bool(status)
