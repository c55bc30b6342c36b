"""The command that replays one kind of dead letter, and nothing else."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from microqueue.dlq import DeadLetterFilter
from microqueue.drivers.collections import DEFAULT_COLLECTION
from microqueue.drivers.connection import option_names
from microqueue.masking import without_password
from microqueue.model import Model
from microqueue.operations.dead_letters import read_errors
from microqueue.settings import QueueSettings
from microqueue.spark.location import location_of
from microqueue.spark.options import LocationOptions, resolve_uri
from microqueue.spark.pipelines.fingerprint import fingerprint, literals

MOST_COMPARED = 20_000
MOST_TEXTS = 3
ONE_MILLISECOND = timedelta(milliseconds=1)

NO_PASSWORD = "put the user and the password back into --uri"  # noqa: S105 (that there is none)


class Command(Model):
    """A command as a person pastes it, and what to do before that."""

    line: str
    note: str | None = None

    @property
    def text(self) -> str:
        """The line, with the note as a comment of the shell."""
        return self.line if self.note is None else f"{self.line}   # {self.note}"


@dataclass(frozen=True)
class Asked:
    """What a triage was asked about, which its commands have to say again."""

    uri: str | None = None
    database: str | None = None
    collection: str = DEFAULT_COLLECTION
    since: datetime | None = None

    def command(self, *arguments: str) -> Command:
        """Write a command for the same server; what is secret in its address is left out."""
        address = self._address()
        if address is None:
            return Command(line=shlex.join(["microqueue", *arguments]))
        shown = without_password(address)
        line = shlex.join(["microqueue", *arguments, "--uri", shown])
        return Command(line=line, note=None if shown == address else NO_PASSWORD)

    def _address(self) -> str | None:
        """Give the address, if one was given; a database that was given beside it is put in."""
        if self.database is None:
            return self.uri
        parts = urlsplit(resolve_uri(self.uri))
        options = [parts.query] if parts.query else []
        if "@" in parts.netloc and "authsource" not in option_names(parts.geturl()):
            options.append(f"authSource={parts.path.strip('/') or 'admin'}")
        return parts._replace(path=f"/{self.database}", query="&".join(options)).geturl()

    def replay(self, condition: str, time: str, *options: str) -> Command:
        """Write the replay pipeline's command for a condition, and for no older tasks."""
        where = condition
        if self.since is not None:
            where = f"{where} and {time} >= timestamp '{self.since.isoformat()}'"
        # A kind is of one queue: its fingerprint has the queue in it.
        arguments = ["pipeline", "replay", *options, "--all-queues", "--where", where]
        if self.collection != DEFAULT_COLLECTION:
            arguments += ["--collection", self.collection]
        return self.command(*arguments)


def replay_letters(
    place: LocationOptions,
    settings: QueueSettings,
    kind: Any,
    asked: Asked,
    *,
    failed_between: tuple[datetime, datetime],
) -> Command:
    """Find the simplest command that takes all letters of a kind, and no others.

    Each filter of ``dlq replay`` is tried as the replay itself would use it, and what it finds
    is compared. Where none fits, the replay pipeline computes of each letter which kind it is.
    """
    if asked.collection == DEFAULT_COLLECTION:  # The one that ``dlq replay`` works on.
        for which in _filters(kind, asked.since, failed_between):
            arguments = _arguments(kind.queue, which)
            # Of others, a terminal would show something else.
            if "".join(arguments).isprintable() and _is_exact(place, settings, kind, which):
                return asked.command(*arguments)
    return asked.replay(f"fingerprint = '{kind.fingerprint}'", "updated_at")


def _is_exact(
    place: LocationOptions, settings: QueueSettings, kind: Any, which: DeadLetterFilter
) -> bool:
    """Tell whether a filter finds all letters of a kind, and no others; if too many, it does not.

    It misses some whose messages differ from the pattern in white space.
    """
    reading = read_errors(kind.queue, which, limit=MOST_COMPARED + 1, settings=settings)
    letters = location_of(place).run(reading)
    if not kind.live <= len(letters) <= MOST_COMPARED:
        return False
    return all(_fingerprint(letter) == kind.fingerprint for letter in letters)


def _fingerprint(letter: dict[str, Any]) -> str:
    error = letter.get("error") or {}
    return fingerprint(letter.get("queue"), error.get("code"), error.get("message"))


def _filters(
    kind: Any, since: datetime | None, between: tuple[datetime, datetime]
) -> Iterator[DeadLetterFilter]:
    """Give filters from the simplest to the narrowest."""
    first, last = between
    texts = literals(kind.pattern)[:MOST_TEXTS]
    if kind.code is not None:
        yield DeadLetterFilter(code=kind.code, since=since)
    for text in texts:
        yield DeadLetterFilter(code=kind.code, text=text, since=since)
    for narrow in (*texts, None):
        yield DeadLetterFilter(
            code=kind.code, text=narrow, since=first, until=last + ONE_MILLISECOND
        )


def _arguments(queue: str, which: DeadLetterFilter) -> Sequence[str]:
    arguments = ["dlq", "replay", "--queue", queue]
    for name in ("code", "text"):
        value = getattr(which, name)
        # One word, so that a text which begins with a dash is not taken for an option.
        arguments += [f"--{name}={value}"] if value is not None else []
    for name in ("since", "until"):
        instant = getattr(which, name)
        arguments += [f"--{name}={instant.isoformat()}"] if instant is not None else []
    return arguments


def replay_archived(archive: str | Path, kind: Any, asked: Asked) -> Command:
    """Write the command that adds the archived letters of a kind anew."""
    condition = f"fingerprint = '{kind.fingerprint}' and archived"
    return asked.replay(condition, "finished_at", "--archive", str(archive), "--no-letters")
