"""repeats.db: what was asked for under a key, so that asking again does nothing again.

A client that has heard no answer cannot know whether its request was met. Under a
key of its choosing it may ask again: the same request has the same answer as
before, and is not done a second time. What was refused, or could not be done for
now, has changed nothing, and may be asked again under its key.
"""

import hashlib
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from steward.core.access import Asker
from steward.core.actions import Action
from steward.core.errors import Conflict, Missing, Refused, StewardError, Unavailable, UsageError
from steward.core.events import utc_now
from steward.core.sqlite import Connection, make_for_owner, open_database, transaction
from steward.core.timestamps import micros, moment
from steward.daemon.requests import answer_line, error_line

NAME: Final = "repeats.db"
LONGEST_KEY: Final = 200
_KEPT: Final = timedelta(days=1)
_MOST_ANSWER: Final = 1 << 20
_UNCHANGED: Final = (Missing, Refused, Unavailable, UsageError)
"""Errors that are raised before anything was done."""

_MIGRATIONS: Final = (
    """
    CREATE TABLE repeat (
        uid INTEGER NOT NULL,
        key TEXT NOT NULL,
        digest BLOB NOT NULL,
        begun_us INTEGER NOT NULL,
        process INTEGER NOT NULL,
        line BLOB,
        ended INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (uid, key)
    ) WITHOUT ROWID;
    CREATE INDEX repeat_begun ON repeat (begun_us);
    """,
)


class Repeats:
    """The keys of a state directory.

    Args:
        state_dir: Steward's state directory.
        now: Tells the present moment.
    """

    def __init__(self, state_dir: str, now: Callable[[], datetime] = utc_now) -> None:
        self._path = os.path.join(state_dir, NAME)
        self._now = now
        make_for_owner(self._path)
        self._connection: Connection = open_database(self._path, _MIGRATIONS)

    def once(
        self, key: str, asker: Asker, action: Action, request: Any, run: Callable[[], Any]
    ) -> bytes:
        """The line that answers a request: done now, or as it was answered under this key.

        Args:
            key: The asker's.
            asker: Who asks; nobody has another's keys.
            action: What is asked for.
            request: A value of its request type.
            run: Does it.

        Raises:
            UsageError: The key is none, or was given with another request.
            Conflict: It is being done, or nobody knows how it ended.
            StewardError: Whatever the action refuses or cannot do.
        """
        if len(key) > LONGEST_KEY or not key.isprintable():
            raise UsageError(f"a key has up to {LONGEST_KEY} plain characters", key)
        if action.stream:
            raise UsageError(f"{action.name} has no single answer: ask for it without a key", key)
        digest = _digest(action, request, asker.scopes)
        told = self._begin(asker.uid, key, digest)
        if told is not None:
            return told
        try:
            line = answer_line(run())
        except _UNCHANGED:
            self._forget(asker.uid, key)
            raise
        except StewardError as error:
            self._end(asker.uid, key, error_line(error))
            raise
        # A secret is told once, and not kept.
        is_kept = action.room != "credentials" and len(line) <= _MOST_ANSWER
        self._end(asker.uid, key, line if is_kept else None)
        return line

    def _begin(self, uid: int, key: str, digest: bytes) -> bytes | None:
        """Take a key; the answer where it was taken for the same before.

        Raises:
            UsageError: It was taken for something else.
            Conflict: There is no answer.
        """
        now = self._now()
        with transaction(self._connection, self._path) as connection:
            connection.execute("DELETE FROM repeat WHERE begun_us < ?", (micros(now - _KEPT),))
            row = connection.execute(
                "SELECT digest, begun_us, process, line, ended FROM repeat "
                "WHERE uid = ? AND key = ?",
                (uid, key),
            ).fetchone()
            if row is None:
                connection.execute(
                    "INSERT INTO repeat (uid, key, digest, begun_us, process) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (uid, key, digest, micros(now), os.getpid()),
                )
                return None
        kept, begun_us, process, line, ended = row
        if kept != digest:
            raise UsageError("this key was given with another request: take a new key", key)
        if line is not None:
            return bytes(line)
        raise Conflict(_unknown(moment(begun_us), bool(ended), process), key)

    def _end(self, uid: int, key: str, line: bytes | None) -> None:
        with transaction(self._connection, self._path) as connection:
            connection.execute(
                "UPDATE repeat SET ended = 1, line = ? WHERE uid = ? AND key = ?", (line, uid, key)
            )

    def _forget(self, uid: int, key: str) -> None:
        with transaction(self._connection, self._path) as connection:
            connection.execute("DELETE FROM repeat WHERE uid = ? AND key = ?", (uid, key))


def _digest(action: Action, request: Any, scopes: frozenset[str] | None) -> bytes:
    """What tells a request from any other; as it is understood, not as it was written.

    Scopes are part of it: an answer may hold what a token with fewer of them is not shown.
    """
    told = (action.name, request, None if scopes is None else sorted(scopes))
    return hashlib.sha256(msgspec.json.encode(told, order="sorted")).digest()


def _unknown(begun: datetime, ended: bool, process: int) -> str:
    at = begun.strftime("%Y-%m-%dT%H:%M:%SZ")
    if ended:
        return f"this was done at {at} under this key; its answer is not kept"
    if _is_running(process):
        return f"this is being done since {at}: ask again in a moment"
    return f"this was begun at {at}, and broke off: look at what was done, and take a new key"


def _is_running(process: int) -> bool:
    return os.path.exists(f"/proc/{process}")
