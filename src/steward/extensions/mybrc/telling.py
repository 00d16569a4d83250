"""What clients tell of jobs, and what that costs: POST and PUT of the myBRC API.

What is told has happened, so it is charged, whatever the account has left; it
was for ``can_submit_job`` to say no. A job that Steward itself has charged is
not charged again for a client's word.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec

from steward.bank.errors import BankUsage
from steward.bank.ledger import By, ToldJob
from steward.bank.records import Charge, Use
from steward.bank.told_charges import TOLD, is_same_job
from steward.extensions.mybrc import amounts
from steward.extensions.mybrc.errors import ApiError
from steward.extensions.mybrc.shapes import Job, JobPage, JobSent, merged
from steward.slurm.people import People

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Ledger, Transaction

PAGE: Final = 100
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)
_MOST_HOURS: Final = 1e12
"""Clients may tell any number; a sum of them has to stay one that JSON can say."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs a list is to hold.

    Attributes:
        user: Of this user.
        account: Under this account.
        jobstatus: In this state.
        partition: In this partition.
        min_amount: At least this dear, micro-SU.
        max_amount: At most this dear, micro-SU.
        begin: Started then or later.
        end: Started then or earlier.
    """

    user: str = ""
    account: str = ""
    jobstatus: str = ""
    partition: str = ""
    min_amount: int | None = None
    max_amount: int | None = None
    begin: datetime | None = None
    end: datetime | None = None


class Teller:
    """Takes in what clients tell of jobs, and shows it.

    Args:
        ledger: Where it is kept and charged.
        cluster: Whose jobs they are.
        people: Knows names of users.
        now: The time.
    """

    def __init__(
        self, ledger: "Ledger", cluster: str, people: People, now: Callable[[], datetime]
    ) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._people = people
        self._now = now

    def create(self, sent: JobSent, caller: str) -> Job:
        """A job that was not told of before.

        Raises:
            ApiError: It was; its account is unknown; a field is wrong.
        """
        with self._ledger.transaction() as t:
            if t.told.get(sent.jobslurmid) is not None:
                raise ApiError(400, f"job with this jobslurmid already exists: {sent.jobslurmid}")
            return self._put(t, sent, None, caller)

    def update(self, jobslurmid: str, sent: JobSent, caller: str) -> Job:
        """A job as it is now, told of before or not.

        Raises:
            ApiError: It is another's, or under another account; a field is wrong.
        """
        if sent.jobslurmid != jobslurmid:
            raise ApiError(400, f"jobslurmid {sent.jobslurmid} is not the job {jobslurmid}")
        with self._ledger.transaction() as t:
            return self._put(t, sent, t.told.get(jobslurmid), caller)

    def page(self, number: int, filters: Filters) -> JobPage:
        """One page of jobs in order of their start; its links are for the caller to make.

        Raises:
            ApiError: There is no such page.
        """
        if not 1 <= number <= 10**9:
            raise ApiError(404, "Invalid page.")
        with self._ledger.reading() as t:
            totals, found = t.told.find(
                user=filters.user,
                account=filters.account.lower(),
                status=filters.jobstatus,
                partition=filters.partition,
                min_amount=filters.min_amount,
                max_amount=filters.max_amount,
                begin=filters.begin,
                end=filters.end,
                offset=(number - 1) * PAGE,
                limit=PAGE,
            )
        if number > 1 and not found:
            raise ApiError(404, "Invalid page.")
        return JobPage(
            count=totals.jobs,
            total_amount=float(amounts.show(totals.amount)),
            total_cpu_time=totals.cpu_hours,
            results=tuple(shown(told) for told in found),
        )

    def _put(self, t: "Transaction", sent: JobSent, told: ToldJob | None, caller: str) -> Job:
        account = _account(t, sent.accountid)
        uid = int(sent.userid)
        if uid >= 2**32:
            raise ApiError(400, f"No user can have the userid {uid}.")
        before = None if told is None else shown(told)
        if told is not None and told.uid != uid:
            raise ApiError(400, f"userid {uid} is not the job's, which is {told.uid}")
        if told is not None and told.account != account:
            raise ApiError(400, f"account {account} is not the job's, which is {told.account}")
        job, micros = merged(msgspec.structs.replace(sent, accountid=account), before)
        user = told.user if told is not None else self._people.user(uid) or str(uid)
        t.told.put(
            ToldJob(
                jobslurmid=job.jobslurmid,
                user=user,
                uid=uid,
                account=account,
                status=job.jobstatus or "",
                partition=job.partition or "",
                amount=micros,
                submitted=job.submitdate,
                started=job.startdate,
                ended=job.enddate,
                cpu_hours=max(-_MOST_HOURS, min(job.cpu_time or 0.0, _MOST_HOURS)),
                body=msgspec.json.encode(job),
            )
        )
        due = 0 if self._is_ours(t, job) else micros
        self._charge(t, self._charge_of(job, user, due), before, user, caller)
        return job

    def _charge(
        self, t: "Transaction", charge: Charge, before: Job | None, user: str, caller: str
    ) -> None:
        by = By(who=f"mybrc:{caller}", why="told by a client of the myBRC API")
        former = None if before is None else self._charge_of(before, user, 0)
        if former is not None and former.key != charge.key:
            # Its submit time is known only now, or is another: the job is paid for once.
            row = t.charges.get(former.key)
            if row is not None and row.charge.source == TOLD and row.charge.amount:
                t.charges.charge(former, by)
        row = t.charges.get(charge.key)
        if row is not None and row.charge.source != TOLD:
            return
        if row is not None or charge.amount:
            t.charges.charge(charge, by)

    def _is_ours(self, t: "Transaction", job: Job) -> bool:
        """Whether Steward has charged a run of it."""
        rows = t.charges.of_job(self._cluster, _number(job))
        own = [row.charge for row in rows if row.charge.source != TOLD]
        return is_same_job((job.submitdate, job.startdate), own)

    def _charge_of(self, job: Job, user: str, micros: int) -> Charge:
        number = _number(job)
        is_named = job.submitdate is None or not number
        begin, end = job.startdate, job.enddate
        seconds = int((end - begin).total_seconds()) if begin and end else 0
        return Charge(
            cluster=self._cluster,
            job_id=0 if is_named else number,
            first_submit=job.submitdate or begin or _EPOCH,
            account=job.accountid,
            user=user,
            partition=job.partition or "",
            amount=micros,
            use=Use(
                tres={} if job.num_cpus is None else {"cpu": job.num_cpus},
                start=begin or job.submitdate or self._now(),
                seconds=seconds,
                qos=job.qos or "",
                state=job.jobstatus or "",
            ),
            why="end" if end else "told",
            source=TOLD,
            told=job.jobslurmid if is_named else "",
        )


def _number(job: Job) -> int:
    """Its number in Slurm; 0 where its name is none."""
    number = int(job.jobslurmid) if _NUMBER.fullmatch(job.jobslurmid) else 0
    return number if number < 2**32 else 0


def shown(told: ToldJob) -> Job:
    """A job that was told of, as the API shows it."""
    return msgspec.json.decode(told.body, type=Job)


def links(url: str, number: int, count: int) -> tuple[str | None, str | None]:
    """Where the next page is, and where the previous one.

    Args:
        url: Of this page, whole.
        number: Of this page.
        count: How many there are on all pages.
    """
    parts = urlsplit(url)
    others = [pair for pair in parse_qsl(parts.query) if pair[0] != "page"]

    def at(page: int) -> str:
        query = urlencode([*others, ("page", str(page))] if page > 1 else others)
        return urlunsplit(parts._replace(query=query))

    return (
        at(number + 1) if number * PAGE < count else None,
        at(number - 1) if number > 1 else None,
    )


def _account(t: "Transaction", name: str) -> str:
    account = t.accounts.get(name.lower())
    if account is None or not account.known:
        raise ApiError(400, f"No account exists with accountid {name}.")
    return account.name


def amount_filter(name: str, text: str) -> int | None:
    """An amount that a list is bounded by.

    Raises:
        ApiError: It is none.
    """
    if not text:
        return None
    try:
        return amounts.cost(text)
    except BankUsage as error:
        raise ApiError(400, f"{name}: {error}") from error
