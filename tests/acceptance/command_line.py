"""The command line as the tests run it, and what they put into its queue."""

from __future__ import annotations

import json
import sys
from typing import Any

from typer.testing import CliRunner

from microqueue import Queue
from microqueue.cli import app as cli_app

PROGRAM = [sys.executable, "-m", "microqueue.cli"]


class Cli:
    """Runs the command line in this process, without a terminal."""

    def __init__(self) -> None:
        self.stderr = ""

    def __call__(self, *arguments: str, stdin: str | None = None, status: int = 0) -> str:
        result = CliRunner().invoke(cli_app.app, list(arguments), input=stdin)
        self.stderr = result.stderr
        assert result.exit_code == status, (result.output, result.exception)
        return result.stdout

    def json(self, *arguments: str, stdin: str | None = None, status: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", stdin=stdin, status=status))


def bury(
    queue: Queue[Any], message: str = "broken", code: str | None = None, **options: Any
) -> Any:
    """Put a dead letter into the queue, and give its id."""
    task = queue.enqueue({"n": 1}, **options)
    popped = queue.pop()
    assert popped is not None
    assert popped.id == task.id
    queue.mark_failure(popped, message, code=code)
    return task.id
