"""Ask for confirmation before a command deletes or replays tasks."""

from __future__ import annotations

import sys
from typing import Annotated, TypeAlias

import typer

from microqueue.errors import MicroqueueError


def check_answerable() -> None:
    """Refuse to go on where nobody can be asked."""
    if not at_terminal():
        raise MicroqueueError(
            "there is no terminal to ask at: add --yes to go ahead, or --dry-run to look first"
        )


def ask(question: str) -> None:
    """Go on after a yes; else end the command."""
    typer.confirm(question, abort=True, err=True)


def at_terminal() -> bool:
    """Tell whether somebody can answer a question."""
    return sys.stdin.isatty()


DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Only count them.")]


Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
