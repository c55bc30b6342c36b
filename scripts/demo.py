"""See microqueue at work: orders to ship, a shaky payment service, a worker that is killed.

Starts an embedded MongoDB in a temporary directory, three worker processes and a sweeper,
kills one worker while it holds a task, and counts at the end that nothing was lost.
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
    """Trying again will not help, but the worker does not know that."""


class UnknownAddress(Exception):
    """As above."""


class OutOfStock(Exception):
    """As above."""


class GatewayTimeout(Exception):
    """Trying again helps."""


HOPELESS: dict[str, Exception] = {
    "CardDeclined": CardDeclined("the bank refused the card"),
    "UnknownAddress": UnknownAddress("there is no such street"),
    "OutOfStock": OutOfStock("the last one was just sold"),
}


def new_orders(count: int, seed: int) -> list[dict[str, Any]]:
    """Invent orders: most are fine, some time out once or twice, a few are hopeless."""
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
    """Ship orders until told to stop, or until the demo itself is gone."""
    logging.getLogger("microqueue").setLevel(logging.ERROR)  # Retries are part of the show.
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

        def end_with_the_demo() -> None:
            sys.stdin.read()  # The other end of the pipe closes with the demo, however that ends.
            worker.stop()

        threading.Thread(target=end_with_the_demo, daemon=True).start()
        worker.run()


# The demo itself


class Crew:
    """The worker processes, one of which will have an accident."""

    def __init__(self, uri: str) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for number in range(1, WORKERS + 1):
            worker_id = f"worker-{number}"
            command = [sys.executable, __file__, "--worker", uri, worker_id]
            self._processes[worker_id] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the demo, which then stops them.
            )

    def kill_one(self, queue: Queue) -> tuple[str, Task] | None:
        """Kill a worker that holds a task, if there is one at this moment."""
        for task in queue.peek(WORKERS, status=TaskStatus.PROCESSING):
            worker_id = task.lease.worker_id if task.lease else ""
            process = self._processes[worker_id]
            process.send_signal(signal.SIGSTOP)  # So that it cannot settle while we look.
            held = queue.get(task.id)
            if held is not None and held.lease == task.lease:
                process.kill()
                process.wait()
                return worker_id, held
            process.send_signal(signal.SIGCONT)
        return None

    def died(self) -> list[str]:
        """Give the workers that ended by themselves, which none should."""
        return [
            name
            for name, process in self._processes.items()
            if process.poll() not in {None, -signal.SIGKILL}
        ]

    def stop(self) -> None:
        """End all of them, whatever they do."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


class Show:
    """A progress bar at a terminal; elsewhere a line now and then."""

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

    def __enter__(self) -> Show:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, stats: QueueStats) -> None:
        """Show how far the queue is."""
        finished = stats.done + stats.failed
        state = (
            f"{stats.ready} ready, {stats.processing} running, {stats.delayed} to retry, "
            f"{stats.failed} dead"
        )
        self._progress.update(self._bar, completed=finished, state=state)
        if not self.console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + PLAIN_EVERY_SEC
            self.console.print(f"{finished}/{self._total} finished: {state}")

    def tell(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
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


def watch(queue: Queue, crew: Crew, show: Show, total: int) -> None:
    """Look on until all tasks are finished; half way, kill a worker."""
    deadline = time.monotonic() + LONGEST_SEC
    victim: Task | None = None
    back = False
    while True:
        stats = queue.stats()
        show.update(stats)
        finished = stats.done + stats.failed
        if finished == total:
            return
        if time.monotonic() > deadline:
            sys.exit(f"Not finished after {LONGEST_SEC:.0f} s: {stats}")
        if crew.died():
            sys.exit(f"{', '.join(crew.died())} died without being killed.")
        if victim is None and finished >= total // 2:
            if killed := crew.kill_one(queue):
                worker_id, victim = killed
                show.tell(
                    f"[red]✗ kill -9 {worker_id}[/red], which held order {victim.payload['order']}"
                )
        elif victim is not None and not back:
            task = queue.get(victim.id)
            back = task is not None and task.redelivered
            if back:
                show.tell(
                    f"[green]↺ order {victim.payload['order']}[/green]: its lease expired, and "
                    "the sweeper took it back"
                )
        time.sleep(0.1)


def summarize(console: Console, tasks: list[Task], reasons: dict[str, int], took: float) -> None:
    """Print what became of the tasks."""
    outcomes = [{attempt.outcome for attempt in task.history} for task in tasks]
    statuses = Counter(task.status for task in tasks)
    attempts = sum(len(task.history) for task in tasks)
    table = Table(title=f"\n{len(tasks)} tasks, {attempts} attempts, {took:.1f} s", min_width=50)
    table.add_column("what became of them")
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
    """Compare what is in the queue with what was put into it."""
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
    """Have workers ship all orders while one of them is killed; give how long it took."""
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        crew = Crew(uri)
        stack.callback(crew.stop)
        stack.enter_context(sweeping(uri))
        watch(queue, crew, stack.enter_context(Show(console, count)), count)
        return time.monotonic() - started


def new_page(queue: Queue) -> DashboardServer:
    """Make the dashboard, at its usual port if that is free."""
    from microqueue.dashboard.server import (  # noqa: PLC0415 (the workers do without it)
        DashboardServer,
    )

    try:
        return DashboardServer(queue, manual_actions=True)
    except InvalidArgument:
        return DashboardServer(queue, port=0, manual_actions=True)


@contextlib.contextmanager
def demo_server(console: Console) -> Iterator[str]:
    """Start MongoDB, or use the server in MICROQUEUE_URI with a database that is dropped again."""
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
        # Without it, the user would be looked up in the database of the path.
        source = f"authSource={parts.path.strip('/') or 'admin'}"
        query = "&".join(filter(None, [query, source]))
    try:
        yield urlunsplit(parts._replace(path=f"/{database}", query=query))
    finally:
        with MongoClient[Any](given) as client:
            client.drop_database(database)


def run_demo(count: int, seed: int, *, serve: bool) -> int:
    """Run the whole demo, and give the exit status."""
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
            f"{count} orders are in the queue. {WORKERS} workers ship them; payments are shaky, "
            f"and half way one worker gets killed. Watch it at [cyan]{page.address}[/cyan]"
        )
        took = ship(console, uri, queue, count)
        tasks = queue.peek(2 * count)
        summarize(console, tasks, queue.dead_letters.stats().by_code, took)
        if problems := find_losses(tasks, orders):
            console.print(f"[red]Something went wrong:[/red] {'; '.join(problems)}")
            return 1
        tell_end(console, tasks)
        if serve:
            stack.enter_context(sweeping(uri))
            console.print(f"\nThe dashboard is at [green]{page.address}[/green] until Ctrl-C.")
            threading.Event().wait()
    console.print(
        f"\nThe dashboard was at {page.address}; [cyan]./scripts/demo --serve[/cyan] keeps it open."
    )
    return 0


def tell_end(console: Console, tasks: list[Task]) -> None:
    """Say how it ended, and what to do next."""
    done = sum(task.status is TaskStatus.DONE for task in tasks)
    console.print(
        f"\n[green]✓ Nothing was lost:[/green] {done} done + {len(tasks) - done} dead letters "
        f"= {len(tasks)} enqueued.\n"
    )
    console.print("What to type next:")
    microqueue = ".venv/bin/microqueue"
    for command, purpose in {
        f"{microqueue} up": "a MongoDB of your own, with its dashboard, until Ctrl-C",
        f"{microqueue} top": "in another terminal: how the queues stand",
        f"{microqueue} --help": "enqueue, worker, peek, dlq, doctor ...",
        "less README.md": "how to use it from Python",
    }.items():
        console.print(f"  [cyan]{command:28}[/cyan] [dim]{purpose}[/dim]")


def main() -> int:
    """Run the demo, or one of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tasks", type=int, default=300, help="how many, at least 50")
    parser.add_argument("--seed", type=int, default=7, help="another one: other orders fail")
    parser.add_argument("--serve", action="store_true", help="keep the dashboard open at the end")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        run_worker(*options.worker)
        return 0

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)  # As an exception, so that everything started is stopped.

    signal.signal(signal.SIGTERM, end)
    # A shell that starts this in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run_demo(max(options.tasks, 50), options.seed, serve=options.serve)
    except EmbeddedServerError as exc:
        print(f"The embedded MongoDB did not start: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped; nothing is left running.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
