"""``steward archive watch``, ``import`` and ``consume``: fill an archive from spool, tree or Kafka.

``watch`` and ``consume`` need no configuration file: they write the settings that their options
make into the archive's directory and become a daemon with them; other commands find the settings
there (:func:`locate_archive_settings`). ``import`` takes over archives of job_archive, SArchive or
slurmdbd into a configured archive.
"""

import os
import re
import time
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

import click
import msgspec

from steward.accounting.settings import AccountingSettings
from steward.archive.errors import ArchiveUnavailable
from steward.archive.files.locks import TreeClaim
from steward.archive.settings import FilesSinkSettings
from steward.cli import options, output
from steward.cli.commands import report_outcome
from steward.cli.options import Archive, Config, Json, make_option, reject_empty
from steward.cli.output import ProgressLine, format_count, print_json, to_local_time
from steward.cli.parameters import Argument, Option
from steward.client.places import (
    ARCHIVE_SETTINGS,
    ARCHIVE_STATE,
    ClientPlace,
    require_settings,
)
from steward.core.config import ArchiveSettings, LogLevel, Settings
from steward.core.config.reader import ConfigError, LoadedConfig, render_config, require_valid
from steward.core.errors import StewardError, UsageError
from steward.core.files import find_network_type
from steward.core.printable import escape_line
from steward.core.section import TlsSettings
from steward.daemon.__main__ import exec_daemon
from steward.extensions.kafka import ConsumeSettings, KafkaSettings
from steward.jobs import filters
from steward.slurm.settings import ClusterSettings

_KEY: Final = re.compile(r"'(?:[^'\s.]+\.)*([a-z_]+)'")
"""A setting's key in an error message, in quotes, with its tables in front."""
_HEADING: Final = "# Written by 'steward archive {}' each time it starts.\n"
"""First line of the settings file; names the command that manages the archive."""


class SetUpError(StewardError):
    """Error: the archive cannot be set up."""


StateDirectory = Annotated[
    str,
    Option(
        "--state",
        metavar="DIR",
        help="Directory of the databases, on a local disk. Default: inside the archive.",
    ),
]


def locate_archive_settings(root: str) -> str:
    """Return the settings file of the archive in ``root``."""
    return os.path.join(root, ARCHIVE_STATE, ARCHIVE_SETTINGS)


def choose_state_dir(root: str, name: str) -> str:
    """Return the directory for databases: in the archive, unless that is on NFS or the like.

    Then it is below the user's home, or for root below /var/lib/steward.

    Args:
        root: The archive's directory; it need not exist yet.
        name: Name of a subdirectory at home, unique to this archive.
    """
    existing_dir = root
    while not os.path.isdir(existing_dir):
        existing_dir = os.path.dirname(existing_dir)
    if not find_network_type(existing_dir):
        return os.path.join(root, ARCHIVE_STATE)
    if os.geteuid() == 0:
        return f"/var/lib/steward/{name}"
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(os.path.abspath(home), "steward", name)


def check_option_settings(settings: Settings, command: str, options: dict[str, str]) -> Settings:
    """Validate settings made from options.

    Args:
        settings: Settings to validate.
        command: Subcommand of ``steward archive``, for the error message.
        options: Option for each key that it sets; "" removes the key from messages.

    Raises:
        UsageError: A setting is invalid; the message names the option.
    """

    def name_option(match: re.Match[str]) -> str:
        option = options.get(match[1])
        return match[0] if option is None else option and f"'{option}'"

    try:
        return require_valid(settings, f"archive {command}")
    except ConfigError as error:
        message = " ".join(_KEY.sub(name_option, str(error)).split())
        raise UsageError(message, error.key) from error


def prepare_archive(root: str, settings: Settings, command: str) -> Settings:
    """Create the directories, and write the settings for other commands to find.

    Args:
        root: The archive's directory.
        settings: Settings without the directory of the socket.
        command: Subcommand of ``steward archive``.

    Returns:
        The settings written.

    Raises:
        SetUpError: A file cannot be written, or another command manages this archive.
    """
    settings = msgspec.structs.replace(
        settings,
        run_dir=settings.state_dir,
        # An archive alone keeps no job records.
        accounting=AccountingSettings(type="jobacct/none"),
    )
    archive_state = os.path.join(root, ARCHIVE_STATE)
    path = locate_archive_settings(root)
    _reject_foreign_settings(path, root, command)
    try:
        TreeClaim(settings.state_dir, root).check()
    except ArchiveUnavailable as error:
        raise SetUpError(str(error), root) from error
    try:
        if not os.path.isdir(root):
            os.makedirs(root)
        os.makedirs(archive_state, exist_ok=True)
        # Users reach the socket in it; every other file is private by its own mode.
        os.chmod(archive_state, 0o711)  # noqa: S103 - it can be passed through, not listed
        os.makedirs(settings.state_dir, mode=0o700, exist_ok=True)
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(_HEADING.format(command))
            file.write(render_config(LoadedConfig(settings)))
        os.replace(f"{path}.new", path)
    except OSError as error:
        failed_path = error.filename or root
        raise SetUpError(
            f"cannot set up the archive: {failed_path}: {error.strerror}", root
        ) from error
    return settings


def _reject_foreign_settings(path: str, root: str, command: str) -> None:
    """Reject settings that another command wrote, so as not to overwrite them."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            heading = file.readline(200)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SetUpError(f"cannot set up the archive: {path}: {error.strerror}", root) from error
    if heading != _HEADING.format(command):
        raise SetUpError(
            f"archive {root} is in use by another command, see {path}: choose another "
            "directory, or let 'steward serve' run both from one configuration",
            root,
        )


def watch(
    cluster: Annotated[str, Option("--cluster", metavar="NAME", help="Name of the cluster.")],
    archive: Annotated[
        str,
        Option(
            "--archive", metavar="DIR", help="Root directory of the archive; created if missing."
        ),
    ],
    spool: Annotated[
        str,
        Option(
            "--spool",
            metavar="DIR",
            help=(
                "Spool: slurmctld's StateSaveLocation (default: ask Slurm) or Torque's server_priv."
            ),
        ),
    ] = "",
    layout: Annotated[
        str,
        Option(
            "--layout",
            metavar="L",
            help="default, job_archive, sarchive (also sarchive-monthly, sarchive-daily and "
            "sarchive-flat), sliced, or a template such as {user}/{year}/{job_id}-{name}.",
        ),
    ] = "default",
    scheduler: Annotated[
        str,
        Option(
            "--scheduler",
            metavar="NAME",
            help="Scheduler that writes the spool: slurm or torque.",
        ),
    ] = "slurm",
    no_slurm: Annotated[
        bool, Option("--no-slurm", help="Never query Slurm; job owners stay unverified.")
    ] = False,
    once: Annotated[
        bool, Option("--once", help="Archive the scripts in the spool now, then exit.")
    ] = False,
    state: StateDirectory = "",
    timezone: Annotated[
        str, Option("--timezone", metavar="ZONE", help="IANA time zone of dates in paths.")
    ] = "",
    slurm_conf: Annotated[
        str,
        Option("--slurm-conf", metavar="FILE", help="Path of slurm.conf. Default: Slurm's own."),
    ] = "",
    groups: Annotated[
        str,
        Option(
            "--groups",
            metavar="NAME,…",
            help="Unix groups that may read every archived file. Default: none.",
        ),
    ] = "",
    move_to: Annotated[
        str,
        Option(
            "--move-to",
            metavar="DIR",
            help="Second tree that older files move to; not with --once.",
        ),
    ] = "",
    move_after: Annotated[
        float,
        Option(
            "--move-after",
            metavar="S",
            help="Age at which files move to the second tree, in seconds.",
        ),
    ] = 300.0,
    log_level: Annotated[
        LogLevel | None,
        Option(
            "--log-level",
            metavar="L",
            help=(
                "Log level: debug (one line per script), info, warning or error. Default: "
                "info; warning with --once."
            ),
        ),
    ] = None,
) -> None:
    """Archive the scripts of one cluster, without the daemon.

    The command needs no configuration file. It writes only to --archive, --state
    and --move-to. Run it as root or as the user that slurmctld runs as. Ctrl-C
    ends it. At the next start it captures the scripts that it missed.
    """
    if no_slurm and not spool and scheduler == "slurm":
        raise UsageError("the spool is unknown: with --no-slurm, give --spool DIR")
    if once and move_to:
        raise UsageError(
            "--move-to has no effect with --once, which exits before files are old enough: "
            "remove --move-to"
        )
    if once and spool:
        _check_spool_readable(spool, scheduler)
    root = os.path.abspath(archive)
    settings = check_option_settings(
        Settings(
            state_dir=os.path.abspath(state)
            if state
            else choose_state_dir(root, f"watch-{cluster}"),
            cluster={
                cluster: ClusterSettings(
                    scheduler=scheduler,
                    slurm=not no_slurm,
                    spool=os.path.abspath(spool) if spool else "",
                    slurm_conf=os.path.abspath(slurm_conf) if slurm_conf else "",
                    timezone=timezone,
                )
            },
            archive=ArchiveSettings(
                sink={
                    "files": FilesSinkSettings(
                        path=root,
                        layout=layout,
                        groups=tuple(filter(None, groups.split(","))),
                        move_to=os.path.abspath(move_to) if move_to else "",
                        move_after_s=move_after,
                    )
                }
            ),
            log_level=log_level or ("warning" if once else "info"),
        ),
        "watch",
        {
            "spool": "--spool",
            "scheduler": "--scheduler",
            "groups": "--groups",
            "move_to": "--move-to",
            "move_after_s": "--move-after",
        },
    )
    settings = prepare_archive(root, settings, "watch")
    if once:
        raise click.exceptions.Exit(_watch_once(settings, root, cluster))
    exec_daemon(locate_archive_settings(root))


def _check_spool_readable(spool: str, scheduler: str) -> None:
    """Check that the spool is readable, so that one pass does not silently find nothing.

    Raises:
        SetUpError: The spool cannot be read.
    """
    try:
        os.scandir(spool).close()
    except OSError as error:
        advice = (
            "slurmctld's StateSaveLocation as --spool, and run the command as root or SlurmUser"
        )
        if scheduler == "torque":
            advice = "Torque's server_priv as --spool, and run the command as root"
        raise SetUpError(
            f"cannot read the spool {spool}: {error.strerror}; give {advice}",
            spool,
        ) from error


def _watch_once(settings: Settings, root: str, cluster: str) -> int:
    """Archive the present content of the spool, print the result, return the exit code."""
    from steward.core.logs import configure_logging
    from steward.daemon.single_pass import run_once

    configure_logging(settings.log_level)
    os.umask(0o077)
    started_s = time.monotonic()
    result = run_once(settings)
    elapsed_s = time.monotonic() - started_s
    print(
        f"Archived {format_count(result.captured, 'new script')} of {escape_line(cluster)} in "
        f"{escape_line(root)}; it took {elapsed_s:.1f} s."
    )
    for consumer, reason in result.waiting.items():
        output.print_warning(f"{consumer} stopped: {reason}")
    output.print_note(f"  steward archive list --archive {escape_line(root)}")
    return 1 if result.waiting else 0


def import_(
    kind: Annotated[
        Literal["job_archive", "sarchive", "slurmdbd"],
        Argument(
            metavar="KIND", help="Tool that wrote the archive: job_archive, sarchive or slurmdbd."
        ),
    ],
    root: Annotated[
        str,
        Argument(metavar="DIR", help="Root directory of the tree of job_archive or SArchive."),
    ] = "",
    cluster: Annotated[
        str,
        Option("--cluster", "-M", metavar="NAME", help="Cluster of the jobs."),
    ] = "",
    since: Annotated[str, make_option(filters.Since)] = "",
    until: Annotated[str, make_option(filters.Until, "Latest submit time, exclusive.")] = "",
    as_json: Json = False,
    config: Config = "",
    archive: Archive = "",
) -> None:
    """Import the archive of another tool.

    Steward reads the tree of job_archive or SArchive, or the scripts in slurmdbd
    (period: -S and -E), without changing them. It redacts secrets in
    environments. A repeated import adds nothing.
    """
    settings = require_settings(ClientPlace(config=config, archive=archive))
    cluster = cluster or _require_single_cluster(settings)
    from steward.daemon.imports import import_archive_tree, import_stored_scripts

    with ProgressLine() as progress:

        def report(done_count: int) -> None:
            progress.show(done_count, None, "scripts")

        if kind == "slurmdbd":
            if root:
                raise UsageError("slurmdbd import takes no directory: remove the argument", root)
            begin, end = _parse_period(since, until)
            result = import_stored_scripts(settings, cluster, begin, end, report)
        else:
            if not root:
                raise UsageError(f"the directory is missing: run steward archive import {kind} DIR")
            result = import_archive_tree(settings, cluster, kind, os.path.abspath(root), report)
    if as_json:
        print_json(result)
    else:
        scripts = format_count(result.scripts, "script")
        print(f"Imported {scripts}, {result.owned} of them with an owner.")
        if result.known:
            print(f"The archive already had {format_count(result.known, 'script')}.")
        if result.scriptless:
            print(f"slurmdbd has no script of {format_count(result.scriptless, 'submission')}.")
    report_outcome(result)


def _require_single_cluster(settings: Settings) -> str:
    """Return the only configured cluster, or fail if there are several."""
    if len(settings.cluster) == 1:
        return next(iter(settings.cluster))
    raise UsageError(
        f"several clusters are configured: choose one with --cluster: {', '.join(settings.cluster)}"
    )


def _parse_period(since: str, until: str) -> tuple[datetime, datetime]:
    """Parse the period to import in this host's zone."""
    from steward.slurm.times import parse_time

    now = datetime.now(UTC)
    zone = to_local_time(now).tzinfo or UTC
    if not since:
        raise UsageError(
            "no start time given: add -S, such as 'steward archive import slurmdbd -S 2026-01-01'"
        )
    return parse_time(since, now, zone), parse_time(until, now, zone) if until else now


_KAFKA_SOURCE = "kafka"
"""Name of the Kafka source in the settings that ``consume`` writes."""
_CONSUME_OPTIONS = {
    "broker": "",
    _KAFKA_SOURCE: "",
    "certificate_file": "--certificate-file",
    "key_file": "--key-file",
    "mechanism": "--sasl",
    "user": "--sasl-user",
    "password_file": "--password-file",
}
"""Command-line option of each setting, for error messages; "" for none."""


def consume(
    source: Annotated[
        Literal["kafka"],
        Option("--from", metavar="KIND", help="Source of the messages: kafka."),
    ],
    server: Annotated[
        list[str],
        Option(
            "--server",
            metavar="HOST:PORT,…",
            help="Kafka brokers to connect to first.",
            callback=reject_empty,
        ),
    ],
    archive: Annotated[
        str,
        Option(
            "--archive", metavar="DIR", help="Root directory of the archive; created if missing."
        ),
    ],
    topic: Annotated[str, Option("--topic", metavar="T", help="Kafka topic.")] = "steward-jobs",
    group: Annotated[str, Option("--group", metavar="G", help="Kafka consumer group.")] = "steward",
    clusters: Annotated[list[str] | None, make_option(filters.Clusters)] = None,
    layout: Annotated[
        str,
        Option(
            "--layout", metavar="L", help="Layout of file names, as in 'steward archive watch'."
        ),
    ] = "default",
    once: Annotated[
        bool, Option("--once", help="Archive the messages in the topic now, then exit.")
    ] = False,
    state: StateDirectory = "",
    tls: Annotated[bool, Option("--tls", help="Encrypt connections with TLS.")] = False,
    ca_file: Annotated[
        str,
        Option("--ca-file", metavar="FILE", help="CA certificates that verify the brokers."),
    ] = "",
    certificate_file: Annotated[
        str, Option("--certificate-file", metavar="FILE", help="Certificate of this client.")
    ] = "",
    key_file: Annotated[
        str, Option("--key-file", metavar="FILE", help="Private key of --certificate-file.")
    ] = "",
    sasl: Annotated[
        Literal["", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"],
        Option(
            "--sasl",
            metavar="HOW",
            help=(
                "PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512. Default: SCRAM-SHA-512 if --sasl-user is "
                "given."
            ),
        ),
    ] = "",
    sasl_user: Annotated[str, Option("--sasl-user", metavar="NAME", help="SASL user name.")] = "",
    password_file: Annotated[
        str, Option("--password-file", metavar="FILE", help="File with the SASL password.")
    ] = "",
) -> None:
    """Archive the scripts that another Steward sends to Kafka.

    The command needs no configuration file. It writes only to --archive and
    --state. It commits the offset of a message once the message is on disk.
    Ctrl-C ends it. At the next start it continues where it stopped.
    """
    del source
    root = os.path.abspath(archive)
    certificates = TlsSettings(
        ca_file=_make_absolute(ca_file),
        certificate_file=_make_absolute(certificate_file),
        key_file=_make_absolute(key_file),
    )
    broker = KafkaSettings(
        servers=options.split_lists(server),
        topic=topic,
        tls=certificates if tls else None,
        user=sasl_user,
        password_file=_make_absolute(password_file),
        options={"group.id": group, **({"sasl.mechanism": sasl} if sasl else {})},
    )
    settings = check_option_settings(
        Settings(
            state_dir=os.path.abspath(state)
            if state
            else choose_state_dir(root, f"consume-{topic}"),
            tls={_KAFKA_SOURCE: certificates},
            consume={
                _KAFKA_SOURCE: ConsumeSettings(
                    broker=broker, clusters=options.split_lists(clusters)
                )
            },
            archive=ArchiveSettings(sink={"files": FilesSinkSettings(path=root, layout=layout)}),
            log_level="warning" if once else "info",
        ),
        "consume",
        _CONSUME_OPTIONS,
    )
    settings = prepare_archive(root, settings, "consume")
    if once:
        raise click.exceptions.Exit(_consume_once(settings, root))
    exec_daemon(locate_archive_settings(root))


def _make_absolute(path: str) -> str:
    """Make a path absolute; "" stays."""
    return os.path.abspath(path) if path else ""


def _consume_once(settings: Settings, root: str) -> int:
    """Archive the present content of the topic, print the result, return the exit code."""
    from steward.core.logs import configure_logging
    from steward.daemon.single_pass import run_once

    configure_logging(settings.log_level)
    os.umask(0o077)
    started_s = time.monotonic()
    result = run_once(settings)
    elapsed_s = time.monotonic() - started_s
    topic = settings.consume[_KAFKA_SOURCE].broker.topic
    print(
        f"Archived {format_count(result.captured, 'message')} of topic {escape_line(topic)} "
        f"in {escape_line(root)}; it took {elapsed_s:.1f} s."
    )
    for consumer, reason in result.waiting.items():
        output.print_warning(f"{consumer} stopped: {reason}")
    output.print_note(f"  steward archive list --archive {escape_line(root)}")
    return 1 if result.waiting else 0
