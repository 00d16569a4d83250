"""Settings of the bank: [bank], [bank.notify], [bank.remote], [gate] and their subsections.

Rates, accounts, allocations and modes are not settings: they change while Steward runs, and are
stored in the ledger.
"""

from typing import Final, Literal

import msgspec

from steward.core.section import Section, TlsReference

UnpaidRule = Literal["warn", "hold", "cancel", "credit"]
"""What happens to a queued job with insufficient funds."""

OutagePolicy = Literal["allow", "deny"]
"""Outage policy: what the submit plugin does when the gate does not answer."""

MAX_GATE_TIMEOUT_MS: Final = 1000
"""Maximum of ``[gate] timeout_ms``: slurmctld holds locks while the plugin waits. Both plugins
ignore a longer one, and the gate drops a plugin's connection after this time."""


class BankPartitionSettings(Section, frozen=True, kw_only=True):
    """[bank.partition.NAME]: settings that differ for one partition.

    Attributes:
        unpaid: Treatment of a queued job with insufficient funds; if unset, as in [bank].
        policy: Outage policy for jobs in this partition; if unset, as in [gate].
        over_limit: Price of the time past the time limit; if unset, as in [bank].
    """

    unpaid: UnpaidRule | None = None
    policy: OutagePolicy | None = None
    over_limit: Literal["free", "charge"] | None = None


class RejectionSettings(Section, frozen=True, kw_only=True):
    """[bank.rejection.ACCOUNT]: QOS or partition of an account's jobs instead of a rejection.

    Attributes:
        qos: QOS under which the gate admits the job, with a message; if empty, the requested one.
        partition: Partition in which it admits the job, with a message; if empty, the requested
            one.
    """

    qos: str = ""
    partition: str = ""


class NotifySettings(Section, frozen=True, kw_only=True):
    """[bank.notify]: recipients of threshold notices and statements. Mail is sent as in [mail].

    Attributes:
        owners: Whether an account's owners get mail.
        mail: Addresses that get every notice.
        webhook: URL that every notice is posted to as JSON; "" for none.
        statements: Whether owners get a monthly statement by mail.
        domain: Mail domain appended to user names of owners.
    """

    owners: bool = True
    mail: tuple[str, ...] = ()
    webhook: str = ""
    statements: bool = False
    domain: str = ""


class RemoteBankSettings(Section, frozen=True, kw_only=True):
    """[bank.remote]: remote myBRC server that receives holds and charges.

    Attributes:
        url: URL of its API (``https://host/mybrc-rest``); empty disables reports.
        token_file: File that holds the token for ``Authorization: Token …``.
        tls: Name of a table ``[tls.NAME]`` for ``https``; if empty, the system's CA certificates.
        balance_age_s: Maximum age of an account's balance from the server, in seconds; for an
            older one ``[gate] policy`` applies. Steward polls the server, and sets the ledger's
            balances accordingly. 0 leaves balances to the ledger.
    """

    url: str = ""
    token_file: str = ""
    tls: TlsReference = None
    balance_age_s: float = 0.0

    @property
    def balances(self) -> bool:
        """Return True if account balances come from the server."""
        return self.balance_age_s > 0


class BankSettings(Section, frozen=True, kw_only=True):
    """[bank]: service units, accounts, and prices of jobs.

    Attributes:
        enabled: Whether the bank is enabled.
        database: SQLAlchemy URL of the ledger (``postgresql+psycopg://steward@db/steward``);
            ``<state_dir>/ledger.db`` if empty.
        password_file: File that holds the database's password.
        unit: Name of the unit.
        decimals: Number of decimals that amounts are shown with, 0 to 6.
        unknown_accounts: Decision about jobs under accounts that the bank does not have:
            ``reject`` or ``allow``.
        default_account: Account of jobs that name none, if no slurmdbd has a default.
        exempt: Users whose jobs are never rejected, in addition to root, SlurmUser and
            operators; their jobs are priced and charged as usual.
        hold_share: Share of an account's balance and credit that one user's holds may take, of 1.
        arrays: Whether an array's hold covers all its tasks (``full``), those that may run
            at once (``running``), or each task when it starts (``start``).
        unpaid: Treatment of a queued job with insufficient funds: ``hold``, ``cancel``, ``credit``
            or ``warn``, see docs/bank-operate.md.
        over_limit: Price of time past the time limit, as far as Slurm tolerates it: ``free``, or
            ``charge`` as before it.
        suspended: Whether suspended time is charged.
        warn_percent: Used shares of an allocation, in percent, at which notices are sent.
        warn_days: Days before an allocation's end at which a notice is sent.
        reconcile_s: Interval of reconciliation with Slurm's records, in seconds.
        without_ledger_s: Longest time the gate decides without the ledger, in seconds.
        partition: Settings that differ for some partitions, by name.
        rejection: QOS or partition instead of a rejection, by account.
    """

    enabled: bool = False
    database: str = ""
    password_file: str = ""
    unit: str = "SU"
    decimals: int = 2
    unknown_accounts: Literal["allow", "reject"] = "reject"
    default_account: str = ""
    exempt: tuple[str, ...] = ()
    hold_share: float = 1.0
    arrays: Literal["full", "running", "start"] = "full"
    unpaid: UnpaidRule = "hold"
    over_limit: Literal["free", "charge"] = "free"
    suspended: bool = False
    warn_percent: tuple[int, ...] = (75, 90, 100)
    warn_days: int = 30
    reconcile_s: float = 60.0
    without_ledger_s: float = 3600.0
    partition: dict[str, BankPartitionSettings] = msgspec.field(default_factory=dict)
    rejection: dict[str, RejectionSettings] = msgspec.field(default_factory=dict)
    notify: NotifySettings = NotifySettings()
    remote: RemoteBankSettings = RemoteBankSettings()


class GateSettings(Section, frozen=True, kw_only=True):
    """[gate]: process that slurmctld's submit plugin asks.

    Attributes:
        policy: Outage policy, if the gate does not answer: ``allow`` or ``deny`` the job.
        timeout_ms: Longest wait of the plugin, connection included, in milliseconds.
        plugin_users: Users that the plugin may run as, in addition to root and Steward's user.
        listen: Address and port on which gates of other hosts ask this one; none if empty. A
            gate's certificate must name one of the ``controllers`` of each cluster it asks for.
        ask: Address and port of the gate that decides, if it is another one.
        tls: Name of a table ``[tls.NAME]``, for both: with ``client_ca_file`` where this gate
            listens, ``ca_file`` where it asks.
    """

    policy: OutagePolicy = "allow"
    timeout_ms: int = 100
    plugin_users: tuple[str, ...] = ("slurm",)
    listen: str = ""
    ask: str = ""
    tls: TlsReference = None
