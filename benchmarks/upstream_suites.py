"""Run the integration tests of Kombu and Celery on the transport.

    python -m benchmarks.upstream_suites kombu [PYTEST-ARGUMENT...]
    python -m benchmarks.upstream_suites celery [PYTEST-ARGUMENT...]

It downloads the source distribution of the installed version with pip, and starts its own servers.
Celery's suite keeps results in Redis: ``./scripts/setup dev,bench`` installs the client, and
``redis-server`` must be on the ``PATH``. It also needs the packages ``pytest-rerunfailures``,
``pytest-subtests`` and ``pytest-order``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.brokers import missing_redis, redis_server
from microqueue.embedded import EmbeddedServer

SUITES = ("kombu", "celery")
KOMBU_ADAPTER = """
import kombu
import pytest

from . import common

OPTIONS = [None, {"global_keyprefix": "prefixed-"}]


@pytest.fixture(params=OPTIONS)
def connection(request):
    return kombu.Connection("microqueue+URI", transport_options=request.param)


@pytest.fixture()
def invalid_connection():
    return kombu.Connection("microqueue+mongodb://localhost:12345/x", connect_timeout=1)


@pytest.fixture()
def failover_connection():
    dead = "microqueue://localhost:12345/x"
    return kombu.Connection(f"{dead};microqueue://HOST/suite", connect_timeout=2)


class test_Basic(common.BasicFunctionality):
    pass


class test_ExchangeTypes(common.BaseExchangeTypes):
    pass


class test_TimeToLive(common.BaseTimeToLive):
    pass


class test_Priority(common.BasePriority):
    pass


class test_Message(common.BaseMessage):
    pass


class test_EventLoop(common.BaseEventLoop):
    pass


class test_Failover(common.BaseFailover):
    pass
"""


def download(package: str, directory: Path) -> Path:
    """Unpack the source distribution of the installed version; return its folder."""
    name = f"{package}-{version(package)}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    requirement = f"{package}=={version(package)}"
    subprocess.run([*pip, "--dest", str(directory), requirement], check=True)
    with tarfile.open(directory / f"{name}.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    return directory / name


def main(arguments: Sequence[str]) -> int:
    """Run one suite; return pytest's exit status."""
    if not arguments or arguments[0] not in SUITES:
        raise SystemExit(__doc__)
    suite, *given = arguments
    if suite == "celery" and (reason := missing_redis()) is not None:
        raise SystemExit(reason)
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="microqueue-")))
        folder = download(suite, temporary)
        server = stack.enter_context(EmbeddedServer.start(temporary / "db"))
        uri = server.uri.replace("/?", "/suite?")
        environment = dict(os.environ)
        plugins = ["microqueue.contrib.kombu"]  # It registers the schemes of URLs.
        tests = folder / "t" / "integration"
        if suite == "kombu":
            host = urlsplit(uri).netloc
            tests = tests / "test_microqueue.py"
            tests.write_text(KOMBU_ADAPTER.replace("URI", uri).replace("HOST", host))
        else:
            redis = stack.enter_context(redis_server())
            place = urlsplit(redis)
            plugins.append("celery.contrib.pytest")
            environment |= {
                "TEST_BROKER": f"microqueue+{uri}",
                "TEST_BACKEND": redis,
                "REDIS_HOST": str(place.hostname),
                "REDIS_PORT": str(place.port),
            }
        pytest = [sys.executable, "-m", "pytest", "-q"]
        pytest += [one for name in plugins for one in ("-p", name)]
        selected = given if any("test_" in one for one in given) else [*given, str(tests)]
        done = subprocess.run([*pytest, *selected], cwd=folder, env=environment, check=False)
        return done.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
