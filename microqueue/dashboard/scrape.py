"""What Prometheus gets from a dashboard: how each queue stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from microqueue.dashboard.context import Context
from microqueue.metrics import queue_families
from microqueue.operations import examine
from microqueue.operations.inspect import QueueStats


class _Read(Collector):
    """Gives what was read before: the registry cannot wait for a database."""

    def __init__(self, stats: Sequence[QueueStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return queue_families(self._stats)


async def registry_of(context: Context) -> CollectorRegistry:
    """Read how all queues stand, and give it as a registry."""
    access = context.access
    names = await access.run(examine.queue_names())
    stats = [await access.call(access.queue(name).stats) for name in sorted({access.name, *names})]
    registry = CollectorRegistry()
    registry.register(_Read(stats))
    return registry
