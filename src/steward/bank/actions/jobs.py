"""Bank actions for jobs: allow, explain, and total charges.

``bank.allow`` lets one job pass the gate without sufficient funds. ``bank.explain`` shows a job's
charges and recomputes them from use and rate. ``bank.charged`` returns the totals charged to many
jobs, for lists. ``quotes.py`` has ``bank.quote``. Request and reply types come before the functions
that use them. Amounts are micro-SU.
"""

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, ClassVar, Final

import msgspec

from steward.bank.context import BankContext, BankReply, Cluster, JobName, Reason
from steward.bank.errors import BankRefused, BankUsage, NotInBank
from steward.bank.gate.requests import Allowance
from steward.bank.job_charges import NotCharged, explain_uncharged, find_job_charges, map_job_names
from steward.bank.records import Charge, PriceLine, Rate
from steward.core.access import Caller
from steward.core.actions import ActionMessage, Request, Zone, action, option, route
from steward.core.layouts import Column, Layout
from steward.core.timestamps import to_micros
from steward.jobs.job_ids import JobNameError, parse_job_name
from steward.slurm.times import load_zone

log = logging.getLogger(__name__)

_LONGEST_ALLOWANCE: Final = timedelta(days=30)
"""Longest duration of an allowance."""


class ExplainRequest(Request, frozen=True, kw_only=True):
    """Request of bank.explain: the charges of a job and how they were computed."""

    job: JobName
    cluster: Cluster = ""


class ExplainedCharge(msgspec.Struct, frozen=True, kw_only=True):
    """Charge of a job, with its rate and computation.

    Attributes:
        charge: The current charge, with the use it was priced by.
        name: Job id in Slurm's notation.
        rate: The rate it was priced by; None if another system reported the charge.
        recomputed: Amount computed now; None if that is impossible.
        refunded: Amount refunded by hand since.
        overdraw: Part beyond the account's balance and credit limit.
        lines: Steps of the computation.
    """

    charge: Charge
    name: str
    rate: Rate | None = None
    recomputed: int | None = None
    refunded: int = 0
    overdraw: int = 0
    lines: tuple[PriceLine, ...] = ()

    def list_parts(self) -> list[PriceLine]:
        """Return the computation, then refunds, overdraft, and the amount computed now."""
        parts = list(self.lines)
        if self.refunded:
            parts.append(PriceLine("refunded by hand", self.refunded))
        if self.overdraw:
            parts.append(PriceLine("beyond balance and credit limit", self.overdraw))
        if self.recomputed is None:
            parts.append(PriceLine("reported by another program: Steward cannot recompute it"))
        elif self.recomputed != self.charge.amount:
            what = "recomputed; 'steward bank reconcile' corrects it"
            parts.append(PriceLine(what, self.recomputed))
        return parts


class ExplainReply(BankReply, frozen=True, kw_only=True):
    """Reply with the charges of a job.

    Attributes:
        job: The job, as requested.
        cluster: Its cluster.
        account: Account charged.
        user: Owner of the job.
        amount: Total charged, less refunds.
        is_right: Whether every charge equals the amount recomputed from its use and rate.
        charges: The charges, one for each run or piece of a run.
    """

    job: str
    cluster: str
    account: str
    user: str
    amount: int
    is_right: bool
    charges: tuple[ExplainedCharge, ...]
    layout: ClassVar[Layout] = (
        Column("JobIDRaw", lambda line, _: line.charge.job_id),
        Column("Restarts", lambda line, _: line.charge.restarts),
        Column("Account", lambda line, _: line.charge.account),
        Column("User", lambda line, _: line.charge.user),
        Column("Partition", lambda line, _: line.charge.partition),
        Column("Amount", lambda line, _: line.charge.amount, "money"),
        Column("Recomputed", "recomputed", "money"),
        Column("Refunded", "refunded", "money"),
        Column("Overdraw", "overdraw", "money"),
        Column("Rate", lambda line, _: line.charge.rate),
        Column("Reason", lambda line, _: line.charge.why),
        Column("Source", lambda line, _: line.charge.source),
        Column("Key", lambda line, _: line.charge.key),
    )
    layouts: ClassVar[Mapping[str, Layout]] = {
        "parts": (
            Column("Description", "description", "prose"),
            Column("Amount", lambda part, _: "" if part.amount is None else part.amount, "money"),
        )
    }

    @property
    def exit_code(self) -> int:
        """Exit code 1 if a charge differs from the recomputed amount."""
        return 0 if self.is_right else 1


class AllowRequest(Request, frozen=True, kw_only=True):
    """Request of bank.allow: allow a job past the gate until a time, without funds."""

    job: JobName
    until: Annotated[
        str, option("End of the allowance, such as now+2hours.", "--until", metavar="TIME")
    ]
    reason: Reason
    cluster: Cluster = ""
    zone: Zone = ""


class AllowReply(BankReply, frozen=True, kw_only=True):
    """Reply with the allowance of a job.

    Attributes:
        job: The job, as requested.
        job_id: Raw job id it is stored under.
        cluster: Its cluster.
        by: The operator who allowed it.
        until: End of the allowance.
    """

    job: str
    job_id: int
    cluster: str
    by: str
    until: datetime
    layout: ClassVar[Layout] = (
        Column("JobID", "job"),
        Column("Cluster", "cluster"),
        Column("By", "by"),
        Column("Until", "until", "time"),
    )

    @property
    def allowances(self) -> "tuple[AllowReply]":
        """The allowance as the one row of a table."""
        return (self,)


@action(
    "bank.allow",
    scope="bank",
    role="operator",
    command="bank allow",
    rows="allowances",
    routes=(route("POST /allowances"),),
)
def allow_job(context: BankContext, caller: Caller, request: AllowRequest) -> AllowReply:
    """Allow a job past the gate without sufficient funds.

    Until the given time, the gate rejects neither the job nor a change of it. The bank still
    places SU holds and charges the job, so it may overdraw the account, and the gate then rejects
    other jobs. An allowance for an array task applies to the
    whole array.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: The job id is invalid, the time is past or too far ahead, or no reason is given.
        NotInBank: Neither Steward nor Slurm knows the job.
        GateUnavailable: The gate does not answer.
        SlurmError: Steward does not know the job, and its Slurm does not answer.
    """
    with context.ledger.reading() as t:
        context.get_rights(caller, t).require_operator("allow a job to overdraw its account")
    cluster = context.resolve_cluster(request.cluster)
    until = context.parse_moment(request.until, request.zone)
    if until is None or not context.now() < until <= context.now() + _LONGEST_ALLOWANCE:
        raise BankUsage(
            f"invalid end of the allowance for job {request.job}: give `until` "
            f"within {_LONGEST_ALLOWANCE.days} days from now, such as now+1day",
            request.until,
        )
    if not request.reason.strip():
        raise BankUsage(
            f"no reason given: say in `reason` why job {request.job} may overdraw its account",
            request.job,
        )
    try:
        job_name = parse_job_name(request.job)
    except JobNameError as error:
        raise BankUsage(str(error), request.job) from error
    job_id = job_name.job_id + (job_name.offset or 0)
    if not context.jobs.find(request.job, cluster) and not _is_in_queue(context, cluster, job_id):
        raise NotInBank(
            f"unknown job {request.job} on cluster {cluster}: 'squeue' lists pending and "
            "running jobs",
            request.job,
        )
    author = context.make_authorship(caller, request.reason)
    context.gate.allow(
        Allowance(
            cluster=cluster,
            job_id=job_id,
            by=author.who,
            until_us=to_micros(until),
            reason=request.reason,
        )
    )
    return AllowReply(
        **context.make_heading(),
        job=request.job,
        job_id=job_id,
        cluster=cluster,
        by=author.who,
        until=until,
    )


def _is_in_queue(context: BankContext, cluster: str, job_id: int) -> bool:
    """Return whether Slurm has a job that the last poll missed."""
    from steward.slurm import Slurm

    settings = context.settings.cluster[cluster]
    if settings.remote or not settings.asks_slurm:
        return False
    return bool(Slurm(cluster, settings).job(job_id))


@action(
    "bank.explain",
    scope="read",
    command="bank explain",
    rows="charges",
    routes=(route("GET /jobs/{job}/cost", "Explain the charges of a job."),),
    only_reads=True,
)
def explain_job(context: BankContext, caller: Caller, request: ExplainRequest) -> ExplainReply:
    """Explain the charges of a job.

    Steward recomputes each charge from the allocated resources and the rate at the job's first
    submission. If an amount differs, the command exits with 1.

    Raises:
        BankRefused: The job belongs to another user, and the caller does not manage the account.
        BankUsage: The job id is invalid, or nothing was charged for it, or the caller may not know
            that it exists.
    """
    cluster = context.resolve_cluster(request.cluster)
    with context.ledger.reading() as t:
        rights = context.get_rights(caller, t)
        try:
            rows = find_job_charges(context, t, request.job, cluster)
        except NotCharged as error:
            reason = explain_uncharged(context, t, rights, request.job, cluster)
            raise NotCharged(reason, request.job) from error
        for row in rows:
            if rights.is_led(row.charge.account) or row.charge.user == rights.user:
                continue
            if context.access.get_job_scope(caller, cluster).everything:
                raise BankRefused(
                    f"permission denied: job {request.job} belongs to another user", request.job
                )
            reason = explain_uncharged(context, t, rights, request.job, cluster)
            raise NotCharged(reason, request.job)
        lines = []
        names = map_job_names(context, [row.charge.key for row in rows])
        for row in rows:
            rate = t.rates.get(row.charge.rate) if row.charge.rate else None
            recomputed, steps = _recompute(context, row.charge, rate)
            lines.append(
                ExplainedCharge(
                    charge=row.charge,
                    name=names.get(row.charge.key, str(row.charge.job_id)),
                    rate=rate,
                    recomputed=recomputed,
                    refunded=row.refunded,
                    overdraw=row.overdraw,
                    lines=steps,
                )
            )
    return ExplainReply(
        job=request.job,
        cluster=cluster,
        account=rows[-1].charge.account,
        user=rows[-1].charge.user,
        amount=sum(line.charge.amount - line.refunded for line in lines),
        is_right=all(line.recomputed in (None, line.charge.amount) for line in lines),
        charges=tuple(lines),
        **context.make_heading(),
    )


def _recompute(
    context: BankContext, charge: Charge, rate: Rate | None
) -> tuple[int | None, tuple[PriceLine, ...]]:
    """Recompute a charge; return the amount and the steps."""
    from steward.bank.prices import compute_price

    if charge.use is None or rate is None:
        return None, ()
    price = compute_price(charge.use, rate, load_zone(context.get_time_zone(charge.cluster)))
    return price.amount, price.lines


MAX_CHARGED_JOBS: Final = 1000
"""Maximum number of jobs in one request of bank.charged."""


class ChargedJob(ActionMessage, frozen=True, kw_only=True):
    """Job whose charges are requested.

    Attributes:
        cluster: Its cluster.
        job_id: Its raw id.
        first_submit: First submit time, in case Slurm reused the id; None for any.
    """

    cluster: str
    job_id: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    first_submit: datetime | None = None


class ChargedRequest(Request, frozen=True, kw_only=True):
    """Request of bank.charged: the total charged to each of many jobs."""

    jobs: Annotated[
        tuple[ChargedJob, ...],
        msgspec.Meta(description="Jobs to sum up.", max_length=MAX_CHARGED_JOBS),
    ]


class ChargedLine(ActionMessage, frozen=True, kw_only=True):
    """Total charged to a job.

    Attributes:
        cluster: Its cluster.
        job_id: Its raw id.
        account: Account charged.
        amount: Total in micro-SU, less refunds.
    """

    cluster: str
    job_id: int
    account: str
    amount: int


class ChargedReply(BankReply, frozen=True, kw_only=True):
    """Reply with the totals charged to jobs.

    Attributes:
        jobs: Jobs with charges that the caller may see.
    """

    jobs: tuple[ChargedLine, ...]


@action(
    "bank.charged",
    scope="read",
    only_reads=True,
)
def sum_charges(context: BankContext, caller: Caller, request: ChargedRequest) -> ChargedReply:
    """Sum up the charges of each job.

    The reply omits jobs that the caller may not see.
    """
    submits_by_cluster: dict[str, dict[int, datetime | None]] = {}
    for job in request.jobs:
        submits_by_cluster.setdefault(job.cluster, {})[job.job_id] = job.first_submit
    lines: dict[tuple[str, int], ChargedLine] = {}
    with context.ledger.reading() as t:
        rights = context.get_rights(caller, t)
        for cluster, submit_by_id in submits_by_cluster.items():
            for row in t.charges.list_of_jobs(cluster, submit_by_id):
                charge = row.charge
                first_submit = submit_by_id[charge.job_id]
                if first_submit is not None and charge.first_submit != first_submit:
                    continue
                if not rights.is_led(charge.account) and charge.user != rights.user:
                    continue
                key = (cluster, charge.job_id)
                subtotal = lines[key].amount if key in lines else 0
                lines[key] = ChargedLine(
                    cluster=cluster,
                    job_id=charge.job_id,
                    account=charge.account,
                    amount=subtotal + charge.amount - row.refunded,
                )
    return ChargedReply(jobs=tuple(lines.values()), **context.make_heading())
