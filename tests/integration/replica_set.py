"""A replica set of real processes, whose members can be killed, stopped and cut off.

One set serves all tests of a file: each test leaves it healthy, or :meth:`ReplicaSet.heal` does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from pymongo import MongoClient, WriteConcern
from pymongo.errors import PyMongoError

from microqueue.embedded import find_mongod
from tests.ports import free_port
from tests.waiting import wait_for

NAME = "trio"
APP_NAME = "tests"
"""How the clients of the tests introduce themselves, whose connections are not the queue's."""
MEMORY_DISK = Path("/dev/shm")
PATIENCE_SEC = 90
ONE = WriteConcern(1)


class Member:
    """One mongod, which keeps its files and its port when it is killed and started again.

    Attributes:
        advertised: The address that the replica set tells its clients and members.
    """

    def __init__(
        self,
        port: int,
        place: Path,
        arguments: Sequence[str] = (),
        *,
        replica_set: str | None = NAME,
        options: str = "",
    ) -> None:
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.advertised = self.address
        self.place = place
        self._arguments = arguments
        self._replica_set = replica_set
        self._options = options
        self._user: dict[str, str] = {}
        self.frozen = False
        self._process: subprocess.Popen[bytes] | None = None
        self._client: MongoClient[Any] | None = None

    def __repr__(self) -> str:
        return f"Member({self.port})"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def client(self) -> MongoClient[Any]:
        """A connection to this member alone, whatever its state is."""
        if self._client is None:
            uri = f"mongodb://{self.address}/?directConnection=true{self._options}"
            limits: dict[str, Any] = {"serverSelectionTimeoutMS": 2000, "connectTimeoutMS": 2000}
            limits |= {"socketTimeoutMS": 30_000, "appname": APP_NAME, **self._user}
            self._client = MongoClient(uri, **limits)
        return self._client

    def log_in(self, options: str, **user: str) -> None:
        """Connect to this member as a user from now on."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self._options = options
        self._user = user

    def start(self) -> None:
        """Start the process, or start it again after it was killed."""
        self.place.mkdir(exist_ok=True)
        command = [str(find_mongod()), "--bind_ip", "127.0.0.1"]
        if self._replica_set is not None:
            command += ["--replSet", self._replica_set, "--oplogSize", "64"]
        command += ["--port", str(self.port), "--dbpath", str(self.place)]
        command += ["--nounixsocket", "--quiet"]
        command += ["--wiredTigerCacheSizeGB", "0.25"]
        command += ["--setParameter", "enableTestCommands=1"]
        command += ["--setParameter", "diagnosticDataCollectionEnabled=false", *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """End it with ``kill -9``."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.frozen = False

    def stop(self) -> None:
        """Freeze it: its connections stay open, and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        self.frozen = True

    def cont(self) -> None:
        """Let it continue from where it was frozen."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self.frozen = False

    def end(self) -> None:
        """Kill it, frozen or not, and close the connection to it."""
        self.kill()
        if self._client is not None:
            self._client.close()
            self._client = None


class ReplicaSet:
    """Three members, and what can happen to them."""

    def __init__(
        self,
        place: Path,
        *,
        election_timeout_sec: float,
        catch_up: bool,
        advertise: Callable[[Member], str] | None = None,
    ) -> None:
        self.members: list[Member] = []
        while len(self.members) < 3:
            port = free_port()
            if port not in {member.port for member in self.members}:
                self.members.append(Member(port, place / str(port)))
        for member in self.members:
            member.advertised = member.address if advertise is None else advertise(member)
        self._settings = {
            "electionTimeoutMillis": int(election_timeout_sec * 1000),
            "heartbeatIntervalMillis": 250,
            "heartbeatTimeoutSecs": 2,
            # A new primary fetches what only the old one has, unless this is 0.
            "catchUpTimeoutMillis": -1 if catch_up else 0,
        }

    @classmethod
    @contextlib.contextmanager
    def started(
        cls,
        *,
        election_timeout_sec: float = 2,
        catch_up: bool = True,
        advertise: Callable[[Member], str] | None = None,
    ) -> Iterator[Self]:
        """Start a set, in memory where there is a memory disk, and end it afterwards.

        Without ``catch_up``, what only a lost primary had is rolled back. ``advertise`` gives the
        address at which clients and the other members reach a member, such as a proxy's.
        """
        disk = MEMORY_DISK if os.access(MEMORY_DISK, os.W_OK) else None
        place = Path(tempfile.mkdtemp(prefix="microqueue-trio-", dir=disk))
        trio = cls(
            place,
            election_timeout_sec=election_timeout_sec,
            catch_up=catch_up,
            advertise=advertise,
        )
        try:
            for member in trio.members:
                member.start()
            trio._initiate()
            yield trio
        finally:
            for member in trio.members:
                member.end()
            shutil.rmtree(place, ignore_errors=True)

    def _initiate(self) -> None:
        for member in self.members:  # All must answer before the set is initiated.
            _until(lambda member=member: member.client.admin.command("ping"), f"{member}")
        hosts = [{"_id": n, "host": one.advertised} for n, one in enumerate(self.members)]
        config = {"_id": NAME, "members": hosts, "settings": self._settings}
        self.members[0].client.admin.command("replSetInitiate", config)
        self.heal()

    @property
    def uri(self) -> str:
        """The address of the whole set."""
        hosts = ",".join(member.advertised for member in self.members)
        return f"mongodb://{hosts}/test?replicaSet={NAME}"

    def primary(self) -> Member:
        """Wait for a primary that accepts writes, and give it: of two, the one elected last."""
        found: Member = _until(self._find_primary, "a primary")
        return found

    def secondaries(self) -> list[Member]:
        """Return the other members, dead ones included."""
        primary = self.primary()
        return [member for member in self.members if member is not primary]

    def _find_primary(self) -> Member | None:
        seen: list[tuple[int, Member]] = []
        for member in [one for one in self.members if one.alive and not one.frozen]:
            with contextlib.suppress(PyMongoError):
                hello = member.client.admin.command("hello")
                if hello["isWritablePrimary"]:
                    seen.append((hello["electionId"], member))
        return max(seen, key=lambda one: one[0])[1] if seen else None

    def step_down(self, *, for_sec: int = 60) -> Member:
        """Make the primary step down at once, and give it."""
        primary = self.primary()
        command = {
            "replSetStepDown": for_sec,
            "secondaryCatchUpPeriodSecs": 0,
            "force": True,
        }
        primary.client.admin.command(command)
        return primary

    @contextlib.contextmanager
    def without_replication(self) -> Iterator[Member]:
        """Let the secondaries live and vote, but fetch nothing: no write reaches a majority.

        Yields the primary, the only member with what is written in the block. Replication
        resumes on the members that are alive at the end.
        """
        primary, secondaries = self.primary(), self.secondaries()
        try:
            entered = {
                member: set_fail_point(member, "stopReplProducer", "alwaysOn")
                for member in secondaries
            }
            # What ends the wait for a batch that is under way, which is fetched still.
            primary.client.cut_off.marks.with_options(write_concern=ONE).insert_one({})
            for member, times in entered.items():
                member.client.admin.command(
                    "waitForFailPoint", "stopReplProducer", timesEntered=times + 1, maxTimeMS=20_000
                )
            yield primary
        finally:
            self.replicate(secondaries)

    def replicate(self, members: Iterable[Member] | None = None) -> None:
        """Let the members fetch again what the primary has."""
        for member in self.members if members is None else members:
            with contextlib.suppress(PyMongoError):
                set_fail_point(member, "stopReplProducer", "off")

    def heal(self) -> None:
        """Start and continue everything, and wait until all are in step again."""
        for member in self.members:
            if member.alive:
                member.cont()
            else:
                member.start()
        self.replicate()
        _until(self._is_healthy, "a healthy set")

    def _is_healthy(self) -> bool:
        """Return whether there is a primary with two secondaries that have caught up.

        A member that rolls back closes its connections, so any command here may fail, and is
        made again.
        """
        for member in self.members:
            if member.client.admin.command("hello").get("secondary"):
                member.client.admin.command("replSetFreeze", 0)  # It may lead again.
        primary = self._find_primary()
        if primary is None:
            return False
        states = primary.client.admin.command("replSetGetStatus")["members"]
        if sorted(one["stateStr"] for one in states) != ["PRIMARY", "SECONDARY", "SECONDARY"]:
            return False
        concern = {"w": len(self.members), "wtimeout": 5000}
        command = {"insert": "marks", "documents": [{}], "writeConcern": concern}
        primary.client.healed.command(command)
        return True


def set_fail_point(member: Member, name: str, mode: Any, **data: Any) -> int:
    """Switch a fail point of one member; give how often it was entered before."""
    extra: dict[str, Any] = {"data": data} if data else {}
    reply = member.client.admin.command("configureFailPoint", name, mode=mode, **extra)
    return int(reply["count"])


def _until(condition: Any, what: str) -> Any:
    return wait_for(condition, PATIENCE_SEC, what=what, ignoring=(PyMongoError,))
