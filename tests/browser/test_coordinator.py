"""Coordinator of slurmdbd in a real browser, who sees their accounts and no others."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest
from browser_user import COLOURS, Person, chromium
from job_submission import state_of, wait_until
from playwright.sync_api import Browser, expect
from populated_cluster import DEPOSIT, OPERATORS_FORMS, TOKEN
from web_cluster import CLUSTER, JobSite, job_site

pytestmark = [pytest.mark.browser, pytest.mark.database, pytest.mark.timeout(1200)]
COORDINATOR: Final = "ada"
"""Coordinator of physics in Slurm, the sandbox's first user; in the bank she owns nothing."""
MEMBER: Final = "grace"
_PATIENCE_S: Final = 60


class Ground(msgspec.Struct, frozen=True):
    """Cluster whose jobs are private.

    Attributes:
        site: The cluster and the pages.
        browser: The browser.
        charged: A finished and charged job of the member in physics.
        runs: A running job with an SU hold.
        elsewhere: A pending job of the member in chemistry.
    """

    site: JobSite
    browser: Browser
    charged: int
    runs: int
    elsewhere: int

    def person(self, user: str, **options: object) -> Person:
        """Return a user with a browser window."""
        return Person(self.browser, self.site.web, user, **options)

    def books(self, *words: str) -> Any:
        """Return the output of a bank command as root."""
        return self.site.web.daemon.ask_json("bank", *words)

    @property
    def forbidden(self) -> tuple[str, ...]:
        """Return pages that no coordinator of physics may see."""
        hers = f"/jobs/{CLUSTER}/{self.runs}"
        other = f"/jobs/{CLUSTER}/{self.elsewhere}"
        return (
            *(f"{hers}/script", f"{hers}/environment", other, f"{other}/compare?with={self.runs}"),
            *("/accounts/chemistry", "/accounts/chemistry/statement", "/status", "/rules"),
        )


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    cluster = {"accounting": True, "private_data": "jobs"}
    with job_site("", cluster_options=cluster) as site, chromium() as browser:
        site.web.daemon.ask("bank", "mode", "observe", "--reason", "test")
        hers: dict[str, Any] = {
            "user": MEMBER,
            "env": {"API_TOKEN": TOKEN, "COLOUR": "teal"},
            "time": "30",
        }
        charged = site.submit("echo my-own-words; sleep 1", job_name="done", **hers)
        runs = site.submit("echo my-own-words; sleep 1700", job_name="runs", **hers)
        elsewhere = site.submit(
            "true", job_name="elsewhere", account="chemistry", begin="now+1days", **hers
        )
        found = Ground(site, browser, charged, runs, elsewhere)
        site.until(charged, "COMPLETED")
        site.until(runs, "RUNNING")
        site.until(elsewhere, "PENDING")
        wait_until(lambda: found.books("usage", "physics", "-u", MEMBER)["total"] > 0, _PATIENCE_S)
        wait_until(lambda: found.books("holds", "-j", str(runs))["total"] > 0, _PATIENCE_S)
        yield found


@pytest.mark.parametrize("colours", COLOURS)
def test_every_page_is_there_without_hindrance(ground: Ground, colours: str) -> None:
    person = ground.person(COORDINATOR, color_scheme=colours)
    person.assert_no_hindrance(
        (
            *("/", "/jobs", "/accounts", "/accounts/physics", "/accounts/physics/statement"),
            *(f"/jobs/{CLUSTER}/{ground.charged}", f"/jobs/{CLUSTER}/{ground.runs}"),
            *(f"/users/{MEMBER}", f"/users/{COORDINATOR}", "/cluster", f"/nodes/{CLUSTER}/node2"),
            *("/events", "/reports", "/reports/accounts", "/reports/users", "/actions"),
        )
    )
    person.close()


def test_of_the_account_all_is_seen_but_scripts(ground: Ground) -> None:
    person = ground.person(COORDINATOR)
    page = person.page
    person.open("/jobs")
    for job in (ground.charged, ground.runs):
        expect(page.get_by_role("link", name=str(job), exact=True)).to_be_visible()
    assert page.get_by_role("link", name=str(ground.elsewhere), exact=True).count() == 0
    person.open(f"/jobs/{CLUSTER}/{ground.charged}")
    expect(page.locator("h1")).to_contain_text(str(ground.charged))
    expect(page.get_by_text("COMPLETED").first).to_be_visible()
    for secret in ("my-own-words", TOKEN, "teal"):
        assert secret not in page.content(), secret
    for verb in ("Cancel", "Hold", "Requeue"):
        assert page.get_by_role("button", name=verb).count() == 0, verb
    person.open("/accounts/physics")
    held = page.get_by_role("region", name="Holds")
    expect(held.get_by_role("link", name=str(ground.runs), exact=True)).to_be_visible()
    for region in ("Members", "Usage by user"):
        shown = page.get_by_role("region", name=region)
        expect(shown.get_by_role("link", name=MEMBER, exact=True)).to_be_visible()
    lines = page.get_by_role("region", name="Statement")
    expect(lines.get_by_role("cell", name=MEMBER, exact=True).first).to_be_visible()
    assert page.get_by_role("button", name="Post transaction").count() == 0
    person.open("/reports/accounts?since=now-1days")
    expect(page.locator("table").get_by_text("physics").first).to_be_visible()
    person.close()
    assert person.troubles == []


def test_a_members_limit_is_set_and_its_member_is_told(ground: Ground) -> None:
    person = ground.person(COORDINATOR)
    page = person.page
    person.open("/accounts/physics")
    page.get_by_role("combobox", name="User").fill(MEMBER)
    page.get_by_role("textbox", name="Limit").fill("321")
    page.get_by_role("textbox", name="Reason").first.fill("until the proposal is through")
    page.get_by_role("button", name="Set limit").click()
    members = page.get_by_role("region", name="Members")
    # The limit, and the rest of it.
    expect(members.get_by_role("cell", name="321.00")).to_have_count(2)
    person.close()
    assert person.troubles == []
    said = ground.books("user", "show", MEMBER)
    limits = {one["account"]: one["limit"] for one in said["users"]}
    assert limits["physics"] == 321 * 10**6
    member = ground.person(MEMBER)
    member.open("/accounts/physics")
    expect(member.page.get_by_text("321.00 SU, 321.00 SU remaining")).to_be_visible()
    # A member who does not coordinate the account gets no such form.
    assert member.page.get_by_role("button", name="Set limit").count() == 0
    member.close()


def test_what_a_coordinator_may_not_is_refused(ground: Ground) -> None:
    person = ground.person(COORDINATOR)
    page = person.page
    for path in ground.forbidden:
        assert person.open(path) in (403, 404), path
        for secret in ("my-own-words", TOKEN, "teal", "elsewhere"):
            assert secret not in page.content(), (path, secret)
    person.open(f"/jobs/{CLUSTER}/{ground.elsewhere}/cost")
    assert "Charged" not in page.content()
    person.open(f"/nodes/{CLUSTER}/node2")
    for verb in ("Drain", "Resume", "Reserve"):
        for role in ("button", "link"):
            assert page.get_by_role(role, name=verb).count() == 0, verb
    before = ground.books("user", "show", "--account", "chemistry")
    person.send_by_hand(
        (
            (f"/jobs/{CLUSTER}/{ground.runs}/cancel", {}),
            (f"/jobs/{CLUSTER}/{ground.elsewhere}/cancel", {}),
            ("/accounts/chemistry/limit", {"user": MEMBER, "limit": "1", "reason": "x"}),
            ("/accounts/physics/money", DEPOSIT),
            *OPERATORS_FORMS,
        )
    )
    person.close()
    # By Slurm itself: what Steward knows of is what the last look at the queue showed.
    assert state_of(ground.site.cluster, ground.runs) == "RUNNING"
    assert state_of(ground.site.cluster, ground.elsewhere) == "PENDING"
    assert "DRAIN" not in ground.site.cluster.run(["scontrol", "show", "node", "node1"]).stdout
    assert ground.books("user", "show", "--account", "chemistry") == before
    statement = ground.books("statement", "physics")
    kinds = [line["kind"] for line in statement["statement"]["lines"]]
    assert kinds.count("deposit") == 1
