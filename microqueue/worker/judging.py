"""Judge how tasks end: by their handler, by their time, by a lost lease, or by a stop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from microqueue.errors import InvalidPayload
from microqueue.operations import settle
from microqueue.payload import check_encodable
from microqueue.task import Outcome, TaskStatus
from microqueue.worker.handlers import Handler
from microqueue.worker.hooks import HookList
from microqueue.worker.inflight import Held, InFlight, now_sec
from microqueue.worker.log import Unstarted, logger, tell
from microqueue.worker.options import WorkerOptions
from microqueue.worker.outbox import Finished
from microqueue.worker.outcomes import Fail, is_unexpected, plain_retry, settlement_for
from microqueue.worker.pace import Pace


class Judge:
    """Says what becomes of each task, once: whoever is first to conclude it decides."""

    def __init__(
        self,
        options: WorkerOptions,
        *,
        pace: Pace,
        in_flight: InFlight,
        hooks: HookList,
        unstarted: Unstarted,
    ) -> None:
        self._keep_result = options.keep_result
        self._pace = pace
        self._in_flight = in_flight
        self._hooks = hooks
        self._unstarted = unstarted
        self._verbose = logger.isEnabledFor(logging.DEBUG)

    def ended(
        self, held: Held, handler: Handler | None, result: Any, error: BaseException | None
    ) -> Finished | None:
        """Judge how a handler ended; nothing if somebody else has concluded the task.

        Whatever happens here, the worker goes on.
        """
        try:
            return self._ended(held, handler, result, error)
        except BaseException as exc:  # noqa: BLE001 (the code of users may raise anything)
            event = "task %s cannot be judged, and is left to its lease: %r"
            logger.error(event, held.claimed.id, exc, exc_info=exc)
            self._in_flight.conclude(held, returned=True)
            self._in_flight.remove([held])
            return None

    def _ended(
        self, held: Held, handler: Handler | None, result: Any, error: BaseException | None
    ) -> Finished | None:
        took_sec = now_sec() - (held.started or now_sec())
        self._pace.learn(took_sec)
        if not self._in_flight.conclude(held, returned=True):
            tell(logging.INFO, held.task, "the late end of its handler is discarded")
            return None
        settlement = None
        if error is None and (self._keep_result or (handler and handler.keep_result)):
            error = unstorable(held.queue, result)
            settlement = settle.done(held.queue.clock.now(), result=result)
        if error is not None:
            finished, tell_hooks = self._failed(held, error, held.queue.clock.now(), took_sec)
            tell_hooks()
            return finished
        if self._verbose:
            tell(logging.DEBUG, held.task, "done in %.3f s", took_sec)
        if self._hooks:
            self._hooks.call("on_success", held.task, took_sec=took_sec)
        return Finished(held, settlement)

    def overtake(self, held: Held) -> bool:
        """Tell a handler that it is too late; give whether it had not ended before."""
        first = self._in_flight.conclude(held)  # Before it is told, as it may end at once.
        held.interrupt()
        return first

    def timed_out(self, held: Held) -> tuple[Finished, Callable[[], None]]:
        """Settle a task whose handler took too long, and was overtaken; give how hooks are told."""
        limit_sec = (held.deadline or 0.0) - (held.started or 0.0)
        error = TimeoutError(f"the handler took longer than {limit_sec:g} s")
        return self._failed(held, error, held.queue.clock.now(), limit_sec)

    def lose(self, held: Held) -> bool:
        """Let a task go that was taken away; the result of its handler will be discarded.

        Give whether that is news, and :meth:`tell_lost` is to be called.
        """
        if not self.overtake(held):
            return False
        self._in_flight.remove([held])
        return True

    def tell_lost(self, held: Held) -> None:
        """Say that a task was taken away, and how."""
        if held.was_cancelled:
            tell(logging.INFO, held.task, "cancelled; its handler is told")
            self._hooks.call("on_cancel", held.task)
        else:
            if held.started is None:
                self._unstarted.add(held)
            else:
                tell(logging.WARNING, held.task, "its lease is lost; its result is discarded")
            self._hooks.call("on_lease_lost", held.task)

    def discard(self, held: Held) -> Finished | None:
        """Release a task that is not started because its lease has ended."""
        finished = self.hand_back(held)
        if finished is not None:
            self._unstarted.add(held)
        return finished

    def hand_back(self, held: Held) -> Finished | None:
        """Give a task back unharmed, unless it ended by itself."""
        if not self._in_flight.conclude(held):
            return None
        self._hooks.call("on_release", held.task)
        now = held.queue.clock.now()
        return Finished(held, settle.released(held.task, now, front=False))

    def _failed(
        self, held: Held, error: BaseException, now: datetime, took_sec: float
    ) -> tuple[Finished, Callable[[], None]]:
        task, settings = held.task, held.queue.settings
        try:
            settlement = settlement_for(task, error, held.judgement, now=now, settings=settings)
        except Exception as exc:  # noqa: BLE001 (its class is the users' own)
            event = "task %s: %s is no whole outcome, and taken for an error: %r"
            logger.error(event, task.id, type(error).__name__, exc, exc_info=exc)
            settlement = plain_retry(task, error, now=now, settings=settings)
        buried = settlement.changes["status"] == TaskStatus.FAILED
        if settlement.outcome is not Outcome.SNOOZED:
            tell(
                logging.WARNING,
                task,
                "attempt %d of %d failed, %s: %r",
                task.attempts,
                task.max_attempts,
                "and it is a dead letter" if buried else "and it will be tried again",
                error,
                exc_info=error if is_unexpected(error) else None,
            )
        hook = "on_failure" if buried else "on_retry"
        tell_hooks = partial(self._hooks.call, hook, task, error, took_sec=took_sec)
        return Finished(held, settlement), tell_hooks


def unstorable(queue: Any, result: Any) -> Fail | None:
    """Say why a result cannot be stored, if so; doing the work again would not change that."""
    try:
        check_encodable({"result": result}, queue.collections.codec_options)
    except InvalidPayload as exc:
        return Fail(str(exc), code="invalid_result")
    return None
