"""Quotes: the highest price of a job, from sbatch's options or a script (``bank.quote``).

``quote_job`` parses the options and ``#SBATCH`` lines as sbatch does, estimates the price with the
model of the cluster, and asks the gate whether it would admit the job now. It submits and holds
nothing. Amounts are micro-SU.
"""

import logging
import pwd
from collections.abc import Sequence
from typing import Annotated, Final

from steward.bank.context import BankContext, BankReply
from steward.bank.errors import BankUsage, GateUnavailable
from steward.bank.records import JobRequest, Quote
from steward.core.access import Caller
from steward.core.actions import Request, action, described, route

log = logging.getLogger(__name__)

_MAX_SCRIPT_CHARS: Final = 4 * 1024 * 1024
"""Maximum length of a script, in characters."""


class QuoteRequest(Request, frozen=True, kw_only=True):
    """Request of bank.quote: the highest price a job may have."""

    options: Annotated[
        tuple[str, ...], described("Options of sbatch, as typed on its command line.")
    ] = ()
    script: Annotated[str, described("Text of the script; Steward applies its #SBATCH lines.")] = ""
    cluster: Annotated[str, described("Cluster; the first in the configuration if empty.")] = ""
    user: Annotated[
        str, described("Owner of the job; you if empty. Only operators may name others.")
    ] = ""


class QuoteReply(BankReply, frozen=True, kw_only=True):
    """Reply with the highest price a job may have.

    Attributes:
        quotes: The estimate and its inputs; one for each component of a heterogeneous job.
        amount: Total price, in micro-SU.
        cluster: The cluster.
        is_admitted: Whether the gate would admit it now; None if the gate does not answer, or if
            the caller may not see the account's balance: repeated quotes would reveal it.
        message: Message the gate would show to the user; "" for none.
        available: Available amount of the account; None as for ``is_admitted``.
    """

    quotes: tuple[Quote, ...]
    amount: int
    cluster: str
    is_admitted: bool | None = None
    message: str = ""
    available: int | None = None


@action(
    "bank.quote",
    scope="read",
    routes=(route("POST /quotes", "Quote the highest price of a job."),),
    only_reads=True,
)
def quote_job(context: BankContext, caller: Caller, request: QuoteRequest) -> QuoteReply:
    """Quote the highest price of a job.

    The reply also says whether the gate would admit the job now.

    Raises:
        BankUsage: sbatch has no such option, or its value is invalid.
        BankRefused: It is for another user, and the caller is not an operator.
        NoRate: Its partition has no rate.
        NoEstimate: The resources it may be allocated cannot be determined.
        SlurmError: The cluster has not been polled yet, and its Slurm does not answer.
    """
    from steward.bank.estimate import estimate, parse_jobs

    if len(request.script) > _MAX_SCRIPT_CHARS:
        raise BankUsage(f"script too long to quote: the limit is {_MAX_SCRIPT_CHARS:,} characters")
    cluster = context.resolve_cluster(request.cluster)
    with context.ledger.reading() as t:
        rights = context.get_rights(caller, t)
        if request.user and request.user != rights.user:
            rights.require_operator("quote jobs of other users")
        rates = t.rates.list_all(cluster)
        model = t.read_model(cluster)
    if model is None:
        model = context.get_model(cluster)
    jobs = parse_jobs(request.options, request.script, uid=_resolve_uid(caller, request.user))
    settings, now = context.settings.bank, context.now()
    quotes = tuple(estimate(job, model, rates, settings, now) for job in jobs)
    account = quotes[0].account
    gate_balance = context.get_means(account, request.user or caller.user) if account else None
    # A quote must not reveal the available amount of accounts the caller may not see.
    can_see_balances = all(rights.can_see_balance(quote.account) for quote in quotes)
    available = gate_balance.available if gate_balance is not None and can_see_balances else None
    user = request.user or caller.user
    is_admitted, message = (
        _ask_gate(context, cluster, jobs, user) if can_see_balances else (None, "")
    )
    return QuoteReply(
        quotes=quotes,
        amount=sum(quote.amount for quote in quotes),
        cluster=cluster,
        is_admitted=is_admitted,
        message=message,
        available=available,
        **context.make_heading(),
    )


def _ask_gate(
    context: BankContext, cluster: str, jobs: Sequence[JobRequest], user: str
) -> tuple[bool | None, str]:
    """Ask the gate whether it would admit every component now, and with which message."""
    messages: list[str] = []
    gate = context.gate
    try:
        for job in jobs:
            verdict = gate.get_verdict(cluster, job, user)
            messages.append(verdict.say)
            if not verdict.ok:
                return False, verdict.say
    except GateUnavailable as error:
        log.debug("the gate does not answer: %s", error)
        return None, ""
    return True, messages[0]


def _resolve_uid(caller: Caller, user: str) -> int:
    """Return the uid of the caller, or of another user by name."""
    if not user or user == caller.user:
        return caller.uid
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError) as error:  # ValueError: the name contains a NUL
        raise BankUsage(f"unknown user {user!r}: give a user of this host", user) from error
