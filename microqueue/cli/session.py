"""The session a command gets: its options, its output and the queue to use."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from pymongo.errors import PyMongoError

from microqueue.arguments import check_uri, invalid_argument
from microqueue.cli import formats
from microqueue.cli.dlq_detection import detect_dlq
from microqueue.cli.loading import load
from microqueue.cli.logs import LogFormat, LogLevel, configure_logging
from microqueue.cli.options import QueueScope, SharedOptions, with_shared_options
from microqueue.cli.output import Output
from microqueue.core import HasCore, QueueCore, core_of
from microqueue.dead_letters import DeadLetters
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.drivers.connection import URI_VARIABLE
from microqueue.embedded import EmbeddedServer, default_directory, running
from microqueue.errors import MicroqueueError
from microqueue.hooks import Hooks
from microqueue.operations.diagnostics import every_queue
from microqueue.queue import Queue
from microqueue.settings import QueueSettings
from microqueue.task import DEFAULT_QUEUE
from microqueue.worker.handlers import load_hooks
from microqueue.worker.supervisor import own_name

logger = logging.getLogger("microqueue.cli")


class Session:
    """The shared options of one command, its output, and access to its queue."""

    def __init__(self, options: SharedOptions) -> None:
        self.options = options
        self.out = Output(as_json=options.as_json)
        self.hooks: list[Hooks] = []

    @property
    def queue_name(self) -> str:
        """The name given with ``--queue``, or the default queue's."""
        return DEFAULT_QUEUE if self.options.queue is None else self.options.queue

    @property
    def all_queues(self) -> bool:
        """Whether no ``--queue`` was given; commands with scope ``ALL`` then use all queues."""
        return self.options.queue is None

    def check_scope(self, *, all_queues: bool) -> None:
        """Require exactly one of ``--queue`` and ``--all-queues``, before deleting or replaying."""
        if self.options.queue is not None and all_queues:
            raise typer.BadParameter("give --queue or --all-queues, not both.")
        if self.options.queue is None and not all_queues:
            raise typer.BadParameter("which queues? Give --queue NAME, or --all-queues.")

    def queues(self, queue: Queue[Any]) -> list[str]:
        """Return the names of the queues in use: the given one, or all that exist."""
        return core_of(queue).run(every_queue(queue.settings)) if self.all_queues else [queue.name]

    def dead_letters(self, queue: Queue[Any]) -> DeadLetters[Any]:
        """Return the dead letters of the given queue, or of all queues."""
        return queue.dead_letters.all_queues if self.all_queues else queue.dead_letters

    @property
    def scope(self) -> str:
        """The queues in use, as part of a sentence."""
        return "all queues" if self.all_queues else f"queue {self.queue_name!r}"

    def note_queues(self, names: Sequence[str] = ()) -> None:
        """Print to stderr which queues the result covers, with their names if known."""
        listed = f": {formats.listed([repr(one) for one in names])}" if names else ""
        scope = f"All queues{listed}" if self.all_queues else f"Queue {self.queue_name!r}"
        self.out.note(f"{scope}.")

    @property
    def named_queues(self) -> list[str] | None:
        """The queue given with ``--queue``, or ``None`` for all queues."""
        return None if self.options.queue is None else [self.options.queue]

    @property
    def collection(self) -> str:
        """The collection given with ``--collection``, or the default one."""
        return DEFAULT_COLLECTION if self.options.collection is None else self.options.collection

    def with_collection(self, command: str) -> str:
        """Return a suggested command with the ``--collection`` of this one."""
        given = self.options.collection
        return command if given is None else f"{command} --collection {shlex.quote(given)}"

    def reject_queue(self, reason: str) -> None:
        """Reject ``--queue`` where it would have no effect."""
        if self.options.queue is not None:
            raise invalid_argument("queue", self.options.queue, f"{reason}; leave --queue out")

    def connect(self, name: str | None = None, **settings: Any) -> Queue:
        """Open a queue like :meth:`open`, and detect where its dead letters are kept."""
        queue = self.open(name, **settings)
        try:
            detect_dlq(queue)
        except BaseException:
            queue.close()
            raise
        return queue

    def open(self, name: str | None = None, **settings: Any) -> Queue:
        """Open a queue without contacting the server; the caller closes it.

        Args:
            name: The queue; the one given with ``--queue`` if None.
            settings: Override the settings of the environment.
        """
        check_uri(self.options.uri)
        self.note_embedded_server()
        chosen = QueueSettings.from_environment(**settings)
        queue: Queue = Queue.from_uri(
            self.options.uri,
            name or self.queue_name,
            settings=chosen,
            collection=self.collection,
        )
        self.attach_hooks(queue)
        return queue

    def attach_hooks(self, queue: HasCore[QueueCore[Any]]) -> None:
        """Let a queue report the dead letters that it makes to the hooks of ``--hooks``."""
        core_of(queue).attach(self.hooks, source="command")

    def load_hooks(self, reference: str | None) -> None:
        """Import the hooks of ``--hooks`` for the queues that are opened from now on."""
        if reference is not None:
            self.hooks = load(reference, by=load_hooks)

    @contextmanager
    def embedded_server(self) -> Iterator[None]:
        """Run the embedded server, if the command uses it, for what other processes read there."""
        check_uri(self.options.uri)
        if not self._uses_embedded_server:
            yield
            return
        self.note_embedded_server()
        with EmbeddedServer.start(default_directory()):
            yield

    @property
    def _uses_embedded_server(self) -> bool:
        return self.options.uri is None and not os.environ.get(URI_VARIABLE)

    def note_embedded_server(self) -> None:
        """Print that the embedded server is used, in case another one was meant.

        Worker processes stay silent: their supervisor has printed it.
        """
        if not self._uses_embedded_server or own_name() is not None:
            return
        directory = default_directory()
        if not self.out.errors.is_terminal:  # In a cron job, the variable was probably forgotten.
            note = (
                f"Neither --uri nor {URI_VARIABLE} is set: using the embedded MongoDB in "
                f"{directory}."
            )
            if self.options.log_format is LogFormat.JSON:
                logger.warning(note, extra={"embedded": str(directory)})
            else:
                self.out.note(note)
        elif running(directory) is None:
            self.out.note(
                f"Starting the embedded MongoDB in {directory} for this command only; "
                "`microqueue up` keeps it running."
            )

    def configure_logging(
        self, default: LogLevel = LogLevel.WARNING, *, of_app: bool = False
    ) -> None:
        """Log to stderr at the level of ``--log-level``; with ``of_app``, all loggers."""
        level = self.options.log_level or default
        form = self.options.log_format or LogFormat.TEXT
        configure_logging(level, form, debug=self.options.debug, of_app=of_app)


def with_session(command: Callable[..., None], scope: QueueScope) -> Callable[..., None]:
    """Return a command for typer: with the shared options, and with errors in one line.

    Args:
        command: Takes a session, and its own options.
        scope: Which queues it uses.
    """

    def run(context: typer.Context, given: SharedOptions, **values: Any) -> None:
        session = Session(given.over(context.obj))
        session.configure_logging()
        try:
            command(session, **values)
        except (MicroqueueError, PyMongoError) as exc:
            session.out.error(exc, debug=session.options.debug)
            raise typer.Exit(1) from None

    return with_shared_options(run, like=command, scope=scope)
