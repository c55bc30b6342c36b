"""Registers the format ``microqueue`` with Spark, which looks for packages of such a name."""

from __future__ import annotations

from microqueue.spark.source import MicroqueueSource as DefaultSource

__all__ = ["DefaultSource"]
