"""Start, join and leave the server of a directory."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pymongo.errors import PyMongoError

from microqueue.embedded import keeper, probe
from microqueue.embedded.program import find_mongod
from microqueue.errors import EmbeddedServerError

logger = logging.getLogger("microqueue.embedded")

END_SECONDS = keeper.TERMINATION_SECONDS + 5.0


class PortTakenError(EmbeddedServerError):
    """Another program listens on the port."""

    def __init__(self, port: int) -> None:
        super().__init__(f"port {port} is in use by another program", code="port_taken", port=port)


def _former_port(home: Path) -> int | None:
    """Return the port of the last start."""
    try:
        return int((home / keeper.PORT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class _Launch:
    """What all attempts to start one server share."""

    home: Path
    mongod: Path
    arguments: Sequence[str]
    temporary: bool
    deadline: float


def _launch(launch: _Launch, *, port: int | None, replica_set: bool) -> keeper.ServerState:
    """Start a server on the given port, or the former one, or any free one."""
    if port and not probe.is_free(port):
        raise PortTakenError(port)
    former = _former_port(launch.home)
    while True:
        chosen = port or (former if former and probe.is_free(former) else probe.any_free_port())
        try:
            if replica_set and former and former != chosen and not probe.is_free(former):
                # As a member, mongod would first ask the program on its former port whether that
                # is itself, and wait half a minute if that program does not answer.
                _move_offline(launch, chosen)
            keeper.write_atomically(launch.home / keeper.PORT_FILE, str(chosen))
            return _run(launch, chosen, replica_set=replica_set)
        except PortTakenError:
            if port or time.monotonic() > launch.deadline:
                raise
            logger.info("port %d is in use by another program; trying another port", chosen)


def _move_offline(launch: _Launch, port: int) -> None:
    """Change the port in the replica set's configuration, while mongod runs as a standalone."""
    _run(launch, port, replica_set=False)
    with probe.connect(port) as client:
        stored = client.local["system.replset"]
        if configuration := stored.find_one():
            stored.replace_one({"_id": configuration["_id"]}, probe.with_port(configuration, port))
        with contextlib.suppress(PyMongoError):  # It closes the connection instead of answering.
            client.admin.command("shutdown")
    _await_unlocked(launch.home, launch.deadline)


def _run(launch: _Launch, port: int, *, replica_set: bool) -> keeper.ServerState:
    """Start a keeper that runs mongod, and wait until the server accepts writes."""
    home = launch.home
    (home / keeper.STATE_FILE).unlink(missing_ok=True)
    (home / keeper.DATA_DIRECTORY).mkdir(exist_ok=True)
    log = home / keeper.MONGOD_LOG
    log_start = log.stat().st_size if log.exists() else 0
    order = {
        "directory": str(home),
        "command": keeper.mongod_command(
            launch.mongod, home, port=port, replica_set=replica_set, arguments=launch.arguments
        ),
        "port": port,
        "replica_set": replica_set,
        "temporary": launch.temporary,
    }
    with (home / keeper.KEEPER_LOG).open("wb") as output:
        # By path and isolated, so that the package is not imported, and modules beside the file
        # do not hide modules of the standard library with the same name.
        subprocess.run(  # noqa: S603 (no shell, and nothing from outside)
            [sys.executable, "-I", "-S", keeper.__file__, json.dumps(order)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,  # Ctrl-C in a terminal is for the user's program.
            check=False,  # The log has the reason, which is read below.
        )
    state = probe.await_writable(home, launch.deadline)
    if state is None:
        logged = (home / keeper.KEEPER_LOG).read_bytes()
        if log.exists():
            logged += log.read_bytes()[log_start:]
        reason = keeper.failure_reason(logged.decode(errors="replace"))
        if "Address already in use" in reason:
            raise PortTakenError(port)
        raise EmbeddedServerError(
            f"the MongoDB server of {home} did not start: {reason}", code="not_started"
        )
    return state


def _await_unlocked(home: Path, deadline: float) -> None:
    """Wait until the keeper and mongod of a directory have ended."""
    with contextlib.suppress(FileNotFoundError):  # They deleted the temporary directory.
        os.close(
            keeper.lock(home / keeper.SERVER_LOCK, exclusive=False, deadline=deadline, create=False)
        )


def _await_end(home: Path) -> None:
    """Wait for the end of the server, unless it has other users.

    The caller holds the start lock, so no other process can join or check the server.
    """
    try:
        users_lock = keeper.open_lock(home / keeper.USERS_LOCK, create=False)
        try:
            unused = keeper.try_lock(users_lock, exclusive=True)
            # If neither lock can be taken, the keeper holds it, because it is stopping the server.
            used = not unused and keeper.try_lock(users_lock, exclusive=False)
        finally:
            os.close(users_lock)
        if not used:
            _await_unlocked(home, time.monotonic() + END_SECONDS)
    except FileNotFoundError:
        pass  # The keeper has already deleted the temporary directory.
    except TimeoutError as error:
        logger.warning("the MongoDB server of %s is still stopping: %s", home, error)


@contextlib.contextmanager
def _start_lock(home: Path, deadline: float, *, create: bool) -> Iterator[None]:
    """Hold the start lock: only one process at a time starts or leaves the server."""
    path = home / keeper.START_LOCK
    descriptor = keeper.lock(path, exclusive=True, deadline=deadline, create=create)
    try:
        yield
    finally:
        os.close(descriptor)


def default_directory() -> Path:
    """Choose the directory of this user's server.

    Returns:
        ``MICROQUEUE_HOME``, or a directory in the user's home.
    """
    if home := os.environ.get("MICROQUEUE_HOME"):
        return Path(home).expanduser()
    data_home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data_home).expanduser() / "microqueue"


class EmbeddedServer:
    """A running MongoDB server, in use until ``stop()`` or the end of this process.

    Attributes:
        uri: The connection string.
        port: The port on 127.0.0.1.
        directory: The directory of its files.
        pid: The process id of mongod.
        reused: Whether the server was already running.
    """

    def __init__(
        self,
        directory: Path,
        state: keeper.ServerState,
        *,
        reused: bool,
        temporary: bool,
        users_lock: int,
    ) -> None:
        self.directory = directory
        self.port = state.port
        self.uri = probe.uri_of(state.port)
        self.pid = state.pid
        self.reused = reused
        self._temporary = temporary
        self._users_lock: int | None = users_lock

    @classmethod
    def start(
        cls,
        directory: Path | str | None = None,
        *,
        port: int | None = None,
        replica_set: bool = True,
        arguments: Sequence[str] = (),
        startup_timeout: float = 30.0,
    ) -> Self:
        """Start the server of a directory, or join the running one. Return when it accepts writes.

        Args:
            directory: The directory for the data. Default: a temporary directory, deleted at
                the end.
            port: The port. Default: that of the last start if it is free, or any free one.
            replica_set: Run as a replica set of one, which transactions and change streams
                need.
            arguments: Additional arguments for mongod. A running server keeps its own.
            startup_timeout: The maximum time to wait, in seconds.

        Returns:
            The server. Stop it, or use it as a context manager.

        Raises:
            InvalidArgument: The port is out of range.
            EmbeddedServerError: There is no mongod, it did not start, the port is in use, or
                the running server differs in port or replica set. No process is left behind.
        """
        probe.check_port(port)
        deadline = time.monotonic() + startup_timeout
        temporary = directory is None
        if directory is None:
            directory = tempfile.mkdtemp(prefix="microqueue-")
        home = Path(directory).expanduser().resolve()
        try:
            with contextlib.ExitStack() as undo:
                if temporary:
                    undo.callback(shutil.rmtree, home, ignore_errors=True)
                home.mkdir(mode=0o700, parents=True, exist_ok=True)
                with _start_lock(home, deadline, create=True), contextlib.ExitStack() as leave:
                    users_lock = keeper.lock(
                        home / keeper.USERS_LOCK, exclusive=False, deadline=deadline
                    )
                    leave.callback(_await_end, home)
                    leave.callback(os.close, users_lock)
                    state = probe.await_writable(home, deadline)
                    reused = state is not None
                    if state is None:
                        launch = _Launch(home, find_mongod(), arguments, temporary, deadline)
                        state = _launch(launch, port=port, replica_set=replica_set)
                    elif port and port != state.port:
                        raise EmbeddedServerError(
                            f"the MongoDB server of {home} runs on port {state.port}, not {port}",
                            code="other_port",
                            port=state.port,
                        )
                    elif replica_set and not state.replica_set:
                        raise EmbeddedServerError(
                            f"the MongoDB server of {home} runs without a replica set",
                            code="no_replica_set",
                        )
                    leave.pop_all()
                undo.pop_all()
        except (OSError, PyMongoError) as error:
            raise EmbeddedServerError(
                f"the MongoDB server of {home} failed: {error}", code="failed"
            ) from error
        logger.info("%s MongoDB at %s for %s", "joined" if reused else "started", state.port, home)
        return cls(home, state, reused=reused, temporary=temporary, users_lock=users_lock)

    def is_alive(self) -> bool:
        """Check the process.

        Returns:
            Whether this mongod still runs.
        """
        state = keeper.read_state(self.directory)
        locked = keeper.is_locked(self.directory / keeper.SERVER_LOCK)
        return locked and state is not None and state.pid == self.pid

    def stop(self) -> None:
        """Stop using the server. The call of the last user returns after the server has ended."""
        users_lock, self._users_lock = self._users_lock, None
        if users_lock is None:
            return
        os.close(users_lock)
        # FileNotFoundError: the directory is already deleted. TimeoutError: another process is
        # starting the server or waiting for its end. Either way there is nothing left to do.
        deadline = time.monotonic() + END_SECONDS
        with (
            contextlib.suppress(FileNotFoundError, TimeoutError),
            _start_lock(self.directory, deadline, create=False),
        ):
            _await_end(self.directory)
        if self._temporary and not keeper.is_locked(self.directory / keeper.SERVER_LOCK):
            shutil.rmtree(self.directory, ignore_errors=True)  # In case the keeper was killed.

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
