"""The actions about single jobs: what one may cost, and what one was charged and why."""

import logging
import pwd
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from steward.bank.charged_jobs import NotCharged, charges_of, names_of, why_uncharged
from steward.bank.context import BankAnswer, BankRoom
from steward.bank.errors import BankRefused, BankUsage, GateUnavailable
from steward.bank.gate.requests import Allowance
from steward.bank.records import Charge, Description, PriceLine, Quote, Rate
from steward.core.access import Asker
from steward.core.actions import Action, Request, Shape
from steward.core.timestamps import micros
from steward.jobs.job_ids import JobNameError, parse
from steward.slurm.times import zone_called

if TYPE_CHECKING:
    from steward.slurm.cluster_model import Picture


log = logging.getLogger(__name__)

_LONGEST_ALLOWANCE: Final = timedelta(days=30)
_LONGEST_SCRIPT: Final = 4 * 1024 * 1024


class QuoteRequest(Request, frozen=True, kw_only=True):
    """bank.quote: what a job may cost at the most.

    Attributes:
        options: sbatch's options, as they would be typed.
        script: The script's text, whose #SBATCH lines count; "" for none.
        cluster: The cluster; "" for the first.
        user: Whose job it would be; "" for the asker's. Others' are for operators.
    """

    options: tuple[str, ...] = ()
    script: str = ""
    cluster: str = ""
    user: str = ""


class QuoteAnswer(BankAnswer, frozen=True, kw_only=True):
    """What a job may cost at the most.

    Attributes:
        quotes: The estimate, and how it came about; one for each component of a
            heterogeneous job.
        amount: Of all of it, micro-SU.
        cluster: Where.
        is_let_in: Whether the gate would let it in now; None where the gate does not answer,
            or where the asker may not know what the account has: many quotes would tell it.
        say: What its user would be told; "" for nothing.
        free: What a job of the account may cost now; None where the gate does not say.
    """

    quotes: tuple[Quote, ...]
    amount: int
    cluster: str
    is_let_in: bool | None = None
    say: str = ""
    free: int | None = None


class ExplainRequest(Request, frozen=True, kw_only=True):
    """bank.explain: what a job was charged, and how that came about.

    Attributes:
        job: A job as Slurm names it.
        cluster: Its cluster; "" for the first.
    """

    job: str
    cluster: str = ""


class ExplainedLine(msgspec.Struct, frozen=True, kw_only=True):
    """One charge of a job.

    Attributes:
        charge: As it stands, with what was priced.
        name: The job as Slurm names it.
        rate: The rate that it was priced by; None where the charge was told by others.
        recomputed: What that makes, computed now; None where it cannot be.
        refunded: What was given back by hand since.
        overdraw: The part that went beyond the account's means.
        lines: The way to it.
    """

    charge: Charge
    name: str
    rate: Rate | None = None
    recomputed: int | None = None
    refunded: int = 0
    overdraw: int = 0
    lines: tuple[PriceLine, ...] = ()


class ExplainAnswer(BankAnswer, frozen=True, kw_only=True):
    """What a job was charged.

    Attributes:
        job: As it was asked for.
        cluster: Its cluster.
        account: Who paid.
        user: Whose job it was.
        amount: What it was charged altogether, refunds taken off.
        is_right: Whether every charge is what its use and rate make.
        charges: Its charges, a run or piece each.
    """

    job: str
    cluster: str
    account: str
    user: str
    amount: int
    is_right: bool
    charges: tuple[ExplainedLine, ...]


class AllowRequest(Request, frozen=True, kw_only=True):
    """bank.allow: let one job pass the gate until a time, whatever its account has.

    Attributes:
        job: A job as Slurm names it; a task stands for its whole array.
        until: When the allowance ends, as people type times.
        reason: Why, for the records.
        cluster: Its cluster; "" for the first.
        zone: IANA name of the zone that times are meant in; "" for the cluster's.
    """

    job: str
    until: str
    reason: str
    cluster: str = ""
    zone: str = ""


class AllowAnswer(BankAnswer, frozen=True, kw_only=True):
    """A job's allowance.

    Attributes:
        job: As it was asked for.
        job_id: The raw id that it is kept under.
        cluster: Its cluster.
        by: Who allowed it.
        until: When it ends.
    """

    job: str
    job_id: int
    cluster: str
    by: str
    until: datetime


def allow(room: BankRoom, asker: Asker, request: AllowRequest) -> AllowAnswer:
    """Let one job pass the gate until a time: it is held for and charged all the same.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: It is no job's name, the time is past or too far, or there is no reason.
        GateUnavailable: The gate does not answer.
    """
    with room.ledger.reading() as t:
        room.rights(asker, t).need_operator("allow a job to overdraw its account")
    cluster = room.cluster(request.cluster)
    until = room.moment(request.until, request.zone)
    if until is None or not room.now() < until <= room.now() + _LONGEST_ALLOWANCE:
        raise BankUsage(
            f"an allowance ends within {_LONGEST_ALLOWANCE.days} days from now, such as "
            "--until now+1day",
            request.until,
        )
    if not request.reason.strip():
        raise BankUsage("say why the job may pass: --reason TEXT", request.job)
    try:
        name = parse(request.job)
    except JobNameError as error:
        raise BankUsage(str(error), request.job) from error
    job_id = name.job_id + (name.offset or 0)
    by = room.by(asker, request.reason)
    room.gate.allow(
        Allowance(
            cluster=cluster, job_id=job_id, by=by.who, until_us=micros(until), reason=request.reason
        )
    )
    return AllowAnswer(
        **room.heading(), job=request.job, job_id=job_id, cluster=cluster, by=by.who, until=until
    )


def quote(room: BankRoom, asker: Asker, request: QuoteRequest) -> QuoteAnswer:
    """What a job may cost at the most, and whether it would be let in.

    Raises:
        BankUsage: An option is none of sbatch's, or its value is none.
        BankRefused: It is for somebody else, and the asker is no operator.
        NoRate: Its partition has no rate.
        NoEstimate: What it may be given cannot be told.
        SlurmError: Nothing is known of the cluster yet, and its Slurm does not answer.
    """
    from steward.bank.estimate import estimate, parse_jobs

    if len(request.script) > _LONGEST_SCRIPT:
        raise BankUsage("that is no script that sbatch would take: it is too long")
    cluster = room.cluster(request.cluster)
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
        if request.user and request.user != rights.user:
            rights.need_operator("ask for others")
        rates = t.rates.all(cluster)
        picture = _picture(room, t.mark(f"picture:{cluster}"), cluster)
    parts = parse_jobs(request.options, request.script, uid=_uid(asker, request.user))
    settings, now = room.settings.bank, room.now()
    quotes = tuple(estimate(part, picture, rates, settings, now) for part in parts)
    account = quotes[0].account
    means = room.means(account, request.user or asker.user) if account else None
    # What others' accounts have is not shown on the way.
    is_seen = all(rights.sees(one.account) for one in quotes)
    free = means.available if means is not None and is_seen else None
    user = request.user or asker.user
    is_let_in, say = _verdict(room, cluster, parts, user) if is_seen else (None, "")
    return QuoteAnswer(
        quotes=quotes,
        amount=sum(one.amount for one in quotes),
        cluster=cluster,
        is_let_in=is_let_in,
        say=say,
        free=free,
        **room.heading(),
    )


def explain(room: BankRoom, asker: Asker, request: ExplainRequest) -> ExplainAnswer:
    """What a job was charged, computed again from its use and its rate.

    Raises:
        BankRefused: It is another user's job, and the asker does not look after the account.
        BankUsage: It is no job's name, or nothing was charged for it.
    """
    cluster = room.cluster(request.cluster)
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
        try:
            rows = charges_of(room, t, request.job, cluster)
        except NotCharged as error:
            why = why_uncharged(room, t, rights, request.job, cluster)
            raise NotCharged(why, request.job) from error
        for row in rows:
            if not rights.leads(row.charge.account) and row.charge.user != rights.user:
                raise BankRefused(f"job {request.job} is somebody else's", request.job)
        lines = []
        names = names_of(room, [row.charge.key for row in rows])
        for row in rows:
            rate = t.rates.get(row.charge.rate) if row.charge.rate else None
            recomputed, way = _again(room, row.charge, rate)
            lines.append(
                ExplainedLine(
                    charge=row.charge,
                    name=names.get(row.charge.key, str(row.charge.job_id)),
                    rate=rate,
                    recomputed=recomputed,
                    refunded=row.refunded,
                    overdraw=row.overdraw,
                    lines=way,
                )
            )
    return ExplainAnswer(
        job=request.job,
        cluster=cluster,
        account=rows[-1].charge.account,
        user=rows[-1].charge.user,
        amount=sum(line.charge.amount - line.refunded for line in lines),
        is_right=all(line.recomputed in (None, line.charge.amount) for line in lines),
        charges=tuple(lines),
        **room.heading(),
    )


def _again(
    room: BankRoom, charge: Charge, rate: Rate | None
) -> tuple[int | None, tuple[PriceLine, ...]]:
    """A charge's amount computed now, and the way to it."""
    from steward.bank.prices import price

    if charge.use is None or rate is None:
        return None, ()
    found = price(charge.use, rate, zone_called(room.zone(charge.cluster)))
    return found.amount, found.lines


def _verdict(
    room: BankRoom, cluster: str, parts: Sequence[Description], user: str
) -> tuple[bool | None, str]:
    """Whether the gate would let each component in now, and what it would say."""
    said: list[str] = []
    gate = room.gate
    try:
        for part in parts:
            verdict = gate.would(cluster, part, user)
            said.append(verdict.say)
            if not verdict.ok:
                return False, verdict.say
    except GateUnavailable as error:
        log.debug("the gate does not say: %s", error)
        return None, ""
    return True, said[0]


def _picture(room: BankRoom, kept: str, cluster: str) -> "Picture":
    """What the estimate needs of a cluster, as the daemon saw it last; else its Slurm is asked."""
    from steward.slurm.cluster_model import Picture

    if kept:
        return msgspec.json.decode(kept, type=Picture)
    return room.picture(cluster)


def _uid(asker: Asker, user: str) -> int:
    if not user or user == asker.user:
        return asker.uid
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError) as error:  # no name holds a NUL
        raise BankUsage(f"there is no user {user!r}", user) from error


JOB_ACTIONS: Final = (
    Action(
        name="bank.quote",
        help="Say what a job may cost.",
        request=QuoteRequest,
        answer=QuoteAnswer,
        run=quote,
        only_reads=True,
    ),
    Action(
        name="bank.explain",
        help="Say what a job was charged, and why.",
        request=ExplainRequest,
        answer=ExplainAnswer,
        run=explain,
        only_reads=True,
    ),
    Action(
        name="bank.allow",
        help="Let one job pass whatever its account has.",
        role="operator",
        request=AllowRequest,
        answer=AllowAnswer,
        run=allow,
    ),
)


MOST: Final = 1000


class ChargedJob(Shape, frozen=True, kw_only=True):
    """A job that is asked about.

    Attributes:
        cluster: Its cluster.
        job_id: Its raw id.
        first_submit: Its first submit time, where the id may have been used before; None for any.
    """

    cluster: str
    job_id: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    first_submit: datetime | None = None


class ChargedRequest(Request, frozen=True, kw_only=True):
    """bank.charged: what jobs were charged, each altogether.

    Attributes:
        jobs: Which.
    """

    jobs: Annotated[tuple[ChargedJob, ...], msgspec.Meta(max_length=MOST)]


class ChargedLine(Shape, frozen=True, kw_only=True):
    """What a job was charged.

    Attributes:
        cluster: Its cluster.
        job_id: Its raw id.
        account: Who paid.
        amount: All of it, micro-SU, refunds taken off.
    """

    cluster: str
    job_id: int
    account: str
    amount: int


class ChargedAnswer(BankAnswer, frozen=True, kw_only=True):
    """What jobs were charged.

    Attributes:
        jobs: Those of which something was charged, and which the asker may know of.
    """

    jobs: tuple[ChargedLine, ...]


def charged(room: BankRoom, asker: Asker, request: ChargedRequest) -> ChargedAnswer:
    """What jobs were charged; who may not know it of one is told nothing of it."""
    asked: dict[str, dict[int, datetime | None]] = {}
    for job in request.jobs:
        asked.setdefault(job.cluster, {})[job.job_id] = job.first_submit
    found: dict[tuple[str, int], ChargedLine] = {}
    with room.ledger.reading() as t:
        rights = room.rights(asker, t)
        for cluster, jobs in asked.items():
            for row in t.charges.of_jobs(cluster, jobs):
                charge = row.charge
                first = jobs[charge.job_id]
                if first is not None and charge.first_submit != first:
                    continue
                if not rights.leads(charge.account) and charge.user != rights.user:
                    continue
                key = (cluster, charge.job_id)
                before = found[key].amount if key in found else 0
                found[key] = ChargedLine(
                    cluster=cluster,
                    job_id=charge.job_id,
                    account=charge.account,
                    amount=before + charge.amount - row.refunded,
                )
    return ChargedAnswer(jobs=tuple(found.values()), **room.heading())


CHARGED_ACTIONS: Final = (
    Action(
        name="bank.charged",
        help="Say what jobs were charged, each altogether.",
        request=ChargedRequest,
        answer=ChargedAnswer,
        run=charged,
        only_reads=True,
    ),
)
