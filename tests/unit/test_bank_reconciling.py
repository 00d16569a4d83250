from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bank_site import BY, HOUR, NOON, BankSite, rate, record

from steward.bank.backfilling import backfill
from steward.bank.ledger import By
from steward.bank.reconciling import Reconciling, mark_unpriced, reconcile
from steward.bank.records import Rate
from steward.bank.settling import Pricing
from steward.config import ClusterSettings
from steward.events import RUN_END


@pytest.fixture
def site(tmp_path: Path) -> Iterator[BankSite]:
    site = BankSite(tmp_path / "state")
    yield site
    site.close()


def compared(site: BankSite, *, is_dry: bool = False) -> list[tuple[int, int | None, int | None]]:
    found = reconcile(
        *(site.settings, site.ledger, None, "c1", NOON - timedelta(hours=1)),
        is_dry=is_dry,
        now=site.now,
    )
    return [(one.job_id, one.charged, one.due) for one in found]


def test_what_was_not_charged_is_charged_once(site: BankSite) -> None:
    site.job(1)
    site.job(2, seconds=1800)
    assert compared(site, is_dry=True) == [(1, None, 2 * HOUR), (2, None, HOUR)]
    assert site.balance() == 1000 * HOUR
    assert len(compared(site)) == 2
    assert site.balance() == 997 * HOUR
    assert compared(site) == []
    assert site.ledger.check() == []


def test_a_wrong_charge_is_corrected_by_an_entry_that_says_why(site: BankSite) -> None:
    site.job(1)
    compared(site)
    with site.ledger.transaction() as t:
        (row,) = t.charges.of_job("c1", 1)
        wrong = type(row.charge)(
            **{
                name: getattr(row.charge, name)
                for name in row.charge.__struct_fields__
                if name not in ("amount", "facts")
            },
            amount=5 * HOUR,
        )
        t.charges.charge(wrong, By(who="test", why="a fault"))
    assert site.balance() == 995 * HOUR
    assert compared(site) == [(1, 5 * HOUR, 2 * HOUR)]
    assert site.balance() == 998 * HOUR
    with site.ledger.reading() as t:
        last = t.charges.versions(row.charge.key)[-1]
    assert "its record" in last.why
    assert last.added == -3 * HOUR


def test_what_ended_before_the_bank_began_is_a_backfills(site: BankSite) -> None:
    site.job(1)
    site.began(NOON + timedelta(hours=2))
    assert compared(site) == []
    since, until = NOON - timedelta(hours=1), NOON + timedelta(hours=5)
    args = (site.settings, site.ledger, "c1", since, until)
    dry = backfill(*args, is_dry=True, now=site.now)
    assert (dry.charges, dry.amount) == (1, 2 * HOUR)
    assert site.balance() == 1000 * HOUR
    assert backfill(*args, is_dry=False, now=site.now) == dry
    assert site.balance() == 998 * HOUR
    again = backfill(*args, is_dry=False, now=site.now)
    assert (again.charges, again.amount) == (0, 0)


def test_a_backfill_leaves_what_was_charged_already(site: BankSite) -> None:
    site.job(1)
    compared(site)
    with site.ledger.transaction() as t:
        (row,) = t.charges.of_job("c1", 1)
        other = msgspec.structs.replace(row.charge, amount=5 * HOUR)
        t.charges.charge(other, By(who="root", why="agreed with its user"))
    site.job(2)
    since, until = NOON - timedelta(hours=1), NOON + timedelta(hours=5)
    args = (site.settings, site.ledger, "c1", since, until)
    done = backfill(*args, is_dry=False, now=site.now)
    assert (done.charges, done.amount) == (1, 2 * HOUR)
    assert site.balance() == 993 * HOUR


def test_a_job_without_a_rate_is_charged_when_there_is_one(site: BankSite) -> None:
    site.job(1, partition="new")
    (found,) = reconcile(
        *(site.settings, site.ledger, None, "c1", NOON - timedelta(hours=1)),
        is_dry=False,
        now=site.now,
    )
    assert (found.due, found.done) == (None, False)
    assert "partition new" in found.why
    with site.ledger.transaction() as t:
        t.rates.add(rate("new", 3 * HOUR), BY)
    assert compared(site) == [(1, None, 6 * HOUR)]


def test_every_run_of_a_requeued_job_is_charged_by_itself(site: BankSite) -> None:
    fields: dict[str, Any] = {
        "account": "physics",
        "partition": "debug",
        "tres_allocated": "cpu=1,node=1",
    }
    shown: dict[str, Any] = {**fields, "nodelist": "n1", "cpus": 1}
    start, again = NOON + timedelta(seconds=10), NOON + timedelta(seconds=8000)
    site.feed(
        [
            record(1, 0, seen=1, **fields),
            record(1, 0, "RUNNING", seen=11, start=start, **shown),
            record(1, 0, "REQUEUED", seen=3611, start=start, end=3610, **shown),
            record(1, 3611, seen=3620, restarts=1, **fields),
            record(1, 3611, "RUNNING", seen=8001, start=again, restarts=1, **shown),
            record(1, 3611, "COMPLETED", seen=9801, start=again, end=9800, restarts=1, **shown),
        ]
    )
    assert compared(site) == [(1, None, HOUR), (1, None, HOUR // 2)]
    with site.ledger.reading() as t:
        rows = t.charges.of_job("c1", 1)
    assert {(row.charge.first_submit, row.charge.restarts) for row in rows} == {
        (NOON, 0),
        (NOON, 1),
    }


def test_a_resized_job_is_charged_piece_by_piece(site: BankSite) -> None:
    fields: dict[str, Any] = {"account": "physics", "partition": "debug", "nodelist": "n[1-2]"}
    start = NOON + timedelta(seconds=10)
    large: dict[str, Any] = {**fields, "tres_allocated": "cpu=4,node=2", "start": start}
    small: dict[str, Any] = {
        **fields,
        "tres_allocated": "cpu=2,node=1",
        "start": start,
        "nodelist": "n1",
    }
    site.feed(
        [
            record(1, 0, "RUNNING", seen=11, **large),
            record(1, 0, "RESIZING", seen=1811, end=1810, source="jobcomp", **large),
            record(1, 0, "RUNNING", seen=1815, **small),
            record(1, 0, "COMPLETED", seen=5411, end=5410, source="jobcomp", **small),
        ]
    )
    assert compared(site) == [(1, None, 2 * HOUR), (1, None, 2 * HOUR)]
    assert compared(site) == []


def test_what_never_ran_or_ran_elsewhere_is_free(site: BankSite) -> None:
    site.feed(
        [
            record(1, 0, seen=1, account="physics", partition="debug"),
            record(1, 0, "CANCELLED", seen=100, end=99, account="physics", partition="debug"),
        ]
    )
    site.feed(site.life(2)[:2])
    site.feed([record(2, 0, "REVOKED", seen=50, end=49, start=NOON, account="physics")])
    assert compared(site) == []


def test_the_clocks_turn_looks_again_at_what_had_no_rate(site: BankSite) -> None:
    site.job(1, partition="new")
    rates: list[Rate] = []

    def pricing(_cluster: str) -> Pricing:
        return Pricing(settings=site.settings.bank, rates=rates, zone="UTC")

    reconciling = Reconciling(site.settings, site.ledger, pricing)
    with site.ledger.transaction() as t:
        mark_unpriced(t, "c1", NOON)
    began = NOON - timedelta(hours=1)
    reconciling.turn("c1", began, site.now, 1)
    assert site.balance() == 1000 * HOUR
    rates.append(rate("new"))
    reconciling.turn("c1", began, site.now, 1)
    assert site.balance() == 1000 * HOUR, "nothing has changed as far as it knows"
    reconciling.turn("c1", began, site.now + timedelta(seconds=60), 2)
    assert site.balance() == 998 * HOUR
    with site.ledger.reading() as t:
        assert t.mark("unpriced:c1") == ""
    reconciling.close()


def test_the_clocks_turn_finds_what_came_to_be_known_late(site: BankSite) -> None:
    def pricing(_cluster: str) -> Pricing:
        return Pricing(settings=site.settings.bank, rates=[rate("debug")], zone="UTC")

    reconciling = Reconciling(site.settings, site.ledger, pricing)
    began = NOON - timedelta(hours=1)
    reconciling.turn("c1", began, site.now, 1)
    site.job(1)  # it ended five hours ago: the mark has moved past it
    reconciling.turn("c1", began, site.now + timedelta(minutes=1), 1)
    assert site.balance() == 1000 * HOUR
    reconciling.turn("c1", began, site.now + timedelta(minutes=61), 1)
    assert site.balance() == 998 * HOUR
    site.job(2)
    reconciling.close()
    again = Reconciling(site.settings, site.ledger, pricing)
    again.turn("c1", began, site.now + timedelta(minutes=62), 1)
    assert site.balance() == 996 * HOUR, "when the bank has been away it looks far back"
    again.close()


def test_a_run_that_slurm_forgot_ended_when_it_was_found_to_be_gone(site: BankSite) -> None:
    shown, running, ended = site.life(1)
    lost = msgspec.structs.replace(ended.body.record, state="UNKNOWN", end=None)
    gone = msgspec.structs.replace(ended, body=msgspec.structs.replace(ended.body, record=lost))
    assert not [event for event in site.feed([shown, running, gone]) if event.kind == RUN_END]
    found_us = site.now
    site.now += timedelta(minutes=3)
    (said,) = [event for event in site.tick() if event.kind == RUN_END]
    assert said.body.record.end is None
    assert said.at <= found_us, "and not when it is said, minutes later"


def test_what_slurmdbd_could_not_be_asked_for_is_asked_for_again(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    programs = {
        "scontrol": 'echo "AccountingStorageType = accounting_storage/slurmdbd"\n'
        'echo "ClusterName = c1"; echo "StateSaveLocation = /nowhere"',
        "squeue": "echo slurm-wlm 24.11.5",
        "sacct": f'case "$*" in *-S*) echo "$*" >> {asked};; *) echo JobIDRaw JobID; exit;; esac\n'
        f"[ -e {tmp_path}/up ]",
        "sacctmgr": "true",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    site = BankSite(tmp_path / "state")
    of_cluster = ClusterSettings(slurm_bin=str(tmp_path), timezone="UTC")
    site.settings = msgspec.structs.replace(site.settings, cluster={"c1": of_cluster})
    site.job(1)

    def pricing(_cluster: str) -> Pricing:
        return Pricing(settings=site.settings.bank, rates=[rate("debug")], zone="UTC")

    reconciling = Reconciling(site.settings, site.ledger, pricing)
    began = NOON - timedelta(hours=1)
    for minutes in (0, 30, 31, 32):
        if minutes == 31:
            (tmp_path / "up").touch()
        reconciling.turn("c1", began, site.now + timedelta(minutes=minutes), 1)
    since = [line.split(" -S ")[1].split()[0] for line in asked.read_text().splitlines()]
    first, until = f"{began:%Y-%m-%dT%H:%M:%S}", site.now + timedelta(minutes=31 - 2 - 10)
    assert since == [first, first, first, f"{until:%Y-%m-%dT%H:%M:%S}"]
    assert site.balance() == 998 * HOUR
    reconciling.close()
    site.close()
