"""Print the modules that one task crosses, step by step: ``python -m benchmarks.walk [--archive]``.

It runs one task on an embedded MongoDB and records which modules of microqueue execute code in
each step, in the order of their first call, on a connection that is open. It prints how many there
are, and names those that do more than hold values and check arguments (the layers below
``operations`` in pyproject.toml, but for those in ``ACTING``); ``--all`` names all of them.
``--archive`` adds the archive, which needs Spark and Java; what its Python workers run is not
recorded. docs/architecture.md shows the result, which ``--markdown`` prints.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import microqueue
from microqueue import Queue, Sweeper
from microqueue.clock import ServerClock
from microqueue.embedded import EmbeddedServer
from microqueue.worker import Worker

HOME = Path(microqueue.__file__).parent
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
DRIVER = frozenset({"drivers.driver", "operations.call"})
"""The modules of every step that calls MongoDB."""
ACTING = frozenset({"effect_runner", "hooks"})
"""The modules below ``operations`` that do more than define values and check arguments."""
WORKER_STEPS = {
    "microqueue-fetcher": "claim",
    "microqueue-0": "handle",
    "microqueue-settlement-writer": "settle",
}
"""What the threads of a worker with one handler do."""


class SteadyClock(ServerClock):
    """Reads the server's time once: a slow machine would read it again in the middle of a step."""

    @property
    def stale(self) -> bool:
        """Whether the server's time was never read."""
        return self._reading is None


class Recorder:
    """Records the modules that each thread enters."""

    def __init__(self) -> None:
        self.by_thread: dict[str, list[str]] = {}

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Take note of one call; a profile function."""
        code = frame.f_code
        if event != "call" or code.co_name == "<module>" or str(HOME) not in code.co_filename:
            return
        module = ".".join(Path(code.co_filename).relative_to(HOME).with_suffix("").parts)
        entered = self.by_thread.setdefault(threading.current_thread().name, [])
        if module not in entered:
            entered.append(module)


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record all threads that start inside, and this one."""
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        yield recorder
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def modules_of(call: Callable[[], Any]) -> list[str]:
    """Return the modules that a call enters, in this thread."""
    with recording() as recorder:
        call()
    return recorder.by_thread.get(threading.current_thread().name, [])


def value_modules() -> set[str]:
    """Return the names of the modules that only define values or check arguments."""
    contracts = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    below = layers[layers.index("operations") + 1 :]
    return {name.strip() for layer in below for name in layer.split("|")} - ACTING


def walk(uri: str) -> dict[str, list[str]]:
    """Send one task through a queue, and return the modules of each step."""
    found: dict[str, list[str]] = {}
    with Queue.from_uri(uri, "mail", clock=SteadyClock()) as queue:
        queue.enqueue({})  # The first call also creates the indexes and reads the clock.
        Worker(queue, print_nothing, concurrency=1).run(burst=True)
        sweeper = Sweeper(queue)
        sweeper.run_once()

        found["enqueue"] = modules_of(lambda: queue.enqueue({"to": "ada@example.org"}))
        with recording() as recorder:
            Worker(queue, print_nothing, concurrency=1).run(burst=True)
        for thread, step in WORKER_STEPS.items():
            found[step] = recorder.by_thread[thread]
        found["sweep"] = modules_of(sweeper.run_once)
        queue.enqueue({})
        task = queue.pop()
        assert task is not None
        queue.mark_failure(task, "on purpose")
        found["replay"] = modules_of(lambda: queue.dead_letters.replay(task.id))
    return found


def walk_archive(uri: str, directory: str) -> list[str]:
    """Archive one done task, and return the modules that the driver enters."""
    from microqueue.spark import session  # noqa: PLC0415 (slow, and an extra)
    from microqueue.spark.pipelines import archive  # noqa: PLC0415

    spark = session()
    with Queue.from_uri(uri, "old") as queue:
        queue.enqueue({})
        Worker(queue, print_nothing).run(burst=True)
        path = f"{directory}/archive"
        run = partial(archive, spark, path, uri=uri, queues=["old"], older_than=0.001)
        run(dry_run=True)  # The first call also opens the connection.
        return modules_of(run)


def print_nothing(_payload: Any) -> None:
    """Handle a task."""


def main() -> None:
    """Print the walk."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="name modules of values too")
    parser.add_argument("--markdown", action="store_true", help="print the table of the document")
    parser.add_argument("--archive", action="store_true", help="archive the task too, with Spark")
    options = parser.parse_args()
    values = value_modules()
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer.start(directory) as server:
        uri = server.uri.replace("/?", "/walk?")
        found = walk(uri)
        if options.archive:
            found["archive"] = walk_archive(uri, directory)
    for step, modules in found.items():
        shown = modules if options.all else [name for name in modules if name not in values]
        if options.markdown:
            others = ", ".join(f"`{name}`" for name in shown if name not in DRIVER)
            print(f"| {step} | {len(modules)} | {others} |")
        else:
            print(f"{step}: {len(modules)}: {', '.join(shown)}")


if __name__ == "__main__":
    main()
