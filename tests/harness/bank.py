"""A ledger and a jobs.db of one cluster, fed by hand: for the tests of the bank's consumer."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from harness.events import NOON
from harness.jobs import record
from steward.bank.ledger import Account, By, open_ledger
from steward.bank.money import MICRO
from steward.bank.records import Rate
from steward.bank.settings import BankSettings
from steward.core.config import Settings
from steward.core.events import Event
from steward.jobs import Jobs, JobsConsumer, database_path
from steward.slurm.settings import ClusterSettings

BY = By(who="root")
HOUR = MICRO
"""What a CPU costs for an hour: one unit."""

__all__ = ["BY", "HOUR", "NOON", "BankSite", "rate", "record"]


def rate(partition: str, hourly: int = HOUR) -> Rate:
    """What a CPU costs there for an hour, for jobs of every time."""
    long_ago = NOON - timedelta(days=365)
    return Rate(cluster="c1", partition=partition, weights={"cpu": hourly}, valid_from=long_ago)


class BankSite:
    """Cluster ``c1`` with account ``physics``, and a rate of one unit a CPU hour.

    Args:
        directory: For its state.
        money: Units in the account.
        bank: The bank's settings.
    """

    def __init__(
        self, directory: Path, *, money: int = 1000, bank: BankSettings | None = None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.settings = Settings(
            state_dir=str(directory),
            cluster={"c1": ClusterSettings(slurm=False, spool="/nowhere", timezone="UTC")},
            bank=bank or BankSettings(enabled=True),
        )
        self.now = NOON + timedelta(hours=6)
        self.ledger = open_ledger(self.settings, lambda: self.now)
        self.jobs = JobsConsumer(self.settings, lambda: self.now)
        self.journal: list[Event] = []
        with self.ledger.transaction() as t:
            t.accounts.create(Account(name="physics"), BY)
            if money:
                t.transfers.deposit("physics", money * MICRO, BY)
            t.rates.add(rate("debug"), BY)

    def feed(self, events: Sequence[Event]) -> list[Event]:
        """Have jobs.db take in events; what it said of them."""
        said: list[Event] = []
        self.journal += [self._numbered(event, n) for n, event in enumerate(events, 1)]
        self.jobs.apply(self.journal[-len(events) :], len(self.journal), said.extend)
        self.jobs.tick(said.extend)
        return [self._numbered(event, n) for n, event in enumerate(said, len(self.journal) + 1)]

    def tick(self) -> list[Event]:
        """Have jobs.db do what is due by the clock; what it said."""
        said: list[Event] = []
        self.jobs.tick(said.extend)
        return said

    @staticmethod
    def _numbered(event: Event, number: int) -> Event:
        return msgspec.structs.replace(event, id=number)

    def job(self, job_id: int, *, begin: int = 0, seconds: int = 3600, **fields: Any) -> None:
        """A job that ran, and is over."""
        self.feed(self.life(job_id, begin=begin, seconds=seconds, **fields))

    @staticmethod
    def life(job_id: int, *, begin: int = 0, seconds: int = 3600, **fields: Any) -> list[Event]:
        """What Slurm shows of a job that ran: its beginning and its end."""
        values: dict[str, Any] = {
            "account": "physics",
            "partition": "debug",
            "cpus": 2,
            "qos": "normal",
        }
        values |= {"tres_allocated": "cpu=2,mem=1G,node=1", "nodelist": "n1", **fields}
        start = NOON + timedelta(seconds=begin + 1)
        ended: dict[str, Any] = {**values, "start": start}
        return [
            record(job_id, begin, seen=begin, **values),
            record(job_id, begin, "RUNNING", seen=begin + 2, **ended),
            record(
                *(job_id, begin, "COMPLETED"),
                seen=begin + seconds + 2,
                end=begin + seconds + 1,
                exit_code=0,
                **ended,
            ),
        ]

    def balance(self) -> int:
        """What the account has left."""
        with self.ledger.reading() as t:
            return t.reading.balance("physics", self.now)

    def open_jobs(self) -> Jobs:
        """jobs.db, to ask."""
        return Jobs(database_path(self.settings.state_dir))

    def began(self, at: datetime) -> None:
        """Have the bank begin at a time."""
        with self.ledger.transaction() as t:
            t.set_mark("began", str(int(at.timestamp() * 1e6)))

    def close(self) -> None:
        """Let go of both."""
        self.ledger.close()
        self.jobs.close()
