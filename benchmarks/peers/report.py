"""The figures of the peers, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from benchmarks.peers import roster
from benchmarks.peers.measure import Rates, measure_pick_up, measure_rates, tasks_of
from benchmarks.peers.mongodb_peers import AsyncMicroqueue, BareCeiling, Microqueue
from benchmarks.peers.peer import Peer

SYNC, ASYNC = Microqueue.name, AsyncMicroqueue.name
MIN_TO_PGQUEUER = 1.15
MIN_TO_CEILING = 0.75
MIN_ASYNC_TO_SYNC = 0.8
DECIMALS_BELOW = 100


@dataclass(frozen=True)
class PeerFigure:
    """What one peer reached, and what microqueue reached, divided by that.

    Attributes:
        figure: What was measured.
        peer: Whose value it is.
        value: The median of the rounds, or a percentile of all samples.
        unit: The unit of the value.
        tasks: How many tasks the peer had.
        low: The lowest of the rounds.
        high: The highest of the rounds.
        sync_ratio: The value of microqueue, divided by this one.
        async_ratio: The value of microqueue async, divided by this one.
        target: The least ratio to reach.
        met: Whether it is reached.
    """

    figure: str
    peer: str
    value: float
    unit: str
    tasks: int
    low: float
    high: float
    sync_ratio: float | None = None
    async_ratio: float | None = None
    target: str = ""
    met: bool | None = None


def measure(uri: str, sizes: Sequence[int], rounds: int, samples: int) -> list[PeerFigure]:
    """Measure every peer that is installed: drain, pick-up and enqueue."""
    with roster.peers(uri) as peers:
        rates = {size: measure_rates(peers, size, rounds) for size in sizes}
        waits = measure_pick_up(peers, samples, rounds)
    return figures(peers, rates, waits)


def figures(
    peers: Sequence[Peer], rates: dict[int, dict[str, Rates]], waits: dict[str, list[float]]
) -> list[PeerFigure]:
    """Return the figures of what was measured.

    Args:
        peers: The peers.
        rates: The rates by the number of tasks, then by the name of the peer.
        waits: The milliseconds of pick-ups, sorted, by the name of the peer.
    """
    found: list[PeerFigure] = []
    for size, by_name in rates.items():
        drain = {name: one.drain for name, one in by_name.items()}
        found += map(_with_target, _medians(f"drain of {size:,}", peers, size, drain))
    for percent in (50, 99):
        found += _compared(
            [
                _percentile(f"pick-up, p{percent}", name, values, percent)
                for name, values in waits.items()
            ]
        )
    for size, by_name in rates.items():
        enqueue = {name: one.enqueue for name, one in by_name.items()}
        found += _medians(f"enqueue of {size:,}", peers, size, enqueue)
    return found


def _medians(
    what: str, peers: Sequence[Peer], size: int, rates: dict[str, list[float]]
) -> list[PeerFigure]:
    found = []
    for peer in peers:
        values, tasks = rates[peer.name], tasks_of(peer, size)
        median, low, high = statistics.median(values), min(values), max(values)
        found.append(PeerFigure(what, peer.name, median, "/s", tasks, low, high))
    return _compared(found)


def _percentile(what: str, peer: str, values: list[float], percent: int) -> PeerFigure:
    value = statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
    return PeerFigure(what, peer, value, "ms", len(values), values[0], values[-1])


def _compared(found: list[PeerFigure]) -> list[PeerFigure]:
    """Return the figures with the ratios of microqueue to each of them."""
    values = {one.peer: one.value for one in found}
    return [
        replace(
            one,
            sync_ratio=None if one.peer == SYNC else values[SYNC] / one.value,
            async_ratio=None if one.peer == ASYNC else values[ASYNC] / one.value,
        )
        for one in found
    ]


def _with_target(drain: PeerFigure) -> PeerFigure:
    if drain.peer == roster.PGQUEUER:
        ratio, least, who = drain.sync_ratio, MIN_TO_PGQUEUER, "sync"
    elif drain.peer == BareCeiling.name:
        ratio, least, who = drain.sync_ratio, MIN_TO_CEILING, "sync"
    elif drain.peer == SYNC:
        ratio, least, who = drain.async_ratio, MIN_ASYNC_TO_SYNC, "async"
    else:
        return drain
    return replace(drain, target=f"{who} {least:g}", met=ratio is not None and ratio >= least)


def show(console: Console, title: str, found: Sequence[PeerFigure]) -> None:
    """Print a table for each figure."""
    console.print(title)
    console.print("The ratios are those of microqueue (sync) and microqueue async to each peer.")
    for what in dict.fromkeys(one.figure for one in found):
        table = Table(title=what, title_justify="left")
        table.add_column("peer", no_wrap=True)
        for name in ("tasks", "value", "range", "sync", "async"):
            table.add_column(name, justify="right")
        table.add_column("target")
        table.add_column("")
        for one in found:
            if one.figure == what:
                table.add_row(*_cells(one))
        console.print(table)


def _cells(one: PeerFigure) -> list[str]:
    return [
        one.peer,
        f"{one.tasks:,}",
        f"{_number(one.value)} {one.unit}",
        f"{_number(one.low)} to {_number(one.high)}",
        "" if one.sync_ratio is None else f"{one.sync_ratio:.2f}",
        "" if one.async_ratio is None else f"{one.async_ratio:.2f}",
        one.target,
        "" if one.met is None else ("met" if one.met else "MISSED"),
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= DECIMALS_BELOW else f"{value:.1f}"
