"""The command that replays one kind of dead letter, and nothing else if that can be said."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from microqueue.model import Model
from microqueue.operations.dead_letters import DeadLetterFilter
from microqueue.operations.letter_errors import read_errors
from microqueue.settings import QueueSettings
from microqueue.spark.options import PlaceOptions
from microqueue.spark.pipelines.fingerprint import fingerprint, literals
from microqueue.spark.place import place_of

MOST_COMPARED = 20_000
MOST_TEXTS = 3
ONE_MILLISECOND = timedelta(milliseconds=1)


class Command(Model):
    """A command as a person pastes it.

    ``others`` is how many letters of other kinds it would replay, too.
    """

    line: str
    others: int = 0


def replay_letters(
    place: PlaceOptions,
    settings: QueueSettings,
    kind: Any,
    *,
    failed_between: tuple[datetime, datetime],
) -> Command | None:
    """Find the simplest ``dlq replay`` that takes all letters of a kind, and as few others.

    Each filter is tried as the replay itself would use it, and what it finds is compared.
    """
    best: tuple[int, DeadLetterFilter] | None = None
    for which in _filters(kind, failed_between):
        reading = read_errors(kind.queue, which, limit=MOST_COMPARED, settings=settings)
        letters = place_of(place).run(reading)
        own = sum(_fingerprint(letter) == kind.fingerprint for letter in letters)
        others = len(letters) - own
        if own < min(kind.live, MOST_COMPARED):
            continue  # It misses some: their messages differ from the pattern in white space.
        if best is None or others < best[0]:
            best = others, which
        if not others:
            break
    if best is None:
        return None
    others, which = best
    return Command(line=shlex.join(_arguments(kind.queue, which)), others=others)


def _fingerprint(letter: dict[str, Any]) -> str:
    error = letter.get("error") or {}
    return fingerprint(letter.get("queue"), error.get("code"), error.get("message"))


def _filters(kind: Any, between: tuple[datetime, datetime]) -> Iterator[DeadLetterFilter]:
    """Give filters from the simplest to the narrowest."""
    first, last = between
    texts = literals(kind.pattern)[:MOST_TEXTS]
    if kind.code is not None:
        yield DeadLetterFilter(code=kind.code)
    for text in texts:
        yield DeadLetterFilter(code=kind.code, text=text)
    for narrow in (*texts, None):
        yield DeadLetterFilter(
            code=kind.code, text=narrow, since=first, until=last + ONE_MILLISECOND
        )


def _arguments(queue: str, which: DeadLetterFilter) -> list[str]:
    arguments = ["microqueue", "dlq", "replay", "--queue", queue]
    for name in ("code", "text"):
        value = getattr(which, name)
        # One word, so that a text which begins with a dash is not taken for an option.
        arguments += [f"--{name}={value}"] if value is not None else []
    for name in ("since", "until"):
        instant = getattr(which, name)
        arguments += [f"--{name}={instant.isoformat()}"] if instant is not None else []
    return arguments


def replay_archived(archive: str | Path, kind: Any) -> Command:
    """Write the command that adds the archived letters of a kind anew."""
    where = f"fingerprint = '{kind.fingerprint}' and archived"
    arguments = ["microqueue", "pipeline", "replay", "--archive", str(archive)]
    return Command(line=shlex.join([*arguments, "--where", where, "--no-letters"]))
