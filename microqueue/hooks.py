"""Hooks: what metrics, tracing and user code attach to workers, queues and sweepers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from microqueue.arguments import check_several, invalid_argument
from microqueue.dead_letter_models import DeadLetter
from microqueue.errors import InvalidArgument
from microqueue.model import changed, shorten
from microqueue.task import Task

logger = logging.getLogger("microqueue.hooks")


class Hooks:
    """Base class for hooks; override the methods you need.

    An error in a hook is logged, and changes nothing else. ``AsyncWorker`` calls hooks in its
    event loop. ``Worker`` calls them in the thread that runs the handler, except for events that
    the handler did not cause, such as a timeout, a cancellation or a dead letter: those have their
    own thread. Queues, sweepers and dashboards call only :meth:`on_dead_letter`, before the call
    that made the dead letter returns.
    """

    def on_attach(self, knows: Callable[[str], bool]) -> None:
        """Run when a worker with named tasks is created.

        Args:
            knows: Returns whether a task of this name is registered.
        """

    def on_start(self, task: Task[Any]) -> None:
        """Run before the handler.

        Args:
            task: The task, as it was claimed.
        """

    def on_success(self, task: Task[Any], *, took_sec: float) -> None:
        """Run after the handler returned.

        Args:
            task: The task, as it was claimed.
            took_sec: How long the handler ran.
        """

    def on_retry(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:
        """Run when the task will be delivered again: after an error, ``Retry`` or ``Snooze``.

        Args:
            task: The task, as it was claimed.
            error: What the handler raised.
            took_sec: How long the handler ran.
        """

    def on_failure(self, task: Task[Any], error: BaseException, *, took_sec: float) -> None:
        """Run when the task becomes a dead letter because of its handler.

        Args:
            task: The task, as it was claimed.
            error: What the handler raised.
            took_sec: How long the handler ran.
        """

    def on_dead_letter(self, letter: DeadLetter) -> None:
        """Run when a task has become a dead letter, in whichever way.

        A worker calls it also for its claims, which find expired and malformed tasks. So do a
        ``Sweeper``, a ``Queue`` and a dashboard with hooks. It runs after the write: if the process
        is killed in between, the call is lost.

        Args:
            letter: The dead letter.
        """

    def on_release(self, task: Task[Any]) -> None:
        """Run when the task is released: the worker stops, or could not start it in time.

        Args:
            task: The task, as it was claimed.
        """

    def on_cancel(self, task: Task[Any]) -> None:
        """Run when the task was cancelled while this worker held it.

        Args:
            task: The task, as it was claimed.
        """

    def on_lease_lost(self, task: Task[Any]) -> None:
        """Run when the lease was lost; the result of the handler is discarded.

        Args:
            task: The task, as it was claimed.
        """


class HookList:
    """Calls every hook, and logs the errors they raise."""

    def __init__(self, hooks: Sequence[Hooks]) -> None:
        self._hooks = tuple(hooks)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def call(self, name: str, *arguments: Any, **options: Any) -> None:
        """Call one method of every hook that has it."""
        for hook in self._hooks:
            try:
                if (method := getattr(hook, name, None)) is not None:
                    method(*arguments, **options)
            except BaseException as exc:  # It would end a thread that serves all tasks.
                in_main_thread = threading.current_thread() is threading.main_thread()
                if isinstance(exc, KeyboardInterrupt) and in_main_thread:
                    raise  # Ctrl-C.
                kind = type(hook).__name__
                logger.exception(
                    "hook %s.%s failed", kind, name, extra={"hook": kind, "method": name}
                )


HOOKS = tuple(name for name in vars(Hooks) if name.startswith("on_"))
"""The names of the methods."""


def check_hooks(hooks: Iterable[Any]) -> tuple[Hooks, ...]:
    """Reject anything but several hooks: objects with at least one method of :class:`Hooks`."""
    given = tuple(check_several("hooks", hooks, "give a list of Hooks"))
    for one in given:
        if isinstance(one, type) or not any(callable(getattr(one, name, None)) for name in HOOKS):
            raise _no_hooks(hooks, one)
    return given


def _no_hooks(hooks: Iterable[Any], wrong: Any) -> InvalidArgument:
    """Return the error for what is no hooks, with the method that it may have meant to have."""
    if isinstance(wrong, type):
        instead = f"{wrong.__name__} is a class; give an instance of it"
        return invalid_argument("hooks", hooks, instead)
    named = (name for name in dir(wrong) if not name.startswith("_"))
    close = [meant for name in named for meant in get_close_matches(name, HOOKS, n=1)][:1]
    hint = f"; did you mean {close[0]!r}?" if close else f" ({', '.join(HOOKS)})"
    return InvalidArgument(
        f"hooks={shorten(hooks)} is not valid: {shorten(wrong)} has no method of Hooks{hint}",
        argument="hooks",
        value=hooks,
        closest=close,
    )


def dead_letter_report(
    hooks: Iterable[Any], source: str, submit: Callable[[Callable[[], None]], None] | None = None
) -> Callable[[Sequence[DeadLetter]], None] | None:
    """Return the function that reports dead letters to hooks; ``None`` if no hook wants them.

    Args:
        hooks: Each is called once, even if it is given twice.
        source: What makes the dead letters, such as ``worker``.
        submit: Runs the calls, now or later. By default, they run at once.
    """
    unlike_base = (
        one
        for one in hooks
        if getattr(type(one), "on_dead_letter", None) is not Hooks.on_dead_letter
    )
    wanted = {id(one): one for one in unlike_base if hasattr(one, "on_dead_letter")}
    if not wanted:
        return None
    listeners = HookList(list(wanted.values()))

    def report(letters: Sequence[DeadLetter]) -> None:
        for letter in letters:
            listeners.call("on_dead_letter", changed(letter, source=source))

    if submit is None:
        return report
    return lambda letters: submit(lambda: report(letters))
