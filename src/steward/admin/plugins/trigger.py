"""Trigger helper: install and check the program that slurmctld starts for Steward's triggers.

The helper is one file of Python (``steward.capture.sensor.trigger_helper``) that wakes the sensor.
Its secret, with which it identifies itself, belongs to SlurmUser, who runs the helper; Steward runs
as SlurmUser or as root and can read it.
"""

import os
import pwd
import secrets
import stat
from collections.abc import Mapping
from typing import Final

from steward.admin.plugins.errors import PluginInstallError
from steward.admin.plugins.installation import (
    OWN_FILE_MARK,
    InstallResult,
    describe_error,
    make_directory,
    replace_if_changed,
    require_plain_path,
)
from steward.admin.plugins.jobcomp import parse_slurm_user
from steward.capture.sensor import trigger_helper
from steward.core.files import can_access, replace_file

DEFAULT_PYTHON: Final = "/usr/bin/python3"
_SECRET_BYTES: Final = 32


def install_trigger(
    path: str, secret_file: str, *, user: str = "", interpreter: str = ""
) -> InstallResult:
    """Install the trigger helper, and create its secret if missing.

    Args:
        path: Path of the helper, the same on every host of slurmctld.
        secret_file: Path of the secret; an existing one is kept.
        user: Name of SlurmUser; the user of this process if empty.
        interpreter: Interpreter of the helper: the system's Python if empty.

    Raises:
        PluginInstallError: There is no such user, or something cannot be written.
    """
    interpreter = interpreter or DEFAULT_PYTHON
    for checked_path in (path, secret_file, interpreter):
        require_plain_path(checked_path)
    owner = _find_owner(user)
    written = [path]
    try:
        make_directory(os.path.dirname(path), 0o755)
        replace_if_changed(path, _build_helper(interpreter), 0o755)
        if not os.path.lexists(secret_file):
            make_directory(os.path.dirname(secret_file), 0o755)
            _write_secret(secret_file, owner)
            written.append(secret_file)
    except OSError as error:
        raise PluginInstallError(describe_error(error, path), path) from error
    remaining = (
        "set in [sensor] of Steward's configuration: enabled = true"
        + ("" if path == _get_default("helper") else f', helper = "{path}"')
        + (
            "" if secret_file == _get_default("secret_file") else f', secret_file = "{secret_file}"'
        ),
    )
    return InstallResult(written_paths=tuple(written), remaining=remaining)


def check_trigger(config: Mapping[str, str], path: str, secret_file: str, socket: str) -> list[str]:
    """Return what keeps slurmctld from waking the sensor, a line each.

    Args:
        config: Output of ``scontrol show config``.
        path: Path of the helper.
        secret_file: Path of the secret.
        socket: Socket of the sensor.
    """
    user_name, uid = parse_slurm_user(config) or ("root", 0)
    if not os.path.isfile(path):
        return [f"{path} does not exist: run steward plugins install --trigger"]
    faults = []
    if can_access(uid, "r", path) is False or not os.stat(path).st_mode & stat.S_IXOTH:
        faults.append(f"SlurmUser {user_name} cannot run {path}: chmod 0755 {path}")
    elif _is_outdated(path):
        faults.append(
            f"{path} is of another version of Steward: run steward plugins install --trigger"
        )
    faults += _check_secret(secret_file, user_name, uid)
    if os.path.exists(socket) and can_access(uid, "w", socket) is False:
        faults.append(
            f"SlurmUser {user_name} cannot reach {socket}: give the user access to its directories"
        )
    return faults


def _check_secret(path: str, user_name: str, uid: int) -> list[str]:
    """Check that the secret belongs to SlurmUser and is closed to others."""
    try:
        status = os.stat(path)
    except OSError as error:
        return [f"{path}: {error.strerror}: run steward plugins install --trigger"]
    if stat.S_IMODE(status.st_mode) & 0o077:
        return [f"{path} is accessible to other users: chmod 0600 {path}"]
    if status.st_uid != uid:
        return [f"{path} does not belong to SlurmUser: chown {user_name} {path}"]
    return []


def _get_default(field: str) -> str:
    from steward.capture.settings import SensorSettings

    return str(getattr(SensorSettings(), field))


def _build_helper(python: str) -> bytes:
    with open(trigger_helper.__file__, "rb") as file:
        # Isolated mode: it imports nothing from slurmctld's environment or directory.
        return f"#!{python} -I\n# {OWN_FILE_MARK}.\n".encode() + file.read()


def _is_outdated(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n", 2)
    except OSError:
        return False  # not readable here; the caller has checked that SlurmUser can run it
    return lines[1:] != _build_helper(DEFAULT_PYTHON).split(b"\n", 2)[1:]


def _find_owner(user: str) -> tuple[int, int] | None:
    """Return uid and gid for the secret; None for those of this process."""
    if not user:
        return None
    try:
        entry = pwd.getpwnam(user)
    except KeyError as error:
        raise PluginInstallError(
            f"unknown user {user!r}: give SlurmUser with --user", user
        ) from error
    if os.geteuid() not in (0, entry.pw_uid):
        raise PluginInstallError(
            f"the secret must belong to {user}: run this as root, or as {user}", user
        )
    return entry.pw_uid, entry.pw_gid


def _write_secret(path: str, owner: tuple[int, int] | None) -> None:
    # Mode 0600 from the start: a secret that was readable for a moment is none.
    with replace_file(path, 0o600, owner=owner, is_new=True) as file:
        file.write(secrets.token_urlsafe(_SECRET_BYTES).encode() + b"\n")
