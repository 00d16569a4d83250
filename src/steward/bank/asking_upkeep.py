"""The actions of operators: comparing with Slurm's records, the proof, and imports."""

import logging
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from steward.bank.asking_views import all_holds
from steward.bank.errors import BankUsage, GateUnavailable, NoRate
from steward.bank.importing.plan import Change, Plan, carry_out
from steward.bank.ledger import Finding
from steward.bank.live import pricing_of
from steward.bank.prices import rate_for
from steward.bank.records import Hold, Rate
from steward.bank.room import BankAnswer, BankRoom
from steward.bank.settling import leader_of
from steward.bank.uncounted import not_counted
from steward.core.access import Asker
from steward.core.actions import Action, Request, Shape
from steward.core.errors import Unavailable
from steward.core.timestamps import micros

if TYPE_CHECKING:
    from steward.core.records import JobRecord

log = logging.getLogger(__name__)

_PATIENCE: Final = timedelta(minutes=5)
"""What has ended so lately may not be settled yet, and who came so lately not be covered."""

ImportKind = Literal["csv", "sacctmgr", "bank-config"]


class ReconcileRequest(Request, frozen=True, kw_only=True):
    """bank.reconcile: compare what was charged with Slurm's own records.

    Attributes:
        cluster: The cluster; "" for every one.
        since: Of runs that ended since, as people type times; "" for where it was last left.
        dry_run: Whether differences are only told.
        zone: IANA name of the zone that times are meant in; "" for the cluster's.
    """

    cluster: str = ""
    since: str = ""
    dry_run: bool = False
    zone: str = ""


class DifferenceLine(Shape, frozen=True, kw_only=True):
    """A run that was charged something else than it is due.

    Attributes:
        cluster: Its cluster.
        job_id: The raw job id.
        restarts: Which run of it.
        account: Who pays.
        user: Whose job it was.
        charged: What it was charged, micro-SU; None for nothing.
        due: What its record makes, micro-SU; None where nothing says what it costs.
        why: What the difference comes from.
        source: Whose word it is: ``jobs`` or ``sacct``.
        done: Whether it was put right.
    """

    cluster: str
    job_id: int
    restarts: int = 0
    account: str = ""
    user: str = ""
    charged: int | None = None
    due: int | None = None
    why: str = ""
    source: str = ""
    done: bool = False


class ReconcileAnswer(BankAnswer, frozen=True, kw_only=True):
    """What was found.

    Attributes:
        differences: Each run that was charged something else than it is due.
        dry_run: Whether nothing was changed.
    """

    differences: tuple[DifferenceLine, ...]
    dry_run: bool = False


class BackfillRequest(Request, frozen=True, kw_only=True):
    """bank.backfill: charge what ran before there was a bank.

    Attributes:
        since: Of runs that ended since, as people type times.
        until: Likewise; "" for now.
        cluster: The cluster; "" for the first.
        dry_run: Whether it is only told what would be charged.
        zone: IANA name of the zone that times are meant in; "" for the cluster's.
    """

    since: str
    until: str = ""
    cluster: str = ""
    dry_run: bool = False
    zone: str = ""


class BackfillAnswer(BankAnswer, frozen=True, kw_only=True):
    """What was charged.

    Attributes:
        charges: How many.
        amount: What they come to, micro-SU.
        passed_over: How many runs were charged already.
        unpriced: Runs that nothing says the price of.
        dry_run: Whether nothing was charged.
    """

    charges: int
    amount: int
    passed_over: int = 0
    unpriced: tuple[DifferenceLine, ...] = ()
    dry_run: bool = False


class CheckRequest(Request, frozen=True, kw_only=True):
    """bank.check: prove the ledger."""


class CheckAnswer(BankAnswer, frozen=True, kw_only=True):
    """What the proof came to.

    Attributes:
        findings: What is wrong; nothing if all is right.
        accounts: How many accounts were looked at.
        position: Position of the ledger that was looked at.
        holds: How many open holds were compared with jobs; None where the gate does not answer.
    """

    findings: tuple[Finding, ...]
    accounts: int
    position: int
    holds: int | None = None


class ImportRequest(Request, frozen=True, kw_only=True):
    """bank.import: accounts, users, money and prices that another program has.

    Attributes:
        kind: What the text is.
        text: The file; "" with ``sacctmgr`` to ask slurmdbd.
        name: What the file is called; part of the keys that make a repeat harmless.
        cluster: The cluster; "" for the first.
        dry_run: Whether it is only told what would be done.
        zone: IANA name of the zone that times are meant in; "" for the cluster's.
    """

    kind: ImportKind
    text: str = ""
    name: str = ""
    cluster: str = ""
    dry_run: bool = False
    zone: str = ""


class ImportAnswer(BankAnswer, frozen=True, kw_only=True):
    """What was brought in.

    Attributes:
        changes: What was done, or would be.
        remarks: What was passed over, and why.
        dry_run: Whether nothing was changed.
        gate_knows: Whether the gate reckons with it already; it is told soon otherwise.
    """

    changes: tuple[Change, ...]
    remarks: tuple[str, ...] = ()
    dry_run: bool = False
    gate_knows: bool = False


class _DryRun(Exception):
    """Ends a transaction whose changes are not wanted; never leaves this module."""


def reconcile(room: BankRoom, asker: Asker, request: ReconcileRequest) -> ReconcileAnswer:
    """Compare what was charged with Slurm's own records, and correct it.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: A time cannot be read, or there is no such cluster.
    """
    from steward.bank.reconciling import reconcile as compare

    _need_operator(room, asker, "reconcile")
    clusters = [room.cluster(request.cluster)] if request.cluster else list(room.clusters)
    found: list[DifferenceLine] = []
    for cluster in clusters:
        since = room.moment(request.since, request.zone or room.zone(cluster))
        differences = compare(
            room.settings,
            room.ledger,
            room.gate,
            cluster,
            since,
            is_dry=request.dry_run,
            now=room.now(),
        )
        found += [_difference(one) for one in differences]
    return ReconcileAnswer(differences=tuple(found), dry_run=request.dry_run, **room.heading())


def backfill(room: BankRoom, asker: Asker, request: BackfillRequest) -> BackfillAnswer:
    """Charge what ran before there was a bank.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: A time cannot be read, or there is no such cluster.
    """
    from steward.bank.backfilling import backfill as charge

    _need_operator(room, asker, "backfill")
    cluster = room.cluster(request.cluster)
    zone = request.zone or room.zone(cluster)
    since = room.moment(request.since, zone)
    if since is None:
        raise BankUsage("say since when: backfill -S 2026-01-01")
    until = room.moment(request.until, zone) or room.now()
    with room.ledger.reading() as t:
        before = t.seq
    done = charge(
        room.settings,
        room.ledger,
        cluster,
        since,
        until,
        is_dry=request.dry_run,
        now=room.now(),
    )
    if not request.dry_run:
        room.tell_gate(before)
    return BackfillAnswer(
        charges=done.charges,
        amount=done.amount,
        passed_over=done.passed_over,
        unpriced=tuple(_difference(one) for one in done.unpriced),
        dry_run=request.dry_run,
        **room.heading(),
    )


def check(room: BankRoom, asker: Asker, request: CheckRequest) -> CheckAnswer:
    """Prove the ledger, and that holds match jobs.

    Raises:
        BankRefused: The asker is no operator.
    """
    del request
    with room.ledger.reading() as t:
        room.rights(asker, t).need_operator("prove the ledger")
        findings = list(t.check())
        accounts = len(t.accounts.all(unknown=True))
        position = t.seq
    of_all = (pricing_of(room.settings, room.ledger, cluster) for cluster in room.clusters)
    findings += not_counted(of_all)
    holds: list[Hold] | None = None
    try:
        holds = all_holds(room)
        findings += holds_and_jobs(room, holds)
    except GateUnavailable as error:
        log.debug("holds are not compared: %s", error)
    return CheckAnswer(
        findings=tuple(findings),
        accounts=accounts,
        position=position,
        holds=None if holds is None else len(holds),
        **room.heading(),
    )


def import_(room: BankRoom, asker: Asker, request: ImportRequest) -> ImportAnswer:
    """Bring in what another program has; what is there already stays.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: The text cannot be understood, or contradicts itself.
        SlurmError: slurmdbd is to be asked, but does not answer.
    """
    _need_operator(room, asker, "import")
    plan = _plan(room, request)
    name = f"import/{request.kind}/{request.name}"
    by = room.by(asker, f"imported from {request.name or request.kind}", name)
    changes: list[Change] = []
    before = 0
    try:
        with room.ledger.transaction() as t:
            before = t.seq
            changes = carry_out(t, plan, by)
            _end_dry(request.dry_run)
    except _DryRun:
        return _imported(room, request, changes, plan, gate_knows=False)
    knows = room.tell_gate(before, rules=bool(plan.rates))
    return _imported(room, request, changes, plan, gate_knows=knows)


def _end_dry(is_dry: bool) -> None:
    if is_dry:
        raise _DryRun


def _imported(
    room: BankRoom, request: ImportRequest, changes: list[Change], plan: Plan, *, gate_knows: bool
) -> ImportAnswer:
    return ImportAnswer(
        changes=tuple(changes),
        remarks=tuple(plan.remarks),
        dry_run=request.dry_run,
        gate_knows=gate_knows,
        **room.heading(),
    )


def _plan(room: BankRoom, request: ImportRequest) -> Plan:
    from steward.bank.importing import bank_config, csv_file, sacctmgr

    if request.kind == "csv":
        return csv_file.read(request.text, lambda text: room.moment(text, request.zone))
    cluster = room.cluster(request.cluster)
    if request.kind == "bank-config":
        return bank_config.read(request.text, cluster)
    if request.text:
        return sacctmgr.read_dump(request.text)
    from steward.slurm import Slurm

    slurm = Slurm(cluster, room.settings.cluster[cluster])
    found = slurm.associations()
    if found is None:
        raise BankUsage(f"{cluster} has no slurmdbd to ask: name a file, or import a CSV", cluster)
    return sacctmgr.of_associations(found.rows, found.coordinators)


def holds_and_jobs(room: BankRoom, holds: list[Hold]) -> list[Finding]:
    """Findings of holds whose jobs are over, and of running jobs that nothing is held for."""
    before = room.now() - _PATIENCE
    found: list[Finding] = []
    with room.ledger.reading() as t:
        rates = t.rates.all()
        is_enforced = all(rule.mode != "off" for rule in t.modes.all())
    for cluster in room.clusters:
        try:
            live = room.jobs.unfinished(cluster)
        except Unavailable as error:
            found.append(Finding(kind="unproved", what=f"holds could not be compared: {error}"))
            continue
        ids = {leader_of(record) for record in live}
        own = {one.job_id: one for one in holds if one.cluster == cluster and one.job_id}
        found += [
            Finding(
                kind="hold-without-job",
                what=f"hold {one.id} of {one.account} is for a job that is over",
                where=f"{cluster}/{job_id}",
            )
            for job_id, one in own.items()
            if job_id not in ids and one.created_us < micros(before)
        ]
        found += [
            Finding(
                kind="job-without-hold",
                what=f"job {record.job_id} runs, and nothing is held for it",
                where=f"{cluster}/{record.job_id}",
            )
            for record in live
            if is_enforced
            and leader_of(record) not in own
            and _runs_since(record, before)
            and _costs(record, cluster, rates)
        ]
    return found


def _runs_since(record: "JobRecord", before: datetime) -> bool:
    is_running = record.state.split()[0:1] == ["RUNNING"]
    return is_running and record.start is not None and record.start < before


def _costs(record: "JobRecord", cluster: str, rates: list[Rate]) -> bool:
    """Whether a job's partition has a price; of one that has none, all is said elsewhere."""
    submit = record.submit
    if submit is None:
        return False
    try:
        return not rate_for(rates, cluster, record.partition, record.qos, submit).free
    except NoRate:
        return False


def _need_operator(room: BankRoom, asker: Asker, what: str) -> None:
    with room.ledger.reading() as t:
        room.rights(asker, t).need_operator(what)


def _difference(one: Any) -> DifferenceLine:
    return DifferenceLine(**{name: getattr(one, name) for name in DifferenceLine.__struct_fields__})


ACTIONS: Final = (
    Action(
        name="bank.reconcile",
        help="Compare what was charged with Slurm's records.",
        request=ReconcileRequest,
        answer=ReconcileAnswer,
        run=reconcile,
        role="operator",
    ),
    Action(
        name="bank.backfill",
        help="Charge what ran before there was a bank.",
        request=BackfillRequest,
        answer=BackfillAnswer,
        run=backfill,
        role="operator",
    ),
    Action(
        name="bank.check",
        help="Prove the ledger.",
        request=CheckRequest,
        answer=CheckAnswer,
        run=check,
        only_reads=True,
        role="operator",
    ),
    Action(
        name="bank.import",
        help="Bring in accounts, users, money and prices.",
        request=ImportRequest,
        answer=ImportAnswer,
        run=import_,
        role="administrator",
    ),
)
