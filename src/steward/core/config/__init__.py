"""The typed settings: every key, its default and its meaning. Reading TOML is in file.py.

A Settings value is complete and valid: rooms take the part they need and never
ask for a file again.
"""

from typing import Any, Literal

import msgspec

from steward.accounting.settings import (
    AccountingSettings,
    MailSettings,
    NodesSettings,
    NotesSettings,
)
from steward.automation.settings import ActionsSettings, RulesSettings, SensorSettings
from steward.bank.settings import BankSettings, GateSettings, MybrcSettings
from steward.core.section import Section
from steward.reports.settings import HistorySettings
from steward.web.settings import WebSettings

__all__ = [
    "AccessSettings",
    "AccountingSettings",
    "AnySinkSettings",
    "ArchiveSettings",
    "BankSettings",
    "ClusterSettings",
    "ConsumeSettings",
    "ElasticsearchSinkSettings",
    "FilesSinkSettings",
    "ForwardSettings",
    "GateSettings",
    "JournalSettings",
    "KafkaSettings",
    "KafkaSinkSettings",
    "Layout",
    "LimitSettings",
    "LogLevel",
    "MailSettings",
    "MybrcSettings",
    "NodesSettings",
    "NotesSettings",
    "OpenSearchSinkSettings",
    "ReceiveSettings",
    "RedactSettings",
    "SearchSinkSettings",
    "Section",
    "Settings",
    "SinkSettings",
    "WebSettings",
    "as_builtins",
]

LogLevel = Literal["debug", "info", "warning", "error"]
Layout = str
"""A preset's name (``default``, ``job_archive``, ``sarchive``, ``sliced``) or a template."""


class ClusterSettings(Section, frozen=True, kw_only=True):
    """[cluster.NAME]: one cluster whose books are kept.

    Attributes:
        scheduler: ``slurm``, ``torque``, or what another package offers, see docs/torque.md.
        slurm: Whether to ask Slurm at all; without it jobs stay unverified.
        spool: slurmctld's StateSaveLocation; asked of Slurm where it is not given. Of
            Torque its server_priv.
        slurm_conf: Path given to Slurm's commands as SLURM_CONF; their default if empty.
        slurm_bin: Directory of Slurm's commands; found in PATH if empty.
        slurm_prefix: Words put before each of Slurm's commands (``chroot /srv/slurm-26.05``).
        timezone: IANA name of the zone of dates in paths and output; the system's if empty.
        snapshot_interval_s: Least seconds between two snapshots of the queue.
        command_timeout_s: How long one of Slurm's commands may take, in seconds.
        remote: Whether a ``steward controller`` elsewhere reports for it, see
            docs/controllers.md: then neither its spool nor its Slurm is looked at here.
        controllers: The hosts that may report for it, names or addresses.
        munge_socket: Socket of this cluster's munged; MUNGE's default if empty.
        jobcomp_lines: File that native/jobcomp.lua appends to on this host, see
            docs/accounting.md; "" where JobCompType is not ours.
        torque_subdirs: Whether Torque keeps its jobs in ``jobs/0`` to ``jobs/9``
            (use_jobs_subdirs); found out where it is not said.
    """

    scheduler: str = "slurm"
    slurm: bool = True
    spool: str = ""
    slurm_conf: str = ""
    slurm_bin: str = ""
    slurm_prefix: tuple[str, ...] = ()
    timezone: str = ""
    snapshot_interval_s: float = 5.0
    command_timeout_s: float = 30.0
    remote: bool = False
    controllers: tuple[str, ...] = ()
    munge_socket: str = ""
    jobcomp_lines: str = ""
    torque_subdirs: bool | None = None

    @property
    def asks_slurm(self) -> bool:
        """Whether any of Slurm's commands is run for it."""
        return self.slurm and self.scheduler == "slurm"


class SinkSettings(Section, frozen=True, kw_only=True, tag_field="kind", tag=""):
    """[archive.sink.NAME]: one place that scripts are archived to; its ``kind`` says what it is.

    Attributes:
        identity_wait_s: How long a script waits for its job's identity before it is
            archived as unverified, in seconds.
        retention_days: What is older than this is removed; 0 keeps it for ever.
    """

    identity_wait_s: float = 10.0
    retention_days: int = 0

    @property
    def kind(self) -> str:
        """``files``, ``elasticsearch``, ``opensearch`` or ``kafka``."""
        return str(self.__struct_config__.tag)


class LimitSettings(Section, frozen=True, kw_only=True):
    """[archive.sink.NAME.limit.LIMIT]: what users or accounts may keep in a files sink.

    The oldest scripts go first, as by ``retention_days``. Of several limits each holds.

    Attributes:
        users: Whose scripts, by the users' names at submit; everybody's if empty.
        accounts: Only those submitted under these accounts; under any if empty.
        days: What is older than this is removed; 0 keeps it for ever.
        max_bytes: Size, in bytes, that is kept of each user, or of each account where
            ``accounts`` names some; 0 for no limit.
    """

    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    days: int = 0
    max_bytes: int = 0


class FilesSinkSettings(SinkSettings, frozen=True, kw_only=True, tag="files"):
    """[archive.sink.NAME] with kind = "files": a directory tree.

    Attributes:
        path: The tree's root; ``<state_dir>/archive`` if empty.
        layout: A preset's name or a template, see docs/archive.md.
        period: For the preset ``sarchive``: how its directories are cut.
        groups: Unix groups that may read every file.
        groups_file: A file with such groups, one a line, as job_archive's -c took it.
        move_to: A second tree that files are moved on to (a common file system); "" for none.
        move_after_s: How old a file must be, in seconds, before it is moved on.
        compress: ``zstd`` compresses what is filed from now on; ``none`` leaves it as it was.
    """

    path: str = ""
    layout: Layout = "default"
    period: Literal["yearly", "monthly", "daily", "none"] = "yearly"
    groups: tuple[str, ...] = ()
    groups_file: str = ""
    move_to: str = ""
    move_after_s: float = 300.0
    compress: Literal["none", "zstd"] = "none"
    limit: dict[str, LimitSettings] = msgspec.field(default_factory=dict)


class SearchSinkSettings(SinkSettings, frozen=True, kw_only=True):
    """[archive.sink.NAME] with kind = "elasticsearch" or "opensearch": a search server.

    What is kept of secrets here are names of files, which Steward alone should be able to read.

    Attributes:
        urls: Its nodes: ``https://search1:9200``.
        index: Begin of the names of the monthly indices, and the alias over all of them.
        environments: Whether environments are sent, too.
        user: For basic authentication; with ``password_file``.
        password_file: A file that holds the password.
        api_key_file: A file that holds an API key (``id:key`` or its base64), in place of a user.
        ca_file: Certificates that the server's is checked against; the system's if empty.
        certificate_file: Our own certificate, where the server asks for one.
        key_file: The key of that certificate.
        shards: Primary shards of each monthly index.
        replicas: Copies of each shard.
        batch_bytes: How much is read and sent at once, in bytes; a request has up to 2 MiB of it.
        timeout_s: How long one request may take, in seconds.
    """

    urls: tuple[str, ...] = ()
    index: str = "steward-jobs"
    environments: bool = True
    user: str = ""
    password_file: str = ""
    api_key_file: str = ""
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    shards: int = 1
    replicas: int = 1
    batch_bytes: int = 8 * 1024**2
    timeout_s: float = 60.0


class ElasticsearchSinkSettings(SearchSinkSettings, frozen=True, kw_only=True, tag="elasticsearch"):
    """[archive.sink.NAME] with kind = "elasticsearch": an Elasticsearch 8 or 9."""


class OpenSearchSinkSettings(SearchSinkSettings, frozen=True, kw_only=True, tag="opensearch"):
    """[archive.sink.NAME] with kind = "opensearch": an OpenSearch 2 or 3."""


class KafkaSettings(Section, frozen=True, kw_only=True):
    """[archive.sink.NAME.broker], [consume.NAME.broker]: how a Kafka cluster is reached.

    Attributes:
        servers: Some of its brokers: ``kafka1:9092``.
        topic: The topic.
        tls: Whether connections are encrypted.
        ca_file: Certificates that the brokers' are checked against; the system's if empty.
        certificate_file: Our own certificate, where the brokers ask for one.
        key_file: The key of that certificate.
        sasl: ``PLAIN``, ``SCRAM-SHA-256`` or ``SCRAM-SHA-512``; "" for none.
        user: For SASL.
        password_file: A file that holds the password for SASL.
        options: Further settings of librdkafka, as its CONFIGURATION.md names them.
        timeout_s: How long a broker may take to answer, in seconds.
    """

    servers: tuple[str, ...] = ()
    topic: str = "steward-jobs"
    tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    sasl: Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = ""
    user: str = ""
    password_file: str = ""
    options: dict[str, str] = msgspec.field(default_factory=dict)
    timeout_s: float = 30.0


class KafkaSinkSettings(SinkSettings, frozen=True, kw_only=True, tag="kafka"):
    """[archive.sink.NAME] with kind = "kafka": a topic, one message a script.

    Attributes:
        broker: How it is reached.
        message: ``steward``, or ``sarchive`` for what SArchive sends.
        environments: Whether environments are sent, too.
        compression: How messages are compressed.
        max_message_bytes: Size of the largest message, in bytes; the topic's
            ``max.message.bytes`` has to allow it.
    """

    broker: KafkaSettings = KafkaSettings()
    message: Literal["steward", "sarchive"] = "steward"
    environments: bool = True
    compression: Literal["zstd", "lz4", "gzip", "snappy", "none"] = "zstd"
    max_message_bytes: int = 16 * 1024**2


AnySinkSettings = (
    FilesSinkSettings | ElasticsearchSinkSettings | OpenSearchSinkSettings | KafkaSinkSettings
)
"""What a sink may be, told apart by its ``kind``; ``files`` where it gives none."""


class ConsumeSettings(Section, frozen=True, kw_only=True):
    """[consume.NAME]: a Kafka topic that other Stewards' sinks fill, taken in here.

    Attributes:
        broker: How it is reached.
        group: The consumer group that its offsets are kept for.
        clusters: The clusters whose jobs are taken in; if empty, every cluster but those that
            have a table ``[cluster.NAME]`` here.
    """

    broker: KafkaSettings = KafkaSettings()
    group: str = "steward"
    clusters: tuple[str, ...] = ()


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


class ReceiveSettings(Section, frozen=True, kw_only=True):
    """[receive]: what is taken from the ``steward controller`` of other hosts.

    Attributes:
        listen: Address and port (``0.0.0.0:6825``, ``[::]:6825``); nothing is taken if empty.
        certificate_file: Our certificate, with what signed it; without one, no encryption.
        key_file: The key of that certificate.
        client_ca_file: Certificates that the controllers' are checked against; with it a
            controller is known by its certificate, else by MUNGE.
        munge_users: Users that a controller may run as, beside root and our own user.
    """

    listen: str = ""
    certificate_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    munge_users: tuple[str, ...] = ()


class ForwardSettings(Section, frozen=True, kw_only=True):
    """[forward]: where ``steward controller`` sends what it captures.

    Attributes:
        to: Host and port of the ``steward serve`` that takes it.
        tls: Whether the connection is encrypted.
        ca_file: Certificates that the server's is checked against; the system's if empty.
        certificate_file: Our certificate, where we are known by it; else by MUNGE.
        key_file: The key of that certificate.
        munge_users: Users that the server may run as, beside root and our own user.
        timeout_s: How long the server may take to answer, in seconds.
    """

    to: str = ""
    tls: bool = False
    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    munge_users: tuple[str, ...] = ()
    timeout_s: float = 60.0


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

    def sink_path(self, name: str) -> str:
        """The root directory of the files sink ``name``."""
        return self.files_sink(name).path or f"{self.state_dir}/archive"


def as_builtins(settings: Settings) -> dict[str, Any]:
    """The settings as plain dictionaries and lists, for printing."""
    plain: dict[str, Any] = msgspec.to_builtins(settings)
    return plain
