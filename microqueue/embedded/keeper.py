"""Keep one mongod running as long as somebody uses it, and no longer.

This file is a program of its own, detached from the process that starts it, and the
one place that knows the files of an embedded server's directory:

    start.lock    held exclusively while a process starts the server, or waits for its end
    users.lock    held shared by every process that uses the server: the reference count
    server.lock   held exclusively by the keeper and by its mongod, as long as either lives
    server.json   which mongod runs, and where; meaningless unless server.lock is held
    port          the port of the last start, preferred by the next one
    data/         MongoDB's files
    mongod.log    MongoDB's own log
    keeper.log    what the keeper and mongod said before that log was open

Every lock is a ``flock``: the kernel drops it when its last holder is gone, however that
came about, so that no decision ever rests on a process id that may have been given away.

It imports the standard library only, because each millisecond here delays a start.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if sys.platform != "win32":  # There is no embedded server on Windows; importing must still work.
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

START_LOCK = "start.lock"
USERS_LOCK = "users.lock"
SERVER_LOCK = "server.lock"
STATE_FILE = "server.json"
PORT_FILE = "port"
DATA_DIRECTORY = "data"
MONGOD_LOG = "mongod.log"
KEEPER_LOG = "keeper.log"

HOST = "127.0.0.1"
REPLICA_SET = "microqueue"
# Written for a laptop: without the second one, the oplog may take 5 % of the disk.
TUNING = {"--wiredTigerCacheSizeGB": "0.25", "--oplogSize": "256"}

POLL_SECONDS = 0.1
LOCK_POLL_SECONDS = 0.01
TERMINATION_SECONDS = 10.0  # A clean shutdown takes about one second.
PR_SET_PDEATHSIG = 1  # From <sys/prctl.h>.


class ServerState(NamedTuple):
    """Where a running server is to be found."""

    pid: int
    keeper_pid: int
    port: int
    replica_set: bool


def open_lock(path: Path, *, create: bool = True) -> int:
    """Open a lock file, and return a descriptor with no lock on it yet."""
    return os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)


def try_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Take the lock if that is possible at once."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Tell whether somebody holds the lock exclusively."""
    try:
        descriptor = open_lock(path, create=False)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, exclusive=False)
    finally:
        os.close(descriptor)


def lock(path: Path, *, exclusive: bool, deadline: float, create: bool = True) -> int:
    """Take a lock, and return the descriptor that holds it until it is closed.

    A bare number and not a file object, because a lock must not end with garbage collection.
    It is inherited by forked children, which then count as users too, and that is fine. It is
    only ever closed and never unlocked, as unlocking in a child would unlock for its parent.

    Raises:
        TimeoutError: others held it until the deadline, an instant of ``time.monotonic()``.
    """
    descriptor = open_lock(path, create=create)
    while not try_lock(descriptor, exclusive=exclusive):
        if time.monotonic() > deadline:
            os.close(descriptor)
            raise TimeoutError(f"another process keeps {path} locked")
        time.sleep(LOCK_POLL_SECONDS)
    return descriptor


def read_state(directory: Path) -> ServerState | None:
    """Read the state file; None if there is none, or none that makes sense."""
    try:
        fields = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
        return ServerState(
            pid=int(fields["pid"]),
            keeper_pid=int(fields["keeper_pid"]),
            port=int(fields["port"]),
            replica_set=bool(fields["replica_set"]),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content so that a reader sees the old or the new one."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def mongod_command(
    mongod: Path, home: Path, *, port: int, replica_set: bool, arguments: Sequence[str]
) -> list[str]:
    """Put the command line together; tuning that the caller gives replaces ours."""
    given = {argument.partition("=")[0] for argument in arguments}
    command = [str(mongod), "--bind_ip", HOST, "--port", str(port), "--nounixsocket", "--quiet"]
    command += ["--dbpath", str(home / DATA_DIRECTORY)]
    command += ["--logpath", str(home / MONGOD_LOG), "--logappend"]
    command += ["--setParameter", "diagnosticDataCollectionEnabled=false"]
    if replica_set:
        command += ["--replSet", REPLICA_SET]
    for option, value in TUNING.items():
        if option not in given:
            command += [option, value]
    return [*command, *arguments]


def failure_reason(log: str) -> str:
    """Say what stopped mongod, from what it wrote: its first error, else its first words."""
    words = ""
    for line in filter(None, map(str.strip, log.splitlines())):
        try:
            entry = json.loads(line)
            severity, message = entry["s"], entry["msg"].strip()
        except (ValueError, TypeError, KeyError):
            words = words or line  # Not a log entry: an error before the log was set up.
            continue
        if severity in ("E", "F"):
            # The first error is the cause, and those after it only follow from it.
            attributes = entry.get("attr", {})
            detail = attributes.get("message") or attributes.get("error") or ""
            if isinstance(detail, dict):
                detail = detail.get("errmsg") or detail.get("error_str") or ""
            return f"{message}: {detail}" if detail else message
    return words or "it gave no reason"


def dying_with(parent: int) -> Callable[[], None]:
    """Return what a child does before ``exec`` so that it does not outlive its parent.

    Only Linux can do this; elsewhere a SIGKILLed keeper leaves its mongod running, and the
    next start of the directory uses it.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def arrange() -> None:
        if prctl is not None:
            # SIGKILL, as the keeper can no longer see to it that a gentler signal works.
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # The parent died before it was being watched.
            os._exit(1)

    return arrange


def terminate(process: subprocess.Popen[bytes], *, gently: bool) -> None:
    """End mongod, and return when it is gone."""
    if gently:
        process.terminate()
        try:
            process.wait(TERMINATION_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    else:
        process.kill()
    process.wait()


def keep(
    directory: Path,
    command: Sequence[str],
    *,
    port: int,
    replica_set: bool,
    temporary: bool,
    server_lock: int,
) -> None:
    """Run mongod until nobody uses it, it ends by itself, or a signal asks for its end."""
    asked_to_stop = False

    def ask_to_stop(_number: int, _frame: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask_to_stop)

    users_lock = open_lock(directory / USERS_LOCK)
    process = subprocess.Popen(  # noqa: S603 (no shell, and the command is ours)
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=(server_lock,),  # So that the lock stays held until mongod is gone, too.
        preexec_fn=dying_with(os.getpid()),  # noqa: PLW1509 (the keeper has a single thread)
    )
    try:
        state = ServerState(process.pid, os.getpid(), port, replica_set)
        write_atomically(directory / STATE_FILE, json.dumps(state._asdict()))
        while process.poll() is None and not asked_to_stop:
            if try_lock(users_lock, exclusive=True):
                break
            time.sleep(POLL_SECONDS)
    finally:
        # Nobody will read the data of a temporary directory, so a clean shutdown of it
        # would only cost time.
        terminate(process, gently=not temporary)
        (directory / STATE_FILE).unlink(missing_ok=True)
    # A mongod that ended by itself may have users left, or be started once more; the
    # directory is theirs then. The locks are released by the exit of this process.
    if temporary and try_lock(users_lock, exclusive=True):
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """Detach from the starting process, and keep the server described by the argument."""
    order = json.loads(sys.argv[1])
    directory = Path(order.pop("directory"))
    try:
        # Taken before the starter goes on, so that there is no instant at which a server that
        # is being started looks like none.
        deadline = time.monotonic() + TERMINATION_SECONDS
        server_lock = lock(directory / SERVER_LOCK, exclusive=True, deadline=deadline)
        # The starter waits for this first process only. The second one is adopted and reaped
        # by init, so it becomes no zombie in a starter that lives on.
        if os.fork() == 0:
            keep(directory, order.pop("command"), server_lock=server_lock, **order)
    except OSError as error:
        sys.exit(f"mongod could not be kept running: {error}")


if __name__ == "__main__":
    main()
