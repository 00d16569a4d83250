"""An archive that one command keeps without a configuration file: its directory holds everything.

``archive watch`` and ``archive consume`` write the settings that their options
make into it, become the daemon of those, and the other commands find them there.
"""

import os
import re
from typing import Final

import msgspec

from steward.accounting.settings import AccountingSettings
from steward.archive.errors import ArchiveUnavailable
from steward.archive.files.tree import Keeper
from steward.client.here import ARCHIVE_SETTINGS, ARCHIVE_SOCKET, ARCHIVE_STATE
from steward.core.config import Settings
from steward.core.config.reader import ConfigError, Loaded, render
from steward.core.config.reader import checked as checked_settings
from steward.core.errors import StewardError, UsageError
from steward.core.files import network_kind

_KEY: Final = re.compile(r"'(?:[^'\s.]+\.)*([a-z_]+)'")
"""A setting's key as messages name it, in quotes and with the tables around it."""
_HEADING: Final = "# Written by 'steward archive {}' each time it starts.\n"


class SetUpError(StewardError):
    """The archive cannot be set up."""


def settings_path(root: str) -> str:
    """The file that holds the settings of the archive in ``root``."""
    return os.path.join(root, ARCHIVE_STATE, ARCHIVE_SETTINGS)


def state_dir(root: str, name: str) -> str:
    """Where databases go: in the archive, or at home where it is on a network file system.

    Args:
        root: The archive's directory; it need not be there yet.
        name: Of a directory at home that is this archive's alone.
    """
    nearest = root
    while not os.path.isdir(nearest):
        nearest = os.path.dirname(nearest)
    if not network_kind(nearest):
        return os.path.join(root, ARCHIVE_STATE)
    if os.geteuid() == 0:
        return f"/var/lib/steward/{name}"
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(os.path.abspath(home), "steward", name)


def checked(settings: Settings, command: str, options: dict[str, str]) -> Settings:
    """Settings that options make, if nothing is wrong with them.

    Args:
        settings: What to check.
        command: Which command of ``steward archive`` this is.
        options: The option, by the key that it sets; "" for a key that goes unsaid.

    Raises:
        UsageError: Something is wrong; it is said in terms of the options.
    """

    def said(quoted: re.Match[str]) -> str:
        option = options.get(quoted[1])
        return quoted[0] if option is None else option and f"'{option}'"

    try:
        return checked_settings(settings, f"archive {command}")
    except ConfigError as error:
        what = " ".join(_KEY.sub(said, str(error)).split())
        raise UsageError(what, error.key) from error


def set_up(root: str, settings: Settings, command: str) -> Settings:
    """Make the directories, and leave the settings there for the other commands.

    Args:
        root: The archive's directory.
        settings: The settings, but for the socket.
        command: Which command of ``steward archive`` this is.

    Returns:
        The settings that were left.

    Raises:
        SetUpError: Something cannot be written, or another command keeps this archive.
    """
    settings = msgspec.structs.replace(
        settings,
        socket=os.path.join(settings.state_dir, ARCHIVE_SOCKET),
        # An archive keeps no books.
        accounting=AccountingSettings(type="jobacct/none"),
    )
    own = os.path.join(root, ARCHIVE_STATE)
    path = settings_path(root)
    _refuse_others(path, root, command)
    try:
        Keeper(settings.state_dir, root).look()
    except ArchiveUnavailable as error:
        raise SetUpError(str(error), root) from error
    try:
        if not os.path.isdir(root):
            os.makedirs(root)
        os.makedirs(own, exist_ok=True)
        # Users reach the socket in it; what else is there is ours alone, file by file.
        os.chmod(own, 0o711)  # noqa: S103 - it can be passed through, not listed
        os.makedirs(settings.state_dir, mode=0o700, exist_ok=True)
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(_HEADING.format(command))
            file.write(render(Loaded(settings)))
        os.replace(f"{path}.new", path)
    except OSError as error:
        where = error.filename or root
        raise SetUpError(f"cannot set up the archive: {where}: {error.strerror}", root) from error
    return settings


def _refuse_others(path: str, root: str, command: str) -> None:
    """See that the settings there are this command's: others would be forgotten."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            heading = file.readline(200)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SetUpError(f"cannot set up the archive: {path}: {error.strerror}", root) from error
    if heading != _HEADING.format(command):
        raise SetUpError(
            f"{root} is kept by another command, see {path}: give another directory, or have "
            "'steward serve' do both by a configuration file",
            root,
        )
