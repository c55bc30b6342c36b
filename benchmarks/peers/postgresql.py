"""A temporary PostgreSQL server on this machine."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEBIAN = Path("/usr/lib/postgresql")
"""Where Debian installs the programs of each version, which are not on the PATH."""
DURABILITY = {"fsync": "on", "synchronous_commit": "on"}
"""The defaults, given all the same, so that they are what is measured."""
USERS = ("postgres", "nobody")
"""Who runs the server if this process is root's, which PostgreSQL rejects."""
INIT_SEC = 60.0
START_SEC = 30.0
STOP_SEC = 10.0


def find_postgres() -> Path | None:
    """Return the server program: that on the PATH, or the newest of Debian's."""
    if (found := shutil.which("postgres")) is not None:
        return Path(found).resolve()
    programs = [one for one in DEBIAN.glob("*/bin/postgres") if one.parts[-3].isdigit()]
    return max(programs, key=lambda one: int(one.parts[-3]), default=None)


def describe() -> str:
    """Return the version of the server program, and the settings that matter here."""
    said = subprocess.run(
        [_postgres(), "--version"], capture_output=True, text=True, check=True
    ).stdout
    version = said.partition(")")[2].split()[0]
    return ", ".join([f"PostgreSQL {version}", *(f"{one} {DURABILITY[one]}" for one in DURABILITY)])


@contextmanager
def postgresql_server() -> Iterator[str]:
    """Run a server on 127.0.0.1 with a new cluster, and yield the URL without a database."""
    programs = _postgres().parent
    account = _account()
    with tempfile.TemporaryDirectory(prefix="microqueue-postgresql-") as directory:
        home = Path(directory)
        password, data, log = secrets.token_urlsafe(), home / "data", home / "log"
        (home / "password").write_text(password)
        log.touch()
        if account:
            for path in (home, home / "password", log):
                os.chown(path, account["user"], account["group"])
        _run(
            [programs / "initdb", "--pgdata", data, "--username", "postgres"],
            ["--auth", "scram-sha-256", "--pwfile", home / "password"],
            ["--encoding", "UTF8", "--no-locale"],
            account=account,
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = {**DURABILITY, "listen_addresses": "127.0.0.1", "port": port}
        options["unix_socket_directories"] = ""
        settings = [one for item in options.items() for one in ("-c", "{}={}".format(*item))]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [programs / "postgres", "-D", data, *settings],
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not end it before its users.
                **account,
            )
        try:
            _await_start(process, data / "postmaster.pid", log)
            yield f"postgresql://postgres:{password}@127.0.0.1:{port}"
        finally:
            _stop(process)


def _postgres() -> Path:
    found = find_postgres()
    if found is None:
        raise RuntimeError("there is no PostgreSQL server")
    return found


def _account() -> dict[str, Any]:
    """Return the arguments of ``Popen`` for the account of the server."""
    if os.geteuid() != 0:
        return {}
    for name in USERS:
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    raise RuntimeError(f"PostgreSQL does not run as root, and there is no user {USERS[-1]}")


def _run(*arguments: list[Any], account: dict[str, Any]) -> None:
    command = [str(one) for part in arguments for one in part]
    done = subprocess.run(
        command,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INIT_SEC,
        check=False,
        **account,
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stdout}")


def _await_start(process: subprocess.Popen[bytes], state: Path, log: Path) -> None:
    """Wait until the last line of the server's state says that it is ready."""
    deadline = time.monotonic() + START_SEC
    while True:
        lines = state.read_text().splitlines() if state.exists() else []
        if lines and lines[-1].strip() == "ready":
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL did not start: {log.read_text(errors='replace')}")
        time.sleep(0.02)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)  # A fast shutdown: it ends all sessions.
    try:
        process.wait(STOP_SEC)
    except subprocess.TimeoutExpired:
        process.kill()  # Its other processes notice that, and exit.
        process.wait()
