"""Migrate a collection to the schema version of this code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from microqueue.arguments import check_callback
from microqueue.core import core_of
from microqueue.errors import MicroqueueError
from microqueue.operations import migration as operations
from microqueue.operations import schema
from microqueue.operations.call import Document
from microqueue.operations.migration import Survey
from microqueue.operations.server_clock import read_clock
from microqueue.queue import Queue

MOST_PASSES = 5
"""How often tasks are read again that a process of the old version added in between."""


class Migration:
    """Brings the collection of a queue to the current schema version.

    Args:
        queue: A queue of the collection. All queues of the collection are migrated.

    Raises:
        InvalidArgument: It is not a queue.
    """

    def __init__(self, queue: Queue[Any]) -> None:
        self._core = core_of(queue)
        self._collection = self._core.collections.name

    def survey(self) -> Survey:
        """Return what :meth:`run` would do. Read-only.

        Returns:
            The versions, the tasks to change, the indexes, and the workers that run.

        Raises:
            SchemaTooNew: A newer version of microqueue wrote the collection.
        """
        core = self._core
        now = core.run_on_any_version(read_clock(core.clock))
        return core.run_on_any_version(
            operations.survey(self._collection, now, core.settings.retention)
        )

    def run(
        self, *, force: bool = False, on_batch: Callable[[int, int], None] | None = None
    ) -> int:
        """Migrate. A migration that was interrupted resumes where it was.

        Two migrations at the same time share the work: the second ends when the first does.

        Args:
            force: Migrate although workers run.
            on_batch: A function that is called after each batch with the number of tasks read
                and changed so far.

        Returns:
            How many tasks were changed.

        Raises:
            InvalidArgument: ``on_batch`` is no function.
            MicroqueueError: Workers run, or add tasks of the old version again and again.
            SchemaMismatch: A newer version of microqueue wrote the collection, or its schema
                was deleted in between.
        """
        check_callback("on_batch", on_batch)
        core, name = self._core, self._collection
        run = core.run_on_any_version
        survey = self.survey()
        if survey.found == schema.VERSION:
            run(operations.drop_old_indexes())
            return self._change_stranded(on_batch) if survey.to_change else 0
        if survey.workers and not force:
            raise MicroqueueError(
                f"workers of collection {name!r} run: {', '.join(survey.workers)}; stop them, "
                "and all sweepers and producers of the old version"
            )
        run(operations.begin(name, survey.retention))
        read = changed = 0
        for _ in range(MOST_PASSES):
            last = False
            while not last:
                batch = run(operations.change_batch(name, core.settings.batch_size))
                read, changed, last = read + batch.read, changed + batch.changed, batch.last
                if batch.ended:
                    run(schema.check(name, core.settings.retention))
                    return changed
                if on_batch is not None:
                    on_batch(read, changed)
            if not run(operations.has_unchanged()):
                run(operations.finish(name))
                return changed
        raise MicroqueueError(
            f"processes of the old version add tasks to collection {name!r} while it is migrated; "
            "stop them, and migrate again"
        )

    def _change_stranded(self, on_batch: Callable[[int, int], None] | None) -> int:
        """Change what a process of version 1 has left in a collection of version 2."""
        core = self._core
        place: Document = {}
        read = changed = 0
        while True:
            step = operations.change_from(place, core.settings.batch_size)
            batch, place = core.run_on_any_version(step)
            read, changed = read + batch.read, changed + batch.changed
            if on_batch is not None:
                on_batch(read, changed)
            if batch.last:
                return changed
