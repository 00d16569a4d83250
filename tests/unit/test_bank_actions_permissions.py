"""Permissions of bank actions, and idempotent money transfers."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import bank
from harness.events import NOON
from harness.jobs import record
from harness.site import ADA, BELA, COORDINATOR, NOBODY, OWNER, ROOT, Site
from steward.bank.actions.reports import UsageRequest, show_usage
from steward.bank.context import BankContext
from steward.bank.errors import BankRefused, BankUsage, GateUnavailable
from steward.bank.ledger import Authorship
from steward.bank.money import MICRO
from steward.bank.records import parse_charge_key
from steward.core.access import Caller, ClusterRoles
from steward.core.actions import ActionError, decode_request
from steward.core.errors import StewardError
from steward.core.records import UsageLine
from steward.core.sqlite import open_database, transaction
from steward.core.timestamps import to_micros
from steward.daemon.contexts import make_registry
from steward.daemon.registry import get_action
from steward.jobs import database_path
from steward.jobs.lines import put_lines
from steward.jobs.tables import MIGRATIONS
from steward.slurm.times import load_zone


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return bank.make_shared_site(tmp_path)


def accounts(site: Site, asker: Caller) -> list[str]:
    return [one.account for one in site.ask("bank.balance", asker).accounts]


def test_everybody_sees_their_own_accounts(site: Site) -> None:
    assert accounts(site, ROOT) == ["chemistry", "optics", "physics"]
    assert accounts(site, OWNER) == ["optics", "physics"]
    assert accounts(site, COORDINATOR) == ["chemistry"]
    assert accounts(site, ADA) == ["optics", "physics"]
    assert accounts(site, BELA) == ["chemistry"]
    assert accounts(site, NOBODY) == []


def test_what_is_used_is_shown_to_owners_and_coordinators(site: Site) -> None:
    bank.charge(site, 1, hours=4)
    bank.charge(site, 2, hours=2, account="optics")
    bank.charge(site, 3, hours=1, account="chemistry", user="bela")
    bank.charge(site, 4, hours=3, account="physics", user="bela")

    def used(asker: Caller, **request: Any) -> dict[tuple[str, str], int]:
        asked = {"by": ["account", "user"], "since": "2020-01-01", "until": "2030-01-01", **request}
        rows = site.ask("bank.usage", asker, **asked).rows
        return {(row.account, row.user): row.amount // MICRO for row in rows}

    physics = {("physics", "ada"): 4, ("physics", "bela"): 3, ("optics", "ada"): 2}
    assert used(OWNER) == physics
    assert used(OWNER, users=["bela"]) == {("physics", "bela"): 3}
    assert used(COORDINATOR) == {("chemistry", "bela"): 1}
    assert used(ADA) == {("physics", "ada"): 4, ("optics", "ada"): 2}
    assert used(BELA) == {("physics", "bela"): 3, ("chemistry", "bela"): 1}
    assert used(ROOT) == physics | {("chemistry", "bela"): 1}
    with pytest.raises(BankRefused, match=r"only operators .* charges of bela in all accounts"):
        used(ADA, users=["bela"])
    lacks = r"neither own nor coordinate account 'optics', .* bank account change optics --owners"
    with pytest.raises(BankRefused, match=lacks):
        used(ADA, users=["bela"], accounts=["optics"])
    with pytest.raises(BankRefused):
        used(OWNER, accounts=["chemistry"], users=["bela"])


@pytest.mark.parametrize("report", ["users", "accounts", "jobs", "waste", "waits", "partitions"])
def test_reports_show_owners_what_they_show_coordinators(site: Site, report: str) -> None:
    books = open_database(database_path(site.settings.state_dir), MIGRATIONS)
    start = to_micros(NOON)
    runs = [("physics", "ada"), ("optics", "ada"), ("chemistry", "bela")]
    lines = [
        UsageLine(
            cluster="c1",
            job_id=number,
            label=str(number),
            first_submit_us=start,
            submit_us=start,
            eligible_us=start,
            start_us=start,
            end_us=start + 3_600_000_000,
            account=account,
            user=user,
            uid=4001 + number,
            partition="debug",
            state="COMPLETED",
            cpus=1,
            requested_cpus=1,
            nodes=1,
        )
        for number, (account, user) in enumerate(runs, 1)
    ]
    with transaction(books):
        put_lines(books, lines)
    registry = make_registry(site.settings)

    def told(asker: Caller, **request: Any) -> int:
        asked = {"since": "2020-01-01", "until": "2030-01-01", "clusters": ["c1"], **request}
        name = f"reports.{report}"
        rows = registry.call(name, asker, registry.decode(name, asked)).rows
        return max((row.jobs for row in rows), default=0) if report == "jobs" else len(rows)

    every, owned = told(ROOT, accounts=["physics", "optics"]), told(OWNER)
    assert owned == every > 0
    assert told(OWNER, accounts=["chemistry"]) == 0
    assert told(NOBODY) == 0


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("deposit", {"account": "physics", "amount": 1, "reason": "x"}),
        ("withdraw", {"account": "physics", "amount": 1, "reason": "x"}),
        ("transfer", {"source": "physics", "target": "optics", "amount": 1, "reason": "x"}),
        ("refund", {"account": "physics", "amount": 1, "reason": "x"}),
        ("adjust", {"account": "physics", "amount": 1, "reason": "x"}),
        ("account_create", {"name": "new"}),
        ("account_change", {"name": "physics", "credit_limit": 5}),
        ("allocation_create", {"account": "physics", "amount": 1, "end": "2027-01-01"}),
        ("allocation_change", {"number": 1, "note": "x"}),
        ("rate_create", {"partition": "*", "free": True}),
        ("rate_change", {"partition": "debug", "minimum": 1}),
        ("mode", {"mode": "off"}),
        ("reconcile", {}),
        ("backfill", {"since": "2026-01-01"}),
        ("check", {}),
        ("import", {"kind": "csv", "file": {"text": "account\nx\n"}}),
    ],
)
def test_only_operators_change_anything(site: Site, name: str, request_: dict[str, Any]) -> None:
    for asker in (OWNER, COORDINATOR, ADA, NOBODY):
        with site.ledger.reading() as t:
            before = t.seq
        with pytest.raises(BankRefused):
            site.ask(f"bank.{name}", asker, **request_)
        with site.ledger.reading() as t:
            assert t.seq == before


def test_modes_of_accounts_are_shown_to_whom_they_belong(site: Site) -> None:
    site.ask("bank.mode", mode="enforce")
    for account in ("physics", "chemistry"):
        site.ask("bank.mode", mode="off", account=account)
    for asker, seen in (
        (ROOT, {"", "physics", "chemistry"}),
        (OWNER, {"", "physics"}),
        (COORDINATOR, {"", "chemistry"}),
        (ADA, {"", "physics"}),
        (NOBODY, {""}),
    ):
        assert {rule.account for rule in site.ask("bank.mode", asker).rules} == seen, asker


def test_others_accounts_are_as_if_they_were_not_there(site: Site) -> None:
    for name in ("balance", "account_show"):
        field = "accounts" if name == "balance" else "names"
        with pytest.raises(BankRefused, match="does not list you in account 'chemistry'"):
            site.ask(f"bank.{name}", ADA, **{field: ["chemistry"]})
        with pytest.raises(BankRefused, match="does not list you in account 'nowhere'"):
            site.ask(f"bank.{name}", ADA, **{field: ["nowhere"]})
    with pytest.raises(BankUsage):
        site.ask("bank.balance", ROOT, accounts=["nowhere"])


def test_what_an_account_owes_that_nobody_created_is_shown(site: Site) -> None:
    bank.charge(site, 7, hours=4, account="stray")
    shown = {one.account: one for one in site.ask("bank.balance").accounts}
    assert sorted(shown) == ["chemistry", "optics", "physics", "stray"]
    assert (shown["stray"].balance, shown["stray"].known) == (-4 * MICRO, False)
    assert shown["physics"].known
    assert [one.account for one in site.ask("bank.balance", accounts=["Stray"]).accounts] == [
        "stray"
    ]
    assert site.ask("bank.statement", account="stray").statement.lines
    assert accounts(site, BELA) == ["chemistry"]


def test_owners_and_coordinators_set_limits(site: Site) -> None:
    site.ask("bank.user_change", OWNER, account="Physics", user="ada", limit=7)
    site.ask("bank.user_create", OWNER, account="optics", user="gus", limit=None)
    site.ask("bank.user_create", COORDINATOR, account="chemistry", user="ada", limit=3)
    for asker in (ADA, COORDINATOR, NOBODY):
        with pytest.raises(BankRefused, match="only owners"):
            site.ask("bank.user_change", asker, account="physics", user="ada", limit="none")
    page = site.ask("bank.user_show", OWNER)
    limits = {(one.account, one.user): one.limit for one in page.users}
    assert limits["physics", "ada"] == 7
    assert ("optics", "gus") in limits
    assert not any(account == "chemistry" for account, _ in limits)
    with pytest.raises(BankUsage, match="already"):
        site.ask("bank.user_create", OWNER, account="physics", user="ada")


def test_a_change_of_the_listing_leaves_the_limit(site: Site) -> None:
    page = site.ask("bank.user_change", OWNER, account="physics", user="ada", listed=False)
    ada = next(one for one in page.users if one.user == "ada")
    assert (ada.limit, ada.listed) == (500 * MICRO, False)


def test_who_is_only_in_an_account_sees_their_own_use(site: Site) -> None:
    bank.charge(site, 1, hours=2)
    bank.charge(site, 2, hours=3, user="gus")
    whole = site.ask("bank.statement", OWNER, account="physics").statement
    charged = [line.user for line in whole.lines if line.kind == "charge"]
    assert sorted(charged) == ["ada", "gus"]
    own = site.ask("bank.statement", ADA, account="physics").statement
    assert [line.user for line in own.lines] == ["ada"]
    for name in ({"account": "physics", "user": "gus"}, {"user": "gus"}, {}):
        with pytest.raises(BankRefused):
            site.ask("bank.statement", ADA, **name)
    used = site.ask("bank.usage", ADA, accounts=["physics"])
    assert [(row.user, row.amount) for row in used.rows] == [("ada", 2 * MICRO)]
    assert site.ask("bank.usage", OWNER, accounts=["physics"]).total == 5 * MICRO
    assert site.ask("bank.usage", ROOT, by=["account", "month"]).total == 5 * MICRO
    with pytest.raises(BankRefused):
        site.ask("bank.usage", ADA, users=["gus"])
    with pytest.raises(BankRefused):
        site.ask("bank.usage", NOBODY)


def test_months_and_shares(site: Site) -> None:
    bank.charge(site, 1, start=NOON - timedelta(days=40))
    bank.charge(site, 2, start=NOON - timedelta(days=1))
    bank.charge(site, 3, hours=2, user="gus")
    rows = site.ask("bank.usage", ROOT, by=["month", "user"], since="2026-01-01").rows
    assert [row.month for row in rows] == sorted(row.month for row in rows)
    assert sum(row.amount for row in rows) == 4 * MICRO


def test_a_key_makes_a_repeat_harmless(site: Site) -> None:
    gift = {"account": "physics", "amount": 5 * MICRO, "reason": "grant", "key": "k1"}
    first = site.ask("bank.deposit", **gift)
    again = site.ask("bank.deposit", **gift)
    assert not first.repeated
    assert again.repeated
    assert again.transfers == first.transfers
    assert again.balances == {"physics": 1005 * MICRO}
    with pytest.raises(BankUsage):
        site.ask("bank.deposit", **{**gift, "amount": 6 * MICRO})


@pytest.mark.parametrize("reason", ["", "  \t"])
def test_money_moves_for_a_reason(site: Site, reason: str) -> None:
    with pytest.raises(BankUsage, match="`reason`"):
        site.ask("bank.deposit", account="physics", amount=1, reason=reason)
    with pytest.raises(BankUsage, match="`reason`"):
        site.ask("bank.withdraw", account="physics", amount=1, reason=reason)


@pytest.mark.parametrize("amount", [0, -1])
def test_what_moves_is_above_zero(site: Site, amount: int) -> None:
    for name in ("deposit", "withdraw"):
        with pytest.raises(BankUsage, match="more than 0"):
            site.ask(f"bank.{name}", account="physics", amount=amount, reason="x")
    with pytest.raises(BankUsage):
        site.ask("bank.adjust", account="physics", amount=0, reason="x")


def test_no_more_is_taken_than_there_is(site: Site) -> None:
    with pytest.raises(BankRefused):
        site.ask("bank.withdraw", account="chemistry", amount=11 * MICRO, reason="x")
    with pytest.raises(BankRefused):
        site.ask(
            "bank.transfer", source="chemistry", target="optics", amount=11 * MICRO, reason="x"
        )
    moved = site.ask("bank.transfer", source="chemistry", target="optics", amount=MICRO, reason="x")
    assert moved.balances == {"chemistry": 9 * MICRO, "optics": MICRO}


def test_where_a_gate_has_run_nothing_leaves_without_it(site: Site) -> None:
    (site.state / "gate.db").touch()
    for name in ("withdraw", "adjust"):
        amount = MICRO if name == "withdraw" else -MICRO
        with pytest.raises(GateUnavailable, match="Start 'steward serve'"):
            site.ask(f"bank.{name}", account="physics", amount=amount, reason="x")
    assert site.ask("bank.balance").accounts[2].balance == 1000 * MICRO
    assert site.ask("bank.deposit", account="physics", amount=1, reason="x").gate_knows is False


def test_a_jobs_charges_are_refunded_as_far_as_they_go(site: Site) -> None:
    bank.charge(site, 7, hours=4)
    part = site.ask("bank.refund", job="7", amount=MICRO, reason="node was slow", key="a")
    assert part.transfers[0].amount == MICRO
    assert site.ask("bank.refund", job="7", amount=MICRO, reason="node was slow", key="a").repeated
    with pytest.raises(BankUsage, match="refund exceeds the charge of job 7"):
        site.ask("bank.refund", job="7", amount=4 * MICRO, reason="x")
    assert site.ask("bank.refund", job="7", reason="all of it").transfers[0].amount == 3 * MICRO
    with pytest.raises(BankUsage, match="job 7 has no charge left"):
        site.ask("bank.refund", job="7", reason="again")
    with pytest.raises(BankUsage, match="either `account`"):
        site.ask("bank.refund", reason="x")
    assert not site.ask("bank.check").findings


def test_a_charge_is_explained_by_its_sum(site: Site) -> None:
    bank.charge(site, 7, hours=4)
    for asker in (ROOT, OWNER, ADA):
        answer = site.ask("bank.explain", asker, job="7")
        assert (answer.amount, answer.is_right) == (4 * MICRO, True)
        assert answer.charges[0].recomputed == 4 * MICRO
        assert answer.charges[0].lines
    for asker in (BELA, NOBODY):
        with pytest.raises(BankRefused):
            site.ask("bank.explain", asker, job="7")
    for unknown in ("8", "x", "7_1"):
        with pytest.raises(BankUsage):
            site.ask("bank.explain", job=unknown)


def test_array_tasks_are_named_as_slurm_does(site: Site) -> None:
    bank.feed(site, bank.life(7, begin=-60, array_job_id=5, array_task="2"))
    bank.charge(site, 7)
    bank.charge(site, 8)
    answer = site.ask("bank.statement", account="physics")
    assert list(answer.names.values()) == ["5_2"]
    assert [line.name for line in site.ask("bank.explain", job="5_2").charges] == ["5_2"]
    assert [line.name for line in site.ask("bank.explain", job="8").charges] == ["8"]


def test_a_job_that_another_program_named_is_listed(site: Site) -> None:
    """Its name may hold slashes, which give its charge's key as many parts as a job's key."""
    own = bank.charge(site, 7)
    told = msgspec.structs.replace(own, job_id=0, told="a/b/c", source="mybrc")
    with site.ledger.transaction() as t:
        t.charges.post(told, Authorship(who="mybrc", why="told", at=NOON))
    charges = [
        line.charge for line in site.ask("bank.statement", account="physics").statement.lines
    ]
    assert charges[-2:] == [own.key, "c1/told/a/b/c"]
    assert parse_charge_key(charges[-1]) is None
    assert parse_charge_key(own.key) == ("c1", 7, int(own.first_submit.timestamp()))


def test_a_job_without_a_charge_is_told_why(site: Site) -> None:
    def told(asker: Caller, job: str) -> str:
        with pytest.raises(BankUsage) as refused:
            site.ask("bank.explain", asker, job=job)
        return str(refused.value)

    pending, running, ended = bank.life(7)
    bank.feed(site, [pending])
    assert "yet: it is pending" in told(ADA, "7")
    bank.feed(site, [running])
    site.now = NOON + timedelta(seconds=1801)
    for asker in (ROOT, OWNER, ADA):
        # Two CPUs for half an hour, at a unit each hour.
        assert "it is running, and Steward charges it when it ends" in told(asker, "7")
        assert told(asker, "7").endswith("accrued so far: 1.00 SU")
    for stranger in (BELA, NOBODY):
        assert told(stranger, "7") == "job 7 on c1 has no charges"
    bank.feed(site, [ended])
    assert "it ended, and Steward charges it" in told(ADA, "7")
    bank.feed(site, bank.life(8, partition="other"))
    assert "partition other of cluster c1 has no rate" in told(ADA, "8")
    assert told(ADA, "8").endswith("Steward charges the job after its end, once a rate applies")
    bank.feed(site, [record(9, 0, "CANCELLED", seen=5, end=5, user="ada", account="physics")])
    assert told(ADA, "9").endswith("it never ran")


@pytest.mark.parametrize("private", [False, True])
def test_what_is_told_of_others_jobs_does_not_show_which_there_are(
    site: Site, private: bool
) -> None:
    bank.charge(site, 7, hours=4)
    bank.feed(site, [record(8, 0, "PENDING", seen=5, user="ada", account="physics")])
    site.standing = ClusterRoles(private_data=frozenset({"jobs"} if private else ()))
    for job in ("7", "8", "9"):
        with pytest.raises(StewardError) as refused:
            site.ask("bank.explain", BELA, job=job)
        is_known = job == "7" and not private
        assert str(refused.value) == (
            "permission denied: job 7 belongs to another user"
            if is_known
            else f"job {job} on c1 has no charges"
        )


def test_a_charge_that_is_not_what_it_should_be_is_seen(site: Site) -> None:
    charge = bank.charge(site, 7, hours=4)
    with site.ledger.transaction() as t:
        wrong = {name: getattr(charge, name) for name in charge.__struct_fields__}
        t.charges.post(
            type(charge)(**{**wrong, "amount": 5 * MICRO}), Authorship(who="x", why="wrong")
        )
    assert not site.ask("bank.explain", job="7").is_right


def test_without_a_bank_it_is_said(tmp_path: Path) -> None:
    import msgspec

    from steward.bank.context import BankContext
    from steward.bank.settings import BankSettings

    site = bank.make_shared_site(tmp_path)
    off = msgspec.structs.replace(site.settings, bank=BankSettings())
    with pytest.raises(BankUsage, match="the bank is disabled"):
        BankContext(off, access=site.context("bank").access).ledger  # noqa: B018 -- opening it is the point


def test_months_are_cut_in_the_hosts_zone_where_the_cluster_names_none(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = msgspec.structs.replace(site.settings.cluster["c1"], timezone="")
    settings = msgspec.structs.replace(site.settings, cluster={"c1": cluster})
    room = BankContext(settings, access=site.context("bank").access, now=lambda: site.now)
    bank.charge(site, 1, start=datetime(2026, 2, 28, 11, 30, tzinfo=UTC))
    request = UsageRequest(by=("month",), since="2026-01-01")
    try:
        for zone, month in (("Pacific/Auckland", "2026-03"), ("America/Lima", "2026-02")):
            monkeypatch.setenv("TZ", zone)
            load_zone.cache_clear()
            (row,) = show_usage(room, ROOT, request).rows
            assert row.month == month
    finally:
        monkeypatch.undo()
        load_zone.cache_clear()
        room.close()


def test_a_reason_that_stays_in_the_ledger_for_good_is_short() -> None:
    taken = {"account": "a", "user": "ada", "limit": 1, "reason": "x" * 1000}
    change = get_action("bank.user_change")
    assert decode_request(change, taken).reason == taken["reason"]
    with pytest.raises(ActionError, match="length <= 1000"):
        decode_request(change, taken | {"reason": "x" * 1001})
