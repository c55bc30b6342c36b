"""A countdown that is much longer than the visibility timeout, and two workers that wait for it.

The variables ``VISIBILITY_SEC`` and ``COUNTDOWN_SEC`` set other durations.
"""

from __future__ import annotations

import os
import time

from tests.celery.workers import Site

VISIBILITY_SEC = float(os.environ.get("VISIBILITY_SEC", "6"))
"""Long enough for a busy machine to renew it in time."""
COUNTDOWN_SEC = float(os.environ.get("COUNTDOWN_SEC", "20"))
LATER_SEC = 2 * VISIBILITY_SEC
"""For how long another run would be noticed."""


def test_a_countdown_longer_than_the_visibility_timeout_runs_once_and_on_time(site: Site) -> None:
    options = {"visibility_timeout": VISIBILITY_SEC, "sweep_interval": 1}
    with (
        site.worker(broker_transport_options=options),
        site.worker(pool="threads", broker_transport_options=options),
    ):
        sent_at = time.time()
        sent = site.task("nap").apply_async((1, 0), countdown=COUNTDOWN_SEC)
        while True:
            stored = site.stored(sent)
            if time.time() >= sent_at + COUNTDOWN_SEC:  # It may have been due when it was read.
                break
            assert (stored["status"], stored["attempts"]) == ("pending", 0)
            time.sleep(0.1)
        site.wait_for_run(sent, "end")
        assert site.wait_for_status(sent, "done")["attempts"] == 1
        time.sleep(LATER_SEC)
        (run,) = site.ledger(id=sent.id)
    late_sec = run["at"] - sent_at - COUNTDOWN_SEC
    print(f"{COUNTDOWN_SEC:g} s, visible {VISIBILITY_SEC:g} s: {late_sec:.3f} s late")  # noqa: T201
    assert late_sec >= 0
    assert run["redelivered"] is False
