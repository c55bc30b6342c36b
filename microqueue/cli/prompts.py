"""Ask for confirmation before a command deletes or replays tasks."""

from __future__ import annotations

import sys

import typer

from microqueue.errors import MicroqueueError


def check_answerable(*, otherwise: str = "--dry-run to count first") -> None:
    """Raise if there is no terminal to ask at."""
    if not at_terminal():
        raise MicroqueueError(
            f"cannot ask for confirmation without a terminal: add --yes to proceed, or {otherwise}"
        )


def confirm(question: str) -> None:
    """Ask a question; abort the command unless the answer is yes."""
    typer.confirm(question, abort=True, err=True)


def at_terminal() -> bool:
    """Return whether stdin is a terminal."""
    return sys.stdin.isatty()
