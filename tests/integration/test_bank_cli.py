"""``steward bank`` on a real cluster: a quote, a rejection, a charge, and their reports."""

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from bank_cluster import ACCOUNTS, CPU, SHELL, BankSite, bank_site
from job_submission import wait_until

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

PHYSICS, CHEMISTRY = ACCOUNTS


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[BankSite]:
    with bank_site(slurm_version) as found:
        # For one CPU and an hour, with Slurm's own minute, and a little.
        found.open({PHYSICS: 100 * CPU, CHEMISTRY: 2 * CPU})
        found.start()
        yield found


def asked(site: BankSite, *words: str, user: str = "") -> Any:
    """Return the JSON that a command prints."""
    return json.loads(site.bank(*words, "--json", user=user))


def free(site: BankSite, account: str) -> int:
    accounts = asked(site, "balance", account)["accounts"]
    return int(accounts[0]["available"])


def test_a_quote_is_what_is_held_then(site: BankSite) -> None:
    words = ("-n1", "-t", "30", f"--account={PHYSICS}")
    quote = asked(site, "quote", *words)
    assert quote["is_admitted"]
    assert quote["available"] == free(site, PHYSICS)
    job = site.submit(f"{SHELL}exit 0\n", ntasks=1, time=30, begin="now+50")
    try:
        wait_until(lambda: any(one.job_id == job and one.confirmed for one in site.holds()))
        held = asked(site, "holds", "-j", str(job))["holds"][0]
        assert held["account"] == PHYSICS
        assert held["amount"] <= quote["amount"]
    finally:
        site.as_root("scancel", str(job))
    wait_until(lambda: not site.held())


def test_what_is_refused_is_said_before(site: BankSite) -> None:
    words = ("-n1", "-t", "600", f"--account={CHEMISTRY}")
    assert asked(site, "quote", *words)["is_admitted"], "root is exempt"
    assert asked(site, "quote", *words, user=site.user)["is_admitted"] is None, "it is not theirs"
    other = next(name for name in site.cluster.users if name != site.user)
    site.bank("user", "create", CHEMISTRY, other, "--limit", "none")
    for found in (
        asked(site, "quote", *words, user=other),
        asked(site, "quote", "--as", other, *words),
    ):
        assert found["is_admitted"] is False
    tried = site.tries(f"{SHELL}exit 0\n", "-n1", "-t", "600", f"--account={CHEMISTRY}")
    assert tried.returncode != 0
    assert CHEMISTRY in tried.stderr
    refused = asked(site, "would-reject", "--all", "-A", CHEMISTRY)["rejections"]
    assert not refused or refused[-1]["mode"] == "enforce"


def test_a_job_is_charged_shown_and_proved(site: BankSite) -> None:
    job = site.submit(f"{SHELL}sleep 2\n", ntasks=1, time=5)
    site.until_charged([job])
    amount = site.charged()[job]
    answer = asked(site, "explain", str(job))
    assert (answer["amount"], answer["is_right"]) == (amount, True)
    lines = asked(site, "statement", PHYSICS)["statement"]["lines"]
    assert lines[-1]["amount"] == -amount
    assert asked(site, "usage", PHYSICS)["rows"][0]["user"] == site.user
    proof = asked(site, "check")
    assert proof["findings"] == []
    assert proof["holds"] == 0
    assert asked(site, "reconcile", "--dry-run")["differences"] == []


def test_an_ordinary_user_sees_their_own(site: BankSite) -> None:
    job = site.submit(f"{SHELL}true\n", ntasks=1, time=5)
    site.until_charged([job])
    mine = asked(site, "balance", user=site.user)["accounts"]
    assert [one["account"] for one in mine] == [PHYSICS]
    assert "charged" in site.bank("explain", str(job), user=site.user)
    assert (
        "only operators"
        in site.daemon.ask(
            "bank", "deposit", PHYSICS, "1", "--reason", "mine", user=site.user, check=False
        ).stderr
    )


def test_an_owner_is_shown_what_the_account_used(site: BankSite) -> None:
    # One that ran for less than a second may cost nothing.
    job = site.submit(f"{SHELL}sleep 2\n", ntasks=1, time=5)
    site.until_charged([job])
    owner = list(site.cluster.users)[-1]
    report = ("report", "users", "-S", "now-1hour", "-E", "now+1hour", "-A", PHYSICS)

    def reported() -> set[str]:
        answer = json.loads(site.daemon.ask(*report, "--json", user=owner).stdout)
        return {row["user"] for row in answer["rows"]}

    assert owner != site.user
    assert not reported()
    site.bank("account", "change", PHYSICS, "--owners", owner)
    try:
        wait_until(lambda: site.user in reported())
        rows = asked(site, "usage", user=owner)["rows"]
        assert site.user in {row["user"] for row in rows}
    finally:
        site.bank("account", "change", PHYSICS, "--owners", "")
    wait_until(lambda: not reported())


def test_money_that_is_held_does_not_leave(site: BankSite) -> None:
    job = site.submit(f"{SHELL}true\n", account=CHEMISTRY, ntasks=1, time=60, begin="now+50")
    try:
        wait_until(lambda: any(one.job_id == job for one in site.holds()))
        left = free(site, CHEMISTRY)
        over = f"{(left + 1) / 1e6:.6f}"
        tried = site.daemon.ask("bank", "withdraw", CHEMISTRY, over, "--reason", "x", check=False)
        assert tried.returncode == 1
        site.bank("withdraw", CHEMISTRY, f"{left / 1e6:.6f}", "--reason", "all that is free")
        assert free(site, CHEMISTRY) == 0
    finally:
        site.as_root("scancel", str(job))
    wait_until(lambda: free(site, CHEMISTRY) > 0)
