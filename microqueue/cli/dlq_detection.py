"""Detect whether a collection keeps its dead letters in a separate collection.

A service may configure that in its code, which a command cannot see. This module needs no
extra, because ``scripts/sweep.py`` uses it without typer and rich.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from microqueue.core import core_of
from microqueue.operations.call import Operation
from microqueue.operations.diagnostics import has_separate_dlq
from microqueue.queue import Queue
from microqueue.settings import QueueSettings


def detect_dlq(queue: Queue[Any]) -> None:
    """Let a queue use the existing DLQ collection, unless its settings say where to look."""
    core = core_of(queue)
    core.settings = with_detected_dlq(core.settings, core.run, core.collections.name)


def with_detected_dlq(
    settings: QueueSettings, run: Callable[[Operation[bool]], bool], collection: str
) -> QueueSettings:
    """Return settings with a separate DLQ if one exists and ``dead_letters`` is not set."""
    if "dead_letters" in settings.model_fields_set or not run(has_separate_dlq(collection)):
        return settings
    return settings.model_copy(update={"dead_letters": "collection"})
