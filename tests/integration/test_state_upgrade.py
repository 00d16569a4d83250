"""State directories of earlier releases are migrated; those of later releases are rejected."""

import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pysqlite3 import dbapi2
from spool_daemon import Daemon, ask, settings_in, submit

from steward.accounting.settings import AccountingSettings
from steward.admin.journal import ListRequest
from steward.bank.errors import GateUnavailable
from steward.bank.gate.client import GateClient
from steward.bank.ledger import open_ledger
from steward.bank.money import MICRO
from steward.bank.settings import BankSettings
from steward.core.access import Caller
from steward.core.config import Settings
from steward.daemon.contexts import make_registry
from steward.slurm.settings import ClusterSettings

pytestmark = pytest.mark.timeout(900)

STATES = Path(__file__).parents[1] / "fixtures" / "state"
RECORDED = sorted(path.name for path in STATES.iterdir() if path.is_dir())


def settings_of(home: Path) -> Settings:
    """Return the settings of the recorded states, see scripts/record_state.py."""
    settings = settings_in(home)
    return msgspec.structs.replace(
        settings,
        # It is made again from the archive, and so is not recorded.
        archive=msgspec.structs.replace(settings.archive, catalog=False),
        cluster={"c1": ClusterSettings(slurm=False, spool=str(home / "spool"), timezone="UTC")},
        accounting=AccountingSettings(type="jobacct/log"),
        bank=BankSettings(enabled=True),
    )


def put(recorded: str, settings: Settings) -> None:
    """Put the databases of a recorded state in place."""
    state = Path(settings.state_dir)
    state.mkdir(mode=0o700)
    shutil.copytree(STATES / recorded / "archive", settings.sink_path("files"))
    shutil.copytree(STATES / recorded / "joblog", state / "joblog")
    for dump in (STATES / recorded).glob("*.sql"):
        db = dbapi2.connect(str(state / f"{dump.stem}.db"), isolation_level=None)
        db.executescript(dump.read_text().replace("@STATE@", str(state)))
        db.close()


def made(settings: Settings) -> dict[str, Any]:
    """Return each database's schema version, and the names of its tables, indexes and triggers."""
    found: dict[str, Any] = {}
    for path in sorted(Path(settings.state_dir).glob("*.db")):
        name = path.name
        ((version,),) = ask(settings, name, "PRAGMA user_version") or [(0,)]
        db = dbapi2.connect(f"file:{path}?mode=ro", uri=True)
        things = db.execute(
            "SELECT type, name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%' ORDER BY 1, 2"
        ).fetchall()
        if name == "ledger.db":
            version = db.execute("SELECT version_num FROM alembic_version").fetchone()[0]
        db.close()
        found[name] = (version, things)
    return found


def books(settings: Settings) -> tuple[int, dict[str, int], list[Any]]:
    """Return the balance, the charges, and the findings of the ledger's proof."""
    ledger = open_ledger(settings)
    try:
        with ledger.reading() as t:
            rows = t.charges.list_since(datetime(2026, 1, 1, tzinfo=UTC), limit=100)
            charges = {row.charge.key: row.charge.amount for row in rows}
            return t.queries.get_balance("physics"), charges, list(t.check())
    finally:
        ledger.close()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "recorded",
    [name if name == "0.1.0" else pytest.param(name, marks=pytest.mark.wide) for name in RECORDED],
)
def test_what_an_earlier_release_left_is_taken_over(tmp_path: Path, recorded: str) -> None:
    (tmp_path / "fresh").mkdir()
    fresh = settings_of(tmp_path / "fresh")
    with Daemon(fresh, tmp_path / "fresh") as daemon:
        daemon.wait(lambda: daemon.is_quiet(0), 60)
        # A process that ends before it has created its tables has created none.
        daemon.wait(lambda: has_told_the_gate(fresh), 60)
        assert daemon.stop() == 0

    settings = settings_of(tmp_path)
    put(recorded, settings)
    charged = dict(ask_ledger(settings))
    assert len(charged) == 4
    with Daemon(settings, tmp_path) as daemon:
        submit(tmp_path, range(4, 6))
        daemon.wait(lambda: len(ask(settings, "jobs.db", "SELECT key FROM script")) == 5, 60)
        daemon.wait(lambda: is_up_to_date(settings), 60)
        assert ask(settings, "journal.db", "SELECT * FROM dead") == []
        answer = make_registry(settings).call(
            "journal.list", Caller(uid=0, user="root"), ListRequest(after=1, limit=1000)
        )
        assert not [event for event in answer.events if "error" in dir(event.body)]
        daemon.wait(lambda: holds(settings) == {"recorded": 7 * MICRO}, 60)
        assert daemon.stop() == 0
        assert " error " not in daemon.log()
    balance, charges, findings = books(settings)
    assert charges == charged
    assert findings == []
    assert balance == 1000 * MICRO - sum(charges.values())
    now, want = made(settings), made(fresh)
    assert {name: now.get(name) for name in want} == want


def ask_ledger(settings: Settings) -> list[tuple[str, int]]:
    """Return the charges, without a migration of the ledger."""
    db = dbapi2.connect(os.path.join(settings.state_dir, "ledger.db"))
    rows = db.execute('SELECT "key", amount FROM charge').fetchall()
    db.close()
    return [(key, amount) for key, amount in rows]


def is_up_to_date(settings: Settings) -> bool:
    rows = ask(settings, "journal.db", "SELECT min(position) FROM consumer")
    head = ask(settings, "journal.db", "SELECT seq FROM sqlite_sequence WHERE name = 'event'")
    return bool(rows and head and rows[0][0] is not None and rows[0][0] >= head[0][0])


def has_told_the_gate(settings: Settings) -> bool:
    """Return whether the gate and the ledger are available."""
    try:
        return GateClient(settings.state_dir).get_status().books_at_us > 0
    except GateUnavailable:
        return False


def holds(settings: Settings) -> dict[str, int]:
    try:
        return {one.id: one.remaining for one in GateClient(settings.state_dir).list_holds()}
    except GateUnavailable:
        return {}


def test_a_journal_of_a_later_release_ends_the_daemon_with_one_line(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    put("0.1.0", settings)
    Daemon(settings, tmp_path)
    set_version(settings, "journal.db")
    before = Path(settings.state_dir, "journal.db").read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "steward", "serve", "--config", str(tmp_path / "steward.toml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert re.search(
        r"journal\.db was written by a newer Steward \(schema 999, this one knows \d+\): "
        r"install that version again, or restore an older backup with 'steward restore'",
        done.stderr,
    )
    assert Path(settings.state_dir, "journal.db").read_bytes() == before


@pytest.mark.wide
@pytest.mark.parametrize("name", ["jobs.db", "gate.db", "ledger.db", "accounting-log.db"])
def test_of_another_database_its_part_says_so_and_the_others_go_on(
    tmp_path: Path, name: str
) -> None:
    settings = settings_of(tmp_path)
    put("0.1.0", settings)
    set_version(settings, name)
    with Daemon(settings, tmp_path) as daemon:
        daemon.wait(lambda: "was written by a newer Steward" in daemon.log())
        line = next(x for x in daemon.log().splitlines() if "written by a newer" in x)
        assert name in line
        assert "install that version again" in line
        submit(tmp_path, range(4, 6))
        daemon.wait(lambda: len(list((tmp_path / "archive").rglob("*.sh"))) == 5, 60)


def set_version(settings: Settings, name: str) -> None:
    db = dbapi2.connect(os.path.join(settings.state_dir, name), isolation_level=None)
    if name == "ledger.db":
        db.execute("UPDATE alembic_version SET version_num = '9999'")
    else:
        db.execute("PRAGMA user_version=999")
    db.close()
