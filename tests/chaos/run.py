"""One run: servers, processes and faults for a time; then the end, and what is left of it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pymongo
from pymongo.errors import PyMongoError

import microqueue
from microqueue import Queue
from microqueue.embedded.probe import any_free_port
from tests.chaos import clocks, leaks, ledger
from tests.chaos.causes import SERVER_GRACE_SEC
from tests.chaos.faults import Injector
from tests.chaos.fleet import Fleet
from tests.chaos.ledger import Ledger, now
from tests.chaos.parquet import archived
from tests.chaos.plan import faults_of
from tests.chaos.profiles import (
    CELERY_KINDS,
    DISMISSED,
    ENDING,
    PLANNER_KINDS,
    Profile,
    Slot,
    archive_slots,
    celery_slots,
    planner_slots,
    steady_slots,
)
from tests.chaos.roles.nursery import LOGS
from tests.chaos.sampling import Sampler
from tests.chaos.servers import Servers, has_transactions, started
from tests.chaos.setup import BACKOFF, CELERY, DATABASES, HOSTILE, ORDERED, Setup
from tests.chaos.verifier import ARCHIVE, CELERY_TASKS, SCHEDULE, TOPIC
from tests.waiting import wait_for

LOOK_SEC = 0.2
COUNT_SEC = 5.0
"""How often the tasks that are left are counted: each count reads all tasks."""
SAY_SEC = 10.0
END_SEC = 40.0
CAUGHT_UP_SEC = 30.0
"""How long subscribers may take to read the last messages."""
ARCHIVE_SEC = 600.0
"""How long the archive may take to finish a run that the faults have disturbed."""
LIVE = {"status": {"$in": ["pending", "processing"]}}
REPLAYED = {"replaying": {"$ne": None}}
"""A dead letter whose replay has begun: a sweeper finishes it if the process has died."""


class HarnessTrouble(Exception):
    """The harness itself failed; that says nothing about the queue."""


@dataclass(frozen=True)
class Options:
    """What a run is asked for."""

    profile: Profile
    seed: int
    server: str
    folder: Path
    mutant: str | None = None


class Run:
    """Performs a run, and leaves its folder to the verifier."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self._options = options
        self._profile, self._absent = without_absent(options.profile, options.server)
        self._databases = [*DATABASES, CELERY] if self._profile.celery else list(DATABASES)
        self._say = say
        self._chunk = 0
        self._began = 0.0
        self._sampler: Sampler | None = None

    def perform(self) -> None:
        """Run to the end, whatever happens in between."""
        folder = self._options.folder
        for name in (ledger.LEDGER, LOGS, clocks.FOLDER):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for absent in self._absent:
            self._say(f"skipped {absent}")
        disk = self._profile.name != "smoke"
        self._say(f"starting servers: {self._options.server}")
        with started(self._options.server, disk=disk) as servers:
            if disk and not servers.disks:
                self._say("a small disk cannot be mounted here: no disk will be full")
            setup = self._setup(servers)
            begin = self._describe(servers, setup)
            with contextlib.ExitStack() as ending:  # Each happens even if another fails.
                lines = Ledger(folder, "harness")
                ending.callback(lines.close)
                fleet = Fleet(setup, lines)
                ending.callback(fleet.kill_rest)
                ending.callback(fleet.kill)
                injector = Injector(setup, servers, fleet, lines, self._say)
                ending.callback(injector.stop)
                ending.callback(self._stop_sampler)
                self._work(setup, servers, fleet, injector)
                left = self._finish(setup, servers, fleet)
            ledger.write_json(folder, ledger.LEAKS, left)
            self._dump(servers)
            begin["end"] = time.time()
            skipped = [f"{one.kind} {one.target}: {why}" for one, why in injector.skipped]
            begin["skipped"] = [*self._absent, *skipped]
            ledger.write_json(folder, ledger.RUN, begin)
        if injector.errors:
            raise HarnessTrouble("; ".join(injector.errors))

    def _setup(self, servers: Servers) -> Setup:
        setup = Setup(
            folder=str(self._options.folder),
            uri=servers.uri,
            wall_offset=time.time() - now(),
            lease_sec=self._profile.lease_sec,
            timeout_sec=self._profile.lease_sec * 2.5,
            max_attempts=25,
            transactions=servers.transactions,
            mutant=self._options.mutant,
            call_timeout_sec=self._profile.call_timeout_sec,
            kinds=self._profile.kinds,
            seed=self._options.seed,
        )
        for database in DATABASES:
            address, settings = setup.address(database), setup.settings(database)
            with Queue[Any].from_uri(address, settings=settings) as queue:
                queue.ensure_indexes()
        return setup

    def _describe(self, servers: Servers, setup: Setup) -> dict[str, Any]:
        server_version = servers.primary().client.server_info()["version"]
        described: dict[str, Any] = {
            "profile": self._profile.name,
            "seed": self._options.seed,
            "minutes": self._profile.minutes,
            "least": self._profile.least,
            "least_faults": self._profile.least_faults,
            "least_kinds": self._profile.least_kinds,
            "parts": parts_of(self._profile),
            "server": self._options.server,
            "mutant": self._options.mutant,
            "begin": time.time(),
            "command": " ".join(["scripts/chaos", *sys.argv[1:]]),
            "versions": {
                "microqueue": microqueue.__version__,
                "mongodb": server_version,
                "pymongo": pymongo.version,
                "python": platform.python_version(),
            },
            "settings": {
                "lease_sec": setup.lease_sec,
                "dead_after_sec": 3.0,
                "timeout_sec": setup.timeout_sec,
                "backoff_sec": BACKOFF["base_sec"],
                "max_backoff_sec": BACKOFF["max_sec"],
                "wall_offset": setup.wall_offset,
                "ordered_queues": [ORDERED],
                "max_attempts": setup.max_attempts,
                "history_limit": 20,
            },
        }
        ledger.write_json(self._options.folder, ledger.RUN, described)
        return described

    # The time of the faults

    def _work(self, setup: Setup, servers: Servers, fleet: Fleet, injector: Injector) -> None:
        port = any_free_port()
        steady = steady_slots(port) if self._profile.sample_sec else []
        planners = planner_slots() if self._profile.planners else []
        slots = [*self._profile.fleet, *steady, *planners, *self._guests()]
        for slot in slots:
            fleet.start(slot)
        fleet.await_first(slots)
        if steady:
            self._sampler = Sampler(
                self._options.folder,
                fleet,
                lambda: self._counts(servers),
                every=self._profile.sample_sec,
                port=port,
            )
            self._sampler.start()
        self._began, seed = now(), self._options.seed
        planned = faults_of(self._profile, seed, servers.faults)
        lasts = self._profile.minutes * 60
        self._say(f"{len(planned)} faults in {lasts:.0f} s; seed {seed}")
        injector.start(planned, self._began)
        said = now()
        while (elapsed := now() - self._began) < lasts or injector.busy or self._owes():
            self._produce(fleet, min(elapsed / lasts, 1.0))
            if now() - said > SAY_SEC:
                said = now()
                self._tell(servers, fleet, injector, elapsed)
            time.sleep(LOOK_SEC)
            if elapsed > 3 * lasts + 120:
                raise HarnessTrouble("the faults or the producers did not end")
        injector.stop()

    def _stop_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()

    def _guests(self) -> list[Slot]:
        """Return the processes of Celery and of the Spark archive."""
        profile, for_sec = self._profile, self._profile.minutes * 60
        slots = celery_slots(self._options.seed, for_sec) if profile.celery else []
        return slots + (archive_slots(profile.archives, for_sec) if profile.archives else [])

    def _owes(self) -> bool:
        """Return whether there are tasks to enqueue: a slow machine needs longer than planned."""
        return self._chunk * self._profile.chunk < self._profile.tasks

    def _produce(self, fleet: Fleet, share: float) -> None:
        """Start producers, so that tasks come at an even rate, whatever is killed."""
        profile = self._profile
        behind = profile.tasks * share + profile.chunk * profile.producers / 2
        while fleet.count("producer") < profile.producers and self._chunk * profile.chunk < behind:
            self._chunk += 1
            database = profile.databases[self._chunk % len(profile.databases)]
            arguments = {
                "database": database,
                "seed": self._options.seed,
                "chunk": self._chunk,
                "size": profile.chunk,
                "rate": 2 * profile.tasks / (profile.minutes * 60) / profile.producers,
            }
            fleet.start(Slot("producer", "producer", "producer", arguments))

    def _tell(self, servers: Servers, fleet: Fleet, injector: Injector, elapsed: float) -> None:
        with contextlib.suppress(PyMongoError, AssertionError):
            counts = self._counts(servers)
            text = ", ".join(f"{count:,} {status}" for status, count in sorted(counts.items()))
            self._say(f"{elapsed:.0f} s: {text}; {len(injector.done)} faults")

    def _counts(self, servers: Servers) -> dict[str, int]:
        """Count by status, in one pass over each database: many tasks are slow to count."""
        found = dict.fromkeys(("pending", "processing", "done", "failed"), 0)
        client = servers.primary().client
        for database in self._databases:
            by_status = [{"$group": {"_id": "$status", "count": {"$sum": 1}}}]
            for group in client[database].tasks.aggregate(by_status, maxTimeMS=3000):
                if group["_id"] in found:
                    found[group["_id"]] += group["count"]
            found["failed"] += client[database].tasks_dlq.count_documents({}, maxTimeMS=3000)
        return found

    # The end

    def _finish(self, setup: Setup, servers: Servers, fleet: Fleet) -> dict[str, Any]:
        self._say("no more faults; waiting until the queues are empty")
        servers.heal()
        calm_since = datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=SERVER_GRACE_SEC)
        for group in DISMISSED:
            fleet.dismiss_group(group)
        ending = {*ENDING, *DISMISSED} - {"archiver"}
        _wait_for_ends(fleet, ending, END_SEC)
        self._remove_schedules(servers)
        _await_subscribers(self._options.folder)
        _wait_for_ends(fleet, {"archiver"}, ARCHIVE_SEC)
        if not self._drain(servers):
            self._say("the queues are not empty")  # The verifier names the tasks.
        self._stop_sampler()
        self._say("looking for leaks, and stopping the processes")
        living = {one.who: one.pid for one in fleet.living()}
        open_too_long = leaks.find_in_living(living, servers.members)
        stubborn = fleet.close(within_sec=END_SEC)
        return open_too_long | leaks.find(self._options.folder, servers, stubborn, since=calm_since)

    def _remove_schedules(self, servers: Servers) -> None:
        """Remove what a scheduler has left that got its SIGTERM when it had just begun."""
        for name in DATABASES:
            servers.primary().client[name].microqueue_schedules.delete_many({})

    def _drain(self, servers: Servers) -> bool:
        """Wait until no task is left; give up when the number has not fallen for a while."""
        least, fell_at = float("inf"), now()
        while now() - fell_at < self._profile.drain_sec:
            with contextlib.suppress(PyMongoError, AssertionError):
                client = servers.primary().client
                left = sum(unfinished(client[name]) for name in self._databases)
                if not left:
                    return True
                if left < least:
                    least, fell_at = left, now()
            time.sleep(COUNT_SEC)
        return False

    def _dump(self, servers: Servers) -> None:
        client = servers.primary().client

        def of(database: str, collection: str) -> Iterator[dict[str, Any]]:
            yield from client[database][collection].find(batch_size=5000)

        stored: dict[str, Iterator[dict[str, Any]]] = {
            f"{database}.{collection}": of(database, collection)
            for database in self._databases
            for collection in ("tasks", "tasks_dlq")
        }
        stored[ledger.ARCHIVED] = archived(self._options.folder)
        ledger.write_documents(self._options.folder, stored)
        effects = {
            name: dict(
                Counter(str(one["key"]) for database in DATABASES for one in of(database, name))
            )
            for name in ("orders", "effects")
        }
        ledger.write_json(self._options.folder, ledger.EFFECTS, effects)


def unfinished(database: Any) -> int:
    """Return how many tasks still wait or run, or are on their way back from the dead letters."""
    found: int = database.tasks.count_documents({"$or": [LIVE, REPLAYED]})
    return found + int(database.tasks_dlq.count_documents(REPLAYED))


def _await_subscribers(folder: Path) -> None:
    """Wait until each subscriber has the last message; the verifier names those that do not."""

    def is_over() -> bool:
        last: dict[str, tuple[float, Any]] = {}
        for line in ledger.read_lines(folder, "publisher-*", "subscriber-*"):
            slot = line.who.rpartition("-")[0]
            at, _ = last.setdefault(slot, (0.0, None))
            if line.event in {"published", "received"} and line.at >= at:
                message = line.fields.get("publisher", line.who), line.fields["number"]
                last[slot] = line.at, message
        return len({message for _, message in last.values()}) <= 1

    ends = now() + CAUGHT_UP_SEC
    while not is_over() and now() < ends:
        time.sleep(LOOK_SEC)


def _wait_for_ends(fleet: Fleet, groups: set[str], limit_sec: float) -> None:
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not sum(map(fleet.count, groups)), limit_sec)


def without_absent(profile: Profile, server: str) -> tuple[Profile, list[str]]:
    """Leave out what is not installed, or not possible on the server; return that, too."""
    absent = []
    if profile.planners and not has_transactions(server):
        absent.append(f"the schedule and the topic: a {server} server has no transactions")
        kinds = tuple(one for one in profile.process_kinds if one not in PLANNER_KINDS)
        profile = replace(profile, planners=False, process_kinds=kinds)
    if profile.celery and importlib.util.find_spec("celery") is None:
        absent.append("celery: it is not installed")
        kinds = tuple(one for one in profile.process_kinds if one not in CELERY_KINDS)
        profile = replace(profile, celery=False, process_kinds=kinds)
    if profile.archives and (reason := _why_no_spark()) is not None:
        absent.append(f"the archive: {reason}")
        profile = replace(profile, archives=0)
    return profile, absent


def parts_of(profile: Profile) -> list[str]:
    """Return what takes part besides producers and workers: the verifier looks for each."""
    parts = [SCHEDULE, TOPIC] if profile.planners else []
    parts += [CELERY_TASKS] if profile.celery else []
    return parts + ([ARCHIVE] if profile.archives else [])


def _why_no_spark() -> str | None:
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed"
    found = os.environ.get("JAVA_HOME") or shutil.which("java")
    return None if found else "there is no Java"


__all__ = ["HOSTILE", "HarnessTrouble", "Options", "Run"]
