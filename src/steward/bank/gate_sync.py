"""Gate synchronization: send balances, rules, cluster models and settlements to the gate.

:class:`GateSync` pushes whatever the ledger has newer than the gate, so that either can be killed,
restored or replaced at any time; with a shared ledger it also keeps the lease of the deciding
gate. The bank's consumer calls ``push`` about every second: it queries the clusters that are due,
renews the lease, then sends the rules, balances, settlements and models that the gate lacks.

:class:`ClusterModels` queries each cluster's configuration from its Slurm and keeps it in the
ledger. :func:`load_pricing` gives other processes the inputs of charges.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from steward.bank.billing import Pricing, find_uncounted_tres
from steward.bank.errors import LedgerUnavailable
from steward.bank.gate.client import GateClient
from steward.bank.gate.requests import GateStatus
from steward.bank.records import BankRules, GateBooks
from steward.core.config import Settings
from steward.core.poll_status import COST_FACTOR
from steward.slurm.client import Slurm
from steward.slurm.cluster_model import ClusterModel
from steward.slurm.errors import SlurmError

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger
    from steward.bank.ledger.records import Lease


log = logging.getLogger(__name__)

MODEL_REFRESH_S: Final = 60.0
"""Longest time a cluster model is kept before a complete new query, in seconds."""
CONFIG_CHECK_S: Final = 2.0
"""Shortest time between two checks of a cluster's configuration, in seconds."""
SETTLING_S: Final = 60.0
"""Time after a configuration change with repeated queries of the cluster, in seconds.

slurmd reports a node's GRES to slurmctld only when it registers.
"""
LEASE_S: Final = 15.0
"""Longest time one of several gates may decide without word from its lease holder, in seconds."""

_LEASE: Final = "gate"
"""Name of the lease of the deciding gate."""
_SETTLEMENTS: Final = 1000
"""Maximum number of settlements sent to the gate at once."""
_SECRET: Final = "gate.secret"  # noqa: S105 -- the mark's name
"""Name of the ledger's note with the gates' common secret."""


class GateSync:
    """Synchronization of the gate with the ledger, and the inputs of charges.

    Args:
        settings: The whole configuration.
        ledger: The ledger.
        link: Client of the gate.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: "Ledger",
        link: GateClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._link = link
        self._clock = clock
        self._rules = BankRules(seq=-1)
        self._books: GateBooks | None = None
        self._lease: Lease | None = None
        # If no other gate can decide, this one may go on without the ledger as configured.
        is_one_of_many = settings.gate.listen or settings.gate.ask
        self._lease_s = LEASE_S if is_one_of_many else max(LEASE_S, settings.bank.without_ledger_s)
        self._holder = f"{socket.gethostname()}:{os.path.abspath(settings.state_dir)}"
        self._pictures = ClusterModels(settings, ledger, clock)
        self._said: set[str] = set()
        self.seq = -1
        """Position of the ledger that the gate received last."""

    @property
    def rules(self) -> BankRules:
        """Return the modes and rates that the gate has."""
        return self._rules

    def pricing(self, cluster: str) -> Pricing:
        """Return the inputs of charges for a cluster's jobs."""
        of = self._settings.cluster.get(cluster)
        picture = self._pictures.of(cluster)
        zone = of.timezone if of and of.timezone else picture.zone if picture else ""
        return Pricing(
            settings=self._settings.bank, rates=self._rules.rates, picture=picture, zone=zone
        )

    def expire_picture(self, cluster: str) -> None:
        """Query a cluster again at the next push, because its slurm.conf may have changed."""
        self._pictures.expire(cluster)

    def refresh(self) -> None:
        """Read the rules again if they have changed.

        Raises:
            LedgerUnavailable: The ledger's database is unreachable.
        """
        with self._ledger.reading() as t:
            if t.seq != self.seq or self._rules.seq < 0:
                self._rules = t.rules()

    def push(self) -> GateBooks:
        """Send the gate everything that is new to it.

        Returns:
            The accounts sent: those that have changed.

        Raises:
            LedgerUnavailable, GateUnavailable: One of them is unavailable.
        """
        self._pictures.look()
        self._keep_lease()
        state = self._link.state()
        with self._ledger.reading() as t:
            seq = t.seq
            is_news = seq != self.seq or state.rules != self._rules.seq
            if is_news:
                self._rules = t.rules()
            # A ledger restored from a backup is behind what the gate has.
            books = t.books(after_seq=state.position if state.position <= seq else 0)
        if state.rules != self._rules.seq:
            self._link.rules(self._rules)
        position = self._link.books(books)
        if position < books.after and not books.whole:
            with self._ledger.reading() as t:
                self._link.books(t.books(after_seq=position))
        self._settle(state, books)
        for cluster, picture in self._pictures.all():
            if picture.taken_us > state.pictures.get(cluster, 0):
                self._link.picture(picture)
                self._tell_uncounted(picture)
        self.seq = seq
        return books

    def _tell_uncounted(self, picture: ClusterModel) -> None:
        """Log, once each, the TRES that rates weigh but Slurm does not count."""
        for one in find_uncounted_tres(self._rules.rates, picture):
            if one.what not in self._said:
                self._said.add(one.what)
                log.error("%s", one.what)

    def _settle(self, state: GateStatus, books: GateBooks) -> None:
        """Send the settlements that the gate has not applied yet."""
        after = state.settled
        while True:
            with self._ledger.reading() as t:
                settlements = t.settlements.after(after, limit=_SETTLEMENTS)
            if not settlements:
                return
            self._link.settle(settlements, books)
            after = settlements[-1].seq

    def _keep_lease(self) -> None:
        """Hold the lease that lets only one gate decide, if the ledger is shared."""
        if not self._settings.bank.database.startswith("postgresql"):
            return
        began = self._clock()
        self._lease = self._renewed()
        if self._lease is None:
            self._link.lease(0, 0.0)
            return
        with self._ledger.reading() as t:
            secret = t.mark(_SECRET)
        valid_s = self._lease_s - (self._clock() - began)
        known = self._link.lease(self._lease.fence, max(0.0, valid_s), secret)
        if known != secret:
            with self._ledger.transaction(self._lease) as t:
                t.set_mark(_SECRET, known)

    def _renewed(self) -> "Lease | None":
        """Renew the lease of the deciding gate, or take it if it is free."""
        from steward.bank.ledger.outbox import LeaseLost

        leases = self._ledger.leases
        if self._lease is not None:
            try:
                return leases.renew(self._lease, self._lease_s)
            except LeaseLost as error:
                log.warning("%s", error)
        # Each new lease has a new number; the gate then reads all tokens from Slurm again.
        return leases.take(_LEASE, self._holder, self._lease_s)

    def close(self) -> None:
        """Release the lease, so that another gate may decide."""
        if self._lease is None:
            return
        try:
            self._ledger.leases.release(self._lease)
        except LedgerUnavailable as error:
            log.info("the right to decide ends by itself: %s", error)
        self._lease = None


class ClusterModels:
    """Cluster models, queried from Slurm periodically and stored in the ledger.

    A mark of the configuration is compared every few seconds, so that new weights apply soon
    after slurmctld restarts or reconfigures, even without a sensor event. For a minute after a
    change the whole model is queried repeatedly, at doubling intervals: nodes register late.

    Args:
        settings: The whole configuration.
        ledger: The ledger.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, settings: Settings, ledger: "Ledger", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._zones = {name: of.timezone for name, of in settings.cluster.items()}
        self._slurms = {
            name: Slurm(name, of)
            for name, of in settings.cluster.items()
            if of.asks_slurm and not of.remote
        }
        self._known: dict[str, ClusterModel] = {}
        self._said: dict[str, str] = {}
        self._marks: dict[str, str] = {}
        self._due: dict[str, float] = {}
        self._whole_due: dict[str, float] = {}
        self._settled_at: dict[str, float] = {}
        self._gap_s: dict[str, float] = {}
        self._cost_s: dict[str, float] = {}
        self._is_read = False

    def of(self, cluster: str) -> ClusterModel | None:
        """Return the model of a cluster; None if it was never queried."""
        self._read()
        return self._known.get(cluster)

    def all(self) -> list[tuple[str, ClusterModel]]:
        """Return all models with their cluster names."""
        return list(self._known.items())

    def expire(self, cluster: str) -> None:
        """Query a cluster at the next :meth:`look`, however recent its model is."""
        self._due.pop(cluster, None)
        self._whole_due.pop(cluster, None)

    def look(self) -> None:
        """Query each cluster that is due; an unreachable one keeps its model."""
        self._read()
        for cluster, slurm in self._slurms.items():
            now = self._clock()
            if now < self._due.get(cluster, now):
                continue
            repeated_s = 0.0
            try:
                repeated_s = self._refresh(cluster, slurm, now)
            except SlurmError as error:
                if self._said.get(cluster) != str(error):
                    log.warning("the picture of cluster %s stays as it was: %s", cluster, error)
                self._said[cluster] = str(error)
            else:
                self._said.pop(cluster, None)
            finally:
                # Without a model nothing can be priced, so retry soon.
                longest_s = MODEL_REFRESH_S if cluster in self._known else CONFIG_CHECK_S
                cost_s = self._clock() - now - repeated_s
                # slurmctld answers slowly once after reading its configuration: use the lower cost.
                gap_s = COST_FACTOR * min(cost_s, self._cost_s.get(cluster, cost_s))
                self._cost_s[cluster] = cost_s
                self._due[cluster] = now + min(max(CONFIG_CHECK_S, gap_s), longest_s)

    def _refresh(self, cluster: str, slurm: Slurm, now: float) -> float:
        """Query the model if the configuration changed or the model is due.

        Returns:
            Seconds the query took if its cost is already in the next interval, otherwise 0.
        """
        # Read the mark first: a change during the query then shows at the next check.
        mark = slurm.configuration_mark()
        is_changed = mark != self._marks.get(cluster)
        if not is_changed and now < self._whole_due.get(cluster, now):
            return 0.0
        began = self._clock()
        picture = slurm.picture(self._zones[cluster])
        cost_s = self._clock() - began
        if not _is_same_model(picture, self._known.get(cluster)):
            with self._ledger.transaction() as t:
                t.set_mark(_model_mark(cluster), msgspec.json.encode(picture).decode())
        self._known[cluster] = picture
        self._marks[cluster] = mark
        if is_changed:
            self._settled_at[cluster] = now + SETTLING_S
            self._gap_s[cluster] = CONFIG_CHECK_S
        self._whole_due[cluster] = now + self._next_gap_s(cluster, now, cost_s)
        return 0.0 if is_changed else cost_s

    def _next_gap_s(self, cluster: str, now: float, cost_s: float) -> float:
        """Return seconds until the next query: short and doubling until the cluster settles."""
        if now >= self._settled_at[cluster]:
            return MODEL_REFRESH_S
        gap_s = max(self._gap_s[cluster], COST_FACTOR * cost_s)
        self._gap_s[cluster] = 2 * gap_s
        return min(gap_s, MODEL_REFRESH_S)

    def _read(self) -> None:
        """Read the stored models from the ledger, once."""
        if self._is_read:
            return
        with self._ledger.reading() as t:
            for cluster in self._zones:
                kept = t.mark(_model_mark(cluster))
                if kept:
                    self._remember(cluster, kept)
        self._is_read = True

    def _remember(self, cluster: str, kept: str) -> None:
        try:
            self._known[cluster] = msgspec.json.decode(kept, type=ClusterModel)
        except msgspec.MsgspecError as error:
            # Written by another version of Steward: the next query replaces it.
            log.info("the kept picture of cluster %s cannot be read: %s", cluster, error)


def load_cluster_model(ledger: "Ledger", cluster: str) -> ClusterModel | None:
    """Return the model of a cluster stored last; None if there is none.

    Raises:
        LedgerUnavailable: The ledger's database is unreachable.
    """
    with ledger.reading() as t:
        kept = t.mark(_model_mark(cluster))
    try:
        return msgspec.json.decode(kept, type=ClusterModel) if kept else None
    except msgspec.MsgspecError:
        return None  # written by another version of Steward; the bank replaces it in a minute


def load_pricing(settings: Settings, ledger: "Ledger", cluster: str) -> Pricing:
    """Return the inputs of a cluster's charges, for processes other than the bank's.

    Raises:
        LedgerUnavailable: The ledger's database is unreachable.
    """
    picture = load_cluster_model(ledger, cluster)
    of = settings.cluster.get(cluster)
    with ledger.reading() as t:
        rates = t.rates.all()
    return Pricing(
        settings=settings.bank,
        rates=rates,
        picture=picture,
        zone=of.timezone if of and of.timezone else picture.zone if picture else "",
    )


def _is_same_model(one: ClusterModel, other: ClusterModel | None) -> bool:
    return other is not None and one == msgspec.structs.replace(other, taken_us=one.taken_us)


def _model_mark(cluster: str) -> str:
    return f"picture:{cluster}"
