"""Parse option values: durations, instants, JSON, weights, headers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NoReturn

import typer
from bson.codec_options import DEFAULT_CODEC_OPTIONS

from microqueue import durations
from microqueue.arguments import invalid_argument
from microqueue.backoff import BackoffPolicy
from microqueue.errors import InvalidArgument, InvalidPayload
from microqueue.model import shorten
from microqueue.payload import check_encodable, finite_number


def read_duration(text: str | timedelta) -> timedelta:
    """Parse seconds, or ``30s``, ``5m``, ``2h``, ``1d``, ``1h30m``."""
    if isinstance(text, timedelta):  # A default value.
        return text
    try:
        return durations.read_duration(text)
    except ValueError as exc:
        raise typer.BadParameter(f"{text!r} is not a duration: {exc}.") from exc


FOREVER = timedelta.max
"""Stands for a retention without an end; ``None`` is an option that is not given."""


def read_retention(text: str | timedelta) -> timedelta:
    """Parse a retention: a duration, or ``forever``."""
    if isinstance(text, str) and text.strip().lower() == "forever":
        return FOREVER
    return read_duration(text)


def read_instant(text: str | datetime) -> datetime:
    """Parse an ISO 8601 time; reject one without a timezone."""
    if isinstance(text, datetime):
        return text
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a time: give ISO 8601 with a timezone, as in 2026-05-01T12:00:00Z."
        ) from None
    if instant.utcoffset() is None:
        raise typer.BadParameter(
            f"{text!r} has no timezone: write {text.strip()}Z for UTC, or {text.strip()}+02:00."
            if "T" in text or " " in text.strip()
            else f"{text!r} has no time and timezone: write for example {text.strip()}T00:00:00Z."
        )
    return instant


def read_past(text: str | timedelta | datetime) -> timedelta | datetime:
    """Parse an instant, or how long ago it was: ``2h``, ``2h ago``."""
    if not isinstance(text, str):
        return text
    wanted = text.strip().removesuffix("ago")
    if re.match(r"\d{4}-", wanted):
        return read_instant(text)
    try:
        return read_duration(wanted)
    except typer.BadParameter:
        raise typer.BadParameter(
            f"{text!r} is not a time: give ISO 8601 with a timezone, as in "
            "2026-05-01T12:00:00Z, or how long ago it was, as in 2h."
        ) from None


def before(now: datetime, past: timedelta | datetime | None) -> datetime | None:
    """Return the instant, computed from now if it was given as a duration."""
    return now - past if isinstance(past, timedelta) else past


def read_stdin(argument: str) -> str:
    """Return what is piped to stdin; the error names the argument that may be given instead."""
    if sys.stdin.isatty():
        raise InvalidArgument(f"{argument} is missing: give a JSON object, or pipe it to stdin")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as exc:
        raise InvalidArgument(f"stdin is not UTF-8: {exc}") from exc


def read_payload(text: str, *, where: str = "the payload") -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        text: The JSON.
        where: What the error calls it.

    Raises:
        InvalidPayload: It is not a JSON object.
    """
    try:
        payload = json.loads(text, parse_constant=_reject_constant, parse_float=finite_number)
    except ValueError as exc:
        raise InvalidPayload(
            f"{where} is not JSON: {exc}; found {shorten(text, 60)}", argument="payload", value=text
        ) from exc
    except RecursionError as exc:
        raise InvalidPayload(f"{where} is nested too deeply", argument="payload") from exc
    if not isinstance(payload, dict):
        raise InvalidPayload(
            f"{where} must be a JSON object, as in '{{\"to\": 1}}', not {shorten(text, 60)}",
            argument="payload",
            value=payload,
        )
    return payload


def read_payloads(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Parse one JSON object per line; skip empty lines.

    Values that MongoDB cannot store are rejected here, where the line number is known.
    """
    payloads = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            payload = read_payload(line, where=f"line {number}")
            try:
                check_encodable({"payload": payload}, DEFAULT_CODEC_OPTIONS)
            except InvalidPayload as exc:
                raise InvalidPayload(
                    f"line {number}: {exc}", argument=exc.argument, value=exc.value
                ) from exc
            payloads.append(payload)
    return payloads


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def read_weights(pairs: Sequence[str] | None, names: Sequence[str]) -> dict[str, float] | None:
    """Parse ``NAME=NUMBER`` pairs, whose names must be among the queues."""
    if not pairs:
        return None
    weights = {}
    for pair in pairs:
        name, equals, number = pair.rpartition("=")
        try:
            weights[name] = float(number)
        except ValueError:
            equals = ""
        if not equals or name not in names:
            raise InvalidArgument(
                f"--weight {pair!r} is not valid: give NAME=NUMBER, with the name of a --queue",
                argument="weight",
                value=pair,
            )
    return weights


def read_backoff(text: str, option: str = "backoff") -> BackoffPolicy:
    """Parse ``base=5,jitter=full``; the rest is as in the default policy."""
    names = {"base": "base_sec", "factor": "factor", "max": "max_sec", "jitter": "jitter"}
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in names or not value:
            raise invalid_argument(option, text, "give base=, factor=, max= and jitter=")
        try:
            found[names[name]] = value if name == "jitter" else float(value)
        except ValueError:
            raise invalid_argument(option, text, f"{value!r} is not a number") from None
    return BackoffPolicy(**found)


def read_headers(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse ``key=value`` pairs."""
    headers: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not key or not separator:
            raise InvalidArgument(
                f"header={pair!r} is not valid: give key=value", argument="header", value=pair
            )
        headers[key] = value
    return headers
