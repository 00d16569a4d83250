"""What Steward's own processes may have the gate do: each operation, what it takes and gives."""

import logging
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from steward.bank.errors import BankUsage, NoEstimate
from steward.bank.estimate.request_limits import Budget
from steward.bank.gate import plugin_conf, token
from steward.bank.gate.balances import Open
from steward.bank.gate.holds import Keeper
from steward.bank.gate.plugin_answers import QUESTION_NS, Answering, Right
from steward.bank.gate.requests import (
    VERSION,
    Allowance,
    Asked,
    Call,
    Claim,
    GateState,
    Granted,
    Held,
    Leased,
    Looked,
    Means,
    Released,
    RemoteMeans,
    Reserved,
    Result,
    Seen,
    Settled,
    Stood,
    Verdict,
    Wanted,
)
from steward.bank.gate.sync import Upkeep
from steward.bank.records import Books, Description, Hold, Quote, Rules
from steward.core.errors import StewardError
from steward.core.sqlite import SqliteError, SqliteUnavailable
from steward.core.timestamps import micros
from steward.slurm.cluster_model import Picture


class Questions:
    """Answers by the gate's state.

    Args:
        keeper: That state.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def means(self, account: str, user: str, now_us: int) -> Means:
        """What an account, and a user in it, can pay now.

        Raises:
            BankUsage: There is no such account.
        """
        if account not in self._keeper.purses.accounts:
            raise BankUsage(f"the gate knows no account {account}", account)
        return self._keeper.purses.means(account, user, self._uid_of(account, user), now_us)

    def _uid_of(self, account: str, user: str) -> int:
        for picture in self._keeper.ground.pictures.values():
            for uid, name in picture.users.items():
                if user and name == user:
                    return uid
        for hold in self._keeper.purses.holds.values():
            if user and hold.user == user and hold.account == account:
                return hold.uid
        return -1

    def holds(self, wanted: Wanted) -> list[Hold]:
        """Open holds, in the order in which they were placed."""
        chosen = islice(self._chosen(wanted), wanted.limit)
        return [self._keeper.store.whole(hold) for hold in chosen]

    def held(self) -> list[Held]:
        """What is held of each account that anything is held of, by name."""
        sums: dict[str, tuple[int, int]] = {}
        for hold in self._keeper.purses.holds.values():
            payer = hold.payer or hold.account
            holds, held = sums.get(payer, (0, 0))
            sums[payer] = (holds + 1, held + hold.remaining)
        return [Held(account=name, holds=n, held=held) for name, (n, held) in sorted(sums.items())]

    def _chosen(self, wanted: Wanted) -> Iterator[Open]:
        purses = self._keeper.purses
        holds: Iterator[Open] = iter(purses.holds.values())
        if wanted.changed:
            holds = iter(purses.changed.values())
        elif wanted.cluster and wanted.job_id:
            found = purses.by_job.get((wanted.cluster, wanted.job_id))
            holds = iter([found] if found else [])
        if wanted.after:
            after = purses.holds.get(wanted.after)
            # Of 100,000 the last page is asked for, too: no more is done here than must be.
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

    def quote(self, cluster: str, job: Description, user: str, now_us: int) -> Quote:
        """What a job may cost at the most.

        Raises:
            NoRate: Nothing says what its partition costs.
            NoEstimate: It cannot be told.
        """
        ground = self._keeper.ground
        if ground.estimator(cluster) is None:
            raise NoEstimate(f"the gate has no picture of cluster {cluster} yet", cluster)
        case = self._keeper.deciding.case(cluster, job, user, now_us)
        return msgspec.structs.replace(
            ground.quote(cluster, case.job, now_us), account=case.account
        )

    def would(self, cluster: str, job: Description, user: str, now_us: int) -> Verdict:
        """What would be said of a job, if it were submitted now; nothing is held.

        Raises:
            NoEstimate: Its cluster was never pictured.
        """
        if self._keeper.ground.estimator(cluster) is None:
            raise NoEstimate(f"the gate has no picture of cluster {cluster} yet", cluster)
        decision = self._keeper.deciding.submit(cluster, job, user, now_us)
        say = decision.say or decision.short
        return Verdict(ok=decision.ok, say=say, quote=decision.quote)

    def afford(self, cluster: str, job: Description, user: str, cost: int, now_us: int) -> Verdict:
        """What would be said of a job of which the cost is told; nothing is held.

        Raises:
            BankUsage: The gate has not been told of its account.
        """
        decision = self._keeper.deciding.afford(cluster, job, user, cost, now_us)
        if decision.account not in self._keeper.purses.accounts:
            raise BankUsage(f"the gate knows no account {decision.account}", decision.account)
        return Verdict(
            ok=decision.ok,
            say=decision.say or decision.short,
            quote=decision.quote,
            chosen=self._keeper.ground.chosen(cluster, decision.account),
        )


log = logging.getLogger(__name__)

_call = msgspec.json.Decoder(Call).decode
_encode = msgspec.json.Encoder().encode

Do = Callable[[Any, int], Any]


class Calls:
    """Carries operations out, each in a transaction of its own.

    Args:
        state_dir: The directory that holds the secret of tokens.
        keeper: The gate's state.
        upkeep: What changes it.
        answering: Who knows users' names.
        right: Whether this gate may decide.
        leased: Called where the right to decide has come to this gate.
    """

    def __init__(
        self,
        state_dir: str,
        keeper: Keeper,
        upkeep: Upkeep,
        answering: Answering,
        right: Right,
        leased: Callable[[], None],
    ) -> None:
        self._state_dir = state_dir
        self._keeper = keeper
        self._upkeep = upkeep
        self._questions = questions = Questions(keeper)
        self._answering = answering
        self._user = answering.user
        self._right = right
        self._leased = leased
        self._ops: Final[dict[str, tuple[Any, Do]]] = {
            "books": (Books, self._books),
            "remote_means": (
                dict[str, RemoteMeans],
                lambda means, _now_us: keeper.purses.remote.update(means),
            ),
            "rules": (Rules, self._rules),
            "picture": (Picture, self._picture),
            "state": (None, lambda _, _now_us: self.state()),
            "confirm": (list[Seen], upkeep.confirm),
            "looked": (Looked, self._looked),
            "cover": (Claim, self._cover),
            "settle": (Settled, self._settle),
            "release": (
                Released,
                lambda one, now_us: upkeep.release(one.hold, one.why, one.books, now_us),
            ),
            "reserve": (
                Reserved,
                lambda one, now_us: upkeep.reserve(
                    one.account, one.amount, one.why, one.allocation, now_us
                ),
            ),
            "held": (None, lambda _, _now_us: questions.held()),
            "holds": (Wanted, lambda wanted, _now_us: questions.holds(wanted)),
            "means": (Stood, lambda one, now_us: questions.means(one.account, one.user, now_us)),
            "quote": (Asked, self._quote),
            "would": (Asked, self._would),
            "stranded": (None, lambda _, _now_us: upkeep.moving.stranded()),
            "lingering": (None, lambda _, _now_us: upkeep.moving.lingering()),
            "on_allocation": (int, lambda number, _now_us: upkeep.moving.on_allocation(number)),
            "facts": (tuple[int, int], lambda of, _now_us: keeper.store.facts(*of)),
            "lease": (Leased, self._lease),
            "grant": (Granted, self._grant),
            "allow": (Allowance, lambda allowance, _now_us: keeper.allow(allowance)),
        }

    def answer(self, line: bytes) -> bytes:
        """Carry one call out; the line that answers it."""
        try:
            call = _call(line)
            if call.v != VERSION or call.op not in self._ops:
                return _refused("BankError", f"the gate does not know {call.op!r}: is it older?")
            takes, do = self._ops[call.op]
            body = msgspec.json.decode(call.body, type=takes)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return _refused("BankError", f"the gate cannot read what it was sent: {error}")
        now_us = time.time_ns() // 1000
        store = self._keeper.store
        before = store.writes
        try:
            with store.transaction():
                gives = do(body, now_us)
        except Exception as error:
            # It is about one job or account; the gate decides on all the others.
            return self._failed(call.op, body, error, is_clean=store.writes == before)
        return _encode(Result(ok=True, body=msgspec.Raw(_encode(gives)))) + b"\n"

    def _failed(self, op: str, body: Any, error: Exception, *, is_clean: bool) -> bytes:
        """Make good what a call left behind that failed; what it is answered."""
        kind = type(error).__name__
        if kind in _HARMLESS:
            # It was refused before anything changed.
            return _refused(kind, str(error))
        is_of_database = isinstance(error, SqliteError | SqliteUnavailable)
        if op in _OF_A_JOB and is_clean and not is_of_database:
            self._answering.say_strange(body.cluster, error)
            return _refused("NoEstimate", f"what this job may cost cannot be told: {error!r}")
        log.error("%s", op, exc_info=error)
        self._keeper.load()
        if isinstance(error, StewardError):
            return _refused(kind, str(error))
        return _refused("BankError", f"the gate cannot do this, see its log: {error!r}")

    def state(self) -> GateState:
        """How the gate stands."""
        purses, right = self._keeper.purses, self._right
        why = right.why_not() or ("the ledger has been away for too long" * right.is_alone)
        ground = self._keeper.ground
        return GateState(
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

    def _books(self, books: Books, now_us: int) -> int:
        position = self._upkeep.books(books, now_us)
        if books.whole or books.after <= position:
            self._right.heard()
        return position

    def _rules(self, rules: Rules, _now_us: int) -> None:
        known = self._keeper.ground.rules
        if known != rules:
            self._keeper.ground.put_rules(rules)
            self._keeper.store.put_rules(rules)
            ground = self._keeper.ground
            plugin_conf.write(ground.settings, is_enforced=ground.is_enforced)

    def _picture(self, picture: Picture, _now_us: int) -> None:
        known = self._keeper.ground.pictures.get(picture.cluster)
        if known != picture:
            self._keeper.ground.put_picture(picture)
            self._keeper.store.put_picture(picture)

    def _looked(self, looked: Looked, now_us: int) -> int:
        began_us = micros(looked.began)
        return self._upkeep.looked(looked.cluster, began_us, now_us)

    def _cover(self, claim: Claim, now_us: int) -> Any:
        user = self._user(claim.cluster, claim.description.uid)
        return self._upkeep.cover(claim, user, now_us)

    def _settle(self, settled: Settled, now_us: int) -> int:
        return self._upkeep.settle(settled.settlements, settled.books, now_us)

    def _quote(self, asked: Asked, now_us: int) -> Any:
        user = self._user(asked.cluster, asked.description.uid)
        with self._keeper.ground.limited(Budget(QUESTION_NS)):
            return self._questions.quote(asked.cluster, asked.description, user, now_us)

    def _would(self, asked: Asked, now_us: int) -> Any:
        user = asked.user or self._user(asked.cluster, asked.description.uid)
        if asked.cost is not None:
            return self._questions.afford(
                asked.cluster, asked.description, user, asked.cost, now_us
            )
        with self._keeper.ground.limited(Budget(QUESTION_NS)):
            return self._questions.would(asked.cluster, asked.description, user, now_us)

    def _grant(self, granted: Granted, now_us: int) -> Any:
        return self._keeper.grant(granted.ask, granted.user, granted.restarts, now_us)

    def _lease(self, leased: Leased, _now_us: int) -> str:
        if leased.secret and leased.secret != self._keeper.secret.hex():
            secret = token.parse_secret(leased.secret)
            token.store_secret(self._state_dir, secret)
            self._keeper.secret = secret
        if self._right.lease(leased.fence, leased.valid_s):
            log.info("this gate decides, by lease %d", leased.fence)
            self._leased()
        return self._keeper.secret.hex()


_HARMLESS: Final = frozenset({"BankUsage", "BankRefused", "NoRate", "NoEstimate"})
_OF_A_JOB: Final = frozenset({"cover", "quote", "would"})
"""What is asked for jobs as their users wrote them."""


def _refused(kind: str, say: str) -> bytes:
    return _encode(Result(ok=False, kind=kind, say=say)) + b"\n"
