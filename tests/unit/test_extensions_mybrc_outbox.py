"""Outbox for a remote server: the bank's holds and charges, and nothing else."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import bank
from harness.events import NOON
from harness.jobs import record
from harness.site import Site
from steward.bank.reconciliation import reconcile_cluster
from steward.bank.records import Hold
from steward.core.events import JOB_SEEN, RUN_END, RUN_START, Event
from steward.extensions.mybrc.outbox import MYBRC_KIND, RemoteMessage, queue_events


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = bank.make_site(tmp_path)
    yield made
    made.close()


def ended(site: Site, job_id: int, **fields: Any) -> list[Event]:
    """Return the end events of a job's runs from jobs.db."""
    return [
        event for event in bank.feed(site, bank.life(job_id, **fields)) if event.kind == RUN_END
    ]


def cancelled(job_id: int) -> list[Event]:
    """Return Slurm's record of a job that was cancelled before its start."""
    values: dict[str, Any] = {"account": "physics", "partition": "debug"}
    gone = record(job_id, 0, "CANCELLED", seen=60, end=59, **values)
    return [record(job_id, 0, seen=0, **values), gone]


def charge(site: Site) -> None:
    """Charge jobs that have ended and have a rate."""
    since = NOON - timedelta(hours=1)
    reconcile_cluster(site.settings, site.ledger, None, "c1", since, is_dry=False, now=site.now)


def told(
    site: Site, events: Sequence[Event], hours_ago: float, hold: int = 0
) -> list[tuple[str, int]]:
    """Return the messages in the outbox, if the bank began this long before noon."""
    holds = {}
    if hold:
        holds["c1", hold] = Hold(
            id="h", cluster="c1", job_id=hold, account="physics", amount=5, created_us=1
        )
    with site.ledger.transaction() as t:
        shown = [(one, holds.get((one.cluster, one.body.record.job_id))) for one in events]
        queue_events(t, shown, NOON - timedelta(hours=hours_ago))
    with site.ledger.reading() as t:
        items = t.outbox.list_due(MYBRC_KIND, site.now + timedelta(days=1))
    messages = [msgspec.json.decode(item.payload, type=RemoteMessage) for item in items]
    return [(message.op, message.told.job_id) for message in messages]


def test_runs_of_the_banks_time_are_told(site: Site) -> None:
    events = ended(site, 1)
    charge(site)
    assert told(site, events, 1) == [("change", 1)]


def test_a_run_that_never_began_is_told_without_a_charge(site: Site) -> None:
    gone = [event for event in bank.feed(site, cancelled(1)) if event.kind == RUN_END]
    assert told(site, gone, 1) == [("change", 1)]


def test_what_is_not_priced_yet_is_not_told(site: Site) -> None:
    events = ended(site, 1, partition="new")
    charge(site)
    assert told(site, events, 1) == []


def test_what_ended_before_there_was_a_bank_is_not(site: Site) -> None:
    assert told(site, ended(site, 1), -5) == []


def test_what_anothers_books_tell_is_not(site: Site) -> None:
    events = ended(site, 1)
    bodies = [msgspec.structs.replace(event.body, source="sacct") for event in events]
    imported = [
        msgspec.structs.replace(event, body=body)
        for event, body in zip(events, bodies, strict=True)
    ]
    assert told(site, imported, 1) == []


def test_a_hold_is_told_once_its_job_runs_and_only_once(site: Site) -> None:
    pending, running, _ = bank.life(1)
    # Slurm shows the start time that it expects of a pending job.
    body = msgspec.structs.replace(
        pending.body,
        record=msgspec.structs.replace(pending.body.record, start=NOON + timedelta(hours=3)),
    )
    bank.feed(site, [msgspec.structs.replace(pending, body=body)])
    waits = [event for event in site.journal if event.kind == JOB_SEEN]
    assert waits
    assert waits[-1].body.record.start is not None
    assert told(site, waits, 1, hold=1) == []
    bank.feed(site, [running])
    runs = [event for event in site.journal[1:] if event.kind in (JOB_SEEN, RUN_START)]
    assert any(event.kind == RUN_START for event in runs)
    assert told(site, runs, 1) == []
    assert told(site, runs, 1, hold=1) == [("hold", 1)]
    assert told(site, runs, 1, hold=1) == [("hold", 1)]
