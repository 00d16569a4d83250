"""Scheduled work of the bank: expire allocations, report thresholds, send notices.

:class:`ScheduledWork` also sends monthly statements, copies the gate's holds and rejections into
journal and ledger (``copy_gate_facts``), and deletes old rejections and settlements. The bank's
consumer calls ``copy_gate_facts`` and ``run_due_work`` about every second.

Events and notices are put into the ledger's outbox in the transaction that causes them, and
sent from there: an unavailable journal or mail server only delays them.
"""

import logging
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.gate.client import GateClient
from steward.bank.gate.requests import GateFact
from steward.bank.ledger import Authorship, OutboxItem
from steward.bank.notices import (
    Notice,
    NoticeRefused,
    keep_highest_thresholds,
    queue_threshold_notices,
    send_notice,
    split_notice,
    write_threshold_notice,
)
from steward.bank.records import AccountBooks
from steward.core.config import Settings
from steward.core.consumers import Append
from steward.core.errors import Unavailable
from steward.core.events import BANK_THRESHOLD, BankThreshold, Event
from steward.core.notifications import MailRejected
from steward.core.principals import BANK
from steward.core.timestamps import from_micros, to_micros

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger, Transaction


log = logging.getLogger(__name__)

BANK_AUTHOR: Final = BANK.name
"""Author of automatic changes in the ledger."""

_EVENT: Final = "event"
"""Kind of events in the outbox."""
_NOTICE: Final = "notice"
"""Kind of notices in the outbox."""
_FACTS_MARK: Final = "facts"
"""Name of the ledger's note with the last gate record copied."""
_FACTS_AT_ONCE: Final = 500
"""Maximum number of the gate's records copied at once."""
_HOUR_S: Final = 3600.0
_EXPIRE_S: Final = 60.0
"""Shortest interval between attempts to empty ended allocations, in seconds."""
_SETTLED_MARK: Final = "settled"
"""Name of the ledger's note with the last deletion of applied settlements."""
_DAY: Final = timedelta(days=1)
_REJECTION_RETENTION: Final = timedelta(days=90)
"""Retention of rejections."""
_FIRST_RETRY_S: Final = 30.0
"""First interval between attempts to send a notice, in seconds; it doubles each time."""
_LONGEST_RETRY_S: Final = 3600.0
"""Longest interval between attempts to send a notice, in seconds."""
_MAX_REJECTED_TRIES: Final = 5
"""Attempts to send a rejected notice: a mailbox may be full, a program misconfigured."""
_MAX_TRIES: Final = 175
"""Attempts to send an undeliverable notice: about a week."""
_SOURCE: Final = "bank"


class _PendingEvent(msgspec.Struct, frozen=True):
    """Event of the bank in the outbox."""

    key: str
    at: datetime
    body: BankThreshold


class ScheduledWork:
    """Scheduled work of the bank's process.

    Args:
        settings: The whole configuration.
        ledger: The ledger.
        gate: Client of the gate.
    """

    def __init__(self, settings: Settings, ledger: "Ledger", gate: GateClient) -> None:
        self._settings = settings
        self._ledger = ledger
        self._gate = gate
        self._cluster = next(iter(settings.cluster), "")
        self._accounts: dict[str, AccountBooks] = {}
        self._checked_seq = 0
        self._full_check_at: datetime | None = None
        self._expiry_at: datetime | None = None
        self._statements_at: datetime | None = None
        self._pruning_at: datetime | None = None

    def run_due_work(self, now: datetime, append: Append) -> None:
        """Do what is due.

        Raises:
            Unavailable: The ledger, the gate or the journal is unavailable.
        """
        self._check_thresholds(now)
        self._expire_allocations(now)
        self._queue_statements(now)
        self.send_events(append)
        self._send_notice(now)
        self._prune(now)

    def copy_gate_facts(self, append: Append) -> None:
        """Copy what the gate did: holds into the journal, rejections into the ledger.

        Raises:
            Unavailable: Gate, ledger or journal is unavailable.
        """
        while True:
            with self._ledger.reading() as t:
                after = int(t.read_mark(_FACTS_MARK) or 0)
            facts = self._gate.list_facts(after, limit=_FACTS_AT_ONCE)
            if not facts:
                return
            append(
                [_make_gate_event(fact, self._cluster) for fact in facts if fact.hold is not None]
            )
            with self._ledger.transaction() as t:
                for fact in facts:
                    if fact.rejection is not None:
                        t.rejections.add(fact.rejection)
                t.set_mark(_FACTS_MARK, str(facts[-1].seq))
            if len(facts) < _FACTS_AT_ONCE:
                return

    def _check_thresholds(self, now: datetime) -> None:
        """Report thresholds of changed accounts, and every hour of all accounts."""
        with self._ledger.reading() as t:
            if t.seq == self._checked_seq and not self._is_due(self._full_check_at, now):
                return
            books = t.export_books(after_seq=self._checked_seq)
        if books.whole:
            self._accounts = {}
        self._accounts |= {account.name: account for account in books.accounts}
        accounts_to_check: Iterable[AccountBooks] = books.accounts
        if self._is_due(self._full_check_at, now):
            self._full_check_at = now + timedelta(seconds=_HOUR_S)
            accounts_to_check = self._accounts.values()
        accounts = list(accounts_to_check)
        if not any(True for threshold in accounts for _ in threshold.allocations):
            self._checked_seq = books.seq
            return
        with self._ledger.transaction() as t:
            thresholds = queue_threshold_notices(t, accounts, self._settings.bank, now)
            for threshold in thresholds:
                key = f"{threshold.allocation}:{threshold.kind}:{threshold.value}:{threshold.total}"
                event = _PendingEvent(key, now, threshold)
                t.outbox.add(_EVENT, msgspec.json.encode(event), key=f"{key}:{to_micros(now)}")
            for threshold in keep_highest_thresholds(thresholds):
                self._queue_notice(t, threshold)
        self._checked_seq = books.seq

    def _queue_notice(self, t: "Transaction", threshold: BankThreshold) -> None:
        """Put the notice of a threshold into the outbox."""
        account = t.accounts.get(threshold.account)
        owners = account.owners if account else ()
        notice = write_threshold_notice(self._settings, threshold, owners, self._cluster)
        t.outbox.add(_NOTICE, msgspec.json.encode(notice))

    def _expire_allocations(self, now: datetime) -> None:
        """Empty allocations that ended, except for what running jobs still need."""
        now_us = to_micros(now)
        ended_numbers = [
            one.number
            for account in self._accounts.values()
            for one in account.allocations
            if one.end_us and one.end_us <= now_us and one.balance
        ]
        if not ended_numbers or not self._is_due(self._expiry_at, now):
            return
        self._expiry_at = now + timedelta(seconds=_EXPIRE_S)
        reserved = {number: self._gate.sum_on_allocation(number) for number in ended_numbers}
        with self._ledger.transaction() as t:
            author = Authorship(who=BANK_AUTHOR, why="the allocation ended", at=now)
            for one in t.transfers.expire(author, reserved=reserved):
                log.info("%s: %s of account %s", one.kind, one.amount, one.account)

    def _queue_statements(self, now: datetime) -> None:
        """Queue the monthly statements, checked once an hour."""
        if not self._settings.bank.notify.statements or not self._is_due(self._statements_at, now):
            return
        from steward.bank.notices import queue_statements

        self._statements_at = now + timedelta(seconds=_HOUR_S)
        queue_statements(self._ledger, self._settings, now)

    def _prune(self, now: datetime) -> None:
        """Delete, once a day, rejections older than 90 days, and settlements a day after use."""
        if not self._is_due(self._pruning_at, now):
            return
        self._pruning_at = now + timedelta(seconds=_HOUR_S)
        with self._ledger.reading() as t:
            at_us, _, settled_before = t.read_mark(_SETTLED_MARK).partition(" ")
        if at_us and from_micros(int(at_us)) + _DAY > now:
            return
        settled = self._gate.get_status().settled
        with self._ledger.transaction() as t:
            t.rejections.prune(now - _REJECTION_RETENTION)
            # A ledger restored from a backup may count from a lower number.
            t.settlements.prune(min(int(settled_before or 0), settled))
            t.set_mark(_SETTLED_MARK, f"{to_micros(now)} {settled}")

    def send_events(self, append: Append) -> None:
        """Append pending events to the journal, then mark them sent; a repeat keeps its key."""
        now = from_micros(2**52)
        with self._ledger.reading() as t:
            items = t.outbox.list_due(_EVENT, now)
        if not items:
            return
        append([self._decode_event(item.payload) for item in items])
        with self._ledger.transaction() as t:
            for item in items:
                t.outbox.mark_delivered(item.id)

    def _decode_event(self, payload: bytes) -> Event:
        event = msgspec.json.decode(payload, type=_PendingEvent)
        return Event(
            kind=BANK_THRESHOLD,
            cluster=self._cluster,
            key=f"{BANK_THRESHOLD}:{event.key}:{to_micros(event.at)}",
            at=event.at,
            seen_at=event.at,
            source=_SOURCE,
            body=event.body,
        )

    def _send_notice(self, now: datetime) -> None:
        """Send one pending notice."""
        with self._ledger.reading() as t:
            items = t.outbox.list_due(_NOTICE, now)
        # Notices that fail repeatedly come after those not tried yet.
        for item in sorted(items, key=lambda item: item.tries)[:1]:
            notice = msgspec.json.decode(item.payload, type=Notice)
            if not notice.by:
                self._split_notice(item.id, notice)
                continue
            # Send one notice a turn, because charging waits while a mail server is slow.
            try:
                send_notice(self._settings, notice)
            except Unavailable as error:
                self._record_failure(item, notice, error, now)
            else:
                with self._ledger.transaction() as t:
                    t.outbox.mark_delivered(item.id)

    def _record_failure(
        self, item: OutboxItem, notice: Notice, error: Unavailable, now: datetime
    ) -> None:
        """Retry at growing intervals; make a rejected or long undelivered notice a dead letter."""
        is_rejected = isinstance(error, MailRejected | NoticeRefused)
        if item.tries + 1 >= (_MAX_REJECTED_TRIES if is_rejected else _MAX_TRIES):
            log.error(
                "notice %d (%s) is undelivered after %d attempts, see 'steward bank notices': %s",
                *(item.id, notice.subject, item.tries + 1, error),
            )
            with self._ledger.transaction() as t:
                t.outbox.make_dead_letter(item.id, str(error))
            return
        wait_s = min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2 ** min(item.tries, 10))
        log.warning("cannot send a notice, retrying later: %s", error)
        with self._ledger.transaction() as t:
            t.outbox.record_failure(item.id, now + timedelta(seconds=wait_s), str(error))

    def _split_notice(self, item_id: int, notice: Notice) -> None:
        """Split a notice so that each way of sending it is retried separately."""
        with self._ledger.transaction() as t:
            for single_notice in split_notice(self._settings, notice):
                t.outbox.add(_NOTICE, msgspec.json.encode(single_notice))
            t.outbox.mark_delivered(item_id)

    @staticmethod
    def _is_due(at: datetime | None, now: datetime) -> bool:
        return at is None or now >= at


def _make_gate_event(fact: GateFact, cluster: str) -> Event:
    """Convert a record of the gate into an event."""
    at = from_micros(fact.at_us)
    return Event(
        kind=fact.kind,
        cluster=fact.cluster or cluster,
        key=f"gate:{fact.seq}",
        at=at,
        seen_at=at,
        source="gate",
        body=fact.hold,
    )
