"""Calls of actions by commands: in this process, over the daemon's socket, or over HTTPS.

``call_action`` and ``stream_action`` run an action at a ``ClientPlace``. ``find_place`` chooses
settings, a socket or an API; ``choose_transport`` makes the function that uses it. Root and
Steward's own user may read Steward's files, so for them the action runs in this process, whether or
not a daemon runs; only reads of the ledger go to a daemon that answers. Everybody else asks over
the daemon's socket or, on a host without one, over the API of the web pages. In each case the
action itself decides what the caller may see.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from steward.client.places import (
    ClientPlace,
    RemoteApi,
    find_archive_socket,
    find_readable_settings,
    has_socket,
    is_owner,
    read_host_place,
    read_user_api,
    run_locally,
)
from steward.client.sockets import ask_socket
from steward.core.actions import Action, Registry
from steward.core.config import Settings
from steward.core.errors import StewardError, UsageError
from steward.core.rpc import LONGEST_REQUEST, encode_request_line
from steward.daemon.registry import get_action

__all__ = [
    "RunAction",
    "ask_daemon",
    "call_action",
    "choose_transport",
    "find_place",
    "get_action",
    "stream_action",
]

LEDGER_SILENCE_S: Final = 10.0
"""Longest wait for a daemon that reads the ledger for a user who may read it, in seconds.

To read it here, the process imports SQLAlchemy: 200 ms of CPU.
"""
RunAction = Callable[[Action, Any], Iterator[Any]]
"""Function that runs an action: yields the items of its stream, if it is one, then its answer."""


def call_action(place: ClientPlace, action: Action, request: Any) -> Any:
    """Run an action and return its answer.

    Args:
        place: Daemon or files to use.
        action: The action.
        request: A value of the action's request type.

    Raises:
        DaemonAway: No daemon answers where it should.
        StewardError: The action rejects the request or fails.
    """
    answer = None
    for item in stream_action(place, action, request):
        answer = item
    return answer


def stream_action(place: ClientPlace, action: Action, request: Any) -> Iterator[Any]:
    """Run an action; yield its items, then its answer. Raises as :func:`call_action`."""
    return choose_transport(place)(action, request)


def choose_transport(place: ClientPlace) -> RunAction:
    """Choose how to run actions, from the options given or else from this host's configuration.

    Raises:
        UsageError: Several places were named, or the named one cannot be used.
    """
    target = find_place(place)
    if isinstance(target, Settings):
        return lambda action, request: _run_here(target, action, request)
    return lambda action, request: ask_daemon(target, action, request)


def _run_here(settings: Settings, action: Action, request: Any) -> Iterator[Any]:
    """Run an action on the files that settings name; the daemon reads the ledger, if it answers."""
    if action.package == "bank" and action.only_reads and not action.stream:
        try:
            # Another configuration's daemon may have this socket.
            yield from ask_socket(
                *(settings.socket, action, request),
                silence_s=LEDGER_SILENCE_S,
                state_dir=settings.state_dir,
            )
        except StewardError:
            pass  # this user can do without a daemon, and the same error comes from the files
        else:
            return
    yield from run_locally(_make_registry(settings), action, request)


def ask_daemon(
    place: str | RemoteApi, action: Action, request: Any, key: str = ""
) -> Iterator[Any]:
    """Send a request to a daemon, over its socket or the API of its pages.

    Raises:
        UsageError: The daemon does not accept a request of this size.
        StewardError: No daemon answers, or the action rejects the request or fails.
    """
    size = len(encode_request_line(action.name, request, key=key))
    if size > LONGEST_REQUEST:
        raise UsageError(
            f"request of {action.name} is too large: {size} bytes, and the daemon accepts at most "
            f"{LONGEST_REQUEST}. Run the command as root or Steward's user on the daemon's host: "
            "there it sends no request"
        )
    if isinstance(place, str):
        return ask_socket(place, action, request, key)
    from steward.client.web import ask_https

    return ask_https(place, action, request, key)


def find_place(place: ClientPlace) -> Settings | str | RemoteApi:
    """Find the place to ask: settings, if this user may read their files; else a socket or API.

    Raises:
        UsageError: Several places were named, or the named one cannot be used.
    """
    if place.config and place.socket and has_socket(place.socket, place.config):
        place = ClientPlace(config=place.config, archive=place.archive)
    given = [option for option in msgspec.structs.asdict(place).items() if option[1]]
    if len(given) > 1:
        names = " and ".join(f"--{name}" for name, _ in given)
        raise UsageError(f"{names} exclude each other: give one of them")
    if place.socket:
        return place.socket
    path = find_archive_socket(place)
    if path:
        return path
    api = None if given else read_user_api()
    if api is not None:
        return api
    settings = find_readable_settings(place)
    if settings is None:
        return read_host_place()
    return settings if is_owner(settings) else settings.socket


def _make_registry(settings: Settings) -> Registry:
    from steward.daemon.contexts import make_registry

    return make_registry(settings)
