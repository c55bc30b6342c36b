"""Demo of microqueue: orders to ship, an unreliable payment service, a worker that is killed.

Starts an embedded MongoDB in a temporary directory, three worker processes and a sweeper.
Kills one worker while it processes a task, and verifies at the end that no task was lost.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from pymongo import MongoClient
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from microqueue import (
    BackoffPolicy,
    Outcome,
    Queue,
    QueueSettings,
    QueueStats,
    Sweeper,
    Task,
    TaskStatus,
)
from microqueue.core import core_of
from microqueue.embedded import EmbeddedServer
from microqueue.errors import EmbeddedServerError, InvalidArgument
from microqueue.worker import Worker

if TYPE_CHECKING:
    from microqueue.dashboard.server import DashboardServer

QUEUE = "orders"
WORKERS = 3
HOPELESS_SHARE = 0.05
FLAKY_SHARE = 0.2
SETTINGS = QueueSettings(
    max_attempts=5,
    visibility_timeout=timedelta(seconds=2),
    backoff=BackoffPolicy(base_sec=0.2, factor=2, max_sec=1),
)
LONGEST_SEC = 60.0
PLAIN_EVERY_SEC = 1.0


class CardDeclined(Exception):
    """A permanent error, which the worker retries because it cannot know."""


class UnknownAddress(Exception):
    """A permanent error."""


class OutOfStock(Exception):
    """A permanent error."""


class GatewayTimeout(Exception):
    """A temporary error: a retry succeeds."""


HOPELESS: dict[str, Exception] = {
    "CardDeclined": CardDeclined("the bank declined the card"),
    "UnknownAddress": UnknownAddress("there is no such street"),
    "OutOfStock": OutOfStock("the last one was just sold"),
}


def new_orders(count: int, seed: int) -> list[dict[str, Any]]:
    """Return random orders: most succeed, some time out once or twice, a few always fail."""
    rng = random.Random(seed)
    orders = []
    for number in range(1, count + 1):
        luck = rng.random()
        order: dict[str, Any] = {"order": number, "seconds": round(rng.uniform(0.01, 0.05), 3)}
        if luck < HOPELESS_SHARE:
            order["hopeless"] = rng.choice(list(HOPELESS))
        elif luck < HOPELESS_SHARE + FLAKY_SHARE:
            order["timeouts"] = rng.choice([1, 1, 2])
        orders.append(order)
    return orders


# The worker process


def run_worker(uri: str, worker_id: str) -> None:
    """Ship orders until SIGTERM, or until the demo has exited."""
    logging.getLogger("microqueue").setLevel(logging.ERROR)  # Retries are part of the display.
    with Queue.from_uri(uri, QUEUE, settings=SETTINGS) as queue:
        visits = core_of(queue).collections.database["visits"]

        def ship(order: dict[str, Any]) -> dict[str, Any]:
            time.sleep(order["seconds"])
            visit = visits.find_one_and_update(
                {"_id": order["order"]}, {"$inc": {"count": 1}}, upsert=True, return_document=True
            )
            if reason := order.get("hopeless"):
                raise HOPELESS[reason]
            if visit["count"] <= order.get("timeouts", 0):
                raise GatewayTimeout("the payment service did not answer")
            return {"shipped": order["order"]}

        worker = Worker(queue, ship, worker_id=worker_id, concurrency=1, prefetch=1)
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())

        def stop_with_demo() -> None:
            sys.stdin.read()  # The pipe closes when the demo exits, however it does.
            worker.stop()

        threading.Thread(target=stop_with_demo, daemon=True).start()
        worker.run()


# The demo itself


class Workers:
    """The worker processes, one of which is killed."""

    def __init__(self, uri: str) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for number in range(1, WORKERS + 1):
            worker_id = f"worker-{number}"
            command = [sys.executable, __file__, "--worker", uri, worker_id]
            self._processes[worker_id] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches only the demo, which stops the workers.
            )

    def kill_one(self, queue: Queue) -> tuple[str, Task] | None:
        """Kill a worker that is processing a task.

        Returns:
            Its id and the task; None if no worker is processing one now.
        """
        for task in queue.peek(WORKERS, status=TaskStatus.PROCESSING):
            worker_id = task.lease.worker_id if task.lease else ""
            process = self._processes[worker_id]
            process.send_signal(signal.SIGSTOP)  # Paused, so that it cannot settle the task now.
            in_flight = queue.get(task.id)
            if in_flight is not None and in_flight.lease == task.lease:
                process.kill()
                process.wait()
                return worker_id, in_flight
            process.send_signal(signal.SIGCONT)
        return None

    def died(self) -> list[str]:
        """Return the workers that exited without being killed, which is an error."""
        return [
            name
            for name, process in self._processes.items()
            if process.poll() not in {None, -signal.SIGKILL}
        ]

    def stop(self) -> None:
        """Terminate all workers; kill those that do not exit in time."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


class ProgressDisplay:
    """A progress bar at a terminal; otherwise a line per second."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self._total = total
        self._next_line = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("[dim]{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("shipping", total=total, state="")

    def __enter__(self) -> ProgressDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, stats: QueueStats) -> None:
        """Show the progress of the queue."""
        finished = stats.done + stats.failed
        state = (
            f"{stats.ready} ready, {stats.processing} running, {stats.delayed} to retry, "
            f"{stats.failed} dead"
        )
        self._progress.update(self._bar, completed=finished, state=state)
        if not self.console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_EVERY_SEC
            self.console.print(f"{finished}/{self._total} finished: {state}")

    def print(self, text: str) -> None:
        """Print a line, above the progress bar."""
        self._progress.console.print(text)


@contextlib.contextmanager
def sweeping(uri: str) -> Iterator[None]:
    """Run a sweeper in a thread."""
    with Queue.from_uri(uri, QUEUE, settings=SETTINGS) as queue:
        sweeper = Sweeper(queue)
        thread = threading.Thread(target=sweeper.run_forever, kwargs={"every": 0.5})
        thread.start()
        try:
            yield
        finally:
            sweeper.stop()
            thread.join()


def watch(queue: Queue, workers: Workers, display: ProgressDisplay, total: int) -> None:
    """Wait until all tasks are finished; half way, kill a worker."""
    deadline = time.monotonic() + LONGEST_SEC
    victim: Task | None = None
    back = False
    while True:
        stats = queue.stats()
        display.update(stats)
        finished = stats.done + stats.failed
        if finished == total:
            return
        if time.monotonic() > deadline:
            sys.exit(f"Not finished after {LONGEST_SEC:.0f} s: {stats}")
        if workers.died():
            sys.exit(f"{', '.join(workers.died())} died without being killed.")
        if victim is None and finished >= total // 2:
            if killed := workers.kill_one(queue):
                worker_id, victim = killed
                order = victim.payload["order"]
                display.print(f"[red]✗ kill -9 {worker_id}[/red] while it processes order {order}")
        elif victim is not None and not back:
            task = queue.get(victim.id)
            back = task is not None and task.redelivered
            if back:
                display.print(
                    f"[green]↺ order {victim.payload['order']}[/green]: its lease expired, and "
                    "the sweeper reclaimed it"
                )
        time.sleep(0.1)


def summarize(console: Console, tasks: list[Task], reasons: dict[str, int], took: float) -> None:
    """Print the outcomes of the tasks."""
    outcomes = [{attempt.outcome for attempt in task.history} for task in tasks]
    statuses = Counter(task.status for task in tasks)
    attempts = sum(len(task.history) for task in tasks)
    table = Table(title=f"\n{len(tasks)} tasks, {attempts} attempts, {took:.1f} s", min_width=50)
    table.add_column("outcome")
    table.add_column("tasks", justify="right")
    table.add_row("retried after an error", str(sum(Outcome.RETRIED in one for one in outcomes)))
    table.add_row(
        "reclaimed after the crash", str(sum(Outcome.LEASE_EXPIRED in one for one in outcomes))
    )
    table.add_section()
    table.add_row("[green]done[/green]", str(statuses[TaskStatus.DONE]))
    table.add_row("[red]dead letters[/red]", str(statuses[TaskStatus.FAILED]))
    for code, count in reasons.items():
        table.add_row(f"  because of {code}", str(count))
    console.print(table)


def find_losses(tasks: list[Task], orders: list[dict[str, Any]]) -> list[str]:
    """Return the differences between the tasks enqueued and those in the queue."""
    problems = []
    found = Counter(task.payload["order"] for task in tasks)
    if missing := sorted(order["order"] for order in orders if not found[order["order"]]):
        problems.append(f"lost: {missing}")
    if doubled := sorted(order for order, count in found.items() if count > 1):
        problems.append(f"doubled: {doubled}")
    statuses = Counter(task.status for task in tasks)
    if statuses[TaskStatus.DONE] + statuses[TaskStatus.FAILED] != len(orders):
        problems.append(f"not finished: {dict(statuses)}")
    if not any(task.redelivered for task in tasks):
        problems.append("nothing was reclaimed after the crash")
    return problems


def ship(console: Console, uri: str, queue: Queue, count: int) -> float:
    """Ship all orders with workers, one of which is killed; return the seconds it took."""
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        workers = Workers(uri)
        stack.callback(workers.stop)
        stack.enter_context(sweeping(uri))
        watch(queue, workers, stack.enter_context(ProgressDisplay(console, count)), count)
        return time.monotonic() - started


def new_page(queue: Queue) -> DashboardServer:
    """Return the dashboard server, on its default port if that is free."""
    from microqueue.dashboard.server import (  # noqa: PLC0415 (the workers do not need it)
        DashboardServer,
    )

    try:
        return DashboardServer(queue, manual_actions=True)
    except InvalidArgument:
        return DashboardServer(queue, port=0, manual_actions=True)


@contextlib.contextmanager
def demo_server(console: Console) -> Iterator[str]:
    """Start MongoDB, or use a temporary database on the server in MICROQUEUE_URI."""
    given = os.environ.get("MICROQUEUE_URI")
    if not given:
        console.print("Starting MongoDB in a temporary directory ...")
        with EmbeddedServer.start() as server:
            yield server.uri
        return
    database = f"microqueue_demo_{secrets.token_hex(4)}"
    console.print(f"Using the server in MICROQUEUE_URI, database {database} ...")
    parts = urlsplit(given)
    query = parts.query
    if "@" in parts.netloc and "authsource=" not in query.lower():
        # Without authSource, the user would be looked up in the temporary database.
        source = f"authSource={parts.path.strip('/') or 'admin'}"
        query = "&".join(filter(None, [query, source]))
    try:
        yield urlunsplit(parts._replace(path=f"/{database}", query=query))
    finally:
        with MongoClient[Any](given) as client:
            client.drop_database(database)


def run_demo(count: int, seed: int, *, serve: bool) -> int:
    """Run the whole demo, and return the exit status."""
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    orders = new_orders(count, seed)
    with (
        demo_server(console) as uri,
        Queue.from_uri(uri, QUEUE, settings=SETTINGS) as queue,
        contextlib.ExitStack() as stack,
    ):
        page = new_page(queue)
        stack.enter_context(page.running())
        queue.enqueue_many(orders)
        console.print(
            f"Enqueued {count} orders. {WORKERS} workers ship them; some payments fail, and "
            f"half way one worker is killed. Dashboard: [cyan]{page.address}[/cyan]"
        )
        took = ship(console, uri, queue, count)
        tasks = queue.peek(2 * count)
        summarize(console, tasks, queue.dead_letters.stats().by_code, took)
        if problems := find_losses(tasks, orders):
            console.print(f"[red]Something went wrong:[/red] {'; '.join(problems)}")
            return 1
        print_result(console, tasks)
        if serve:
            stack.enter_context(sweeping(uri))
            console.print(f"\nDashboard: [green]{page.address}[/green] Press Ctrl-C to stop.")
            threading.Event().wait()
    console.print(
        "\nRun [cyan]./scripts/demo --serve[/cyan] to keep the dashboard open at the end."
    )
    return 0


def print_result(console: Console, tasks: list[Task]) -> None:
    """Print the result, and commands to try next."""
    done = sum(task.status is TaskStatus.DONE for task in tasks)
    console.print(
        f"\n[green]✓ Nothing was lost:[/green] {done} done + {len(tasks) - done} dead letters "
        f"= {len(tasks)} enqueued.\n"
    )
    console.print("Next steps:")
    microqueue = ".venv/bin/microqueue"
    for command, purpose in {
        f"{microqueue} up": "run MongoDB, the sweeper and the dashboard",
        f"{microqueue} top": "in another terminal: live view of the queues",
        f"{microqueue} --help": "enqueue, worker, peek, dlq, doctor ...",
        "less README.md": "how to use it from Python",
    }.items():
        console.print(f"  [cyan]{command:28}[/cyan] [dim]{purpose}[/dim]")


def main() -> int:
    """Run the demo, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--tasks", type=int, default=300, help="number of tasks, at least 50 (default: 300)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=7,
        help="random seed that decides which orders fail (default: 7)",
    )
    parser.add_argument("--serve", action="store_true", help="keep the dashboard open at the end")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(*options.worker)
        return 0

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)  # An exception, so that the server and the workers are stopped.

    signal.signal(signal.SIGTERM, end)
    # A shell that starts this in the background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run_demo(max(options.tasks, 50), options.seed, serve=options.serve)
    except EmbeddedServerError as exc:
        print(f"The embedded MongoDB did not start: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. All processes have exited.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
