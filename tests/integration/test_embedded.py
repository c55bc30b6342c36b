"""The embedded server, with real mongods: every process that starts also ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pymongo import MongoClient

from microqueue.embedded import (
    EmbeddedServer,
    default_directory,
    find_mongod,
    keeper,
    probe,
    program,
    running,
)
from microqueue.embedded import server as server_module
from microqueue.errors import EmbeddedServerError
from tests.ports import free_port
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("own_server")

# Waits for a line of input, starts a server, prints its state, and uses it until the input ends.
USER = """
import json, sys
from microqueue.embedded import keeper
from microqueue.embedded import EmbeddedServer
print("ready", flush=True)
sys.stdin.readline()
server = EmbeddedServer.start(sys.argv[1] if len(sys.argv) > 1 else None)
state = keeper.read_state(server.directory)
print(json.dumps({**state._asdict(), "directory": str(server.directory), "reused": server.reused}),
      flush=True)
sys.stdin.read()
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(OSError):
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    return not Path("/proc").exists()


def await_exit(*pids: int) -> None:
    """Wait for processes to end. The kernel releases their locks a little earlier."""
    wait_for(lambda: not any(map(is_alive, pids)), what=f"the end of {pids}")


def state_of(directory: Path) -> keeper.ServerState:
    state = keeper.read_state(directory)
    assert state is not None
    return state


def crash(directory: Path) -> None:
    """Kill the keeper, and wait until its mongod has died, without a clean shutdown."""
    os.kill(state_of(directory).keeper_pid, signal.SIGKILL)
    wait_for(lambda: not keeper.is_locked(directory / keeper.SERVER_LOCK))


def write_note(server: EmbeddedServer, text: str) -> None:
    with MongoClient[dict[str, Any]](server.uri) as client:
        client.notes.notes.insert_one({"text": text})


def notes(uri: str) -> list[str]:
    with MongoClient[dict[str, Any]](uri) as client:
        return [note["text"] for note in client.notes.notes.find()]


def hello(uri: str) -> dict[str, Any]:
    with MongoClient[dict[str, Any]](uri) as client:
        return client.admin.command("hello")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory for data. Processes that still use it after the test are killed."""
    home = tmp_path / "home"
    yield home
    state = keeper.read_state(home)
    if state is not None and keeper.is_locked(home / keeper.SERVER_LOCK):
        for pid in (state.keeper_pid, state.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not keeper.is_locked(home / keeper.SERVER_LOCK))


@pytest.fixture
def temporary_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent of temporary directories during the test."""
    root = tmp_path / "temporary"
    root.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(root))
    monkeypatch.setenv("TMPDIR", str(root))
    return root


@pytest.fixture
def occupied_port() -> Iterator[int]:
    """The port of a program that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@contextlib.contextmanager
def user_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", USER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(probe.__file__).parents[2],
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def answers_of(*users: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Start servers in several processes at the same time, and return their output."""
    for user in users:
        assert user.stdout is not None
        assert user.stdout.readline() == "ready\n"
    for user in users:
        assert user.stdin is not None
        user.stdin.write("go\n")
        user.stdin.flush()
    return [json.loads(user.stdout.readline()) for user in users if user.stdout]


def test_temporary_server_leaves_no_process_and_no_directory(temporary_root: Path) -> None:
    with EmbeddedServer.start(arguments=["--setParameter", "enableTestCommands=1"]) as server:
        state = state_of(server.directory)
        assert server.pid == state.pid
        assert server.uri == f"mongodb://127.0.0.1:{server.port}/?directConnection=true"
        assert not server.reused
        assert server.directory.parent == temporary_root.resolve()
        with MongoClient[dict[str, Any]](server.uri) as client:
            assert client.admin.command("getParameter", enableTestCommands=1)["enableTestCommands"]
            with client.start_session() as session, session.start_transaction():
                client.notes.notes.insert_one({"text": "in a transaction"}, session=session)
    assert not is_alive(state.pid)
    await_exit(state.keeper_pid)
    assert list(temporary_root.iterdir()) == []
    server.stop()  # A second time: nothing happens.


def test_server_outlives_its_first_user_until_the_last_one_stops(directory: Path) -> None:
    first = EmbeddedServer.start(directory)
    second = EmbeddedServer.start(str(directory))
    assert (second.reused, second.pid, second.uri) == (True, first.pid, first.uri)
    first.stop()
    write_note(second, "still here")
    state = state_of(directory)
    second.stop()
    assert not is_alive(state.pid)
    await_exit(state.keeper_pid)
    assert not (directory / keeper.STATE_FILE).exists()


def test_data_and_port_persist_across_a_restart(directory: Path) -> None:
    # The system gives this port to no one else meanwhile.
    with EmbeddedServer.start(directory, port=free_port()) as server:
        write_note(server, "kept")
    again = EmbeddedServer.start(directory)
    assert notes(again.uri) == ["kept"]
    assert (again.reused, again.port) == (False, server.port)


def test_server_moves_when_its_former_port_is_occupied(directory: Path) -> None:
    server = EmbeddedServer.start(directory, port=free_port())
    write_note(server, "kept")
    crash(directory)
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", server.port))
        stranger.listen()
        moved = EmbeddedServer.start(directory)
    assert moved.port != server.port
    assert hello(moved.uri)["me"] == f"127.0.0.1:{moved.port}"
    write_note(moved, "written")
    assert notes(moved.uri) == ["kept", "written"]


def test_server_moves_to_the_port_asked_for(directory: Path) -> None:
    server = EmbeddedServer.start(directory)
    write_note(server, "kept")
    crash(directory)
    other_port = free_port()
    moved = EmbeddedServer.start(directory, port=other_port)
    assert moved.port == other_port
    write_note(moved, "written")
    assert notes(moved.uri) == ["kept", "written"]


def test_explicit_port_in_use_is_an_error(temporary_root: Path, occupied_port: int) -> None:
    with pytest.raises(server_module.PortTakenError) as caught:
        EmbeddedServer.start(port=occupied_port)
    assert (caught.value.code, caught.value.port) == ("port_taken", occupied_port)
    assert str(occupied_port) in str(caught.value)
    assert list(temporary_root.iterdir()) == []


def test_a_port_taken_during_the_start_is_replaced(
    directory: Path, occupied_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([occupied_port, free_port()])
    monkeypatch.setattr(probe, "any_free_port", lambda: next(ports))
    monkeypatch.setattr(probe, "PROBE_MILLISECONDS", 100)
    server = EmbeddedServer.start(directory)
    assert server.port != occupied_port
    write_note(server, "written")


@pytest.mark.parametrize("state", ["of dead processes", "garbage"])
def test_stale_state_is_not_reused(directory: Path, occupied_port: int, state: str) -> None:
    directory.mkdir()
    with subprocess.Popen(["/bin/sh", "-c", ":"]) as ended:
        ended.wait()
    stale = keeper.ServerState(ended.pid, ended.pid, occupied_port, replica_set=True)
    text = json.dumps(stale._asdict()) if state == "of dead processes" else "{}"
    (directory / keeper.STATE_FILE).write_text(text)
    assert running(directory) is None
    server = EmbeddedServer.start(directory)
    assert not server.reused
    assert server.port != occupied_port


def test_state_with_the_port_of_a_foreign_server_is_not_reused(
    directory: Path, temporary_root: Path
) -> None:
    directory.mkdir()
    with EmbeddedServer.start() as foreign:
        state = state_of(foreign.directory)._asdict()
        (directory / keeper.STATE_FILE).write_text(json.dumps(state))
        assert running(directory) is None
        lock = keeper.lock(directory / keeper.SERVER_LOCK, exclusive=True, deadline=0)
        assert running(directory) is None  # Not even while something of the directory runs.
        os.close(lock)
        server = EmbeddedServer.start(directory)
        assert not server.reused
        assert server.port != foreign.port


def test_killed_mongod_has_ended_and_recovers_with_its_data(directory: Path) -> None:
    server = EmbeddedServer.start(directory, port=free_port())
    assert server.is_alive()
    write_note(server, "kept")
    keeper_pid = state_of(directory).keeper_pid
    os.kill(server.pid, signal.SIGKILL)
    await_exit(keeper_pid)
    assert running(directory) is None
    again = EmbeddedServer.start(directory)
    assert (again.reused, again.uri) == (False, server.uri)
    assert (server.is_alive(), again.is_alive()) == (False, True)
    assert notes(again.uri) == ["kept"]


def test_killed_keeper_leaves_no_mongod_and_no_temporary_directory(temporary_root: Path) -> None:
    server = EmbeddedServer.start()
    crash(server.directory)
    await_exit(server.pid)
    assert running(server.directory) is None
    server.stop()
    assert list(temporary_root.iterdir()) == []


def test_terminated_keeper_ends_its_server_cleanly(directory: Path) -> None:
    server = EmbeddedServer.start(directory, replica_set=False)
    os.kill(state_of(directory).keeper_pid, signal.SIGTERM)
    wait_for(lambda: not keeper.is_locked(directory / keeper.SERVER_LOCK))
    assert not is_alive(server.pid)
    # mongod empties its lock file in a clean shutdown only.
    assert (directory / keeper.DATA_DIRECTORY / "mongod.lock").read_text() == ""


def test_killed_user_leaves_no_process_and_no_temporary_directory(temporary_root: Path) -> None:
    with user_process() as process:
        [answer] = answers_of(process)
        process.kill()
        await_exit(answer["pid"], answer["keeper_pid"])
    assert list(temporary_root.iterdir()) == []


def test_user_that_exits_without_stopping_leaves_no_process(temporary_root: Path) -> None:
    with user_process() as process:
        [answer] = answers_of(process)
        process.communicate()
        assert process.returncode == 0
        await_exit(answer["pid"], answer["keeper_pid"])
    assert list(temporary_root.iterdir()) == []


def test_processes_starting_at_once_share_one_server(directory: Path) -> None:
    with contextlib.ExitStack() as processes:
        users = [processes.enter_context(user_process(str(directory))) for _ in range(3)]
        answers = answers_of(*users)
        assert len({(answer["pid"], answer["port"]) for answer in answers}) == 1
        assert sorted(answer["reused"] for answer in answers) == [False, True, True]


def test_start_while_the_server_of_a_killed_user_is_ending_starts_another(directory: Path) -> None:
    with user_process(str(directory)) as process:
        [answer] = answers_of(process)
        process.kill()
    users_lock = directory / keeper.USERS_LOCK
    # The keeper has begun to end it, or has ended: a slow machine may not see it end.
    wait_for(lambda: keeper.is_locked(users_lock) or not is_alive(answer["keeper_pid"]))
    server = EmbeddedServer.start(directory)
    assert not server.reused
    assert not is_alive(answer["pid"])
    await_exit(answer["keeper_pid"])
    write_note(server, "written")


def test_standalone_server_is_no_replica_set(directory: Path) -> None:
    server = EmbeddedServer.start(directory, replica_set=False)
    assert "setName" not in hello(server.uri)
    write_note(server, "written")
    with pytest.raises(EmbeddedServerError) as caught:
        EmbeddedServer.start(directory)
    assert caught.value.code == "no_replica_set"
    with pytest.raises(EmbeddedServerError) as caught:
        EmbeddedServer.start(directory, replica_set=False, port=1)
    assert (caught.value.code, caught.value.port) == ("other_port", server.port)
    assert notes(server.uri) == ["written"]


def test_running_finds_a_server_and_starts_none(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_MILLISECONDS", 30_000)
    assert running(directory) is None
    assert not directory.exists()
    server = EmbeddedServer.start(directory)
    assert running(directory) == running(str(directory)) == server.uri
    crash(directory)
    assert running(directory) is None


def test_error_has_the_reason_why_mongod_did_not_start(temporary_root: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="--nonsense") as caught:
        EmbeddedServer.start(arguments=["--nonsense"])
    assert caught.value.code == "not_started"
    assert list(temporary_root.iterdir()) == []


def test_damaged_data_is_named_in_the_error(directory: Path) -> None:
    data = directory / keeper.DATA_DIRECTORY
    data.mkdir(parents=True)
    for name in ("WiredTiger", "WiredTiger.turtle"):
        (data / name).write_text("junk")
    # The words are those of mongod's log.
    with pytest.raises(EmbeddedServerError, match="database corruption detected") as caught:
        EmbeddedServer.start(directory)
    assert caught.value.code == "not_started"
    assert not keeper.is_locked(directory / keeper.SERVER_LOCK)


def test_mongod_that_never_answers_is_stopped(
    tmp_path: Path, temporary_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    silent = make_program(tmp_path / "silent", f"echo $$ > {pid_file}; exec sleep 60")
    monkeypatch.setenv("MICROQUEUE_MONGOD", str(silent))
    real = probe.await_writable

    def await_writable(home: Path, deadline: float) -> keeper.ServerState | None:
        if keeper.is_locked(home / keeper.SERVER_LOCK):  # It has been started.
            wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
        return real(home, deadline)

    monkeypatch.setattr(probe, "await_writable", await_writable)
    with pytest.raises(EmbeddedServerError) as caught:
        EmbeddedServer.start(startup_timeout=0.3)
    assert caught.value.code == "no_answer"
    assert not is_alive(int(pid_file.read_text()))
    assert list(temporary_root.iterdir()) == []


def make_program(path: Path, script: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_mongod_is_taken_from_the_environment_then_path_then_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = make_program(tmp_path / "given")
    on_path = make_program(tmp_path / "bin" / "mongod")
    in_wheel = make_program(tmp_path / "wheel" / "mongod")
    in_wheel.chmod(0o644)  # As some installers leave it.
    monkeypatch.setattr(program, "_wheel_candidates", lambda: iter([in_wheel]))
    monkeypatch.setenv("MICROQUEUE_MONGOD", str(given))
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert find_mongod() == given
    monkeypatch.setenv("MICROQUEUE_MONGOD", "")
    assert find_mongod() == on_path
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_mongod() == in_wheel
    assert os.access(in_wheel, os.X_OK)


def test_mongod_of_the_wheel_that_cannot_be_made_executable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_wheel = make_program(tmp_path / "mongod")
    in_wheel.chmod(0o644)
    monkeypatch.delenv("MICROQUEUE_MONGOD", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(program, "_wheel_candidates", lambda: iter([in_wheel]))

    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(EmbeddedServerError, match=re.escape(str(in_wheel))) as caught:
        find_mongod()
    assert caught.value.code == "not_executable"


def test_mongod_is_looked_for_beside_the_packages_of_this_python() -> None:
    places = [str(place.parent) for place in program._wheel_candidates()]  # noqa: SLF001 (pure)
    assert any(place.startswith(sysconfig.get_path("purelib")) for place in places)


def test_locked_directory_whose_server_does_not_answer_runs_none(
    directory: Path, occupied_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_MILLISECONDS", 50)
    directory.mkdir()
    held = keeper.lock(directory / keeper.SERVER_LOCK, exclusive=True, deadline=0.0)
    try:
        for port in (occupied_port, free_port()):
            state = {"pid": 1, "keeper_pid": 1, "port": port, "replica_set": True}
            (directory / keeper.STATE_FILE).write_text(json.dumps(state))
            assert running(directory) is None
    finally:
        (directory / keeper.STATE_FILE).unlink()
        os.close(held)


def test_explicit_port_that_is_taken_during_the_start_is_an_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: Any, **_options: Any) -> Any:
        raise server_module.PortTakenError(1)

    monkeypatch.setattr(server_module, "_run", run)
    with pytest.raises(server_module.PortTakenError):
        EmbeddedServer.start(directory, port=free_port())


def test_error_of_the_system_during_the_start_is_an_embedded_server_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(probe, "await_writable", fail)
    with pytest.raises(EmbeddedServerError) as caught:
        EmbeddedServer.start(directory)
    assert caught.value.code == "failed"
    assert str(caught.value.__cause__) in str(caught.value)


def test_end_of_a_server_is_awaited_until_its_directory_is_gone_or_the_time_is_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await_end = server_module._await_end  # noqa: SLF001 (what leaving calls)
    await_end(directory)  # There is none.
    assert not caplog.records
    monkeypatch.setattr(server_module, "END_SECONDS", 0.01)
    directory.mkdir()
    os.close(keeper.lock(directory / keeper.USERS_LOCK, exclusive=True, deadline=0.0))
    held = keeper.lock(directory / keeper.SERVER_LOCK, exclusive=True, deadline=0.0)
    await_end(directory)
    os.close(held)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_error_for_a_missing_mongod_names_the_remedies(
    temporary_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MICROQUEUE_MONGOD", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(program, "_wheel_candidates", lambda: iter(()))
    with pytest.raises(EmbeddedServerError) as caught:
        EmbeddedServer.start()
    assert caught.value.code == "not_found"
    for remedy in ("microqueue[embedded]", "PATH", "MICROQUEUE_URI"):
        assert remedy in str(caught.value)
    assert list(temporary_root.iterdir()) == []


@pytest.mark.parametrize("kind", ["absent", "directory", "not executable"])
def test_error_names_a_mongod_in_the_environment_that_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    program = tmp_path / "mongod"
    if kind == "directory":
        program.mkdir()
    elif kind == "not executable":
        program.write_text("")
    monkeypatch.setenv("MICROQUEUE_MONGOD", str(program))
    named = re.escape(f"MICROQUEUE_MONGOD='{program}'")
    with pytest.raises(EmbeddedServerError, match=named) as caught:
        find_mongod()
    assert caught.value.code == "not_executable"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MICROQUEUE_HOME": "/a", "XDG_DATA_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"MICROQUEUE_HOME": "", "XDG_DATA_HOME": "/b", "HOME": "/c"}, "/b/microqueue"),
        ({"MICROQUEUE_HOME": "", "XDG_DATA_HOME": "", "HOME": "/c"}, "/c/.local/share/microqueue"),
    ],
)
def test_default_directory_follows_the_environment(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_directory() == Path(expected)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("", "mongod reported no reason"),
        ("no such library\n", "no such library"),
        ('{"s": "I", "msg": "fine"}\nplain words\n', "plain words"),
        ('{"s": "E", "msg": "first"}\n{"s": "F", "msg": "second"}', "first"),
        ('{"s": "F", "msg": "a", "attr": {"error": "b"}}', "a: b"),
        ('{"s": "F", "msg": "a", "attr": {"error": {"errmsg": "b"}}}', "a: b"),
        ('{"s": "E", "msg": "a", "attr": {"error": 1, "message": {"error_str": "b"}}}', "a: b"),
    ],
)
def test_reason_of_a_failure_is_the_first_error_of_the_log(log: str, reason: str) -> None:
    assert keeper.failure_reason(log) == reason


def test_arguments_of_the_caller_replace_the_tuning() -> None:
    arguments = ["--wiredTigerCacheSizeGB=1", "--oplogSize", "64"]
    command = keeper.mongod_command(
        Path("mongod"), Path("/home"), port=1, replica_set=True, arguments=arguments
    )
    assert command[-3:] == arguments
    assert "--wiredTigerCacheSizeGB" not in command
    assert command.count("--oplogSize") == 1
