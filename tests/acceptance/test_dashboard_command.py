"""The dashboard as it is started: by a command, beside the sweeper, and inside another app."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from microqueue import InvalidArgument, Queue, QueueSettings
from microqueue.cli import app as cli_app
from microqueue.cli import dashboard as dashboard_command
from microqueue.dashboard import dashboard
from microqueue.dashboard.server import DashboardServer, is_local
from microqueue.embedded import EmbeddedServer
from microqueue.testing import memory_queue
from tests.ports import free_port
from tests.waiting import wait_for

PATIENCE_SEC = 60
TOKEN = "correct-horse-battery"


@contextmanager
def started(*arguments: str, **environment: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Start a command that keeps running, and read the JSON line that it prints first."""
    process = subprocess.Popen(
        [sys.executable, "-m", "microqueue.cli", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        yield process, json.loads(line)
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_SEC)


def test_command_serves_until_it_is_interrupted(
    database_uri: str, microqueue_database: Any
) -> None:
    queue: Queue[Any] = Queue(microqueue_database)
    queue.enqueue({})
    with started("dashboard", "--port", "0", MICROQUEUE_URI=database_uri) as (process, said):
        address = said["dashboard"]
        assert address.startswith("http://127.0.0.1:")
        overview = httpx.get(f"{address}api/v1/overview", timeout=PATIENCE_SEC).json()
        assert overview["queues"][0]["ready"] == 1
        page = httpx.get(address, timeout=PATIENCE_SEC)
        assert page.headers["content-type"].startswith("text/html")
        # A name of another site that leads here.
        other = httpx.get(address, headers={"Host": "evil.example"}, timeout=PATIENCE_SEC)
        assert other.status_code == 421
        with httpx.stream("GET", f"{address}events", timeout=PATIENCE_SEC) as stream:
            assert next(stream.iter_lines())
            process.send_signal(signal.SIGINT)  # An open stream does not hold it up.
            assert process.wait(PATIENCE_SEC) == 0


def test_letters_that_a_service_keeps_apart_are_shown(
    database_uri: str, microqueue_database: Any
) -> None:
    settings = QueueSettings(dead_letters="collection")
    queue: Queue[Any] = Queue(microqueue_database, settings=settings)
    queue.enqueue({})
    task = queue.pop()
    assert task is not None
    queue.mark_failure(task, "boom")
    with started("dashboard", "--port", "0", MICROQUEUE_URI=database_uri) as (_, said):
        address = f"{said['dashboard']}api/v1/overview"
        overview = httpx.get(address, timeout=PATIENCE_SEC).json()
        assert overview["queues"][0]["failed"] == 1


def test_dashboard_starts_before_its_server(tmp_path: Path) -> None:
    absent = "mongodb://127.0.0.1:1/?directConnection=true"
    environment = {"MICROQUEUE_URI": absent, "MICROQUEUE_SERVER_TIMEOUT": "0.3"}
    with started("dashboard", "--port", "0", **environment) as (_, said):
        reply = httpx.get(f"{said['dashboard']}healthz", timeout=PATIENCE_SEC)
        assert reply.status_code == 200


def test_letters_are_found_of_a_service_that_starts_after_the_dashboard_and_its_server(
    tmp_path: Path,
) -> None:
    port = free_port()
    uri = f"mongodb://127.0.0.1:{port}/?directConnection=true"
    environment = {"MICROQUEUE_URI": uri, "MICROQUEUE_SERVER_TIMEOUT": "0.3"}
    with started("dashboard", "--port", "0", **environment) as (process, said):
        assert "MongoDB" in process.stderr.readline()  # It says what it waits for.
        with EmbeddedServer.start(tmp_path, port=port) as server:
            settings = QueueSettings(dead_letters="collection")
            with Queue[Any].from_uri(uri, settings=settings) as queue:
                queue.enqueue({})
                task = queue.pop()
                assert task is not None
                queue.mark_failure(task, "boom")
            address = f"{said['dashboard']}api/v1/overview"

            def failed() -> Any:
                overview = httpx.get(address, timeout=PATIENCE_SEC).json()
                return overview["queues"] and overview["queues"][0]["failed"]

            wait_for(failed, PATIENCE_SEC, ignoring=(KeyError,))
            assert server.is_alive()


def test_command_with_a_token_and_read_only(database_uri: str) -> None:
    arguments = ("dashboard", "--port", "0", "--read-only", "--host", "0.0.0.0")
    environment = {"MICROQUEUE_URI": database_uri, "MICROQUEUE_DASHBOARD_TOKEN": TOKEN}
    with started(*arguments, **environment) as (_, said):
        address = said["dashboard"].replace("0.0.0.0", "127.0.0.1")
        config = f"{address}api/v1/config"
        assert httpx.get(config, timeout=PATIENCE_SEC).status_code == 401
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        reply = httpx.get(config, headers=bearer, timeout=PATIENCE_SEC)
        assert reply.json()["read_only"] is True
        swept = httpx.post(f"{address}api/v1/sweeper/run", headers=bearer, timeout=PATIENCE_SEC)
        assert swept.status_code in {404, 405}


def test_command_with_manual_actions_and_named_tasks(database_uri: str, tmp_path: Path) -> None:
    (tmp_path / "shop_tasks.py").write_text(
        "from microqueue.worker import Tasks\n"
        "tasks = Tasks()\n"
        "@tasks.task()\n"
        "def send_email(to: str) -> None: ...\n"
    )
    arguments = ("dashboard", "--port", "0", "--manual-actions", "--tasks", "shop_tasks:tasks")
    environment = {"MICROQUEUE_URI": database_uri, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    with started(*arguments, **environment) as (_, said):
        api = f"{said['dashboard']}api/v1"
        assert httpx.get(f"{api}/config", timeout=PATIENCE_SEC).json()["manual_actions"] is True
        body = {"name": "send_email", "payload": {}}
        reply = httpx.post(f"{api}/tasks", json=body, timeout=PATIENCE_SEC)
        assert reply.status_code == 422
        assert [one["path"] for one in reply.json()["errors"]] == ["payload.to"]
        nothing = httpx.post(f"{api}/queues/default/succeed-next", timeout=PATIENCE_SEC)
        assert nothing.json()["code"] == "NothingReady"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli_app.app, ["dashboard", *arguments])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org", "127.0.0.1.nip.io"])
def test_address_that_others_can_reach_needs_a_token(host: str) -> None:
    """Before it connects: there is no server to be found in this environment."""
    result = run("--host", host, "--uri", "mongodb://127.0.0.1:1/")
    assert result.exit_code == 1
    assert host in result.stderr
    assert "token" in result.stderr


@pytest.mark.measured
def test_insecure_is_taken_by_its_word(database_uri: str) -> None:
    arguments = ("dashboard", "--port", "0", "--host", "0.0.0.0", "--insecure")
    with started(*arguments, MICROQUEUE_URI=database_uri) as (_, said):
        address = said["dashboard"].replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{address}api/v1/config", timeout=PATIENCE_SEC).status_code == 200


def test_token_that_is_too_short_is_rejected_and_not_repeated() -> None:
    """Before it connects: there is no server to be found in this environment."""
    result = run("--token", "hunter2hunter2", "--uri", "mongodb://127.0.0.1:1/")
    assert result.exit_code == 1
    assert "--new-token" in result.stderr
    assert "hunter2" not in result.output


def test_new_token_is_printed_alone_and_long_enough() -> None:
    results = [run("--new-token", "--uri", "mongodb://127.0.0.1:1/") for _ in range(2)]
    tokens = [result.stdout.removesuffix("\n") for result in results]
    assert [result.exit_code for result in results] == [0, 0]
    assert tokens[0] != tokens[1]
    for token in tokens:
        assert len(token) >= 32
        assert token.isascii()
        assert not set(token) & set(" \n/+=")
        dashboard(memory_queue(), token=token)
    assert len(json.loads(run("--new-token", "--json").stdout)["token"]) >= 32


@pytest.mark.parametrize(
    ("trusted", "expected"), [((), 429), (("--trust-proxy", "127.0.0.1"), 303)]
)
def test_forwarded_address_is_believed_of_a_trusted_proxy_alone(
    database_uri: str, trusted: tuple[str, ...], expected: int
) -> None:
    environment = {"MICROQUEUE_URI": database_uri, "MICROQUEUE_DASHBOARD_TOKEN": TOKEN}
    with started("dashboard", "--port", "0", *trusted, **environment) as (_, said):
        for n in range(11):
            reply = httpx.post(
                f"{said['dashboard']}login",
                data={"token": f"guess {n}"},
                headers={"X-Forwarded-For": f"203.0.113.{n}", "X-Forwarded-Proto": "https"},
                timeout=PATIENCE_SEC,
            )
        assert reply.status_code == expected
        own = httpx.post(
            f"{said['dashboard']}login",
            data={"token": TOKEN},
            headers={"X-Forwarded-For": "203.0.113.77", "X-Forwarded-Proto": "https"},
            timeout=PATIENCE_SEC,
        )
        assert own.status_code == expected
        # Behind a proxy that ends TLS, the cookie is for HTTPS alone.
        assert expected == 429 or "Secure" in own.headers["set-cookie"]


def test_options_that_contradict_or_lead_nowhere_are_rejected(database_uri: str) -> None:
    both = run("--manual-actions", "--read-only", "--uri", database_uri)
    assert (both.exit_code, "manual_actions" in both.stderr) == (1, True)
    for tasks in ("no_such_module:tasks", "os:getcwd"):
        result = run("--tasks", tasks, "--uri", database_uri)
        assert (result.exit_code, "tasks=" in result.stderr) == (1, True)


def test_proxy_that_is_no_address_is_rejected(database_uri: str) -> None:
    result = run("--trust-proxy", "proxy.example", "--uri", database_uri)
    assert result.exit_code == 1
    assert "proxy.example" in result.stderr


def test_port_that_is_taken_is_told(database_uri: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--port", str(port), "--uri", database_uri)
    assert result.exit_code == 1
    assert f"port={port}" in result.stderr
    assert run("--port", "70000", "--uri", database_uri).exit_code == 1


def test_missing_extra_is_told_in_a_sentence(
    database_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "microqueue.dashboard", None)
    monkeypatch.setitem(sys.modules, "microqueue.dashboard.server", None)
    result = run("--uri", database_uri)
    assert result.exit_code == 1
    assert "Error:" in result.stderr
    assert "Traceback" not in result.stderr
    assert issubclass(dashboard_command.NotInstalled, Exception)


def test_up_serves_the_dashboard_beside_the_sweeper(tmp_path: Path) -> None:
    with started("up", "--directory", str(tmp_path / "data"), "--every", "0.2") as (process, said):
        address = said["dashboard"]
        with Queue[Any].from_uri(said["uri"]) as queue:
            queue.enqueue({})

        def swept() -> Any:
            found = httpx.get(f"{address}api/v1/overview", timeout=PATIENCE_SEC).json()
            return found if found["last_sweep"] is not None else None

        overview = wait_for(swept, PATIENCE_SEC, what="a sweep")
        assert overview["queues"][0]["ready"] == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SEC) == 0


def test_up_does_without_the_dashboard_if_told(tmp_path: Path) -> None:
    with started("up", "--directory", str(tmp_path / "data"), "--no-dashboard") as (_, said):
        assert said["dashboard"] is None


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("::1", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("localhost.example", False)],
)  # fmt: skip
def test_addresses_of_this_machine_alone(host: str, expected: bool) -> None:
    assert is_local(host) is expected


def test_server_in_code_is_as_careful(microqueue_queue: Queue[Any]) -> None:
    with pytest.raises(InvalidArgument, match="token"):
        DashboardServer(microqueue_queue, host="0.0.0.0", port=0)


async def test_dashboard_is_mounted_in_an_app_of_ones_own(microqueue_queue: Queue[Any]) -> None:
    microqueue_queue.enqueue({}, task_id="one")
    app = FastAPI()
    app.mount("/queue", dashboard(microqueue_queue, token=TOKEN))

    @app.get("/own")
    async def own() -> dict[str, bool]:
        return {"own": True}

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.example") as client:
        assert (await client.get("/own")).json() == {"own": True}
        assert "content-security-policy" not in (await client.get("/own")).headers
        redirect = await client.get("/queue/")
        assert (redirect.status_code, redirect.headers["location"]) == (303, "login")
        assert (await client.get("/queue/api/v1/tasks/one")).status_code == 401
        login = await client.post("/queue/login", data={"token": TOKEN})
        assert "Path=/queue/" in login.headers["set-cookie"]
        assert (await client.get("/queue/api/v1/tasks/one")).json()["id"] == "one"
        assert (await client.post("/queue/api/v1/tasks/one/cancel")).status_code == 200
        page = await client.get("/queue/")
        assert page.headers["content-type"].startswith("text/html")
        assert (await client.get("/queue/static/index.html")).status_code == 200
        assert (await client.get("/queue/healthz")).status_code == 200
