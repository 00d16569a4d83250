"""Operations of the gate for Steward's own processes: decode a call's arguments, and run it.

`GateQueries` answers read-only operations (means, holds, quote, verdict). `GateOperations` maps
each operation's name to its body type and function, and runs each call in its own transaction of
gate.db. A rejected call changes nothing. A call that fails otherwise is rolled back, and
`HoldKeeper.load` rebuilds the memory from gate.db. Callers use `client.py`; the types are in
`requests.py`; `server.py` receives the calls.
"""

import logging
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from steward.bank.errors import (
    BankError,
    BankRefused,
    BankUsage,
    GateUnavailable,
    NoEstimate,
    NoRate,
)
from steward.bank.estimate.request_limits import Budget
from steward.bank.gate import plugin_conf, token
from steward.bank.gate.balances import OpenHold
from steward.bank.gate.cpu_limits import REQUEST_NS
from steward.bank.gate.holds import HoldKeeper
from steward.bank.gate.plugin_answers import (
    DecisionRight,
    PluginAnswerer,
    decode_plugin_request,
)
from steward.bank.gate.requests import (
    AccountMeans,
    AdmissionVerdict,
    Allowance,
    CompletedPoll,
    DecideRequest,
    GateStatus,
    GrantRequest,
    HeldTotal,
    HoldQuery,
    HoldRequest,
    LeaseRequest,
    MeansRequest,
    PluginReply,
    PluginRequest,
    PriceRequest,
    ReleaseRequest,
    RemoteMeans,
    ReserveRequest,
    SettleRequest,
    ShownJob,
)
from steward.bank.gate.sync import HoldSync
from steward.bank.records import BankRules, GateBooks, Hold, JobRequest
from steward.core.errors import StewardError
from steward.core.sqlite import SqliteError, SqliteUnavailable
from steward.core.timestamps import to_micros
from steward.slurm.cluster_model import ClusterModel


class GateQueries:
    """Answer read-only operations from the gate's state.

    Args:
        keeper: The gate's state.
    """

    def __init__(self, keeper: HoldKeeper) -> None:
        self._keeper = keeper

    def get_means(self, account: str, user: str, now_us: int) -> AccountMeans:
        """Return the balance, holds and limits of an account, and of a user in it.

        Raises:
            BankUsage: The account does not exist.
        """
        if account not in self._keeper.balances.accounts:
            raise BankUsage(
                f"the gate has no account {account} yet: try again in a few seconds", account
            )
        return self._keeper.balances.get_means(account, user, self._find_uid(account, user), now_us)

    def _find_uid(self, account: str, user: str) -> int:
        """Return a user's uid from a cluster model or an open hold; -1 if unknown."""
        for model in self._keeper.rules.models.values():
            for uid, name in model.users.items():
                if user and name == user:
                    return uid
        for hold in self._keeper.balances.holds.values():
            if user and hold.user == user and hold.account == account:
                return hold.uid
        return -1

    def list_holds(self, query: HoldQuery) -> list[Hold]:
        """List open holds in the order in which they were placed."""
        chosen = islice(self._iter_matching(query), query.limit)
        return [self._keeper.store.make_record(hold) for hold in chosen]

    def sum_holds(self) -> list[HeldTotal]:
        """Sum the open holds of each paying account, by name."""
        sums: dict[str, tuple[int, int]] = {}
        for hold in self._keeper.balances.holds.values():
            payer = hold.payer or hold.account
            holds, held = sums.get(payer, (0, 0))
            sums[payer] = (holds + 1, held + hold.remaining)
        return [
            HeldTotal(account=name, holds=n, held=held) for name, (n, held) in sorted(sums.items())
        ]

    def _iter_matching(self, query: HoldQuery) -> Iterator[OpenHold]:
        """Yield the holds that match a query, from the one after ``query.after`` on."""
        balances = self._keeper.balances
        holds: Iterator[OpenHold] = iter(balances.holds.values())
        if query.changed:
            holds = iter(balances.changed_holds.values())
        elif query.cluster and query.job_id:
            hold_found = balances.hold_by_job.get((query.cluster, query.job_id))
            holds = iter([hold_found] if hold_found else [])
        if query.after:
            after = balances.holds.get(query.after)
            # Callers page through 100,000 holds: keep the skipped part cheap.
            for hold in holds:
                if hold is after:
                    break
        for hold in holds:
            if (
                query.account in ("", hold.account)
                and query.cluster in ("", hold.cluster)
                and query.user in ("", hold.user)
                and query.job_id in (0, hold.job_id)
            ):
                yield hold

    def get_verdict(
        self, cluster: str, job: JobRequest, user: str, now_us: int
    ) -> AdmissionVerdict:
        """Return the verdict on a job as if it were submitted now; place no hold.

        Raises:
            NoEstimate: The gate has no model of the cluster.
        """
        if self._keeper.rules.get_estimator(cluster) is None:
            raise NoEstimate(
                f"the gate cannot price jobs of cluster {cluster}: it has not received the "
                "cluster's configuration or the bank's rates yet. Try again in a minute; then see "
                "'steward status'",
                cluster,
            )
        decision = self._keeper.decision_maker.decide_submit(cluster, job, user, now_us)
        say = decision.say or decision.short
        return AdmissionVerdict(ok=decision.ok, say=say, quote=decision.quote)

    def get_cost_verdict(
        self, cluster: str, job: JobRequest, user: str, cost: int, now_us: int
    ) -> AdmissionVerdict:
        """Return the verdict on a job whose cost the caller gives; place no hold.

        Raises:
            BankUsage: The gate does not know the account.
        """
        decision = self._keeper.decision_maker.decide_cost(cluster, job, user, cost, now_us)
        if decision.account not in self._keeper.balances.accounts:
            raise BankUsage(
                f"the gate has no account {decision.account} yet: try again in a few seconds",
                decision.account,
            )
        return AdmissionVerdict(
            ok=decision.ok,
            say=decision.say or decision.short,
            quote=decision.quote,
            chosen=self._keeper.rules.find_chosen_mode(cluster, decision.account),
        )


log = logging.getLogger(__name__)

DecideRequests = Callable[[list[tuple[PluginRequest, int]], int], list[PluginReply]]
"""Function that decides on requests: takes each with the CPU time that reading it took, in ns, and
the time in µs."""
OperationFunction = Callable[[Any, int], Any]
"""Function of an operation: takes the decoded body and the time in µs."""


class GateOperations:
    """Run the operations of Steward's own processes, each in its own transaction.

    Args:
        state_dir: The directory that holds the key of the tokens.
        keeper: The gate's state.
        hold_sync: The synchronization that applies settlements, confirmations and balances.
        answerer: The answerer of plugin requests, which resolves user names and counts answers.
        right: Whether this gate may decide.
        on_lease: Called when this gate gets the lease to decide.
        decide: Decides on plugin requests within a transaction.
    """

    def __init__(
        self,
        state_dir: str,
        keeper: HoldKeeper,
        hold_sync: HoldSync,
        answerer: PluginAnswerer,
        right: DecisionRight,
        on_lease: Callable[[], None],
        decide: DecideRequests,
    ) -> None:
        self._state_dir = state_dir
        self._keeper = keeper
        self._hold_sync = hold_sync
        self._queries = queries = GateQueries(keeper)
        self._answerer = answerer
        self._find_user = answerer.find_user
        self._right = right
        self._on_lease = on_lease
        self._decide_requests = decide
        self._ops: Final[dict[str, tuple[Any, OperationFunction]]] = {
            "books": (GateBooks, self._apply_books),
            "remote_means": (
                dict[str, RemoteMeans],
                lambda means, _now_us: keeper.balances.remote_means.update(means),
            ),
            "rules": (BankRules, self._store_rules),
            "model": (ClusterModel, self._store_model),
            "state": (None, lambda _, _now_us: self.get_status()),
            "confirm": (list[ShownJob], hold_sync.confirm),
            "poll": (CompletedPoll, self._record_poll),
            "place": (HoldRequest, self._place),
            "settle": (SettleRequest, self._settle),
            "release": (
                ReleaseRequest,
                lambda one, now_us: hold_sync.release(one.hold, one.why, one.books, now_us),
            ),
            "reserve": (
                ReserveRequest,
                lambda one, now_us: hold_sync.reserve(
                    one.account, one.amount, one.why, one.allocation, now_us
                ),
            ),
            "hold_totals": (None, lambda _, _now_us: queries.sum_holds()),
            "holds": (HoldQuery, lambda query, _now_us: queries.list_holds(query)),
            "means": (
                MeansRequest,
                lambda one, now_us: queries.get_means(one.account, one.user, now_us),
            ),
            "verdict": (PriceRequest, self._get_verdict),
            "stranded": (None, lambda _, _now_us: hold_sync.allocation_mover.list_stranded()),
            "lingering": (None, lambda _, _now_us: hold_sync.allocation_mover.list_lingering()),
            "on_allocation": (
                int,
                lambda number, _now_us: hold_sync.allocation_mover.sum_started(number),
            ),
            "facts": (tuple[int, int], lambda of, _now_us: keeper.store.fetch_facts(*of)),
            "lease": (LeaseRequest, self._lease),
            "decide": (DecideRequest, self._decide),
            "grant": (GrantRequest, self._grant),
            "allow": (Allowance, lambda allowance, _now_us: keeper.allow(allowance)),
        }

    def run(self, op: str, args: msgspec.Raw) -> Any:
        """Run an operation on the arguments of a call; return its result.

        Raises:
            StewardError: The operation is unknown, rejects the call or fails.
        """
        if op not in self._ops:
            raise BankError(
                f"unknown operation {op!r} of the gate: does the gate run an older version?"
            )
        body_type, function = self._ops[op]
        try:
            body = msgspec.json.decode(args, type=body_type)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BankError(f"the gate cannot decode the arguments of {op!r}: {error}") from error
        now_us, began_at = time.time_ns() // 1000, time.monotonic()
        store = self._keeper.store
        writes_before = store.write_count
        try:
            with store.transaction():
                result = function(body, now_us)
        except _REJECTIONS:
            raise  # before anything changed
        except Exception as error:
            # The error concerns one job or account; the gate goes on deciding for all others.
            is_clean = store.write_count == writes_before
            raise self._handle_failure(op, body, error, is_clean=is_clean) from error
        if op == "decide":
            replies = [reply for reply in result if isinstance(reply, PluginReply)]
            if replies:
                self._answerer.counters.add(replies, int((time.monotonic() - began_at) * 1e6))
        return result

    def _handle_failure(
        self, op: str, body: Any, error: Exception, *, is_clean: bool
    ) -> StewardError:
        """Restore the state after a failed call; return the error for its caller."""
        is_of_database = isinstance(error, SqliteError | SqliteUnavailable)
        if op in _JOB_OPERATIONS and is_clean and not is_of_database:
            self._answerer.log_unforeseen(body.cluster, error)
            return NoEstimate(
                f"cannot price the job because of an internal error: {error!r}. See the gate's log"
            )
        log.error("%s", op, exc_info=error)
        self._keeper.load()
        if isinstance(error, StewardError):
            kind = BankError if isinstance(error, BankError) else GateUnavailable
            return kind(str(error))
        return BankError(f"operation {op!r} of the gate failed: {error!r}. See the gate's log")

    def get_status(self) -> GateStatus:
        """Return the gate's status."""
        balances, right = self._keeper.balances, self._right
        why = right.explain_refusal() or (
            "the ledger has not answered for too long" * right.is_ledger_overdue
        )
        rules = self._keeper.rules
        return GateStatus(
            position=balances.position,
            settled=self._keeper.settled,
            rules=rules.rules.seq if rules.rules else -1,
            facts=self._keeper.store.fact_seq,
            holds=len(balances.holds),
            held=balances.held,
            pictures={name: one.taken_us for name, one in rules.models.items()},
            deciding=not why,
            why=why,
            fence=right.fence,
            books_at_us=right.books_at_us,
            asked_at_us=max(right.asked_at_us, self._keeper.store.read_number("asked_us")),
            tally=self._answerer.counters.make_counts(),
            remote_at_us=min((one.at_us for one in balances.remote_means.values()), default=0),
        )

    def _apply_books(self, books: GateBooks, now_us: int) -> int:
        """Apply ledger balances; note that the ledger was heard from."""
        position = self._hold_sync.apply_books(books, now_us)
        if books.whole or books.after <= position:
            self._right.record_ledger_contact()
        return position

    def _store_rules(self, rules: BankRules, _now_us: int) -> None:
        """Store new modes and rates, and rewrite the submit plugin's configuration."""
        old_rules = self._keeper.rules.rules
        if old_rules != rules:
            self._keeper.rules.put_rules(rules)
            self._keeper.store.put_rules(rules)
            plugin_conf.write_plugin_conf(self._keeper.rules)

    def _store_model(self, model: ClusterModel, _now_us: int) -> None:
        old_model = self._keeper.rules.models.get(model.cluster)
        if old_model != model:
            self._keeper.rules.put_model(model)
            self._keeper.store.put_model(model)
            if old_model is None or old_model.default_partition != model.default_partition:
                plugin_conf.write_plugin_conf(self._keeper.rules)

    def _record_poll(self, poll: CompletedPoll, now_us: int) -> int:
        began_us = to_micros(poll.began)
        return self._hold_sync.record_poll(poll.cluster, began_us, now_us)

    def _place(self, request: HoldRequest, now_us: int) -> Any:
        user = self._find_user(request.cluster, request.description.uid)
        return self._hold_sync.place_hold(request, user, now_us)

    def _settle(self, request: SettleRequest, now_us: int) -> int:
        return self._hold_sync.settle(request.settlements, request.books, now_us)

    def _get_verdict(self, request: PriceRequest, now_us: int) -> Any:
        user = request.user or self._find_user(request.cluster, request.description.uid)
        if request.cost is not None:
            return self._queries.get_cost_verdict(
                request.cluster, request.description, user, request.cost, now_us
            )
        with self._keeper.rules.limit_cpu(Budget(REQUEST_NS)):
            return self._queries.get_verdict(request.cluster, request.description, user, now_us)

    def _grant(self, request: GrantRequest, now_us: int) -> Any:
        return self._keeper.grant(request.ask, request.user, request.restarts, now_us)

    def _decide(self, request: DecideRequest, now_us: int) -> list[PluginReply | str]:
        """Decide on requests of submit plugins that ask on other hosts.

        Returns the replies; for a request without one, the reason.

        Raises:
            GateUnavailable: This gate may not decide, or the asking gate waits no longer; that one
                applies its policy.
        """
        now = time.monotonic()
        if now >= request.deadline:
            raise GateUnavailable(
                "the requests came too late: the other gate has already applied its outage policy"
            )
        why = self._right.explain_refusal()
        if why:
            raise GateUnavailable(f"the gate cannot decide: {why}")
        if request.requests:
            # As for requests of this host's plugin: the store then writes nothing beside them.
            self._keeper.store.last_request_at = time.monotonic()
        for reply in request.unused:
            self._hold_sync.release_unused(reply, now_us)
        requests: list[tuple[PluginRequest, int]] = []
        reasons = []
        for timed in request.requests:
            began_ns = time.thread_time_ns()
            reason = ""
            if now >= timed.deadline:
                reason = "it came too late: the submit plugin no longer waits"
            elif (plugin_request := decode_plugin_request(timed.request)) is None:
                reason = "the gate cannot decode it: do gate and plugin have the same version?"
            else:
                requests.append((plugin_request, time.thread_time_ns() - began_ns))
            reasons.append(reason)
        replies = iter(self._decide_requests(requests, now_us))
        return [reason or next(replies) for reason in reasons]

    def _lease(self, request: LeaseRequest, _now_us: int) -> str:
        """Adopt the other gates' key, apply the lease, and return this gate's key."""
        if request.secret and request.secret != self._keeper.secret.hex():
            secret = token.parse_secret(request.secret)
            token.store_secret(self._state_dir, secret)
            self._keeper.secret = secret
        if self._right.apply_lease(request.fence, request.valid_s):
            log.info("this gate decides now: it acquired lease %d", request.fence)
            self._on_lease()
        return self._keeper.secret.hex()


_REJECTIONS: Final = (BankUsage, BankRefused, GateUnavailable, NoRate, NoEstimate)
_JOB_OPERATIONS: Final = frozenset({"place", "verdict"})
"""Operations on job requests as users wrote them: an error in one is logged as the job's."""
