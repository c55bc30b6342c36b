"""The command that shows how a backoff policy behaves."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.text import Text

from microqueue.arguments import check_count
from microqueue.backoff import JITTERS, BackoffPolicy
from microqueue.cli import formats, output
from microqueue.cli.session import Session
from microqueue.settings import QueueSettings

BAR_WIDTH = 40
MOST_ATTEMPTS = 1000


class _Lowest(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return min(a, b)


class _Highest(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return max(a, b)


@dataclass(frozen=True)
class Wait:
    """How long the wait after an attempt can be, alone and with those before it."""

    attempt: int
    shortest_sec: float
    longest_sec: float
    shortest_total_sec: float
    longest_total_sec: float


def waits(policy: BackoffPolicy, attempts: int) -> list[Wait]:
    """Compute the shortest and the longest wait after each attempt."""
    found: list[Wait] = []
    lowest, highest = _Lowest(), _Highest()
    short: float | None = None
    long: float | None = None
    short_total = long_total = 0.0
    for attempt in range(1, attempts + 1):
        short = policy.delay_seconds(attempt, previous=short, rng=lowest)
        long = policy.delay_seconds(attempt, previous=long, rng=highest)
        short_total += short
        long_total += long
        found.append(Wait(attempt, short, long, short_total, long_total))
    return found


def backoff(
    session: Session,
    *,
    base_sec: Annotated[
        float | None, typer.Option(help="The wait after the first attempt, in seconds.")
    ] = None,
    factor: Annotated[float | None, typer.Option(help="What each further wait grows by.")] = None,
    max_sec: Annotated[float | None, typer.Option(help="The longest wait, in seconds.")] = None,
    jitter: Annotated[
        str | None, typer.Option(help=f"How waits are spread: {', '.join(JITTERS)}.")
    ] = None,
    attempts: Annotated[int, typer.Option(help="How many to show.")] = 10,
) -> None:
    """Show how long a failing task waits between its attempts; needs no server.

    What is not given is as in the settings: $MICROQUEUE_BACKOFF, or the defaults.
    """
    session.refuse_queue("it shows what the settings say")
    check_count("attempts", attempts)
    policy = QueueSettings.from_environment().backoff
    given = {"base_sec": base_sec, "factor": factor, "max_sec": max_sec, "jitter": jitter}
    policy = BackoffPolicy(
        **{**policy.model_dump(), **{k: v for k, v in given.items() if v is not None}}
    )
    found = waits(policy, min(attempts, MOST_ATTEMPTS))
    if session.out.as_json:
        session.out.json({"policy": policy, "waits": [asdict(wait) for wait in found]})
        return
    session.out.say(
        f"base {formats.seconds(policy.base_sec)}, factor {policy.factor:g}, "
        f"at most {formats.seconds(policy.max_sec)}, jitter {policy.jitter}\n"
    )
    longest = max(wait.longest_sec for wait in found)
    session.out.table(
        ["after attempt", "waits", "", "at most in all"],
        [
            [
                wait.attempt,
                _span(wait.shortest_sec, wait.longest_sec),
                bar(wait, longest),
                formats.seconds(wait.longest_total_sec),
            ]
            for wait in found
        ],
    )


def _span(shortest: float, longest: float) -> str:
    if shortest == longest:
        return formats.seconds(longest)
    return f"{formats.seconds(shortest) if shortest else '0'} to {formats.seconds(longest)}"


def bar(wait: Wait, longest_sec: float) -> output.Cell:
    """Draw the span of a wait: solid up to the shortest, then light up to the longest."""
    if not longest_sec:
        return ""
    solid = round(wait.shortest_sec / longest_sec * BAR_WIDTH)
    whole = max(round(wait.longest_sec / longest_sec * BAR_WIDTH), 1)
    return Text("█" * solid, style="blue").append("░" * (whole - solid), style="cyan")
