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

from microqueue.arguments import check_worker_id
from microqueue.async_queue import AsyncQueue
from microqueue.cli import formats, metrics, values
from microqueue.cli.dlq_detection import detect_dlq
from microqueue.cli.exit import Watchdog
from microqueue.cli.loading import load
from microqueue.cli.logs import LogLevel
from microqueue.cli.options import DURATION, HooksReference, MetricsHost
from microqueue.cli.queues import resume_command
from microqueue.cli.session import Session
from microqueue.core import core_of, new_worker_id
from microqueue.errors import MicroqueueError
from microqueue.operations import workers
from microqueue.operations.pauses import list_paused
from microqueue.queue import Queue
from microqueue.reports import Pause
from microqueue.settings import QueueSettings
from microqueue.sweeper import describe_burials
from microqueue.task import DEFAULT_QUEUE
from microqueue.worker import AsyncWorker, Worker, WorkerOptions, stopping_by_signal
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

MARGIN_SEC = 1.0  # Beyond the time in which a worker exits, unless its handlers block it.


@dataclass(frozen=True)
class WorkerRun:
    """What to run: the handler, the queues and the options."""

    session: Session
    handler: str
    names: list[str]
    options: dict[str, Any]
    burst: bool
    hooks: list[Any]
    watchdog: Watchdog

    def expect_end(self, *, immediately: bool) -> None:
        """Arm the watchdog after a stop."""
        grace_sec = self.options["grace"].total_seconds()
        limit_sec = HURRY_SEC if immediately else grace_sec + ENDING_SEC
        self.watchdog.expect_end(limit_sec + MARGIN_SEC)


class StopForwarder:
    """Passes a stop by signal to the worker, once there is one; before that, it is remembered.

    It only sets flags and calls functions, so a signal handler may call it.
    """

    def __init__(self, expect_end: Callable[..., None]) -> None:
        self._expect_end = expect_end
        self._target: Callable[..., None] | None = None
        self._immediately = False
        self.requested = False

    def __call__(self, *, immediately: bool = False) -> None:
        """Request a stop."""
        self._immediately = self._immediately or immediately
        self.requested = True
        self._expect_end(immediately=immediately)
        if self._target is not None:
            self._target(immediately=immediately)

    def forward_to(self, stop: Callable[..., None]) -> None:
        """Forward requests to ``stop`` from now on, including an earlier one."""
        self._target = stop
        if self.requested:
            stop(immediately=self._immediately)


def worker(
    session: Session,
    handler: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            help="Handler: a function or coroutine that takes the payload, or a Tasks registry.",
        ),
    ],
    *,
    queues: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            "-q",
            metavar="NAME",
            help="Queue to process; repeatable. Earlier queues have precedence. "
            f"\\[default: {DEFAULT_QUEUE}]",
        ),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help="Weight of a queue; give one for each. Queues then share the worker by weight.",
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Number of handlers to run at once, per process.")
    ] = 8,
    processes: Annotated[
        int, typer.Option(min=1, help="Number of processes, for CPU-bound handlers.")
    ] = 1,
    prefetch: Annotated[
        int, typer.Option(help="Maximum number of tasks to claim ahead of the handlers.")
    ] = 500,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Call the handler with lists of up to this many tasks. \\[default: one payload]"
        ),
    ] = None,
    batch_wait: Annotated[
        timedelta | None,
        typer.Option(
            help="How long the first task of a batch waits for others. \\[default: 50ms]",
            **DURATION,
        ),
    ] = None,
    timeout: Annotated[
        timedelta | None,
        typer.Option(help="Maximum run time of a handler: 30s, 5m. \\[default: none]", **DURATION),
    ] = None,
    grace: Annotated[
        timedelta,
        typer.Option(
            help="Time for running handlers to finish after a signal. \\[default: 30s]",
            show_default=False,
            **DURATION,
        ),
    ] = timedelta(seconds=30),
    burst: Annotated[bool, typer.Option("--burst", help="Exit when no task is ready.")] = False,
    keep_result: Annotated[
        bool, typer.Option("--keep-result", help="Store the return value of the handler.")
    ] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="For development: restart when code changes.")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Serve Prometheus metrics on this port; further processes use the next ports.",
        ),
    ] = None,
    metrics_host: MetricsHost = metrics.LOCAL,
    hooks: HooksReference = None,
    worker_id: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the worker; a random suffix and the process number are appended. "
            "\\[default: host and process id]",
        ),
    ] = None,
) -> None:
    """Process tasks until Ctrl-C or SIGTERM.

    Functions run in threads, coroutines with asyncio. After the first signal, running handlers
    finish within --grace, and the other claimed tasks are released; the second signal releases
    all tasks at once. If MongoDB is not available, the worker waits for it, except with --burst.
    """
    session.configure_logging(LogLevel.INFO)
    metrics.check_ports(metrics_port, processes)
    session.load_hooks(hooks)
    names = queues or [session.queue_name]
    options: dict[str, Any] = {
        "concurrency": concurrency,
        "prefetch": prefetch,
        "timeout": timeout,
        "grace": grace,
        "keep_result": keep_result,
        "weights": values.read_weights(weight, names),
        "batch": batch,
    }
    if batch_wait is not None:
        options["batch_wait"] = batch_wait
    checked = WorkerOptions(**options)
    options["worker_id"] = own_name() or new_worker_id(check_worker_id(worker_id))
    # PID 1 of a container must reap orphaned processes; the supervisor does.
    if own_name() is None and (processes > 1 or reload or os.getpid() == INIT_PID):
        _supervise(
            session,
            names,
            handler,
            processes,
            options=checked,
            reload=reload,
            burst=burst,
            name=new_worker_id(worker_id),
        )
        return
    with (
        Watchdog() as watchdog,
        metrics.serve_worker_metrics(metrics_host, metrics_port, own_name()) as counting,
    ):
        called = [*counting, *session.hooks]
        handled = _run(WorkerRun(session, handler, names, options, burst, called, watchdog))
    if session.out.as_json:
        session.out.json({"handled": handled})
    else:
        session.out.print(f"Handled {formats.count(handled, 'task')}.")


def _run(job: WorkerRun) -> int:
    function = load(job.handler)
    # After the import, because the logging configuration of the app has precedence.
    job.session.configure_logging(LogLevel.INFO, of_app=True)
    stop = StopForwarder(job.expect_end)
    with stopping_by_signal(stop), ExitStack() as opened:
        end_with_supervisor(stop)
        first = opened.enter_context(job.session.open(job.names[0]))
        name = f"worker {job.options['worker_id']}"
        pauses = _prepare(first, name, stop, burst=job.burst)
        if pauses is None:
            job.watchdog.succeeded()
            return 0
        if not job.burst and own_name() is None:
            described = formats.listed([repr(name) for name in job.names])
            noun = "queue" if len(job.names) == 1 else "queues"
            job.session.out.print(
                f"Processing {noun} {described} with {job.handler}. Press Ctrl-C to stop."
            )
        if own_name() is None:
            _note_pauses(job.session, pauses, job.names)
        if router_for(function).coroutines():
            return asyncio.run(_run_async(job, function, first.settings, stop))
        others = [
            Queue(core_of(first).collections.tasks, name, settings=first.settings)
            for name in job.names[1:]
        ]
        for one in others:
            job.session.attach_hooks(one)
        threads = Worker([first, *others], function, hooks=job.hooks, **job.options)
        stop.forward_to(threads.stop)
        handled = threads.run(burst=job.burst)
        job.watchdog.succeeded()
        return handled


def _prepare(
    queue: Queue[Any], name: str, stop: StopForwarder, *, burst: bool
) -> Sequence[Pause] | None:
    """Detect the DLQ, create the indexes and read the pauses, once MongoDB is available.

    A burst does not wait for MongoDB, but raises.

    Returns:
        The pauses; None if a stop was requested before MongoDB was available.
    """
    pauses: list[Pause] = []

    def prepare() -> None:
        detect_dlq(queue)
        core = core_of(queue)
        core.run(core.prepare())
        pauses[:] = core.run(list_paused(core.collections.name))

    if burst:
        prepare()
        return pauses
    return pauses if await_server(prepare, who=name, stopping=lambda: stop.requested) else None


def _note_pauses(session: Session, pauses: Sequence[Pause], names: list[str]) -> None:
    """Print which queues are paused, and the commands that resume them."""
    for one in pauses:
        if one.queue in names:
            reason = f" ({one.reason})" if one.reason else ""
            command = resume_command(session, one.queue)
            session.out.hint(f"Queue {one.queue!r} is paused{reason}; run `{command}`.")


async def _run_async(
    job: WorkerRun, function: Any, settings: QueueSettings, stop: StopForwarder
) -> int:
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
        for one in (first, *others):
            job.session.attach_hooks(one)
        coroutines = AsyncWorker([first, *others], function, hooks=job.hooks, **job.options)
        stop.forward_to(coroutines.stop)
        handled = await coroutines.run(burst=job.burst)
        job.watchdog.succeeded()
        return handled


def _supervise(
    session: Session,
    names: list[str],
    handler: str,
    processes: int,
    *,
    options: WorkerOptions,
    reload: bool,
    burst: bool,
    name: str,
) -> None:
    """Run this command in several processes, and reclaim the tasks of one that died."""
    # A wrong name or function is reported once, before any process starts.
    router_for(load(handler), batch=options.batch)
    grace_sec = options.grace.total_seconds()
    with Watchdog() as watchdog:

        def expect_end(*, immediately: bool) -> None:
            # The supervisor waits for its processes, kills the rest, and waits for those.
            limit_sec = (0.0 if immediately else grace_sec) + 2 * KILL_AFTER_SEC
            watchdog.expect_end(limit_sec + ENDING_SEC)

        stop = StopForwarder(expect_end)
        with stopping_by_signal(stop), session.open(names[0]) as queue:
            pauses = _prepare(queue, f"supervisor {name}", stop, burst=burst)
            if pauses is None:
                watchdog.succeeded()
                return
            _note_pauses(session, pauses, names)
            core_of(queue).attach(session.hooks, source="supervisor")
            session.out.print(
                f"Processing {formats.listed([repr(name) for name in names])} with {handler} in "
                f"{formats.count(processes, 'process', 'processes')}. Press Ctrl-C to stop."
            )

            def reclaim(name: str) -> int | None:
                try:
                    # The worker stays registered until the sweeper has checked it again: its
                    # last claim may still be on its way to the server.
                    found = core_of(queue).run(
                        workers.reclaim_from(
                            name,
                            queue.now(),
                            queue.settings,
                            concurrency=options.max_running,
                        )
                    )
                except MicroqueueError as exc:  # The sweeper will notice the missing heartbeat.
                    session.out.error(exc)
                    return None
                if count := found.counts.total():
                    session.out.hint(
                        f"process {name} died; reclaimed {formats.count(count, 'task')}."
                    )
                for line in describe_burials(found.burials):
                    session.out.hint(line)
                return count

            supervisor = Supervisor(
                [sys.executable, "-m", "microqueue.cli", *sys.argv[1:]],
                processes,
                name=name,
                on_death=reclaim,
                grace_sec=grace_sec,
                patient=reload,
                may_end=burst,
            )
            stop.forward_to(lambda **_: supervisor.stop())
            if reload:
                restart_on_change(supervisor.restart)
            status = supervisor.run()
            if status == 0:
                watchdog.succeeded()
    if status:
        raise typer.Exit(status)


def restart_on_change(restart: Callable[[], None]) -> None:
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
