"""How a command has an action done: in this process, or by asking the daemon.

Root and Steward's own user may read Steward's files, so for them the action
runs here, whether or not a daemon runs. Everybody else asks over the daemon's
socket, or, from a host that has none, over the API of its pages. In any case the
same action decides what the asker may see.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from steward.client.places import (
    Place,
    Web,
    archive_socket,
    is_ours,
    listens_at,
    local,
    named_by_host,
    named_by_user,
    settings_readable,
)
from steward.client.sockets import remote
from steward.core.actions import Action, Registry
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.daemon.registry import action

__all__ = ["Asked", "action", "call", "choose", "elsewhere", "stream", "where"]

Asked = Callable[[Action, Any], Iterator[Any]]
"""Has an action done: the items of its stream, if it is one, then its answer."""


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
    return lambda action, request: elsewhere(found, action, request)


def elsewhere(way: str | Web, action: Action, request: Any, key: str = "") -> Iterator[Any]:
    """Ask a daemon, by its socket or by its pages."""
    if isinstance(way, str):
        return remote(way, action, request, key)
    from steward.client.web import over_https

    return over_https(way, action, request, key)


def where(place: Place) -> Settings | str | Web:
    """The settings of a Steward whose files are ours to read; else the socket or pages to ask.

    Raises:
        UsageError: More than one way was named, or the one named cannot be gone.
    """
    if place.config and place.socket and listens_at(place.socket, place.config):
        place = Place(config=place.config, archive=place.archive)
    named = [option for option in msgspec.structs.asdict(place).items() if option[1]]
    if len(named) > 1:
        names = " and ".join(f"--{name}" for name, _ in named)
        raise UsageError(f"{names} name different places to ask: give one of them")
    if place.socket:
        return place.socket
    path = archive_socket(place)
    if path:
        return path
    far = None if named else named_by_user()
    if far is not None:
        return far
    settings = settings_readable(place)
    if settings is None:
        return named_by_host()
    return settings if is_ours(settings) else settings.socket


def _registry(settings: Settings) -> Registry:
    from steward.daemon.contexts import action_registry

    return action_registry(settings)
