"""The settings of the bank: the ledger, what is priced how, the gate, and the myBRC API.

Rates, accounts, allocations and the mode of enforcement are not settings: they
change while Steward runs, and stand in the ledger.
"""

from typing import Literal

import msgspec

from steward.core.section import Section

Unpaid = Literal["warn", "hold", "cancel", "credit"]
"""What becomes of a job in the queue that its account cannot pay."""

Policy = Literal["allow", "deny"]
"""What the submit plugin does where the gate does not answer."""


class BankPartitionSettings(Section, frozen=True, kw_only=True):
    """[bank.partition.NAME]: what differs for one partition.

    Attributes:
        unpaid: As in [bank]; as there if None.
        policy: What the plugin does with jobs for it while the gate does not answer; as in
            [gate] if None.
        over_limit: As in [bank]; as there if None.
    """

    unpaid: Unpaid | None = None
    policy: Policy | None = None
    over_limit: Literal["free", "charge"] | None = None


class RefusalSettings(Section, frozen=True, kw_only=True):
    """[bank.refusal.ACCOUNT]: what a refusal does there, in place of refusing.

    Attributes:
        qos: The job is let in under this QOS, and its user is told; "" to leave it.
        partition: The job is sent to this partition, and its user is told; "" to leave it.
    """

    qos: str = ""
    partition: str = ""


class NotifySettings(Section, frozen=True, kw_only=True):
    """[bank.notify]: who is told of thresholds and statements. Mail goes by [mail].

    Attributes:
        owners: Whether an account's owners get mail.
        mail: Addresses that get every notice.
        webhook: URL that every notice is posted to as JSON; "" for none.
        statements: Whether owners get a statement by mail each month.
        domain: Behind the user names of owners without an address of their own.
    """

    owners: bool = True
    mail: tuple[str, ...] = ()
    webhook: str = ""
    statements: bool = False
    domain: str = ""


class RemoteBankSettings(Section, frozen=True, kw_only=True):
    """[bank.remote]: a myBRC server elsewhere that is told of holds and charges.

    Attributes:
        url: Where its API begins (``https://host/mybrc-rest``); nobody is told if empty.
        token_file: A file that holds the token for ``Authorization: Token …``.
        ca_file: Certificates that the server's is checked against; the system's if empty.
        timeout_s: How long one request may take, in seconds.
        balances: Whether accounts have what the server says, which is asked all the time, and
            the ledger's balances follow it.
        balance_age_s: How old an account's balance may be, in seconds; for an older one
            ``[gate] policy`` decides.
    """

    url: str = ""
    token_file: str = ""
    ca_file: str = ""
    timeout_s: float = 30.0
    balances: bool = False
    balance_age_s: float = 1800.0


class BankSettings(Section, frozen=True, kw_only=True):
    """[bank]: service units, accounts, and what jobs cost.

    Attributes:
        enabled: Whether there is a bank.
        database: SQLAlchemy URL of the ledger (``postgresql+psycopg://steward@db/steward``);
            ``<state_dir>/ledger.db`` if empty.
        password_file: A file that holds the database's password.
        unit: What one unit is called.
        decimals: How many decimals amounts are shown with, 0 to 6.
        unknown_accounts: Whether jobs under accounts that the bank does not know are let in.
        default_account: Account of jobs that name none, where no slurmdbd knows one.
        exempt: Users whose jobs are never refused, beside root, SlurmUser and operators;
            they are priced and charged as everybody's.
        hold_share: How much of an account's means one user's holds may take, of 1.
        unseen_share: How much of what an account has free may be held for jobs of a user that
            Slurm does not show yet, of 1, where a number of theirs came to nothing; 1 for all.
        arrays: Whether an array's hold covers all its tasks (``full``), those that may run
            at once (``running``), or each task when it starts (``start``).
        unpaid: What becomes of a queued job whose account cannot pay.
        over_limit: Whether time past the time limit is charged.
        suspended: Whether suspended time is charged.
        default_time_s: Time limit assumed where neither job nor partition has one, in seconds.
        warn_percent: Shares of an allocation, in percent, that are told when they are used.
        warn_days: Days before an allocation's end at which that is told.
        reconcile_s: Seconds between two comparisons with Slurm's own records.
        without_ledger_s: How long the gate goes on without the ledger, in seconds.
        partition: What differs for some partitions, by name.
        refusal: What refusals do for some accounts, by name.
    """

    enabled: bool = False
    database: str = ""
    password_file: str = ""
    unit: str = "SU"
    decimals: int = 2
    unknown_accounts: Literal["allow", "refuse"] = "refuse"
    default_account: str = ""
    exempt: tuple[str, ...] = ()
    hold_share: float = 1.0
    unseen_share: float = 0.1
    arrays: Literal["full", "running", "start"] = "full"
    unpaid: Unpaid = "hold"
    over_limit: Literal["free", "charge"] = "free"
    suspended: bool = False
    default_time_s: int = 86_400
    warn_percent: tuple[int, ...] = (75, 90, 100)
    warn_days: int = 30
    reconcile_s: float = 60.0
    without_ledger_s: float = 3600.0
    partition: dict[str, BankPartitionSettings] = msgspec.field(default_factory=dict)
    refusal: dict[str, RefusalSettings] = msgspec.field(default_factory=dict)
    notify: NotifySettings = NotifySettings()
    remote: RemoteBankSettings = RemoteBankSettings()


class GateSettings(Section, frozen=True, kw_only=True):
    """[gate]: the process that slurmctld's submit plugin asks.

    Attributes:
        socket: The Unix socket that the plugin asks through.
        off_switch: While this file is there the plugin admits everything, the daemon dead or not,
            and no job is held or cancelled that cannot be paid.
        plugin_conf: The file that the plugin reads its policy from; the gate keeps it written.
        policy: What the plugin does where the gate does not answer.
        timeout_ms: How long the plugin waits, connection included, in milliseconds.
        quiet_s: How long it does not ask after that, in seconds.
        plugin_users: Users that the plugin may run as, beside root and our own user.
        listen: Address and port where gates on other hosts ask this one; none if empty.
        ask: Address and port of the gate that decides, where that is another one.
        certificate_file: Our certificate, for both.
        key_file: The key of that certificate.
        ca_file: Certificates that the other side's is checked against.
    """

    socket: str = "/run/steward/gate.sock"
    off_switch: str = "/run/steward/gate.off"
    plugin_conf: str = "/run/steward/gate.conf"
    policy: Policy = "allow"
    timeout_ms: int = 100
    quiet_s: float = 10.0
    plugin_users: tuple[str, ...] = ("slurm",)
    listen: str = ""
    ask: str = ""
    certificate_file: str = ""
    key_file: str = ""
    ca_file: str = ""
