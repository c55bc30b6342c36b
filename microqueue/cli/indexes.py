"""The ``indexes`` command: create and list the indexes, and change the retention."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer
from rich.text import Text

from microqueue.cli import formats, values
from microqueue.cli.session import Session
from microqueue.core import core_of
from microqueue.doctor import describe_retention
from microqueue.operations import schema
from microqueue.operations.diagnostics import explain_pop, list_indexes
from microqueue.operations.schema import Schema, seconds_of


def indexes(
    session: Session,
    *,
    retention: Annotated[
        timedelta | None,
        typer.Option(
            help="Change how long done tasks are kept: 30d, 0, or forever. \\[default: unchanged]",
            parser=values.read_retention,
            metavar="DURATION",
        ),
    ] = None,
) -> None:
    """Create missing indexes, list all, and show which one a claim uses."""
    changed: dict[str, Any] = {} if retention is None else {"retention": retention}
    if retention == values.FOREVER:
        changed["retention"] = None
    with session.connect(**changed) as queue:
        name, kept_here = core_of(queue).collections.name, queue.settings.retention
        former = core_of(queue).run(schema.check(name, kept_here))
        created = queue.ensure_indexes(adjust=bool(changed))
        kept = core_of(queue).run(schema.check(name, kept_here))
        found = core_of(queue).run(list_indexes())
        used = core_of(queue).run(explain_pop(queue.name, name))
    listed: list[dict[str, Any]] = [
        {
            "name": name,
            "keys": dict(index["key"]),
            "unique": bool(index.get("unique")),
            "only": index.get("partialFilterExpression"),
            "expire_after_sec": index.get("expireAfterSeconds"),
            "created": name in created,
        }
        for name, index in found.items()
    ]
    if session.out.as_json:
        document = {"created": created, "indexes": listed, "pop_uses": used}
        session.out.json({**document, **_retention(former, kept)})
        return
    session.out.table(
        ["index", "keys", "filter"],
        [
            [
                Text(one["name"], style="green" if one["created"] else ""),
                ", ".join(f"{'-' if order < 0 else ''}{key}" for key, order in one["keys"].items()),
                formats.json_text(one["only"]) if one["only"] else "-",
            ]
            for one in listed
        ],
        keys="fold",
        filter="fold",
    )
    session.out.print(f"\nCreated: {', '.join(created)}." if created else "\nAll indexes exist.")
    session.out.print(f"A claim uses: {', '.join(used)}.")
    was = describe_retention(seconds_of(former.retention))
    before = f" (before: {was.removeprefix('kept ')})" if _changed(former, kept) else ""
    session.out.print(f"Done tasks are {describe_retention(seconds_of(kept.retention))}{before}.")


def _retention(former: Schema, kept: Schema) -> dict[str, float | None]:
    """Return the JSON fields of the retention, and the former one if it changed; null: forever."""
    fields = {"retention_sec": seconds_of(kept.retention)}
    if _changed(former, kept):
        fields["former_retention_sec"] = seconds_of(former.retention)
    return fields


def _changed(former: Schema, kept: Schema) -> bool:
    return former.recorded and former.retention != kept.retention
