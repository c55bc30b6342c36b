"""Forks the processes of a run, on request: that is fast, so the dead are replaced at once.

It reads a JSON object per line: ``role``, ``who`` and the arguments of the role. It writes one for
each process that was born or has died. It opens no client, so that each process opens its own. When
its input ends, it kills what is left, and ends.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.chaos import clocks
from tests.chaos.handlers import Participant, become
from tests.chaos.leaving import leave
from tests.chaos.ledger import Ledger
from tests.chaos.roles import guests, operators, planners, producers, sweepers, workers
from tests.chaos.setup import Setup

ROLES: dict[str, Any] = {
    "threads": workers.run_threads,
    "coroutines": workers.run_coroutines,
    "supervisor": workers.run_supervisor,
    "consumer": workers.run_consumer,
    "producer": producers.run_producer,
    "sweeper": sweepers.run_sweepers,
    "operator": operators.run_operator,
    "scheduler": planners.run_scheduler,
    "publisher": planners.run_publisher,
    "subscriber": planners.run_subscriber,
    "dashboard": workers.run_dashboard,
    "celery-worker": guests.run_celery_worker,
    "celery-sender": guests.run_celery_sender,
    "archiver": guests.run_archiver,
}
LOGS = "logs"
FAILED = 70


def live(setup: Setup, order: dict[str, Any]) -> int:
    """Be a process of the run until its end; return its exit status."""
    who = order["who"]
    log = os.open(Path(setup.folder) / LOGS / f"{who}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    ledger = Ledger(setup.folder, who)
    try:
        become(Participant(setup, ledger))
        offset_sec = clocks.first_offset(setup.seed, who, order["role"])
        clocks.distort(offset_sec)
        if offset_sec:
            ledger.write("clock", offset_sec=offset_sec)
        clocks.watch(setup.folder, ledger)
        ROLES[order["role"]](Participant(setup, ledger), **order["arguments"])
        leave(ledger)
    except BaseException as exc:  # noqa: BLE001 (it is reported, and the process ends)
        traceback.print_exc()
        ledger.write("crashed", error=repr(exc)[:300])
        return FAILED
    return 0


class Nursery:
    """Forks, and reaps."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._names: dict[int, str] = {}
        self._rest = b""

    def run(self) -> None:
        """Serve until the input ends."""
        woken, wakes = os.pipe()
        for end in (woken, wakes):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wakes)
        while True:
            ready, _, _ = select.select([0, woken], [], [])
            if woken in ready:
                os.read(woken, 4096)
                self._reap()
            if 0 in ready:
                read = os.read(0, 65_536)
                if not read:
                    break
                *lines, self._rest = (self._rest + read).split(b"\n")
                for line in lines:
                    self._fork(json.loads(line))
        for pid in self._names:
            os.kill(pid, signal.SIGKILL)

    def _fork(self, order: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            status = FAILED
            try:
                status = live(self._setup, order)
            finally:
                os._exit(status)
        self._names[pid] = order["who"]
        self._say({"born": order["who"], "pid": pid})

    def _reap(self) -> None:
        while self._names:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            self._say({"died": self._names.pop(pid), "pid": pid, "status": code})

    @staticmethod
    def _say(message: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    Nursery(Setup.read()).run()
