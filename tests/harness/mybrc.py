"""myBRC Sites: a bank that reports SU holds and charges to a remote bank."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from harness import bank
from harness.events import NOON
from harness.site import Site
from steward.bank.reconciliation import reconcile_cluster
from steward.bank.records import Hold
from steward.bank.settings import BankSettings, RemoteBankSettings
from steward.core.events import Event
from steward.core.waits import Stop
from steward.extensions.mybrc.outbox import queue_events
from steward.extensions.mybrc.remote import OutboxSender

HELD = 51_670_000
"""SU hold of each job of :meth:`ReportingSite.show`, in micro-SU."""


class ReportingSite(Site):
    """A bank with the worker that reports to a myBRC server.

    Args:
        directory: Directory of the Site's files.
        url: URL of the server's API.
        token: Contents of the token file.
        money: SU in account ``physics``.
        began: When the bank began.
        remote: Other keys of [bank.remote].
    """

    def __init__(
        self,
        directory: Path,
        url: str,
        *,
        token: str = "Token x\n",
        money: int = 1000,
        began: datetime = NOON - timedelta(hours=1),
        **remote: Any,
    ) -> None:
        (directory / "token").write_text(token)
        keys = {"url": url, "token_file": str(directory / "token"), **remote}
        self.remote = RemoteBankSettings(**keys)
        super().__init__(directory, bank=BankSettings(enabled=True, remote=self.remote))
        bank.found_bank(self, money)
        bank.begin(self, began)
        self._began = began
        self._passing = self._open_passing()

    def _open_passing(self) -> OutboxSender:
        return OutboxSender(self.settings, self.ledger, lambda: self.now)

    def restart(self) -> None:
        """Restart the worker that sends the outbox."""
        self._passing.close()
        self._passing = self._open_passing()

    def show(self, events: Sequence[Event], *, is_sent: bool = True) -> None:
        """Apply a job's events with an SU hold; charge, reconcile and report the job."""
        begin = len(self.journal)
        bank.feed(self, events)
        self.reconcile()
        self.relay(self.journal[begin:], HELD)
        if is_sent:
            self.send()

    def reconcile(self) -> None:
        """Reconcile charges, as the bank's timed work and ``steward bank reconcile`` do."""
        books = (self.settings, self.ledger, None, "c1", self._began)
        reconcile_cluster(*books, is_dry=False, now=self.now)

    def relay(self, events: Sequence[Event], held: int = 0) -> None:
        """Write messages about events to the outbox, with an SU hold for each event's job."""

        def hold(event: Event) -> Hold | None:
            job_id = event.body.record.job_id
            name = {"id": "h", "cluster": "c1", "job_id": job_id, "account": "physics"}
            return Hold(**name, amount=held, created_us=1) if held else None

        with self.ledger.transaction() as t:
            queue_events(t, [(event, hold(event)) for event in events], self._began)

    def send(self) -> None:
        """Send the messages of the outbox."""
        self._passing.send_once(Stop(), lambda: None)

    def close(self) -> None:
        self._passing.close()
        super().close()
