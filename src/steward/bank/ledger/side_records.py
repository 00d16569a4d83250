"""Ledger tables that move no money: API tokens, rejected jobs, myBRC jobs, remote holds.

- :class:`Tokens`: tokens of the myBRC API, by digest.
- :class:`RejectedJobs`: jobs that the gate rejected or would have rejected.
- :class:`RemoteHolds`: amounts that a remote myBRC server counts as used for unfinished jobs.
- :class:`ReportedJobs`: jobs that clients of the myBRC API reported.
"""

from datetime import datetime
from typing import Any, Final

from sqlalchemy import Row, delete, func, select

from steward.bank.ledger.outbox import insert_or_replace
from steward.bank.ledger.postings import LedgerSession, sanitize_text
from steward.bank.ledger.records import ApiToken, RejectedJob, ReportedJob, ReportedTotals
from steward.bank.ledger.tables import refusal, remote_hold, reported_job, token
from steward.core.timestamps import from_micros, to_micros

MAX_REJECTIONS_PER_DAY: Final = 500
"""Number of rejections kept per user and day."""

_DAY_US: Final = 86_400 * 1_000_000


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
        values = {
            "digest": digest,
            "user_name": sanitize_text(user),
            "created_us": to_micros(created),
            "expires_us": None if expires is None else to_micros(expires),
            "note": sanitize_text(note),
        }
        insert_or_replace(self._session, token, values, replace=True)

    def find(self, digest: str) -> ApiToken | None:
        """Return the token of a digest, expired or not; None if absent."""
        row = self._session.fetch_row(select(token).where(token.c.digest == digest))
        return None if row is None else _token_from_row(row)

    def delete(self, digest: str) -> bool:
        """Delete a token; return False if absent."""
        return self._session.execute(delete(token).where(token.c.digest == digest)) > 0

    def list_of_user(self, user: str) -> list[ApiToken]:
        """List a user's tokens, oldest first."""
        return [token for token in self.list_all() if token.user == user]

    def list_all(self) -> list[ApiToken]:
        """List all tokens, oldest first."""
        query = select(token).order_by(token.c.created_us, token.c.digest)
        return [_token_from_row(row) for row in self._session.fetch_rows(query)]


class RejectedJobs:
    """Jobs that the gate rejected, or would have rejected.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session
        self._counts: dict[tuple[int, int], int] = {}

    def add(self, new: RejectedJob) -> bool:
        """Add a rejection; return False if already known or over the user's daily limit.

        The limit per user and day exists because a loop of rejected submissions would otherwise
        fill the ledger.
        """
        if self._count_of_day(new) >= MAX_REJECTIONS_PER_DAY:
            return False
        values = {
            "id": sanitize_text(new.id),
            "at_us": to_micros(new.at),
            "mode": new.mode,
            "cluster": sanitize_text(new.cluster),
            "uid": new.uid,
            "user_name": sanitize_text(new.user),
            "account": sanitize_text(new.account),
            "partition_name": sanitize_text(new.partition),
            "job_id": new.job_id,
            "amount": new.amount,
            "why": sanitize_text(new.why),
        }
        is_new = insert_or_replace(self._session, refusal, values)
        if is_new:
            self._counts[_uid_and_day(new)] += 1
        return is_new

    def prune(self, before: datetime) -> int:
        """Delete rejections from before a time; return their count."""
        return self._session.execute(delete(refusal).where(refusal.c.at_us < to_micros(before)))

    def _count_of_day(self, new: RejectedJob) -> int:
        """Count the rejections stored for a user on a rejection's day."""
        day = _uid_and_day(new)
        if day not in self._counts:
            uid, begin_us = day
            span = (refusal.c.at_us >= begin_us, refusal.c.at_us < begin_us + _DAY_US)
            query = select(func.count()).select_from(refusal).where(refusal.c.uid == uid, *span)
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
        query = select(refusal).where(refusal.c.at_us >= to_micros(at))
        if until is not None:
            query = query.where(refusal.c.at_us < to_micros(until))
        if account:
            query = query.where(refusal.c.account == sanitize_text(account.lower()))
        if user:
            query = query.where(refusal.c.user_name == sanitize_text(user))
        ordered = query.order_by(refusal.c.at_us, refusal.c.id)
        return [_rejection_from_row(row) for row in self._session.fetch_rows(ordered)]


class RemoteHolds:
    """SU holds that a remote myBRC server counts as used until it learns a job's price.

    Args:
        session: The transaction.
    """

    def __init__(self, session: LedgerSession) -> None:
        self._session = session

    def put(self, cluster: str, job_id: int, account: str, uid: int, amount: int) -> None:
        """Record that the server counts a job's hold as used."""
        values = {
            "cluster": sanitize_text(cluster),
            "job_id": job_id,
            "account": sanitize_text(account),
            "uid": uid,
            "amount": amount,
        }
        insert_or_replace(self._session, remote_hold, values, replace=True)

    def delete(self, cluster: str, job_id: int) -> None:
        """Delete a job's hold, because the server now counts the job's price."""
        conditions = (
            remote_hold.c.cluster == sanitize_text(cluster),
            remote_hold.c.job_id == job_id,
        )
        self._session.execute(delete(remote_hold).where(*conditions))

    def sum_by_user(self, account: str) -> dict[int, int]:
        """Return the held amount of an account at the server, in micro-SU by uid."""
        query = (
            select(remote_hold.c.uid, func.sum(remote_hold.c.amount).label("amount"))
            .where(remote_hold.c.account == sanitize_text(account))
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
        values = {
            "jobslurmid": sanitize_text(new.jobslurmid),
            "user_name": sanitize_text(new.user),
            "uid": new.uid,
            "account": sanitize_text(new.account),
            "status": sanitize_text(new.status),
            "partition_name": sanitize_text(new.partition),
            "amount": new.amount,
            "submitted_us": _optional_micros(new.submitted),
            "started_us": _optional_micros(new.started),
            "ended_us": _optional_micros(new.ended),
            "cpu_hours": new.cpu_hours,
            "body": new.body,
        }
        insert_or_replace(self._session, reported_job, values, replace=True)

    def get(self, jobslurmid: str) -> ReportedJob | None:
        """Return the job of this id, or None."""
        query = select(reported_job).where(reported_job.c.jobslurmid == sanitize_text(jobslurmid))
        row = self._session.fetch_row(query)
        return None if row is None else _reported_job_from_row(row)

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
        same = {
            "user_name": user,
            "account": account,
            "status": status,
            "partition_name": partition,
        }
        conditions: list[Any] = [
            reported_job.c[name] == sanitize_text(text) for name, text in same.items() if text
        ]
        if min_amount is not None:
            conditions.append(reported_job.c.amount >= min_amount)
        if max_amount is not None:
            conditions.append(reported_job.c.amount <= max_amount)
        if begin is not None:
            conditions.append(reported_job.c.started_us >= to_micros(begin))
        if end is not None:
            conditions.append(reported_job.c.started_us <= to_micros(end))
        sums = (func.count(), func.sum(reported_job.c.amount), func.sum(reported_job.c.cpu_hours))
        query = select(*sums).select_from(reported_job).where(*conditions)
        jobs, amount, cpu_hours = tuple(self._session.fetch_rows(query)[0])
        totals = ReportedTotals(jobs=jobs, amount=int(amount or 0), cpu_hours=float(cpu_hours or 0))
        order = (
            reported_job.c.started_us.is_(None),
            reported_job.c.started_us,
            reported_job.c.jobslurmid,
        )
        page = select(reported_job).where(*conditions).order_by(*order).offset(offset).limit(limit)
        return totals, [_reported_job_from_row(row) for row in self._session.fetch_rows(page)]


def _uid_and_day(new: RejectedJob) -> tuple[int, int]:
    """Return the uid and the start of the UTC day, in microseconds, of a rejection."""
    at_us = to_micros(new.at)
    return new.uid, at_us - at_us % _DAY_US


def _optional_micros(at: datetime | None) -> int | None:
    return None if at is None else to_micros(at)


def _optional_moment(us: int | None) -> datetime | None:
    return None if us is None else from_micros(us)


def _token_from_row(row: "Row[Any]") -> ApiToken:
    return ApiToken(
        user=row.user_name,
        digest=row.digest,
        created=from_micros(row.created_us),
        expires=_optional_moment(row.expires_us),
        note=row.note,
    )


def _rejection_from_row(row: "Row[Any]") -> RejectedJob:
    return RejectedJob(
        id=row.id,
        at=from_micros(row.at_us),
        mode=row.mode,
        cluster=row.cluster,
        uid=row.uid,
        user=row.user_name,
        account=row.account,
        partition=row.partition_name,
        job_id=row.job_id,
        amount=row.amount,
        why=row.why,
    )


def _reported_job_from_row(row: "Row[Any]") -> ReportedJob:
    return ReportedJob(
        jobslurmid=row.jobslurmid,
        user=row.user_name,
        uid=row.uid,
        account=row.account,
        status=row.status,
        partition=row.partition_name,
        amount=row.amount,
        submitted=_optional_moment(row.submitted_us),
        started=_optional_moment(row.started_us),
        ended=_optional_moment(row.ended_us),
        cpu_hours=row.cpu_hours,
        body=bytes(row.body),
    )
