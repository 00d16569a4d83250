"""Charges that clients of the myBRC API report: each once, to a hundredth of a SU."""

import math
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servers.mybrc import BY, SU, balance, mybrc_settings, with_money
from steward.bank.ledger import open_ledger
from steward.bank.records import Charge, Rate, ResourceUse
from steward.bank.remote import cancel_reported_charges
from steward.core.config import Settings
from steward.core.events import utc_now
from steward.extensions.mybrc.services import JobFilters, JobRegistry, list_partitions, list_users
from steward.extensions.mybrc.wire import ApiError, JobSent
from steward.slurm.users import NameResolver

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger

SUBMITTED = datetime(2026, 3, 1, 10, tzinfo=UTC)


@pytest.fixture
def site(tmp_path: Path) -> Settings:
    made = mybrc_settings(tmp_path, 1)
    with_money(made, "physics", "biology")
    return made


@pytest.fixture
def ledger(site: Settings) -> Iterator["Ledger"]:
    opened = open_ledger(site)
    yield opened
    opened.close()


def own_charge(amount: int, restarts: int = 0) -> Charge:
    """Return Steward's charge for a run of job 1001: pending and running for ten minutes each."""
    start = SUBMITTED + timedelta(minutes=20 * restarts + 10)
    return Charge(
        cluster="c",
        job_id=1001,
        first_submit=SUBMITTED,
        restarts=restarts,
        use=ResourceUse(tres={"cpu": 1}, start=start, seconds=600),
        account="physics",
        user="ada",
        amount=amount,
    )


@pytest.fixture
def teller(ledger: "Ledger") -> JobRegistry:
    return JobRegistry(ledger, "c", NameResolver(), utc_now)


def sent(number: str = "1001", amount: str | None = "10", **fields: Any) -> JobSent:
    whole = {"jobslurmid": number, "userid": "10001", "accountid": "physics"} | fields
    return msgspec.convert(whole if amount is None else whole | {"amount": amount}, JobSent)


def test_a_job_is_charged_and_its_difference_given_back(
    teller: JobRegistry, site: Settings
) -> None:
    teller.create(sent(amount="10"), "plugin")
    assert balance(site) == 990 * SU
    teller.update("1001", sent(amount="4.25"), "plugin")
    assert balance(site) == 995_750_000
    teller.update("1001", sent(amount="4.25"), "plugin")
    teller.update("1001", sent(amount=None, jobstatus="COMPLETED"), "plugin")
    assert balance(site) == 995_750_000
    assert teller.list_jobs(1, JobFilters()).results[0].jobstatus == "COMPLETED"


def test_a_job_may_be_told_only_at_its_end_and_overdraw(
    teller: JobRegistry, site: Settings
) -> None:
    teller.update("1", sent("1", amount="1500"), "plugin")
    assert balance(site) == -500 * SU


def test_what_is_another_jobs_is_refused_and_nothing_is_charged(
    teller: JobRegistry, site: Settings
) -> None:
    teller.create(sent(), "plugin")
    wrong: list[Callable[[], object]] = [
        lambda: teller.create(sent(), "plugin"),
        lambda: teller.update("1001", sent(amount="1", userid="10002"), "plugin"),
        lambda: teller.update("1001", sent(amount="1", accountid="biology"), "plugin"),
        lambda: teller.update("1002", sent(amount="1"), "plugin"),
        lambda: teller.create(sent("5", accountid="chemistry"), "plugin"),
        lambda: teller.create(sent("5", userid="4294967296"), "plugin"),
    ]
    for each in wrong:
        with pytest.raises(ApiError) as refused:
            each()
        assert refused.value.status == 400
    assert balance(site) == 990 * SU


def test_an_account_is_known_in_any_case_of_letters(teller: JobRegistry) -> None:
    teller.create(sent(accountid="Physics"), "plugin")
    assert teller.update("1001", sent(accountid="PHYSICS"), "plugin").accountid == "physics"


def test_a_submit_time_that_comes_later_pays_nothing_twice(
    teller: JobRegistry, ledger: "Ledger", site: Settings
) -> None:
    teller.create(sent(amount="10"), "plugin")
    for after_s in (0, 0, 600):
        submitted = (SUBMITTED + timedelta(seconds=after_s)).isoformat()
        teller.update("1001", sent(amount="3", submitdate=submitted), "plugin")
        assert balance(site) == 997 * SU
    with ledger.reading() as t:
        rows = t.charges.list_of_job("c", 1001)
    assert sorted(row.charge.amount for row in rows) == [0, 3 * SU]


def test_a_job_that_steward_has_charged_costs_nothing_more(
    teller: JobRegistry, ledger: "Ledger", site: Settings
) -> None:
    with ledger.transaction() as t:
        t.charges.post(own_charge(7 * SU), BY)
    teller.update("1001", sent(amount="3", submitdate=SUBMITTED.isoformat()), "plugin")
    assert balance(site) == 993 * SU


def test_what_steward_finds_out_goes_before_what_was_told(
    teller: JobRegistry, ledger: "Ledger", site: Settings
) -> None:
    teller.create(sent(amount="10", submitdate=SUBMITTED.isoformat()), "plugin")
    with ledger.transaction() as t:
        t.charges.post(own_charge(7 * SU), BY)
    teller.update("1001", sent(amount="3", submitdate=SUBMITTED.isoformat()), "plugin")
    assert balance(site) == 993 * SU


@pytest.mark.parametrize(
    "times",
    [
        {"submitdate": "2026-03-01T10:20:00Z"},
        {"submitdate": "2026-03-01T10:20:00Z", "startdate": "2026-03-01T10:30:00Z"},
        {"startdate": "2026-03-01T10:30:00Z", "enddate": "2026-03-01T10:40:00Z"},
        {"startdate": "2026-03-01T10:10:00Z"},
    ],
)
def test_a_job_of_several_runs_is_charged_by_steward_alone(
    teller: JobRegistry, ledger: "Ledger", site: Settings, times: dict[str, str]
) -> None:
    with ledger.transaction() as t:
        for restarts in (0, 1):
            t.charges.post(own_charge(7 * SU, restarts), BY)
    teller.update("1001", sent(amount="14", **times), "plugin")
    teller.update("1001", sent(amount="13", **times), "plugin")
    assert balance(site) == 986 * SU


def test_what_was_told_of_a_later_run_is_taken_back_with_its_charge(
    teller: JobRegistry, ledger: "Ledger", site: Settings
) -> None:
    teller.create(sent(amount="10", submitdate="2026-03-01T10:20:00Z"), "plugin")
    teller.create(sent("1002", amount="1", submitdate="2026-03-01T10:20:00Z"), "plugin")
    with ledger.transaction() as t:
        for restarts in (0, 1):
            charge = own_charge(7 * SU, restarts)
            t.charges.post(charge, BY)
            cancel_reported_charges(t, charge, BY)
    assert balance(site) == 985 * SU


def test_another_job_of_the_same_number_costs_what_is_told(
    teller: JobRegistry, ledger: "Ledger", site: Settings
) -> None:
    with ledger.transaction() as t:
        t.charges.post(own_charge(7 * SU), BY)
    teller.update("1001", sent(amount="3", submitdate="2026-05-01T10:00:00Z"), "plugin")
    assert balance(site) == 990 * SU


@pytest.mark.parametrize("name", ["7_3", "7+1", "0007", "x", "\u0667", "99999999999", "7.batch"])
def test_names_that_are_no_job_ids_are_jobs_of_their_own(
    teller: JobRegistry, site: Settings, name: str
) -> None:
    submitted = SUBMITTED.isoformat()
    for number in ("7", name):
        teller.update(number, sent(number, amount="2", submitdate=submitted), "plugin")
        teller.update(number, sent(number, amount="1", submitdate=submitted), "plugin")
    assert balance(site) == 998 * SU


def test_a_sum_of_the_largest_numbers_is_a_number(teller: JobRegistry) -> None:
    for number in ("1", "2"):
        teller.create(sent(number, cpu_time=sys.float_info.max), "plugin")
    assert math.isfinite(teller.list_jobs(1, JobFilters()).total_cpu_time)


def test_pages_and_filters(teller: JobRegistry) -> None:
    for number in range(1, 204):
        started = SUBMITTED + timedelta(minutes=number)
        teller.create(
            sent(
                str(number),
                amount=str(number),
                userid="10001" if number % 2 else "10002",
                startdate=started.isoformat(),
                jobstatus="RUNNING" if number < 4 else "COMPLETED",
                partition="long",
                cpu_time=0.25,
            ),
            "plugin",
        )
    first, third = teller.list_jobs(1, JobFilters()), teller.list_jobs(3, JobFilters())
    assert (first.count, len(first.results), len(third.results)) == (203, 100, 3)
    assert [job.jobslurmid for job in third.results] == ["201", "202", "203"]
    assert (third.total_amount, third.total_cpu_time) == (20_706.0, 50.75)
    running = teller.list_jobs(1, JobFilters(jobstatus="RUNNING"))
    assert (running.total_amount, running.total_cpu_time) == (6.0, 0.75)
    with pytest.raises(ApiError):
        teller.list_jobs(4, JobFilters())

    def numbers(**filters: object) -> list[int]:
        return [int(job.jobslurmid) for job in teller.list_jobs(1, JobFilters(**filters)).results]  # type: ignore[arg-type]

    assert numbers(jobstatus="RUNNING") == [1, 2, 3]
    assert numbers(jobstatus="RUNNING", user="10002") == [2]
    assert numbers(min_amount=5 * SU, max_amount=6 * SU) == [5, 6]
    assert numbers(begin=SUBMITTED, end=SUBMITTED + timedelta(minutes=2)) == [1, 2]
    assert numbers(account="Physics", partition="long", max_amount=SU) == [1]
    assert numbers(account="biology") == numbers(partition="short") == []


def test_a_list_without_anything_has_one_empty_page(teller: JobRegistry, ledger: "Ledger") -> None:
    assert teller.list_jobs(1, JobFilters()).results == ()
    assert list_users(ledger, "", 1).results == ()
    with pytest.raises(ApiError):
        list_users(ledger, "", 2)


def test_users_and_partitions(teller: JobRegistry, ledger: "Ledger") -> None:
    with ledger.transaction() as t:
        for name in ("ada", "bob3"):
            t.accounts.set_user("physics", name, BY, limit=None)
        t.rates.add(Rate(cluster="c", partition="long", weights={"cpu": 750_000}), BY)
        t.rates.add(Rate(cluster="c", partition="odd", weights={"cpu": 1_234}), BY)
        t.rates.add(Rate(cluster="c", partition="gift", free=True), BY)
        t.rates.add(Rate(cluster="other", partition="theirs", weights={"cpu": 1}), BY)
    found = [(one.username, one.email) for one in list_users(ledger, "example.org", 1).results]
    assert found == [("ada", "ada@example.org"), (None, "bob3@example.org")]
    shown = list_partitions(ledger, "c", utc_now(), 1).results
    assert [(one.name, one.su_per_core_hour) for one in shown] == [
        *(("gift", "0.00"), ("long", "0.75"), ("odd", "0.001234"))
    ]


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["1", "2", "2_1"]),
        st.integers(0, 10**6),
        st.booleans(),
        st.sampled_from([None, 0, 60]),
    ),
    max_size=12,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS)
def test_whatever_is_told_each_job_is_paid_once(tmp_path_factory, steps) -> None:  # type: ignore[no-untyped-def]
    site = mybrc_settings(tmp_path_factory.mktemp("told"), 1)
    with_money(site, "physics", amount=10_000 * SU)
    ledger = open_ledger(site)
    teller = JobRegistry(ledger, "c", NameResolver(), utc_now)
    last: dict[str, int] = {}
    for number, hundredths, is_new, after_s in steps:
        fields = (
            {}
            if after_s is None
            else {"submitdate": (SUBMITTED + timedelta(seconds=after_s)).isoformat()}
        )
        job = sent(number, amount=f"{hundredths / 100:.2f}", **fields)
        try:
            if is_new:
                teller.create(job, "plugin")
            else:
                teller.update(number, job, "plugin")
            last[number] = hundredths
        except ApiError:
            assert is_new
            assert number in last
    ledger.close()
    assert balance(site) == 10_000 * SU - sum(last.values()) * 10_000
