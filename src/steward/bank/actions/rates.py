"""Bank actions for rates and modes: what jobs cost, and whether the gate rejects them.

``bank.rate_create`` and ``bank.rate_show`` manage prices of partitions. ``bank.enforce`` sets
the mode (off, observe, gate). ``bank.would_refuse`` lists jobs that were or would have been
rejected.
"""

from datetime import datetime, timedelta
from typing import ClassVar, Final

import msgspec

from steward.bank.context import BankContext, BankReply
from steward.bank.errors import BankUsage
from steward.bank.ledger import RejectedJob
from steward.bank.rate_validation import check_rate, list_rate_warnings
from steward.bank.records import Mode, ModeRule, Rate
from steward.core.access import Caller
from steward.core.actions import Request, action, route
from steward.core.layouts import Column, Layout, read_user

_OPERATOR_TASK: Final = "set rates and modes"
_MOST_REFUSALS: Final = 10_000
"""Maximum number of rejections in a reply."""
_MAX_SILENCE: Final = timedelta(days=7)
"""Longest time a cluster may see no submission before a warning."""


class RateCreateRequest(Request, frozen=True, kw_only=True):
    """Request of bank.rate_create: the price of jobs first submitted from a time on.

    Attributes:
        rate: The rate; its ``number`` and ``valid_from`` are ignored.
        valid_from: Start of validity, as people type times; "" for now.
        zone: IANA time zone of the time given; "" for the cluster's.
        reason: Reason, recorded in the ledger.
    """

    rate: Rate
    valid_from: str = ""
    zone: str = ""
    reason: str = ""


class RateShowRequest(Request, frozen=True, kw_only=True):
    """Request of bank.rate_show: the rates.

    Attributes:
        cluster: Only of this cluster.
        past: Whether to include rates that later ones replaced.
    """

    cluster: str = ""
    past: bool = False


class RatesReply(BankReply, frozen=True, kw_only=True):
    """Reply with rates.

    Attributes:
        rates: Rates by cluster, partition, QOS and start of validity.
        gate_knows: Whether the gate already applies a change; otherwise it does soon.
        warnings: Parts of a new rate that may charge nothing on its cluster.
    """

    rates: tuple[Rate, ...]
    gate_knows: bool = False
    warnings: tuple[str, ...] = ()


class EnforceRequest(Request, frozen=True, kw_only=True):
    """Request of bank.enforce: the mode of all clusters or a part of one.

    Attributes:
        mode: ``off``, ``observe`` or ``gate``; "" only shows the rules; ``default`` removes
            the rule of this scope.
        cluster: The cluster; "" for all.
        partition: Partition of the cluster; "" for all.
        account: Account; "" for all.
        reason: Reason, recorded in the ledger.
    """

    mode: str = ""
    cluster: str = ""
    partition: str = ""
    account: str = ""
    reason: str = ""


class EnforceReply(BankReply, frozen=True, kw_only=True):
    """Reply with the mode rules.

    Attributes:
        rules: The rules set; elsewhere the mode is ``observe``.
        gate_knows: Whether the gate already applies them; otherwise it does soon.
        warning: Why nothing is rejected nevertheless; "" if no cause is known.
    """

    rules: tuple[ModeRule, ...]
    gate_knows: bool = False
    warning: str = ""
    layout: ClassVar[Layout] = (
        Column("Cluster", lambda rule, _: rule.cluster or "all"),
        Column("Partition", lambda rule, _: rule.partition or "all"),
        Column("Account", lambda rule, _: rule.account or "all"),
        Column("Mode", "mode"),
    )


class WouldRefuseRequest(Request, frozen=True, kw_only=True):
    """Request of bank.would_refuse: jobs that were rejected, or would have been.

    Attributes:
        since: Start, as people type times; "" for seven days ago.
        until: End, likewise; "" for now.
        zone: IANA time zone of the times given; "" for the cluster's.
        account: Only of this account.
        user: Only of this user.
        all: Whether to include jobs that were in fact rejected.
    """

    since: str = ""
    until: str = ""
    zone: str = ""
    account: str = ""
    user: str = ""
    all: bool = False


class WouldRefuseReply(BankReply, frozen=True, kw_only=True):
    """Reply with jobs that were rejected, or would have been.

    Attributes:
        refusals: The rejections, oldest first.
        since: Start of the period.
        until: End of the period.
        more: Whether there are more.
        warning: Why the list may be empty; "" if no cause is known.
    """

    refusals: tuple[RejectedJob, ...]
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
        Column("Why", lambda row, _: row.why.split("\n", 1)[0], exact="why"),
    )


@action(
    "bank.rate_create",
    scope="bank",
    role="operator",
    routes=(route("POST /rates"),),
    help="Say what jobs cost from a time on.",
)
def create_rate(context: BankContext, caller: Caller, request: RateCreateRequest) -> RatesReply:
    """Create a rate; earlier charges stay unchanged.

    Raises:
        BankRefused: The caller is no operator.
        BankUsage: It has neither a price nor the mark "free", it weighs an unknown TRES, or the
            cluster does not exist.
    """
    valid_from = context.parse_moment(request.valid_from, request.zone) or context.now()
    requested = request.rate
    check_rate(requested)
    rate = msgspec.structs.replace(
        requested,
        number=0,
        valid_from=valid_from,
        cluster=context.resolve_cluster(requested.cluster),
    )
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
    "bank.rate_show",
    scope="read",
    routes=(route("GET /rates"),),
    only_reads=True,
    help="Show what jobs cost.",
)
def show_rates(context: BankContext, caller: Caller, request: RateShowRequest) -> RatesReply:
    """Show the rates; every user may see them."""
    del caller
    now = context.now()
    with context.ledger.reading() as t:
        all_rates = t.rates.list_all(
            context.resolve_cluster(request.cluster) if request.cluster else ""
        )
    rates = sorted(all_rates, key=_get_rate_sort_key)
    if not request.past:
        # For each scope, the newest rate valid by now, and all future ones.
        latest_by_scope = {
            (rate.cluster, rate.partition, rate.qos): rate for rate in rates if _is_valid(rate, now)
        }
        rates = [
            rate for rate in rates if not _is_valid(rate, now) or rate in latest_by_scope.values()
        ]
    return RatesReply(
        rates=tuple(rates),
        **context.make_heading(),
    )


@action(
    "bank.enforce",
    scope="bank",
    role="operator",
    help="Set how much the bank enforces.",
)
def set_mode(context: BankContext, caller: Caller, request: EnforceRequest) -> EnforceReply:
    """Set or show the mode; a change takes effect at once.

    Raises:
        BankRefused: The caller is no operator.
        BankUsage: The mode or the cluster does not exist.
    """
    mode = request.mode
    if mode not in ("", "off", "observe", "gate", "default"):
        raise BankUsage(f"{mode!r} is no mode: off, observe or gate, or default", mode)
    cluster = context.resolve_cluster(request.cluster) if request.cluster else ""
    account = request.account.lower()
    if not mode:
        with context.ledger.reading() as t:
            return _make_enforce_reply(context, tuple(t.modes.list_all()), gate_knows=False)
    author = context.make_authorship(caller, request.reason)
    with context.ledger.transaction() as t:
        context.get_rights(caller, t).require_operator(_OPERATOR_TASK)
        seq_before = t.seq
        if mode == "default":
            t.modes.remove(cluster, request.partition, account, author)
        else:
            rule = ModeRule(
                mode=msgspec.convert(mode, Mode),
                cluster=cluster,
                partition=request.partition,
                account=account,
            )
            t.modes.set(rule, author)
        rules = tuple(t.modes.list_all())
    gate_knows = context.update_gate(seq_before, rules=True)
    warning = context.warn_if_unasked(context.now() - _MAX_SILENCE) if mode == "gate" else ""
    return msgspec.structs.replace(
        _make_enforce_reply(context, rules, gate_knows=gate_knows), warning=warning
    )


@action(
    "bank.would_refuse",
    scope="read",
    role="operator",
    only_reads=True,
    help="List what the gate would have refused.",
)
def list_rejections(
    context: BankContext, caller: Caller, request: WouldRefuseRequest
) -> WouldRefuseReply:
    """List jobs that the mode ``gate`` would have rejected while it was ``observe``.

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
        rejections = t.refusals.list_since(since, until, account=account, user=user)
    matching = [rejection for rejection in rejections if request.all or rejection.mode == "observe"]
    return WouldRefuseReply(
        refusals=tuple(matching[:_MOST_REFUSALS]),
        since=since,
        until=until,
        more=len(matching) > _MOST_REFUSALS,
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


def _make_enforce_reply(
    context: BankContext, rules: tuple[ModeRule, ...], *, gate_knows: bool
) -> EnforceReply:
    """Build the reply with the mode rules."""
    return EnforceReply(
        rules=rules,
        gate_knows=gate_knows,
        **context.make_heading(),
    )
