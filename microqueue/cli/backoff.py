"""The ``backoff`` command: show the delays of a backoff policy."""

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
MAX_ATTEMPTS = 1000


class _Lowest(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return min(a, b)


class _Highest(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return max(a, b)


@dataclass(frozen=True)
class Wait:
    """The shortest and longest delay after an attempt, alone and summed up so far."""

    attempt: int
    shortest_sec: float
    longest_sec: float
    shortest_total_sec: float
    longest_total_sec: float


def waits(policy: BackoffPolicy, attempts: int) -> list[Wait]:
    """Return the shortest and longest delay after each attempt."""
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
        float | None, typer.Option(metavar="SECONDS", help="Delay after the first attempt.")
    ] = None,
    factor: Annotated[
        float | None, typer.Option(help="Growth of the delay with each further attempt.")
    ] = None,
    max_sec: Annotated[float | None, typer.Option(metavar="SECONDS", help="Maximum delay.")] = None,
    jitter: Annotated[
        str | None, typer.Option(help=f"Randomisation of the delay: {', '.join(JITTERS)}.")
    ] = None,
    attempts: Annotated[int, typer.Option(help="Number of attempts to show.")] = 10,
) -> None:
    """Show the delays between the attempts of a failing task. Needs no server.

    Options that are left out come from $MICROQUEUE_BACKOFF, or from the default policy.
    """
    session.reject_queue("the backoff policy is the same for all queues")
    check_count("attempts", attempts)
    policy = QueueSettings.from_environment().backoff
    given = {"base_sec": base_sec, "factor": factor, "max_sec": max_sec, "jitter": jitter}
    policy = BackoffPolicy(
        **{**policy.model_dump(), **{k: v for k, v in given.items() if v is not None}}
    )
    found = waits(policy, min(attempts, MAX_ATTEMPTS))
    if session.out.as_json:
        session.out.json({"policy": policy, "waits": [asdict(wait) for wait in found]})
        return
    session.out.print(
        f"base {formats.seconds(policy.base_sec)}, factor {policy.factor:g}, "
        f"at most {formats.seconds(policy.max_sec)}, jitter {policy.jitter}\n"
    )
    longest = max(wait.longest_sec for wait in found)
    session.out.table(
        ["after attempt", "delay", "", "total at most"],
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
    """Return a bar: solid up to the shortest delay, light up to the longest."""
    if not longest_sec:
        return ""
    solid = round(wait.shortest_sec / longest_sec * BAR_WIDTH)
    whole = max(round(wait.longest_sec / longest_sec * BAR_WIDTH), 1)
    return Text("█" * solid, style="blue").append("░" * (whole - solid), style="cyan")
