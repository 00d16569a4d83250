"""Calls of actions by commands: in this process, over the daemon's socket, or over HTTPS.

``call`` and ``stream`` run an action at a :class:`Place`. Root and Steward's own user may read
Steward's files, so for them the action runs in this process, whether or not a daemon runs.
Everybody else asks over the daemon's socket or, on a host without one, over the API of the
web pages. The action itself decides what the caller may see.
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
"""Run an action: yield the items of its stream, if it is one, then its answer."""


def call(place: Place, action: Action, request: Any) -> Any:
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
    for item in stream(place, action, request):
        answer = item
    return answer


def stream(place: Place, action: Action, request: Any) -> Iterator[Any]:
    """Run an action; yield the items of a stream, then its answer. Raises as :func:`call`."""
    return choose(place)(action, request)


def choose(place: Place) -> Asked:
    """Choose how to run actions, from the options given or else from this host's configuration.

    Raises:
        UsageError: Several places were named, or the named one cannot be used.
    """
    found = where(place)
    if isinstance(found, Settings):
        return lambda action, request: local(_registry(found), action, request)
    return lambda action, request: elsewhere(found, action, request)


def elsewhere(way: str | Web, action: Action, request: Any, key: str = "") -> Iterator[Any]:
    """Send a request to a daemon, over its socket or the API of its pages."""
    if isinstance(way, str):
        return remote(way, action, request, key)
    from steward.client.web import over_https

    return over_https(way, action, request, key)


def where(place: Place) -> Settings | str | Web:
    """Find the place to ask: settings, if their files are ours to read; else a socket or pages.

    Raises:
        UsageError: Several places were named, or the named one cannot be used.
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
