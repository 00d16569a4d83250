"""Gates: decisions on one cluster with a few accounts and a rate of one SU per CPU minute."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from harness.site import Site
from steward.bank.gate.admission import DecisionMaker
from steward.bank.gate.client import GateClient
from steward.bank.gate.holds import HoldKeeper
from steward.bank.gate.policy import GateRules
from steward.bank.gate.requests import GateStatus, PluginReply, PluginRequest
from steward.bank.gate.server import GateServer
from steward.bank.gate.store import GateStore
from steward.bank.gate.sync import HoldSync
from steward.bank.money import MICRO
from steward.bank.records import (
    AccountBooks,
    AllocationBooks,
    BankRules,
    GateBooks,
    JobRequest,
    ModeRule,
    Rate,
)
from steward.bank.settings import BankSettings, GateSettings
from steward.core.config import Settings
from steward.core.errors import Unavailable
from steward.core.rpc import connect_socket
from steward.core.waits import Stop
from steward.slurm.cluster_model import ClusterModel, NodeShape, PartitionModel

CLUSTER = "c"
HOUR_MIN = 60
DAY_US = 86_400_000_000
SECRET = bytes(range(32))
RATE = Rate(number=1, cluster=CLUSTER, weights={"cpu": 60 * MICRO})
"""One SU per CPU minute."""


PATIENCE_S = 30.0
_RUN = """
import signal, sys
import msgspec
from steward.core.config import Settings
from steward.daemon.consumer_workers import {}
from steward.core.waits import Stop
stop = Stop()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
{}(msgspec.json.decode(sys.argv[1], type=Settings), stop, lambda: None)
"""


def now_us() -> int:
    return time.time_ns() // 1000


def picture() -> ClusterModel:
    shape = NodeShape(nodes="n[1-64]", count=64, cpus=64, usable_cpus=64, cores=64, memory_mib=1)
    names = ("main", "cheap", "licensed", "nothing")
    return ClusterModel(
        cluster=CLUSTER,
        taken_us=now_us(),
        zone="UTC",
        partitions={
            name: PartitionModel(name=name, shapes=((0, 64),), nodes=64, default_time_s=3600)
            for name in names
        },
        default_partition="main",
        shapes=(shape,),
        selects="cr_core",
        users={1000: "alice", 1001: "bob", 1002: "op"},
        accounts={"alice": "chem"},
    )


def rules(mode: str = "enforce", *more: ModeRule, seq: int = 1) -> BankRules:
    rates = (
        msgspec.structs.replace(RATE, partition="main"),
        msgspec.structs.replace(RATE, number=2, partition="cheap", weights={}, free=True),
        msgspec.structs.replace(
            RATE, number=3, partition="licensed", weights={"license/abq": 60 * MICRO}
        ),
    )
    return BankRules(seq=seq, modes=(ModeRule(mode=mode), *more), rates=rates)  # type: ignore[arg-type]


def account(name: str, su: int, *, number: int = 1, **more: Any) -> AccountBooks:
    """Return an account with one allocation without an end."""
    own = AllocationBooks(number=number, balance=su * MICRO, total=su * MICRO)
    return AccountBooks(name=name, **{"payer": name, "allocations": (own,), **more})


def job(minutes: int = 9, cpus: int = 1, **more: Any) -> JobRequest:
    """Return a job that costs one SU for each CPU and minute, and for one minute more."""
    defaults = {
        "uid": 1000,
        "account": "chem",
        "partition": "main",
        "time_limit_min": minutes,
        "num_tasks": cpus,
        "min_cpus": cpus,
        "cpus_per_task": 1,
    }
    return JobRequest(**{**defaults, **more})


OPEN_GATE = GateSettings(plugin_users=())
"""Settings of a gate that all users may ask."""


def settings_of(directory: Path, **bank: Any) -> Settings:
    """Return the settings of a Site whose gate has its socket in the state directory."""
    clusters, banked = (CLUSTER,), BankSettings(enabled=True, **bank)
    return Site(directory, clusters=clusters, bank=banked, gate=OPEN_GATE).settings


class GateCore:
    """A gate without a process."""

    def __init__(
        self, directory: Path, *accounts: AccountBooks, mode: str = "enforce", **bank: Any
    ):
        self.settings = settings_of(directory, **bank)
        self.store = GateStore(self.settings.state_dir)
        self.ground = GateRules(self.settings)
        self.ground.put_rules(rules(mode))
        self.ground.put_model(picture())
        self.keeper = HoldKeeper(self.store, self.ground, SECRET)
        self.upkeep = HoldSync(self.keeper)
        self.seq = 0
        self.tell(*accounts)

    @property
    def deciding(self) -> DecisionMaker:
        return self.keeper.decision_maker

    def tell(self, *accounts: AccountBooks, at_us: int = 0) -> None:
        """Set the balances of all accounts."""
        self.seq += 1
        with self.store.transaction():
            self.upkeep.apply_books(
                GateBooks(seq=self.seq, accounts=accounts, whole=True), at_us or now_us()
            )

    def submit(self, what: JobRequest, *, at_us: int = 0, cluster: str = CLUSTER) -> PluginReply:
        ask = PluginRequest(v=1, op="submit", cluster=cluster, job=what)
        user = self.ground.find_user(CLUSTER, what.uid)
        with self.store.transaction():
            return self.keeper.submit(ask, user, at_us or now_us(), is_lenient=False)

    def modify(self, what: JobRequest) -> PluginReply:
        ask = PluginRequest(v=1, op="modify", cluster=CLUSTER, job=what)
        with self.store.transaction():
            return self.keeper.modify(ask, "", now_us(), is_lenient=False)

    def look(self, after_s: int = 0) -> None:
        """Tell that the whole queue was seen, some seconds from now."""
        began_us = now_us() + after_s * 1_000_000
        with self.store.transaction():
            self.upkeep.record_poll(CLUSTER, began_us, began_us)

    def free(self, name: str = "chem", at_us: int = 0) -> float:
        """Return the SU that are available to a new job of an account."""
        return self.keeper.balances.get_available(name, at_us or now_us()) / MICRO


def start_worker(settings: Settings, function: str) -> subprocess.Popen[bytes]:
    """Start a process that runs a function of the daemon's consumer workers."""
    text = msgspec.json.encode(settings).decode()
    return subprocess.Popen([sys.executable, "-c", _RUN.format(function, function), text])


class RunningGate:
    """A gate in a subprocess, which the test can kill and start again."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.link = GateClient(settings.state_dir)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.process = start_worker(self.settings, "run_gate")
        self.wait(lambda: self.state() is not None)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(PATIENCE_S)
            self.process = None

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def state(self) -> GateStatus | None:
        try:
            return self.link.get_status()
        except Unavailable:
            return None

    def tell(self, *accounts: AccountBooks, mode: str = "enforce", seq: int = 1) -> None:
        """Send accounts, rules and the cluster's model, and wait until the gate decides."""
        self.link.send_books(GateBooks(seq=seq, accounts=accounts, whole=True))
        self.link.send_rules(rules(mode))
        self.link.send_model(picture())
        self.wait_open()

    def wait_open(self) -> None:
        path = self.settings.gate_socket
        self.wait(lambda: bool((state := self.state()) and state.deciding))
        self.wait(lambda: os.path.exists(path))

    def wait(self, is_so: Any) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            assert self.is_running(), "the gate has ended"
            assert time.monotonic() < until, "the gate does not come so far"
            time.sleep(0.01)

    def ask(self, job: JobRequest, op: str = "submit", cluster: str = "c") -> dict[str, Any]:
        body = json.loads(msgspec.json.encode(job))
        answer = self.say(
            json.dumps({"v": 1, "op": op, "cluster": cluster, "job": body}).encode() + b"\n"
        )
        return dict(json.loads(answer))

    def say(self, data: bytes) -> bytes:
        """Send bytes to the gate's socket; return the reply, b"" if there is none."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE_S)
            connect_socket(connection, self.settings.gate_socket)
            connection.sendall(data)
            answer = b""
            while not answer.endswith(b"\n"):
                more = connection.recv(65536)
                if not more:
                    break
                answer += more
            return answer


class GateThread(RunningGate):
    """A gate in a thread of this process, which monkeypatch reaches and a test can pause."""

    def start(self) -> None:
        self._end = Stop()
        self._goes_on, self._pauses = threading.Event(), threading.Event()
        self._goes_on.set()
        server = GateServer(self.settings)
        self._thread = threading.Thread(target=server.run, args=(self._end, self._beat))
        self._thread.start()
        self.wait(lambda: self.state() is not None)

    def _beat(self) -> None:
        if not self._goes_on.is_set():
            self._pauses.set()
            self._goes_on.wait(PATIENCE_S)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the gate within the block; it then decides on all waiting requests."""
        self._pauses.clear()
        self._goes_on.clear()
        assert self._pauses.wait(PATIENCE_S), "the gate does not beat"
        try:
            yield
        finally:
            self._goes_on.set()

    def kill(self, number: int = signal.SIGKILL) -> None:
        self._end.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the gate goes on"

    def is_running(self) -> bool:
        return self._thread.is_alive()


@contextmanager
def running(settings: Settings) -> Iterator[RunningGate]:
    gate = RunningGate(settings)
    try:
        yield gate
    finally:
        gate.kill()


@contextmanager
def running_here(settings: Settings) -> Iterator[GateThread]:
    gate = GateThread(settings)
    try:
        yield gate
    finally:
        gate.kill()
