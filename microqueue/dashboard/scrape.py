"""What Prometheus gets from a dashboard: how each queue stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from microqueue.dashboard.context import Context
from microqueue.metrics import queue_families
from microqueue.reports import QueueStats


class _Read(Collector):
    """Gives what was read before: the registry cannot wait for a database."""

    def __init__(self, stats: Sequence[QueueStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return queue_families(self._stats)


async def registry_of(context: Context) -> CollectorRegistry:
    """Read how all queues stand, and give it as a registry."""
    registry = CollectorRegistry()
    registry.register(_Read(await context.access.call(context.access.insights.stats)))
    return registry
