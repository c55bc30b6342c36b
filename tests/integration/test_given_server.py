"""The suite on a given server: ``MICROQUEUE_TEST_URI``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient

from microqueue.embedded import EmbeddedServer
from microqueue.testing import given_server
from microqueue.testing.given_server import GivenServer, UnusableServer
from tests.servers import direct_uri

ROOT = Path(__file__).parents[2]
SOME = ["tests/contract/test_pauses.py", "tests/integration/test_failover.py"]


def run_suite(uri: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    variables = {**os.environ, "MICROQUEUE_TEST_URI": uri}
    return subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(600)
def test_suite_runs_on_a_given_server_and_leaves_nothing_there(
    microqueue_server: EmbeddedServer, microqueue_client: MongoClient[Any], microqueue_database: Any
) -> None:
    microqueue_database.kept.insert_one({})
    before = microqueue_client.list_database_names()
    # The name of a database in use: no test may touch it.
    uri = microqueue_server.uri.replace("/?", f"/{microqueue_database.name}?")
    found = run_suite(uri, "--numprocesses", "2", "-k", "not mock and not waiting", *SOME)
    assert found.returncode == 0, found.stdout
    counts = dict(reversed(one) for one in re.findall(r"(\d+) (passed|skipped)", found.stdout))
    assert int(counts["passed"]) > 10
    assert int(counts["skipped"]) == 2  # They start three servers.
    assert microqueue_client.list_database_names() == before
    assert microqueue_database.list_collection_names() == ["kept"]


@pytest.mark.parametrize(
    "uri", ["mongodb://ada:hunter2@127.0.0.1:1/?serverSelectionTimeoutMS=1", "mongo://127.0.0.1"]
)
def test_unusable_server_ends_the_run_with_one_line(uri: str) -> None:
    found = run_suite(uri, *SOME)
    assert found.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = (found.stdout + found.stderr).strip().splitlines()
    assert "MICROQUEUE_TEST_URI" in line
    assert "hunter2" not in line


def test_given_server_is_checked_once_and_may_have_any_options(
    microqueue_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = re.findall(r"//([^/]+)/", microqueue_server.uri)[0]
    assert GivenServer(f"mongodb://{address}").uri == f"mongodb://{address}/?retryWrites=true"
    given = GivenServer(f"mongodb://{address}/shop?directConnection=true&appName=x")
    assert given.uri == f"mongodb://{address}/?directConnection=true&appName=x"
    assert direct_uri(given).endswith("/?appName=x&directConnection=true")
    with monkeypatch.context() as patch:
        patch.setattr(given_server, "CHECK_MILLISECONDS", 100)
        for wrong in ("mongodb://127.0.0.1:1", f"mongodb://{address}/?replicaSet=other"):
            started = time.monotonic()
            with pytest.raises(UnusableServer, match="does not answer"):
                GivenServer(wrong)
            assert time.monotonic() - started < 30
    # These reach the server, which may be slow to answer.
    monkeypatch.setattr(given_server, "CHECK_MILLISECONDS", 60_000)
    with pytest.raises(UnusableServer, match="valid URI"):
        GivenServer(f"mongodb://{address}/?retryWrite=true")
    with pytest.raises(UnusableServer, match="rejects its user"):
        GivenServer(f"mongodb://ada:hunter2@{address}/shop")
