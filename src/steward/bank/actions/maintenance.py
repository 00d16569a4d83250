"""Bank maintenance for operators: reconcile, backfill, check, import, notices.

``bank.reconcile`` compares charges with Slurm's records; ``bank.backfill`` charges earlier runs;
``bank.check`` verifies the ledger, and compares SU holds with live jobs; ``bank.import`` imports
accounts, users, money and rates; ``bank.notices`` and ``bank.notices_retry`` list and retry
notices.
"""

import logging
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from steward.bank.actions.reports import fetch_holds
from steward.bank.actions.status import list_outbox_kinds
from steward.bank.billing import find_fixable_tres, get_hold_job_id
from steward.bank.context import (
    UNTIL,
    BankContext,
    BankReply,
    Cluster,
    ClusterFilter,
    annotate_since,
)
from steward.bank.errors import BankUsage, GateUnavailable, NoRate
from steward.bank.gate_sync import load_pricing
from steward.bank.imports import ImportChange, ImportPlan, apply_plan
from steward.bank.ledger import LedgerFinding, OutboxItem
from steward.bank.notices import NOTICE_KIND as NOTICE
from steward.bank.notices import Notice
from steward.bank.prices import find_rate
from steward.bank.records import ChargeDifference, Hold, Rate
from steward.bank.remote import ENTRY_POINT_GROUP, RemoteBank
from steward.core.access import Caller
from steward.core.actions import (
    ActionMessage,
    InputFile,
    Request,
    Zone,
    action,
    argument,
    described,
    option,
)
from steward.core.errors import Unavailable
from steward.core.extensions import load_offer
from steward.core.layouts import Column, Layout, format_count
from steward.core.timestamps import to_micros

if TYPE_CHECKING:
    from steward.core.records import JobRecord


log = logging.getLogger(__name__)

_GRACE: Final = timedelta(minutes=5)
"""Grace period: later ends may be unsettled, and later starts may lack a hold."""

DryRun = Annotated[bool, option("Report the changes without making them.", "--dry-run")]
ImportKind = Literal["csv", "sacctmgr", "bank-config"]
"""Format of an import."""


class ReconcileRequest(Request, frozen=True, kw_only=True):
    """Request of bank.reconcile: compare charges with Slurm's records."""

    cluster: ClusterFilter = ""
    since: Annotated[
        str, annotate_since("Start of the period in which the runs ended.", "one day ago")
    ] = ""
    dry_run: DryRun = False
    zone: Zone = ""


def _format_run(row: ChargeDifference, _: object) -> str:
    """Return the job id of a run, with its number if the job was requeued."""
    return f"{row.job_id} run {row.restarts}" if row.restarts else str(row.job_id)


_DIFFERENCE_LAYOUT: Final = (
    Column("Cluster", "cluster", show="requested"),
    Column("JobID", _format_run, right=True, exact="job_id"),
    Column("Restarts", "restarts", show="requested"),
    Column("Account", "account"),
    Column("User", "user"),
    Column("Charged", "charged", "money"),
    Column("Recomputed", "recomputed", "money"),
    Column("Source", "source"),
    Column("Done", "done"),
    Column("Reason", "reason", max_width=60),
)


class ReconcileReply(BankReply, frozen=True, kw_only=True):
    """Reply with the differences found by reconciliation.

    Attributes:
        differences: Runs whose charge differs from the amount due.
        since: Start of the period in which the runs ended.
        until: End of the period.
        dry_run: Whether nothing was changed.
        missing_records: Periods without slurmdbd's records, with the cause.
    """

    differences: tuple[ChargeDifference, ...]
    since: datetime
    until: datetime
    dry_run: bool = False
    missing_records: tuple[str, ...] = ()
    layout: ClassVar[Layout] = _DIFFERENCE_LAYOUT

    @property
    def exit_code(self) -> int:
        """1 if slurmdbd's records are missing."""
        return 1 if self.missing_records else 0

    def list_warnings(self) -> Iterable[str]:
        """Return the periods without slurmdbd's records."""
        return self.missing_records

    @property
    def period(self) -> tuple[datetime, datetime]:
        """Period in which the runs ended."""
        return self.since, self.until

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        source = " by jobs.db" if self.missing_records else ""
        return f"No differences: every charge is right{source}."


class BackfillRequest(Request, frozen=True, kw_only=True):
    """Request of bank.backfill: charge runs from before the bank started."""

    since: Annotated[str, annotate_since("Start of the period in which the runs ended.")]
    until: Annotated[str, UNTIL] = ""
    cluster: Cluster = ""
    dry_run: DryRun = False
    zone: Zone = ""


class BackfillReply(BankReply, frozen=True, kw_only=True):
    """Reply with the charges of a backfill.

    Attributes:
        charges: Number of charges.
        amount: Sum of the charges, in micro-SU.
        skipped: Number of rows of slurmdbd that could not be parsed.
        unpriced: Runs without an applicable rate.
        dry_run: Whether nothing was charged.
        missing_records: Period without slurmdbd's records, with the cause; "" if there is none.
    """

    charges: int
    amount: int
    skipped: int = 0
    unpriced: tuple[ChargeDifference, ...] = ()
    dry_run: bool = False
    missing_records: str = ""
    layout: ClassVar[Layout] = (
        Column("Charges", "charges"),
        Column("Amount", "amount", "money"),
        Column("Skipped", "skipped"),
        Column("Unpriced", lambda reply, _: len(reply.unpriced)),
    )
    layouts: ClassVar[Mapping[str, Layout]] = {"unpriced": _DIFFERENCE_LAYOUT}

    @property
    def totals(self) -> "tuple[BackfillReply, ...]":
        """The one row of the table for programs."""
        return (self,)

    @property
    def exit_code(self) -> int:
        """1 if slurmdbd's records are missing, or no rate applies to a run."""
        return 1 if self.unpriced or self.missing_records else 0

    def list_lines(self) -> Iterable[str]:
        """Return the number of charges and their sum."""
        verb = "Would charge" if self.dry_run else "Charged"
        runs = format_count(self.charges, "run")
        return (f"{verb} {runs}, {self.format_with_unit(self.amount)}.",)

    def list_warnings(self) -> Iterable[str]:
        """Return missing records, and the numbers of rows not parsed and of runs without a rate."""
        if self.missing_records:
            yield self.missing_records
        if self.skipped:
            rows = format_count(self.skipped, "row")
            yield f"cannot parse {rows} of slurmdbd: those runs are not charged"
        if self.unpriced:
            runs = format_count(len(self.unpriced), "run")
            yield f"no rate applies to {runs}: create one with 'steward bank rate create'"


class CheckRequest(Request, frozen=True, kw_only=True):
    """Request of bank.check: verify the ledger."""


class CheckReply(BankReply, frozen=True, kw_only=True):
    """Reply with the findings of the ledger check.

    Attributes:
        findings: Inconsistencies; empty if there are none.
        accounts: Number of accounts checked.
        position: Position of the ledger that was checked.
        holds: Number of open holds compared with jobs; None if the gate does not answer.
    """

    findings: tuple[LedgerFinding, ...]
    accounts: int
    position: int
    holds: int | None = None
    layout: ClassVar[Layout] = (
        Column("Kind", "kind"),
        Column("Object", "object"),
        Column("Finding", "finding"),
    )

    @property
    def exit_code(self) -> int:
        """1 if there are inconsistencies."""
        return 1 if self.findings else 0

    def list_lines(self) -> Iterable[str]:
        """Yield the number of accounts and holds checked, if there are no inconsistencies."""
        if not self.findings:
            holds = (
                "" if self.holds is None else f", {format_count(self.holds, 'hold')} and their jobs"
            )
            yield f"The ledger is consistent: {format_count(self.accounts, 'account')}{holds}."

    def list_notes(self) -> Iterable[str]:
        """Yield that holds were not checked."""
        if self.holds is None:
            yield "The gate does not answer: holds were not compared with jobs."


class ImportRequest(Request, frozen=True, kw_only=True):
    """Request of bank.import: accounts, users, allocations and rates of another program."""

    kind: Annotated[ImportKind, argument("Format of the file.", "csv|sacctmgr|bank-config")]
    file: Annotated[
        InputFile | None,
        argument(
            "File, or - for standard input. Without one, sacctmgr queries slurmdbd.", "FILE|-"
        ),
    ] = None
    cluster: Cluster = ""
    dry_run: DryRun = False
    zone: Zone = ""


class ImportReply(BankReply, frozen=True, kw_only=True):
    """Reply with the changes of an import.

    Attributes:
        changes: Changes made, or to be made in a dry run.
        remarks: Parts that were skipped, and why.
        dry_run: Whether nothing was changed.
        gate_knows: Whether the gate already applies it; otherwise it does soon.
    """

    changes: tuple[ImportChange, ...]
    remarks: tuple[str, ...] = ()
    dry_run: bool = False
    gate_knows: bool = False
    layout: ClassVar[Layout] = (
        Column("Change", "change"),
        Column("Object", "object"),
        Column("Name", "name"),
        Column(
            "Amount",
            lambda change, _: "" if change.amount is None else change.amount,
            "money",
            exact="amount",
        ),
        Column("Detail", "detail"),
    )

    @property
    def made(self) -> tuple[ImportChange, ...]:
        """Changes, without objects that exist already."""
        return tuple(change for change in self.changes if change.change != "keep")

    def list_lines(self) -> Iterable[str]:
        """Return the summary, if there are no changes."""
        return () if self.made else (self.summary,)

    def list_notes(self) -> Iterable[str]:
        """Return the summary of changes."""
        return (self.summary,) if self.made else ()

    @property
    def summary(self) -> str:
        """Number of changes, and of objects that exist already."""
        count = len(self.made)
        verb = "would be made" if self.dry_run else "made"
        kept_count = len(self.changes) - count
        return f"{format_count(count, 'change')} {verb}, {kept_count} objects unchanged."


class _DryRun(Exception):
    """Exception that rolls back the transaction of a dry run; never leaves this module."""


@action(
    "bank.reconcile",
    scope="bank",
    role="operator",
    command="bank reconcile",
    rows="differences",
)
def reconcile_clusters(
    context: BankContext, caller: Caller, request: ReconcileRequest
) -> ReconcileReply:
    """Compare charges with Slurm's records and correct differences.

    Steward corrects each difference by a ledger transaction with the cause. The daemon also
    does this every minute.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: A time is invalid, or the cluster does not exist.
    """
    from steward.bank.reconciliation import HOURLY_PERIOD, reconcile_cluster

    _require_operator(context, caller, "reconcile")
    clusters = (
        [context.resolve_cluster(request.cluster)] if request.cluster else list(context.clusters)
    )
    differences: list[ChargeDifference] = []
    missing_records: list[str] = []
    now = context.now()
    starts = []
    for cluster in clusters:
        zone = request.zone or context.get_time_zone(cluster)
        since = context.parse_moment(request.since, zone) or now - HOURLY_PERIOD
        starts.append(since)
        result = reconcile_cluster(
            context.settings,
            context.ledger,
            context.gate,
            cluster,
            since,
            is_dry=request.dry_run,
            now=now,
            author=caller.signature,
        )
        differences += result.differences
        missing_records += filter(None, [result.missing_records])
    return ReconcileReply(
        differences=tuple(differences),
        since=min(starts, default=now),
        until=now,
        dry_run=request.dry_run,
        missing_records=tuple(missing_records),
        **context.make_heading(),
    )


@action(
    "bank.backfill",
    scope="bank",
    role="operator",
    command="bank backfill",
    rows="totals",
)
def backfill_charges(
    context: BankContext, caller: Caller, request: BackfillRequest
) -> BackfillReply:
    """Charge jobs that ran before the bank was enabled.

    Each job has the rate of its first submission. Steward skips runs that have a charge.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: A time is invalid, or the cluster does not exist.
    """
    from steward.bank.backfill import backfill_cluster

    _require_operator(context, caller, "backfill")
    cluster = context.resolve_cluster(request.cluster)
    zone = request.zone or context.get_time_zone(cluster)
    since = context.parse_moment(request.since, zone)
    if since is None:
        raise BankUsage("no start given: set `since`, such as 2026-01-01")
    until = context.parse_moment(request.until, zone) or context.now()
    with context.ledger.reading() as t:
        seq_before = t.seq
    result = backfill_cluster(
        context.settings,
        context.ledger,
        cluster,
        since,
        until,
        is_dry=request.dry_run,
        now=context.now(),
        author=caller.signature,
    )
    if not request.dry_run:
        context.update_gate(seq_before)
    return BackfillReply(
        charges=result.charges,
        amount=result.amount,
        skipped=result.passed_over,
        unpriced=result.unpriced,
        dry_run=request.dry_run,
        missing_records=result.missing_records,
        **context.make_heading(),
    )


@action(
    "bank.check",
    scope="read",
    role="operator",
    command="bank check",
    rows="findings",
    only_reads=True,
)
def run_bank_check(context: BankContext, caller: Caller, request: CheckRequest) -> CheckReply:
    """Check the ledger, and compare SU holds with jobs.

    The check requires that every transaction sums to zero, that balances and charges equal the
    sums of their postings, and that SU holds match jobs. If it fails, the command exits with 1.

    Raises:
        BankRefused: The caller is not an operator.
    """
    del request
    with context.ledger.reading() as t:
        context.get_rights(caller, t).require_operator("check the ledger")
        findings = list(t.check())
        accounts = len(t.accounts.list_all(unknown=True))
        position = t.seq
    pricings = (
        load_pricing(context.settings, context.ledger, cluster) for cluster in context.clusters
    )
    findings += find_fixable_tres(pricings)
    holds: list[Hold] | None = None
    try:
        holds = fetch_holds(context)
        findings += compare_holds_with_jobs(context, holds)
    except GateUnavailable as error:
        log.debug("cannot compare SU holds with jobs: %s", error)
    return CheckReply(
        findings=tuple(findings),
        accounts=accounts,
        position=position,
        holds=None if holds is None else len(holds),
        **context.make_heading(),
    )


@action(
    "bank.import",
    scope="bank",
    role="administrator",
    command="bank import",
    rows="changes",
)
def import_data(context: BankContext, caller: Caller, request: ImportRequest) -> ImportReply:
    """Import accounts, users, allocations and rates.

    Sources are a CSV file (docs/bank.md lists its columns), slurmdbd, a file of 'sacctmgr dump',
    and bank-config.toml of slurm-banking-plugins. Existing data stays, so you can repeat an import.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: The text cannot be parsed, or contradicts itself.
        SlurmError: The import queries slurmdbd, which does not answer.
    """
    _require_operator(context, caller, "import")
    plan = _read_plan(context, request)
    name = request.file.name if request.file else ""
    key = f"import/{request.kind}/{name}"
    author = context.make_authorship(caller, f"imported from {name or request.kind}", key)
    changes: list[ImportChange] = []
    seq_before = 0
    try:
        with context.ledger.transaction() as t:
            seq_before = t.seq
            changes = apply_plan(t, plan, author)
            _rollback_if_dry(request.dry_run)
    except _DryRun:
        gate_knows = False
    else:
        gate_knows = context.update_gate(seq_before, rules=bool(plan.rates))
    return ImportReply(
        changes=tuple(changes),
        remarks=tuple(plan.remarks),
        dry_run=request.dry_run,
        gate_knows=gate_knows,
        **context.make_heading(),
    )


def _rollback_if_dry(is_dry: bool) -> None:
    """Roll back the transaction of a dry run by an exception."""
    if is_dry:
        raise _DryRun


def _read_plan(context: BankContext, request: ImportRequest) -> ImportPlan:
    """Return the plan of an import, from its file or from slurmdbd."""
    from steward.bank.imports import read_associations, read_bank_config, read_csv, read_dump

    cluster = context.resolve_cluster(request.cluster)
    if request.file is not None:
        text = request.file.text
        if request.kind == "csv":
            return read_csv(text, lambda moment: context.parse_moment(moment, request.zone))
        return read_dump(text) if request.kind == "sacctmgr" else read_bank_config(text, cluster)
    if request.kind != "sacctmgr":
        raise BankUsage("no file given: name a file, or - for standard input")
    from steward.slurm import Slurm

    slurm = Slurm(cluster, context.settings.cluster[cluster])
    associations = slurm.associations()
    if associations is None:
        raise BankUsage(
            f"cluster {cluster} has no slurmdbd to import from: name a file that 'sacctmgr dump' "
            "wrote, or a CSV file",
            cluster,
        )
    return read_associations(associations.rows, associations.coordinators)


def compare_holds_with_jobs(context: BankContext, holds: list[Hold]) -> list[LedgerFinding]:
    """Find holds whose jobs have ended, and running jobs without a hold."""
    cutoff = context.now() - _GRACE
    findings: list[LedgerFinding] = []
    with context.ledger.reading() as t:
        rates = t.rates.list_all()
        is_enforced = all(rule.mode != "off" for rule in t.modes.list_all())
    for cluster in context.clusters:
        try:
            records = context.jobs.list_unfinished_records(cluster)
        except Unavailable as error:
            findings.append(
                LedgerFinding(
                    kind="unproved", finding=f"cannot compare SU holds with jobs: {error}"
                )
            )
            continue
        job_ids = {get_hold_job_id(record) for record in records}
        hold_by_job = {
            hold.job_id: hold for hold in holds if hold.cluster == cluster and hold.job_id
        }
        findings += [
            LedgerFinding(
                kind="hold-without-job",
                finding=f"hold {hold.id} of account {hold.account} belongs to an ended job",
                object=f"{cluster}/{job_id}",
            )
            for job_id, hold in hold_by_job.items()
            if job_id not in job_ids and hold.created_us < to_micros(cutoff)
        ]
        findings += [
            LedgerFinding(
                kind="job-without-hold",
                finding=f"running job {record.job_id} has no hold",
                object=f"{cluster}/{record.job_id}",
            )
            for record in records
            if is_enforced
            and get_hold_job_id(record) not in hold_by_job
            and _is_running_since(record, cutoff)
            and _has_price(record, cluster, rates)
        ]
    return findings


def _is_running_since(record: "JobRecord", before: datetime) -> bool:
    """Return True if a job is running and started before a time."""
    is_running = record.state.split()[0:1] == ["RUNNING"]
    return is_running and record.start is not None and record.start < before


def _has_price(record: "JobRecord", cluster: str, rates: list[Rate]) -> bool:
    """Return True if a job's partition has a price; missing rates are reported elsewhere."""
    submit = record.submit
    if submit is None:
        return False
    try:
        return not find_rate(rates, cluster, record.partition, record.qos, submit).free
    except NoRate:
        return False


def _require_operator(context: BankContext, caller: Caller, activity: str) -> None:
    """Reject callers who are not operators."""
    with context.ledger.reading() as t:
        context.get_rights(caller, t).require_operator(activity)


_OPERATOR_TASK: Final = "see or retry undelivered notices"
_MAX_NOTICES: Final = 1000
"""Maximum number of notices in a reply."""


class NoticesRequest(Request, frozen=True, kw_only=True):
    """Request of bank.notices: undelivered notices."""


class NoticesRetryRequest(Request, frozen=True, kw_only=True):
    """Request of bank.notices_retry: retry undelivered notices at once."""

    numbers: Annotated[
        tuple[int, ...], described("Numbers of the notices.", default="all dead letters")
    ] = ()


class NoticeLine(ActionMessage, frozen=True, kw_only=True):
    """Undelivered notice.

    Attributes:
        number: Its number.
        channel: ``mail``, ``webhook`` or ``mybrc``; "" for all configured channels.
        summary: Summary, one line.
        to: Users and addresses of a mail.
        attempts: Number of failed attempts.
        next_at: Time of the next attempt; None for a dead letter.
        error: Error of the last attempt.
        is_dead_letter: Whether it is a dead letter, retried only on request.
    """

    number: int
    channel: str = ""
    summary: str = ""
    to: tuple[str, ...] = ()
    attempts: int = 0
    next_at: datetime | None = None
    error: str = ""
    is_dead_letter: bool = False


class NoticesReply(BankReply, frozen=True, kw_only=True):
    """Reply with undelivered notices.

    Attributes:
        notices: The notices, oldest first.
        more: Whether there are more.
    """

    notices: tuple[NoticeLine, ...]
    more: bool = False
    layout: ClassVar[Layout] = (
        Column("Number", "number", "count"),
        Column("Channel", lambda notice, _: notice.channel or "-"),
        Column("Summary", "summary", max_width=50),
        Column("Recipients", lambda notice, _: ", ".join(notice.to), show="requested"),
        Column("Attempts", "attempts", "count"),
        Column(
            "NextAttempt",
            lambda notice, _: "dead letter" if notice.is_dead_letter else notice.next_at,
            "time",
        ),
        Column("Error", "error", max_width=60),
    )

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return "No undelivered notices."

    def list_notes(self) -> Iterable[str]:
        """Return that there are more."""
        return (f"Only the {_MAX_NOTICES:,} oldest notices are shown.",) if self.more else ()


class NoticesRetryReply(BankReply, frozen=True, kw_only=True):
    """Reply with the number of notices to retry.

    Attributes:
        retried: Number of notices.
    """

    retried: int


@action(
    "bank.notices",
    scope="read",
    role="operator",
    only_reads=True,
)
def list_notices(context: BankContext, caller: Caller, request: NoticesRequest) -> NoticesReply:
    """List undelivered mails and other notices, dead letters included.

    Raises:
        BankRefused: The caller is not an operator.
    """
    del request
    with context.ledger.reading() as t:
        context.get_rights(caller, t).require_operator(_OPERATOR_TASK)
        messages = t.outbox.list_undelivered(list_outbox_kinds(), _MAX_NOTICES + 1)
    return NoticesReply(
        notices=tuple(_make_notice_line(message) for message in messages[:_MAX_NOTICES]),
        more=len(messages) > _MAX_NOTICES,
        **context.make_heading(),
    )


@action(
    "bank.notices_retry",
    scope="bank",
    role="operator",
)
def retry_notices(
    context: BankContext, caller: Caller, request: NoticesRetryRequest
) -> NoticesRetryReply:
    """Retry undelivered notices and reset their count of attempts.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: No undelivered notice has these numbers.
    """
    with context.ledger.transaction() as t:
        context.get_rights(caller, t).require_operator(_OPERATOR_TASK)
        count = t.outbox.retry(list_outbox_kinds(), request.numbers)
    if request.numbers and not count:
        numbers = ", ".join(map(str, request.numbers))
        raise BankUsage(
            f"no undelivered notice {numbers}: 'steward bank notices' lists them", request.numbers
        )
    return NoticesRetryReply(retried=count, **context.make_heading())


def _make_notice_line(message: OutboxItem) -> NoticeLine:
    """Convert an outbox message into a line of the reply."""
    line = NoticeLine(
        number=message.id,
        attempts=message.tries,
        next_at=None if message.aside else message.next_at,
        error=message.error,
        is_dead_letter=message.aside,
    )
    if message.kind != NOTICE:
        remote_bank: RemoteBank = load_offer(ENTRY_POINT_GROUP, message.kind)
        return msgspec.structs.replace(
            line, channel=message.kind, summary=remote_bank.describe(message.payload)
        )
    notice = msgspec.json.decode(message.payload, type=Notice)
    return msgspec.structs.replace(line, channel=notice.by, summary=notice.subject, to=notice.to)
