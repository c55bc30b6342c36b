"""Profiles: how many tasks, processes and faults a run has, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tests.chaos.setup import BATCHED, HOSTILE, MAIN, ORDERED, POPPED, queue_in

ROLES = ("worker", "supervisor", "producer", "sweeper")
PROCESS_KINDS = (
    "sigkill worker",
    "sigkill worker",
    "sigkill supervisor",
    "sigkill supervised",
    "sigkill producer",
    "sigkill sweeper",
    "sigterm worker",
    "sigterm supervisor",
    "sigterm producer",
    "sigterm sweeper",
    "sigstop worker",
    "sigstop worker",
    "sigstop supervisor",
    "sigstop producer",
    "sigstop sweeper",
    "sigterm supervised",
    "sigstop supervised",
    "sigkill operator",
    "sigterm operator",
    "sigstop operator",
    "clock worker",
    "clock producer",
    "clock sweeper",
    "twenty_sweepers",
)
PLANNER_KINDS = (
    "sigkill publisher",
    "sigstop publisher",
    "sigkill scheduler",
    "sigkill subscriber",
    "sigterm subscriber",
    "sigstop subscriber",
)
CELERY_KINDS = ("sigkill celery", "sigterm celery", "sigstop celery")
SPARED = {"threads-dlq", "pymongo-dlq", "motor"}
"""What the smoke profile does without: other processes serve the same queues."""


@dataclass(frozen=True)
class Slot:
    """A place in the fleet: the process in it is replaced when it dies."""

    name: str
    group: str
    role: str
    arguments: dict[str, Any]


def _workers(database: str) -> list[Slot]:
    tag = "" if database == "chaos" else "-dlq"
    main, hostile, batched = (queue_in(database, name) for name in (MAIN, HOSTILE, BATCHED))
    both = {"database": database, "queues": [main, hostile]}
    only = {"database": database, "queues": [main]}
    slots = [
        Slot(f"threads{tag}", "worker", "threads", {**only, "concurrency": 8}),
        Slot(f"motor{tag}", "worker", "coroutines", {**only, "driver": "motor"}),
        Slot(f"pymongo{tag}", "worker", "coroutines", {**only, "driver": "pymongo"}),
        Slot(
            f"hostile{tag}",
            "worker",
            "threads",
            {**both, "queues": [hostile], "concurrency": 3, "memory": True},
        ),
        Slot(
            f"batches{tag}",
            "worker",
            "threads",
            {"database": database, "queues": [batched], "concurrency": 2, "batch": 50},
        ),
    ]
    popper = {"database": database, "queue": queue_in(database, POPPED), "many": 20}
    return [*slots, Slot(f"popper{tag}", "worker", "consumer", popper)]


def fleet(*, full: bool) -> list[Slot]:
    """Return the processes that run all the time; producers come and go."""
    both = {"databases": ["chaos", "chaos_dlq"]}
    supervised = {"database": "chaos_dlq", "queues": [queue_in("chaos_dlq", MAIN)]}
    slots = [
        Slot("single", "worker", "consumer", {"database": "chaos", "queue": ORDERED}),
        Slot("sweeper", "sweeper", "sweeper", both),
        Slot("supervisor", "supervisor", "supervisor", supervised),
    ]
    for database in ("chaos", "chaos_dlq"):
        slots += _workers(database)
        tag, replaying = "" if database == "chaos" else "-dlq", {"database": database, "every": 5.0}
        replaying["queue"] = queue_in(database, MAIN)
        slots.append(Slot(f"operator{tag}", "operator", "operator", replaying))
    if full:
        slots.append(Slot("sweeper-b", "sweeper", "sweeper", both))
    return slots


def planner_slots() -> list[Slot]:
    """Return the processes with a schedule, and with a topic and two subscribers."""
    where = {"database": "chaos"}
    return [
        Slot("scheduler", "scheduler", "scheduler", where),
        Slot("publisher", "publisher", "publisher", where),
        Slot("subscriber-a", "subscriber", "subscriber", where),
        Slot("subscriber-b", "subscriber", "subscriber", where),
    ]


ENDING = {"producer", "sender", "archiver"}
"""The groups of processes that end by themselves, and are not replaced."""
DISMISSED = ("operator", "scheduler", "publisher")
"""The groups that end before the queues are drained: they add tasks."""


def celery_slots(seed: int, for_sec: float) -> list[Slot]:
    """Return a Celery worker, and a process that sends tasks to it."""
    sending = {"seed": seed, "for_sec": for_sec}
    return [
        Slot("celery", "celery", "celery-worker", {}),
        Slot("celery-sender", "sender", "celery-sender", sending),
    ]


def archive_slots(times: int, for_sec: float) -> list[Slot]:
    """Return the process that archives done tasks."""
    arguments = {"database": "chaos", "for_sec": for_sec, "times": times}
    return [Slot("archiver", "archiver", "archiver", arguments)]


STEADY = "steady"
"""The group of processes that no fault of processes hits: their memory is sampled."""


def steady_slots(port: int) -> list[Slot]:
    """Return the processes whose memory is sampled."""
    worker = {"database": "chaos", "queues": [MAIN], "concurrency": 8}
    dashboard = {"database": "chaos", "port": port}
    return [
        Slot("steady-worker", STEADY, "threads", worker),
        Slot("steady-async-worker", STEADY, "coroutines", _async("chaos")),
        Slot("steady-sweeper", STEADY, "sweeper", {"databases": ["chaos", "chaos_dlq"]}),
        Slot("steady-dashboard", STEADY, "dashboard", dashboard),
    ]


def _async(database: str) -> dict[str, Any]:
    return {"database": database, "queues": [queue_in(database, MAIN)], "driver": "pymongo"}


@dataclass(frozen=True)
class Profile:
    """The size of a run.

    Attributes:
        name: Its name.
        minutes: How long tasks are enqueued and faults begin.
        tasks: How many tasks are planned in that time.
        least: How many of them must be acknowledged: producers are killed with some unsent.
        least_faults: How many faults must be injected: some are skipped.
        least_kinds: Of how many kinds they must be.
        producers: How many producers run at once.
        chunk: How many tasks a producer enqueues in its life.
        process_faults: How many faults of processes there are.
        network_faults: How many of connections.
        server_faults: How many of servers.
        server: The kind of server, unless another one is asked for.
        lease_sec: The length of leases.
        calm_sec: How long after the start the first fault comes.
        drain_sec: How long nothing may leave the queues at the end before that is given up.
        fleet: The processes.
        process_kinds: The faults of processes, and what they hit.
        server_kinds: The faults of servers; by default, all that the servers can have.
        databases: Where producers enqueue.
        call_timeout_sec: How long a call may take, if that is not the default.
        kinds: What handlers of the main queues do, and how often, if not as usual.
        planners: Whether there are a schedule and a topic.
        celery: Whether there is a Celery worker; see also :data:`CELERY_KINDS`.
        archives: How often the Spark archive runs.
        sample_sec: How often the memory of the steady processes is sampled; 0: there are none.
    """

    name: str
    minutes: float
    tasks: int
    producers: int
    chunk: int
    process_faults: int
    network_faults: int
    server_faults: int
    server: str
    least: int = 0
    least_faults: int = 0
    least_kinds: int = 0
    lease_sec: float = 3.0
    calm_sec: float = 4.0
    drain_sec: float = 120.0
    fleet: tuple[Slot, ...] = field(default_factory=lambda: tuple(fleet(full=True)))
    process_kinds: tuple[str, ...] = PROCESS_KINDS
    server_kinds: tuple[str, ...] = ()
    databases: tuple[str, ...] = ("chaos", "chaos_dlq")
    call_timeout_sec: float | None = None
    kinds: dict[str, float] | None = None
    sample_sec: float = 0.0
    planners: bool = True
    celery: bool = False
    archives: int = 0

    def lasting(self, minutes: float) -> Profile:
        """Return the profile for another time: as many tasks and faults in a minute."""
        share = minutes / self.minutes
        fewer = min(share, 1)
        return replace(
            self,
            minutes=minutes,
            tasks=max(int(self.tasks * share), 100),
            least=int(self.least * share),
            least_faults=int(self.least_faults * share),
            least_kinds=int(self.least_kinds * fewer),
            process_faults=max(round(self.process_faults * share), 1),
            network_faults=max(round(self.network_faults * share), 1),
            server_faults=max(round(self.server_faults * share), 1),
        )

    def with_tasks(self, tasks: int, least: int) -> Profile:
        """Return the profile with so many tasks.

        It needs ``least`` of them to be acknowledged, if so many are planned; of fewer, the share
        of this profile.
        """
        share = self.least / self.tasks
        return replace(self, tasks=tasks, least=least if tasks >= least else int(tasks * share))


PROFILES = {
    "smoke": Profile(
        name="smoke",
        minutes=1,
        tasks=2500,
        producers=1,
        chunk=250,
        process_faults=16,
        network_faults=5,
        server_faults=2,
        server="single",
        fleet=tuple(one for one in fleet(full=False) if one.name not in SPARED),
        process_kinds=(
            "sigkill worker",
            "sigterm worker",
            "sigstop worker",
            "sigkill producer",
            "sigstop sweeper",
            "clock worker",
            "sigkill supervised",
            "sigkill operator",
            "sigkill publisher",
            "sigkill subscriber",
            "twenty_sweepers",
        ),
    ),
    "standard": Profile(
        name="standard",
        minutes=7,
        tasks=125_000,
        least=100_000,
        least_faults=150,
        least_kinds=12,
        producers=3,
        chunk=1500,
        process_faults=120,
        network_faults=40,
        server_faults=18,
        server="replica-set",
        process_kinds=(*PROCESS_KINDS, *PLANNER_KINDS, *CELERY_KINDS),
        celery=True,
        archives=2,
    ),
    "soak": Profile(
        name="soak",
        minutes=35,
        tasks=575_000,
        least=500_000,
        least_faults=600,
        least_kinds=12,
        producers=3,
        chunk=3000,
        process_faults=500,
        network_faults=160,
        server_faults=80,
        server="replica-set",
        process_kinds=(*PROCESS_KINDS, *PLANNER_KINDS, *CELERY_KINDS),
        celery=True,
        archives=2,
        kinds={"ok": 91.5, "fail": 3.5, "raise": 2.5, "flaky": 1.0, "retry": 1.0, "slow": 0.5},
        sample_sec=2.0,
    ),
}
