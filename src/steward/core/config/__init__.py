"""The typed settings: every key, its default and its meaning. Reading TOML is in file.py.

A Settings value is complete and valid: rooms take the part they need and never
ask for a file again.
"""

import os
from typing import Any, Literal

import msgspec

from steward.accounting.settings import AccountingSettings, MailSettings
from steward.archive.settings import FilesSinkSettings
from steward.automation.settings import ActionsSettings, RulesSettings
from steward.bank.settings import BankSettings, GateSettings
from steward.capture.settings import NodesSettings, SensorSettings
from steward.core.section import Section
from steward.extensions.controllers.settings import ForwardSettings, ReceiveSettings
from steward.extensions.kafka.settings import ConsumeSettings, KafkaSinkSettings
from steward.extensions.mybrc.settings import MybrcSettings
from steward.extensions.search_servers.settings import (
    ElasticsearchSinkSettings,
    OpenSearchSinkSettings,
)
from steward.reports.settings import HistorySettings
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
    "as_builtins",
]

LogLevel = Literal["debug", "info", "warning", "error"]


AnySinkSettings = (
    FilesSinkSettings | ElasticsearchSinkSettings | OpenSearchSinkSettings | KafkaSinkSettings
)
"""What a sink may be, told apart by its ``kind``; ``files`` where it gives none."""


class ArchiveSettings(Section, frozen=True, kw_only=True):
    """[archive]: what is kept of scripts, and where.

    Attributes:
        environments: Whether environments are archived beside scripts.
        catalogue: Whether scripts are indexed for search.
        sink: The sinks by name; one of kind ``files`` where none is named.
    """

    environments: bool = True
    catalogue: bool = True
    sink: dict[str, AnySinkSettings] = msgspec.field(
        default_factory=lambda: {"files": FilesSinkSettings()}
    )


class RedactSettings(Section, frozen=True, kw_only=True):
    """[redact]: which values of environments are never kept.

    Patterns are regular expressions, matched anywhere in a variable's name (in
    any case) or in its value.

    Attributes:
        names: Patterns on names, in place of the built-in ones.
        values: Patterns on values, in place of the built-in ones.
        more_names: Patterns on names beside those.
        more_values: Patterns on values beside those.
        keep: Names of variables whose values are kept whatever the patterns say.
    """

    names: tuple[str, ...] | None = None
    values: tuple[str, ...] | None = None
    more_names: tuple[str, ...] = ()
    more_values: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


class AccessSettings(Section, frozen=True, kw_only=True):
    """[access]: who may see what, beside what Slurm says.

    Attributes:
        operators: Users that may see everything, where there is no slurmdbd to say so.
        administrators: Users that may change what only Slurm's administrators may.
        coordinators_read_scripts: Whether an account's coordinators may read its scripts.
    """

    operators: tuple[str, ...] = ()
    administrators: tuple[str, ...] = ()
    coordinators_read_scripts: bool = False


class JournalSettings(Section, frozen=True, kw_only=True):
    """[journal]: how much is kept for consumers that are behind.

    Attributes:
        max_bytes: Size of journal and waiting bytes, in bytes, at which a consumer that is
            behind is detached, if what it misses can be had again.
        keep_s: How long events are kept after every consumer has passed, in seconds.
    """

    max_bytes: int = 20 * 1024**3
    keep_s: float = 3600.0


class Settings(Section, frozen=True, kw_only=True):
    """The whole configuration.

    Attributes:
        state_dir: Where journal and databases live: a local disk.
        socket: The Unix socket that commands ask the daemon through.
        log_level: debug, info, warning or error.
        log_format: What a line of the log is: ``logfmt``, or a ``json`` object.
        log_file: A file to log to, which may be rotated at any time; stderr if empty.
        capture_processes: How many processes watch a spool.
        cluster: The clusters by name; at least one.
        consume: Kafka topics that jobs of other Stewards are taken from, by name.
    """

    state_dir: str = "/var/lib/steward"
    socket: str = "/run/steward/steward.sock"
    log_level: LogLevel = "info"
    log_format: Literal["logfmt", "json"] = "logfmt"
    log_file: str = ""
    capture_processes: int = 2
    cluster: dict[str, ClusterSettings] = msgspec.field(default_factory=dict)
    archive: ArchiveSettings = ArchiveSettings()
    redact: RedactSettings = RedactSettings()
    access: AccessSettings = AccessSettings()
    journal: JournalSettings = JournalSettings()
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
    history: HistorySettings = HistorySettings()
    web: WebSettings = WebSettings()

    def files_sinks(self) -> dict[str, FilesSinkSettings]:
        """The sinks that are directory trees, by name."""
        sinks = self.archive.sink.items()
        return {name: sink for name, sink in sinks if isinstance(sink, FilesSinkSettings)}

    def files_sink(self, name: str) -> FilesSinkSettings:
        """The files sink ``name``."""
        return self.files_sinks()[name]

    def wake_socket(self, cluster: str) -> str:
        """Return the socket on which a cluster's helper wakes its sensor.

        Each cluster has one of its own if several are watched here.
        """
        path = self.sensor.socket
        watched = [name for name, of in self.cluster.items() if of.asks_slurm and not of.remote]
        if len(watched) <= 1:
            return path
        stem, suffix = os.path.splitext(path)
        return f"{stem}-{cluster}{suffix}"

    def sink_path(self, name: str) -> str:
        """The root directory of the files sink ``name``."""
        return self.files_sink(name).path or f"{self.state_dir}/archive"


def as_builtins(settings: Settings) -> dict[str, Any]:
    """The settings as plain dictionaries and lists, for printing."""
    plain: dict[str, Any] = msgspec.to_builtins(settings)
    return plain
