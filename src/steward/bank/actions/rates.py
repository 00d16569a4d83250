"""Bank actions for rates and modes: prices of jobs, and whether the gate rejects them.

``bank.rate_create``, ``bank.rate_change`` and ``bank.rate_show`` manage prices of partitions.
``bank.mode`` sets the mode (off, observe, enforce). ``bank.would_reject`` lists jobs that were or
would have been rejected.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec

from steward.bank.context import (
    UNTIL,
    AccountFilter,
    BankContext,
    BankReply,
    ChangeReply,
    Cluster,
    ClusterFilter,
    Reason,
    UserFilter,
    annotate_since,
)
from steward.bank.errors import BankUsage
from steward.bank.ledger import RejectedJob
from steward.bank.rate_validation import (
    check_rate,
    format_rate,
    list_rate_warnings,
    parse_factors,
    parse_time_factors,
    parse_weights,
)
from steward.bank.records import ModeRule, Rate, TimeFactor
from steward.core.access import Caller
from steward.core.actions import Request, Zone, action, argument, option, route
from steward.core.layouts import Column, Layout, read_user

_OPERATOR_TASK: Final = "set rates and modes"
_MOST_REJECTIONS: Final = 10_000
"""Maximum number of rejections in a reply."""
_MAX_SILENCE: Final = timedelta(days=7)
"""Longest time a cluster may see no submission before a warning."""


class RateRequest(Request, frozen=True, kw_only=True):
    """Request of bank.rate_create: the price of jobs from a time on."""

    partition: Annotated[
        str, argument("Partition; '*' for all partitions without a rate.", "PARTITION")
    ]
    qos: Annotated[
        str, option("Apply the rate only to jobs with this QOS.", "--qos", "-q", metavar="NAME")
    ] = ""
    cluster: Cluster = ""
    weights: Annotated[
        dict[str, int] | None,
        option(
            "Price of each TRES per hour, such as cpu=1,gres/gpu=20. For mem and bb/NAME: per GiB "
            "and hour.",
            "--weight",
            "-w",
            metavar="TRES=AMOUNT,…",
            unit="money",
            parse=parse_weights,
        ),
    ] = None
    combine: Annotated[
        Literal["max", "sum"] | None,
        option("Charge the most expensive of the weighted TRES, or their sum.", "--max/--sum"),
    ] = None
    minimum: Annotated[
        int | None,
        option("Minimum price of a run.", "--minimum", metavar="AMOUNT", unit="money"),
    ] = None
    whole_nodes: Annotated[
        bool | None,
        option("Charge whole nodes, or only the allocated resources.", "--whole-nodes/--parts"),
    ] = None
    factors: Annotated[
        tuple[TimeFactor, ...] | None,
        option(
            "Factor by time, such as sat-sun/0-24=0.5 or mon-fri/08:00-18:00=1.5.",
            "--factor",
            metavar="DAYS/TIME-TIME=NUMBER",
            parse=parse_time_factors,
        ),
    ] = None
    qos_permille: Annotated[
        dict[str, int] | None,
        option(
            "Factor by QOS, such as lowprio=0.5.",
            "--qos-factor",
            metavar="QOS=NUMBER,…",
            parse=parse_factors,
        ),
    ] = None
    ends_permille: Annotated[
        dict[str, int] | None,
        option(
            "Factor by final state, such as NODE_FAIL=0,PREEMPTED=0.5.",
            "--end-factor",
            metavar="STATE=NUMBER,…",
            parse=parse_factors,
        ),
    ] = None
    free: Annotated[bool | None, option("Charge nothing.", "--free")] = None
    note: Annotated[str | None, option("Description, for people.", "--note", metavar="TEXT")] = None
    valid_from: Annotated[
        str,
        option(
            "Start of the rate: it applies to jobs first submitted at this time or later.",
            "--from",
            metavar="TIME",
            default="now",
        ),
    ] = ""
    zone: Zone = ""
    reason: Reason = ""


class RateChangeRequest(RateRequest, frozen=True, kw_only=True):
    """Request of bank.rate_change: None leaves a field unchanged."""

    cluster: Annotated[
        str,
        option(
            "Cluster of the rate, if several clusters have a rate of this partition.",
            "--cluster",
            "-M",
            metavar="NAME",
        ),
    ] = ""


_PRICE_FIELDS: Final = (
    "weights",
    "combine",
    "minimum",
    "whole_nodes",
    "factors",
    "qos_permille",
    "ends_permille",
    "free",
    "note",
)
"""Fields of a rate that a request gives; None leaves the default, or the present value."""


class RateShowRequest(Request, frozen=True, kw_only=True):
    """Request of bank.rate_show: the rates."""

    cluster: ClusterFilter = ""
    past: Annotated[bool, option("Also list rates that later ones replaced.", "--past")] = False


class RatesReply(ChangeReply, frozen=True, kw_only=True):
    """Reply with rates.

    Attributes:
        rates: Rates by cluster, partition, QOS and start of validity.
        warnings: Parts of a new rate that may charge nothing on its cluster.
    """

    rates: tuple[Rate, ...]
    warnings: tuple[str, ...] = ()
    layout: ClassVar[Layout] = (
        Column("Number", "number", "count"),
        Column("Cluster", "cluster", show="several"),
        Column("Partition", "partition"),
        Column("QOS", "qos", show="filled"),
        Column("From", "valid_from", "time"),
        Column("Rate", lambda row, _: format_rate(row)),
        Column("Note", "note", show="requested"),
    )

    @property
    def empty_reason(self) -> str:
        """Reason why there are no rows."""
        return "No rates: create one with 'steward bank rate create'."

    def list_warnings(self) -> Iterable[str]:
        """Return parts of a new rate that may charge nothing."""
        return self.warnings


class ModeRequest(Request, frozen=True, kw_only=True):
    """Request of bank.mode: the mode of all clusters or a part of one."""

    mode: Annotated[
        Literal["", "off", "observe", "enforce", "default"],
        argument(
            "New mode; 'default' removes the mode of exactly this scope. Without it, the command "
            "shows the modes.",
            "MODE",
        ),
    ] = ""
    cluster: ClusterFilter = ""
    partition: Annotated[
        str, option("Only this partition of the cluster.", "--partition", "-r", metavar="NAME")
    ] = ""
    account: AccountFilter = ""
    reason: Reason = ""


class ModeReply(ChangeReply, frozen=True, kw_only=True):
    """Reply with the mode rules.

    Attributes:
        rules: The rules set; elsewhere the mode is ``observe``.
        warning: Why nothing is rejected nevertheless; "" if no cause is known.
    """

    rules: tuple[ModeRule, ...]
    warning: str = ""
    layout: ClassVar[Layout] = (
        Column("Cluster", lambda rule, _: rule.cluster or "all"),
        Column("Partition", lambda rule, _: rule.partition or "all"),
        Column("Account", lambda rule, _: rule.account or "all"),
        Column("Mode", "mode"),
    )

    def list_lines(self) -> Iterable[str]:
        """Return the mode of clusters, partitions and accounts without a rule."""
        if not any(not (rule.cluster or rule.partition or rule.account) for rule in self.rules):
            yield "Default mode: observe."

    def list_warnings(self) -> Iterable[str]:
        """Return why nothing is rejected."""
        return (self.warning,) if self.warning else ()


class WouldRejectRequest(Request, frozen=True, kw_only=True):
    """Request of bank.would_reject: jobs that were rejected, or would have been."""

    since: Annotated[str, annotate_since("Start of the period.", "seven days ago")] = ""
    until: Annotated[str, UNTIL] = ""
    zone: Zone = ""
    account: AccountFilter = ""
    user: UserFilter = ""
    all: Annotated[
        bool, option("Also list rejected jobs, and jobs admitted by 'bank allow'.", "--all", "-a")
    ] = False


class WouldRejectReply(BankReply, frozen=True, kw_only=True):
    """Reply with jobs that were rejected, or would have been.

    Attributes:
        rejections: The rejections, oldest first.
        since: Start of the period.
        until: End of the period.
        more: Whether there are more.
        warning: Why the list may be empty; "" if no cause is known.
    """

    rejections: tuple[RejectedJob, ...]
    since: datetime
    until: datetime
    more: bool = False
    warning: str = ""
    layout: ClassVar[Layout] = (
        Column("Time", "at", "time"),
        Column("Cluster", "cluster", show="several"),
        Column("JobID", lambda row, _: row.job_id or None, show="filled", right=True),
        Column("User", read_user),
        Column("Account", "account"),
        Column("Partition", "partition"),
        Column("Amount", "amount", "money"),
        Column("Mode", "mode"),
        Column("Reason", lambda row, _: row.reason.split("\n", 1)[0], exact="reason"),
    )

    @property
    def period(self) -> tuple[datetime, datetime]:
        """Period of the rejections."""
        return self.since, self.until

    @property
    def empty_reason(self) -> str:
        """That there are no such jobs, unless a warning says that no plugin asks the gate."""
        return "" if self.warning else "No rejections in this period."

    def list_warnings(self) -> Iterable[str]:
        """Return why the list may be empty, and that it is incomplete."""
        if self.warning:
            yield self.warning
        if self.more:
            yield "the list is incomplete: narrow the period with -S and -E"


@action(
    "bank.rate_create",
    scope="bank",
    role="operator",
    command="bank rate create",
    rows="rates",
    routes=(route("POST /rates"),),
)
def create_rate(context: BankContext, caller: Caller, request: RateRequest) -> RatesReply:
    """Create a rate: the price of jobs from a time on.

    The rate applies to jobs first submitted at the time --from or later. Earlier jobs keep their
    rate.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: It has neither a price nor the mark "free", it weighs an unknown TRES, or the
            cluster does not exist.
    """
    rate = Rate(
        cluster=context.resolve_cluster(request.cluster),
        partition=request.partition,
        qos=request.qos,
        **_collect_prices(request),
    )
    return _add_rate(context, caller, request, rate)


@action(
    "bank.rate_change",
    scope="bank",
    role="operator",
    command="bank rate change",
    rows="rates",
    routes=(route("PATCH /rates"),),
)
def change_rate(context: BankContext, caller: Caller, request: RateChangeRequest) -> RatesReply:
    """Change parts of a rate, from a time on.

    Only the given properties change. Jobs submitted before keep their rate.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: There is no such rate, or one on several clusters; there is nothing to change;
            or as for :func:`create_rate`.
    """
    partition = request.partition
    current_rates = [
        rate
        for rate in _list_rates(context, request.cluster)
        if rate.partition == partition and rate.qos == request.qos
    ]
    clusters = {rate.cluster for rate in current_rates}
    if not current_rates or len(clusters) > 1:
        raise BankUsage(
            f"partition {partition} has no rate to change: create one with 'steward bank rate "
            "create'"
            if not current_rates
            else f"partition {partition} exists on the clusters "
            f"{' and '.join(sorted(clusters))}: name one with `cluster`"
        )
    changes = _collect_prices(request)
    if not changes:
        raise BankUsage("nothing to change: give `weights` or another property")
    if changes.get("free"):
        changes |= {"weights": {}, "minimum": 0}
    elif "weights" in changes or "minimum" in changes:
        changes["free"] = False
    rate = msgspec.structs.replace(current_rates[0], **changes)
    return _add_rate(context, caller, request, rate)


@action(
    "bank.rate_show",
    scope="read",
    command="bank rate show",
    rows="rates",
    routes=(route("GET /rates"),),
    only_reads=True,
)
def show_rates(context: BankContext, caller: Caller, request: RateShowRequest) -> RatesReply:
    """Show rates: the prices of jobs.

    A job keeps the rate of its first submission. Every user may see all rates.
    """
    del caller
    rates = _list_rates(context, request.cluster, past=request.past)
    return RatesReply(rates=tuple(rates), **context.make_heading())


def _collect_prices(request: RateRequest) -> dict[str, Any]:
    """Return the fields of a rate that a request gives."""
    fields = {name: getattr(request, name) for name in _PRICE_FIELDS}
    return {name: value for name, value in fields.items() if value is not None}


def _list_rates(context: BankContext, cluster: str, *, past: bool = False) -> list[Rate]:
    """Return rates by scope: the newest one valid by now, all future ones, and ``past`` ones."""
    now = context.now()
    with context.ledger.reading() as t:
        all_rates = t.rates.list_all(context.resolve_cluster(cluster) if cluster else "")
    rates = sorted(all_rates, key=_get_rate_sort_key)
    if past:
        return rates
    latest_by_scope = {
        (rate.cluster, rate.partition, rate.qos): rate for rate in rates if _is_valid(rate, now)
    }
    return [rate for rate in rates if not _is_valid(rate, now) or rate in latest_by_scope.values()]


def _add_rate(context: BankContext, caller: Caller, request: RateRequest, rate: Rate) -> RatesReply:
    """Check and store a new rate that is valid from the requested time."""
    check_rate(rate)
    valid_from = context.parse_moment(request.valid_from, request.zone) or context.now()
    rate = msgspec.structs.replace(rate, number=0, valid_from=valid_from)
    with context.ledger.transaction() as t:
        context.get_rights(caller, t).require_operator(_OPERATOR_TASK)
        seq_before = t.seq
        stored = t.rates.add(rate, context.make_authorship(caller, request.reason))
        warnings = list_rate_warnings(t, stored)
    return RatesReply(
        rates=(stored,),
        gate_knows=context.update_gate(seq_before, rules=True),
        warnings=warnings,
        **context.make_heading(),
    )


@action(
    "bank.mode",
    scope="bank",
    role="operator",
    command="bank mode",
    rows="rules",
)
def set_mode(context: BankContext, caller: Caller, request: ModeRequest) -> ModeReply:
    """Show or set the mode of the bank: off, observe or enforce.

    A new mode applies at once. With observe, the bank places SU holds and charges jobs, but
    rejects none; with enforce, it also rejects jobs; with off, it only charges jobs at their end.
    An account's mode takes precedence over a partition's, a partition's over the cluster's.
    Without a new mode, the command shows the modes. Operators see the modes of all accounts,
    others those of their own accounts.

    Raises:
        BankRefused: The caller is not an operator.
        BankUsage: The cluster does not exist, or has no mode to remove.
    """
    mode = request.mode
    cluster = context.resolve_cluster(request.cluster) if request.cluster else ""
    account = request.account.lower()
    if not mode:
        with context.ledger.reading() as t:
            rights = context.get_rights(caller, t)
            rules = tuple(
                rule
                for rule in t.modes.list_all()
                if not rule.account or rights.can_see_balance(rule.account)
            )
        return ModeReply(rules=rules, **context.make_heading())
    author = context.make_authorship(caller, request.reason)
    with context.ledger.transaction() as t:
        context.get_rights(caller, t).require_operator(_OPERATOR_TASK)
        seq_before = t.seq
        if mode == "default":
            t.modes.remove(cluster, request.partition, account, author)
        else:
            rule = ModeRule(
                mode=mode, cluster=cluster, partition=request.partition, account=account
            )
            t.modes.set(rule, author)
        rules = tuple(t.modes.list_all())
    return ModeReply(
        rules=rules,
        gate_knows=context.update_gate(seq_before, rules=True),
        warning=context.warn_if_unasked(context.now() - _MAX_SILENCE) if mode == "enforce" else "",
        **context.make_heading(),
    )


@action(
    "bank.would_reject",
    scope="read",
    role="operator",
    command="bank would-reject",
    rows="rejections",
    only_reads=True,
)
def list_rejections(
    context: BankContext, caller: Caller, request: WouldRejectRequest
) -> WouldRejectReply:
    """List jobs that the gate would have rejected.

    The gate admitted these jobs in mode observe. With --all, the command also lists jobs that the
    gate rejected.

    Raises:
        BankRefused: They belong to other users, and the caller does not manage the account.
        BankUsage: A time is invalid.
    """
    now = context.now()
    until = context.parse_moment(request.until, request.zone) or now
    since = context.parse_moment(request.since or "now-7days", request.zone) or now
    account = request.account.lower()
    with context.ledger.reading() as t:
        user = context.get_rights(caller, t).limit_to_user(account, request.user)
        rejections = t.rejections.list_since(since, until, account=account, user=user)
    matching = [rejection for rejection in rejections if request.all or rejection.mode == "observe"]
    return WouldRejectReply(
        rejections=tuple(matching[:_MOST_REJECTIONS]),
        since=since,
        until=until,
        more=len(matching) > _MOST_REJECTIONS,
        warning=context.warn_if_unasked(since),
        **context.make_heading(),
    )


def _get_rate_sort_key(rate: Rate) -> tuple[str, str, str, float, int]:
    """Return the sort key of a rate: cluster, partition, QOS, start of validity, number."""
    since = rate.valid_from.timestamp() if rate.valid_from else 0.0
    return rate.cluster, rate.partition, rate.qos, since, rate.number


def _is_valid(rate: Rate, now: datetime) -> bool:
    """Return True if the validity of a rate has begun."""
    return rate.valid_from is None or rate.valid_from <= now
