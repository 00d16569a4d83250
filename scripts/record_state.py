"""Records what this release leaves in a state directory, for the tests of later ones.

``PYTHONPATH=src:tests:bench python scripts/record_state.py OUT``: a daemon
captures three scripts, takes in the lives of four jobs and charges them; a hold
is left open. Each database is written as SQL to OUT, but for what is made again
from the archive, and beside them are the archive and the job log.
"""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import storm
from harness.bank import life, rate
from harness.events import NOON
from steward.accounting.settings import AccountingSettings
from steward.archive.settings import FilesSinkSettings
from steward.bank.gate.balances import OpenHold
from steward.bank.gate.store import GateStore
from steward.bank.ledger import Account, Authorship, open_ledger
from steward.bank.money import MICRO
from steward.bank.settings import BankSettings
from steward.core.config import ArchiveSettings, JournalSettings, Settings
from steward.core.config.reader import LoadedConfig, render_config
from steward.core.journal import JournalLink, JournalUnavailable
from steward.core.journal.control import WritePositions, send_command
from steward.core.waits import Stop
from steward.slurm.settings import ClusterSettings

WAIT_S = 60.0
BY = Authorship(who="root")


def settings_in(home: Path) -> Settings:
    """Return settings of one cluster without a Slurm; the journal keeps all events."""
    return Settings(
        state_dir=str(home / "state"),
        run_dir=str(home),
        cluster={"c1": ClusterSettings(slurm=False, spool=str(home / "spool"), timezone="UTC")},
        archive=ArchiveSettings(
            catalog=False, sink={"files": FilesSinkSettings(path=str(home / "archive"))}
        ),
        journal=JournalSettings(keep_s=365 * 86400.0),
        accounting=AccountingSettings(type="jobacct/log"),
        bank=BankSettings(enabled=True),
    )


def open_bank(settings: Settings) -> None:
    """Create an account with SU, a rate, and a bank that began before the jobs ran."""
    ledger = open_ledger(settings)
    with ledger.transaction() as t:
        t.accounts.create(Account(name="physics", owners=("olga",)), BY)
        t.accounts.set_user("physics", "ada", BY, limit=500 * MICRO)
        t.transfers.deposit("physics", 1000 * MICRO, BY)
        t.rates.add(rate("debug"), BY)
        t.set_mark("began", str(int((NOON - timedelta(days=1)).timestamp() * 1e6)))
    ledger.close()


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > end:
            raise SystemExit(f"{what} did not come about")
        time.sleep(0.1)


def charged(settings: Settings) -> int:
    """Return the number of charges in the ledger."""
    ledger = open_ledger(settings)
    try:
        with ledger.reading() as t:
            return len(t.charges.list_since(NOON - timedelta(days=1), limit=100))
    finally:
        ledger.close()


def run(settings: Settings, home: Path) -> None:
    """Run a daemon until it has applied all events."""
    config = home / "steward.toml"
    config.write_text(render_config(LoadedConfig(settings)))
    (home / "spool").mkdir()
    (home / "gate").mkdir()
    for job_id in (1, 2, 3):
        storm.write_job(str(home / "spool"), job_id)
    with (home / "log").open("wb") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "steward", "serve", "--config", str(config)],
            stderr=log,
            stdout=log,
        )
    try:
        events = [event for job in range(4) for event in life(10 + job, begin=600 * job)]

        def append() -> bool:
            try:
                send_command(settings.state_dir, WritePositions())
            except JournalUnavailable:
                return False
            JournalLink(settings.state_dir, Stop()).append(events)
            return True

        until(append, "the journal")
        until(lambda: charged(settings) == 4, "the charges")
        until(lambda: len(list((home / "archive").rglob("*.sh"))) == 3, "the archive")
        time.sleep(2.0)
    finally:
        daemon.terminate()
        daemon.wait(30)


def hold(settings: Settings) -> None:
    """Leave a hold open."""
    store = GateStore(settings.state_dir)
    now_us = time.time_ns() // 1000
    with store.transaction():
        store.insert(
            OpenHold(
                number=store.next_number(),
                id="recorded",
                cluster="c1",
                job_id=99,
                account="physics",
                payer="physics",
                uid=4001,
                user="ada",
                amount=7 * MICRO,
                remaining=7 * MICRO,
                shares=((1, 7 * MICRO),),
                confirmed=True,
                created_us=now_us,
                expires_us=0,
            ),
            None,
            None,
        )
    store.close()


def dump(state: Path, out: Path) -> None:
    """Write every database as SQL."""
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(state.glob("*.db")):
        # Nobody else has it open any more, and our own library cannot dump.
        db = sqlite3.connect(path)
        version = db.execute("PRAGMA user_version").fetchone()[0]
        lines = [*db.iterdump(), f"PRAGMA user_version={version};"]
        (out / f"{path.stem}.sql").write_text(
            "\n".join(lines).replace(str(state), "@STATE@") + "\n"
        )
        db.close()


def main() -> None:
    """Record the state."""
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        settings = settings_in(home)
        (home / "state").mkdir(mode=0o700)
        open_bank(settings)
        run(settings, home)
        hold(settings)
        out = Path(sys.argv[1])
        dump(home / "state", out)
        shutil.copytree(
            home / "archive",
            out / "archive",
            ignore=shutil.ignore_patterns(".incoming", ".steward-keeper"),
        )
        shutil.copytree(home / "state" / "joblog", out / "joblog")


if __name__ == "__main__":
    main()
