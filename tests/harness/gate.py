"""A gate to try decisions on: one cluster, a few accounts, rates of one SU a CPU hour."""

import time
from pathlib import Path
from typing import Any

import msgspec

from steward.bank.gate.deciding import Deciding
from steward.bank.gate.ground import Ground
from steward.bank.gate.keeper import Keeper
from steward.bank.gate.shapes import Said, Submit
from steward.bank.gate.store import Store
from steward.bank.gate.upkeep import Upkeep
from steward.bank.money import MICRO
from steward.bank.records import (
    AccountBooks,
    AllocationBooks,
    Books,
    Description,
    ModeRule,
    Rate,
    Rules,
)
from steward.bank.settings import BankSettings, GateSettings
from steward.core.config import Settings
from steward.slurm.picture import NodeShape, PartitionPicture, Picture
from steward.slurm.settings import ClusterSettings

CLUSTER = "c"
HOUR_MIN = 60
DAY_US = 86_400_000_000
GRACE_MIN = 1
"""What an estimate adds for Slurm's timer."""
SECRET = bytes(range(32))
RATE = Rate(number=1, cluster=CLUSTER, weights={"cpu": 60 * MICRO})
"""One SU a CPU and minute."""


def now_us() -> int:
    return time.time_ns() // 1000


def picture() -> Picture:
    shape = NodeShape(nodes="n[1-64]", count=64, cpus=64, usable_cpus=64, cores=64, memory_mib=1)
    names = ("main", "cheap", "nothing")
    return Picture(
        cluster=CLUSTER,
        taken_us=now_us(),
        zone="UTC",
        partitions={
            name: PartitionPicture(name=name, shapes=((0, 64),), nodes=64, default_time_s=3600)
            for name in names
        },
        default_partition="main",
        shapes=(shape,),
        selects="cr_core",
        users={1000: "alice", 1001: "bob", 1002: "op"},
        accounts={"alice": "chem"},
    )


def rules(mode: str = "gate", *more: ModeRule, seq: int = 1) -> Rules:
    rates = (
        msgspec.structs.replace(RATE, partition="main"),
        msgspec.structs.replace(RATE, number=2, partition="cheap", weights={}, free=True),
    )
    return Rules(seq=seq, modes=(ModeRule(mode=mode), *more), rates=rates)  # type: ignore[arg-type]


def account(name: str, su: int, *, number: int = 1, **more: Any) -> AccountBooks:
    """An account with one open-ended allocation."""
    own = AllocationBooks(number=number, balance=su * MICRO, total=su * MICRO)
    return AccountBooks(name=name, **{"payer": name, "allocations": (own,), **more})


def job(minutes: int = 9, cpus: int = 1, **more: Any) -> Description:
    """A job that costs a SU for each of its minutes and CPUs, and one minute more."""
    given = {
        "uid": 1000,
        "account": "chem",
        "partition": "main",
        "time_limit_min": minutes,
        "num_tasks": cpus,
        "min_cpus": cpus,
        "cpus_per_task": 1,
    }
    return Description(**{**given, **more})


def settings_of(state_dir: Path, **bank: Any) -> Settings:
    return Settings(
        state_dir=str(state_dir),
        cluster={CLUSTER: ClusterSettings(slurm=False)},
        bank=BankSettings(enabled=True, **bank),
        gate=GateSettings(
            socket=str(state_dir / "plugin.sock"),
            plugin_conf=str(state_dir / "gate.conf"),
            plugin_users=(),
        ),
    )


class Site:
    """A gate without its process."""

    def __init__(self, state_dir: Path, *accounts: AccountBooks, mode: str = "gate", **bank: Any):
        self.settings = settings_of(state_dir, **bank)
        self.store = Store(str(state_dir))
        self.ground = Ground(self.settings)
        self.ground.put_rules(rules(mode))
        self.ground.put_picture(picture())
        self.keeper = Keeper(self.store, self.ground, SECRET)
        self.upkeep = Upkeep(self.keeper)
        self.seq = 0
        self.tell(*accounts)

    @property
    def deciding(self) -> Deciding:
        return self.keeper.deciding

    def tell(self, *accounts: AccountBooks, at_us: int = 0) -> None:
        """What all accounts have now."""
        self.seq += 1
        with self.store.transaction():
            self.upkeep.books(Books(seq=self.seq, accounts=accounts, whole=True), at_us or now_us())

    def submit(self, what: Description, *, at_us: int = 0, cluster: str = CLUSTER) -> Said:
        ask = Submit(v=1, op="submit", cluster=cluster, job=what)
        user = self.ground.user_of(CLUSTER, what.uid)
        with self.store.transaction():
            return self.keeper.submit(ask, user, at_us or now_us(), is_lenient=False)

    def modify(self, what: Description) -> Said:
        ask = Submit(v=1, op="modify", cluster=CLUSTER, job=what)
        with self.store.transaction():
            return self.keeper.modify(ask, "", now_us(), is_lenient=False)

    def free(self, name: str = "chem", at_us: int = 0) -> float:
        """What a new job may cost, in SU."""
        return self.keeper.purses.available(name, at_us or now_us()) / MICRO
