"""What the environment does not say about dead letters, the collection tells.

A service may keep its dead letters apart by settings in its code, of which a command knows
nothing. No extra is needed here, for ``scripts/sweep.py`` has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from microqueue.core import core_of
from microqueue.operations.call import Operation
from microqueue.operations.diagnostics import has_letters_apart
from microqueue.queue import Queue
from microqueue.settings import QueueSettings


def adopt(queue: Queue[Any]) -> None:
    """Let a queue keep its dead letters where they are kept, unless it was told where."""
    core = core_of(queue)
    core.settings = adopted(core.settings, core.run, core.collections.name)


def adopted(
    settings: QueueSettings, run: Callable[[Operation[bool]], bool], collection: str
) -> QueueSettings:
    """Give settings that keep dead letters apart if ``tasks_dlq`` is there, unless told where."""
    if "dead_letters" in settings.model_fields_set or not run(has_letters_apart(collection)):
        return settings
    return settings.model_copy(update={"dead_letters": "collection"})
