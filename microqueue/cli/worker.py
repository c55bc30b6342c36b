"""The ``worker`` command: process tasks in this process, or in several."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from microqueue.async_queue import AsyncQueue
from microqueue.cli import formats, metrics, values
from microqueue.cli.dlq_detection import adopt
from microqueue.cli.exit import Watchdog
from microqueue.cli.loading import load
from microqueue.cli.logs import LogLevel
from microqueue.cli.options import DURATION
from microqueue.cli.queues import resume_command
from microqueue.cli.session import Session
from microqueue.core import core_of, worker_name
from microqueue.errors import MicroqueueError
from microqueue.operations import workers
from microqueue.operations.pauses import list_paused
from microqueue.queue import Queue
from microqueue.reports import Pause
from microqueue.settings import QueueSettings
from microqueue.sweeper import describe_burials
from microqueue.worker import AsyncWorker, Worker, stopping_by_signal
from microqueue.worker.handlers import router_for
from microqueue.worker.shutdown import ENDING_SEC, HURRY_SEC
from microqueue.worker.supervisor import (
    INIT_PID,
    KILL_AFTER_SEC,
    Supervisor,
    end_with_supervisor,
    own_name,
)
from microqueue.worker.waiting import await_server

MARGIN_SEC = 1.0  # A worker ends in time by itself, unless its handlers keep it from that.


@dataclass(frozen=True)
class Job:
    """What to run: the handler, on which queues, how."""

    session: Session
    handler: str
    names: list[str]
    options: dict[str, Any]
    burst: bool
    hooks: list[Any]
    watchdog: Watchdog

    def expect_end(self, *, immediately: bool) -> None:
        """See to it that the process ends in time after a stop, whatever keeps it."""
        grace_sec = self.options["grace"].total_seconds()
        limit_sec = HURRY_SEC if immediately else grace_sec + ENDING_SEC
        self.watchdog.expect_end(limit_sec + MARGIN_SEC)


class Stop:
    """What signals ask for: first of the wait for MongoDB, then of what runs.

    Only sets flags and calls, so that a signal handler may call it.
    """

    def __init__(self, expect_end: Callable[..., None]) -> None:
        self._expect_end = expect_end
        self._pass_on: Callable[..., None] | None = None
        self._immediately = False
        self.asked = False

    def __call__(self, *, immediately: bool = False) -> None:
        """Stop what is under way."""
        self._immediately = self._immediately or immediately
        self.asked = True
        self._expect_end(immediately=immediately)
        if self._pass_on is not None:
            self._pass_on(immediately=immediately)

    def pass_on_to(self, stop: Callable[..., None]) -> None:
        """Pass on from now on, and what was asked before."""
        self._pass_on = stop
        if self.asked:
            stop(immediately=self._immediately)


def worker(
    session: Session,
    handler: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME", help="A function of the payload, or a Tasks registry."
        ),
    ],
    *,
    queues: Annotated[
        list[str] | None,
        typer.Option(
            "--queue", "-q", metavar="NAME", help="Repeatable; the first with a task goes first."
        ),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="Share the work by weight; one per queue."),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="How many handlers run at a time.")] = 8,
    processes: Annotated[
        int, typer.Option(min=1, help="How many processes, for handlers that compute.")
    ] = 1,
    prefetch: Annotated[int, typer.Option(help="How many tasks may wait, claimed.")] = 500,
    timeout: Annotated[
        timedelta | None,
        typer.Option(help="How long one handler may take: 30s, 5m.", **DURATION),
    ] = None,
    grace: Annotated[
        timedelta,
        typer.Option(help="How long handlers may go on after a signal: 30s.", **DURATION),
    ] = timedelta(seconds=30),
    burst: Annotated[bool, typer.Option("--burst", help="End when nothing is ready.")] = False,
    keep_result: Annotated[
        bool, typer.Option("--keep-result", help="Store what the handler returns.")
    ] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="For development: start anew when code changes.")
    ] = False,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics here; processes count up.")
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="The address on which metrics are served.")
    ] = metrics.LOCAL,
    worker_id: Annotated[
        str | None,
        typer.Option(
            help="The name under which tasks are claimed. Each start adds some letters of its "
            "own, and processes their number."
        ),
    ] = None,
) -> None:
    """Work off queues until Ctrl-C or SIGTERM: in threads, or with asyncio for coroutines.

    The first signal lets running handlers finish within --grace and hands the rest back; the
    second one hands everything back at once. A MongoDB that is not there yet is waited for, unless
    with --burst.
    """
    session.log(LogLevel.INFO)
    metrics.check_ports(metrics_port, processes)
    names = queues or [session.queue_name]
    options: dict[str, Any] = {
        "concurrency": concurrency,
        "prefetch": prefetch,
        "timeout": timeout,
        "grace": grace,
        "keep_result": keep_result,
        "weights": values.read_weights(weight, names),
        "worker_id": own_name() or worker_name(worker_id),
    }
    # The first process of a container has to bury orphans, which a supervisor does.
    if own_name() is None and (processes > 1 or reload or os.getpid() == INIT_PID):
        _supervise(
            session,
            names,
            handler,
            processes,
            concurrency=concurrency,
            grace=grace,
            reload=reload,
            burst=burst,
            name=worker_name(worker_id),
        )
        return
    with Watchdog() as watchdog, metrics.metrics(metrics_host, metrics_port, own_name()) as hooks:
        handled = _run(Job(session, handler, names, options, burst, hooks, watchdog))
    if session.out.as_json:
        session.out.json({"handled": handled})
    else:
        session.out.say(f"Handled {formats.count(handled, 'task')}.")


def _run(job: Job) -> int:
    function = load(job.handler)
    # Not before: what the app says of its own logging counts.
    job.session.log(LogLevel.INFO, of_app=True)
    stop = Stop(job.expect_end)
    with stopping_by_signal(stop), ExitStack() as opened:
        end_with_supervisor(stop)
        first = opened.enter_context(job.session.open(job.names[0]))
        who = f"worker {job.options['worker_id']}"
        pauses = _prepare(first, who, stop, burst=job.burst)
        if pauses is None:
            job.watchdog.succeeded()
            return 0
        if not job.burst and own_name() is None:
            described = formats.listed([repr(name) for name in job.names])
            noun = "queue" if len(job.names) == 1 else "queues"
            job.session.out.say(
                f"Working on {noun} {described} with {job.handler}. Ctrl-C ends it."
            )
        if own_name() is None:
            _tell_pauses(job.session, pauses, job.names)
        if router_for(function).coroutines():
            return asyncio.run(_run_async(job, function, first.settings, stop))
        others = [
            Queue(core_of(first).collections.tasks, name, settings=first.settings)
            for name in job.names[1:]
        ]
        threads = Worker([first, *others], function, hooks=job.hooks, **job.options)
        stop.pass_on_to(threads.stop)
        handled = threads.run(burst=job.burst)
        job.watchdog.succeeded()
        return handled


def _prepare(queue: Queue[Any], who: str, stop: Stop, *, burst: bool) -> Sequence[Pause] | None:
    """Find the dead letters, create the indexes, and return what is paused.

    All of it once MongoDB is there; in a burst that is now, or an error.

    Returns:
        The pauses; none if there was a stop before MongoDB was there.
    """
    pauses: list[Pause] = []

    def prepare() -> None:
        adopt(queue)
        queue.ensure_indexes(adjust=False)
        pauses[:] = core_of(queue).run(list_paused(core_of(queue).collections.name))

    if burst:
        prepare()
        return pauses
    return pauses if await_server(prepare, who=who, stopping=lambda: stop.asked) else None


def _tell_pauses(session: Session, pauses: Sequence[Pause], names: list[str]) -> None:
    """Say which queues give nothing, and how that ends."""
    for one in pauses:
        if one.queue in names:
            reason = f" ({one.reason})" if one.reason else ""
            ends = resume_command(session, one.queue)
            session.out.remark(f"Queue {one.queue!r} is paused{reason}; `{ends}` ends that.")


async def _run_async(job: Job, function: Any, settings: QueueSettings, stop: Stop) -> int:
    async with AsyncExitStack() as opened:
        first = await opened.enter_async_context(
            AsyncQueue[Any].from_uri(
                job.session.options.uri,
                job.names[0],
                settings=settings,
                collection=job.session.collection,
            )
        )
        others = [
            AsyncQueue[Any](core_of(first).collections.tasks, name, settings=settings)
            for name in job.names[1:]
        ]
        coroutines = AsyncWorker([first, *others], function, hooks=job.hooks, **job.options)
        stop.pass_on_to(coroutines.stop)
        handled = await coroutines.run(burst=job.burst)
        job.watchdog.succeeded()
        return handled


def _supervise(
    session: Session,
    names: list[str],
    handler: str,
    processes: int,
    *,
    concurrency: int,
    grace: timedelta,
    reload: bool,
    burst: bool,
    name: str,
) -> None:
    """Run this very command in several processes, and take back what a dead one held."""
    load(handler)  # A wrong name is told once, before anything starts.
    grace_sec = grace.total_seconds()
    with Watchdog() as watchdog:

        def expect_end(*, immediately: bool) -> None:
            # It waits for its processes, kills what is left, and waits for that.
            limit_sec = (0.0 if immediately else grace_sec) + 2 * KILL_AFTER_SEC
            watchdog.expect_end(limit_sec + ENDING_SEC)

        stop = Stop(expect_end)
        with stopping_by_signal(stop), session.open(names[0]) as queue:
            pauses = _prepare(queue, f"supervisor {name}", stop, burst=burst)
            if pauses is None:
                watchdog.succeeded()
                return
            _tell_pauses(session, pauses, names)
            session.out.say(
                f"Working on {formats.listed([repr(name) for name in names])} with {handler} in "
                f"{formats.count(processes, 'process', 'processes')}. Ctrl-C ends it."
            )

            def take_back(name: str) -> int | None:
                try:
                    # It stays on the list until the sweeper has looked once more: a claim of its
                    # last moment may reach the server only now.
                    found = core_of(queue).run(
                        workers.reclaim_from(
                            name, queue.now(), queue.settings, concurrency=concurrency
                        )
                    )
                except MicroqueueError as exc:  # The sweeper finds out by the heartbeat.
                    session.out.error(exc)
                    return None
                if count := found.counts.total():
                    session.out.remark(f"{name} is gone; {count} of its tasks were taken back.")
                for line in describe_burials(found.burials):
                    session.out.remark(line)
                return count

            supervisor = Supervisor(
                [sys.executable, "-m", "microqueue.cli", *sys.argv[1:]],
                processes,
                name=name,
                on_death=take_back,
                grace_sec=grace_sec,
                patient=reload,
                may_end=burst,
            )
            stop.pass_on_to(lambda **_: supervisor.stop())
            if reload:
                watch_code(supervisor.restart)
            status = supervisor.run()
            if status == 0:
                watchdog.succeeded()
    if status:
        raise typer.Exit(status)


def watch_code(restart: Callable[[], None]) -> None:
    """Call ``restart`` whenever a Python file below the current directory changes."""
    try:
        from watchfiles import PythonFilter, watch  # noqa: PLC0415 (only for --reload)
    except ImportError as exc:
        raise MicroqueueError(
            "--reload needs watchfiles: run pip install 'microqueue[reload]'"
        ) from exc

    def run() -> None:
        for _ in watch(Path.cwd(), watch_filter=PythonFilter(), raise_interrupt=False):
            restart()

    threading.Thread(target=run, name="microqueue-reload", daemon=True).start()
