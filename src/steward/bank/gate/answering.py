"""Answers the submit plugin: by a decision where the gate may decide, by the policy where not."""

import logging
import time
from typing import Final

import msgspec

from steward.bank.gate.keeper import Keeper, Overdrawn
from steward.bank.gate.names import Names
from steward.bank.gate.shapes import VERSION, Said, Submit
from steward.config import Settings

log = logging.getLogger(__name__)

_AWAY: Final = (
    "Steward: the bank cannot be asked now, and jobs are not let in meanwhile: try again later"
)
_SAY_AGAIN_S: Final = 60.0


class Right:
    """Whether this gate may decide: it knows the books, and nobody else decides.

    Args:
        settings: The configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self._lasts_s = settings.bank.without_ledger_s
        self._needs_lease = settings.bank.database.startswith("postgresql")
        self._asks = bool(settings.gate.ask)
        self._books_at = 0.0
        self._lease_until = 0.0
        self.books_at_us = 0
        self.fence = 0
        self.is_ready = False
        """Whether the holds are all there."""

    def heard(self) -> None:
        """The ledger has said something."""
        self._books_at = time.monotonic()
        self.books_at_us = time.time_ns() // 1000

    @property
    def has_books(self) -> bool:
        """Whether the ledger has said anything since this gate began."""
        return bool(self._books_at)

    def lease(self, fence: int, valid_s: float) -> bool:
        """It was given the right, or lost it; whether it is new here.

        A lease that is older than the last is not one any more.
        """
        if fence < self.fence:
            return False
        is_new = fence != self.fence or time.monotonic() >= self._lease_until
        self.fence = fence
        self._lease_until = time.monotonic() + valid_s if valid_s > 0 else 0.0
        return is_new and valid_s > 0

    @property
    def has_lease(self) -> bool:
        """Whether nobody else decides, so that this gate may."""
        if self._needs_lease:
            return time.monotonic() < self._lease_until
        return not self._asks

    def why_not(self) -> str:
        """What speaks against deciding, the ledger's absence aside; "" for nothing."""
        if not self.has_lease:
            return "another gate has the right to decide"
        if not self.is_ready:
            return "the holds are not all known yet"
        return ""

    @property
    def is_alone(self) -> bool:
        """Whether the ledger has been away for longer than may be."""
        return not self._books_at or time.monotonic() - self._books_at > self._lasts_s


class Answering:
    """Answers requests, many in one transaction.

    Args:
        keeper: The gate's state.
        right: Whether it may decide.
    """

    def __init__(self, keeper: Keeper, right: Right) -> None:
        self._keeper = keeper
        self._right = right
        self._names = Names()
        self._said: dict[str, float] = {}

    def user(self, cluster: str, uid: int) -> str:
        """A user's name, by the cluster's picture or by this host."""
        return self._keeper.ground.user_of(cluster, uid) or self._names.user(uid)

    def answer(self, ask: Submit, now_us: int) -> Said:
        """Decide, within a transaction of the store. Whatever fails, there is an answer."""
        why = self._right.why_not() or self._why_not(ask.cluster)
        if why:
            self._say(why, ask.cluster)
            return self.by_policy(ask)
        is_lenient = False
        if self._right.is_alone:
            self._say("the ledger is away for too long", ask.cluster)
            if self._keeper.ground.policy(ask.cluster, ask.job.partition) == "deny":
                return self.by_policy(ask)
            is_lenient = True
        try:
            if ask.op == "modify":
                return self._keeper.modify(ask, now_us, is_lenient=is_lenient)
            user = self.user(ask.cluster, ask.job.uid)
            return self._keeper.submit(ask, user, now_us, is_lenient=is_lenient)
        except Overdrawn as error:
            log.critical("%s", error)
            return self.by_policy(ask)

    def by_policy(self, ask: Submit) -> Said:
        """What the site wants where nobody can decide."""
        is_ok = (
            ask.op == "modify"
            or self._keeper.ground.policy(ask.cluster, ask.job.partition) == "allow"
        )
        return Said(v=VERSION, ok=is_ok, say="" if is_ok else _AWAY, id=ask.id)

    def _why_not(self, cluster: str) -> str:
        if self._keeper.ground.estimator(cluster) is None:
            return "it has not been told what the cluster looks like, or what jobs cost"
        return ""

    def _say(self, why: str, cluster: str) -> None:
        """Log it once in a while: jobs come by the thousand."""
        now = time.monotonic()
        if now - self._said.get(why, -_SAY_AGAIN_S) >= _SAY_AGAIN_S:
            self._said[why] = now
            log.warning("jobs of cluster %s are answered by the policy: %s", cluster, why)


_submit = msgspec.json.Decoder(Submit).decode
_said = msgspec.json.Encoder().encode


def read(line: bytes) -> Submit | None:
    """A request; None for what is none of this version's."""
    try:
        ask = _submit(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # The plugin then applies its policy: it knows more of the job than this line says.
        log.warning("a request of the submit plugin cannot be read: %s", error)
        return None
    if ask.v != VERSION:
        log.warning("the submit plugin speaks version %d, the gate %d", ask.v, VERSION)
        return None
    return ask


def written(said: Said) -> bytes:
    """An answer as it goes over the wire."""
    return _said(said) + b"\n"
