"""The keeper of the embedded server, with small programs in place of mongod."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from microqueue.embedded import keeper

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('ready', flush=True)\ntime.sleep(600)",
]


@pytest.fixture(autouse=True)
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the handlers that a keeper sets, and start its programs without a fork."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(keeper, "dying_with", lambda _parent: None)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    directory = tmp_path / "home"
    directory.mkdir()
    return directory


def order(home: Path, command: list[str], *, temporary: bool = False) -> dict[str, Any]:
    options = {"command": command, "port": 1, "replica_set": True, "temporary": temporary}
    return {"directory": str(home), **options}


def run_main(monkeypatch: pytest.MonkeyPatch, what: dict[str, Any]) -> None:
    """Run a keeper in this process, as if it had detached."""
    monkeypatch.setattr(sys, "argv", ["keeper", json.dumps(what)])
    monkeypatch.setattr(os, "fork", lambda: 0)
    keeper.main()


@pytest.mark.parametrize("temporary", [False, True])
def test_server_without_users_is_stopped(
    home: Path, monkeypatch: pytest.MonkeyPatch, temporary: bool
) -> None:
    started: list[Any] = []
    usual = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(usual(*arguments, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    run_main(monkeypatch, order(home, SLEEP, temporary=temporary))
    assert started[0].returncode == -(signal.SIGKILL if temporary else signal.SIGTERM)
    assert home.exists() is not temporary
    assert keeper.read_state(home) is None


def test_server_runs_while_it_is_used_and_its_keeper_is_not_stopped(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "POLL_SECONDS", 0.01)
    user = keeper.lock(home / keeper.USERS_LOCK, exclusive=False, deadline=0.0)
    seen: list[keeper.ServerState] = []

    def stop() -> None:
        while not seen:
            if state := keeper.read_state(home):
                seen.append(state)
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    try:
        run_main(monkeypatch, order(home, SLEEP, temporary=True))
    finally:
        stopper.join(60)
    assert (seen[0].keeper_pid, seen[0].port, seen[0].replica_set) == (os.getpid(), 1, True)
    assert home.exists()  # It is still used.
    os.close(user)


def test_keeper_of_a_program_that_cannot_run_says_why(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_main(monkeypatch, order(home, [str(home / "missing")]))
    assert "could not run mongod" in str(ended.value.code)


def test_lock_that_others_keep_is_waited_for_until_the_deadline(home: Path) -> None:
    held = keeper.lock(home / "lock", exclusive=True, deadline=0.0)
    with pytest.raises(TimeoutError):
        keeper.lock(home / "lock", exclusive=False, deadline=time.monotonic() + 0.01)
    os.close(held)
    os.close(keeper.lock(home / "lock", exclusive=False, deadline=0.0))


def test_program_that_ignores_its_termination_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "TERMINATION_SECONDS", 0.05)
    with subprocess.Popen(STUBBORN, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        keeper.terminate(process, gently=True)
    assert process.returncode == -signal.SIGKILL


class Gone(Exception):
    """Raised in place of the end of the process."""


@pytest.mark.parametrize("has_prctl", [True, False])
@pytest.mark.parametrize("orphan", [False, True])
def test_program_dies_with_its_keeper(
    monkeypatch: pytest.MonkeyPatch, has_prctl: bool, orphan: bool
) -> None:
    monkeypatch.undo()  # The function itself.
    arranged: list[Any] = []
    library = SimpleNamespace(prctl=lambda *given: arranged.append(given)) if has_prctl else None
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)

    def leave(status: int) -> None:
        raise Gone(status)

    monkeypatch.setattr(os, "_exit", leave)
    arrange = keeper.dying_with(-1 if orphan else os.getppid())
    if orphan:
        with pytest.raises(Gone):
            arrange()
    else:
        arrange()
    expected = [(keeper.PR_SET_PDEATHSIG, signal.SIGKILL)]
    assert arranged == (expected if has_prctl else [])
