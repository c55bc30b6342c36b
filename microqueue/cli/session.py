"""The options that every command understands, and what a command gets made of them."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import typer
from pymongo.errors import PyMongoError

from microqueue.arguments import check_uri, refused
from microqueue.cli import formats
from microqueue.cli.dlq_detection import adopt
from microqueue.cli.logs import LogFormat, LogLevel, configure_logging
from microqueue.cli.options import SharedOptions, with_shared_options
from microqueue.cli.output import Output
from microqueue.core import core_of
from microqueue.dead_letters import DeadLetters
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.drivers.connection import URI_VARIABLE
from microqueue.embedded import default_directory, running
from microqueue.errors import MicroqueueError
from microqueue.operations.diagnostics import every_queue
from microqueue.queue import Queue
from microqueue.settings import QueueSettings
from microqueue.task import DEFAULT_QUEUE
from microqueue.worker.supervisor import own_name

logger = logging.getLogger("microqueue.cli")


class Session:
    """What a command works with: where to print, and the queue that was asked for."""

    def __init__(self, options: SharedOptions) -> None:
        self.options = options
        self.out = Output(as_json=options.as_json)

    @property
    def queue_name(self) -> str:
        """The queue's name, or the default one."""
        return DEFAULT_QUEUE if self.options.queue is None else self.options.queue

    @property
    def all_queues(self) -> bool:
        """Whether a command that reads uses all queues: none was given."""
        return self.options.queue is None

    def check_scope(self, *, all_queues: bool) -> None:
        """Reject a command that deletes or replays without a word on which queues."""
        if self.options.queue is not None and all_queues:
            raise typer.BadParameter("give --queue or --all-queues, not both.")
        if self.options.queue is None and not all_queues:
            raise typer.BadParameter("say which queues: give --queue NAME, or --all-queues.")

    def queues(self, queue: Queue[Any]) -> list[str]:
        """Return the names of the queues that are used: the given one, or all that exist."""
        return core_of(queue).run(every_queue(queue.settings)) if self.all_queues else [queue.name]

    def letters(self, queue: Queue[Any]) -> DeadLetters[Any]:
        """Return the dead letters of the given queue, or of all queues."""
        return queue.dead_letters.all_queues if self.all_queues else queue.dead_letters

    @property
    def scope(self) -> str:
        """The queues that are used, for a sentence."""
        return "all queues" if self.all_queues else f"queue {self.queue_name!r}"

    def note_queues(self, names: Sequence[str] = ()) -> None:
        """Say beside the result which queues it is of, and what they are, if that is known."""
        listed = f": {formats.listed([repr(one) for one in names])}" if names else ""
        scope = f"All queues{listed}" if self.all_queues else f"Queue {self.queue_name!r}"
        self.out.note(f"{scope}.")

    @property
    def collection(self) -> str:
        """The name of the collection, or the default one."""
        return DEFAULT_COLLECTION if self.options.collection is None else self.options.collection

    def with_collection(self, command: str) -> str:
        """Write a command so that it looks where this one does."""
        given = self.options.collection
        return command if given is None else f"{command} --collection {shlex.quote(given)}"

    def refuse_queue(self, reason: str) -> None:
        """Refuse a queue where it would have no effect."""
        if self.options.queue is not None:
            raise refused("queue", self.options.queue, f"{reason}; leave --queue out")

    def connect(self, name: str | None = None, **settings: Any) -> Queue:
        """Open the queue as :meth:`open` does, with its dead letters where they are kept."""
        queue = self.open(name, **settings)
        try:
            adopt(queue)
        except BaseException:
            queue.close()
            raise
        return queue

    def open(self, name: str | None = None, **settings: Any) -> Queue:
        """Open the queue, or another one, without a look at the server; the caller closes it.

        The settings are those of the environment, and those given here.
        """
        check_uri(self.options.uri)
        self.tell_embedded()
        chosen = QueueSettings.from_environment(**settings)
        return Queue.from_uri(
            self.options.uri,
            name or self.queue_name,
            settings=chosen,
            collection=self.collection,
        )

    def tell_embedded(self) -> None:
        """Say that the embedded server is used, where somebody may have meant another one.

        A supervisor says it for its processes.
        """
        if self.options.uri is not None or os.environ.get(URI_VARIABLE) or own_name() is not None:
            return
        directory = default_directory()
        if not self.out.errors.is_terminal:  # From cron, most likely without its variable.
            said = (
                f"Neither --uri nor {URI_VARIABLE} is given: using the embedded MongoDB of "
                f"{directory}."
            )
            if self.options.log_format is LogFormat.JSON:
                logger.warning(said)
            else:
                self.out.note(said)
        elif running(directory) is None:
            self.out.note(
                f"Starting the embedded MongoDB of {directory} for this command alone; "
                "`microqueue up` keeps one running."
            )

    def log(self, default: LogLevel = LogLevel.WARNING, *, of_app: bool = False) -> None:
        """Send the log to stderr, at the level that was asked for; if told so, the app's, too."""
        level = self.options.log_level or default
        form = self.options.log_format or LogFormat.TEXT
        configure_logging(level, form, debug=self.options.debug, of_app=of_app)


def with_session(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function that takes a session: add the shared options, tell errors."""

    def run(context: typer.Context, given: SharedOptions, **values: Any) -> None:
        session = Session(given.over(context.obj))
        session.log()
        try:
            command(session, **values)
        except (MicroqueueError, PyMongoError) as exc:
            session.out.error(exc, debug=session.options.debug)
            raise typer.Exit(1) from None

    return with_shared_options(run, like=command)
