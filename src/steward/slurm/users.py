"""User and group names: resolve uids and gids on this host, with a cache.

Slurm's own names are not used: 22.05 prints "nobody" for an unresolved uid, and later versions
print the number. Only :mod:`steward.slurm.sacct` falls back to them, for users who have left.
"""

import grp
import pwd
import time
from collections.abc import Callable
from typing import TypeVar

_RESOLVED_S = 600.0
_UNRESOLVED_S = 60.0
_MOST = 20_000


class NameResolver:
    """Resolver of users and groups; caches names for ten minutes, failures for one."""

    def __init__(self) -> None:
        self._users: dict[int, tuple[str, float]] = {}
        self._groups: dict[int, tuple[str, float]] = {}
        self._uids: dict[str, tuple[int | None, float]] = {}
        self._gids: dict[str, tuple[int | None, float]] = {}

    def user(self, uid: int) -> str:
        """Return the name of a uid; "" if it does not resolve."""
        return _look_up(uid, self._users, _resolve_user)

    def group(self, gid: int) -> str:
        """Return the name of a gid; "" if it does not resolve."""
        return _look_up(gid, self._groups, _resolve_group)

    def uid(self, user: str) -> int | None:
        """Return the uid of a user name; None if it does not resolve."""
        return _look_up(user, self._uids, _resolve_uid)

    def gid(self, group: str) -> int | None:
        """Return the gid of a group name; None if it does not resolve."""
        return _look_up(group, self._gids, _resolve_gid)

    def clear(self) -> None:
        """Clear the cache."""
        for cache in (self._users, self._groups, self._uids, self._gids):
            cache.clear()


K = TypeVar("K", int, str)
V = TypeVar("V")


def _look_up(key: K, cache: dict[K, tuple[V, float]], resolve: Callable[[K], V]) -> V:
    """Return a cached value, or resolve it and cache the result."""
    now = time.monotonic()
    entry = cache.get(key)
    if entry is not None and now < entry[1]:
        return entry[0]
    if len(cache) >= _MOST:
        cache.clear()
    value = resolve(key)
    lifetime_s = _UNRESOLVED_S if value is None or value == "" else _RESOLVED_S
    cache[key] = (value, now + lifetime_s)
    return value


def _resolve_user(uid: int) -> str:
    try:
        return _to_utf8(pwd.getpwuid(uid).pw_name)
    except (KeyError, OverflowError):
        return ""  # an unknown user is a valid answer, not an error


def _resolve_group(gid: int) -> str:
    try:
        return _to_utf8(grp.getgrgid(gid).gr_name)
    except (KeyError, OverflowError):
        return ""


def _resolve_uid(user: str) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid if user else None
    except (KeyError, ValueError):
        return None  # unknown user; ValueError: a name cannot contain a NUL


def _resolve_gid(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid if group else None
    except (KeyError, ValueError):
        return None


def _to_utf8(name: str) -> str:
    """Return a name as valid UTF-8; directory services allow other bytes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
