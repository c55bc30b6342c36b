"""Commands that run the Spark pipelines."""

from __future__ import annotations

from microqueue.cli.pipeline_moves import archive, ingest, replay
from microqueue.cli.pipeline_questions import report, simulate, storms, triage

__all__ = ["archive", "ingest", "replay", "report", "simulate", "storms", "triage"]
