"""Pages of accounts on a real daemon: contents and changes for members, owners and operators."""

import csv
import io
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from job_submission import wait_until
from web_site import OPERATOR, USERS, WebSite

from steward.bank.ledger import Account, Authorship, open_ledger
from steward.bank.money import MICRO
from steward.bank.records import Charge, ResourceUse
from steward.bank.settings import BankSettings
from steward.core.events import utc_now
from steward.sandbox import Sandbox, SandboxSpec

pytestmark = pytest.mark.wide
BY = Authorship(who="root", why="=cmd|' /C calc'!A0")


@pytest.fixture(scope="module")
def site() -> Iterator[WebSite]:
    with Sandbox.up(SandboxSpec(user_names=USERS), report=print) as box:
        home = Path(box.directory) / "steward"
        with WebSite(box, home, settings={"bank": BankSettings(enabled=True)}) as site:
            books(site)
            yield site


def books(site: WebSite) -> None:
    """Create two accounts with a common parent; ada owns the first, grace is a member of it."""
    ledger = open_ledger(site.daemon.settings)
    now = utc_now()
    with ledger.transaction() as t:
        t.accounts.create(Account(name="science"), BY)
        t.accounts.create(Account(name="physics", parent="science", owners=("ada",)), BY)
        t.accounts.create(Account(name="chemistry", parent="science"), BY)
        t.allocations.create(
            "physics",
            1000 * MICRO,
            BY,
            begin=now - timedelta(days=30),
            end=now + timedelta(days=30),
            note="a grant",
        )
        t.transfers.deposit("chemistry", 77 * MICRO, BY)
        for user in ("ada", "grace"):
            t.accounts.set_user("physics", user, BY, limit=None)
        stray = Charge(
            cluster="box",
            job_id=99,
            first_submit=now,
            account="left-over",
            user="olga",
            amount=MICRO,
            use=ResourceUse(tres={"cpu": 1}, start=now, seconds=1800),
        )
        t.charges.post(stray, BY)
        for number in range(60):
            start = now - timedelta(hours=number + 1)
            t.charges.post(
                Charge(
                    cluster="box",
                    job_id=100 + number,
                    first_submit=start,
                    account="physics",
                    user="grace" if number % 3 else "ada",
                    amount=MICRO,
                    use=ResourceUse(tres={"cpu": 1}, start=start, seconds=1800),
                ),
                BY,
            )
    ledger.close()


def test_everybody_sees_their_accounts_and_no_others(site: WebSite) -> None:
    assert "physics" in (mine := site.visitor("grace").page("/accounts"))
    assert "chemistry" not in mine
    every = site.visitor(OPERATOR).page("/accounts")
    assert every.index("science") < every.index("chemistry") < every.index("physics")
    grace = site.visitor("grace")
    # Accounts that only charges created have a page, too.
    operator = site.visitor(OPERATOR)
    assert "left-over" in every
    left_over = operator.page("/accounts/left-over")
    assert "This account was never created" in left_over
    assert "unknown: the gate does not answer" not in left_over
    for path in ("/accounts/chemistry", "/accounts/chemistry/statement", "/accounts/nonsense"):
        assert grace.get(path).status_code in (403, 404), path
    assert "77" not in grace.get("/accounts/chemistry").text


def test_what_members_and_owners_are_told(site: WebSite) -> None:
    owner, member = site.visitor("ada"), site.visitor("grace")
    whole, part = owner.page("/accounts/physics"), member.page("/accounts/physics")
    for page in (whole, part):
        assert "940.00" in page
        assert "a grant" in page
        assert ">Forecast<" in page
        assert "data-plot" in page
    assert "Set limit" in whole
    assert "Set limit" not in part
    # Owners see usage and transactions of all members, members only their own.
    assert 'href="/users/grace"' in whole
    assert 'href="/users/ada"' not in part.partition("Usage by user")[2].partition("Members")[0]
    assert "Post transaction" not in whole
    assert "Post transaction" in site.visitor(OPERATOR).page("/accounts/physics")


def test_the_owner_sets_a_limit_and_nobody_else(site: WebSite) -> None:
    owner, member = site.visitor("ada"), site.visitor("grace")
    fields = {"user": "grace", "limit": "45.5", "reason": "spring"}
    assert member.submit("/accounts/physics/limit", **fields).status_code == 400
    assert "no limit" not in member.page("/accounts").partition("physics")[0]
    answer = owner.submit("/accounts/physics/limit", **fields)
    assert answer.status_code == 303, answer.text
    # Of 45.50 she has spent 40.
    assert "5.50" in member.page("/accounts")
    wrong = owner.submit("/accounts/physics/limit", user="grace", limit="much")
    assert wrong.status_code == 400
    assert 'role="alert"' in wrong.text
    assert owner.submit("/accounts/physics/limit", user="grace", limit="").status_code == 303
    assert "5.50" not in member.page("/accounts")


def test_operators_book_money_once(site: WebSite) -> None:
    operator = site.visitor(OPERATOR)
    fields = {"kind": "deposit", "amount": "12", "reason": "more", "key": "page-1"}
    for _ in range(2):
        assert operator.submit("/accounts/science/money", **fields).status_code == 303
    assert "12.00" in operator.page("/accounts/science")
    assert "24.00" not in operator.page("/accounts/science")
    refused = site.visitor("ada").submit("/accounts/physics/money", **{**fields, "key": "page-2"})
    assert refused.status_code == 400
    assert "940.00" in operator.page("/accounts/physics")
    assert operator.submit("/accounts/science/money", kind="steal").status_code == 404


def test_a_statement_is_paged_and_downloaded(site: WebSite) -> None:
    owner = site.visitor("ada")
    numbers: list[str] = []
    path = "/accounts/physics/statement?since=1970-01-01"
    while path:
        page = owner.page(path)
        rows = page.partition("<tbody>")[2].partition("</tbody>")[0].split("<tr>")[1:]
        numbers += [row.partition('class="n">')[2].partition("<")[0] for row in rows]
        link = page.partition('<p><a href="/accounts/physics/statement?')[2].partition('"')[0]
        path = f"/accounts/physics/statement?{link.replace('&amp;', '&')}" if link else ""
    assert numbers == sorted(set(numbers), key=int, reverse=True)
    assert len(numbers) == 61
    query = "since=1970-01-01"
    said = owner.page(f"/accounts/physics/statement?form=csv&{query}")
    lines = list(csv.DictReader(io.StringIO(said)))
    assert [line["Number"] for line in lines] == numbers[::-1]
    assert lines[-1]["Balance"] == "940.000000"
    # Text of users must not become a formula of a spreadsheet.
    assert {line["Reason"][:2] for line in lines} == {"'="}
    answer: httpx.Response = owner.get(f"/accounts/physics/statement?form=json&{query}")
    assert len(answer.json()["statement"]["lines"]) == 61


def test_the_gate_away_leaves_the_rest(site: WebSite) -> None:
    operator = site.visitor(OPERATOR)
    wait_until(lambda: "Available" in operator.page("/accounts/physics"))
    assert "physics" in operator.page("/accounts/physics")
