"""On a cluster: a driver and two executors in separate processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from pyspark.sql import SparkSession

from microqueue.embedded import EmbeddedServer
from microqueue.errors import JavaNotFound
from microqueue.spark import session

HERE = Path(__file__).parent
DATABASE = "cluster"


@dataclass(frozen=True)
class Ran:
    """The facts reported by the job, its files, and the tasks in MongoDB."""

    facts: dict[str, Any]
    root: Path
    tasks: Any

    def attempts(self, name: str) -> set[str]:
        """Return the attempts of a job's parts, each as part and number."""
        return {file.name for file in (self.root / name).iterdir()}


@pytest.fixture(scope="module")
def ran(
    microqueue_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ran]:
    """Run the job once, for all tests: five JVMs start one after the other."""
    root = tmp_path_factory.mktemp("cluster")
    for name in ("cluster_job.py", "slow_parts.py"):
        shutil.copy(HERE / name, root / name)
    uri = microqueue_server.uri.replace("/?", f"/{DATABASE}?")
    environment = {name: value for name, value in os.environ.items() if "SPARK" not in name}
    result = subprocess.run(
        [sys.executable, str(root / "cluster_job.py"), uri, str(root)],
        cwd=root,  # Not the source tree: executors must not find the code by chance.
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    with MongoClient[Any](uri) as client:
        yield Ran(json.loads((root / "facts.json").read_text()), root, client[DATABASE].tasks)
        client.drop_database(DATABASE)


def test_executors_of_a_cluster_find_the_package(ran: Ran) -> None:
    assert ran.facts["executors"] == 2
    assert ran.tasks.count_documents({"queue": "orders", "status": "pending"}) == 355


def test_a_part_of_which_spark_runs_a_copy_is_written_once(ran: Ran) -> None:
    assert ran.attempts("sink") >= {"0-0", "0-1"}
    assert ran.facts["report"] == [400, 0]
    waiting = [task["payload"]["order"] for task in ran.tasks.find({"queue": "twice"})]
    assert len(waiting) == 340
    assert sorted([*waiting, *ran.facts["kept"]]) == list(range(400))


@pytest.mark.parametrize("way", ["direct", "spark"])
def test_a_part_of_which_spark_runs_a_copy_is_archived_once(ran: Ran, way: str) -> None:
    assert ran.attempts(way) == {"0-0", "0-1"}
    assert ran.facts[way] == 30
    assert len(set(ran.facts["kept"])) == len(ran.facts["kept"]) == 60


@pytest.mark.parametrize("home", [None, "/nowhere"])
def test_a_missing_java_is_reported_in_one_sentence(
    home: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(SparkSession, "getActiveSession", classmethod(lambda _: None))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("JAVA_HOME", home)
    with pytest.raises(JavaNotFound, match=r"Java 17.*apt install openjdk-17-jre-headless") as said:
        session()
    assert "\n" not in str(said.value)
    assert said.value.java_home == home
