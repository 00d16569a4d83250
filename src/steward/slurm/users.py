"""Names of users and groups, looked up by us from the ids.

Slurm's own text is never used: 22.05 prints "nobody" for a uid that does not
resolve, and later versions print the number.
"""

import grp
import pwd
import time
from collections.abc import Callable
from typing import TypeVar

_RESOLVED_S = 600.0
_UNRESOLVED_S = 60.0
_MOST = 20_000


class People:
    """Looks up names, and remembers each for some minutes (less long where there was none)."""

    def __init__(self) -> None:
        self._users: dict[int, tuple[str, float]] = {}
        self._groups: dict[int, tuple[str, float]] = {}
        self._uids: dict[str, tuple[int | None, float]] = {}
        self._gids: dict[str, tuple[int | None, float]] = {}

    def user(self, uid: int) -> str:
        """The user's name; "" where the uid does not resolve."""
        return _look_up(uid, self._users, _user)

    def group(self, gid: int) -> str:
        """The group's name; "" where the gid does not resolve."""
        return _look_up(gid, self._groups, _group)

    def uid(self, user: str) -> int | None:
        """The uid of a user whom only a name is known of; None where it does not resolve."""
        return _look_up(user, self._uids, _uid)

    def gid(self, group: str) -> int | None:
        """The gid of a group, likewise."""
        return _look_up(group, self._gids, _gid)

    def forget(self) -> None:
        """Look every name up again."""
        for known in (self._users, self._groups, self._uids, self._gids):
            known.clear()


K = TypeVar("K", int, str)
V = TypeVar("V")


def _look_up(key: K, known: dict[K, tuple[V, float]], ask: Callable[[K], V]) -> V:
    now = time.monotonic()
    found = known.get(key)
    if found is not None and now < found[1]:
        return found[0]
    if len(known) >= _MOST:
        known.clear()
    value = ask(key)
    lasts_s = _UNRESOLVED_S if value is None or value == "" else _RESOLVED_S
    known[key] = (value, now + lasts_s)
    return value


def _user(uid: int) -> str:
    try:
        return _fit(pwd.getpwuid(uid).pw_name)
    except (KeyError, OverflowError):
        return ""  # no such user is an answer, not an error


def _group(gid: int) -> str:
    try:
        return _fit(grp.getgrgid(gid).gr_name)
    except (KeyError, OverflowError):
        return ""


def _uid(user: str) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid if user else None
    except (KeyError, ValueError):
        return None  # no such user is an answer; ValueError: no user's name holds a NUL


def _gid(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid if group else None
    except (KeyError, ValueError):
        return None


def _fit(name: str) -> str:
    """The name as a record can hold it: directory services allow bytes that are not UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
