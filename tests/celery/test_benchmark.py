"""The benchmark of Celery counts every task, and leaves no process behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks import brokers, celery_bench, upstream_suites
from benchmarks.brokers import Broker
from tests.waiting import wait_for


@pytest.fixture
def broker(database_uri: str) -> Broker:
    @contextmanager
    def fresh() -> Iterator[str]:
        yield f"microqueue+{database_uri}"

    return Broker(brokers.MICROQUEUE, fresh)


def test_every_task_is_drained(broker: Broker) -> None:
    rates = celery_bench.measure_rates([broker], tasks=20, rounds=1)[broker.name]
    assert len(rates.publish) == len(rates.drain) == 1
    assert min(*rates.publish, *rates.drain) > 0


def test_a_worker_that_is_too_slow_is_reported_and_ended(broker: Broker) -> None:
    with (
        pytest.raises(RuntimeError, match="0 of 1"),
        broker.fresh() as url,
        celery_bench.running_worker(url) as worker,
    ):
        worker.wait(1, limit_sec=0.5)

    def ended() -> bool:
        try:
            os.killpg(worker.pid, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(ended)


def test_a_missing_peer_is_named_with_the_way_to_install_it(
    database_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(brokers, "installed_version", lambda _: "1.0")
    with brokers.brokers(database_uri) as found:
        assert [one.name for one in found] == [brokers.MICROQUEUE, brokers.KOMBU_MONGODB]
    assert any(
        "redis-server" in line and brokers.INSTALL in line
        for line in brokers.describe(database_uri)
    )


def test_only_suites_that_exist_are_downloaded() -> None:
    with pytest.raises(SystemExit, match="upstream_suites kombu"):
        upstream_suites.main(["amqp"])
