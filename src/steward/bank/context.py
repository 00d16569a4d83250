"""What the bank's actions work with: the ledger, the gate, and who may see or do what.

Everything is opened when it is first needed. An action shows nobody's money past
:class:`Rights`, which is made here and nowhere else.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from steward.bank.errors import BankRefused, BankUsage, GateUnavailable
from steward.bank.ledger import By, open_ledger
from steward.bank.money import Unit
from steward.core.access import Access, Asker
from steward.core.actions import Answer
from steward.core.config import Settings
from steward.core.errors import StewardError
from steward.core.events import utc_now
from steward.slurm.times import TimeError, parse_time, zone_called

if TYPE_CHECKING:
    from steward.bank.gate.client import GateLink
    from steward.bank.gate.requests import Means
    from steward.bank.ledger.ledger import Ledger, Transaction
    from steward.jobs import Jobs
    from steward.slurm.cluster_model import Picture


log = logging.getLogger(__name__)

_GATE_S: Final = 5.0


class BankAnswer(Answer, frozen=True, kw_only=True):
    """What the bank's answers have in common; amounts in them are micro-SU.

    Attributes:
        unit: What a unit is called here.
        decimals: How many decimals amounts are shown with.
        zone: IANA name of the zone that times are shown in; "" for the system's.
    """

    unit: str = "SU"
    decimals: int = 2
    zone: str = ""


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody may see and do in the bank.

    Attributes:
        user: Their name; "" for nobody's.
        is_operator: Whether they may see and do everything.
        led: Accounts that they own or coordinate, and all below these: all of it is shown.
        inside: Accounts that they are a user of: they see what it has, and their own use.
    """

    user: str
    is_operator: bool = False
    led: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()

    def sees(self, account: str) -> bool:
        """Whether they may know what the account has."""
        return self.leads(account) or account in self.inside

    def leads(self, account: str) -> bool:
        """Whether they may see all that is done with the account, and set its users' limits."""
        return self.is_operator or account in self.led

    def need_operator(self, what: str) -> None:
        """Refuse whoever is none.

        Raises:
            BankRefused: They are no operator.
        """
        if not self.is_operator:
            raise BankRefused(f"only operators may {what}", self.user)

    def need_sight(self, account: str) -> None:
        """Refuse whoever may not know what the account has; as if there were none.

        Raises:
            BankRefused: They may not.
        """
        if not self.sees(account):
            # Who has only an association in Slurm may charge it, and is not shown what it has.
            raise BankRefused(
                f"you are in no account {account!r} as far as the bank knows, which takes users "
                "in when they are first charged: until then ask its owner, who can name you by "
                f"'steward bank user create {account} {self.user or 'NAME'}'",
                account,
            )

    def only_user(self, account: str, user: str) -> str:
        """Whose use of an account may be shown, where that of ``user`` ("" for all) is wanted.

        Args:
            account: The account; "" for all.
            user: As asked for.

        Raises:
            BankRefused: It is somebody else's.
        """
        if self.leads(account) or (user and user == self.user):
            return user
        if user:
            raise BankRefused(f"what {user} used is for owners of the account to see", user)
        if not self.user:
            raise BankRefused("your uid has no name: nothing here can be known to be yours")
        return self.user


def accounts_led(settings: Settings) -> Callable[[str, frozenset[str]], frozenset[str]] | None:
    """Tells which of the bank's accounts somebody leads, as Access takes it; None without a bank.

    The ledger is asked once a minute at most, also by a process that streams events for long.
    """
    if not settings.bank.enabled:
        return None

    @functools.lru_cache(maxsize=256)
    def read(user: str, coordinated: frozenset[str], _minute: int) -> frozenset[str]:
        try:
            with contextlib.closing(open_ledger(settings)) as ledger, ledger.reading() as t:
                return t.accounts.led_by(user, coordinated)
        except StewardError as error:
            log.warning("%s sees no more than their own: the ledger is away: %s", user, error)
            return coordinated

    return lambda user, coordinated: read(user, coordinated, int(time.monotonic() / 60))


class BankRoom:
    """The context of the bank's actions; to be used by one thread at a time.

    Args:
        settings: The whole configuration.
        access: The decisions.
        now: The clock.
        picture: Shows a cluster; asks its Slurm if None.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        access: Access,
        now: Callable[[], datetime] = utc_now,
        picture: "Callable[[str], Picture] | None" = None,
    ) -> None:
        self.settings = settings
        self.access = access
        self.now = now
        self.picture = picture or self._pictured
        self.unit = Unit(settings.bank.unit, settings.bank.decimals)
        self._ledger: Ledger | None = None
        self._jobs: Jobs | None = None

    @property
    def ledger(self) -> "Ledger":
        """The ledger.

        Raises:
            BankUsage: There is no bank here.
            LedgerUnavailable: Its database is away.
        """
        if self._ledger is None:
            if not self.settings.bank.enabled:
                raise BankUsage("there is no bank here: set 'enabled = true' in [bank]")
            if not self.settings.bank.database:
                _make_theirs(self.settings.state_dir)
            self._ledger = open_ledger(self.settings, self.now)
        return self._ledger

    @property
    def gate(self) -> "GateLink":
        """The process that decides."""
        from steward.bank.gate.client import GateLink

        return GateLink(self.settings.state_dir, _GATE_S)

    @property
    def jobs(self) -> "Jobs":
        """jobs.db.

        Raises:
            SqliteUnavailable: There is none yet.
        """
        from steward.jobs import Jobs, database_path

        if self._jobs is None:
            self._jobs = Jobs(database_path(self.settings.state_dir))
        return self._jobs

    @property
    def clusters(self) -> tuple[str, ...]:
        """The clusters of the configuration."""
        return tuple(self.settings.cluster)

    def cluster(self, name: str) -> str:
        """The cluster that is meant: the configuration's first where none is named.

        Raises:
            BankUsage: It is not in the configuration.
        """
        if name and name not in self.settings.cluster:
            known = ", ".join(self.clusters)
            raise BankUsage(f"there is no cluster {name!r}: the configuration has {known}", name)
        return name or next(iter(self.clusters), "")

    def zone(self, cluster: str = "") -> str:
        """IANA name of a cluster's zone, the first one's if none is named; "" for the system's."""
        known = self.settings.cluster.get(cluster or next(iter(self.clusters), ""))
        return known.timezone if known else ""

    def moment(self, text: str, zone: str = "") -> datetime | None:
        """The moment that a text means, in UTC; None for "".

        Raises:
            BankUsage: It is no time.
        """
        if not text:
            return None
        try:
            found = parse_time(text, self.now(), zone_called(zone or self.zone()))
        except TimeError as error:
            raise BankUsage(str(error), text) from error
        return found.astimezone(UTC)

    def heading(self) -> dict[str, Any]:
        """The fields that every answer has."""
        return {"unit": self.unit.name, "decimals": self.unit.decimals, "zone": self.zone()}

    def by(self, asker: Asker, why: str, key: str = "") -> By:
        """Who does something: the asker, as the books will name them."""
        return By(who=asker.user or str(asker.uid), why=why, key=key, at=self.now())

    def rights(self, asker: Asker, t: "Transaction") -> Rights:
        """What the asker may see and do."""
        if self.access.is_operator(asker, "") or (
            self.clusters and all(self.access.is_operator(asker, name) for name in self.clusters)
        ):
            return Rights(user=asker.user, is_operator=True)
        if not asker.user:
            return Rights(user="")
        coordinated = [self.access.coordinated(asker, cluster) for cluster in self.clusters]
        led = t.accounts.led_by(asker.user, frozenset().union(*coordinated))
        inside = frozenset(member.account for member in t.accounts.of_user(asker.user))
        return Rights(user=asker.user, led=led, inside=inside)

    def means(self, account: str, user: str = "") -> "Means | None":
        """What the gate knows of an account; None where it does not answer, or not of that."""
        try:
            return self.gate.means(account, user)
        except GateUnavailable as error:
            log.debug("%s: %s", account, error)
        except BankUsage as error:
            log.debug("the gate does not know %s yet: %s", account, error)
        return None

    def tell_gate(self, after: int, *, rules: bool = False) -> bool:
        """Let the gate know at once what has changed; the daemon tells it soon otherwise.

        Args:
            after: Position of the ledger before the change.
            rules: Whether rates or modes have changed.

        Returns:
            Whether the gate knows now.
        """
        gate = self.gate
        try:
            with self.ledger.reading() as t:
                books = t.books(after)
                known = gate.books(books)
                if known < books.seq:
                    gate.books(t.books(known))
                if rules:
                    gate.rules(t.rules())
        except GateUnavailable as error:
            log.debug("the gate is told later: %s", error)
            return False
        return True

    def asked_since(self, since: datetime) -> str:
        """What is to be said where no submit plugin has asked the gate since; "" where one has.

        Where the gate does not answer, or decides on another host, nothing is known of it.
        """
        try:
            state = self.gate.state()
        except GateUnavailable as error:
            log.debug("when plugins asked is not known: %s", error)
            return ""
        last = datetime.fromtimestamp(state.asked_at_us / 1e6, UTC)
        if last >= since:
            return ""
        when = f"since {last:%Y-%m-%dT%H:%MZ}" if state.asked_at_us else "yet"
        named = self._submit_plugins()
        if named:
            return (
                f"slurmctld has not asked the gate {when}, though slurm.conf names {named}: no job "
                "was submitted, or slurmctld was not restarted. 'steward plugins check "
                "--job-submit-lua DIR' tells which"
            )
        return (
            f"slurmctld has not asked the gate {when}, so no submission can be refused: "
            "'steward plugins install --job-submit-lua DIR' installs the submit plugin, which "
            "slurm.conf has to name"
        )

    def _submit_plugins(self) -> str:
        """Plugins in JobSubmitPlugins of this site's clusters that can ask; "" for none known."""
        from steward.bank.gate.plugin_conf import ASKING_PLUGINS, plugins_of
        from steward.slurm import Slurm, SlurmError

        named: list[str] = []
        for name, of in self.settings.cluster.items():
            if not of.asks_slurm:
                continue
            try:
                plugins = plugins_of(Slurm(name, of).config())
            except SlurmError as error:
                log.debug("JobSubmitPlugins of cluster %s is not known: %s", name, error)
                continue
            named += [f"job_submit/{one}" for one in plugins if one in ASKING_PLUGINS]
        return ", ".join(dict.fromkeys(named))

    @property
    def has_gate(self) -> bool:
        """Whether a gate has ever run here, so that money may be held that the ledger has."""
        return os.path.exists(os.path.join(self.settings.state_dir, "gate.db"))

    def close(self) -> None:
        """Let go of everything."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None

    def _pictured(self, cluster: str) -> "Picture":
        from steward.slurm import Slurm

        settings = self.settings.cluster[cluster]
        return Slurm(cluster, settings).picture(settings.timezone)


def _make_theirs(state_dir: str) -> None:
    """Where root asks first, let the ledger's file belong to Steward's user all the same."""
    if os.geteuid() != 0:
        return
    path = os.path.join(state_dir, "ledger.db")
    try:
        owner = os.stat(state_dir)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        # It is there already, or what is wrong is said when it is opened.
        return
    try:
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
    finally:
        os.close(descriptor)
