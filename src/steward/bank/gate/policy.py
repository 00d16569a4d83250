"""What the gate decides by, beside what accounts have: settings, rules, rates, pictures.

All of it is pushed to it; nothing here asks anybody.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, tzinfo
from typing import Final

from steward.bank.estimate import Estimator
from steward.bank.estimate.request_limits import LONGEST, UNLIMITED, Budget
from steward.bank.money import Unit
from steward.bank.records import Description, Mode, ModeRule, Quote, Rules
from steward.bank.settings import Policy
from steward.core.access import Standing
from steward.core.config import Settings
from steward.slurm.cluster_model import Picture
from steward.slurm.times import TimeError, zone_called

DEFAULT_MODE: Final[Mode] = "observe"
"""Where no rule says anything: all is priced, nothing refused."""

_STRICT: Final[tuple[Mode, ...]] = ("gate", "observe", "off")
_MOST_MODES: Final = 10_000
_LONGEST_KEPT: Final = 256
_MOST_PARTITIONS: Final = 64


class Ground:
    """Settings, and what the gate was told beside the books.

    Args:
        settings: The configuration.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bank = settings.bank
        self.unit = Unit(name=settings.bank.unit, decimals=settings.bank.decimals)
        self.rules: Rules | None = None
        self.pictures: dict[str, Picture] = {}
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
        """CPU time that is left for the question that is being answered."""

    @contextmanager
    def limited(self, budget: Budget) -> Iterator[None]:
        """Answer one question within a budget of CPU time."""
        self.budget = budget
        try:
            yield
        finally:
            self.budget = UNLIMITED

    def put_rules(self, rules: Rules) -> None:
        """Decide by other modes and rates from now on."""
        self.rules = rules
        self._modes.clear()
        self._estimators = {name: self._made(one) for name, one in self.pictures.items()}

    def put_picture(self, picture: Picture) -> None:
        """A cluster looks like this now."""
        self.pictures[picture.cluster] = picture
        self._estimators[picture.cluster] = self._made(picture)

    def put_standing(self, cluster: str, standing: Standing | None) -> None:
        """Who a cluster's administrators are now."""
        self._admins[cluster] = standing.admins if standing else frozenset()
        self._coordinators[cluster] = standing.coordinators if standing else {}

    def _made(self, picture: Picture) -> Estimator:
        rates = self.rules.rates if self.rules else ()
        return Estimator(picture, rates, self.bank)

    def estimator(self, cluster: str) -> Estimator | None:
        """What prices a cluster's jobs; None while it has no picture or there are no rules."""
        return self._estimators.get(cluster) if self.rules else None

    def quote(self, cluster: str, job: Description, first_submit_us: int) -> Quote:
        """What a job may cost at the most.

        Raises:
            NoRate: Nothing says what its partition costs.
            NoEstimate: It cannot be told.
            KeyError: There is no picture of the cluster; see :meth:`estimator`.
        """
        estimator = self._estimators[cluster]
        return estimator.quote(job, moment(first_submit_us), budget=self.budget)

    def mode(self, cluster: str, partitions: str, account: str) -> Mode:
        """How much is enforced; of several partitions the strictest counts."""
        if len(partitions) > LONGEST or partitions.count(",") >= _MOST_PARTITIONS:
            # Of more partitions than these no estimate is made: any may be among them.
            return self.strictest(cluster, account)
        key = (cluster, partitions, account)
        known: Mode | None = self._modes.get(key)
        if known is None:
            names = partitions or self.default_partition(cluster)
            modes = {self._mode(cluster, name, account) for name in names.split(",")}
            strictest: Mode = next(mode for mode in _STRICT if mode in modes)
            if len(self._modes) >= _MOST_MODES:
                # Names are the users' to choose.
                self._modes.clear()
            known = strictest
            if len(partitions) + len(account) <= _LONGEST_KEPT:
                self._modes[key] = known
        return known

    def strictest(self, cluster: str, account: str) -> Mode:
        """How much is enforced in the strictest of all partitions."""
        rules = self.rules.modes if self.rules else ()
        names = {"", *(rule.partition for rule in rules if rule.cluster in ("", cluster))}
        modes = {self._mode(cluster, name, account) for name in names}
        return next(mode for mode in _STRICT if mode in modes)

    @property
    def is_enforced(self) -> bool:
        """Whether the mode of any job is ``gate``, or may be while the rules are not known."""
        if self.rules is None:
            return True
        rules = self.rules.modes
        usual = (self._mode(cluster, "", "") for cluster in self.settings.cluster)
        return any(mode == "gate" for mode in (*usual, *(rule.mode for rule in rules)))

    def _mode(self, cluster: str, partition: str, account: str) -> Mode:
        modes = self.rules.modes if self.rules else ()
        return chosen_mode(modes, cluster, partition, account) or DEFAULT_MODE

    def chosen(self, cluster: str, account: str) -> Mode | None:
        """The mode that somebody has set for jobs that name no partition; None for nobody."""
        modes = self.rules.modes if self.rules else ()
        return chosen_mode(modes, cluster, self.default_partition(cluster), account)

    def default_partition(self, cluster: str) -> str:
        """Where jobs go that name no partition."""
        picture = self.pictures.get(cluster)
        return picture.default_partition if picture else ""

    def account_of(self, cluster: str, job: Description, user: str) -> str:
        """Who is to pay for a job; "" where nothing says so."""
        if job.account:
            # Before anything is known of it, what a user writes is cut to what can be a name.
            return job.account[:LONGEST].lower()
        picture = self.pictures.get(cluster)
        known = picture.accounts.get(user, "") if picture else ""
        return (known or self.bank.default_account).lower()

    def user_of(self, cluster: str, uid: int) -> str:
        """A user's name as far as the picture shows it; "" otherwise."""
        picture = self.pictures.get(cluster)
        return picture.users.get(uid, "") if picture else ""

    def is_slurms(self, uid: int) -> bool:
        """Whether a uid is one that slurmctld or Steward runs as: SlurmUser, or root."""
        return uid in self.slurm_uids

    def may_change(self, cluster: str, owner: int, account: str, uid: int, user: str) -> bool:
        """Whether Slurm lets a uid change a job, by the roles that it last reported.

        Args:
            cluster: The cluster's name.
            owner: Whose job it is; negative where nobody knows.
            account: Its account.
            uid: Who wants to change it; -1 where the plugin does not say.
            user: That uid's name.
        """
        if uid in (-1, owner) or self.is_slurms(uid):
            return True
        if not user:
            return False
        coordinators = self._coordinators.get(cluster, {}).get(account, ())
        return user in self._exempt or user in self._admins.get(cluster, ()) or user in coordinators

    def is_member(self, cluster: str, account: str, user: str) -> bool:
        """Whether Slurm lets a user's jobs be in an account, as far as that is known."""
        picture = self.pictures.get(cluster)
        if picture is None or not (picture.enforced and picture.qos):
            return True
        # slurmdbd has names in lower case unless told otherwise.
        return bool({f"{account}/{user}", f"{account}/{user.lower()}"} & picture.qos.keys())

    def is_exempt(self, cluster: str, uid: int, user: str) -> bool:
        """Whether a user's jobs are never refused."""
        return (
            uid == 0
            or user in self._exempt
            or (bool(user) and user in self._admins.get(cluster, ()))
        )

    def policy(self, cluster: str, partitions: str) -> Policy:
        """What becomes of a job that cannot be decided on: the strictest of its partitions'."""
        policies = {
            (own.policy if own else None) or self.settings.gate.policy
            for name in (partitions[:LONGEST] or self.default_partition(cluster)).split(",")
            for own in (self.bank.partition.get(name),)
        }
        return "deny" if "deny" in policies else "allow"

    def zone(self, cluster: str) -> tzinfo:
        """The zone in which a cluster's users are told times."""
        picture = self.pictures.get(cluster)
        try:
            return zone_called(picture.zone if picture else "")
        except TimeError:
            return UTC  # the settings' own check has said that there is no such zone


def chosen_mode(
    rules: Iterable[ModeRule], cluster: str, partition: str, account: str
) -> Mode | None:
    """The mode that was set by the rule that names most of these; None where none fits."""
    best = -1
    mode: Mode | None = None
    for rule in rules:
        if (
            rule.cluster in ("", cluster)
            and rule.partition in ("", partition)
            and rule.account in ("", account)
            and _rank(rule) >= best
        ):
            best, mode = _rank(rule), rule.mode
    return mode


def moment(at_us: int) -> datetime:
    """A time given in µs since the epoch."""
    return datetime.fromtimestamp(at_us / 1e6, UTC)


def _rank(rule: ModeRule) -> int:
    return 4 * bool(rule.account) + 2 * bool(rule.partition) + bool(rule.cluster)
