"""Imports of accounts and prices from other programs: complete, once, or an error."""

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import given as with_any
from hypothesis import strategies as st

from harness import bank
from harness.bank import BY
from harness.site import ADA, Site
from steward.bank.errors import BankRefused, BankUsage
from steward.bank.imports import (
    ImportPlan,
    apply_plan,
    read_associations,
    read_bank_config,
    read_csv,
    read_dump,
)
from steward.bank.money import MICRO
from steward.bank.records import Rate
from steward.slurm.cluster_model import ClusterModel, PartitionModel

TABLE = """\
\ufeffAccount,Parent,Owners,Credit limit,Parent pays,User,Limit,Amount,End,Rollover,Note
# a remark
physics2,,"olga, carl",10,,,,1000,2027-01-01,next,grant 7

Optics2,physics2,,,yes,ada,12.5,,,,
optics2,,,,,bela,,,,,
physics2,,,,,,,0.5,,,
"""
DUMP = """\
# To edit this file start with a cluster line for the new cluster
Cluster - 'linux':Fairshare=1:QOS='normal'
Parent - 'root'
User - 'root':DefaultAccount='root':AdminLevel='Administrator':Fairshare=1
Account - 'Physics3':Description='all of: physics':Organization='uni':Fairshare=1
Parent - 'Physics3'
Account - 'optics3':Description='optics3':Organization='uni'
User - 'ada':Coordinator='optics3,physics3':DefaultAccount='optics3':Fairshare=1
Parent - 'optics3'
User - 'ada':DefaultAccount='optics3':Fairshare=1
User - 'bela':DefaultAccount='optics3':Fairshare=1
"""
OLD = """\
[Enable]
enable_job_submit_plugin = true
[PartitionPrice]
normal = 1
debug = 0.5
"Savio_BigMem" = "1.67"
free = 0
[QosMultiplier]
normal = 1
lowprio = 0
high = "2.5"
[API]
url = "http://localhost:5000"
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return bank.make_shared_site(tmp_path)


def test_a_table_is_brought_in_once(site: Site) -> None:
    dry = site.ask("bank.import", kind="csv", file={"name": "a.csv", "text": TABLE}, dry_run=True)
    assert not any(one.account == "physics2" for one in site.ask("bank.balance").accounts)
    first = site.ask("bank.import", kind="csv", file={"name": "a.csv", "text": TABLE})
    assert first.changes == dry.changes
    assert {one.change for one in first.changes} == {"create"}
    again = site.ask("bank.import", kind="csv", file={"name": "a.csv", "text": TABLE})
    assert {one.change for one in again.changes} == {"keep"}
    page = site.ask("bank.account_show", names=["physics2", "optics2"])
    physics, optics = page.accounts
    assert (physics.owners, physics.credit_limit) == (("olga", "carl"), 10 * MICRO)
    assert (optics.parent, optics.parent_pays) == ("physics2", True)
    assert {(one.user, one.limit) for one in page.users} == {("ada", 12_500_000), ("bela", None)}
    assert {one.balance for one in page.allocations if one.account == "physics2"} == {
        1000 * MICRO,
        500_000,
    }
    balance = site.ask("bank.balance", accounts=["optics2"]).accounts[0]
    assert (balance.payer, balance.balance) == ("physics2", 1_000_500_000)


def test_what_was_set_here_stays(site: Site) -> None:
    site.ask("bank.account_change", name="physics", credit_limit=5, note="ours")
    site.ask(
        "bank.import",
        kind="csv",
        file={"name": "b", "text": "account,owners,note\nphysics,carl,theirs\n"},
    )
    page = site.ask("bank.account_show", names=["physics"])
    assert page.accounts[0].owners == ("olga", "carl")
    assert (page.accounts[0].credit_limit, page.accounts[0].note) == (5, "ours")
    assert page.users[0].limit == 500 * MICRO


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the table is empty"),
        ("name\nx\n", "unknown column 'name'"),
        ("parent\nx\n", "missing column 'account'"),
        ("account,account\nx,y\n", "duplicate column"),
        ("account,amount\nx,1\ny,many\n", "line 3: invalid amount 'many'"),
        ("account,amount\nx,-1\n", "more than 0"),
        ("account,amount\nx," + "9" * 5000 + "\n", "is too large"),
        ("account,credit_limit\nx," + "9" * 5000 + "\n", "is too large"),
        ("account,amount,end\nx,1,now+" + "9" * 5000 + "days\n", "line 2"),
        ("account,amount,end\nx,1," + "9" * 5000 + "\n", "line 2"),
        ("account,amount,end\nx,1,someday\n", "line 2: invalid time 'someday'"),
        ("account,end\nx,2027-01-01\n", "has no amount"),
        ("account,amount,begin\nx,1,2027-01-01\n", "has no end"),
        (
            "account,amount,end,rollover\nx,1,2027-01-01,maybe\n",
            "invalid rollover 'maybe': give none or next",
        ),
        ("account,limit\nx,1\n", "fill column 'user'"),
        ("account,only_listed\nx,perhaps\n", "yes or no"),
        ("account,user\nx,a b\n", "invalid name of a user"),
        ("account\n\n,x\n", "line 3"),
        ("account,parent\nx,nowhere\n", "unknown parent 'nowhere'"),
        ("account,parent\nx,y\ny,x\n", "cycle of parents"),
        ('account\n"x\n', "line"),
    ],
)
def test_a_table_that_is_wrong_changes_nothing(site: Site, text: str, says: str) -> None:
    with site.ledger.reading() as t:
        before = t.seq
    with pytest.raises(BankUsage, match=says):
        site.ask("bank.import", kind="csv", file={"name": "bad.csv", "text": text})
    with site.ledger.reading() as t:
        assert t.seq == before


def test_a_dump_of_sacctmgr(site: Site) -> None:
    answer = site.ask("bank.import", kind="sacctmgr", file={"name": "linux.cfg", "text": DUMP})
    assert {one.change for one in answer.changes} == {"create"}
    page = site.ask("bank.account_show", names=["physics3", "optics3"])
    physics, optics = page.accounts
    assert (physics.parent, physics.owners, physics.note) == ("", ("ada",), "all of: physics")
    assert (optics.parent, optics.owners, optics.note) == ("physics3", ("ada",), "")
    members = sorted((one.account, one.user) for one in page.users)
    assert members == [("optics3", "ada"), ("optics3", "bela"), ("physics3", "ada")]
    assert {
        one.change for one in site.ask("bank.import", kind="sacctmgr", file={"text": DUMP}).changes
    } == {"keep"}


def test_associations_as_slurmdbd_answers() -> None:
    rows = [
        ("root", "", ""),
        ("root", "", "root"),
        ("physics", "root", ""),
        ("optics", "physics", ""),
        ("optics", "", "ada"),
    ]
    plan = read_associations(rows, {"optics": {"bela", "ada"}, "gone": {"x"}})
    assert set(plan.accounts) == {"physics", "optics"}
    assert plan.accounts["optics"].owners == ("ada", "bela")
    assert set(plan.members) == {("optics", "ada")}


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "hello\n", "User - 'ada':x=1\n", "Account - 'a b'\n"]
)
def test_what_is_no_dump(text: str) -> None:
    with pytest.raises(BankUsage):
        read_dump(text)


def test_prices_of_the_old_plugins(site: Site) -> None:
    answer = site.ask(
        "bank.import", kind="bank-config", file={"name": "bank-config.toml", "text": OLD}
    )
    assert (
        "(enable_job_submit_plugin = True): set the mode with 'steward bank mode'"
        in answer.remarks[0]
    )
    assert "[bank.remote]" in answer.remarks[1]
    details = {one.name.partition(" ")[2]: one.detail for one in answer.changes}
    assert details["normal"] == "cpu=1; lowprio: x0; high: x2.5"
    assert details["free"] == "free"
    rates = {one.partition: one for one in site.ask("bank.rate_show").rates}
    assert rates["normal"].weights == {"cpu": MICRO}
    assert rates["Savio_BigMem"].weights == {"cpu": 1_670_000}
    assert rates["debug"].qos_permille == {"lowprio": 0, "high": 2500}
    assert rates["free"].free
    again = site.ask(
        "bank.import", kind="bank-config", file={"name": "bank-config.toml", "text": OLD}
    )
    assert {one.change for one in again.changes} == {"keep"}


def test_prices_of_partitions_that_are_not_there_are_told_of(site: Site) -> None:
    known = PartitionModel(name="normal"), PartitionModel(name="savio_bigmem")
    picture = ClusterModel(cluster="c1", partitions={one.name: one for one in known})
    with site.ledger.transaction() as t:
        t.set_mark("picture:c1", msgspec.json.encode(picture).decode())
    answer = site.ask(
        "bank.import", kind="bank-config", file={"name": "bank-config.toml", "text": OLD}
    )
    said = "cluster c1 has no partition Savio_BigMem now; it has normal, savio_bigmem"
    assert said in answer.remarks
    created = site.ask("bank.rate_create", partition="Savio_BigMem", weights={"cpu": 1})
    assert created.warnings == (said,)
    assert not any("partition normal" in one for one in answer.remarks)


def test_rates_are_imported_as_they_are_created(site: Site) -> None:
    plan = ImportPlan(rates=[Rate(cluster="c1", partition="normal", weights={"gpus": 1})])
    with pytest.raises(BankUsage, match=r"use gres/gpu$"), site.ledger.transaction() as t:
        apply_plan(t, plan, BY)
    picture = ClusterModel(cluster="c1", partitions={"normal": PartitionModel(name="normal")})
    plan = ImportPlan(rates=[Rate(cluster="c1", partition="normal", weights={"gres/gpu": 1})])
    with site.ledger.transaction() as t:
        t.set_mark("picture:c1", msgspec.json.encode(picture).decode())
        apply_plan(t, plan, BY)
    assert plan.remarks == ["no node of cluster c1 has gres/gpu now"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x = ",
        "PartitionPrice = 3",
        "[PartitionPrice]\na = -1",
        "[PartitionPrice]\na = true",
        "[PartitionPrice]\na = nan",
        "[PartitionPrice]\na = inf",
        '[PartitionPrice]\na = "dear"',
        "[PartitionPrice]\na = 0.0000001",
        "[PartitionPrice]\na = 1\n[QosMultiplier]\nb = 0.0001",
        '[PartitionPrice]\n"a b" = 1',
        "[PartitionPrice]\na = 1e999999999",
        "[PartitionPrice]\na = 1e-999999999",
        "[PartitionPrice]\na = " + "9" * 5000,
        "[PartitionPrice]\na = 1." + "9" * 5000,
        "[PartitionPrice]\na = '" + "9" * 5000 + "'",
        "a = " + "[" * 100_000,
    ],
)
def test_what_is_no_bank_config(text: str) -> None:
    with pytest.raises(BankUsage):
        read_bank_config(text, "c1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1e-40", "invalid price of partition a: 1.000e-40 has more than 30 digits"),
        (f"a = 0.{'1' * 31}", "invalid price of partition a: 1.111e-1 has more than 30 digits"),
        ("a = true", "the price of partition a is not a number: True"),
        (
            "a = 1\n[QosMultiplier]\nb = 1e31",
            "invalid multiplier of QOS b: 1.000e+31 has more than",
        ),
    ],
)
def test_an_invalid_number_of_a_bank_config_is_named(text: str, message: str) -> None:
    with pytest.raises(BankUsage, match=re.escape(message)):
        read_bank_config(f"[PartitionPrice]\n{text}", "c1")


def test_only_operators_import(site: Site) -> None:
    with pytest.raises(BankRefused):
        site.ask("bank.import", ADA, kind="csv", file={"text": TABLE})


def reads(text: str) -> list[ImportPlan]:
    """Return the results of every reader for an arbitrary text."""
    readers: list[Callable[[], ImportPlan]] = [
        lambda: read_csv(text, lambda _: None),
        lambda: read_dump(text),
        lambda: read_bank_config(text, "c1"),
    ]
    found = []
    for read in readers:
        try:
            found.append(read())
        except BankUsage:
            continue  # that is the other thing that may come of it
    return found


@with_any(st.text(max_size=300))
def test_any_text_is_a_plan_or_an_error(text: str) -> None:
    reads(text)


@with_any(st.lists(st.text(alphabet="account,user\"'\n=:-Parent 0.5", max_size=40), max_size=8))
def test_texts_that_nearly_are_tables(lines: list[str]) -> None:
    for head in ("account,user,amount,limit\n", "Parent - 'root'\n", "[PartitionPrice]\n"):
        for plan in reads(head + "\n".join(lines)):
            assert all(name == one.name == name.lower() for name, one in plan.accounts.items())
            assert all(money.amount > 0 for money in plan.money)


HEAD = "account,amount,end,note\n"
ROWS = ("physics,100,2027-01-01,grant\n", "optics,50,,\n", "optics,50,,\n")


def given(site: Site, text: str, name: str = "m.csv") -> list[tuple[str, int | None]]:
    """Return the new accounts and service units of an import."""
    changes = site.ask("bank.import", kind="csv", file={"name": name, "text": text}).changes
    return [
        (one.name, one.amount and one.amount // MICRO)
        for one in changes
        if one.change == "create" and one.object in ("deposit", "allocation")
    ]


def test_lines_that_move_within_a_file_give_nothing_again(site: Site) -> None:
    assert len(given(site, HEAD + "".join(ROWS))) == 3
    assert given(site, HEAD + "# a remark\n\n" + "".join(reversed(ROWS))) == []
    first = HEAD + "chemistry,7,,new\n" + "".join(ROWS) + ROWS[1]
    assert sorted(given(site, first)) == [("chemistry", 7), ("optics", 50)]
    assert given(site, first) == []


def test_money_of_a_file_that_was_changed_is_not_given_twice(site: Site) -> None:
    given(site, HEAD + "".join(ROWS))
    for changed in (
        "physics,200,2027-01-01,grant\n",
        "physics,100,2028-01-01,grant\n",
        "physics,100,2027-01-01,Grant 7\n",
    ):
        with site.ledger.reading() as t:
            before = t.seq
        with pytest.raises(BankUsage, match=r"line 2: physics has .*100\.00 that it granted"):
            given(site, HEAD + changed + "".join(ROWS[1:]))
        with site.ledger.reading() as t:
            assert t.seq == before
    # Service units of missing rows stay, and other rows are imported.
    answer = site.ask(
        "bank.import", kind="csv", file={"name": "m.csv", "text": HEAD + ROWS[1] + ROWS[2]}
    )
    assert answer.remarks[0].endswith("kept unchanged: 1")
    assert given(site, HEAD + ROWS[1] + ROWS[2] + "chemistry,1,,\n") == [("chemistry", 1)]


def test_money_that_has_ended_may_be_followed_by_more(site: Site) -> None:
    assert given(site, HEAD + "physics,100,now+1day,grant\n") == [("physics", 100)]
    assert given(site, HEAD + "physics,100,now+1day,grant\n") == []
    site.now += timedelta(days=2)
    assert given(site, HEAD + "physics,100,2027-06-01,grant\n") == [("physics", 100)]
