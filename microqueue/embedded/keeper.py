"""Run one mongod for as long as any process uses it.

This file is a separate program, detached from the process that starts it. It defines the files
of an embedded server's directory:

    start.lock    held exclusively while a process starts the server or waits for its end
    users.lock    held shared by every process that uses the server: the reference count
    server.lock   held exclusively by the keeper and its mongod, as long as either lives
    server.json   which mongod runs, and where; meaningless unless server.lock is held
    port          the port of the last start, preferred by the next one
    data/         MongoDB's files
    mongod.log    MongoDB's own log
    keeper.log    output of the keeper, and of mongod before its own log was open

Every lock is a ``flock``. The kernel releases it when its last holder ends, for whatever reason,
so no decision relies on a process id, which another process may have been given.

This file imports only the standard library, because its imports delay every start.
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

if sys.platform != "win32":  # Windows has no embedded server, but the import must work.
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
# For a laptop. By default the oplog may take 5 % of the disk.
TUNING = {"--wiredTigerCacheSizeGB": "0.25", "--oplogSize": "256"}

POLL_SECONDS = 0.1
LOCK_POLL_SECONDS = 0.01
TERMINATION_SECONDS = 10.0  # A clean shutdown takes about one second.
PR_SET_PDEATHSIG = 1  # From <sys/prctl.h>.
NO_REASON = "mongod reported no reason"


class ServerState(NamedTuple):
    """The processes and the port of a running server."""

    pid: int
    keeper_pid: int
    port: int
    replica_set: bool


def open_lock(path: Path, *, create: bool = True) -> int:
    """Open a lock file and return its descriptor, not locked yet."""
    return os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)


def try_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Try to take a lock without waiting, and return whether that worked."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Return whether any process holds the lock exclusively."""
    try:
        descriptor = open_lock(path, create=False)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, exclusive=False)
    finally:
        os.close(descriptor)


def lock(path: Path, *, exclusive: bool, deadline: float, create: bool = True) -> int:
    """Take a lock and return the descriptor that holds it until it is closed.

    It is a number and not a file object, because garbage collection must not end a lock. Forked
    children inherit it and count as users too. It is only closed, never unlocked: unlocking in a
    child would unlock it for the parent.

    Raises:
        TimeoutError: others held the lock until the deadline, which is a ``time.monotonic()``.
    """
    descriptor = open_lock(path, create=create)
    while not try_lock(descriptor, exclusive=exclusive):
        if time.monotonic() > deadline:
            os.close(descriptor)
            raise TimeoutError(f"another process keeps {path} locked")
        time.sleep(LOCK_POLL_SECONDS)
    return descriptor


def read_state(directory: Path) -> ServerState | None:
    """Return the content of the state file; None if it is missing or malformed."""
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
    """Replace a file's content, so that a reader sees either the old or the new one."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def mongod_command(
    mongod: Path, home: Path, *, port: int, replica_set: bool, arguments: Sequence[str]
) -> list[str]:
    """Return the command line of mongod. ``arguments`` override the defaults in ``TUNING``."""
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
    """Return why mongod stopped: the first error of its log, or else its first line."""
    first_line = ""
    for line in filter(None, map(str.strip, log.splitlines())):
        try:
            entry = json.loads(line)
            severity, message = entry["s"], entry["msg"].strip()
        except (ValueError, TypeError, KeyError):
            first_line = first_line or line  # An error before the log was set up.
            continue
        if severity in ("E", "F"):
            # The first error is the cause of the later ones.
            attributes = entry.get("attr", {})
            detail = attributes.get("message") or attributes.get("error") or ""
            if isinstance(detail, dict):
                detail = detail.get("errmsg") or detail.get("error_str") or ""
            return f"{message}: {detail}" if detail else message
    return first_line or NO_REASON


def dying_with(parent: int) -> Callable[[], None]:
    """Return a function for a child to call before ``exec``, so that it dies with its parent.

    This works only on Linux. Elsewhere a SIGKILLed keeper leaves its mongod running, and the next
    start of the directory uses it.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def arrange() -> None:
        if prctl is not None:
            # SIGKILL, because a dead keeper cannot follow up on a gentler signal.
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # The parent died before prctl.
            os._exit(1)

    return arrange


def terminate(process: subprocess.Popen[bytes], *, gently: bool) -> None:
    """Stop mongod, and return when the process has ended."""
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
    """Run mongod until it has no users, it ends by itself, or the keeper receives a signal."""
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
        pass_fds=(server_lock,),  # mongod holds the lock too, until it ends.
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
        # The data of a temporary directory is deleted, so a clean shutdown would waste time.
        terminate(process, gently=not temporary)
        (directory / STATE_FILE).unlink(missing_ok=True)
    # If mongod ended by itself, users may be left and start it again. They need the directory.
    # The exit of this process releases the locks.
    if temporary and try_lock(users_lock, exclusive=True):
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """Detach from the starting process, and run the server that the argument describes."""
    order = json.loads(sys.argv[1])
    directory = Path(order.pop("directory"))
    try:
        # Taken before the starter continues, so that a starting server is never seen as absent.
        deadline = time.monotonic() + TERMINATION_SECONDS
        server_lock = lock(directory / SERVER_LOCK, exclusive=True, deadline=deadline)
        # The starter waits for this first process only. init adopts and reaps the second one, so
        # it does not become a zombie of a long-running starter.
        if os.fork() == 0:
            keep(directory, order.pop("command"), server_lock=server_lock, **order)
    except OSError as error:
        sys.exit(f"could not run mongod: {error}")


if __name__ == "__main__":
    main()
