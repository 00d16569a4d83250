"""Operations of the gate for Steward's own processes: decode a call, run it, encode the result.

`GateQueries` answers read-only operations (means, holds, quote, verdict). `GateOperations` maps
each operation's name to its body type and function, and runs each call in its own transaction of
gate.db. A rejected call changes nothing. A call that fails otherwise is rolled back, and
`HoldKeeper.load` rebuilds the memory from gate.db. Callers use `client.py`; the types are in
`requests.py`; `server.py` passes each line in.
"""

import logging
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from steward.bank.errors import BankUsage, NoEstimate
from steward.bank.estimate.request_limits import Budget
from steward.bank.gate import plugin_conf, token
from steward.bank.gate.balances import OpenHold
from steward.bank.gate.holds import HoldKeeper
from steward.bank.gate.plugin_answers import REQUEST_NS, DecisionRight, PluginAnswerer
from steward.bank.gate.requests import (
    VERSION,
    AccountMeans,
    AdmissionVerdict,
    Allowance,
    CompletedPoll,
    CoverRequest,
    GateCall,
    GateReply,
    GateStatus,
    GrantRequest,
    HeldTotal,
    HoldQuery,
    LeaseRequest,
    MeansRequest,
    PriceRequest,
    ReleaseRequest,
    RemoteMeans,
    ReserveRequest,
    SettleRequest,
    ShownJob,
)
from steward.bank.gate.sync import HoldSync
from steward.bank.records import BankRules, GateBooks, Hold, JobRequest, Quote
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

    def means(self, account: str, user: str, now_us: int) -> AccountMeans:
        """Return the balance, holds and limits of an account, and of a user in it.

        Raises:
            BankUsage: The account does not exist.
        """
        if account not in self._keeper.purses.accounts:
            raise BankUsage(f"the gate knows no account {account}", account)
        return self._keeper.purses.means(account, user, self._uid_of(account, user), now_us)

    def _uid_of(self, account: str, user: str) -> int:
        """Return a user's uid from a cluster model or an open hold; -1 if unknown."""
        for picture in self._keeper.ground.pictures.values():
            for uid, name in picture.users.items():
                if user and name == user:
                    return uid
        for hold in self._keeper.purses.holds.values():
            if user and hold.user == user and hold.account == account:
                return hold.uid
        return -1

    def holds(self, wanted: HoldQuery) -> list[Hold]:
        """List open holds in the order in which they were placed."""
        chosen = islice(self._chosen(wanted), wanted.limit)
        return [self._keeper.store.whole(hold) for hold in chosen]

    def held(self) -> list[HeldTotal]:
        """Sum the open holds of each paying account, by name."""
        sums: dict[str, tuple[int, int]] = {}
        for hold in self._keeper.purses.holds.values():
            payer = hold.payer or hold.account
            holds, held = sums.get(payer, (0, 0))
            sums[payer] = (holds + 1, held + hold.remaining)
        return [
            HeldTotal(account=name, holds=n, held=held) for name, (n, held) in sorted(sums.items())
        ]

    def _chosen(self, wanted: HoldQuery) -> Iterator[OpenHold]:
        """Yield the holds that match a query, from the one after ``wanted.after`` on."""
        purses = self._keeper.purses
        holds: Iterator[OpenHold] = iter(purses.holds.values())
        if wanted.changed:
            holds = iter(purses.changed.values())
        elif wanted.cluster and wanted.job_id:
            found = purses.by_job.get((wanted.cluster, wanted.job_id))
            holds = iter([found] if found else [])
        if wanted.after:
            after = purses.holds.get(wanted.after)
            # Callers page through 100,000 holds: keep the skipped part cheap.
            for hold in holds:
                if hold is after:
                    break
        for hold in holds:
            if (
                wanted.account in ("", hold.account)
                and wanted.cluster in ("", hold.cluster)
                and wanted.user in ("", hold.user)
                and wanted.job_id in (0, hold.job_id)
            ):
                yield hold

    def quote(self, cluster: str, job: JobRequest, user: str, now_us: int) -> Quote:
        """Return the highest cost of a job.

        Raises:
            NoRate: A partition has no rate.
            NoEstimate: The job cannot be priced.
        """
        ground = self._keeper.ground
        if ground.estimator(cluster) is None:
            raise NoEstimate(f"the gate has no picture of cluster {cluster} yet", cluster)
        case = self._keeper.deciding.case(cluster, job, user, now_us)
        return msgspec.structs.replace(
            ground.quote(cluster, case.job, now_us), account=case.account
        )

    def would(self, cluster: str, job: JobRequest, user: str, now_us: int) -> AdmissionVerdict:
        """Return the verdict on a job as if it were submitted now; place no hold.

        Raises:
            NoEstimate: The gate has no model of the cluster.
        """
        if self._keeper.ground.estimator(cluster) is None:
            raise NoEstimate(f"the gate has no picture of cluster {cluster} yet", cluster)
        decision = self._keeper.deciding.submit(cluster, job, user, now_us)
        say = decision.say or decision.short
        return AdmissionVerdict(ok=decision.ok, say=say, quote=decision.quote)

    def afford(
        self, cluster: str, job: JobRequest, user: str, cost: int, now_us: int
    ) -> AdmissionVerdict:
        """Return the verdict on a job whose cost the caller gives; place no hold.

        Raises:
            BankUsage: The gate does not know the account.
        """
        decision = self._keeper.deciding.afford(cluster, job, user, cost, now_us)
        if decision.account not in self._keeper.purses.accounts:
            raise BankUsage(f"the gate knows no account {decision.account}", decision.account)
        return AdmissionVerdict(
            ok=decision.ok,
            say=decision.say or decision.short,
            quote=decision.quote,
            chosen=self._keeper.ground.chosen(cluster, decision.account),
        )


log = logging.getLogger(__name__)

_decode_call = msgspec.json.Decoder(GateCall).decode
_encode_json = msgspec.json.Encoder().encode

OperationFunction = Callable[[Any, int], Any]
"""Function of an operation: takes the decoded body and the time in µs."""


class GateOperations:
    """Run the operations of Steward's own processes, each in its own transaction.

    Args:
        state_dir: The directory that holds the key of the tokens.
        keeper: The gate's state.
        upkeep: The synchronization that applies settlements, confirmations and balances.
        answering: The answerer of plugin requests, which resolves user names and counts answers.
        right: Whether this gate may decide.
        leased: Called when this gate gets the lease to decide.
    """

    def __init__(
        self,
        state_dir: str,
        keeper: HoldKeeper,
        upkeep: HoldSync,
        answering: PluginAnswerer,
        right: DecisionRight,
        leased: Callable[[], None],
    ) -> None:
        self._state_dir = state_dir
        self._keeper = keeper
        self._upkeep = upkeep
        self._questions = questions = GateQueries(keeper)
        self._answering = answering
        self._user = answering.user
        self._right = right
        self._leased = leased
        self._ops: Final[dict[str, tuple[Any, OperationFunction]]] = {
            "books": (GateBooks, self._books),
            "remote_means": (
                dict[str, RemoteMeans],
                lambda means, _now_us: keeper.purses.remote.update(means),
            ),
            "rules": (BankRules, self._rules),
            "picture": (ClusterModel, self._picture),
            "state": (None, lambda _, _now_us: self.state()),
            "confirm": (list[ShownJob], upkeep.confirm),
            "looked": (CompletedPoll, self._looked),
            "cover": (CoverRequest, self._cover),
            "settle": (SettleRequest, self._settle),
            "release": (
                ReleaseRequest,
                lambda one, now_us: upkeep.release(one.hold, one.why, one.books, now_us),
            ),
            "reserve": (
                ReserveRequest,
                lambda one, now_us: upkeep.reserve(
                    one.account, one.amount, one.why, one.allocation, now_us
                ),
            ),
            "held": (None, lambda _, _now_us: questions.held()),
            "holds": (HoldQuery, lambda wanted, _now_us: questions.holds(wanted)),
            "means": (
                MeansRequest,
                lambda one, now_us: questions.means(one.account, one.user, now_us),
            ),
            "quote": (PriceRequest, self._quote),
            "would": (PriceRequest, self._would),
            "stranded": (None, lambda _, _now_us: upkeep.moving.stranded()),
            "lingering": (None, lambda _, _now_us: upkeep.moving.lingering()),
            "on_allocation": (int, lambda number, _now_us: upkeep.moving.on_allocation(number)),
            "facts": (tuple[int, int], lambda of, _now_us: keeper.store.facts(*of)),
            "lease": (LeaseRequest, self._lease),
            "grant": (GrantRequest, self._grant),
            "allow": (Allowance, lambda allowance, _now_us: keeper.allow(allowance)),
        }

    def answer(self, line: bytes) -> bytes:
        """Run the call in a line of JSON; return the line that answers it."""
        try:
            call = _decode_call(line)
            if call.v != VERSION or call.op not in self._ops:
                return _encode_error(
                    "BankError", f"the gate does not know {call.op!r}: is it older?"
                )
            takes, do = self._ops[call.op]
            body = msgspec.json.decode(call.body, type=takes)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return _encode_error("BankError", f"the gate cannot read what it was sent: {error}")
        now_us = time.time_ns() // 1000
        store = self._keeper.store
        before = store.writes
        try:
            with store.transaction():
                gives = do(body, now_us)
        except Exception as error:
            # The error concerns one job or account; the gate goes on deciding for all others.
            return self._failed(call.op, body, error, is_clean=store.writes == before)
        return _encode_json(GateReply(ok=True, body=msgspec.Raw(_encode_json(gives)))) + b"\n"

    def _failed(self, op: str, body: Any, error: Exception, *, is_clean: bool) -> bytes:
        """Restore the state after a failed call; return the error for its caller."""
        kind = type(error).__name__
        if kind in _REJECTIONS:
            # The call was rejected before anything changed.
            return _encode_error(kind, str(error))
        is_of_database = isinstance(error, SqliteError | SqliteUnavailable)
        if op in _JOB_OPERATIONS and is_clean and not is_of_database:
            self._answering.say_strange(body.cluster, error)
            return _encode_error("NoEstimate", f"what this job may cost cannot be told: {error!r}")
        log.error("%s", op, exc_info=error)
        self._keeper.load()
        if isinstance(error, StewardError):
            return _encode_error(kind, str(error))
        return _encode_error("BankError", f"the gate cannot do this, see its log: {error!r}")

    def state(self) -> GateStatus:
        """Return the gate's status."""
        purses, right = self._keeper.purses, self._right
        why = right.why_not() or ("the ledger has been away for too long" * right.is_alone)
        ground = self._keeper.ground
        return GateStatus(
            position=purses.position,
            settled=self._keeper.settled,
            rules=ground.rules.seq if ground.rules else -1,
            facts=self._keeper.store.fact_seq,
            holds=len(purses.holds),
            held=purses.held,
            pictures={name: one.taken_us for name, one in ground.pictures.items()},
            deciding=not why,
            why=why,
            fence=right.fence,
            books_at_us=right.books_at_us,
            asked_at_us=max(right.asked_at_us, self._keeper.store.number("asked_us")),
            tally=self._answering.counting.tally(),
            remote_at_us=min((one.at_us for one in purses.remote.values()), default=0),
        )

    def _books(self, books: GateBooks, now_us: int) -> int:
        """Apply ledger balances; note that the ledger was heard from."""
        position = self._upkeep.books(books, now_us)
        if books.whole or books.after <= position:
            self._right.heard()
        return position

    def _rules(self, rules: BankRules, _now_us: int) -> None:
        """Store new modes and rates, and rewrite the submit plugin's configuration."""
        known = self._keeper.ground.rules
        if known != rules:
            self._keeper.ground.put_rules(rules)
            self._keeper.store.put_rules(rules)
            ground = self._keeper.ground
            plugin_conf.write_plugin_conf(ground.settings, is_enforced=ground.is_enforced)

    def _picture(self, picture: ClusterModel, _now_us: int) -> None:
        known = self._keeper.ground.pictures.get(picture.cluster)
        if known != picture:
            self._keeper.ground.put_picture(picture)
            self._keeper.store.put_picture(picture)

    def _looked(self, looked: CompletedPoll, now_us: int) -> int:
        began_us = to_micros(looked.began)
        return self._upkeep.looked(looked.cluster, began_us, now_us)

    def _cover(self, claim: CoverRequest, now_us: int) -> Any:
        user = self._user(claim.cluster, claim.description.uid)
        return self._upkeep.cover(claim, user, now_us)

    def _settle(self, settled: SettleRequest, now_us: int) -> int:
        return self._upkeep.settle(settled.settlements, settled.books, now_us)

    def _quote(self, asked: PriceRequest, now_us: int) -> Any:
        user = self._user(asked.cluster, asked.description.uid)
        with self._keeper.ground.limited(Budget(REQUEST_NS)):
            return self._questions.quote(asked.cluster, asked.description, user, now_us)

    def _would(self, asked: PriceRequest, now_us: int) -> Any:
        user = asked.user or self._user(asked.cluster, asked.description.uid)
        if asked.cost is not None:
            return self._questions.afford(
                asked.cluster, asked.description, user, asked.cost, now_us
            )
        with self._keeper.ground.limited(Budget(REQUEST_NS)):
            return self._questions.would(asked.cluster, asked.description, user, now_us)

    def _grant(self, granted: GrantRequest, now_us: int) -> Any:
        return self._keeper.grant(granted.ask, granted.user, granted.restarts, now_us)

    def _lease(self, leased: LeaseRequest, _now_us: int) -> str:
        """Adopt the other gates' key, apply the lease, and return this gate's key."""
        if leased.secret and leased.secret != self._keeper.secret.hex():
            secret = token.parse_secret(leased.secret)
            token.store_secret(self._state_dir, secret)
            self._keeper.secret = secret
        if self._right.lease(leased.fence, leased.valid_s):
            log.info("this gate decides, by lease %d", leased.fence)
            self._leased()
        return self._keeper.secret.hex()


_REJECTIONS: Final = frozenset({"BankUsage", "BankRefused", "NoRate", "NoEstimate"})
_JOB_OPERATIONS: Final = frozenset({"cover", "quote", "would"})
"""Operations on job requests as users wrote them: an error in one is logged as the job's."""


def _encode_error(kind: str, say: str) -> bytes:
    return _encode_json(GateReply(ok=False, kind=kind, say=say)) + b"\n"
