"""The order in which a worker gets its messages."""

from __future__ import annotations

from tests.celery.workers import Site


def test_the_highest_priority_is_first_and_equal_ones_are_in_order(site: Site) -> None:
    add = site.task("add")
    sent = [(0, 1), (0, 2), (255, 3), (9, 4), (255, 5), (9, 6), (0, 7)]
    for priority, number in sent:
        last = add.apply_async((number, 0), priority=priority)
    with site.worker(pool="solo", concurrency=1):
        site.wait_for_run(last)
    order = [run["value"][0] for run in site.ledger()]
    assert order == [3, 5, 4, 6, 1, 2, 7]


def test_a_rejected_message_is_requeued_before_later_ones(site: Site) -> None:
    # It is requeued until the gate opens, which may take long.
    options = {"delivery_limit": None}
    site.app.conf.update(broker_transport_options=options)
    gate = site.gate()
    first = site.task("refuse").delay(str(gate), requeue=True)
    with site.worker(
        pool="solo",
        concurrency=1,
        worker_prefetch_multiplier=1,
        broker_transport_options=options,
    ):
        site.wait_for_run(first, times=2)
        later = site.task("add").delay(1, 1)
        gate.touch()
        assert site.result(first) == str(gate)
        assert site.result(later) == 2
    runs = site.ledger(id=first.id)
    assert [run["redelivered"] for run in runs] == [False, *[True] * (len(runs) - 1)]
