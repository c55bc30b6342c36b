"""Plain functions beside an event loop: as many threads as needed, and none delays the end."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from microqueue.worker.daemon_threads import run_in_thread

COLOUR: contextvars.ContextVar[str] = contextvars.ContextVar("COLOUR")


async def test_fifty_functions_run_at_the_same_time() -> None:
    together = threading.Barrier(50, timeout=30)
    await asyncio.gather(*(run_in_thread(together.wait) for _ in range(50)))


async def test_function_sees_the_context_of_its_caller() -> None:
    COLOUR.set("red")
    assert await run_in_thread(COLOUR.get) == "red"


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration(), KeyboardInterrupt()])
async def test_what_a_function_raises_reaches_its_caller(error: BaseException) -> None:
    def fail() -> None:
        raise error

    caught: BaseException | None = None
    try:
        await run_in_thread(fail)
    except BaseException as exc:  # noqa: BLE001 (that is what is looked at)
        caught = exc.__cause__ if isinstance(exc, RuntimeError) else exc
    assert caught is error


def test_function_that_never_returns_does_not_keep_the_process_alive() -> None:
    program = """
import asyncio, threading
from microqueue.worker.daemon_threads import run_in_thread

async def main():
    asyncio.get_running_loop().create_task(run_in_thread(threading.Event().wait))
    await asyncio.sleep(0.1)

asyncio.run(main())
print("ended")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout == "ended\n", ended.stderr
