"""What goes on beside the handlers: leases, heartbeats and deadlines, in threads of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from microqueue.core import QueueCore
from microqueue.worker.deadlines import Deadlines
from microqueue.worker.inflight import Held, InFlight, now_sec
from microqueue.worker.keeper import LeaseKeeper
from microqueue.worker.registration import Registration
from microqueue.worker.twin import blocking_twin


class Upkeep:
    """Looks after what a worker holds.

    ``twins`` has a blocking queue for each of the worker's own, with connections of its own. There
    is a keeper for each client, so that a server that does not answer delays no lease on another.
    """

    def __init__(
        self,
        queues: Sequence[QueueCore[Any]],
        in_flight: InFlight,
        registration: Registration,
        *,
        on_timeout: Callable[[Held], None],
        on_lost: Callable[[Held], None],
        on_looked: Callable[[], None],
    ) -> None:
        self._registration = registration
        with ExitStack() as opened:
            beat_sec = registration.heartbeat_sec
            self.twins = {
                queue: opened.enter_context(blocking_twin(queue, heartbeat_sec=beat_sec))
                for queue in queues
            }
            self._opened = opened.pop_all()
        self._deadlines = Deadlines(in_flight, on_timeout)
        by_client: dict[int, list[QueueCore[Any]]] = {}
        for queue in queues:
            by_client.setdefault(id(queue.collections.client), []).append(queue)
        self._keepers = [
            LeaseKeeper(
                in_flight,
                {queue: self.twins[queue] for queue in group},
                registration,
                on_lost=on_lost,
                on_looked=on_looked,
            )
            for group in by_client.values()
        ]

    def register(self) -> None:
        """Say that the worker lives. Before its first claim: its death may come soon."""
        self._registration.beat(self.twins)

    def unregister(self) -> None:
        """Take the worker off the list: it ends before its first claim."""
        self._registration.leave(self.twins)

    def start(self) -> None:
        """Begin to look after what is held."""
        for keeper in self._keepers:
            keeper.start()
        self._deadlines.start()

    def expect_renewal(self, within_sec: float) -> None:
        """Be awake within so many seconds: a lease wants to be renewed."""
        due = now_sec() + within_sec
        for keeper in self._keepers:
            keeper.expect(due)

    def expect_deadline(self, due: float) -> None:
        """Be awake by then: the time of a handler is up."""
        self._deadlines.expect(due)

    def stop_deadlines(self) -> None:
        """Watch nobody's time any more."""
        self._deadlines.stop()
        self._deadlines.join()

    def stop(self) -> None:
        """End, and wait for renewals under way."""
        for keeper in self._keepers:
            keeper.stop()
        for keeper in self._keepers:
            keeper.join()
        self.stop_deadlines()

    def close(self) -> None:
        """Let go of the connections."""
        self._opened.close()

    def let_go(self) -> None:
        """End, and let go of the connections, however long that takes."""
        self.stop()
        self.close()
