"""Make everything random that the queue uses follow a seed: ids, tokens, windows, jitter and time.

Two periods are shortened, so that what happens after them happens in a run of some seconds.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from bson import ObjectId, objectid

from microqueue import backoff, clock
from microqueue.operations import claim, dedupe_keys, dlq_collection

ID_SEC = 1_900_000_000
ABANDONED_AFTER = timedelta(seconds=3)
RESERVED = timedelta(seconds=6)


@contextmanager
def seeded(seed: int, time: Any) -> Iterator[None]:
    """Replace what is random by what a seed decides, and the clocks of processes by ``time``."""
    tokens = random.Random(f"tokens {seed}")
    state = random.getstate()
    random.seed(seed)
    claim._random.seed(seed)  # noqa: SLF001
    backoff._SHARED_RANDOM.seed(seed)  # noqa: SLF001
    with (
        patch.object(secrets, "token_hex", lambda size=8: tokens.randbytes(size).hex()),
        patch.object(objectid, "time", SimpleNamespace(time=lambda: ID_SEC)),
        patch.object(ObjectId, "_inc", 0),
        patch.object(ObjectId, "_random", lambda: (seed % 2**40).to_bytes(5, "big")),
        patch.object(clock, "time", time),
        patch.object(dlq_collection, "ABANDONED_AFTER", ABANDONED_AFTER),
        patch.object(dedupe_keys, "RESERVED", RESERVED),
    ):
        try:
            yield
        finally:
            random.setstate(state)
