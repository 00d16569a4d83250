"""Rules that the gate decides by, besides balances: modes, rates, cluster models and roles.

`GateRules` holds the settings and everything that other processes send to the gate besides
balances. It answers which mode applies to a job, what the job costs, which account pays, who may
change it, who is exempt, and which outage policy applies. All of it is pushed to the gate; nothing
here queries anything. `find_mode` finds the mode rule that fits best; `to_datetime` converts
timestamps.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, tzinfo
from typing import Final, Literal

from steward.bank.estimate import Estimator
from steward.bank.estimate.request_limits import LONGEST_TEXT, UNLIMITED, Budget
from steward.bank.money import Unit
from steward.bank.records import BankRules, JobRequest, Mode, ModeRule, Quote
from steward.bank.settings import OutagePolicy
from steward.core.access import ClusterRoles
from steward.core.config import Settings
from steward.slurm.cluster_model import ClusterModel
from steward.slurm.times import TimeError, load_zone

DEFAULT_MODE: Final[Mode] = "observe"
"""The mode without any rule: jobs are priced, none is rejected."""

_STRICTEST_FIRST: Final[tuple[Mode, ...]] = ("enforce", "observe", "off")
"""Modes from the strictest to the least strict."""
_MOST_CACHED_MODES: Final = 10_000
"""Maximum number of cached modes."""
_LONGEST_CACHED: Final = 256
"""Maximum length of a cached key's names."""
_MOST_PARTITIONS: Final = 64
"""Maximum number of partitions in a request; one with more gets the strictest mode of all."""


class GateRules:
    """Settings, rules, cluster models and roles that the gate was sent.

    Args:
        settings: The configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bank = settings.bank
        self.unit = Unit(name=settings.bank.unit, decimals=settings.bank.decimals)
        self.rules: BankRules | None = None
        self.models: dict[str, ClusterModel] = {}
        self._estimators: dict[str, Estimator] = {}
        self._modes: dict[tuple[str, str, str], Mode] = {}
        self._exempt = frozenset(
            (
                *settings.bank.exempt,
                *settings.access.operators,
                *settings.access.administrators,
                *settings.gate.plugin_users,
            )
        )
        self._admins: dict[str, frozenset[str]] = {}
        self._coordinators: dict[str, dict[str, frozenset[str]]] = {}
        self.slurm_uids = frozenset({0, os.geteuid()})
        """Uids that slurmctld and Steward run as."""
        self.budget = UNLIMITED
        """CPU time that is left for the current request."""

    @contextmanager
    def limit_cpu(self, budget: Budget) -> Iterator[None]:
        """Limit the CPU time of the current request."""
        self.budget = budget
        try:
            yield
        finally:
            self.budget = UNLIMITED

    def put_rules(self, rules: BankRules) -> None:
        """Replace modes and rates."""
        self.rules = rules
        self._modes.clear()
        self._estimators = {
            name: self._make_estimator(model) for name, model in self.models.items()
        }

    def put_model(self, model: ClusterModel) -> None:
        """Replace the model of a cluster."""
        self.models[model.cluster] = model
        self._estimators[model.cluster] = self._make_estimator(model)

    def put_roles(self, cluster: str, roles: ClusterRoles | None) -> None:
        """Replace a cluster's administrators and coordinators."""
        self._admins[cluster] = roles.admins if roles else frozenset()
        self._coordinators[cluster] = roles.coordinators if roles else {}

    def _make_estimator(self, model: ClusterModel) -> Estimator:
        rates = self.rules.rates if self.rules else ()
        return Estimator(model, rates, self.bank)

    def get_estimator(self, cluster: str) -> Estimator | None:
        """Return a cluster's estimator; None without a cluster model or rules."""
        return self._estimators.get(cluster) if self.rules else None

    def quote(self, cluster: str, job: JobRequest, first_submit_us: int) -> Quote:
        """Return the highest cost of a job.

        Raises:
            NoRate: A partition has no rate.
            NoEstimate: The job cannot be priced.
            KeyError: The cluster has no model; see :meth:`get_estimator`.
        """
        estimator = self._estimators[cluster]
        return estimator.quote(job, to_datetime(first_submit_us), budget=self.budget)

    def get_mode(self, cluster: str, partitions: str, account: str) -> Mode:
        """Return the mode of a job; of several partitions the strictest counts."""
        if len(partitions) > LONGEST_TEXT or partitions.count(",") >= _MOST_PARTITIONS:
            # So many partitions get no estimate: assume the strictest of all.
            return self.get_strictest_mode(cluster, account)
        key = (cluster, partitions, account)
        found_mode: Mode | None = self._modes.get(key)
        if found_mode is None:
            names = partitions or self.default_partition(cluster)
            modes = {self._find_mode(cluster, name, account) for name in names.split(",")}
            strictest: Mode = next(mode for mode in _STRICTEST_FIRST if mode in modes)
            if len(self._modes) >= _MOST_CACHED_MODES:
                # Users choose the names, so the cache is bounded.
                self._modes.clear()
            found_mode = strictest
            if len(partitions) + len(account) <= _LONGEST_CACHED:
                self._modes[key] = found_mode
        return found_mode

    def get_strictest_mode(self, cluster: str, account: str) -> Mode:
        """Return the strictest mode of all partitions."""
        rules = self.rules.modes if self.rules else ()
        names = {"", *(rule.partition for rule in rules if rule.cluster in ("", cluster))}
        modes = {self._find_mode(cluster, name, account) for name in names}
        return next(mode for mode in _STRICTEST_FIRST if mode in modes)

    def is_enforced_in(self, partition: str) -> bool:
        """Return True if any account's mode in a partition is ``enforce``, on any cluster.

        While the rules are unknown, it may be.
        """
        if self.rules is None:
            return True
        rules = sorted(self.rules.modes, key=_get_specificity)
        for cluster in self.settings.cluster:
            modes = {
                rule.account: rule.mode
                for rule in rules
                if rule.cluster in ("", cluster) and rule.partition in ("", partition)
            }
            if "enforce" in modes.values():
                return True
        return False

    def list_ruled_partitions(self) -> set[str]:
        """Return the partitions that have an outage policy or a mode of their own."""
        modes = self.rules.modes if self.rules else ()
        policies = self.bank.partition.items()
        return {name for name, partition in policies if partition.policy is not None} | {
            rule.partition for rule in modes if rule.partition
        }

    def _find_mode(self, cluster: str, partition: str, account: str) -> Mode:
        modes = self.rules.modes if self.rules else ()
        return find_mode(modes, cluster, partition, account) or DEFAULT_MODE

    def find_chosen_mode(self, cluster: str, account: str) -> Mode | None:
        """Return the mode set for jobs without a partition; None if no rule sets one."""
        modes = self.rules.modes if self.rules else ()
        return find_mode(modes, cluster, self.default_partition(cluster), account)

    def default_partition(self, cluster: str) -> str:
        """Return the cluster's default partition; "" if unknown."""
        model = self.models.get(cluster)
        return model.default_partition if model else ""

    def find_account(self, cluster: str, job: JobRequest, user: str) -> str:
        """Return the account that pays for a job; "" if none is known."""
        if job.account:
            # Cut a user's text to the length of a name before it is used.
            return job.account[:LONGEST_TEXT].lower()
        model = self.models.get(cluster)
        default_account = model.accounts.get(user, "") if model else ""
        return (default_account or self.bank.default_account).lower()

    def find_user(self, cluster: str, uid: int) -> str:
        """Return a user's name from the cluster's model; "" if it is not there."""
        model = self.models.get(cluster)
        return model.users.get(uid, "") if model else ""

    def is_slurm_uid(self, uid: int) -> bool:
        """Return True for a uid that slurmctld or Steward runs as: SlurmUser or root."""
        return uid in self.slurm_uids

    def may_change(self, cluster: str, owner: int, account: str, uid: int, user: str) -> bool:
        """Return True if Slurm lets a uid change a job, by the roles that it last reported.

        Args:
            cluster: The cluster's name.
            owner: The job's owner; negative if unknown.
            account: Its account.
            uid: The sender; -1 if the plugin does not say.
            user: That uid's name.
        """
        if uid in (-1, owner) or self.is_slurm_uid(uid):
            return True
        if not user:
            return False
        coordinators = self._coordinators.get(cluster, {}).get(account, ())
        return user in self._exempt or user in self._admins.get(cluster, ()) or user in coordinators

    def is_member(self, cluster: str, account: str, user: str) -> bool:
        """Return True if Slurm lets a user use an account, as far as that is known."""
        model = self.models.get(cluster)
        if model is None or not (model.enforced and model.qos):
            return True
        # slurmdbd stores names in lower case by default.
        return bool({f"{account}/{user}", f"{account}/{user.lower()}"} & model.qos.keys())

    def is_exempt(self, cluster: str, uid: int, user: str) -> bool:
        """Return True if a user's jobs are never rejected."""
        return (
            uid == 0
            or user in self._exempt
            or (bool(user) and user in self._admins.get(cluster, ()))
        )

    def _get_partition_policy(self, partition: str) -> OutagePolicy:
        partition_settings = self.bank.partition.get(partition)
        own_policy = partition_settings.policy if partition_settings else None
        return own_policy or self.settings.gate.policy

    def get_plugin_policy(self, partition: str) -> Literal["observe", "allow", "deny"]:
        """Return the submit plugin's outage policy for a partition; "" for those without rules.

        The plugin does not know which account pays: the strictest mode counts.
        """
        if not self.is_enforced_in(partition):
            return "observe"
        return self._get_partition_policy(partition)

    def is_denied_in_outage(self, cluster: str, partitions: str, account: str) -> bool:
        """Return True if the outage policy rejects a job: only in mode ``enforce``.

        Of several partitions the strictest counts.
        """
        names = (partitions[:LONGEST_TEXT] or self.default_partition(cluster)).split(",")
        return any(self._get_partition_policy(name) == "deny" for name in names) and (
            self.rules is None or self.get_mode(cluster, partitions, account) == "enforce"
        )

    def get_time_zone(self, cluster: str) -> tzinfo:
        """Return the time zone in which a cluster's users see times."""
        model = self.models.get(cluster)
        try:
            return load_zone(model.zone if model else "")
        except TimeError:
            return UTC  # the check of the settings reports an unknown zone


def find_mode(rules: Iterable[ModeRule], cluster: str, partition: str, account: str) -> Mode | None:
    """Return the mode of the most specific matching rule; None if no rule matches."""
    best = -1
    mode: Mode | None = None
    for rule in rules:
        if (
            rule.cluster in ("", cluster)
            and rule.partition in ("", partition)
            and rule.account in ("", account)
            and _get_specificity(rule) >= best
        ):
            best, mode = _get_specificity(rule), rule.mode
    return mode


def to_datetime(at_us: int) -> datetime:
    """Convert µs since the epoch to a datetime."""
    return datetime.fromtimestamp(at_us / 1e6, UTC)


def _get_specificity(rule: ModeRule) -> int:
    """Rank a rule by how specific it is: account before partition before cluster."""
    return 4 * bool(rule.account) + 2 * bool(rule.partition) + bool(rule.cluster)
