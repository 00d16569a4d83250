"""What a look at this host tells of settings that are right by themselves.

Only ``steward config check`` looks: what is missing now may be there when it is needed, so
the daemon starts without it, and waits.
"""

import os
import pwd
from collections.abc import Iterator

import msgspec

from steward.archive.settings import LimitSettings
from steward.capture.settings import SensorSettings
from steward.core.config import Settings
from steward.core.config.problem import Problem, offered_check
from steward.core.config.toml_lines import KeyPath
from steward.core.drivers import needed_drivers
from steward.core.filesystems import may
from steward.core.section import Section

_FILES = ("slurm_conf",)
"""Keys that name a file to read, beside those that end so."""


def mistakes(settings: Settings) -> Iterator[Problem]:
    """What will not be right later either: options that librdkafka does not take."""
    if settings.consume or any(sink.kind == "kafka" for sink in settings.archive.sink.values()):
        yield from offered_check("kafka", (), settings)


def doubts(settings: Settings) -> Iterator[Problem]:
    """What is missing here and now: files, users, Python packages."""
    user = _other_user(settings.state_dir)
    yield from _missing_files(settings, (), user)
    sensor = settings.sensor
    if sensor.enabled and sensor.triggers and sensor.secret_file == SensorSettings().secret_file:
        yield from _unreadable(("sensor", "secret_file"), sensor.secret_file, user)
    for name, cluster in settings.cluster.items():
        yield from _lines_missed(("cluster", name, "jobcomp_lines"), cluster.jobcomp_lines)
    for name, sink in settings.archive.sink.items():
        for limit, of in getattr(sink, "limit", {}).items():
            yield from _missing_users(("archive", "sink", name, "limit", limit), of)
    for key, driver in needed_drivers(settings):
        if not driver.is_installed:
            yield Problem(key, f"'{'.'.join(key)}': {driver.missing}")


def _other_user(state_dir: str) -> int | None:
    """Whom Steward runs as, where that is not who looks: the owner of its state directory."""
    try:
        uid = os.stat(state_dir).st_uid
    except OSError:
        return None
    return None if uid == os.geteuid() else uid


def _lines_missed(key: KeyPath, path: str) -> Iterator[Problem]:
    # The file comes with the first job that ends; its directory has to be there before.
    directory = os.path.dirname(path)
    if path and not os.path.isdir(directory):
        told = f"{'.'.join(key)!r}: {directory} is not there, so slurmctld cannot write to it"
        yield Problem(key, told)


def _missing_files(section: Section, key: KeyPath, user: int | None) -> Iterator[Problem]:
    for field in msgspec.structs.fields(type(section)):
        value = getattr(section, field.name)
        here = (*key, field.name)
        if isinstance(value, Section):
            yield from _missing_files(value, here, user)
        elif isinstance(value, dict):
            for name, inner in value.items():
                if isinstance(inner, Section):
                    yield from _missing_files(inner, (*here, name), user)
        elif value != field.default and (field.name.endswith("_file") or field.name in _FILES):
            yield from _unreadable(here, value, user)


def _unreadable(key: KeyPath, path: str, user: int | None) -> Iterator[Problem]:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            file.read(1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        yield Problem(key, f"{'.'.join(key)!r}: {path} cannot be read: {reason}")
        return
    if user is not None and may(user, "r", path) is False:
        told = f"{'.'.join(key)!r}: {path} cannot be read by {_name(user)}, as whom Steward runs"
        yield Problem(key, told)


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _without_waiting(path: str, flags: int) -> int:
    """Open a file that may be a pipe, for whose writer nobody is to wait."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _missing_users(key: KeyPath, limit: LimitSettings) -> Iterator[Problem]:
    for user in limit.users:
        try:
            pwd.getpwnam(user)
        except KeyError:
            # A uid without a name is called by its number.
            if not user.isdecimal():
                where = ".".join((*key, "users"))
                yield Problem((*key, "users"), f"'{where}': there is no user {user!r} here")
