"""Ledger tables that move no money: API tokens, rejected jobs, myBRC jobs, remote holds.

- :class:`Tokens`: tokens of the myBRC API, by digest.
- :class:`RejectedJobs`: jobs that the gate rejected or would have rejected.
- :class:`RemoteHolds`: amounts that a remote myBRC server counts as used for unfinished jobs.
- :class:`ReportedJobs`: jobs that clients of the myBRC API reported.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import delete, func, select

from steward.bank.ledger.outbox import insert_or_replace
from steward.bank.ledger.postings import LedgerSession
from steward.bank.ledger.records import ApiToken, RejectedJob, ReportedJob, ReportedTotals
from steward.bank.ledger.tables import RemoteHold, rejection, remote_hold, reported_job, token

MAX_REJECTIONS_PER_DAY: Final = 500
"""Number of rejections kept per user and day."""


class Tokens:
    """Tokens of the myBRC API, by digest.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def add(
        self,
        user: str,
        digest: str,
        created: datetime,
        expires: datetime | None = None,
        note: str = "",
    ) -> None:
        """Add a token, or replace the one with the same digest."""
        new = ApiToken(user=user, digest=digest, created=created, expires=expires, note=note)
        insert_or_replace(self._session, token, new, replace=True)

    def find(self, digests: Iterable[str]) -> ApiToken | None:
        """Return the token with one of these digests, expired or not; None if absent."""
        return self._session.find(ApiToken, select(token).where(token.c.digest.in_(tuple(digests))))

    def delete(self, digest: str) -> bool:
        """Delete a token; return False if absent."""
        return self._session.execute(delete(token).where(token.c.digest == digest)) > 0

    def list_of_user(self, user: str) -> list[ApiToken]:
        """List a user's tokens, oldest first."""
        return [token for token in self.list_all() if token.user == user]

    def list_all(self) -> list[ApiToken]:
        """List all tokens, oldest first."""
        query = select(token).order_by(token.c.created, token.c.digest)
        return self._session.fetch(ApiToken, query)


class RejectedJobs:
    """Jobs that the gate rejected, or would have rejected.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session
        self._counts: dict[tuple[int, datetime], int] = {}

    def add(self, new: RejectedJob) -> bool:
        """Add a rejection; return False if already known or over the user's daily limit.

        The limit per user and day exists because a loop of rejected submissions would otherwise
        fill the ledger.
        """
        if self._count_of_day(new) >= MAX_REJECTIONS_PER_DAY:
            return False
        is_new = insert_or_replace(self._session, rejection, new)
        if is_new:
            self._counts[_uid_and_day(new)] += 1
        return is_new

    def prune(self, before: datetime) -> int:
        """Delete rejections from before a time; return their count."""
        return self._session.execute(delete(rejection).where(rejection.c.at < before))

    def _count_of_day(self, new: RejectedJob) -> int:
        """Count the rejections stored for a user on a rejection's day."""
        day = _uid_and_day(new)
        if day not in self._counts:
            uid, begin = day
            span = (rejection.c.at >= begin, rejection.c.at < begin + timedelta(days=1))
            query = select(func.count()).select_from(rejection).where(rejection.c.uid == uid, *span)
            self._counts[day] = int(self._session.fetch_value(query))
        return self._counts[day]

    def list_since(
        self, at: datetime, until: datetime | None = None, account: str = "", user: str = ""
    ) -> list[RejectedJob]:
        """List rejections from a time on, in order.

        Args:
            at: Start of the period.
            until: End of the period, exclusive.
            account: Only of this account.
            user: Only of this user.
        """
        query = select(rejection).where(rejection.c.at >= at)
        if until is not None:
            query = query.where(rejection.c.at < until)
        if account:
            query = query.where(rejection.c.account == account.lower())
        if user:
            query = query.where(rejection.c.user == user)
        return self._session.fetch(RejectedJob, query.order_by(rejection.c.at, rejection.c.id))


class RemoteHolds:
    """SU holds that a remote myBRC server counts as used until it learns a job's price.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def put(self, cluster: str, job_id: int, account: str, uid: int, amount: int) -> None:
        """Record that the server counts a job's hold as used."""
        new = RemoteHold(cluster=cluster, job_id=job_id, account=account, uid=uid, amount=amount)
        insert_or_replace(self._session, remote_hold, new, replace=True)

    def delete(self, cluster: str, job_id: int) -> None:
        """Delete a job's hold, because the server now counts the job's price."""
        conditions = (remote_hold.c.cluster == cluster, remote_hold.c.job_id == job_id)
        self._session.execute(delete(remote_hold).where(*conditions))

    def sum_by_user(self, account: str) -> dict[int, int]:
        """Return the held amount of an account at the server, in micro-SU by uid."""
        query = (
            select(remote_hold.c.uid, func.sum(remote_hold.c.amount).label("amount"))
            .where(remote_hold.c.account == account)
            .group_by(remote_hold.c.uid)
        )
        return {row.uid: int(row.amount) for row in self._session.fetch_rows(query)}


class ReportedJobs:
    """Jobs that clients of the myBRC API reported.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def put(self, new: ReportedJob) -> None:
        """Add a job, or replace the one with the same id."""
        insert_or_replace(self._session, reported_job, new, replace=True)

    def get(self, jobslurmid: str) -> ReportedJob | None:
        """Return the job of this id, or None."""
        query = select(reported_job).where(reported_job.c.jobslurmid == jobslurmid)
        return self._session.find(ReportedJob, query)

    def find(
        self,
        *,
        user: str = "",
        account: str = "",
        status: str = "",
        partition: str = "",
        min_amount: int | None = None,
        max_amount: int | None = None,
        begin: datetime | None = None,
        end: datetime | None = None,
        offset: int = 0,
        limit: int = 100,
    ) -> tuple[ReportedTotals, list[ReportedJob]]:
        """Return totals over all matching jobs, and one page of them by start time.

        Args:
            user: Only of this user.
            account: Only of this account.
            status: Only in this state.
            partition: Only of this partition.
            min_amount: Minimum cost, in micro-SU.
            max_amount: Maximum cost, in micro-SU.
            begin: Started at this time or later.
            end: Started at this time or earlier.
            offset: Number of jobs to skip.
            limit: Maximum number of jobs.
        """
        same = {"user": user, "account": account, "status": status, "partition": partition}
        conditions: list[Any] = [
            reported_job.c[name] == text for name, text in same.items() if text
        ]
        if min_amount is not None:
            conditions.append(reported_job.c.amount >= min_amount)
        if max_amount is not None:
            conditions.append(reported_job.c.amount <= max_amount)
        if begin is not None:
            conditions.append(reported_job.c.started >= begin)
        if end is not None:
            conditions.append(reported_job.c.started <= end)
        sums = (func.count(), func.sum(reported_job.c.amount), func.sum(reported_job.c.cpu_hours))
        query = select(*sums).select_from(reported_job).where(*conditions)
        jobs, amount, cpu_hours = tuple(self._session.fetch_rows(query)[0])
        totals = ReportedTotals(jobs=jobs, amount=int(amount or 0), cpu_hours=float(cpu_hours or 0))
        order = (
            reported_job.c.started.is_(None),
            reported_job.c.started,
            reported_job.c.jobslurmid,
        )
        page = select(reported_job).where(*conditions).order_by(*order).offset(offset).limit(limit)
        return totals, self._session.fetch(ReportedJob, page)


def _uid_and_day(new: RejectedJob) -> tuple[int, datetime]:
    """Return the uid and the start of the UTC day of a rejection."""
    at = new.at.astimezone(UTC)
    return new.uid, at.replace(hour=0, minute=0, second=0, microsecond=0)
