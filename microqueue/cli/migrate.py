"""The ``migrate`` command: bring a collection to the schema version of this microqueue."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from microqueue.cli.session import Session
from microqueue.doctor import describe_retention
from microqueue.migration import Migration
from microqueue.operations.migration import Survey
from microqueue.operations.schema import VERSION, seconds_of

EVERY = 20
"""After how many batches the progress is printed."""


def migrate(
    session: Session,
    *,
    apply: Annotated[
        bool, typer.Option("--apply", help="Migrate. Without it, only show what would be done.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Migrate although workers are registered as running.")
    ] = False,
) -> None:
    """Migrate tasks and indexes of an earlier version of microqueue.

    Stop the workers, sweepers, dashboards and producers of the earlier version first. A migration
    that was interrupted resumes where it was.
    """
    session.reject_queue("a migration is for all queues of the collection")
    with session.open() as queue:
        migration = Migration(queue)
        survey = migration.survey()
        if not apply or not survey.needed:
            changed = migration.run() if apply else 0
            _print_survey(session, survey, applied=apply, changed=changed)
            return
        batches = 0

        def report(read: int, changed: int) -> None:
            nonlocal batches
            batches += 1
            if batches % EVERY == 0:
                session.out.note(f"{read:,} of about {survey.tasks:,} tasks; {changed:,} changed")

        changed = migration.run(force=force, on_batch=report)
        _print_survey(session, survey, applied=True, changed=changed)


def _print_survey(session: Session, survey: Survey, *, applied: bool, changed: int) -> None:
    if session.out.as_json:
        session.out.json(_document(survey, applied=applied, changed=changed))
        return
    out, collection = session.out, session.collection
    if not survey.needed:
        out.print(f"Collection {collection!r} has schema version {survey.found}: nothing to do.")
        return
    if applied:
        out.print(
            f"Collection {collection!r} now has schema version {VERSION}; "
            f"{changed:,} tasks changed."
        )
        return
    total = sum(survey.to_change.values())
    by_status = ", ".join(f"{n:,} {name}" for name, n in sorted(survey.to_change.items()))
    to_change = f"To change: {total:,} tasks{f' ({by_status})' if by_status else ''}."
    if survey.found == VERSION:
        kinds = [("indexes", survey.drop), ("tasks", survey.to_change)]
        older = " and ".join(f"older {kind}" for kind, found in kinds if found)
        out.print(f"Collection {collection!r} has schema version {VERSION} and {older}.")
        if survey.to_change:
            out.print(to_change)
        if survey.drop:
            out.print(f"To drop: {', '.join(survey.drop)}.")
        out.print(
            "Nothing was changed. Stop the processes of the earlier version, which created them, "
            f"then run: {session.with_collection('microqueue migrate')} --apply"
        )
        return
    begun = ", and a migration has begun" if survey.resumed else ""
    out.print(f"Collection {collection!r} has schema version {survey.found}{begun}.")
    out.print(to_change)
    out.print(f"To create: {', '.join(survey.create) or 'no index'}.")
    out.print(f"To drop: {', '.join(survey.drop) or 'no index'}.")
    out.print(f"Done tasks are {describe_retention(seconds_of(survey.retention))}, as before.")
    if survey.workers:
        out.print(f"Stop these workers first: {', '.join(survey.workers)}.")
    out.print(
        "Nothing was changed. Stop the workers, sweepers, dashboards and producers of the earlier "
        f"version, then run: {session.with_collection('microqueue migrate')} --apply"
    )


def _document(survey: Survey, *, applied: bool, changed: int) -> dict[str, Any]:
    return {
        "found": survey.found,
        "supported": VERSION,
        "needed": survey.needed,
        "applied": applied,
        "changed": changed,
        "tasks": survey.tasks,
        "to_change": dict(survey.to_change),
        "create": list(survey.create),
        "drop": list(survey.drop),
        "retention_sec": seconds_of(survey.retention),
        "workers": list(survey.workers),
    }
