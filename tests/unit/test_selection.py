"""How much is claimed from which queue: shares are right over many rounds, and none starves."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from microqueue.worker import fetcher
from microqueue.worker.fetcher import QueueSelection, make_selection

ROUNDS = 4000


@pytest.fixture(autouse=True)
def _same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "_random", random.Random(7))


def queues(names: str) -> list[Any]:
    return [SimpleNamespace(name=name) for name in names]


def claim(one: QueueSelection, room: int, stock: Counter[str]) -> Counter[str]:
    """Claim one round, as a worker does, from queues that hold so much."""
    taken: Counter[str] = Counter()
    for queue, share in one.offers(queues("".join(stock)), room):
        limit = min(share, room) - taken.total()
        taken[queue.name] += min(max(limit, 0), stock[queue.name])
        if taken.total() >= room or (taken.total() and share >= room):
            break
    return taken


@pytest.mark.parametrize("weights", [{"a": 3, "b": 1}, {"a": 5, "b": 3, "c": 0.5}], ids=repr)
@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 8, 100])
def test_full_queues_share_any_room_by_weight(weights: dict[str, float], room: int) -> None:
    one = make_selection(queues("".join(weights)), weights)
    taken: Counter[str] = Counter()
    for _ in range(ROUNDS):
        claimed = claim(one, room, Counter(dict.fromkeys(weights, 1000)))
        assert claimed.total() == room
        taken += claimed
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        assert taken[name] / taken.total() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("room", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_round_finds_the_only_task_whatever_the_weights(room: int, name: str) -> None:
    one = make_selection(queues("abc"), {"a": 1000, "b": 1, "c": 0.01})
    stock = Counter({"a": 0, "b": 0, "c": 0, name: 1})
    for _ in range(100):
        assert claim(one, room, stock) == Counter({name: 1})


def test_without_weights_the_first_queue_that_has_a_task_gives_all() -> None:
    one = make_selection(queues("abc"), None)
    assert claim(one, 4, Counter({"a": 0, "b": 9, "c": 9})) == Counter({"b": 4})
