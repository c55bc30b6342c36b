"""The settlement buffer returns every settlement to its writer, soon, and in batches."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from microqueue.worker.completer import SettlementBuffer

LONG_SEC = 600.0


def finished(number: int) -> Any:
    """Return a stand-in for a settlement; the buffer does not read it."""
    return number


def take(settlements: SettlementBuffer) -> list[Any]:
    """Take a batch, as the numbers that it is."""
    return list(settlements.take())


@pytest.mark.parametrize("wait_sec", [1e-9, 1e-7, 1e-6, 1e-5])
def test_last_settlement_never_waits_for_another_however_short_the_wait(wait_sec: float) -> None:
    # A queue whose timeout runs out before it begins to wait hangs here.
    settlements = SettlementBuffer(wait_sec=wait_sec, limit=500)
    taken: list[Any] = []

    def one_by_one() -> None:
        for number in range(20_000):
            settlements.put(finished(number))
            taken.extend(settlements.take())

    thread = threading.Thread(target=one_by_one, daemon=True)
    thread.start()
    thread.join(60)
    assert taken == list(range(20_000))


def test_full_batch_does_not_wait() -> None:
    settlements = SettlementBuffer(wait_sec=LONG_SEC, limit=3)
    batches: list[Any] = []
    thread = threading.Thread(target=lambda: batches.append(settlements.take()), daemon=True)
    thread.start()
    for number in range(4):
        settlements.put(finished(number))
    thread.join(20)
    assert batches == [[0, 1, 2]]


def test_closed_outbox_gives_what_is_left_and_then_nothing() -> None:
    settlements = SettlementBuffer(wait_sec=LONG_SEC, limit=2)
    for number in range(3):
        settlements.put(finished(number))
    settlements.close()
    assert [take(settlements), take(settlements), take(settlements)] == [[0, 1], [2], []]


def test_without_a_wait_each_settlement_is_written_alone() -> None:
    settlements = SettlementBuffer(wait_sec=0, limit=500)
    settlements.put(finished(1))
    settlements.put(finished(2))
    assert [take(settlements), take(settlements)] == [[1], [2]]
