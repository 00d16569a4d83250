"""Configuration checks: errors that types cannot express, and what is missing on this host.

``find_problems`` yields errors of the settings themselves: names, numbers, paths that collide,
ports, time zones, redaction patterns; sections of components are in ``component_checks.py``. Each
problem names its key, so that ``reader.py`` can report the line. Checks use the code that later
applies the value (layouts, patterns), so that what passes here is accepted there.
``find_extension_problems`` and ``find_missing_resources``, for ``steward config check`` and the
doctor, look at this host too: files, users, Python packages. The daemon does not call them: what
is missing now may exist when it is needed, so it starts without it and waits.
"""

import math
import os
import pwd
import re
from collections.abc import Iterator
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from steward.accounting.settings import AccountingSettings
from steward.archive.settings import FilesSinkSettings, LimitSettings
from steward.automation.settings import ActionsSettings
from steward.bank.settings import BankSettings, GateSettings
from steward.capture.settings import SensorSettings
from steward.core.config import RedactSettings, Settings
from steward.core.config.component_checks import (
    check_broker,
    check_forwarding,
    check_nodes,
    check_rules,
    check_sink,
    check_tls,
)
from steward.core.config.problems import ConfigProblem, KeyPath, run_offered_check
from steward.core.drivers import list_needed_drivers
from steward.core.errors import StewardError
from steward.core.extensions import list_offers
from steward.core.files import can_access
from steward.core.listeners import split_host_port
from steward.core.section import list_values
from steward.extensions.mybrc.settings import MybrcSettings
from steward.slurm.settings import SCHEDULERS
from steward.web.settings import WebSettings

_SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_EVERY_HOST = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not listened at
"""Addresses that listen on every interface."""
_POSITIVE = frozenset(
    {
        *("snapshot_interval_s", "timeout_s", "hook_timeout_s"),
        "history_days",
    }
)
"""Keys whose numbers must be above 0; others may be 0."""


def find_problems(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield all errors in the settings."""
    yield from _check_names(settings)
    yield from _check_values(settings)
    yield from _check_paths(settings)
    yield from _check_schedulers(settings)
    yield from _check_spools(settings)
    yield from _check_sinks(settings)
    for name, sink in settings.archive.sink.items():
        yield from check_sink(("archive", "sink", name), sink)
    for name, source in settings.consume.items():
        yield from check_broker(("consume", name, "broker"), source.broker)
    yield from check_tls(settings)
    yield from check_forwarding(settings)
    yield from check_nodes(settings)
    yield from _check_listeners(settings)
    yield from check_rules(settings)
    if settings.accounting not in (AccountingSettings(), AccountingSettings(type="jobacct/none")):
        # Loading the plugins takes time, which commands spend only if the section is set.
        yield from run_offered_check("jobacct", ("accounting",), settings)
    if (settings.bank, settings.gate, settings.mybrc) != (
        *(BankSettings(), GateSettings(), MybrcSettings()),
    ):
        from steward.core.config.component_checks import check_bank

        yield from check_bank(settings)
    if settings.actions != ActionsSettings() or settings.access.administrators:
        from steward.core.config.component_checks import check_actions

        yield from check_actions(settings)
    if settings.sensor != SensorSettings():
        from steward.core.config.component_checks import check_sensor

        yield from check_sensor(settings)
    if settings.web != WebSettings():
        from steward.core.config.component_checks import check_web

        yield from check_web(settings)
    yield from _check_zones(settings)
    yield from _check_patterns(settings.redact)
    if "" in settings.access.operators:
        yield ConfigProblem(
            ("access", "operators"), "'access.operators' contains an empty name: remove it"
        )


def _check_listeners(settings: Settings) -> Iterator[ConfigProblem]:
    """Find two listeners on one port: the second to start would fail again and again."""
    seen: list[tuple[str, str, int]] = []
    for section in ("receive", "nodes", "gate", "mybrc", "web"):
        text: str = getattr(settings, section).listen
        address = split_host_port(text)
        if address is None or not address[1]:
            continue  # no address, or an invalid one (reported elsewhere); port 0 is any free port
        host, port = address
        for other, other_host, other_port in seen:
            if port == other_port and _is_port_conflict(host, other_host):
                yield ConfigProblem(
                    (section, "listen"),
                    f"'{section}.listen' and '{other}.listen' both use port {port}: "
                    f"give [{section}] another port",
                )
        seen.append((section, host, port))


def _is_port_conflict(host: str, other: str) -> bool:
    """Return whether listeners at two hosts with the same port conflict."""
    hosts = {"127.0.0.1" if name.lower() == "localhost" else name.lower() for name in (host, other)}
    return len(hosts) == 1 or bool(hosts & _EVERY_HOST)


def _check_names(settings: Settings) -> Iterator[ConfigProblem]:
    """Check that clusters and sinks exist and that their names are safe in file names."""
    if not settings.cluster and not settings.consume:
        yield ConfigProblem((), "no cluster is configured: add a table [cluster.NAME]")
    if not settings.archive.sink:
        yield ConfigProblem(
            ("archive", "sink"), "no sink is configured: add a table [archive.sink.NAME]"
        )
    for key, names in (
        (("cluster",), settings.cluster),
        (("archive", "sink"), settings.archive.sink),
        (("consume",), settings.consume),
    ):
        for name in names:
            if _SAFE_NAME.fullmatch(name) is None:
                yield ConfigProblem(
                    (*key, name),
                    f"invalid {key[-1]} name {name!r}: use up to 64 letters, digits, '_' and '-'",
                )


def _check_values(settings: Settings) -> Iterator[ConfigProblem]:
    """Find numbers out of range, and text that would break a line or a path."""
    for key, value, _ in list_values(settings):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield from _check_number(value, key)
        elif key[0] != "redact":
            for text in value if isinstance(value, tuple) else (value,):
                yield from _check_text(text, key)


def _check_text(text: object, key: KeyPath) -> Iterator[ConfigProblem]:
    if isinstance(text, str) and not all(map(str.isprintable, text)):
        yield ConfigProblem(key, f"{'.'.join(key)!r} contains a control character: {text!r}")


def _check_number(value: float, key: KeyPath) -> Iterator[ConfigProblem]:
    """Check that a number is finite and not below its least value."""
    name = ".".join(key)
    if not math.isfinite(value):
        yield ConfigProblem(key, f"{name!r} must be a finite number, not {value!r}")
        return
    # max_bytes of a sink limit may be 0, for none.
    is_positive = key[-1] in _POSITIVE or key == ("journal", "max_bytes")
    if value < 0 or (value == 0 and is_positive):
        bound = "above 0" if is_positive else "0 or more"
        yield ConfigProblem(key, f"{name!r} must be {bound}, not {value!r}")


def _check_paths(settings: Settings) -> Iterator[ConfigProblem]:
    """Check that paths are absolute."""
    paths: list[tuple[KeyPath, str]] = [
        (("state_dir",), settings.state_dir),
        (("log_file",), settings.log_file),
        (("run_dir",), settings.run_dir),
        (("web", "munge_socket"), settings.web.munge_socket),
    ]
    for name, cluster in settings.cluster.items():
        path_fields = ("spool", "slurm_conf", "slurm_bin", "munge_socket", "jobcomp_lines")
        paths += [(("cluster", name, field), getattr(cluster, field)) for field in path_fields]
    for name, sink in settings.files_sinks().items():
        fields = ("path", "move_to")
        paths += [(("archive", "sink", name, field), getattr(sink, field)) for field in fields]
    for key, path in paths:
        if not path and key in (("state_dir",), ("run_dir",)):
            yield ConfigProblem(key, f"'{key[0]}' is empty: give an absolute path")
        elif path and not os.path.isabs(path):
            yield ConfigProblem(key, f"{'.'.join(key)!r} must be an absolute path, not {path!r}")
    if (settings.bank.enabled or settings.sensor.enabled) and any(
        map(str.isspace, settings.run_dir)
    ):
        # The submit plugin and slurmctld split lines with these paths at blanks.
        yield ConfigProblem(("run_dir",), "'run_dir' contains a blank: choose another path")


def _check_schedulers(settings: Settings) -> Iterator[ConfigProblem]:
    """Check that each cluster's scheduler is installed."""
    for name, cluster in settings.cluster.items():
        if cluster.scheduler == "slurm":
            continue  # searching all installed packages takes time
        schedulers = list_offers(SCHEDULERS)
        if cluster.scheduler not in schedulers:
            yield ConfigProblem(
                ("cluster", name, "scheduler"),
                f"unknown scheduler {cluster.scheduler!r}: use one of {', '.join(schedulers)}",
            )


def _check_spools(settings: Settings) -> Iterator[ConfigProblem]:
    """Check that spools differ and that Steward writes to no directory within one."""
    seen: dict[str, str] = {}
    for name, cluster in settings.cluster.items():
        key = ("cluster", name, "spool")
        has_scheduler = cluster.slurm or cluster.scheduler != "slurm"
        if not has_scheduler and not cluster.spool and not cluster.remote:
            yield ConfigProblem(
                ("cluster", name),
                f"cluster {name!r} has slurm = false, so Steward cannot ask Slurm for the "
                "spool: set its 'spool'",
            )
        if not cluster.spool:
            continue
        configured = os.path.normpath(cluster.spool)
        spool = os.path.realpath(configured)
        if spool in seen:
            yield ConfigProblem(
                key,
                f"clusters {seen[spool]!r} and {name!r} have the same spool {cluster.spool}: "
                "correct the 'spool' of one of them",
            )
        seen.setdefault(spool, name)
        for root_key, root in _list_written_directories(settings):
            if any(
                _is_within_directory(os.path.normpath(root), directory)
                for directory in (spool, configured)
            ):
                yield ConfigProblem(
                    root_key,
                    f"{root} lies in the spool of cluster {name!r}: choose another directory",
                )


def _list_written_directories(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """Yield the directories that Steward writes to, with their keys."""
    yield ("state_dir",), settings.state_dir
    for name, sink in settings.files_sinks().items():
        yield ("archive", "sink", name, "path"), settings.sink_path(name)
        if sink.move_to:
            yield ("archive", "sink", name, "move_to"), sink.move_to


def _is_within_directory(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _check_sinks(settings: Settings) -> Iterator[ConfigProblem]:
    """Check that the directories of sinks do not overlap with each other or the state directory."""
    # Not realpath: it would access the directories, and hang on a dead mount.
    roots = [(key, os.path.normpath(root)) for key, root in _list_written_directories(settings)]
    state_key, state = roots[0]
    for index, (key, root) in enumerate(roots[1:], start=1):
        if _is_within_directory(state, root) and not _is_hidden(state, root):
            yield ConfigProblem(
                key, f"archive {root} contains {state_key[0]} {state}: choose another directory"
            )
        for other_key, other in roots[1:index]:
            if _is_within_directory(root, other) or _is_within_directory(other, root):
                yield ConfigProblem(
                    key,
                    f"{_describe_owner(key)} writes to {root}, which overlaps with {other} of "
                    f"{_describe_owner(other_key)}: set another 'path' for one of them",
                )
    default = FilesSinkSettings().layout
    if any(sink.layout != default for sink in settings.files_sinks().values()):
        yield from run_offered_check("layout", ("archive", "sink"), settings)


def _is_hidden(path: str, directory: str) -> bool:
    """Return whether the path below the directory begins with a dot, as no archived file's does."""
    return os.path.relpath(path, directory).startswith(".") and path != directory


def _describe_owner(key: KeyPath) -> str:
    return f"sink {key[2]!r}" + (" (move_to)" if key[-1] == "move_to" else "")


def _check_zones(settings: Settings) -> Iterator[ConfigProblem]:
    """Check that time zones are known."""
    for name, cluster in settings.cluster.items():
        if not cluster.timezone:
            continue
        try:
            ZoneInfo(cluster.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            yield ConfigProblem(
                ("cluster", name, "timezone"),
                f"unknown timezone {cluster.timezone!r}: use an IANA name such as Europe/Paris",
            )


def _check_patterns(redact: RedactSettings) -> Iterator[ConfigProblem]:
    """Check that redaction patterns are valid regular expressions."""
    for field in ("names", "values"):
        patterns = getattr(redact, field)
        if not patterns:
            continue
        from steward.core.redaction import Redactor

        if "" in patterns:
            yield ConfigProblem(
                ("redact", field),
                f"'redact.{field}' contains an empty pattern, which matches everything: remove it",
            )
        try:
            Redactor(RedactSettings(**{field: patterns}))
        except StewardError as error:
            yield ConfigProblem(
                ("redact", field),
                f"'redact.{field}': invalid regular expression {error.offender!r}: "
                f"{error.__cause__}",
            )


_FILES = ("slurm_conf",)
"""Keys that name a file to read, besides those that end in ``_file``."""


def find_extension_problems(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield errors that only an extension can find: options that librdkafka rejects."""
    if settings.consume or any(sink.kind == "kafka" for sink in settings.archive.sink.values()):
        yield from run_offered_check("kafka", (), settings)


def find_missing_resources(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield what is missing on this host now: files, users, Python packages."""
    user = _find_other_user(settings.state_dir)
    for key, value, default in list_values(settings):
        if value != default and (key[-1].endswith("_file") or key[-1] in _FILES):
            yield from _check_readable(key, value, user)
    sensor = settings.sensor
    if sensor.enabled and sensor.helper and sensor.secret_file == SensorSettings().secret_file:
        yield from _check_readable(("sensor", "secret_file"), sensor.secret_file, user)
    for name, cluster in settings.cluster.items():
        yield from _check_jobcomp_directory(
            ("cluster", name, "jobcomp_lines"), cluster.jobcomp_lines
        )
    for name, sink in settings.archive.sink.items():
        for limit_name, limit_settings in getattr(sink, "limit", {}).items():
            yield from _find_missing_users(
                ("archive", "sink", name, "limit", limit_name), limit_settings
            )
    for key, driver in list_needed_drivers(settings):
        if not driver.is_installed:
            yield ConfigProblem(key, f"'{'.'.join(key)}': {driver.missing_error}")


def _find_other_user(state_dir: str) -> int | None:
    """Return Steward's uid, the owner of its state directory, if it is not this process's."""
    try:
        uid = os.stat(state_dir).st_uid
    except OSError:
        return None
    return None if uid == os.geteuid() else uid


def _check_jobcomp_directory(key: KeyPath, path: str) -> Iterator[ConfigProblem]:
    # The first job that ends creates the file; its directory must exist before.
    directory = os.path.dirname(path)
    if path and not os.path.isdir(directory):
        message = (
            f"{'.'.join(key)!r}: directory {directory} does not exist, so slurmctld cannot "
            "write to it: create it, writable by SlurmUser"
        )
        yield ConfigProblem(key, message)


def _check_readable(key: KeyPath, path: str, user: int | None) -> Iterator[ConfigProblem]:
    """Check that this process, and Steward's user ``user``, can read a file."""
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            file.read(1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        yield ConfigProblem(key, f"{'.'.join(key)!r}: cannot read {path}: {reason}")
        return
    if user is not None and can_access(user, "r", path) is False:
        message = (
            f"{'.'.join(key)!r}: Steward's user {_get_user_name(user)} cannot read {path}: "
            "let that user read it"
        )
        yield ConfigProblem(key, message)


def _get_user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file without blocking: it may be a pipe without a writer."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _find_missing_users(key: KeyPath, limit: LimitSettings) -> Iterator[ConfigProblem]:
    """Check that the users of a sink limit exist."""
    for user in limit.users:
        try:
            pwd.getpwnam(user)
        except KeyError:
            # A uid without a name counts as a user of that number.
            if not user.isdecimal():
                field = ".".join((*key, "users"))
                yield ConfigProblem(
                    (*key, "users"),
                    f"'{field}': user {user!r} does not exist on this host: create the user, "
                    "or name another",
                )
