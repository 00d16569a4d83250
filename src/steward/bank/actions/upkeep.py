"""The actions of operators: comparing with Slurm's records, the proof, and imports."""

import logging
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from steward.bank.actions.reports import all_holds
from steward.bank.billing import leader_of, not_counted
from steward.bank.context import BankAnswer, BankRoom
from steward.bank.errors import BankUsage, GateUnavailable, NoRate
from steward.bank.gate.requests import Held, Tally
from steward.bank.gate_sync import pricing_of
from steward.bank.imports import Change, Plan, carry_out
from steward.bank.ledger import Finding, OutboxItem
from steward.bank.notices import OUTBOX as NOTICE
from steward.bank.notices import Notice
from steward.bank.prices import rate_for
from steward.bank.records import AccountBooks, Hold, Rate
from steward.bank.remote import GROUP, RemoteBank
from steward.core.access import Asker
from steward.core.actions import Action, Request, Shape
from steward.core.errors import Unavailable
from steward.core.extensions import load_offer, offers_of
from steward.core.timestamps import micros, moment

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
    from steward.bank.reconciliation import reconcile as compare

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
    from steward.bank.reconciliation import backfill as charge

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
    from steward.bank.imports import of_associations, read_bank_config, read_csv, read_dump

    if request.kind == "csv":
        return read_csv(request.text, lambda text: room.moment(text, request.zone))
    cluster = room.cluster(request.cluster)
    if request.kind == "bank-config":
        return read_bank_config(request.text, cluster)
    if request.text:
        return read_dump(request.text)
    from steward.slurm import Slurm

    slurm = Slurm(cluster, room.settings.cluster[cluster])
    found = slurm.associations()
    if found is None:
        raise BankUsage(f"{cluster} has no slurmdbd to ask: name a file, or import a CSV", cluster)
    return of_associations(found.rows, found.coordinators)


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


UPKEEP_ACTIONS: Final = (
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


_OPERATORS: Final = "look after what waits to be told"
_MOST: Final = 1000


class NoticesRequest(Request, frozen=True, kw_only=True):
    """bank.notices: what was not told yet."""


class NoticesRetryRequest(Request, frozen=True, kw_only=True):
    """bank.notices_retry: have things told again at once.

    Attributes:
        numbers: These; all that were set aside if empty.
    """

    numbers: tuple[int, ...] = ()


class NoticeLine(Shape, frozen=True, kw_only=True):
    """Something that was not told yet.

    Attributes:
        number: Its number.
        way: ``mail``, ``webhook`` or ``mybrc``; "" where it is for all that are set up.
        what: What it says, in a line.
        to: Users and addresses, of a mail.
        tries: How often it failed.
        next_at: When it is tried next; None where it was set aside.
        error: Why it failed last.
        aside: Whether it is not tried any more until somebody asks for it.
    """

    number: int
    way: str = ""
    what: str = ""
    to: tuple[str, ...] = ()
    tries: int = 0
    next_at: datetime | None = None
    error: str = ""
    aside: bool = False


class NoticesAnswer(BankAnswer, frozen=True, kw_only=True):
    """What was not told yet.

    Attributes:
        notices: The first that came first.
        more: Whether there are more.
    """

    notices: tuple[NoticeLine, ...]
    more: bool = False


class NoticesRetryAnswer(BankAnswer, frozen=True, kw_only=True):
    """What is tried again.

    Attributes:
        retried: How many.
    """

    retried: int


def outbox_kinds() -> tuple[str, ...]:
    """Return the kinds of what waits in the outbox: notices, and what banks elsewhere are told."""
    return (NOTICE, *offers_of(GROUP))


def notices(room: BankRoom, asker: Asker, request: NoticesRequest) -> NoticesAnswer:
    """List what waits to be told, and what was set aside.

    Raises:
        BankRefused: The asker is no operator.
    """
    del request
    with room.ledger.reading() as t:
        room.rights(asker, t).need_operator(_OPERATORS)
        found = t.outbox.untold(outbox_kinds(), _MOST + 1)
    return NoticesAnswer(
        notices=tuple(_line(item) for item in found[:_MOST]),
        more=len(found) > _MOST,
        **room.heading(),
    )


def retry(room: BankRoom, asker: Asker, request: NoticesRetryRequest) -> NoticesRetryAnswer:
    """Have things told again at once, as if nobody had tried before.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: Nothing of these numbers waits.
    """
    with room.ledger.transaction() as t:
        room.rights(asker, t).need_operator(_OPERATORS)
        count = t.outbox.again(outbox_kinds(), request.numbers)
    if request.numbers and not count:
        named = ", ".join(map(str, request.numbers))
        raise BankUsage(f"nothing of number {named} waits to be told", request.numbers)
    return NoticesRetryAnswer(retried=count, **room.heading())


def _line(item: OutboxItem) -> NoticeLine:
    common = NoticeLine(
        number=item.id,
        tries=item.tries,
        next_at=None if item.aside else item.next_at,
        error=item.error,
        aside=item.aside,
    )
    if item.kind != NOTICE:
        remote: RemoteBank = load_offer(GROUP, item.kind)
        return msgspec.structs.replace(common, way=item.kind, what=remote.describe(item.payload))
    notice = msgspec.json.decode(item.payload, type=Notice)
    return msgspec.structs.replace(common, way=notice.by, what=notice.subject, to=notice.to)


NOTICE_ACTIONS: Final = (
    Action(
        name="bank.notices",
        help="List what waits to be told to people and servers.",
        request=NoticesRequest,
        answer=NoticesAnswer,
        run=notices,
        only_reads=True,
        role="operator",
    ),
    Action(
        name="bank.notices_retry",
        help="Have what was set aside told again.",
        request=NoticesRetryRequest,
        answer=NoticesRetryAnswer,
        run=retry,
        role="operator",
    ),
)


Gate = Literal["deciding", "not deciding", "away"]


class BankStandingRequest(Request, frozen=True, kw_only=True):
    """bank.standing: how ledger, gate and comparisons stand.

    Attributes:
        accounts: Whether what each account has is wanted, too.
    """

    accounts: bool = False


class ReconciledLine(Shape, frozen=True, kw_only=True):
    """How far a cluster's charges were compared with its records.

    Attributes:
        cluster: The cluster.
        until: Runs that ended until then were compared with what Slurm showed of them; None
            for none yet.
        by_slurmdbd_until: Likewise with slurmdbd's records.
        compared_at: When that was last done.
        differences: How many runs were found then that were not charged what they are due.
        corrected: How many of them were put right.
    """

    cluster: str
    until: datetime | None = None
    by_slurmdbd_until: datetime | None = None
    compared_at: datetime | None = None
    differences: int = 0
    corrected: int = 0


class AccountMoney(Shape, frozen=True, kw_only=True):
    """What an account has that pays for itself; micro-SU.

    Attributes:
        account: Its name.
        balance: What its allocations hold that can be drawn on now.
        credit: What it may owe.
        held: What is held of it; None where the gate does not answer.
        holds: How many holds these are.
    """

    account: str
    balance: int
    credit: int = 0
    held: int | None = None
    holds: int | None = None


class BankStandingAnswer(BankAnswer, frozen=True, kw_only=True):
    """How the bank stands.

    Attributes:
        position: Number of the ledger's last change.
        accounts: How many accounts there are.
        gate: Whether the gate decides.
        gate_why: Why it does not.
        holds: How many holds are open; None where the gate is away.
        held: What they hold, micro-SU.
        asked_at: When a submit plugin asked last, to the minute; None for never, or where
            that is not known.
        tally: What the gate answered since it began; None where it is away.
        reconciled: How far charges were compared, by cluster.
        notices: How many notices were set aside since nobody took them.
        money: What each account has, where that was asked for.
        remote_at: Where balances are those of a myBRC server elsewhere, when it said the oldest.
    """

    position: int
    accounts: int
    gate: Gate
    gate_why: str = ""
    holds: int | None = None
    held: int | None = None
    asked_at: datetime | None = None
    tally: Tally | None = None
    reconciled: tuple[ReconciledLine, ...] = ()
    notices: int = 0
    money: tuple[AccountMoney, ...] = ()
    remote_at: datetime | None = None


def standing(room: BankRoom, asker: Asker, request: BankStandingRequest) -> BankStandingAnswer:
    """Tell how the bank stands.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: There is no bank here.
        LedgerUnavailable: Its database is away.
    """
    from steward.bank.reconciliation import last_comparison

    lines: list[ReconciledLine] = []
    with room.ledger.reading() as t:
        room.rights(asker, t).need_operator("see how the bank stands")
        position, notices = t.seq, t.outbox.set_aside(outbox_kinds())
        accounts = len(t.accounts.all(unknown=True))
        books = t.books().accounts if request.accounts else ()
        for cluster in room.clusters:
            compared, until, by_slurmdbd = last_comparison(t, cluster)
            lines.append(
                ReconciledLine(
                    cluster=cluster,
                    until=_moment(until),
                    by_slurmdbd_until=_moment(by_slurmdbd),
                    compared_at=moment(compared.at_us) if compared else None,
                    differences=compared.differences if compared else 0,
                    corrected=compared.corrected if compared else 0,
                )
            )
    answer = BankStandingAnswer(
        position=position,
        accounts=accounts,
        gate="away",
        reconciled=tuple(lines),
        notices=notices,
        money=_money(books, micros(room.now()), None),
        **room.heading(),
    )
    return _with_gate(room, answer, books)


def _with_gate(
    room: BankRoom, answer: BankStandingAnswer, books: tuple[AccountBooks, ...]
) -> BankStandingAnswer:
    try:
        state = room.gate.state()
        held = room.gate.held() if books else []
    except GateUnavailable as error:
        return msgspec.structs.replace(answer, gate_why=str(error))
    return msgspec.structs.replace(
        answer,
        gate="deciding" if state.deciding else "not deciding",
        gate_why=state.why,
        holds=state.holds,
        held=state.held,
        asked_at=_moment(state.asked_at_us),
        tally=state.tally,
        remote_at=_moment(state.remote_at_us),
        money=_money(books, micros(room.now()), {one.account: one for one in held}),
    )


def _money(
    books: tuple[AccountBooks, ...], now_us: int, held: dict[str, Held] | None
) -> tuple[AccountMoney, ...]:
    """What each account has that pays for itself; those that draw on another are part of that."""
    lines = []
    for one in books:
        if one.payer not in ("", one.name):
            continue
        balance = sum(
            some.balance
            for some in one.allocations
            if some.begin_us <= now_us and (not some.end_us or now_us < some.end_us)
        )
        none = Held(account=one.name, holds=0, held=0)
        known = None if held is None else held.get(one.name, none)
        lines.append(
            AccountMoney(
                account=one.name,
                balance=balance,
                credit=one.credit,
                held=known.held if known else None,
                holds=known.holds if known else None,
            )
        )
    return tuple(lines)


def _moment(us: int) -> datetime | None:
    return moment(us) if us else None


STATUS_ACTIONS: Final = (
    Action(
        name="bank.standing",
        help="How ledger, gate and comparisons stand.",
        request=BankStandingRequest,
        answer=BankStandingAnswer,
        run=standing,
        only_reads=True,
        role="operator",
    ),
)
