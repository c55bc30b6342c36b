"""The progress of a pipeline, reported step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Step:
    """A step that begins: its name for programs, and a sentence for people."""

    name: str
    text: str


ProgressCallback: TypeAlias = Callable[[Step], None]


def no_progress(_step: Step) -> None:
    """Ignore the step."""
