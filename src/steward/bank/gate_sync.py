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
from steward.slurm.state_files import StateFiles, StateStamp

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
        self._lease: Lease | None = None
        # If no other gate can decide, this one may go on without the ledger as configured.
        is_one_of_many = settings.gate.listen or settings.gate.ask
        self._lease_s = LEASE_S if is_one_of_many else max(LEASE_S, settings.bank.without_ledger_s)
        self._holder = f"{socket.gethostname()}:{os.path.abspath(settings.state_dir)}"
        self._models = ClusterModels(settings, ledger, clock)
        self._logged: set[str] = set()
        self.seq = -1
        """Position of the ledger that the gate received last."""

    @property
    def rules(self) -> BankRules:
        """Return the modes and rates that the gate has."""
        return self._rules

    def pricing(self, cluster: str) -> Pricing:
        """Return the inputs of charges for a cluster's jobs."""
        cluster_settings = self._settings.cluster.get(cluster)
        model = self._models.get_model(cluster)
        zone = (
            cluster_settings.timezone
            if cluster_settings and cluster_settings.timezone
            else model.zone
            if model
            else ""
        )
        return Pricing(
            settings=self._settings.bank, rates=self._rules.rates, model=model, zone=zone
        )

    def expire_model(self, cluster: str) -> None:
        """Query a cluster again at the next push, because its slurm.conf may have changed."""
        self._models.expire(cluster)

    def query_models(self) -> None:
        """Query the clusters that are due.

        Raises:
            LedgerUnavailable: The ledger's database is unreachable.
        """
        self._models.query_due()

    def refresh(self) -> None:
        """Read the rules again if they have changed.

        Raises:
            LedgerUnavailable: The ledger's database is unreachable.
        """
        with self._ledger.reading() as t:
            if t.seq != self.seq or self._rules.seq < 0:
                self._rules = t.export_rules()

    def push(self) -> GateBooks:
        """Send the gate everything that is new to it.

        Returns:
            The accounts sent: those that have changed.

        Raises:
            LedgerUnavailable, GateUnavailable: One of them is unavailable.
        """
        self._models.query_due()
        self._keep_lease()
        state = self._link.get_status()
        with self._ledger.reading() as t:
            seq = t.seq
            is_news = seq != self.seq or state.rules != self._rules.seq
            if is_news:
                self._rules = t.export_rules()
            # A ledger restored from a backup is behind what the gate has.
            books = t.export_books(after_seq=state.position if state.position <= seq else 0)
        if state.rules != self._rules.seq:
            self._link.send_rules(self._rules)
        position = self._link.send_books(books)
        if position < books.after and not books.whole:
            with self._ledger.reading() as t:
                self._link.send_books(t.export_books(after_seq=position))
        self._send_settlements(state, books)
        for cluster, model in self._models.list_models():
            if model.taken_us > state.pictures.get(cluster, 0):
                self._link.send_model(model)
                self._log_uncounted(model)
        self.seq = seq
        return books

    def _log_uncounted(self, model: ClusterModel) -> None:
        """Log, once each, the TRES that rates weigh but Slurm does not count."""
        for uncounted in find_uncounted_tres(self._rules.rates, model):
            if uncounted.what not in self._logged:
                self._logged.add(uncounted.what)
                log.error("%s", uncounted.what)

    def _send_settlements(self, state: GateStatus, books: GateBooks) -> None:
        """Send the settlements that the gate has not applied yet."""
        after = state.settled
        while True:
            with self._ledger.reading() as t:
                settlements = t.settlements.list_after(after, limit=_SETTLEMENTS)
            if not settlements:
                return
            self._link.settle(settlements, books)
            after = settlements[-1].seq

    def _keep_lease(self) -> None:
        """Hold the lease that lets only one gate decide, if the ledger is shared."""
        if not self._settings.bank.database.startswith("postgresql"):
            return
        began = self._clock()
        self._lease = self._renew_lease()
        if self._lease is None:
            self._link.grant_lease(0, 0.0)
            return
        with self._ledger.reading() as t:
            secret = t.read_mark(_SECRET)
        valid_s = self._lease_s - (self._clock() - began)
        gate_secret = self._link.grant_lease(self._lease.fence, max(0.0, valid_s), secret)
        if gate_secret != secret:
            with self._ledger.transaction(self._lease) as t:
                t.set_mark(_SECRET, gate_secret)

    def _renew_lease(self) -> "Lease | None":
        """Renew the lease of the deciding gate, or take it if it is free."""
        from steward.bank.ledger.leases import LeaseLost

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
            log.info("the lease of this gate expires without renewal: %s", error)
        self._lease = None


class ClusterModels:
    """Cluster models, queried from Slurm periodically and stored in the ledger.

    A mark of the configuration is compared every few seconds, so that new weights apply soon
    after slurmctld restarts or reconfigures, even without a sensor event; slurmctld's state files,
    if they are on this host, show that it cannot have changed. For a minute after a change the
    whole model is queried repeatedly, at doubling intervals: nodes register late.

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
        self._zones = {
            name: cluster_settings.timezone for name, cluster_settings in settings.cluster.items()
        }
        self._slurms = {
            name: Slurm(name, cluster_settings)
            for name, cluster_settings in settings.cluster.items()
            if cluster_settings.asks_slurm and not cluster_settings.remote
        }
        self._state_files = {
            name: StateFiles(settings.cluster[name], slurm.find_state_directory)
            for name, slurm in self._slurms.items()
        }
        self._stamps: dict[str, StateStamp | None] = {}
        self._models: dict[str, ClusterModel] = {}
        self._logged: dict[str, str] = {}
        self._marks: dict[str, str] = {}
        self._due: dict[str, float] = {}
        self._whole_due: dict[str, float] = {}
        self._settled_at: dict[str, float] = {}
        self._gap_s: dict[str, float] = {}
        self._cost_s: dict[str, float] = {}
        self._is_read = False

    def get_model(self, cluster: str) -> ClusterModel | None:
        """Return the model of a cluster; None if it was never queried."""
        self._load_stored()
        return self._models.get(cluster)

    def list_models(self) -> list[tuple[str, ClusterModel]]:
        """Return all models with their cluster names."""
        return list(self._models.items())

    def expire(self, cluster: str) -> None:
        """Query a cluster at the next :meth:`query_due`, however recent its model is."""
        self._due.pop(cluster, None)
        self._stamps.pop(cluster, None)
        self._whole_due.pop(cluster, None)

    def query_due(self) -> None:
        """Query each cluster that is due; an unreachable one keeps its model."""
        self._load_stored()
        for cluster, slurm in self._slurms.items():
            now = self._clock()
            if now < self._due.get(cluster, now):
                continue
            stamp = self._state_files[cluster].read_stamp()
            is_unchanged = stamp is not None and stamp == self._stamps.get(cluster)
            if is_unchanged and now < self._whole_due.get(cluster, now):
                self._due[cluster] = now + CONFIG_CHECK_S
                continue
            repeated_s = 0.0
            try:
                repeated_s = self._refresh(cluster, slurm, now, is_unchanged=is_unchanged)
                self._stamps[cluster] = stamp
            except SlurmError as error:
                if self._logged.get(cluster) != str(error):
                    log.warning("cannot update the model of cluster %s: %s", cluster, error)
                self._logged[cluster] = str(error)
            else:
                self._logged.pop(cluster, None)
            finally:
                # Without a model nothing can be priced, so retry soon.
                longest_s = MODEL_REFRESH_S if cluster in self._models else CONFIG_CHECK_S
                cost_s = self._clock() - now - repeated_s
                # slurmctld answers slowly once after reading its configuration: use the lower cost.
                gap_s = COST_FACTOR * min(cost_s, self._cost_s.get(cluster, cost_s))
                self._cost_s[cluster] = cost_s
                self._due[cluster] = now + min(max(CONFIG_CHECK_S, gap_s), longest_s)

    def _refresh(self, cluster: str, slurm: Slurm, now: float, *, is_unchanged: bool) -> float:
        """Query the model if the configuration changed or the model is due.

        Args:
            cluster: The cluster's name.
            slurm: Client of its Slurm.
            now: Time of the clock.
            is_unchanged: Whether slurmctld's state files show the configuration of the last query.

        Returns:
            Seconds the query took if its cost is already in the next interval, otherwise 0.
        """
        # Read the mark first: a change during the query then shows at the next check.
        mark = self._marks[cluster] if is_unchanged else slurm.read_configuration_mark()
        is_changed = mark != self._marks.get(cluster)
        if not is_changed and now < self._whole_due.get(cluster, now):
            return 0.0
        began = self._clock()
        model = slurm.read_model(self._zones[cluster])
        cost_s = self._clock() - began
        if not _is_same_model(model, self._models.get(cluster)):
            with self._ledger.transaction() as t:
                t.set_model(model)
        self._models[cluster] = model
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

    def _load_stored(self) -> None:
        """Read the stored models from the ledger, once."""
        if self._is_read:
            return
        with self._ledger.reading() as t:
            for cluster in self._zones:
                model = t.read_model(cluster)
                if model is not None:
                    self._models[cluster] = model
        self._is_read = True


def load_pricing(settings: Settings, ledger: "Ledger", cluster: str) -> Pricing:
    """Return the inputs of a cluster's charges, for processes other than the bank's.

    Raises:
        LedgerUnavailable: The ledger's database is unreachable.
    """
    cluster_settings = settings.cluster.get(cluster)
    with ledger.reading() as t:
        rates, model = t.rates.list_all(), t.read_model(cluster)
    return Pricing(
        settings=settings.bank,
        rates=rates,
        model=model,
        zone=cluster_settings.timezone
        if cluster_settings and cluster_settings.timezone
        else model.zone
        if model
        else "",
    )


def _is_same_model(one: ClusterModel, other: ClusterModel | None) -> bool:
    return other is not None and one == msgspec.structs.replace(other, taken_us=one.taken_us)
