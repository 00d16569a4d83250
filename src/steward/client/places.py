"""Places to send requests to: options, client.toml, environment, and files of this host.

:class:`ClientPlace` holds the options of a command, :class:`RemoteApi` the address and token of a
remote API, :class:`ClientFile` the content of ``/etc/steward/client.toml``. ``calls.find_place``
combines the functions here: ``find_readable_settings`` and ``is_owner`` for work on Steward's
files, ``find_archive_socket``, ``read_user_api`` (the environment) and ``read_host_place``
(client.toml) for a daemon. ``require_settings`` is for commands that work on the files alone. The
errors of the client are here too.
"""

import os
import tomllib
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from steward.core.access import get_process_user
from steward.core.actions import Action, Registry
from steward.core.config import Settings
from steward.core.config.reader import DEFAULT_PATH, ConfigError, load_settings
from steward.core.errors import StewardError, Unavailable, UsageError


class ClientError(StewardError):
    """An answer cannot be decoded."""


class DaemonAway(Unavailable):
    """No daemon answers."""


class ClientPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Place to send requests to; at most one of these is given.

    Attributes:
        config: Configuration file whose state directory to read.
        socket: Unix socket of a daemon.
        archive: Directory that ``archive watch`` maintains.
    """

    config: str = ""
    socket: str = ""
    archive: str = ""


class RemoteApi(msgspec.Struct, frozen=True, kw_only=True):
    """Address and credentials of a Steward's HTTP API.

    Attributes:
        url: Address of its web pages: ``https://steward.example.org``.
        token: API token; "" for this user's stored one, see :mod:`steward.client.web`.
        token_file: File with the token; "" for the usual one.
        ca_file: CA certificates that verify the server's; "" for the system's.
        munge_socket: Socket of the munged that identifies us without a token; "" for MUNGE's
            default.
    """

    url: str
    token: str = ""
    token_file: str = ""
    ca_file: str = ""
    munge_socket: str = ""


CLIENT_PATH = "/etc/steward/client.toml"
"""Client file of this host."""
ARCHIVE_STATE: Final = ".steward"
"""Directory in an archive's root in which ``archive watch`` keeps its state."""
ARCHIVE_SETTINGS: Final = "steward.toml"
"""Name of the configuration file in ARCHIVE_STATE."""
ARCHIVE_SOCKET: Final = "steward.sock"
"""Name of the daemon's socket in ARCHIVE_STATE."""
URL: Final = "STEWARD_URL"
"""Environment variable with the address of another host's Steward."""
MUNGE_SOCKET: Final = "STEWARD_MUNGE_SOCKET"
"""Environment variable with the socket of another munged than the host's usual one."""


class ClientFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of client.toml: where commands on this host send requests.

    Attributes:
        socket: Unix socket of a daemon; "" for the usual one.
        url: Address of Steward's pages, instead of a socket.
        token_file: File with a user's token; ``~`` is the user's home.
        ca_file: CA certificates that verify the pages'; "" for the system's.
        munge_socket: Socket of the munged that identifies users without a token; "" for
            MUNGE's default.
    """

    socket: str = ""
    url: str = ""
    token_file: str = ""
    ca_file: str = ""
    munge_socket: str = ""


def run_locally(registry: Registry, action: Action, request: Any) -> Iterator[Any]:
    """Run an action in this process, as its user; yield items and answer."""
    result = registry.call(action.name, get_process_user(), request)
    if action.stream:
        yield from result
    else:
        yield result


def require_settings(place: ClientPlace) -> Settings:
    """Return the settings for a command that works on Steward's files directly.

    Raises:
        UsageError: Nothing is configured here, or this user may not change its files.
    """
    settings = find_readable_settings(place)
    if settings is None:
        raise UsageError(
            f"no configuration {DEFAULT_PATH}: name one with --config, or an archive with --archive"
        )
    if not is_owner(settings):
        raise UsageError("permission denied: only root and Steward's user may do this")
    return settings


def find_readable_settings(place: ClientPlace) -> Settings | None:
    """Read the named settings, or this host's; return None if this user may read none.

    Raises:
        ConfigError: They cannot be understood.
        UsageError: The named directory is no archive.
    """
    if place.archive:
        path = get_archive_config_path(place.archive)
        try:
            os.stat(path)
        except FileNotFoundError:
            raise UsageError(
                f"cannot find {place.archive}/{ARCHIVE_STATE}/{ARCHIVE_SETTINGS}: is it an archive "
                "of 'steward archive watch'?",
                place.archive,
            ) from None
        except OSError:
            pass  # loading it reports why it cannot be read
        return load_settings(path)
    if place.config:
        return load_settings(place.config)
    is_readable = os.access(DEFAULT_PATH, os.R_OK, effective_ids=True)
    return load_settings(DEFAULT_PATH) if is_readable else None


def get_archive_config_path(archive: str) -> str:
    """Return the path of the configuration file of ``archive watch`` in an archive."""
    return os.path.join(os.path.abspath(archive), ARCHIVE_STATE, ARCHIVE_SETTINGS)


def find_archive_socket(place: ClientPlace) -> str:
    """Return the socket in an archive whose settings this user may not read; "" for others."""
    if not place.archive:
        return ""
    settings = get_archive_config_path(place.archive)
    path = os.path.join(os.path.dirname(settings), ARCHIVE_SOCKET)
    is_readable = os.access(settings, os.R_OK, effective_ids=True)
    return path if os.path.exists(path) and not is_readable else ""


def has_socket(path: str, config: str) -> bool:
    """Return whether the daemon of a configuration listens on a socket; False if unreadable."""
    try:
        return load_settings(config).socket == path
    except ConfigError:
        return False


def is_owner(settings: Settings) -> bool:
    """Return whether this process runs as root or Steward's user."""
    uid = os.geteuid()
    if uid == 0:
        return True
    try:
        status = os.stat(settings.state_dir)
    except OSError:
        return False  # not even visible: it belongs to another user
    return status.st_uid == uid


def read_host_place() -> str | RemoteApi:
    """Return the socket or the API that this host's client file names.

    Raises:
        UsageError: The file cannot be read.
    """
    client_file = read_client_file()
    if client_file.url and client_file.socket:
        raise UsageError(f"{CLIENT_PATH} sets both socket and url: remove one of them", CLIENT_PATH)
    if client_file.url:
        return _make_api(client_file, client_file.url)
    return client_file.socket or Settings().socket


def read_user_api() -> RemoteApi | None:
    """Return the API that the environment names; None if it names none."""
    url = os.environ.get(URL, "")
    if not url:
        return None
    client_file = read_client_file()
    return _make_api(client_file, url)


def _make_api(client_file: ClientFile, url: str) -> RemoteApi:
    return RemoteApi(
        url=url,
        token_file=client_file.token_file,
        ca_file=client_file.ca_file,
        munge_socket=os.environ.get(MUNGE_SOCKET, "") or client_file.munge_socket,
    )


def read_client_file() -> ClientFile:
    """Read this host's client file.

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
        raise UsageError(f"cannot read {CLIENT_PATH}: {error}", CLIENT_PATH) from error
