"""Processes for the tests of races, and the connection to them.

The tests start them as :class:`Process`; the rest of this file runs there, as
``python race_worker.py ROLE OPTIONS``. Both speak JSON, a line at a time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any

from pymongo import MongoClient
from pymongo.errors import PyMongoError

import microqueue
from microqueue import LeaseLost, Queue, QueueSettings, Sweeper, Task
from microqueue.operations.call import Call, Operation
from tests.tapping import tap


class Process:
    """A process, as the test that started it sees it."""

    def __init__(self, role: str, **options: Any) -> None:
        # It must use the very package that is tested here.
        package = Path(microqueue.__file__).parents[1]
        self._process = subprocess.Popen(
            [sys.executable, __file__, role, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(package)},
        )

    def hear(self) -> Any:
        """Wait for the next line."""
        line = _open(self._process.stdout).readline()
        assert line, f"the process ended with {self._process.wait()}"
        return json.loads(line)

    def tell(self, message: object) -> None:
        """Send a line."""
        pipe = _open(self._process.stdin)
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    def suspend(self) -> None:
        """Stop it where it is, as a paused container or a sleeping laptop would."""
        self._process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def wake(self) -> None:
        """Let it continue from there."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill it, whatever it is doing."""
        self._process.kill()
        self._process.communicate()


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


# What follows runs in the process.


def say(message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def hear() -> Any:
    """Wait for the next line; nothing when the test is over."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def drain(uri: str) -> None:
    """Empty one queue after the other, as told: one by one, or in batches. Say what came."""
    with MongoClient[Any](uri) as client:
        client.admin.command("ping")  # Connects, so that no race begins with that.
        say("ready")
        while order := hear():
            queue = Queue[Any](client[order["database"]])
            say([[task.id, task.attempts] for task in drained(queue, order["batch"])])


def drained(queue: Queue[Any], batch: int | None) -> Iterator[Task[Any]]:
    if batch is None:
        while task := queue.pop():
            queue.mark_done(task)
            yield task
    else:
        while tasks := queue.pop_many(batch):
            assert not queue.mark_done_many(tasks)
            yield from tasks


def oversleep(uri: str, database: str) -> None:
    """Take a task, sleep for too long, and then try everything that a worker can do with it."""
    with MongoClient[Any](uri) as client:
        queue = Queue[Any](client[database])
        task = queue.pop(worker_id="sleeper")
        assert task is not None
        say(task.id)
        hear()
        say(dict(late_attempts(queue, task)))


def late_attempts(queue: Queue[Any], task: Task[Any]) -> Iterator[tuple[str, str]]:
    attempts: dict[str, Callable[[], object]] = {
        "mark_done": lambda: queue.mark_done(task, result="late"),
        "mark_retry": lambda: queue.mark_retry(task, "late"),
        "mark_retry at once": lambda: queue.mark_retry(task, "late", delay=0),
        "mark_failure": lambda: queue.mark_failure(task, "late"),
        "touch": lambda: queue.touch(task),
        "release": lambda: queue.release(task),
        "release to the front": lambda: queue.release(task, front=True),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except LeaseLost:
            yield name, "LeaseLost"
        else:
            yield name, "accepted"
    yield "mark_done_many", "LeaseLost" if queue.mark_done_many([task]) else "accepted"


def die(uri: str) -> None:
    """For every order, start a process that is killed after so many writes; say if it was.

    The processes are forked from this one, which has not connected, because that is fast.
    """
    while order := hear():
        child = os.fork()
        if child == 0:
            with MongoClient[Any](uri) as client:
                act(client, **order)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        say({0: "survived", -signal.SIGKILL: "killed"}[os.waitstatus_to_exitcode(status)])


def act(client: MongoClient[Any], *, database: str, action: str, writes: int) -> None:
    settings = QueueSettings(dead_letters="collection")
    queue = DoomedQueue(client[database], settings=settings)
    task = queue.pop() if action == "mark_failure" else None
    queue.writes_left = writes
    if task is not None:
        queue.mark_failure(task, "broken")
    elif action == "replay":
        queue.dead_letters.replay("letter")
    elif action == "discard":
        queue.dead_letters.discard("letter")
    elif action == "sweep":
        Sweeper(queue, lock_ttl=2.5).run_once()
    else:
        Sweeper(queue).move_dead_letters()


class DoomedQueue(Queue[Any]):
    """A queue whose process is killed right after one of its writes."""

    WRITES = frozenset({"insert_one", "update_one", "update_many", "replace_one", "delete_one"})
    writes_left: int | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        tap(self, self._run)

    def _run(self, usual: Callable[..., Any], operation: Operation[Any]) -> Any:
        return usual(self._watched(operation))

    def _watched(self, operation: Operation[Any]) -> Generator[Call, Any, Any]:
        try:
            call = next(operation)
            while True:
                try:
                    reply = yield call
                except PyMongoError as exc:
                    call = operation.throw(exc)
                else:
                    self._count(call)
                    call = operation.send(reply)
        except StopIteration as stop:
            return stop.value

    def _count(self, call: Call) -> None:
        if self.writes_left is not None and call.method in self.WRITES:
            self.writes_left -= 1
            if self.writes_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


ROLES: dict[str, Callable[..., None]] = {"drain": drain, "oversleep": oversleep, "die": die}


if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
