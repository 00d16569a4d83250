"""The actions about what jobs cost, and how much the bank enforces: rates and modes."""

from datetime import datetime, timedelta
from typing import Final

import msgspec

from steward.bank.context import BankAnswer, BankRoom
from steward.bank.errors import BankUsage
from steward.bank.ledger import Refusal
from steward.bank.rate_validation import check_rate, doubts
from steward.bank.records import Mode, ModeRule, Rate
from steward.core.access import Asker
from steward.core.actions import Action, Request

_OPERATORS: Final = "set rates and modes"
_MOST_REFUSALS: Final = 10_000
_UNASKED: Final = timedelta(days=7)
"""So long a cluster may be without any submission."""


class RateCreateRequest(Request, frozen=True, kw_only=True):
    """bank.rate_create: what jobs cost that are first submitted from a time on.

    Attributes:
        rate: The rate; ``number`` and ``valid_from`` in it do not count.
        valid_from: As people type times; "" for now.
        zone: IANA name of the zone that it is meant in; "" for the cluster's.
        reason: Why, for the books.
    """

    rate: Rate
    valid_from: str = ""
    zone: str = ""
    reason: str = ""


class RateShowRequest(Request, frozen=True, kw_only=True):
    """bank.rate_show: the rates.

    Attributes:
        cluster: Only of this cluster.
        past: Whether those that others have replaced are wanted, too.
    """

    cluster: str = ""
    past: bool = False


class RatesAnswer(BankAnswer, frozen=True, kw_only=True):
    """Rates.

    Attributes:
        rates: By cluster, partition, QOS, and the time from which they hold.
        gate_knows: Whether the gate reckons with a change already; it is told soon otherwise.
        warnings: What of a new rate may charge nothing on its cluster.
    """

    rates: tuple[Rate, ...]
    gate_knows: bool = False
    warnings: tuple[str, ...] = ()


class EnforceRequest(Request, frozen=True, kw_only=True):
    """bank.enforce: how much the bank enforces, of all clusters or a part of one.

    Attributes:
        mode: ``off``, ``observe`` or ``gate``; "" only shows what is set; ``default`` takes
            the rule for that part away.
        cluster: The cluster; "" for every one.
        partition: One partition of it; "" for all.
        account: One account; "" for all.
        reason: Why, for the books.
    """

    mode: str = ""
    cluster: str = ""
    partition: str = ""
    account: str = ""
    reason: str = ""


class EnforceAnswer(BankAnswer, frozen=True, kw_only=True):
    """What is enforced.

    Attributes:
        rules: What was set; where nothing was, it is ``observe``.
        gate_knows: Whether the gate goes by it already; it is told soon otherwise.
        warning: Why nothing is refused all the same; "" where nothing is known of that.
    """

    rules: tuple[ModeRule, ...]
    gate_knows: bool = False
    warning: str = ""


class WouldRefuseRequest(Request, frozen=True, kw_only=True):
    """bank.would_refuse: what was refused, or would have been.

    Attributes:
        since: As people type times; "" for the last seven days.
        until: Likewise; "" for now.
        zone: IANA name of the zone that they are meant in; "" for the cluster's.
        account: Only of this account.
        user: Only of this user.
        all: Whether what was indeed refused is wanted, too.
    """

    since: str = ""
    until: str = ""
    zone: str = ""
    account: str = ""
    user: str = ""
    all: bool = False


class WouldRefuseAnswer(BankAnswer, frozen=True, kw_only=True):
    """What was refused, or would have been.

    Attributes:
        refusals: Oldest first.
        since: Beginning of the time looked at.
        until: Its end.
        more: Whether there was more.
        warning: Why it may be that nothing was; "" where nothing is known of that.
    """

    refusals: tuple[Refusal, ...]
    since: datetime
    until: datetime
    more: bool = False
    warning: str = ""


def rate_create(room: BankRoom, asker: Asker, request: RateCreateRequest) -> RatesAnswer:
    """Add a rate; what was charged by earlier ones stays.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: It says neither what it costs nor that it is free, it weighs what is no TRES,
            or there is no such cluster.
    """
    valid_from = room.moment(request.valid_from, request.zone) or room.now()
    given = request.rate
    check_rate(given)
    rate = msgspec.structs.replace(
        given, number=0, valid_from=valid_from, cluster=room.cluster(given.cluster)
    )
    with room.ledger.transaction() as t:
        room.rights(asker, t).need_operator(_OPERATORS)
        before = t.seq
        made = t.rates.add(rate, room.by(asker, request.reason))
        warnings = doubts(t, made)
    return RatesAnswer(
        rates=(made,),
        gate_knows=room.tell_gate(before, rules=True),
        warnings=warnings,
        **room.heading(),
    )


def rate_show(room: BankRoom, asker: Asker, request: RateShowRequest) -> RatesAnswer:
    """Show the rates; everybody may know what jobs cost."""
    del asker
    now = room.now()
    with room.ledger.reading() as t:
        found = t.rates.all(room.cluster(request.cluster) if request.cluster else "")
    rates = sorted(found, key=_order)
    if not request.past:
        # Of each part the last that holds by now, and those that are to come.
        last = {(one.cluster, one.partition, one.qos): one for one in rates if _holds(one, now)}
        rates = [one for one in rates if not _holds(one, now) or one in last.values()]
    return RatesAnswer(
        rates=tuple(rates),
        **room.heading(),
    )


def enforce(room: BankRoom, asker: Asker, request: EnforceRequest) -> EnforceAnswer:
    """Set how much is enforced, at once; or show it.

    Raises:
        BankRefused: The asker is no operator.
        BankUsage: It is no mode, or there is no such cluster.
    """
    mode = request.mode
    if mode not in ("", "off", "observe", "gate", "default"):
        raise BankUsage(f"{mode!r} is no mode: off, observe or gate, or default", mode)
    cluster = room.cluster(request.cluster) if request.cluster else ""
    account = request.account.lower()
    if not mode:
        with room.ledger.reading() as t:
            return _modes(room, tuple(t.modes.all()), gate_knows=False)
    by = room.by(asker, request.reason)
    with room.ledger.transaction() as t:
        room.rights(asker, t).need_operator(_OPERATORS)
        before = t.seq
        if mode == "default":
            t.modes.drop(cluster, request.partition, account, by)
        else:
            rule = ModeRule(
                mode=msgspec.convert(mode, Mode),
                cluster=cluster,
                partition=request.partition,
                account=account,
            )
            t.modes.set(rule, by)
        rules = tuple(t.modes.all())
    knows = room.tell_gate(before, rules=True)
    warning = room.asked_since(room.now() - _UNASKED) if mode == "gate" else ""
    return msgspec.structs.replace(_modes(room, rules, gate_knows=knows), warning=warning)


def would_refuse(room: BankRoom, asker: Asker, request: WouldRefuseRequest) -> WouldRefuseAnswer:
    """List what ``gate`` would have refused while the mode was ``observe``.

    Raises:
        BankRefused: It is about others' jobs, and the asker does not look after the account.
        BankUsage: It is no time.
    """
    now = room.now()
    until = room.moment(request.until, request.zone) or now
    since = room.moment(request.since or "now-7days", request.zone) or now
    account = request.account.lower()
    with room.ledger.reading() as t:
        user = room.rights(asker, t).only_user(account, request.user)
        found = t.refusals.since(since, until, account=account, user=user)
    wanted = [one for one in found if request.all or one.mode == "observe"]
    return WouldRefuseAnswer(
        refusals=tuple(wanted[:_MOST_REFUSALS]),
        since=since,
        until=until,
        more=len(wanted) > _MOST_REFUSALS,
        warning=room.asked_since(since),
        **room.heading(),
    )


def _order(rate: Rate) -> tuple[str, str, str, float, int]:
    since = rate.valid_from.timestamp() if rate.valid_from else 0.0
    return rate.cluster, rate.partition, rate.qos, since, rate.number


def _holds(rate: Rate, now: datetime) -> bool:
    return rate.valid_from is None or rate.valid_from <= now


def _modes(room: BankRoom, rules: tuple[ModeRule, ...], *, gate_knows: bool) -> EnforceAnswer:
    return EnforceAnswer(
        rules=rules,
        gate_knows=gate_knows,
        **room.heading(),
    )


ACTIONS: Final = (
    Action(
        name="bank.rate_create",
        help="Say what jobs cost from a time on.",
        request=RateCreateRequest,
        answer=RatesAnswer,
        run=rate_create,
        role="operator",
    ),
    Action(
        name="bank.rate_show",
        help="Show what jobs cost.",
        request=RateShowRequest,
        answer=RatesAnswer,
        run=rate_show,
        only_reads=True,
    ),
    Action(
        name="bank.enforce",
        help="Set how much the bank enforces.",
        request=EnforceRequest,
        answer=EnforceAnswer,
        run=enforce,
        role="operator",
    ),
    Action(
        name="bank.would_refuse",
        help="List what the gate would have refused.",
        request=WouldRefuseRequest,
        answer=WouldRefuseAnswer,
        run=would_refuse,
        only_reads=True,
        role="operator",
    ),
)
