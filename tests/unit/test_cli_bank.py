"""Commands of ``steward bank``: output for people and programs, and rejections."""

import contextlib
import csv
import io
import json
import re
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.bank import charge, config_of, make_shared_site
from harness.commands import run
from steward.bank.actions.maintenance import CheckReply, ReconcileReply
from steward.bank.backfill import BackfillResult
from steward.bank.ledger import Authorship, LedgerFinding, RejectedJob
from steward.bank.money import MICRO
from steward.bank.notices import NOTICE_KIND, Notice
from steward.bank.rate_validation import (
    format_rate,
    parse_factors,
    parse_permille,
    parse_time_factors,
    parse_weights,
)
from steward.bank.reconciliation import ClusterReconciliation
from steward.bank.records import ChargeDifference, TimeFactor
from steward.cli.commands import print_reply
from steward.cli.output import Style
from steward.core.errors import UsageError
from steward.core.printable import quote_formula
from steward.extensions.mybrc.outbox import RemoteJob, queue_change

TYPED_RATES = st.from_regex(
    r"\A(cpu|mem|gres/gpu|mon|sat-sun|fri,mon)(/[0-9]{1,2}(:[0-9]{2})?-[0-9]{1,2})?=-?[0-9]{1,4}"
    r"(\.[0-9]{1,4})?\Z"
)
"""Texts that look like weights or factors; most are invalid."""


@pytest.fixture
def bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs ``steward bank`` on a ledger of this test."""
    monkeypatch.setenv("STEWARD_CONFIG", str(config_of(tmp_path)))
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("SLURM_TIME_FORMAT", raising=False)

    def command(*words: str, code: int = 0, stdin: bytes = b"") -> str:
        ended, out, err = run("bank", *words, stdin=stdin)
        assert ended == code, out + err
        return out or err

    return command


@pytest.fixture
def rich(tmp_path: Path, bank: Any) -> Any:
    """Return the same function, for a ledger with accounts, deposits and two charged jobs."""
    site = make_shared_site(tmp_path)
    charge(site, 7, hours=4)
    charge(site, 8, hours=1, user="=cmd|' /C calc'!A0")
    site.ledger.close()
    return bank


def test_money_from_first_to_last(bank: Any, tmp_path: Path) -> None:
    assert "physics" in bank(
        "account", "create", "Physics", "--owners", "olga", "--credit-limit", "5"
    )
    given = bank("deposit", "physics", "1,000.5", "--reason", "grant", "--key", "k1")
    assert "Done: deposit of 1,000.50 SU" in given
    assert "physics has a balance of 1,000.50 SU now" in given
    assert "Key: k1" in given
    again = bank("deposit", "physics", "1000.5", "--reason", "grant", "--key", "k1")
    assert "Already done" in again
    assert "k1" in bank("deposit", "physics", "7", "--reason", "x", "--key", "k1", code=2)
    assert "more than 0" in bank("deposit", "physics", "0", "--reason", "x", code=2)
    assert "more than 0" in bank("deposit", "physics", "--reason", "x", "--", "-5", code=2)
    assert "Key: " in bank("withdraw", "physics", "0.5", "--reason", "back")
    taken = bank("adjust", "physics", "-100", "--reason", "a slip")
    assert "adjust of -100.00 SU" in taken
    table = bank("adjust", "physics", "-1", "--reason", "a slip", "--key", "k2", "--csv")
    assert table.splitlines()[0] == "Number,Kind,Account,Amount,Key"
    assert table.splitlines()[1].endswith(",adjust,physics,-1.000000,k2")
    bank("adjust", "physics", "1", "--reason", "back")
    bank("account", "create", "optics", "--parent", "physics", "--parent-pays")
    bank("account", "create", "chemistry")
    bank("transfer", "physics", "chemistry", "100", "--reason", "swap")
    bank("allocation", "create", "chemistry", "50", "--end", "2099-01-01", "--note", "n")
    rows = bank("balance", "-P", "-n").splitlines()
    assert [row.split("|")[:3] for row in rows] == [
        ["chemistry", "chemistry", "150.000000"],
        ["optics", "physics", "800.000000"],
        ["physics", "physics", "800.000000"],
    ]
    assert "The ledger is consistent: 3 accounts." in bank("check")
    assert stat.S_IMODE((tmp_path / "state" / "ledger.db").stat().st_mode) == 0o600


def test_an_account_that_nobody_created_is_in_the_balance(bank: Any, tmp_path: Path) -> None:
    site = make_shared_site(tmp_path)
    charge(site, 7, hours=4, account="stray")
    site.ledger.close()
    row = next(line for line in bank("balance").splitlines() if "stray" in line)
    assert row.split()[1] == "-4.00"
    assert row.endswith("not created")
    bank("account", "create", "stray")
    assert "not created" not in bank("balance")


def test_a_statement_for_people_spreadsheets_and_programs(rich: Any) -> None:
    said = rich("statement", "physics", "-S", "2020-01-01")
    assert "job 7" in said
    assert "-4.00" in said
    table = list(
        csv.DictReader(io.StringIO(rich("statement", "physics", "-S", "2020-01-01", "--csv")))
    )
    charge = next(row for row in table if row["User"] == "ada")
    assert charge["Amount"] == "-4.000000"
    assert charge["Description"].startswith("c1/7/")
    hostile = next(row for row in table if "calc" in row["User"])
    assert hostile["User"].startswith("'=")
    whole = json.loads(rich("statement", "physics", "-S", "2020-01-01", "--json"))
    assert whole["version"] == 1
    assert whole["statement"]["lines"][-1]["balance"] == 995 * MICRO
    assert "exclude" in rich("statement", "physics", "--csv", "--json", code=2)
    assert "nowhere" in rich("statement", "nowhere", code=2)
    empty = rich("statement", "physics", "-S", "2020-01-01", "-E", "2020-01-02").splitlines()
    assert empty[1:] == ["No transactions in this period.", "0.00 SU at the end."]
    of_user = rich("statement", "-u", "ada", "-S", "2020-01-01").splitlines()
    assert "Account" in of_user[0].split(), "of which of several accounts a line is"
    chosen = rich("statement", "physics", "-S", "2020-01-01", "-o", "balance")
    assert chosen.splitlines()[0].strip() == "Balance"
    nothing = ("-S", "2020-01-01", "-E", "2020-01-02", "-o", "user", "-n")
    assert rich("usage", "physics", *nothing) == ""


def test_usage_has_bars(rich: Any) -> None:
    lines = rich("usage", "physics", "--by", "user,partition").splitlines()
    assert lines[0].split() == ["User", "Partition", "Charges", "Used", "Share", "Bar"]
    assert "[########################]" in lines[1]
    assert lines[1].split()[4] == "80.0%"
    assert "[######------------------]" in lines[2]
    assert rich("usage", "-P", "-n", "-u", "ada").strip() == "ada|1|4.000000|100.0%|"
    table = rich("usage", "--csv", "--by", "partition,user", "-u", "ada").splitlines()
    assert table == ["Partition,User,Charges,Used,Share,Bar", "debug,ada,1,4.000000,100.0%,"]
    assert "'colour' is not one of 'account', 'user'" in rich("usage", "--by", "colour", code=2)
    nobody = rich("usage", "-u", "nobody")
    assert nobody == "No run that started in this period was charged.\n"


def test_a_job_is_explained_and_refunded(rich: Any) -> None:
    said = rich("explain", "7")
    assert "Job 7 of ada was charged 4.00 SU to physics." in said
    assert "rate 1, source jobs" in said
    assert rich("explain", "7", "-P", "-n").split("|")[5:7] == ["4.000000", "4.000000"]
    assert rich("explain", "7", "--csv").startswith("JobIDRaw,Restarts,Account,")
    assert rich("explain", "7", "-o", "Amount", "-n").strip() == "4.00"
    rich("refund", "--job", "7", "--amount", "1", "--reason", "slow node")
    assert re.search(r"refunded by hand +1\.00\n", rich("explain", "7"))
    assert "--reason" in rich("refund", "--job", "7", code=2)
    again = rich("refund", "physics", "--amount", "1", "--user", "ada", "--reason", "a bad week")
    assert "Done: refund of 1.00 SU" in again
    assert "job 99 on c1 has no charges" in rich("explain", "99", code=2)


def test_a_charge_that_is_not_what_it_should_be_fails_the_command(
    bank: Any, tmp_path: Path
) -> None:
    site = make_shared_site(tmp_path)
    wrong = msgspec.structs.replace(charge(site, 7, hours=4), amount=5 * MICRO)
    with site.ledger.transaction() as t:
        t.charges.post(wrong, Authorship(who="x", why="wrong"))
    site.ledger.close()
    assert re.search(
        r"recomputed; .steward bank reconcile. corrects it +4\.00\n", bank("explain", "7", code=1)
    )
    assert json.loads(bank("explain", "7", "--json", code=1))["is_right"] is False


def test_rates_are_typed_as_they_are_shown(bank: Any) -> None:
    bank(
        *("rate", "create", "gpu", "-w", "cpu=1,gres/gpu:a100=20.5", "--max", "--minimum", "0.01"),
        *("--factor", "sat-sun/0-24=0.5", "--qos-factor", "low=0", "--end-factor", "NODE_FAIL=0"),
        *("--whole-nodes", "--from", "2026-01-01", "--note", "as agreed"),
    )
    line = bank("rate", "show", "-P", "-n").strip().split("|")
    assert line[5] == (
        "cpu=1, gres/gpu:a100=20.5; most expensive TRES; at least 0.01; whole nodes; low: x0; "
        "sat,sun/00:00-24:00: x0.5; NODE_FAIL: x0"
    )
    bank("rate", "change", "gpu", "--weight", "cpu=2")
    changed = bank("rate", "show", "-P", "-n").strip().split("|")[5]
    assert changed.startswith("cpu=2; at least 0.01; whole nodes; low: x0")
    bank("rate", "change", "gpu", "--free")
    assert bank("rate", "show", "-P", "-n").split("|")[5] == "free"
    assert len(bank("rate", "show", "--past", "-P", "-n").splitlines()) == 3
    assert "cpu has no rate" in bank("rate", "change", "cpu", "-w", "cpu=1", code=2)
    assert "nothing to change" in bank("rate", "change", "gpu", code=2)
    assert "cannot parse 'cpu'" in bank("rate", "change", "gpu", "-w", "cpu", code=2)
    assert "or --free" in bank("rate", "create", "x", code=2)


def test_modes_and_what_they_would_do(bank: Any) -> None:
    assert "Default mode: observe." in bank("mode")
    assert "enforce" in bank("mode", "enforce")
    assert "observe" not in bank("mode", "off", "-r", "debug")
    assert bank("mode", "-P", "-n").splitlines()[0] == "all|all|all|enforce"
    assert "'strict' is not one of" in bank("mode", "strict", code=2)
    assert "No rejections in this period." in bank("would-reject", "--since", "now-1hour")


_LISTS_OF_A_PERIOD = (("would-reject",), ("statement", "-u", "ada"), ("usage",))


@pytest.mark.usefixtures("bank")
def test_a_terminal_shows_the_period_of_rejections(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bank", "would-reject", "-S", "2026-01-01", "-E", "2026-01-08")[2] == ""
    monkeypatch.setattr("steward.cli.output.is_terminal", lambda: True)
    for list_words in _LISTS_OF_A_PERIOD:
        list_period = run("bank", *list_words, "-S", "2026-01-01", "-E", "2026-01-08")[2]
        assert list_period == "From 2026-01-01T00:00:00 to 2026-01-08T00:00:00, in SU.\n"
    day = datetime(2026, 1, 1, tzinfo=UTC)
    print_reply(ReconcileReply(differences=(), since=day, until=day), Style(), "differences")
    printed = capsys.readouterr()
    assert re.fullmatch(r"At \S+, in SU\.\n", printed.err)
    assert printed.out == "No differences: every charge is right.\n"
    for words in (("account", "show"), ("user", "show"), ("allocation", "show")):
        assert run("bank", *words)[2] == "In SU.\n"
    assert re.match(r"At \S+, in SU\.\n", run("bank", "balance")[2])


def test_a_pipe_gets_all_of_why(bank: Any, tmp_path: Path) -> None:
    why = "this job may cost more than " + "a very great deal of " * 5 + "money"
    site = make_shared_site(tmp_path)
    at = datetime.now(UTC)
    with site.ledger.transaction() as t:
        t.rejections.add(
            RejectedJob(id="gate:1", at=at, mode="observe", cluster="c1", uid=1, reason=why)
        )
    site.ledger.close()
    said = bank("would-reject", "--since", "now-1hour")
    assert why in said
    assert "JobID" not in said


def test_users_and_their_limits(bank: Any) -> None:
    bank("account", "create", "physics", "--only-listed")
    bank("user", "create", "physics", "ada", "--limit", "10")
    assert (
        bank("user", "show", "-P", "-n").strip() == "physics|ada|10.000000|0.000000|10.000000|yes"
    )
    bank("user", "change", "physics", "ada", "--limit", "none", "--unlisted")
    assert bank("user", "show", "-P", "-n", "ada").strip() == "physics|ada||0.000000||no"
    assert "nothing to change" in bank("user", "change", "physics", "ada", code=2)
    bank("account", "change", "physics", "--note", "ours", "--close", "--everyone")
    page = json.loads(bank("account", "show", "physics", "--json"))
    assert page["accounts"][0] | {"created": 0} == {
        "name": "physics",
        "closed": True,
        "note": "ours",
        "created": 0,
    }
    bank("account", "change", "physics", "--note", "")
    assert "note" not in json.loads(bank("account", "show", "physics", "--json"))["accounts"][0]


def test_a_change_changes_something(bank: Any) -> None:
    bank("account", "create", "physics")
    bank("allocation", "create", "physics", "5", "--end", "2099-01-01", "--note", "grant")
    assert "nothing to change" in bank("account", "change", "physics", code=2)
    assert "give --begin, --end, --rollover or --note" in bank("allocation", "change", "2", code=2)
    assert "--note has no value: give one" in bank(
        "allocation", "change", "2", "--note", "", code=2
    )
    assert "grant" in bank("allocation", "show", "physics")


def test_imports_say_what_they_do(bank: Any, tmp_path: Path) -> None:
    table = b"account,user,amount\nphysics,ada,5\n"
    dry = bank("import", "csv", "-", "--dry-run", "-P", stdin=table)
    assert dry.splitlines()[1:] == [
        "create|account|physics||",
        "create|user|ada in physics||",
        "create|deposit|physics|5.000000|",
    ]
    assert not bank("balance", "-P", "-n")
    path = tmp_path / "accounts.csv"
    path.write_bytes(table)
    assert "physics" in bank("import", "csv", str(path))
    assert bank("import", "csv", str(path)) == "0 changes made, 3 objects unchanged.\n"
    assert bank("import", "csv", str(path), "-P", "-n").startswith("keep|account|physics")
    assert "cannot read " in bank("import", "csv", str(tmp_path / "none"), code=2)
    assert "not UTF-8" in bank("import", "csv", "-", code=2, stdin=b"\xff")
    assert "name a file" in bank("import", "csv", code=2)


@pytest.mark.usefixtures("bank")
@pytest.mark.parametrize("words", [(), ("-P",), ("--json",)])
def test_a_backfill_fails_if_runs_have_no_rate(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_without_rate = ChargeDifference(cluster="c1", job_id=7)
    result = BackfillResult(charges=1, amount=MICRO, passed_over=2, unpriced=(run_without_rate,))
    monkeypatch.setattr("steward.bank.backfill.backfill_cluster", lambda *_, **__: result)
    code, out, err = run("bank", "backfill", "-S", "2026-01-01", "--dry-run", *words)
    assert code == 1
    assert "cannot parse 2 rows of slurmdbd" in err
    assert "no rate applies to 1 run" in err
    if words == ("--json",):
        assert json.loads(out)["unpriced"][0]["job_id"] == 7
    elif words:
        assert out.splitlines()[1] == "1|1.000000|2|1"
    else:
        assert out.splitlines()[-1] == "Would charge 1 run, 1.00 SU."
        assert out.splitlines()[1].split()[0] == "7"


@pytest.mark.usefixtures("bank")
@pytest.mark.parametrize("words", [(), ("-P",), ("--json",)])
def test_a_backfill_and_a_reconciliation_without_slurmdbds_records_fail(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "no records from slurmdbd for 2026-01-01T00:00:00 to 2026-02-01T00:00:00 UTC: x"
    charged = BackfillResult(charges=1, amount=MICRO, missing_records=missing)
    difference = ChargeDifference(cluster="c1", job_id=7)
    compared = ClusterReconciliation(differences=[difference], missing_records=missing)
    monkeypatch.setattr("steward.bank.backfill.backfill_cluster", lambda *_, **__: charged)
    monkeypatch.setattr("steward.bank.reconciliation.reconcile_cluster", lambda *_, **__: compared)
    for command, result in (
        (("backfill", "-S", "2026-01-01"), "1.00"),
        (("reconcile", "-M", "c1"), "7"),
    ):
        code, out, err = run("bank", *command, "--dry-run", *words)
        assert (code, missing in err) == (1, True)
        assert missing in out if words == ("--json",) else result in out


def test_a_check_fails_if_it_finds_something() -> None:
    sound = CheckReply(findings=(), accounts=1, position=1, holds=0)
    assert (sound.exit_code, list(sound.list_notes())) == (0, [])
    wrong = msgspec.structs.replace(sound, findings=(LedgerFinding("sum", "x"),), holds=None)
    assert (wrong.exit_code, list(wrong.list_lines())) == (1, [])
    assert "holds were not compared" in next(iter(wrong.list_notes()))


def test_what_needs_the_gate_says_so(bank: Any) -> None:
    assert "serve" in bank("holds", code=1)


def test_help_is_there_for_every_command() -> None:
    from steward.cli.app import AccountGroup, AllocationGroup, BankGroup, RateGroup, UserGroup
    from steward.cli.groups import import_command

    for group in (BankGroup, AccountGroup, UserGroup, AllocationGroup, RateGroup):
        for entry in group.entries:
            command = import_command(entry)
            assert (command.help or "").split("\n")[0] == entry.help, entry


@given(st.text(max_size=20))
def test_no_cell_of_a_table_is_computed(text: str) -> None:
    cell = quote_formula(text)
    assert cell[:1] not in "=+@\t\r" or not cell
    assert cell in (text, f"'{text}")


@pytest.mark.parametrize("amount", ["-4.000000", "12", "0.5"])
def test_numbers_of_a_table_stay_numbers(amount: str) -> None:
    assert quote_formula(amount) == amount


def test_factors_by_time() -> None:
    assert parse_time_factors(["mon-fri/8-18:30=1.5", "sat,sun/0-24=0.5", "fri-mon/0-1=0"]) == (
        TimeFactor(days=(0, 1, 2, 3, 4), begin_min=480, end_min=1110, permille=1500),
        TimeFactor(days=(5, 6), begin_min=0, end_min=1440, permille=500),
        TimeFactor(days=(0, 4, 5, 6), begin_min=0, end_min=60, permille=0),
    )
    for bad in ("x", "mon/25-26=1", "someday/0-1=1", "mon/0-1=x", "mon/0:99-1=1", "mon/0-1=0.0001"):
        with pytest.raises(UsageError):
            parse_time_factors([bad])


@given(st.one_of(st.text(max_size=30), TYPED_RATES))
def test_rates_are_refused_or_within_their_bounds(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert all(f"{name}=" in text for name in parse_weights([text]))
    with contextlib.suppress(UsageError):
        assert all(permille >= 0 for permille in parse_factors([text]).values())
    with contextlib.suppress(UsageError):
        for factor in parse_time_factors([text]):
            assert set(factor.days) <= set(range(7))
            # The bank refuses a time that ends before it begins.
            assert {factor.begin_min, factor.end_min} <= set(range(24 * 60 + 1))
            assert factor.permille >= 0


@given(st.integers(0, 10_000_000))
def test_thousandths_are_exact(value: int) -> None:
    whole, part = divmod(value, 1000)
    assert parse_permille(f"{whole}.{part:03}") == value


def test_a_rate_without_anything_else_is_short() -> None:
    from steward.bank.records import Rate

    assert format_rate(Rate(weights={"cpu": MICRO, "mem": 1})) == "cpu=1, mem=0.000001"


def test_what_was_not_told_is_listed_and_told_again(bank: Any, tmp_path: Path) -> None:
    site = make_shared_site(tmp_path)
    assert bank("notices").strip() == "No undelivered notices."
    notice = Notice(kind="bank.threshold", subject="90 % is used", text="", to=("ada",), by="mail")
    job = RemoteJob(cluster="c1", job_id=7, first_submit=site.now, account="physics", uid=1)
    with site.ledger.transaction() as t:
        number = t.outbox.add(NOTICE_KIND, msgspec.json.encode(notice))
        t.outbox.make_dead_letter(number, "sendmail ended with 67")
        queue_change(t, job)
    site.ledger.close()
    rows = [row.split("|") for row in bank("notices", "-P", "-n").splitlines()]
    assert [(row[1], row[2], "dead letter" in row) for row in rows] == [
        ("mail", "90 % is used", True),
        ("mybrc", "the charge of job 7 of cluster c1, account physics", False),
    ]
    assert "Steward retries 1 notice" in bank("notices", "--retry", "all")
    assert "dead letter" not in bank("notices")
    assert "no undelivered notice 99" in bank("notices", "--retry", "99", code=2)
    assert "is not a list of numbers" in bank("notices", "--retry", "many", code=2)


@pytest.mark.usefixtures("bank")
def test_rows_of_slurmdbd_that_cannot_be_parsed_are_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = BackfillResult(charges=2, amount=MICRO, passed_over=3)
    monkeypatch.setattr("steward.bank.backfill.backfill_cluster", lambda *_, **__: result)
    code, out, err = run("bank", "backfill", "-S", "2026-01-01", "--dry-run")
    assert (code, out) == (0, "Would charge 2 runs, 1.00 SU.\n")
    assert "cannot parse 3 rows of slurmdbd: those runs are not charged" in err
