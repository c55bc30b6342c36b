"""The command line ends without a traceback: on Ctrl-C at any moment, and without a reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

PROGRAM = [sys.executable, "-m", "microqueue.cli"]
PATIENCE_SEC = 60

# Each says that it is there, and stays until a signal comes.
HANG = "print('there', flush=True); time.sleep(60)"
IN_AN_IMPORT = f"""
import sys, time
import microqueue.cli

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "microqueue.cli.app":
            {HANG}

sys.meta_path.insert(0, Slow())
microqueue.cli.main()
"""
IN_A_COMMAND = f"""
import time
from microqueue.cli import formats, main

def hang(*_):
    {HANG}

formats.seconds = hang  # Something that a command calls.
main()
"""
OUT_OF_ORDER = """
from microqueue.cli import formats, main

def fail(*_):
    raise RuntimeError("no way to mongodb://anna:sesame@host")

formats.seconds = fail
main()
"""
AT_THE_END = f"""
import atexit, sys, time
import microqueue.cli

def linger():
    {HANG}

atexit.register(linger)
microqueue.cli.main()
"""


@contextmanager
def started(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run code in a separate process, and wait until it reports that it has started."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            while "there" not in process.stdout.readline():
                assert process.poll() is None
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("code", [IN_AN_IMPORT, AT_THE_END], ids=["import", "end"])
def test_interrupt_before_and_after_a_command_is_quiet(code: str) -> None:
    with started(code, "--version") as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_SEC)
    assert (process.returncode, errors) == (-signal.SIGINT, "")


def test_interrupt_of_a_command_is_quiet_and_told_by_the_status() -> None:
    with started(IN_A_COMMAND, "backoff") as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_SEC)
    assert (process.returncode, errors) == (130, "")


def test_interrupt_that_is_ignored_stays_ignored() -> None:
    ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{IN_AN_IMPORT}"
    with started(ignoring.replace("sleep(60)", "sleep(1)"), "--version") as process:
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=PATIENCE_SEC)
    assert (process.returncode, errors) == (0, "")
    assert said.startswith("microqueue ")


def test_unexpected_error_of_a_command_is_shown_without_a_password() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OUT_OF_ORDER, "backoff"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "RuntimeError: no way to ***@host" in ended.stderr
    assert "sesame" not in ended.stderr


def run_into(
    output: IO[str] | int, arguments: list[str], unbuffered: str
) -> subprocess.CompletedProcess[str]:
    """Run a command whose output goes where it cannot be written."""
    return subprocess.run(
        [*PROGRAM, *arguments],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )


@pytest.mark.measured
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["backoff"], ["backoff", "--json"], ["--version"], ["-h"]])
def test_output_that_cannot_be_written_is_told_in_one_sentence(
    arguments: list[str], unbuffered: str
) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 (no file, but a device)
        ended = run_into(full, arguments, unbuffered)
    assert ended.stderr == "Error: cannot write the output: No space left on device\n"
    assert ended.returncode == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["backoff"], ["backoff", "--json"], ["--version"], ["-h"]])
def test_reader_that_has_seen_enough_is_not_told_anything(
    arguments: list[str], unbuffered: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = run_into(writing, arguments, unbuffered)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")
