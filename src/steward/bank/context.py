"""Context of the bank's actions: ledger, gate, jobs, cluster names, and access rights.

- :class:`BankReply` is the base of all replies.
- :class:`Rights` decides what a caller may see and change. It is made only here, and no action
  shows amounts without it.
- :func:`make_led_accounts_reader` tells ``steward.core.access`` which accounts a user leads.
- :class:`BankContext` is what each action gets; it opens each resource on first use.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from steward.bank.errors import BankRefused, BankUsage, GateUnavailable
from steward.bank.ledger import Authorship, open_ledger
from steward.bank.money import Unit, format_money
from steward.core.access import Access, Caller
from steward.core.actions import Answer, argument, option
from steward.core.config import Settings
from steward.core.databases import GATE, LEDGER
from steward.core.errors import StewardError
from steward.core.events import utc_now
from steward.slurm.times import TimeError, load_zone, parse_time

if TYPE_CHECKING:
    from steward.bank.gate.client import GateClient
    from steward.bank.gate.requests import AccountMeans
    from steward.bank.ledger.ledger import Ledger, Transaction
    from steward.jobs import Jobs
    from steward.slurm.cluster_model import ClusterModel


log = logging.getLogger(__name__)

_GATE_TIMEOUT_S: Final = 5.0
"""Time-out of requests to the gate, in seconds."""


GATE_UNAWARE: Final = (
    "The gate has not applied the change yet. The daemon sends it as soon as both run."
)
"""Note of a reply whose change the gate does not apply yet."""


NO_ACCOUNTS: Final = "No accounts that you use or manage match."
"""Reason why a list of accounts, or of their users and allocations, is empty."""


AccountName = Annotated[str, argument("Name of the account.", "ACCOUNT")]
JobName = Annotated[str, argument("Id of the job: 123, 123_7, 123+1.", "JOB")]
Amount = Annotated[int, argument("Amount, such as 1250 or 0.5.", "AMOUNT", unit="money")]
Reason = Annotated[
    str,
    option("Reason, recorded in the ledger.", "--reason", metavar="TEXT", max_length=1000),
]
Key = Annotated[
    str,
    option(
        "Idempotency key: Steward makes a change only once under the same key.",
        "--key",
        metavar="TEXT",
        source="key",
    ),
]
Cluster = Annotated[
    str,
    option("Cluster.", "--cluster", "-M", metavar="NAME", default="the first in the configuration"),
]
ClusterFilter = Annotated[str, option("Only this cluster.", "--cluster", "-M", metavar="NAME")]
AccountFilter = Annotated[str, option("Only this account.", "--account", "-A", metavar="NAME")]
UserFilter = Annotated[str, option("Only jobs of this user.", "--user", "-u", metavar="NAME")]


def annotate_since(description: str, default: str = "") -> msgspec.Meta:
    """Annotate a field that people give as the start of a period."""
    return option(description, "--starttime", "--since", "-S", metavar="TIME", default=default)


UNTIL: Final = option(
    "End of the period, exclusive.", "--endtime", "--until", "-E", metavar="TIME", default="now"
)
"""Annotation of the end of a period."""


class BankReply(Answer, frozen=True, kw_only=True):
    """Base of the bank's replies; amounts are micro-SU.

    Attributes:
        unit: Name of the unit at this site.
        decimals: Number of decimals that amounts are shown with.
        zone: IANA time zone that times are shown in; "" for the system's.
    """

    unit: str = "SU"
    decimals: int = 2
    zone: str = ""

    def format_amount(self, amount: int) -> str:
        """Format an amount for people, without its unit."""
        return format_money(amount, Unit("", self.decimals)).strip()

    def format_with_unit(self, amount: int) -> str:
        """Format an amount for people, with its unit."""
        return format_money(amount, Unit(self.unit, self.decimals))


class ChangeReply(BankReply, frozen=True, kw_only=True):
    """Base of replies to changes of the ledger.

    Attributes:
        gate_knows: Whether the gate already applies the change; otherwise it does soon. None if
            nothing was changed.
    """

    gate_knows: bool | None = None

    def list_notes(self) -> Iterable[str]:
        """Return that the gate does not apply a change yet."""
        return (GATE_UNAWARE,) if self.gate_knows is False else ()


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """Access rights of a caller in the bank.

    Attributes:
        user: Name of the user; "" if the uid has none.
        is_operator: Whether they may see and change everything.
        led: Accounts they own or coordinate, with all below: they see everything there.
        inside: Accounts they are a user of: they see the balance and their own usage.
    """

    user: str
    is_operator: bool = False
    led: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()

    def can_see_balance(self, account: str) -> bool:
        """Return True if they may see the account's balance."""
        return self.is_led(account) or account in self.inside

    def is_led(self, account: str) -> bool:
        """Return True if they may see all transfers of the account and set its users' limits."""
        return self.is_operator or account in self.led

    def require_operator(self, action: str) -> None:
        """Reject callers who are not operators.

        Raises:
            BankRefused: The caller is not an operator.
        """
        if not self.is_operator:
            raise BankRefused(f"permission denied: only operators may {action}", self.user)

    def require_balance_access(self, account: str) -> None:
        """Reject callers who may not see the account's balance, as if it did not exist.

        Raises:
            BankRefused: The caller may not see it.
        """
        if not self.can_see_balance(account):
            # A user with only an association in Slurm may charge it, but not see its balance.
            raise BankRefused(
                f"permission denied: the bank does not list you in account {account!r}. It "
                "adds users at their first charge; before that, ask an owner to run 'steward "
                f"bank user create {account} {self.user or 'NAME'}'",
                account,
            )

    def limit_to_user(self, account: str, user: str) -> str:
        """Return the user whose usage of an account may be shown, for the requested ``user``.

        Args:
            account: The account; "" for all.
            user: The requested user; "" for all.

        Raises:
            BankRefused: The requested usage is another user's.
        """
        if self.is_led(account) or (user and user == self.user):
            return user
        if user and account:
            raise BankRefused(
                f"permission denied: you neither own nor coordinate account {account!r}, so you "
                f"may not see the charges of {user}. An operator adds owners with 'steward bank "
                f"account change {account} --owners USER,…'",
                user,
            )
        if user:
            raise BankRefused(
                f"permission denied: only operators may see the charges of {user} in all accounts. "
                "Name an account that you own or coordinate",
                user,
            )
        if not self.user:
            raise BankRefused(
                "permission denied: your uid has no user name on the daemon's host, so no accounts "
                "are yours"
            )
        return self.user


def make_led_accounts_reader(
    settings: Settings,
) -> Callable[[str, frozenset[str]], frozenset[str]]:
    """Return a function that lists the accounts a user leads, for Access.

    It reads the ledger at most once a minute, also in a process that streams events for long.
    """

    @functools.lru_cache(maxsize=256)
    def read(user: str, coordinated: frozenset[str], _minute: int) -> frozenset[str]:
        try:
            with contextlib.closing(open_ledger(settings)) as ledger, ledger.reading() as t:
                return t.accounts.list_led_by(user, coordinated)
        except StewardError as error:
            log.warning(
                "%s sees only coordinated accounts, because the ledger is unavailable: %s",
                user,
                error,
            )
            return coordinated

    return lambda user, coordinated: read(user, coordinated, int(time.monotonic() / 60))


class BankContext:
    """Context of the bank's actions; use it from one thread at a time.

    Args:
        settings: The whole configuration.
        access: Decides on roles and scopes.
        now: The clock.
        get_model: Returns the model of a cluster; None to ask its Slurm.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        access: Access,
        now: Callable[[], datetime] = utc_now,
        get_model: "Callable[[str], ClusterModel] | None" = None,
    ) -> None:
        self.settings = settings
        self.access = access
        self.now = now
        self.get_model = get_model or self._query_model
        self.unit = Unit(settings.bank.unit, settings.bank.decimals)
        self._ledger: Ledger | None = None
        self._jobs: Jobs | None = None

    @property
    def ledger(self) -> "Ledger":
        """Return the ledger, opened on first use.

        Raises:
            BankUsage: No bank is configured.
            LedgerUnavailable: Its database is unreachable.
        """
        if self._ledger is None:
            if not self.settings.bank.enabled:
                raise BankUsage("the bank is disabled: set 'enabled = true' in [bank]")
            if not self.settings.bank.database:
                from steward.core.sqlite import create_for_owner

                create_for_owner(LEDGER.locate(self.settings.state_dir))
            self._ledger = open_ledger(self.settings, self.now)
        return self._ledger

    @property
    def gate(self) -> "GateClient":
        """Return a client of the gate."""
        from steward.bank.gate.client import GateClient

        return GateClient(self.settings.state_dir, _GATE_TIMEOUT_S)

    @property
    def jobs(self) -> "Jobs":
        """Return the job records of jobs.db.

        Raises:
            SqliteUnavailable: The database does not exist yet.
        """
        from steward.jobs import Jobs, database_path

        if self._jobs is None:
            self._jobs = Jobs(database_path(self.settings.state_dir))
        return self._jobs

    @property
    def clusters(self) -> tuple[str, ...]:
        """Return the names of the configured clusters."""
        return tuple(self.settings.cluster)

    def resolve_cluster(self, name: str) -> str:
        """Return the cluster of this name; the first configured one for "".

        Raises:
            BankUsage: The configuration has no such cluster.
        """
        if name and name not in self.settings.cluster:
            names = ", ".join(self.clusters)
            raise BankUsage(f"unknown cluster {name!r}: the configuration has {names}", name)
        return name or next(iter(self.clusters), "")

    def get_time_zone(self, cluster: str = "") -> str:
        """Return a cluster's IANA time zone (the first one's for ""); "" for the system's."""
        cluster_settings = self.settings.cluster.get(cluster or next(iter(self.clusters), ""))
        return cluster_settings.timezone if cluster_settings else ""

    def parse_moment(self, text: str, zone: str = "") -> datetime | None:
        """Parse a time as people type it into UTC; None for "".

        Raises:
            BankUsage: It is not a time.
        """
        if not text:
            return None
        try:
            parsed = parse_time(text, self.now(), load_zone(zone or self.get_time_zone()))
        except TimeError as error:
            raise BankUsage(str(error), text) from error
        return parsed.astimezone(UTC)

    def make_heading(self) -> dict[str, Any]:
        """Return the fields common to all replies."""
        return {
            "unit": self.unit.name,
            "decimals": self.unit.decimals,
            "zone": self.get_time_zone(),
        }

    def make_authorship(self, asker: Caller, why: str, key: str = "") -> Authorship:
        """Return author, reason and key for a change by the caller."""
        return Authorship(who=asker.signature, why=why, key=key, at=self.now())

    def get_rights(self, asker: Caller, t: "Transaction") -> Rights:
        """Return the access rights of the caller."""
        if self.access.is_operator(asker, "") or (
            self.clusters and all(self.access.is_operator(asker, name) for name in self.clusters)
        ):
            return Rights(user=asker.user, is_operator=True)
        if not asker.user:
            return Rights(user="")
        coordinated = [self.access.list_coordinated(asker, cluster) for cluster in self.clusters]
        led = t.accounts.list_led_by(asker.user, frozenset().union(*coordinated))
        inside = frozenset(member.account for member in t.accounts.list_of_user(asker.user))
        return Rights(user=asker.user, led=led, inside=inside)

    def get_means(self, account: str, user: str = "") -> "AccountMeans | None":
        """Return the gate's data on an account; None if it does not answer or know it."""
        try:
            return self.gate.get_means(account, user)
        except GateUnavailable as error:
            log.debug("%s: %s", account, error)
        except BankUsage as error:
            log.debug("cannot report %s to the gate yet: %s", account, error)
        return None

    def update_gate(self, after: int, *, rules: bool = False) -> bool:
        """Send changes of the ledger to the gate at once; the daemon sends them soon otherwise.

        Args:
            after: Position of the ledger before the change.
            rules: Whether rates or modes have changed.

        Returns:
            Whether the gate has the changes now.
        """
        gate = self.gate
        try:
            with self.ledger.reading() as t:
                books = t.export_books(after)
                position = gate.send_books(books)
                if position < books.seq:
                    gate.send_books(t.export_books(position))
                if rules:
                    gate.send_rules(t.export_rules())
        except GateUnavailable as error:
            log.debug("cannot notify the gate, retrying later: %s", error)
            return False
        return True

    def warn_if_unasked(self, since: datetime) -> str:
        """Return a warning if no submit plugin has asked the gate since a time, else "".

        If the gate does not answer, or decides on another host, nothing is known about that.
        """
        try:
            state = self.gate.get_status()
        except GateUnavailable as error:
            log.debug("cannot read the times of plugin requests: %s", error)
            return ""
        last = datetime.fromtimestamp(state.asked_at_us / 1e6, UTC)
        if last >= since:
            return ""
        when = f"since {last:%Y-%m-%dT%H:%MZ}" if state.asked_at_us else "yet"
        plugins = self._submit_plugins()
        if plugins:
            return (
                f"slurmctld has not asked the gate {when}, although slurm.conf lists "
                f"{plugins}: nobody submitted a job, or slurmctld was not restarted. 'steward "
                "plugins check --job-submit-lua DIR' shows which"
            )
        return (
            f"slurmctld has not asked the gate {when}, so the gate rejects no submission: run "
            "'steward plugins install --job-submit-lua DIR', and add the plugin to slurm.conf"
        )

    def _submit_plugins(self) -> str:
        """List the plugins in JobSubmitPlugins that ask the gate; "" if none is known."""
        from steward.bank.gate.plugin_conf import GATE_PLUGINS, parse_submit_plugins
        from steward.slurm import Slurm, SlurmError

        names: list[str] = []
        for name, cluster_settings in self.settings.cluster.items():
            if not cluster_settings.asks_slurm:
                continue
            try:
                plugins = parse_submit_plugins(Slurm(name, cluster_settings).config())
            except SlurmError as error:
                log.debug("cannot read JobSubmitPlugins of cluster %s: %s", name, error)
                continue
            names += [f"job_submit/{plugin}" for plugin in plugins if plugin in GATE_PLUGINS]
        return ", ".join(dict.fromkeys(names))

    @property
    def has_gate(self) -> bool:
        """Return True if a gate has ever run here, so that it may hold SU of the ledger."""
        return os.path.exists(GATE.locate(self.settings.state_dir))

    def close(self) -> None:
        """Close ledger and jobs.db."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None

    def _query_model(self, cluster: str) -> "ClusterModel":
        """Query a cluster's model from its Slurm."""
        from steward.slurm import Slurm

        settings = self.settings.cluster[cluster]
        return Slurm(cluster, settings).read_model(settings.timezone)
