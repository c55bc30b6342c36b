"""Run a worker in several processes: start them, restart those that die, stop them together.

For CPU-bound handlers, which threads of one interpreter cannot run in parallel. When a process
dies, ``on_death`` reclaims its tasks at once; each one that it had started loses an attempt. The
supervisor itself holds no task. If it is killed, its processes see the end of a pipe, their
lifeline, and stop as on SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

# Not MICROQUEUE_...: those are settings.
LIFELINE_VARIABLE = "_MICROQUEUE_LIFELINE"
NAME_VARIABLE = "_MICROQUEUE_PROCESS"

TICK_SEC = 0.1
SHORT_LIFE_SEC = 5.0
MAX_SHORT_LIVES = 5
MAX_RESTART_SEC = 10.0
KILL_AFTER_SEC = 10.0
INIT_PID = 1

logger = logging.getLogger("microqueue.supervisor")


@dataclass
class Child:
    """One of the processes, with all its restarts."""

    number: int
    name: str = ""
    process: subprocess.Popen[bytes] | None = None
    born_at: float = 0.0
    short_lives: int = 0
    failed_starts: int = 0
    start_at: float = 0.0
    lives: int = field(default=0)
    ended: bool = False


class Supervisor:
    """Keeps ``count`` processes of a command running until it is stopped, or all have finished.

    Args:
        command: The command of each process, which finds its name in the environment.
        count: How many processes to run.
        name: The first part of their names.
        on_death: Called with the name of a process that ended without being asked to. It reclaims
            the tasks in flight, and returns how many there were; ``None`` if that is unknown.
        grace_sec: How long a process may take to stop.
        patient: Restart a process that failed only at the next :meth:`restart`.
        may_end: Whether a process that ends without an error and without tasks in flight has
            finished. Otherwise it is restarted.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        *,
        name: str,
        on_death: Callable[[str], int | None],
        grace_sec: float,
        patient: bool = False,
        may_end: bool = False,
    ) -> None:
        self._command = list(command)
        self._name = name
        self._on_death = on_death
        self._grace_sec = grace_sec
        self._patient = patient
        self._may_end = may_end
        self._children = [Child(number) for number in range(1, count + 1)]
        self._signals = 0
        self._forwarded = 0
        self._restarting = False
        self._stop_by = float("inf")
        self._lifeline, self._held_end = os.pipe()

    def stop(self) -> None:
        """Stop the processes; called again, stop them without the grace.

        It only counts, so that a signal handler may call it.
        """
        self._signals += 1

    def restart(self) -> None:
        """Replace the processes, within their grace: their code has changed."""
        self._restarting = True

    def run(self) -> int:
        """Run until :meth:`stop`, or until all processes have finished.

        A process that is still alive some time after its grace is killed.

        Returns:
            The exit status: 1 if the processes cannot start.
        """
        try:
            while (
                not all(child.ended for child in self._children)
                and time.monotonic() < self._stop_by
            ):
                for child in self._children:
                    self._attend(child)
                self._forward()
                self._reap_orphans()
                if any(child.failed_starts >= MAX_SHORT_LIVES for child in self._children):
                    logger.error("processes exit as soon as they start; giving up")
                    return 1
                time.sleep(TICK_SEC)
            return 0
        finally:
            self._end_all()

    def _attend(self, child: Child) -> None:
        """Start a process that is not running, and handle the end of one that was."""
        if child.ended:
            return
        if child.process is None:
            if self._signals:
                child.ended = True
            elif time.monotonic() >= child.start_at:
                self._start(child)
            return
        status = child.process.poll()
        if status is not None:
            child.process = None
            self._note_end(child, status)

    def _start(self, child: Child) -> None:
        child.lives += 1
        child.name = f"{self._name}.{child.number}.{child.lives}"
        child.born_at = time.monotonic()
        child.process = subprocess.Popen(  # noqa: S603 (this very program)
            self._command,
            env={
                **os.environ,
                NAME_VARIABLE: child.name,
                LIFELINE_VARIABLE: str(self._lifeline),
            },
            pass_fds=[self._lifeline],
            process_group=0,  # Ctrl-C reaches the supervisor alone, which forwards it.
        )
        logger.info("process %s started (pid %d)", child.name, child.process.pid)

    def _note_end(self, child: Child, status: int) -> None:
        in_flight: int | None = 0
        if status != 0:
            level = logging.INFO if self._signals else logging.WARNING
            fields = {"process_name": child.name, "status": status}
            how = describe_end(status)
            logger.log(level, "process %s died: %s", child.name, how, extra=fields)
        if status != 0 or not (self._signals or self._restarting):
            in_flight = self._on_death(child.name)  # A handler may exit with any status, even 0.
            if status == 0 and in_flight:
                logger.warning("process %s died with %d tasks in flight", child.name, in_flight)
        finished = status == 0 and in_flight == 0 and self._may_end
        if self._signals or (finished and not self._restarting):
            child.ended = True
        elif self._restarting:
            pass  # The restart starts it, and counts no failure.
        elif status != 0 and self._patient:
            child.start_at = float("inf")  # Until its code has changed.
        else:
            self._schedule_restart(child, failed=status > 0 and not in_flight)

    def _schedule_restart(self, child: Child, *, failed: bool) -> None:
        """Decide when a process is restarted, and count the starts that failed.

        A task may kill its process again and again until it is a dead letter: that is no reason
        to give up. A program that ``failed`` with no task in flight is.
        """
        short = time.monotonic() - child.born_at < SHORT_LIFE_SEC
        child.failed_starts = child.failed_starts + 1 if short and failed else 0
        child.short_lives = min(child.short_lives + 1, MAX_SHORT_LIVES - 1) if short else 0
        if short:
            wait_sec = min(2.0**child.short_lives / 4, MAX_RESTART_SEC)
            child.start_at = time.monotonic() + wait_sec

    def _forward(self) -> None:
        """Forward the stops and restarts that were requested since the last call."""
        if self._restarting and not self._signals:
            self._send(signal.SIGTERM)
            self._await_ends(self._grace_sec + KILL_AFTER_SEC)
            if not self._signals:
                self._send(signal.SIGKILL)  # It does not react.
            self._restarting = False
            for child in self._children:
                child.start_at, child.short_lives, child.failed_starts = 0.0, 0, 0
        while self._forwarded < self._signals:
            self._forwarded += 1
            # A process that is stalled would receive two pending signals of one kind as one.
            self._send(signal.SIGTERM if self._forwarded == 1 else signal.SIGINT)
            grace_sec = self._grace_sec if self._forwarded == 1 else 0.0
            self._stop_by = time.monotonic() + grace_sec + KILL_AFTER_SEC
            # Python may handle a signal that comes just after another one only when a blocking
            # call of the handler has returned.
            time.sleep(TICK_SEC)

    def _send(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.send_signal(number)

    def _await_ends(self, limit_sec: float) -> None:
        deadline = time.monotonic() + limit_sec
        while time.monotonic() < deadline and not self._signals:
            for child in self._children:
                self._attend_end(child)
            if all(child.process is None for child in self._children):
                return
            time.sleep(TICK_SEC)

    def _attend_end(self, child: Child) -> None:
        if child.process is not None and (status := child.process.poll()) is not None:
            child.process = None
            self._note_end(child, status)

    def _reap_orphans(self) -> None:
        """Reap orphans, as the first process of a container must."""
        if os.getpid() != INIT_PID:
            return
        own = {child.process.pid for child in self._children if child.process is not None}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, 0)

    def _end_all(self) -> None:
        """Stop every process, and kill those that do not stop in time."""
        os.close(self._held_end)
        os.close(self._lifeline)
        grace_sec = 0.0 if self._signals else self._grace_sec
        deadline = time.monotonic() + grace_sec + KILL_AFTER_SEC
        self._send(signal.SIGTERM)
        for child in self._children:
            if child.process is not None:
                try:
                    child.process.wait(max(deadline - time.monotonic(), 0))
                except subprocess.TimeoutExpired:
                    child.process.kill()
                    child.process.wait()
                if child.process.returncode != 0:
                    self._on_death(child.name)


def describe_end(status: int) -> str:
    """Describe how a process ended."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # Most real-time signals have no name.
        return f"signal {-status}"


def own_name() -> str | None:
    """Return the name that a supervisor gave to this process, if there is one."""
    return _inherited()[0]


def end_with_supervisor(stop: Callable[[], None]) -> None:
    """Call ``stop`` when the supervisor has ended, for whatever reason."""
    _, lifeline = _inherited()
    if lifeline is None:
        return

    def watch() -> None:
        os.read(int(lifeline), 1)  # Nothing is written: it returns when the pipe closes.
        stop()

    threading.Thread(target=watch, name="microqueue-lifeline", daemon=True).start()


@cache
def _inherited() -> tuple[str | None, str | None]:
    """Take the name and the lifeline out of the environment, before handlers are imported.

    A process that a handler starts must not inherit them: it is none of the supervisor's.
    """
    return os.environ.pop(NAME_VARIABLE, None), os.environ.pop(LIFELINE_VARIABLE, None)
