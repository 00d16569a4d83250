"""What Steward's own processes may have the gate do: each operation, what it takes and gives."""

import logging
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from steward.bank.estimate.request_limits import Budget
from steward.bank.gate import plugin_conf, token
from steward.bank.gate.answering import Answering, Right
from steward.bank.gate.cpu_limits import QUESTION_NS
from steward.bank.gate.keeper import Keeper
from steward.bank.gate.questions import Questions
from steward.bank.gate.shapes import (
    VERSION,
    Allowance,
    Asked,
    Call,
    Claim,
    GateState,
    Granted,
    Leased,
    Looked,
    Released,
    RemoteMeans,
    Reserved,
    Result,
    Seen,
    Settled,
    Stood,
    Wanted,
)
from steward.bank.gate.upkeep import Upkeep
from steward.bank.records import Books, Rules
from steward.core.errors import StewardError
from steward.core.sqlite import SqliteError, SqliteUnavailable
from steward.core.timestamps import micros
from steward.slurm.cluster_model import Picture

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
