"""Commands whose errors name the value that they refuse."""

from __future__ import annotations

from typing import Any

import typer
from pydantic import ValidationError
from typer.core import TyperCommand

from microqueue.model import reason_of, shorten


class Command(TyperCommand):
    """A command of typer's, which leaves the value out of what pydantic says about it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; name the one that is refused by what was typed."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as exc:
            cause = exc.__cause__
            if isinstance(cause, ValidationError):
                value = shorten(cause.errors(include_url=False)[0]["input"])
                if value not in exc.message:
                    exc.message = f"{value} is not valid: {reason_of(cause)}."
            raise
