"""How a command has an action done: in this process, or by asking the daemon.

Root and Steward's own user may read Steward's files, so for them the action
runs here, whether or not a daemon runs. Everybody else asks over the daemon's
socket. Either way the same action decides what the asker may see.
"""

import contextlib
import os
import pwd
import socket
import tomllib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import msgspec

from steward.access import Asker
from steward.actions import Action, Registry
from steward.cli.place import Place
from steward.config import Settings
from steward.daemon.protocol import Reply, address, ask_line, error_of, read_reply
from steward.errors import StewardError, Unavailable, UsageError
from steward.settings.file import DEFAULT_PATH, ConfigError, load

CLIENT_PATH = "/etc/steward/client.toml"
ARCHIVE_STATE = ".steward"
"""Directory in an archive's root that ``archive watch`` keeps its state in."""
ARCHIVE_SETTINGS = "steward.toml"
ARCHIVE_SOCKET = "steward.sock"

_CONNECT_S = 10.0
_SILENCE_S = 330.0


class ClientError(StewardError):
    """An answer cannot be understood."""


class DaemonAway(Unavailable):
    """No daemon answers."""


Asked = Callable[[Action, Any], Iterator[Any]]
"""Has an action done: the items of its stream, if it is one, then its answer."""


def action(name: str) -> Action:
    """What an action of that name takes and answers."""
    from steward.daemon.rooms import ACTIONS

    return ACTIONS[name]


def call(place: Place, action: Action, request: Any) -> Any:
    """The answer to a request.

    Args:
        place: Where to ask.
        action: What is asked for.
        request: A value of the action's request type.

    Raises:
        DaemonAway: No daemon answers where it should.
        StewardError: Whatever the action refuses or cannot do.
    """
    answer = None
    for item in stream(place, action, request):
        answer = item
    return answer


def stream(place: Place, action: Action, request: Any) -> Iterator[Any]:
    """The items of a stream and at last its answer; raises as :func:`call`."""
    return choose(place)(action, request)


def choose(place: Place) -> Asked:
    """The way to ask, from what was named or else from what this host has configured.

    Raises:
        UsageError: More than one way was named, or the one named cannot be gone.
    """
    found = where(place)
    if isinstance(found, Settings):
        return lambda action, request: local(_registry(found), action, request)
    return lambda action, request: remote(found, action, request)


def where(place: Place) -> Settings | str:
    """The settings of a Steward whose files are ours to read; else the socket to ask at.

    Raises:
        UsageError: More than one way was named, or the one named cannot be gone.
    """
    if place.config and place.socket and _listens_at(place.socket, place.config):
        place = Place(config=place.config, archive=place.archive)
    named = [option for option in msgspec.structs.asdict(place).items() if option[1]]
    if len(named) > 1:
        names = " and ".join(f"--{name}" for name, _ in named)
        raise UsageError(f"{names} name different places to ask: give one of them")
    if place.socket:
        return place.socket
    path = _archive_socket(place)
    if path:
        return path
    settings = _settings(place)
    if settings is None:
        return _client_socket()
    return settings if _is_ours(settings) else settings.socket


def this_user() -> Asker:
    """Whoever runs this process."""
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = ""
    return Asker(uid=uid, user=user, how="local")


def local(registry: Registry, action: Action, request: Any) -> Iterator[Any]:
    """Run an action in this process, as whoever runs it."""
    result = registry.call(action.name, this_user(), request)
    if action.stream:
        yield from result
    else:
        yield result


def remote(path: str, action: Action, request: Any) -> Iterator[Any]:
    """Ask the daemon that listens on a socket."""
    items = msgspec.json.Decoder(_union(action.items))
    with _connect(path) as connection:
        # Who is turned away is not listened to; why is what is read next.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(ask_line(action.name, request))
        with connection.makefile("rb") as lines:
            while True:
                reply = _next_reply(lines, path)
                if reply.error:
                    raise error_of(reply)
                try:
                    if reply.ok:
                        yield msgspec.json.decode(reply.answer, type=action.answer)
                        return
                    item = items.decode(reply.item)
                except msgspec.MsgspecError as error:
                    raise _not_understood(path, error) from error
                yield item


def _next_reply(lines: BinaryIO, path: str) -> Reply:
    try:
        line = lines.readline()
    except TimeoutError as error:
        raise DaemonAway(f"the daemon on {path} does not answer any more", path) from error
    except ConnectionResetError:
        line = b""
    if not line:
        raise DaemonAway(f"the daemon on {path} ended the connection: its log says why", path)
    try:
        return read_reply(line)
    except msgspec.MsgspecError as error:
        raise _not_understood(path, error) from error


def _not_understood(path: str, error: Exception) -> ClientError:
    return ClientError(
        f"the answer of the daemon on {path} cannot be understood: is it of another release? "
        f"({error})",
        path,
    )


def settings_here(place: Place) -> Settings:
    """The settings of a command that works on Steward's files itself.

    Raises:
        UsageError: Nothing is configured here, or it is not ours to work on.
    """
    settings = _settings(place)
    if settings is None:
        raise UsageError(f"there is no {DEFAULT_PATH}: say which with --config or --archive")
    if not _is_ours(settings):
        raise UsageError("only root and Steward's own user can do that")
    return settings


def settings_readable(place: Place) -> Settings | None:
    """The settings that were named, or those of this host, where this user may read them.

    Raises:
        ConfigError: They cannot be understood.
    """
    return _settings(place)


def settings_of_archive(archive: str) -> str:
    """The configuration file that ``archive watch`` left in an archive."""
    return os.path.join(os.path.abspath(archive), ARCHIVE_STATE, ARCHIVE_SETTINGS)


def _settings(place: Place) -> Settings | None:
    """The settings that were named, or those of this host; None where there are none."""
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


def _listens_at(path: str, config: str) -> bool:
    """Whether the daemon of a configuration listens on a socket, as far as may be read here."""
    try:
        return load(config).socket == path
    except ConfigError:
        return False


def _archive_socket(place: Place) -> str:
    """The socket in an archive whose settings only its owner may read; "" for all others."""
    if not place.archive:
        return ""
    settings = settings_of_archive(place.archive)
    path = os.path.join(os.path.dirname(settings), ARCHIVE_SOCKET)
    is_ours = os.access(settings, os.R_OK, effective_ids=True)
    return path if os.path.exists(path) and not is_ours else ""


def _client_socket() -> str:
    """The socket that this host's client configuration names."""
    try:
        with open(CLIENT_PATH, "rb") as file:
            path = tomllib.load(file).get("socket", "")
    except FileNotFoundError:
        return Settings().socket
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{CLIENT_PATH} cannot be read: {error}", CLIENT_PATH) from error
    if not isinstance(path, str):
        raise UsageError(f"{CLIENT_PATH}: 'socket' must be text in quotes", CLIENT_PATH)
    return path or Settings().socket


def _is_ours(settings: Settings) -> bool:
    """Whether whoever runs this is root or Steward's user."""
    uid = os.geteuid()
    if uid == 0:
        return True
    try:
        status = os.stat(settings.state_dir)
    except OSError:
        return False  # not even visible: somebody else's
    return status.st_uid == uid


def _registry(settings: Settings) -> Registry:
    from steward.daemon.rooms import registry

    return registry(settings)


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_S)
    try:
        with address(path) as name:
            connection.connect(name)
    except OSError as error:
        connection.close()
        reason = error.strerror or str(error)
        raise DaemonAway(
            f"no daemon answers on {path} ({reason}): start 'steward serve', "
            "or say with --config or --socket where to ask",
            path,
        ) from error
    connection.settimeout(_SILENCE_S)
    return connection


def _union(types: tuple[type[msgspec.Struct], ...]) -> Any:
    union: Any = Any
    for index, kind in enumerate(types):
        union = kind if index == 0 else union | kind
    return union
