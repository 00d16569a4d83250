"""A bank to ask questions of: one ledger, its actions, and people of every standing."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from harness.bank import BankSite
from harness.events import NOON
from harness.site import ADA, BELA, COORDINATOR, NOBODY, OWNER, ROOT
from steward.bank.actions import ACTIONS
from steward.bank.ledger import Account, By
from steward.bank.money import MICRO
from steward.bank.records import Charge, Use
from steward.bank.room import BankRoom
from steward.core.access import Access, Asker, Standing
from steward.core.actions import Registry
from steward.core.config import AccessSettings

EVERYBODY = (ROOT, OWNER, COORDINATOR, ADA, BELA, NOBODY)


class AskingSite(BankSite):
    """The bank of ``c1``: ``physics`` with ``optics`` below it, owned by olga, with ada in both.

    carl coordinates ``chemistry`` in Slurm, where bela is.
    """

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        by = By(who="root", why="to begin with")
        with self.ledger.transaction() as t:
            t.accounts.change("physics", by, owners=("olga",))
            t.accounts.create(Account(name="optics", parent="physics"), by)
            t.accounts.create(Account(name="chemistry"), by)
            t.accounts.set_user("physics", "ada", by, limit=500 * MICRO)
            t.accounts.set_user("optics", "ada", by, limit=None)
            t.accounts.set_user("chemistry", "bela", by, limit=None)
            t.transfers.deposit("chemistry", 10 * MICRO, by)
        standing = Standing(coordinators={"chemistry": frozenset({"carl"})})
        access = Access(AccessSettings(), 0, lambda cluster: standing)
        self.room = BankRoom(self.settings, access=access, now=lambda: self.now)
        self.registry = Registry(ACTIONS, {"bank": lambda: self.room})

    def ask(self, name: str, asker: Asker = ROOT, /, **request: Any) -> Any:
        """The answer to a question."""
        action = f"bank.{name}"
        return self.registry.call(action, asker, self.registry.decode(action, request))

    def charge(
        self,
        job_id: int,
        *,
        hours: int = 1,
        user: str = "ada",
        account: str = "physics",
        partition: str = "debug",
        start: datetime = NOON,
    ) -> Charge:
        """Charge a job of one CPU, at a unit an hour."""
        charge = Charge(
            cluster="c1",
            job_id=job_id,
            first_submit=start - timedelta(minutes=1),
            account=account,
            user=user,
            partition=partition,
            amount=hours * MICRO,
            use=Use(tres={"cpu": 1}, start=start, seconds=3600 * hours, state="COMPLETED"),
            rate=1,
        )
        with self.ledger.transaction() as t:
            t.charges.charge(charge, By(who="bank", why="end", at=start))
        return charge


def run(*words: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """A command line, in this process: its exit code, what it printed, what it complained of."""
    from steward.cli.app import run as command

    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding="utf-8", write_through=True)
    err = io.StringIO()
    before = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = command(list(words))
    finally:
        sys.stdin = before
    out.flush()
    return code, written.getvalue().decode(), err.getvalue()


def config_of(directory: Path) -> Path:
    """A configuration file for commands that work on this ledger."""
    path = directory / "steward.toml"
    path.write_text(
        f'state_dir = "{directory}"\nsocket = "{directory}/s.sock"\n'
        f'[cluster.c1]\nslurm = false\nspool = "{directory}/spool"\ntimezone = "UTC"\n'
        "[bank]\nenabled = true\n"
    )
    return path
