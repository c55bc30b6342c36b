"""Pause a queue and let it go on; whoever claims asks here first."""

from __future__ import annotations

import time

from microqueue.arguments import refused
from microqueue.core.base import QueueBase
from microqueue.operations import control
from microqueue.operations.call import Operation
from microqueue.operations.control import Pause
from microqueue.task import PayloadT

REMEMBERED_SEC = 1.0


class Pausing(QueueBase[PayloadT]):
    """Pauses, remembered for a second, so that claims do not ask each time."""

    _known_pause: tuple[bool, float] | None = None

    def _pause(self, reason: str | None) -> Operation[Pause]:
        if reason is not None and not isinstance(reason, str):
            raise refused("reason", reason, "give a text")
        now = yield from self._now()
        pause = yield from control.pause(self.collections.name, self.name, reason=reason, now=now)
        self.remember_paused(paused=True)
        return pause

    def _resume(self) -> Operation[bool]:
        was_paused = yield from control.resume(self.collections.name, self.name)
        self.remember_paused(paused=False)
        return was_paused

    def _paused(self) -> Operation[Pause | None]:
        pause = yield from control.paused(self.collections.name, self.name)
        self.remember_paused(paused=pause is not None)
        return pause

    def remember_paused(self, *, paused: bool) -> None:
        """Take note of what was just read, so that the next claim need not read it again."""
        self._known_pause = (paused, time.monotonic())

    def _may_claim(self) -> Operation[bool]:
        """Tell whether the queue is open, as of at most a second ago."""
        known = self._known_pause
        if known is not None and time.monotonic() - known[1] < REMEMBERED_SEC:
            return not known[0]
        return (yield from self._paused()) is None
