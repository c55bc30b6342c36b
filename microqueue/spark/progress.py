"""What a pipeline tells while it works, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Step:
    """One step that begins: its name for programs, and a sentence for people."""

    name: str
    text: str


Tell: TypeAlias = Callable[[Step], None]


def silent(_step: Step) -> None:
    """Tell nobody."""
