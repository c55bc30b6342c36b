"""The outbox gives every settlement to its writer, soon, and in batches."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from microqueue.worker.completer import Outbox

LONG_SEC = 600.0


def finished(number: int) -> Any:
    """Stand for a settlement; the outbox does not look into it."""
    return number


def take(outbox: Outbox) -> list[Any]:
    """Take a batch, as the numbers that it is."""
    return list(outbox.take())


@pytest.mark.parametrize("wait_sec", [1e-9, 1e-7, 1e-6, 1e-5])
def test_last_settlement_never_waits_for_another_however_short_the_wait(wait_sec: float) -> None:
    # A queue whose timeout runs out before it begins to wait hangs here.
    outbox = Outbox(wait_sec=wait_sec, limit=500)
    taken: list[Any] = []

    def one_by_one() -> None:
        for number in range(20_000):
            outbox.put(finished(number))
            taken.extend(outbox.take())

    thread = threading.Thread(target=one_by_one, daemon=True)
    thread.start()
    thread.join(60)
    assert taken == list(range(20_000))


def test_full_batch_does_not_wait() -> None:
    outbox = Outbox(wait_sec=LONG_SEC, limit=3)
    batches: list[Any] = []
    thread = threading.Thread(target=lambda: batches.append(outbox.take()), daemon=True)
    thread.start()
    for number in range(4):
        outbox.put(finished(number))
    thread.join(20)
    assert batches == [[0, 1, 2]]


def test_closed_outbox_gives_what_is_left_and_then_nothing() -> None:
    outbox = Outbox(wait_sec=LONG_SEC, limit=2)
    for number in range(3):
        outbox.put(finished(number))
    outbox.close()
    assert [take(outbox), take(outbox), take(outbox)] == [[0, 1], [2], []]


def test_without_a_wait_each_settlement_is_written_alone() -> None:
    outbox = Outbox(wait_sec=0, limit=500)
    outbox.put(finished(1))
    outbox.put(finished(2))
    assert [take(outbox), take(outbox)] == [[1], [2]]
