"""Settings: the type of the whole configuration file, with keys, defaults and meanings.

:class:`Settings` assembles the section types that each package declares in its own settings
module, and declares here the sections of core: [archive], [redact], [access], [journal].
``reader.py`` reads TOML into it and ``checks.py`` checks it: a Settings value that they return
is complete and valid. Packages receive the part they need and read no file themselves.
"""

from typing import Any, Literal

import msgspec

from steward.accounting.settings import AccountingSettings, MailSettings
from steward.archive.settings import FilesSinkSettings
from steward.automation.settings import ActionsSettings, RulesSettings
from steward.bank.settings import BankSettings, GateSettings
from steward.capture.settings import NodesSettings, SensorSettings
from steward.core.section import Section, TlsSettings, list_values
from steward.extensions.controllers.settings import ForwardSettings, ReceiveSettings
from steward.extensions.kafka.settings import ConsumeSettings, KafkaSinkSettings
from steward.extensions.mybrc.settings import MybrcSettings
from steward.extensions.search_servers.settings import (
    ElasticsearchSinkSettings,
    OpenSearchSinkSettings,
)
from steward.slurm.settings import ClusterSettings
from steward.web.settings import WebSettings

__all__ = [
    "AccessSettings",
    "AnySinkSettings",
    "ArchiveSettings",
    "JournalSettings",
    "LogLevel",
    "RedactSettings",
    "Settings",
    "convert_to_builtins",
]

LogLevel = Literal["debug", "info", "warning", "error"]


AnySinkSettings = (
    FilesSinkSettings | ElasticsearchSinkSettings | OpenSearchSinkSettings | KafkaSinkSettings
)
"""Settings of any sink, distinguished by ``kind``; ``files`` if it has none."""


class ArchiveSettings(Section, frozen=True, kw_only=True):
    """[archive]: sinks, and what they store.

    Attributes:
        environments: Whether to archive environments beside scripts.
        catalog: Whether to index scripts for search.
        sink: Sinks by name; if none is configured, one of kind ``files``.
    """

    environments: bool = True
    catalog: bool = True
    sink: dict[str, AnySinkSettings] = msgspec.field(
        default_factory=lambda: {"files": FilesSinkSettings()}
    )


class RedactSettings(Section, frozen=True, kw_only=True):
    """[redact]: secrets that Steward never stores, in environments and job records.

    Patterns are regular expressions, matched anywhere in a variable's name (in
    any case) or in its value.

    Attributes:
        names: Patterns on names, in addition to the built-in ones.
        values: Patterns on values, in addition to the built-in ones.
        keep: Names of variables whose values are never redacted.
    """

    names: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


class AccessSettings(Section, frozen=True, kw_only=True):
    """[access]: roles in addition to those that Slurm defines.

    Attributes:
        operators: Users with the rights of operators, for sites without slurmdbd.
        administrators: Users with the rights of administrators, for sites without slurmdbd.
        coordinators_read_scripts: Whether an account's coordinators may read its scripts.
        munge_users: Users of the Stewards at the other end of [receive] and [forward], in addition
            to root and the user of this one.
    """

    operators: tuple[str, ...] = ()
    administrators: tuple[str, ...] = ()
    coordinators_read_scripts: bool = False
    munge_users: tuple[str, ...] = ()


class JournalSettings(Section, frozen=True, kw_only=True):
    """[journal]: how much the journal keeps for consumers that are behind.

    Attributes:
        max_bytes: Maximum size of the journal with its incoming scripts, in bytes. Above it,
            Steward detaches a consumer that is behind and can be refilled later.
        keep_s: Retention of events that every consumer has passed, in seconds after their
            observation. Events that a consumer still needs stay longer.
    """

    max_bytes: int = 20 * 1024**3
    keep_s: float = 3600.0


class Settings(Section, frozen=True, kw_only=True):
    """The whole configuration.

    Attributes:
        state_dir: Directory of journal and databases, on a local disk.
        run_dir: Directory of the sockets (``steward.sock`` for commands, ``gate.sock`` for the
            submit plugin, ``trigger.sock`` for slurmctld's triggers), of the plugin's policy
            ``gate.conf``, and of ``gate.off``: while that file exists the plugin admits every job,
            even if the daemon is down, and no job is held or cancelled for insufficient funds.
        log_level: debug, info, warning or error.
        log_format: Format of log lines: ``logfmt``, or ``json`` objects.
        log_file: Log file, which may be rotated at any time; stderr if empty.
        history_days: Retention of past states of nodes, partitions, reservations and daemons, and
            of executions of rules, in days. Present states are never purged.
        cluster: Clusters by name; at least one.
        tls: Certificates of TLS connections by name.
        consume: Kafka topics to read jobs of other Stewards from, by name.
    """

    state_dir: str = "/var/lib/steward"
    run_dir: str = "/run/steward"
    log_level: LogLevel = "info"
    log_format: Literal["logfmt", "json"] = "logfmt"
    log_file: str = ""
    history_days: int = 1100
    cluster: dict[str, ClusterSettings] = msgspec.field(default_factory=dict)
    archive: ArchiveSettings = ArchiveSettings()
    redact: RedactSettings = RedactSettings()
    access: AccessSettings = AccessSettings()
    journal: JournalSettings = JournalSettings()
    tls: dict[str, TlsSettings] = msgspec.field(default_factory=dict)
    consume: dict[str, ConsumeSettings] = msgspec.field(default_factory=dict)
    receive: ReceiveSettings = ReceiveSettings()
    forward: ForwardSettings = ForwardSettings()
    nodes: NodesSettings = NodesSettings()
    accounting: AccountingSettings = AccountingSettings()
    mail: MailSettings = MailSettings()
    bank: BankSettings = BankSettings()
    gate: GateSettings = GateSettings()
    mybrc: MybrcSettings = MybrcSettings()
    sensor: SensorSettings = SensorSettings()
    actions: ActionsSettings = ActionsSettings()
    rules: RulesSettings = RulesSettings()
    web: WebSettings = WebSettings()

    def files_sinks(self) -> dict[str, FilesSinkSettings]:
        """Return the files sinks (directory trees), by name."""
        sinks = self.archive.sink.items()
        return {name: sink for name, sink in sinks if isinstance(sink, FilesSinkSettings)}

    def files_sink(self, name: str) -> FilesSinkSettings:
        """Return the settings of the files sink ``name``."""
        return self.files_sinks()[name]

    @property
    def socket(self) -> str:
        """Return the Unix socket that commands send requests to."""
        return f"{self.run_dir}/steward.sock"

    @property
    def gate_socket(self) -> str:
        """Return the Unix socket of the gate, used by the submit plugin."""
        return f"{self.run_dir}/gate.sock"

    @property
    def gate_conf(self) -> str:
        """Return the file with the submit plugin's policy, which the gate keeps up to date."""
        return f"{self.run_dir}/gate.conf"

    @property
    def gate_off(self) -> str:
        """Return the file that turns the gate off while it exists."""
        return f"{self.run_dir}/gate.off"

    def wake_socket(self, cluster: str) -> str:
        """Return the socket on which a cluster's trigger helper wakes the sensor.

        Each cluster has its own socket if several are watched here.
        """
        watched = [
            name
            for name, cluster_settings in self.cluster.items()
            if cluster_settings.asks_slurm and not cluster_settings.remote
        ]
        name = f"trigger-{cluster}.sock" if len(watched) > 1 else "trigger.sock"
        return f"{self.run_dir}/{name}"

    def sink_path(self, name: str) -> str:
        """Return the root directory of the files sink ``name``."""
        return self.files_sink(name).path or f"{self.state_dir}/archive"

    def tls_name(self, reference: TlsSettings) -> str:
        """Return the NAME of the table [tls.NAME] that a key ``tls`` refers to."""
        # The reader puts the table itself in place of its name; a copy is found by its content.
        names = [name for name, tls in self.tls.items() if tls is reference]
        return (names or [name for name, tls in self.tls.items() if tls == reference])[0]


def convert_to_builtins(settings: Settings) -> dict[str, Any]:
    """Convert settings to plain dictionaries and lists, for printing."""
    plain: dict[str, Any] = msgspec.to_builtins(settings)
    for key, value, _ in list_values(settings):
        if isinstance(value, TlsSettings):
            table = plain
            for name in key[:-1]:
                table = table[name]
            table[key[-1]] = settings.tls_name(value)
    return plain
