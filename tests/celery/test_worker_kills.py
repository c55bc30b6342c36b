"""Workers are killed while they run tasks: nothing is lost, and a kill explains each extra run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks import brokers, celery_kills
from benchmarks.brokers import Broker
from benchmarks.celery_kills import ACK_SEC, Kill, Run, explain, measure
from tests.celery.workers import Site


def test_no_task_is_lost_and_each_extra_run_is_explained(
    database_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine writes acknowledgements, and renews leases, late.
    monkeypatch.setattr(celery_kills, "ACK_SEC", 4.0)

    @contextmanager
    def fresh() -> Iterator[str]:
        yield f"microqueue+{database_uri}"

    result = measure(
        Broker(brokers.MICROQUEUE, fresh),
        tasks=250,
        workers=2,
        kill_sec=1.0,
        visibility_sec=10,
        settle_sec=12,
        most_kills=2,
    )
    assert result.kills >= 1
    assert result.lost == []
    assert result.unexplained == []
    assert result.done == 250


@pytest.mark.parametrize(("rejects", "runs"), [(True, 2), (False, 1)])
def test_a_task_whose_pool_process_was_killed_runs_again_only_if_celery_rejects_it(
    site: Site, *, rejects: bool, runs: int
) -> None:
    with site.worker(task_reject_on_worker_lost=rejects):
        gate = site.gate()
        sent = site.task("wait").apply_async((str(gate),))
        site.wait_for_run(sent)
        os.kill(site.ledger(id=sent.id)[0]["pid"], signal.SIGKILL)
        if rejects:
            site.wait_for_run(sent, times=2)
        else:
            site.wait_for_status(sent, "done")
        gate.touch()
        assert site.wait_for_status(sent, "done")["attempts"] == runs
        assert [run["redelivered"] for run in site.ledger(id=sent.id)] == [False, True][:runs]


FIRST = 1
SECOND = 2


@pytest.mark.parametrize(
    ("former", "kills", "explained"),
    [
        (Run(7, FIRST, 10.0), [Kill(FIRST, 10.5)], True),  # It was interrupted.
        (Run(7, FIRST, 10.0, 10.1), [Kill(FIRST, 10.5)], True),  # It was not acknowledged.
        (Run(7, FIRST, 10.0, 10.1), [Kill(FIRST, 10.2 + ACK_SEC)], False),
        (Run(7, FIRST, 10.0, 10.1), [Kill(SECOND, 10.5)], False),
        (Run(7, FIRST, 10.0, 10.1), [], False),
        (Run(7, FIRST, 10.0), [Kill(FIRST, 21.0)], False),  # Both ran at the same time.
    ],
)
def test_a_kill_explains_the_run_after_the_one_that_it_ended(
    former: Run, kills: list[Kill], explained: bool
) -> None:
    again = Run(7, SECOND, 20.0, 20.1)
    (extra,) = explain([former, Run(8, FIRST, 10.0, 10.1), again], kills)
    assert (extra.run, extra.former) == (again, former)
    assert (extra.kill is not None) is explained
