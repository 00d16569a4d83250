"""Handlers behind the myBRC API: submit checks, jobs reported by clients, user and partition lists.

:class:`SubmitChecks` answers ``can_submit_job``: can an account pay a job of some cost? It asks the
gate, because only the gate knows the holds. While the gate does not answer, the ledger decides
where the gate's policy is "allow"; that is stricter than the old plugins, which let every job pass.

:class:`JobRegistry` stores jobs that clients report and charges them, once for each job, unless
Steward charged the run itself. A reported job has happened, so it is charged whatever the account
has left; rejecting it was up to ``can_submit_job``.

:func:`list_users` and :func:`list_partitions` return pages of lists. ``application`` maps URLs to
these.
"""

import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from fractions import Fraction
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec

from steward.bank.errors import BankUsage, LedgerUnavailable, NoRate
from steward.bank.gate.admission import DecisionMaker
from steward.bank.gate.balances import AccountBalances
from steward.bank.gate.policy import GateRules
from steward.bank.gate.vain_holds import VainHolds
from steward.bank.ledger import NO_ACCOUNT, Authorship, ReportedJob
from steward.bank.money import MICRO
from steward.bank.prices import find_rate
from steward.bank.records import Charge, JobRequest, Mode, Rate, ResourceUse
from steward.bank.remote import REPORTED_SOURCE, is_same_job
from steward.core.config import Settings
from steward.core.errors import StewardError
from steward.core.layouts import format_exact_money
from steward.extensions.mybrc import wire
from steward.extensions.mybrc.wire import (
    TEXT_PATTERN,
    ApiError,
    ApiJob,
    ApiPartition,
    ApiUser,
    CanSubmitReply,
    JobPage,
    JobSent,
    PartitionPage,
    UserPage,
    merge_job,
)
from steward.slurm.cluster_model import ClusterModel
from steward.slurm.users import NameResolver

if TYPE_CHECKING:
    from steward.bank.gate.client import GateClient
    from steward.bank.ledger.ledger import Ledger, Transaction


_MOST_DIGITS: Final = 10
"""Most digits of a uid."""


class SubmitChecks:
    """Checker for ``can_submit_job``: can an account pay a job?

    Args:
        settings: The whole configuration.
        cluster: Cluster of the jobs.
        ledger: Ledger, for accounts and balances.
        gate: Connection to the gate.
        name_resolver: Resolves uids to user names.
    """

    def __init__(
        self,
        settings: Settings,
        cluster: str,
        ledger: "Ledger",
        gate: "GateClient",
        name_resolver: NameResolver,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._ledger = ledger
        self._gate = gate
        self._name_resolver = name_resolver
        # The gate's rules without its holds, for the time when the gate does not answer.
        self._balances = AccountBalances()
        self._rules = GateRules(settings)
        self._decision_maker = DecisionMaker(self._balances, self._rules, VainHolds())
        # Requests come from several threads.
        self._lock = threading.Lock()

    def check_job(self, job_cost: str, user_id: str, account_id: str) -> CanSubmitReply:
        """Answer whether a job can be submitted.

        Raises:
            ApiError: A part of the question is invalid.
        """
        try:
            cost = wire.parse_cost(job_cost)
        except BankUsage as error:
            raise ApiError(400, str(error)) from error
        user_id = user_id.strip()
        if (
            not (user_id.isascii() and user_id.isdecimal() and len(user_id) <= _MOST_DIGITS)
            or int(user_id) >= 2**32
        ):
            raise ApiError(400, f"invalid user_id {user_id[:60]!r}: give a uid")
        account = account_id.strip().lower()
        if not account or not re.fullmatch(TEXT_PATTERN, account):
            raise ApiError(400, "No account exists with such an account_id.")
        uid = int(user_id)
        user = self._name_resolver.user(uid)
        request = JobRequest(uid=uid, account=account)
        try:
            decision = self._gate.get_verdict(self._cluster, request, user, cost=cost)
        except StewardError as gate_error:
            return self._check_by_ledger(cost, request, user, gate_error)
        return _build_reply("" if decision.ok else decision.say, decision.chosen)

    def _check_by_ledger(
        self, cost: int, request: JobRequest, user: str, gate_error: StewardError
    ) -> CanSubmitReply:
        """Answer from the ledger while the gate is away or does not know the account yet.

        The gate's own rules decide by what the ledger knows: neither holds nor slurmdbd's
        associations.

        Raises:
            ApiError: There is no such account.
            LedgerUnavailable: The ledger does not answer either, and the gate's policy is to
                allow: the client then applies its own outage behavior.
        """
        is_strict = self._settings.gate.policy == "deny"
        now_us = time.time_ns() // 1000
        try:
            with self._lock, self._ledger.reading() as t:
                self._balances.apply_books(t.export_books(self._balances.position))
                self._rules.put_rules(t.export_rules())
                decision = self._decision_maker.decide_cost(
                    self._cluster, request, user, cost, now_us
                )
        except LedgerUnavailable:
            if not is_strict:
                raise
            return CanSubmitReply(
                success=False, message=f"The available SU are unknown: {gate_error}"
            )
        if request.account not in self._balances.accounts:
            return self._answer_unknown_account(request.account)
        reason = "" if decision.ok else decision.say
        if not reason and is_strict:
            reason = f"The SU holds are unknown: {gate_error}"
        return _build_reply(reason, self._rules.find_chosen_mode(self._cluster, request.account))

    def _answer_unknown_account(self, account: str) -> CanSubmitReply:
        """Answer for an unknown account, as ``unknown_accounts`` says."""
        if self._settings.bank.unknown_accounts == "allow":
            return CanSubmitReply(success=True, message=f"The bank has no account {account}.")
        raise ApiError(400, f"No account exists with account_id {account}.")


def _build_reply(reason: str, mode: Mode | None) -> CanSubmitReply:
    """Build the answer from the reason against a job, if any, and the bank's mode.

    The client rejects jobs by its own setting. The bank's default mode, observe, which nobody has
    chosen, does not override that setting.
    """
    if reason and mode in ("off", "observe"):
        return CanSubmitReply(
            success=True, message=f"The bank rejects no job in mode {mode}: {reason}"
        )
    return CanSubmitReply(success=not reason, message=reason or "The job can be submitted.")


PAGE_SIZE: Final = 100
"""Entries of one page."""
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)
_MOST_HOURS: Final = 1e12
"""Bound on CPU hours: clients may send any number, but a sum must stay a number in JSON."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class JobFilters(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of the job list.

    Attributes:
        user: User name.
        account: Account.
        jobstatus: Job state.
        partition: Partition.
        min_amount: Lowest amount, micro-SU.
        max_amount: Highest amount, micro-SU.
        begin: Earliest start.
        end: Latest start.
    """

    user: str = ""
    account: str = ""
    jobstatus: str = ""
    partition: str = ""
    min_amount: int | None = None
    max_amount: int | None = None
    begin: datetime | None = None
    end: datetime | None = None


class JobRegistry:
    """Registry of jobs that API clients report: stores, charges and lists them.

    Args:
        ledger: Ledger that stores and charges the jobs.
        cluster: Cluster of the jobs.
        name_resolver: Resolves uids to user names.
        now: Returns the current time.
    """

    def __init__(
        self,
        ledger: "Ledger",
        cluster: str,
        name_resolver: NameResolver,
        now: Callable[[], datetime],
    ) -> None:
        self._ledger = ledger
        self._cluster = cluster
        self._name_resolver = name_resolver
        self._now = now

    def create(self, sent: JobSent, caller: str) -> ApiJob:
        """Store a new job.

        Raises:
            ApiError: The job exists, its account is unknown, or a field is invalid.
        """
        with self._ledger.transaction() as t:
            if t.told.get(sent.jobslurmid) is not None:
                raise ApiError(400, f"job with this jobslurmid already exists: {sent.jobslurmid}")
            return self._store_job(t, sent, None, caller)

    def update(self, jobslurmid: str, sent: JobSent, caller: str) -> ApiJob:
        """Store a job, new or known.

        Raises:
            ApiError: The job has another user or account, or a field is invalid.
        """
        if sent.jobslurmid != jobslurmid:
            raise ApiError(
                400, f"jobslurmid {sent.jobslurmid} differs from {jobslurmid} in the URL"
            )
        with self._ledger.transaction() as t:
            return self._store_job(t, sent, t.told.get(jobslurmid), caller)

    def list_jobs(self, page_number: int, filters: JobFilters) -> JobPage:
        """Return one page of jobs by start time; the caller adds the links.

        Raises:
            ApiError: There is no such page.
        """
        if not 1 <= page_number <= 10**9:
            raise ApiError(404, "Invalid page.")
        with self._ledger.reading() as t:
            totals, rows = t.told.find(
                user=filters.user,
                account=filters.account.lower(),
                status=filters.jobstatus,
                partition=filters.partition,
                min_amount=filters.min_amount,
                max_amount=filters.max_amount,
                begin=filters.begin,
                end=filters.end,
                offset=(page_number - 1) * PAGE_SIZE,
                limit=PAGE_SIZE,
            )
        if page_number > 1 and not rows:
            raise ApiError(404, "Invalid page.")
        return JobPage(
            count=totals.jobs,
            total_amount=float(wire.format_su(totals.amount)),
            total_cpu_time=totals.cpu_hours,
            results=tuple(decode_job(row) for row in rows),
        )

    def _store_job(
        self, t: "Transaction", sent: JobSent, stored: ReportedJob | None, caller: str
    ) -> ApiJob:
        """Check and store a job, and charge it; return the job."""
        account = _find_account(t, sent.accountid)
        uid = int(sent.userid)
        if uid >= 2**32:
            raise ApiError(400, f"Invalid userid {uid}: too large.")
        previous = None if stored is None else decode_job(stored)
        if stored is not None and stored.uid != uid:
            raise ApiError(400, f"userid {uid} differs from the job's userid {stored.uid}")
        if stored is not None and stored.account != account:
            raise ApiError(
                400, f"account {account} differs from the job's account {stored.account}"
            )
        job, amount_micros = merge_job(msgspec.structs.replace(sent, accountid=account), previous)
        user = stored.user if stored is not None else self._name_resolver.user(uid) or str(uid)
        t.told.put(
            ReportedJob(
                jobslurmid=job.jobslurmid,
                user=user,
                uid=uid,
                account=account,
                status=job.jobstatus or "",
                partition=job.partition or "",
                amount=amount_micros,
                submitted=job.submitdate,
                started=job.startdate,
                ended=job.enddate,
                cpu_hours=max(-_MOST_HOURS, min(job.cpu_time or 0.0, _MOST_HOURS)),
                body=msgspec.json.encode(job),
            )
        )
        due_micros = 0 if self._has_own_charge(t, job) else amount_micros
        self._charge(t, self._build_charge(job, user, due_micros), previous, user, caller)
        return job

    def _charge(
        self, t: "Transaction", charge: Charge, previous: ApiJob | None, user: str, caller: str
    ) -> None:
        """Charge a job, unless Steward has charged it; refund a charge under a former key."""
        author = Authorship(who=f"mybrc:{caller}", why="reported by a client of the myBRC API")
        former_charge = None if previous is None else self._build_charge(previous, user, 0)
        if former_charge is not None and former_charge.key != charge.key:
            # The submit time is known only now, or has changed: refund the old charge, pay once.
            row = t.charges.get(former_charge.key)
            if row is not None and row.charge.source == REPORTED_SOURCE and row.charge.amount:
                t.charges.post(former_charge, author)
        row = t.charges.get(charge.key)
        if row is not None and row.charge.source != REPORTED_SOURCE:
            return
        if row is not None or charge.amount:
            t.charges.post(charge, author)

    def _has_own_charge(self, t: "Transaction", job: ApiJob) -> bool:
        """Return True if Steward has charged a run of the job."""
        rows = t.charges.list_of_job(self._cluster, _slurm_job_id(job))
        own_charges = [row.charge for row in rows if row.charge.source != REPORTED_SOURCE]
        return is_same_job((job.submitdate, job.startdate), own_charges)

    def _build_charge(self, job: ApiJob, user: str, micros: int) -> Charge:
        """Build the charge of a reported job."""
        job_id = _slurm_job_id(job)
        is_named = job.submitdate is None or not job_id
        begin, end = job.startdate, job.enddate
        seconds = int((end - begin).total_seconds()) if begin and end else 0
        return Charge(
            cluster=self._cluster,
            job_id=0 if is_named else job_id,
            first_submit=job.submitdate or begin or _EPOCH,
            account=job.accountid,
            user=user,
            partition=job.partition or "",
            amount=micros,
            use=ResourceUse(
                tres={} if job.num_cpus is None else {"cpu": job.num_cpus},
                start=begin or job.submitdate or self._now(),
                seconds=seconds,
                qos=job.qos or "",
                state=job.jobstatus or "",
            ),
            why="end" if end else "told",
            source=REPORTED_SOURCE,
            told=job.jobslurmid if is_named else "",
        )


def _slurm_job_id(job: ApiJob) -> int:
    """Return the job's Slurm id; 0 where its name is not a job id."""
    number = int(job.jobslurmid) if _NUMBER.fullmatch(job.jobslurmid) else 0
    return number if number < 2**32 else 0


def decode_job(stored: ReportedJob) -> ApiJob:
    """Decode a stored job as the API returns it."""
    return msgspec.json.decode(stored.body, type=ApiJob)


def page_links(url: str, page_number: int, count: int) -> tuple[str | None, str | None]:
    """Return the URLs of the next and the previous page.

    Args:
        url: Full URL of this page.
        page_number: Number of this page.
        count: Number of entries on all pages.
    """
    parts = urlsplit(url)
    other_params = [pair for pair in parse_qsl(parts.query) if pair[0] != "page"]

    def at(page: int) -> str:
        query = urlencode([*other_params, ("page", str(page))] if page > 1 else other_params)
        return urlunsplit(parts._replace(query=query))

    return (
        at(page_number + 1) if page_number * PAGE_SIZE < count else None,
        at(page_number - 1) if page_number > 1 else None,
    )


def _find_account(t: "Transaction", name: str) -> str:
    """Return the ledger's name of an account; raise ApiError if it is unknown."""
    account = t.accounts.get(name.lower())
    if account is None or not account.known:
        raise ApiError(400, f"No account exists with accountid {name}.")
    return account.name


def parse_amount_filter(name: str, text: str) -> int | None:
    """Parse an amount that filters a list; None where the text is empty.

    Raises:
        ApiError: It is no amount.
    """
    if not text:
        return None
    try:
        return wire.parse_cost(text)
    except BankUsage as error:
        raise ApiError(400, f"{name}: {error}") from error


_USERNAME: Final = re.compile(r"[a-zA-Z]{3,150}")
"""User names that the API's own schema allows."""
_NO_DOMAIN: Final = "localhost"
"""Mail domain of users where none is configured."""


def list_users(ledger: "Ledger", domain: str, page_number: int) -> UserPage:
    """Return one page of the bank's users; the caller adds the links.

    Raises:
        ApiError: There is no such page.
    """
    with ledger.reading() as t:
        accounts = [
            account.name
            for account in t.accounts.list_all(unknown=True)
            if account.name != NO_ACCOUNT
        ]
        names = sorted({member.user for name in accounts for member in t.accounts.list_users(name)})
    begin = _page_offset(page_number, len(names))
    users = (
        # The schema forbids names with digits or dashes; the email address shows them instead.
        ApiUser(
            username=name if _USERNAME.fullmatch(name) else None,
            email=name if "@" in name else f"{name}@{domain or _NO_DOMAIN}",
        )
        for name in names[begin : begin + PAGE_SIZE]
    )
    return UserPage(count=len(names), results=tuple(users))


def list_partitions(
    ledger: "Ledger", cluster: str, now: datetime, page_number: int
) -> PartitionPage:
    """Return one page of the partitions that Slurm has or that have a rate.

    Raises:
        ApiError: There is no such page.
    """
    with ledger.reading() as t:
        rates = t.rates.list_all()
        model = t.read_model(cluster) or ClusterModel(cluster=cluster)
    names = {rate.partition for rate in rates if rate.cluster in ("", cluster)} - {"*"}
    all_names = sorted(names | set(model.partitions))
    begin = _page_offset(page_number, len(all_names))
    partitions = (
        _partition(name, model, _core_hour_price(rates, cluster, name, now))
        for name in all_names[begin : begin + PAGE_SIZE]
    )
    return PartitionPage(count=len(all_names), results=tuple(partitions))


def _page_offset(page_number: int, count: int) -> int:
    """Return the offset of a page; raise ApiError if there is no such page."""
    begin = (page_number - 1) * PAGE_SIZE
    if page_number < 1 or (page_number > 1 and begin >= count):
        raise ApiError(404, "Invalid page.")
    return begin


def _partition(name: str, model: ClusterModel, su_per_core_hour: str | None) -> ApiPartition:
    """Build a partition's entry from the cluster model and its price."""
    partition = model.partitions.get(name)
    if partition is None:
        return ApiPartition(name=name, su_per_core_hour=su_per_core_hour)
    cores = sum(count * model.shapes[shape].cores for shape, count in partition.shapes)
    return ApiPartition(
        name=name,
        shared=not partition.exclusive,
        num_nodes=partition.nodes,
        num_cores=cores,
        su_per_core_hour=su_per_core_hour,
    )


def _core_hour_price(rates: list[Rate], cluster: str, partition: str, now: datetime) -> str | None:
    """Format the price of a core hour by its CPU weight alone; None where there is no rate."""
    try:
        rate = find_rate(rates, cluster, partition, "", now)
    except NoRate:
        return None
    weight = 0 if rate.free else rate.weights.get("cpu", 0)
    text = format_exact_money(weight)
    places = 2 if Fraction(weight, MICRO // 100).denominator == 1 else 6
    return text[: text.index(".") + 1 + places]
