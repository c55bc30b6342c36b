"""Run a worker in several processes: start them, start anew those that die, end them together.

For CPU-bound handlers, which threads of one interpreter cannot run side by side. A process
that ends before its tasks do costs one attempt of those that it started: its end is seen at
once, and ``on_death`` takes them back. The supervisor itself holds no task. If it is killed, its
processes see the end of their lifeline, a pipe, and stop as on SIGTERM.
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
MOST_SHORT_LIVES = 5
LONGEST_WAIT_SEC = 10.0
KILL_AFTER_SEC = 10.0
INIT_PID = 1

logger = logging.getLogger("microqueue.supervisor")


@dataclass
class Child:
    """One of the processes, through all its lives."""

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
    """Keeps ``count`` processes of a command alive until it is stopped, or all have ended.

    Each gets its name in the environment. ``on_death`` is called with the name of one that
    ended other than by being told to, and gives how many tasks it held; none, if that cannot be
    told. A ``patient`` one starts what failed at the next :meth:`restart` only. Where processes
    ``may_end`` by themselves, one that does so without an error, and held nothing, is through;
    else it is started anew.
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
        """Pass a stop on to the processes; the second one tells them to hurry.

        Only counts, so that a signal handler may call it.
        """
        self._signals += 1

    def restart(self) -> None:
        """End the processes gently and start new ones: their code has changed."""
        self._restarting = True

    def run(self) -> int:
        """Work until :meth:`stop`, or until all have ended by themselves; give the status.

        A process that does not end some time after its grace is killed.
        """
        try:
            while (
                not all(child.ended for child in self._children)
                and time.monotonic() < self._stop_by
            ):
                for child in self._children:
                    self._attend(child)
                self._pass_on()
                self._reap_orphans()
                if any(child.failed_starts >= MOST_SHORT_LIVES for child in self._children):
                    logger.error("processes end as soon as they start; giving up")
                    return 1
                time.sleep(TICK_SEC)
            return 0
        finally:
            self._end_all()

    def _attend(self, child: Child) -> None:
        """Start a process that is not running, and see to one that ended."""
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
            process_group=0,  # Ctrl-C is for the supervisor, which passes it on.
        )
        logger.info("process %s started with pid %d", child.name, child.process.pid)

    def _note_end(self, child: Child, status: int) -> None:
        held: int | None = 0
        if status != 0:
            level = logging.INFO if self._signals else logging.WARNING
            logger.log(level, "process %s ended with %s", child.name, describe_end(status))
        if status != 0 or not (self._signals or self._restarting):
            held = self._on_death(child.name)  # A handler may end it with any status, also 0.
            if status == 0 and held:
                logger.warning("process %s ended in the midst of its tasks", child.name)
        through = status == 0 and held == 0 and self._may_end
        if self._signals or (through and not self._restarting):
            child.ended = True
        elif self._restarting:
            pass  # Which starts it, and counts nothing.
        elif status != 0 and self._patient:
            child.start_at = float("inf")  # Its code is being written: until it changes.
        else:
            self._put_off(child, failed=status > 0 and not held)

    def _put_off(self, child: Child, *, failed: bool) -> None:
        """Decide when a process is started again, and whether it could start at all.

        A task may end its process again and again until it is buried: that is no reason to
        give up, as it is if the program itself has ``failed``, with no task to blame.
        """
        short = time.monotonic() - child.born_at < SHORT_LIFE_SEC
        child.failed_starts = child.failed_starts + 1 if short and failed else 0
        child.short_lives = min(child.short_lives + 1, MOST_SHORT_LIVES - 1) if short else 0
        if short:
            wait_sec = min(2.0**child.short_lives / 4, LONGEST_WAIT_SEC)
            child.start_at = time.monotonic() + wait_sec

    def _pass_on(self) -> None:
        """Forward what signals asked for since the last look."""
        if self._restarting and not self._signals:
            self._tell(signal.SIGTERM)
            self._await_ends(self._grace_sec + KILL_AFTER_SEC)
            if not self._signals:
                self._tell(signal.SIGKILL)  # What has not ended by now does not react.
            self._restarting = False
            for child in self._children:
                child.start_at, child.short_lives, child.failed_starts = 0.0, 0, 0
        while self._forwarded < self._signals:
            self._forwarded += 1
            self._tell(signal.SIGTERM)
            grace_sec = self._grace_sec if self._forwarded == 1 else 0.0
            self._stop_by = time.monotonic() + grace_sec + KILL_AFTER_SEC
            time.sleep(TICK_SEC)  # Two signals at the same time would be received as one.

    def _tell(self, number: signal.Signals) -> None:
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
        """As the first process of a container, bury what others left behind."""
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
        """Make sure that nothing is left running."""
        os.close(self._held_end)
        os.close(self._lifeline)
        grace_sec = 0.0 if self._signals else self._grace_sec
        deadline = time.monotonic() + grace_sec + KILL_AFTER_SEC
        self._tell(signal.SIGTERM)
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
    """Say how a process ended."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # Most real-time signals have no name.
        return f"signal {-status}"


def own_name() -> str | None:
    """Give the name that a supervisor gave to this process, if there is one."""
    return _inherited()[0]


def end_with_supervisor(stop: Callable[[], None]) -> None:
    """Call ``stop`` when the supervisor is gone, however it ended."""
    _, lifeline = _inherited()
    if lifeline is None:
        return

    def watch() -> None:
        os.read(int(lifeline), 1)  # Nothing is ever written: it returns when the pipe closes.
        stop()

    threading.Thread(target=watch, name="microqueue-lifeline", daemon=True).start()


@cache
def _inherited() -> tuple[str | None, str | None]:
    """Take the name and the lifeline out of the environment, before handlers are imported.

    What handlers start is no process of the supervisor, and has another file by that number.
    """
    return os.environ.pop(NAME_VARIABLE, None), os.environ.pop(LIFELINE_VARIABLE, None)
