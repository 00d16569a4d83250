"""What can go wrong when Steward is asked."""

import os
import tomllib
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from steward.core.access import this_user
from steward.core.actions import Action, Registry
from steward.core.config import Settings
from steward.core.config.reader import DEFAULT_PATH, ConfigError, load
from steward.core.errors import StewardError, Unavailable, UsageError


class ClientError(StewardError):
    """An answer cannot be understood."""


class DaemonAway(Unavailable):
    """No daemon answers."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where to ask: at most one of these is given.

    Attributes:
        config: A configuration file, whose state directory is read.
        socket: A daemon's socket.
        archive: A directory that ``archive watch`` keeps.
    """

    config: str = ""
    socket: str = ""
    archive: str = ""


class Web(msgspec.Struct, frozen=True, kw_only=True):
    """A Steward whose API is asked.

    Attributes:
        url: Where its pages are: ``https://steward.example.org``.
        token: What lets us in; "" for what this user has put down, see :mod:`steward.client.web`.
        token_file: The file in which the token is; "" for the usual one.
        ca_file: Certificates that its own is checked against; "" for the system's.
        munge_socket: Socket of the munged that says who we are where there is no token; ""
            for MUNGE's default.
    """

    url: str
    token: str = ""
    token_file: str = ""
    ca_file: str = ""
    munge_socket: str = ""


CLIENT_PATH = "/etc/steward/client.toml"
ARCHIVE_STATE: Final = ".steward"
"""Directory in an archive's root that ``archive watch`` keeps its state in."""
ARCHIVE_SETTINGS: Final = "steward.toml"
ARCHIVE_SOCKET: Final = "steward.sock"
URL: Final = "STEWARD_URL"
"""The variable that names another host's Steward …"""
MUNGE_SOCKET: Final = "STEWARD_MUNGE_SOCKET"
"""… and the one that names another munged than the host's usual one."""


class ClientFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """client.toml: where commands on this host ask.

    Attributes:
        socket: A daemon's socket; "" for the usual one.
        url: Instead of it, where Steward's pages are.
        token_file: Where a user's token is; ``~`` is their home.
        ca_file: Certificates that the pages' own is checked against; "" for the system's.
        munge_socket: Socket of the munged that says who somebody without a token is; "" for
            MUNGE's default.
    """

    socket: str = ""
    url: str = ""
    token_file: str = ""
    ca_file: str = ""
    munge_socket: str = ""


def local(registry: Registry, action: Action, request: Any) -> Iterator[Any]:
    """Run an action in this process, as whoever runs it."""
    result = registry.call(action.name, this_user(), request)
    if action.stream:
        yield from result
    else:
        yield result


def settings_here(place: Place) -> Settings:
    """The settings of a command that works on Steward's files itself.

    Raises:
        UsageError: Nothing is configured here, or it is not ours to work on.
    """
    settings = settings_readable(place)
    if settings is None:
        raise UsageError(f"there is no {DEFAULT_PATH}: say which with --config or --archive")
    if not is_ours(settings):
        raise UsageError("only root and Steward's own user can do that")
    return settings


def settings_readable(place: Place) -> Settings | None:
    """The settings that were named, or those of this host; None where this user may read none.

    Raises:
        ConfigError: They cannot be understood.
        UsageError: What was named is no archive.
    """
    if place.archive:
        path = settings_of_archive(place.archive)
        try:
            os.stat(path)
        except FileNotFoundError:
            raise UsageError(
                f"{place.archive} holds no {ARCHIVE_STATE}/{ARCHIVE_SETTINGS}: "
                "is it an archive that 'steward archive watch' keeps?",
                place.archive,
            ) from None
        except OSError:
            pass  # loading it says why it cannot be read
        return load(path)
    if place.config:
        return load(place.config)
    is_readable = os.access(DEFAULT_PATH, os.R_OK, effective_ids=True)
    return load(DEFAULT_PATH) if is_readable else None


def settings_of_archive(archive: str) -> str:
    """The configuration file that ``archive watch`` left in an archive."""
    return os.path.join(os.path.abspath(archive), ARCHIVE_STATE, ARCHIVE_SETTINGS)


def archive_socket(place: Place) -> str:
    """The socket in an archive whose settings only its owner may read; "" for all others."""
    if not place.archive:
        return ""
    settings = settings_of_archive(place.archive)
    path = os.path.join(os.path.dirname(settings), ARCHIVE_SOCKET)
    is_ours_to_read = os.access(settings, os.R_OK, effective_ids=True)
    return path if os.path.exists(path) and not is_ours_to_read else ""


def listens_at(path: str, config: str) -> bool:
    """Whether the daemon of a configuration listens on a socket, as far as may be read here."""
    try:
        return load(config).socket == path
    except ConfigError:
        return False


def is_ours(settings: Settings) -> bool:
    """Whether whoever runs this is root or Steward's user."""
    uid = os.geteuid()
    if uid == 0:
        return True
    try:
        status = os.stat(settings.state_dir)
    except OSError:
        return False  # not even visible: somebody else's
    return status.st_uid == uid


def named_by_host() -> str | Web:
    """The socket or the pages that this host's client file names.

    Raises:
        UsageError: The file cannot be read.
    """
    found = client_file()
    if found.url and found.socket:
        raise UsageError(f"{CLIENT_PATH} names a socket and a url: keep one of them", CLIENT_PATH)
    if found.url:
        return _web(found, found.url)
    return found.socket or Settings().socket


def named_by_user() -> Web | None:
    """The pages that the environment names; None if it names none."""
    url = os.environ.get(URL, "")
    if not url:
        return None
    found = client_file()
    return _web(found, url)


def _web(found: ClientFile, url: str) -> Web:
    return Web(
        url=url,
        token_file=found.token_file,
        ca_file=found.ca_file,
        munge_socket=os.environ.get(MUNGE_SOCKET, "") or found.munge_socket,
    )


def client_file() -> ClientFile:
    """What this host's client file says.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        with open(CLIENT_PATH, "rb") as file:
            return msgspec.convert(tomllib.load(file), ClientFile)
    except FileNotFoundError:
        return ClientFile()
    except msgspec.ValidationError as error:
        raise UsageError(f"{CLIENT_PATH}: {error}", CLIENT_PATH) from error
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{CLIENT_PATH} cannot be read: {error}", CLIENT_PATH) from error
