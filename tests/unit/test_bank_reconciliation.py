from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from harness import bank
from harness.bank import BY, HOUR, rate
from harness.events import NOON, at
from harness.imports import imported, imported_run
from harness.jobs import record
from harness.site import Site
from steward.bank.backfill import backfill_cluster
from steward.bank.billing import Pricing
from steward.bank.errors import GateUnavailable
from steward.bank.ledger import Authorship
from steward.bank.reconciliation import (
    DueCharges,
    RegularReconciliation,
    mark_unpriced,
    post_due_charges,
    read_own_charges,
    reconcile_cluster,
)
from steward.bank.records import Rate
from steward.core.access import Caller
from steward.core.events import JOB_END, RUN_END, Event, JobFacts
from steward.core.timestamps import to_micros, to_micros_or_zero
from steward.slurm.sacct import SacctHistory, parse_job_row
from steward.slurm.settings import ClusterSettings
from steward.slurm.slurmdbd import merge_resized_runs
from steward.slurm.users import NameResolver


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = bank.make_site(tmp_path)
    yield site
    site.close()


def compared(site: Site, *, is_dry: bool = False) -> list[tuple[int, int | None, int | None]]:
    found = reconcile_cluster(
        *(site.settings, site.ledger, None, "c1", NOON - timedelta(hours=1)),
        is_dry=is_dry,
        now=site.now,
    ).differences
    return [(one.job_id, one.charged, one.recomputed) for one in found]


def test_what_was_not_charged_is_charged_once(site: Site) -> None:
    bank.feed(site, bank.life(1))
    bank.feed(site, bank.life(2, seconds=1800))
    assert compared(site, is_dry=True) == [(1, None, 2 * HOUR), (2, None, HOUR)]
    assert bank.balance(site) == 1000 * HOUR
    assert len(compared(site)) == 2
    assert bank.balance(site) == 997 * HOUR
    assert compared(site) == []
    assert site.ledger.check() == []


def test_a_wrong_charge_is_corrected_by_an_entry_that_says_why(site: Site) -> None:
    bank.feed(site, bank.life(1))
    compared(site)
    with site.ledger.transaction() as t:
        (row,) = t.charges.list_of_job("c1", 1)
        wrong = type(row.charge)(
            **{
                name: getattr(row.charge, name)
                for name in row.charge.__struct_fields__
                if name not in ("amount", "facts")
            },
            amount=5 * HOUR,
        )
        t.charges.post(wrong, Authorship(who="test", why="a fault"))
    assert bank.balance(site) == 995 * HOUR
    assert compared(site) == [(1, 5 * HOUR, 2 * HOUR)]
    assert bank.balance(site) == 998 * HOUR
    with site.ledger.reading() as t:
        last = t.charges.list_versions(row.charge.key)[-1]
    assert "its record" in last.why
    assert last.added == -3 * HOUR


def test_what_ended_before_the_bank_began_is_a_backfills(site: Site) -> None:
    bank.feed(site, bank.life(1))
    bank.begin(site, NOON + timedelta(hours=2))
    assert compared(site) == []
    since, until = NOON - timedelta(hours=1), NOON + timedelta(hours=5)
    args = (site.settings, site.ledger, "c1", since, until)
    dry = backfill_cluster(*args, is_dry=True, now=site.now)
    assert (dry.charges, dry.amount) == (1, 2 * HOUR)
    assert bank.balance(site) == 1000 * HOUR
    assert backfill_cluster(*args, is_dry=False, now=site.now) == dry
    assert bank.balance(site) == 998 * HOUR
    again = backfill_cluster(*args, is_dry=False, now=site.now)
    assert (again.charges, again.amount) == (0, 0)


def test_an_import_with_another_restart_count_is_not_charged_again(site: Site) -> None:
    bank.feed(site, bank.life(1))
    assert len(compared(site)) == 1
    fields: dict[str, Any] = {"account": "physics", "partition": "debug", "qos": "normal"}
    bank.feed(site, [imported_run(1, 0, 3601, start=at(1), restarts=1, **fields)])
    done = backfill_cluster(
        *(site.settings, site.ledger, "c1", NOON, NOON + timedelta(hours=5)),
        is_dry=False,
        now=site.now,
    )
    assert (done.charges, bank.balance(site)) == (0, 998 * HOUR)


def test_the_ledger_names_who_asked_for_a_comparison_or_a_backfill(site: Site) -> None:
    def list_authors(job_id: int) -> list[str]:
        with site.ledger.reading() as t:
            (row,) = t.charges.list_of_job("c1", job_id)
            assert row.charge.why in ("reconcile", "backfill")
            return [version.who for version in t.charges.list_versions(row.charge.key)]

    olga = Caller(uid=0, user="olga")
    since = NOON.isoformat()
    bank.feed(site, bank.life(1))
    compared(site)
    for job_id, action in ((2, "bank.reconcile"), (3, "bank.backfill")):
        bank.feed(site, bank.life(job_id))
        with suppress(GateUnavailable):  # no gate runs here: it is notified after the ledger
            site.ask(action, olga, cluster="c1", since=since)
    bank.feed(site, bank.life(4))
    backfill_cluster(
        *(site.settings, site.ledger, "c1", NOON, NOON + timedelta(hours=5)),
        is_dry=False,
        now=site.now,
    )
    assert [list_authors(job_id) for job_id in (1, 2, 3, 4)] == [
        ["reconcile"],
        ["olga"],
        ["olga"],
        ["backfill"],
    ]


def test_a_backfill_leaves_what_was_charged_already(site: Site) -> None:
    bank.feed(site, bank.life(1))
    compared(site)
    with site.ledger.transaction() as t:
        (row,) = t.charges.list_of_job("c1", 1)
        other = msgspec.structs.replace(row.charge, amount=5 * HOUR)
        t.charges.post(other, Authorship(who="root", why="agreed with its user"))
    bank.feed(site, bank.life(2))
    since, until = NOON - timedelta(hours=1), NOON + timedelta(hours=5)
    args = (site.settings, site.ledger, "c1", since, until)
    done = backfill_cluster(*args, is_dry=False, now=site.now)
    assert (done.charges, done.amount) == (1, 2 * HOUR)
    assert bank.balance(site) == 993 * HOUR


def test_a_job_without_a_rate_is_charged_when_there_is_one(site: Site) -> None:
    bank.feed(site, bank.life(1, partition="new"))
    (found,) = reconcile_cluster(
        *(site.settings, site.ledger, None, "c1", NOON - timedelta(hours=1)),
        is_dry=False,
        now=site.now,
    ).differences
    assert (found.recomputed, found.done) == (None, False)
    assert "partition new" in found.reason
    with site.ledger.transaction() as t:
        t.rates.add(rate("new", 3 * HOUR), BY)
    assert compared(site) == [(1, None, 6 * HOUR)]


def test_every_run_of_a_requeued_job_is_charged_by_itself(site: Site) -> None:
    fields: dict[str, Any] = {
        "account": "physics",
        "partition": "debug",
        "tres_allocated": "cpu=1,node=1",
    }
    shown: dict[str, Any] = {**fields, "nodelist": "n1", "cpus": 1}
    start, again = NOON + timedelta(seconds=10), NOON + timedelta(seconds=8000)
    bank.feed(
        site,
        [
            record(1, 0, seen=1, **fields),
            record(1, 0, "RUNNING", seen=11, start=start, **shown),
            record(1, 0, "REQUEUED", seen=3611, start=start, end=3610, **shown),
            record(1, 3611, seen=3620, restarts=1, **fields),
            record(1, 3611, "RUNNING", seen=8001, start=again, restarts=1, **shown),
            record(1, 3611, "COMPLETED", seen=9801, start=again, end=9800, restarts=1, **shown),
        ],
    )
    assert compared(site) == [(1, None, HOUR), (1, None, HOUR // 2)]
    with site.ledger.reading() as t:
        rows = t.charges.list_of_job("c1", 1)
    assert {(row.charge.first_submit, row.charge.restarts) for row in rows} == {
        (NOON, 0),
        (NOON, 1),
    }


def test_a_resized_job_is_charged_piece_by_piece(site: Site) -> None:
    fields: dict[str, Any] = {"account": "physics", "partition": "debug", "nodelist": "n[1-2]"}
    start = NOON + timedelta(seconds=10)
    large: dict[str, Any] = {**fields, "tres_allocated": "cpu=4,node=2", "start": start}
    small: dict[str, Any] = {
        **fields,
        "tres_allocated": "cpu=2,node=1",
        "start": start,
        "nodelist": "n1",
    }
    bank.feed(
        site,
        [
            record(1, 0, "RUNNING", seen=11, **large),
            record(1, 0, "RESIZING", seen=1811, end=1810, source="jobcomp", **large),
            record(1, 0, "RUNNING", seen=1815, **small),
            record(1, 0, "COMPLETED", seen=5411, end=5410, source="jobcomp", **small),
        ],
    )
    assert compared(site) == [(1, None, 2 * HOUR), (1, None, 2 * HOUR)]
    assert compared(site) == []


def test_what_never_ran_or_ran_elsewhere_is_free(site: Site) -> None:
    bank.feed(
        site,
        [
            record(1, 0, seen=1, account="physics", partition="debug"),
            record(1, 0, "CANCELLED", seen=100, end=99, account="physics", partition="debug"),
        ],
    )
    bank.feed(site, bank.life(2)[:2])
    bank.feed(site, [record(2, 0, "REVOKED", seen=50, end=49, start=NOON, account="physics")])
    assert compared(site) == []


def test_the_clocks_turn_looks_again_at_what_had_no_rate(site: Site) -> None:
    bank.feed(site, bank.life(1, partition="new"))
    rates: list[Rate] = []

    def pricing(_cluster: str) -> Pricing:
        return Pricing(settings=site.settings.bank, rates=rates, zone="UTC")

    reconciling = RegularReconciliation(site.settings, site.ledger, pricing)
    with site.ledger.transaction() as t:
        mark_unpriced(t, "c1", NOON)
    began = NOON - timedelta(hours=1)
    reconciling.turn("c1", began, site.now, 1)
    assert bank.balance(site) == 1000 * HOUR
    rates.append(rate("new"))
    reconciling.turn("c1", began, site.now, 1)
    assert bank.balance(site) == 1000 * HOUR, "nothing has changed as far as it knows"
    reconciling.turn("c1", began, site.now + timedelta(seconds=60), 2)
    assert bank.balance(site) == 998 * HOUR
    with site.ledger.reading() as t:
        assert t.read_mark("unpriced:c1") == ""
    reconciling.close()


def test_the_clocks_turn_finds_what_came_to_be_known_late(site: Site) -> None:
    def pricing(_cluster: str) -> Pricing:
        return Pricing(settings=site.settings.bank, rates=[rate("debug")], zone="UTC")

    reconciling = RegularReconciliation(site.settings, site.ledger, pricing)
    began = NOON - timedelta(hours=1)
    reconciling.turn("c1", began, site.now, 1)
    bank.feed(site, bank.life(1))  # it ended five hours ago: the mark has moved past it
    reconciling.turn("c1", began, site.now + timedelta(minutes=1), 1)
    assert bank.balance(site) == 1000 * HOUR
    reconciling.turn("c1", began, site.now + timedelta(minutes=61), 1)
    assert bank.balance(site) == 998 * HOUR
    bank.feed(site, bank.life(2))
    reconciling.close()
    again = RegularReconciliation(site.settings, site.ledger, pricing)
    again.turn("c1", began, site.now + timedelta(minutes=62), 1)
    assert bank.balance(site) == 996 * HOUR, "when the bank has been away it looks far back"
    again.close()


def test_a_run_that_slurm_forgot_ended_when_it_was_found_to_be_gone(site: Site) -> None:
    shown, running, ended = bank.life(1)
    lost = msgspec.structs.replace(ended.body.record, state="UNKNOWN", end=None)
    gone = msgspec.structs.replace(ended, body=msgspec.structs.replace(ended.body, record=lost))
    assert not [event for event in bank.feed(site, [shown, running, gone]) if event.kind == RUN_END]
    found_us = site.now
    site.now += timedelta(minutes=3)
    (said,) = [event for event in site.tick() if event.kind == RUN_END]
    assert said.body.record.end is None
    assert said.at <= found_us, "and not when it is said, minutes later"


def make_slurmdbd_site(tmp_path: Path) -> tuple[Site, RegularReconciliation]:
    """Return a site with an ended job and a scripted slurmdbd, which notes queries in ``asked``."""
    asked = tmp_path / "asked"
    programs = {
        "scontrol": 'echo "AccountingStorageType = accounting_storage/slurmdbd"\n'
        'echo "ClusterName = c1"; echo "StateSaveLocation = /nowhere"',
        "squeue": "echo slurm-wlm 24.11.5",
        "sacct": f'case "$*" in *-S*) echo "$*" >> {asked};; *) echo JobIDRaw JobID; exit;; esac\n'
        # An empty answer with status 0 is what sacct gives if slurmdbd's query fails.
        f"[ -e {tmp_path}/empty ] && exit; [ -e {tmp_path}/up ] || exit 1\n"
        'while [ "$1" != --delimiter ]; do shift; done; printf "1%s1\\n" "$2"',
        "sacctmgr": "true",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    site = bank.make_site(tmp_path)
    of_cluster = ClusterSettings(slurm_bin=str(tmp_path), timezone="UTC")
    site.settings = msgspec.structs.replace(site.settings, cluster={"c1": of_cluster})
    bank.feed(site, bank.life(1))

    def pricing(_cluster: str) -> Pricing:
        return Pricing(settings=site.settings.bank, rates=[rate("debug")], zone="UTC")

    return site, RegularReconciliation(site.settings, site.ledger, pricing)


def list_query_starts(tmp_path: Path) -> list[str]:
    """Return the start of each period that slurmdbd was asked about."""
    lines = (tmp_path / "asked").read_text().splitlines()
    return [line.split(" -S ")[1].split()[0] for line in lines]


def test_what_slurmdbd_could_not_be_asked_for_is_asked_for_again(tmp_path: Path) -> None:
    site, reconciling = make_slurmdbd_site(tmp_path)
    began = NOON - timedelta(hours=1)
    for minutes in (0, 30, 31, 32):
        if minutes == 30:
            (tmp_path / "empty").touch()
        if minutes == 31:
            (tmp_path / "empty").rename(tmp_path / "up")
        reconciling.turn("c1", began, site.now + timedelta(minutes=minutes), 1)
    since = list_query_starts(tmp_path)
    first, until = f"{began:%Y-%m-%dT%H:%M:%S}", site.now + timedelta(minutes=31 - 2 - 10)
    assert since == [first, first, first, f"{until:%Y-%m-%dT%H:%M:%S}"]
    assert bank.balance(site) == 998 * HOUR
    reconciling.close()
    site.close()


def test_a_job_that_slurmdbd_never_had_is_looked_for_a_day_at_most(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site, reconciling = make_slurmdbd_site(tmp_path)
    (tmp_path / "empty").touch()
    began, end = NOON - timedelta(days=3), site.now + timedelta(minutes=2)
    for minutes in range(2):
        reconciling.turn("c1", began, end + timedelta(minutes=minutes), 1)
    day = timedelta(days=1, minutes=10)
    assert list_query_starts(tmp_path) == [
        f"{time:%Y-%m-%dT%H:%M:%S}" for time in (began, site.now - day)
    ]
    warnings = [line for line in caplog.messages if "slurmdbd lists no job" in line]
    assert len(warnings) == 1
    reconciling.close()
    site.close()


@pytest.mark.parametrize("is_empty", [True, False])
def test_charges_made_before_slurmdbd_failed_are_reported(tmp_path: Path, is_empty: bool) -> None:
    site, _ = make_slurmdbd_site(tmp_path)
    if is_empty:
        (tmp_path / "empty").touch()
    since = (NOON - timedelta(hours=1)).isoformat()
    with suppress(GateUnavailable):  # no gate runs here: it is notified after the ledger
        site.ask("bank.backfill", Caller(uid=0, user="root"), cluster="c1", since=since)
    assert bank.balance(site) == 998 * HOUR
    args = (site.settings, site.ledger)
    period = (NOON - timedelta(hours=1), site.now)
    cause = "slurmdbd lists no job of the period" if is_empty else "sacct"
    done = reconcile_cluster(*args, None, "c1", period[0], is_dry=False, now=site.now)
    charged = backfill_cluster(*args, "c1", *period, is_dry=True, now=site.now)
    for missing in (done.missing_records, charged.missing_records):
        assert missing.startswith("no records from slurmdbd for 2026-03-01T11:00:00 to ")
        assert cause in missing
    site.close()


@pytest.mark.parametrize("is_observed", [True, False])
def test_imported_runs_neither_hide_nor_imitate_a_missing_answer(
    tmp_path: Path, is_observed: bool
) -> None:
    site, _ = make_slurmdbd_site(tmp_path)
    (tmp_path / "empty").touch()
    begin = NOON if is_observed else NOON + timedelta(hours=2)
    seconds = 100 if is_observed else 7300
    runs = [imported_run(n, seconds, seconds + 50) for n in range(2, 302)]
    bank.feed(site, [imported(*runs)])
    done = reconcile_cluster(
        site.settings, site.ledger, None, "c1", begin, is_dry=True, now=site.now
    )
    assert bool(done.missing_records) == is_observed
    site.close()


def _sizes() -> list[dict[str, str]]:
    """Return slurmdbd's rows of a job that was resized twice, and suspended in each size."""
    common = {
        "jobid": "1",
        "jobidraw": "1",
        "submit": "2026-03-01T12:00:00",
        "user": "ada",
        "account": "physics",
        "partition": "debug",
        "uid": "1000",
    }
    whole, resized = "2026-03-01T12:00:10", "2026-03-01T12:50:10"
    ends = ("2026-03-01T12:20:10", resized, "2026-03-01T13:30:10")
    return [
        {**common, "state": state, "start": start, "end": end, "suspended": halt, "alloctres": tres}
        for state, start, end, halt, tres in (
            ("RESIZING", whole, ends[0], "00:05:00", "cpu=4,node=4"),
            ("RESIZING", whole, ends[1], "00:10:00", "cpu=2,node=2"),
            ("COMPLETED", resized, ends[2], "00:15:00", "cpu=1,node=1"),
        )
    ]


class _Rows:
    """Rows of slurmdbd as a reply of sacct."""

    def rows(self, since: datetime, until: datetime) -> list[dict[str, str]]:
        assert since < until
        return _sizes()


def test_each_size_that_slurmdbd_alone_knows_is_rid_of_its_own_suspended_time(
    site: Site,
) -> None:
    with site.ledger.reading() as t:
        rates = t.export_rules().rates
    pricing = Pricing(settings=site.settings.bank, rates=rates, zone="UTC")
    reckoning = DueCharges("c1", bank.jobs_of(site), pricing, lambda _: [])
    history = cast("SacctHistory", _Rows())
    since, until = NOON, NOON + timedelta(days=1)
    dues = list(reckoning.iter_from_slurmdbd(history, since, until, NameResolver()))
    uses = [due.charge.use for due in dues if due.charge is not None and due.charge.use]
    assert [(use.tres["cpu"], use.seconds // 60) for use in uses] == [(4, 15), (2, 20), (1, 25)]


@pytest.mark.parametrize("source", ["sacct", "slurmdbd"])
def test_sizes_of_a_run_whose_end_slurmdbd_tells(site: Site, source: str) -> None:
    rows = [parse_job_row(row, NameResolver()) for row in _sizes()]
    records = merge_resized_runs([row for row in rows if row is not None])
    if source == "slurmdbd":
        # An import gives the rows as they are.
        records = [row for row in rows if row is not None]
    events = [
        Event(
            kind=JOB_END,
            cluster="c1",
            key=f"{row.state}:{row.end}",
            at=row.end or NOON,
            seen_at=NOON + timedelta(days=1),
            source=source,
            body=JobFacts(record=row),
        )
        for row in records
    ]
    bank.feed(site, events)
    facts = bank.jobs_of(site).list_run_events("c1", [1])
    assert [
        (to_micros_or_zero(fact.record.start) - to_micros(NOON), fact.record.suspended_s)
        for fact in facts
    ] == [(10_000_000, 300), (1_210_000_000, 600), (10_000_000, 1800)]
    assert [fact.suspended_before_s for fact in facts] == [0, 0, 900]


class _Row:
    """Row of slurmdbd for a job, as in a reply of sacct."""

    def __init__(self, **fields: str) -> None:
        self._fields = fields

    def rows(self, since: datetime, until: datetime) -> list[dict[str, str]]:
        assert since < until
        times = {"submit": "12:00:00", "start": "12:00:01", "end": "13:00:01"}
        return [
            {
                "jobid": "1",
                "jobidraw": "1",
                "state": "COMPLETED",
                "user": "ada",
                "account": "physics",
                "partition": "debug",
                "uid": "1000",
                **{name: f"2026-03-01T{time}" for name, time in times.items()},
                "alloctres": "cpu=2,mem=1G,node=1",
                **self._fields,
            }
        ]


def compare_both(site: Site, row: _Row) -> list[int | None]:
    """Return corrections by slurmdbd's records, then by those of jobs.db."""
    with site.ledger.reading() as t:
        rates = t.export_rules().rates
    pricing = Pricing(settings=site.settings.bank, rates=rates, zone="UTC")
    reckoning = DueCharges(
        "c1", bank.jobs_of(site), pricing, partial(read_own_charges, site.ledger, "c1")
    )
    rows = cast("SacctHistory", row)
    due = reckoning.iter_from_slurmdbd(rows, NOON, NOON + timedelta(days=1), NameResolver())
    found = post_due_charges(
        site.ledger, "c1", due, why="reconcile", author="reconcile", is_dry=False
    )
    found += reconcile_cluster(
        site.settings, site.ledger, None, "c1", NOON, is_dry=False, now=site.now
    ).differences
    return [one.recomputed for one in found]


@pytest.mark.parametrize(
    ("suspended", "seen_s", "minutes"),
    [("00:20:00", None, 40), ("00:20:00", 600, 40), ("00:20:00", 1200, 40), ("00:00:02", None, 60)],
)
def test_a_suspension_that_nobody_saw_is_taken_off_by_slurmdbds_word(
    site: Site, suspended: str, seen_s: int | None, minutes: int
) -> None:
    *begun, end = bank.life(1)
    over = msgspec.structs.replace(end.body.record, suspended_s=seen_s)
    bank.feed(site, [*begun, msgspec.structs.replace(end, body=JobFacts(record=over, whole=True))])
    reconcile_cluster(site.settings, site.ledger, None, "c1", NOON, is_dry=False, now=site.now)
    is_news = minutes == 40 and seen_s != 1200
    row = _Row(suspended=suspended)
    assert compare_both(site, row) == ([2 * HOUR * 40 // 60] if is_news else [])
    assert compare_both(site, row) == []
    assert bank.balance(site) == 1000 * HOUR - round(2 * HOUR * minutes / 60)


def test_a_suspension_of_a_run_that_slurmdbd_ends_later_is_not_subtracted(site: Site) -> None:
    """A killed slurmctld forgot the end, and counted the time until a requeue as suspended."""
    bank.feed(site, bank.life(1))
    reconcile_cluster(site.settings, site.ledger, None, "c1", NOON, is_dry=False, now=site.now)
    row = _Row(state="REQUEUED", end="2026-03-01T15:00:01", suspended="02:30:00")
    assert compare_both(site, row) == []
    assert bank.balance(site) == 998 * HOUR


@pytest.mark.parametrize("start", ["12:00:01", "13:00:01"])
def test_what_ran_though_a_killed_slurmctld_forgot_that_it_began(site: Site, start: str) -> None:
    """slurmctld took the job for a waiting one, and then the job was cancelled."""
    waiting, running, end = bank.life(1)
    never: dict[str, Any] = {"state": "CANCELLED", "nodelist": "", "tres_allocated": ""}
    over = msgspec.structs.replace(end.body.record, start=end.body.record.end, **never)
    bank.feed(site, [waiting, running, msgspec.structs.replace(end, body=JobFacts(record=over))])
    reconcile_cluster(site.settings, site.ledger, None, "c1", NOON, is_dry=False, now=site.now)
    assert bank.balance(site) == 1000 * HOUR
    row = _Row(state="CANCELLED by 1000", start=f"2026-03-01T{start}", suspended="00:00:00")
    has_run = start != "13:00:01"
    assert compare_both(site, row) == ([2 * HOUR] if has_run else [])
    assert compare_both(site, row) == []
    assert bank.balance(site) == (998 if has_run else 1000) * HOUR
