"""Bank Sites: the ledger of one cluster, its jobs and charges, and users of every role."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from harness.events import NOON
from harness.jobs import open_jobs, record
from harness.site import Site
from steward.bank.ledger import Account, Authorship
from steward.bank.money import MICRO
from steward.bank.records import Charge, Rate, ResourceUse
from steward.bank.settings import BankSettings
from steward.core.access import ClusterRoles
from steward.core.events import Event
from steward.core.timestamps import to_micros
from steward.jobs import Jobs, database_path

BY = Authorship(who="root")
HOUR = MICRO
"""Price of a CPU hour in micro-SU: one SU."""


def rate(partition: str, hourly: int = HOUR) -> Rate:
    """Return a rate of a partition per CPU hour, valid for all jobs."""
    long_ago = NOON - timedelta(days=365)
    return Rate(cluster="c1", partition=partition, weights={"cpu": hourly}, valid_from=long_ago)


def make_site(directory: Path, *, money: int = 1000, bank: BankSettings | None = None) -> Site:
    """Make a Site of cluster ``c1`` with this many SU in account ``physics``."""
    site = Site(directory, bank=bank or BankSettings(enabled=True))
    found_bank(site, money)
    return site


def found_bank(site: Site, money: int) -> None:
    """Create account ``physics`` with this many SU, and a rate of one SU per CPU hour."""
    site.now = NOON + timedelta(hours=6)
    site.open(open_jobs)
    with site.ledger.transaction() as t:
        t.accounts.create(Account(name="physics"), BY)
        if money:
            t.transfers.deposit("physics", money * MICRO, BY)
        t.rates.add(rate("debug"), BY)


def make_shared_site(directory: Path) -> Site:
    """Make a bank Site whose accounts have users, an owner and a coordinator.

    olga owns ``physics`` with its child account ``optics``; ada is a user of both. bela is a user
    of ``chemistry``, which carl coordinates in Slurm.
    """
    site = make_site(directory)
    by = Authorship(who="root", why="to begin with")
    with site.ledger.transaction() as t:
        t.accounts.change("physics", by, owners=("olga",))
        t.accounts.create(Account(name="optics", parent="physics"), by)
        t.accounts.create(Account(name="chemistry"), by)
        t.accounts.set_user("physics", "ada", by, limit=500 * MICRO)
        t.accounts.set_user("optics", "ada", by, limit=None)
        t.accounts.set_user("chemistry", "bela", by, limit=None)
        t.transfers.deposit("chemistry", 10 * MICRO, by)
    site.standing = ClusterRoles(coordinators={"chemistry": frozenset({"carl"})})
    return site


def feed(site: Site, events: Sequence[Event]) -> list[Event]:
    """Apply events to jobs.db and run its timed work; return the events that it appended."""
    return [*site.feed(*events), *site.tick()]


def life(job_id: int, *, begin: int = 0, seconds: int = 3600, **fields: Any) -> list[Event]:
    """Return the events of a job that ran: pending, running and completed."""
    values: dict[str, Any] = {
        "account": "physics",
        "partition": "debug",
        "cpus": 2,
        "qos": "normal",
    }
    values |= {"tres_allocated": "cpu=2,mem=1G,node=1", "nodelist": "n1", **fields}
    start = NOON + timedelta(seconds=begin + 1)
    started: dict[str, Any] = {**values, "start": start}
    return [
        record(job_id, begin, seen=begin, **values),
        record(job_id, begin, "RUNNING", seen=begin + 2, **started),
        record(
            *(job_id, begin, "COMPLETED"),
            seen=begin + seconds + 2,
            end=begin + seconds + 1,
            exit_code=0,
            **started,
        ),
    ]


def charge(
    site: Site,
    job_id: int,
    *,
    hours: int = 1,
    user: str = "ada",
    account: str = "physics",
    partition: str = "debug",
    start: datetime = NOON,
) -> Charge:
    """Charge a job of one CPU, at one SU per hour."""
    job_charge = Charge(
        cluster="c1",
        job_id=job_id,
        first_submit=start - timedelta(minutes=1),
        account=account,
        user=user,
        partition=partition,
        amount=hours * MICRO,
        use=ResourceUse(tres={"cpu": 1}, start=start, seconds=3600 * hours, state="COMPLETED"),
        rate=1,
    )
    with site.ledger.transaction() as t:
        t.charges.post(job_charge, Authorship(who="bank", why="end", at=start))
    return job_charge


def balance(site: Site) -> int:
    """Return the balance of ``physics``, in micro-SU."""
    with site.ledger.reading() as t:
        return t.queries.get_balance("physics", site.now)


def jobs_of(site: Site) -> Jobs:
    """Open jobs.db for queries."""
    return Jobs(database_path(site.settings.state_dir))


def begin(site: Site, at: datetime) -> None:
    """Set the time when the bank began."""
    with site.ledger.transaction() as t:
        t.set_mark("began", str(to_micros(at)))


def config_of(directory: Path) -> Path:
    """Write a configuration file for commands on the ledger of a Site in this directory."""
    (directory / "state").mkdir(exist_ok=True)
    path = directory / "steward.toml"
    path.write_text(
        f'state_dir = "{directory}/state"\nrun_dir = "{directory}"\n'
        f'[cluster.c1]\nslurm = false\nspool = "{directory}/spool"\ntimezone = "UTC"\n'
        "[bank]\nenabled = true\n"
    )
    return path
