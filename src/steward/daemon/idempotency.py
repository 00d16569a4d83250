"""Idempotency keys of requests (repeats.db): a repeated request gets the same answer.

A client that got no answer cannot know whether its request was carried out. With a key of its
choice it may repeat the request: the daemon returns the first answer and does nothing twice. A
request that was rejected, or failed temporarily, changed nothing and may be repeated with its key.
Keys are kept for a day, per uid.
"""

import hashlib
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from steward.core.access import Caller
from steward.core.actions import Action
from steward.core.errors import (
    Conflict,
    NotFound,
    PermissionRefused,
    StewardError,
    Unavailable,
    UsageError,
)
from steward.core.events import utc_now
from steward.core.sqlite import Connection, create_for_owner, open_database, transaction
from steward.core.timestamps import from_micros, to_micros
from steward.daemon.requests import encode_answer_line, encode_error_line

DATABASE_NAME: Final = "repeats.db"
LONGEST_KEY: Final = 200
_KEEP_KEYS: Final = timedelta(days=1)
"""Time for which keys are kept."""
_MOST_ANSWER: Final = 1 << 20
"""Maximum size of a stored reply, in bytes."""
_HARMLESS_ERRORS: Final = (NotFound, PermissionRefused, Unavailable, UsageError)
"""Errors that are raised before an action changes anything."""

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


class IdempotencyStore:
    """Store of idempotency keys in the state directory.

    Args:
        state_dir: Steward's state directory.
        now: Returns the current time.
    """

    def __init__(self, state_dir: str, now: Callable[[], datetime] = utc_now) -> None:
        self._path = os.path.join(state_dir, DATABASE_NAME)
        self._now = now
        create_for_owner(self._path)
        self._connection: Connection = open_database(self._path, _MIGRATIONS)

    def run_once(
        self, key: str, asker: Caller, action: Action, request: Any, run: Callable[[], Any]
    ) -> bytes:
        """Run a request once, and return its reply line; for a repeated key return the first reply.

        Args:
            key: The caller's key.
            asker: The caller; keys of other users are separate.
            action: The requested action.
            request: A value of its request type.
            run: Runs the action.

        Raises:
            UsageError: The key is malformed, or was used for another request.
            Conflict: The action is running, or its outcome is unknown.
            StewardError: The action failed.
        """
        if len(key) > LONGEST_KEY or not key.isprintable():
            raise UsageError(f"a key has up to {LONGEST_KEY} plain characters", key)
        if action.stream:
            raise UsageError(f"{action.name} has no single answer: ask for it without a key", key)
        digest = _hash_request(action, request, asker.scopes)
        stored_line = self._reserve_key(asker.uid, key, digest)
        if stored_line is not None:
            return stored_line
        try:
            line = encode_answer_line(run())
        except _HARMLESS_ERRORS:
            self._delete_key(asker.uid, key)
            raise
        except StewardError as error:
            self._store_reply(asker.uid, key, encode_error_line(error))
            raise
        # Replies with secrets are not stored.
        is_storable = action.package != "credentials" and len(line) <= _MOST_ANSWER
        self._store_reply(asker.uid, key, line if is_storable else None)
        return line

    def _reserve_key(self, uid: int, key: str, digest: bytes) -> bytes | None:
        """Reserve a key; return the stored reply if it was used for the same request before.

        Raises:
            UsageError: The key was used for another request.
            Conflict: There is no stored reply.
        """
        now = self._now()
        with transaction(self._connection, self._path) as connection:
            connection.execute(
                "DELETE FROM repeat WHERE begun_us < ?", (to_micros(now - _KEEP_KEYS),)
            )
            row = connection.execute(
                "SELECT digest, begun_us, process, line, ended FROM repeat "
                "WHERE uid = ? AND key = ?",
                (uid, key),
            ).fetchone()
            if row is None:
                connection.execute(
                    "INSERT INTO repeat (uid, key, digest, begun_us, process) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (uid, key, digest, to_micros(now), os.getpid()),
                )
                return None
        stored_digest, begun_us, process, line, ended = row
        if stored_digest != digest:
            raise UsageError("this key was given with another request: take a new key", key)
        if line is not None:
            return bytes(line)
        raise Conflict(_explain_conflict(from_micros(begun_us), bool(ended), process), key)

    def _store_reply(self, uid: int, key: str, line: bytes | None) -> None:
        """Store the reply of a finished request."""
        with transaction(self._connection, self._path) as connection:
            connection.execute(
                "UPDATE repeat SET ended = 1, line = ? WHERE uid = ? AND key = ?", (line, uid, key)
            )

    def _delete_key(self, uid: int, key: str) -> None:
        with transaction(self._connection, self._path) as connection:
            connection.execute("DELETE FROM repeat WHERE uid = ? AND key = ?", (uid, key))


def _hash_request(action: Action, request: Any, scopes: frozenset[str] | None) -> bytes:
    """Hash a request as decoded, so that its spelling does not matter.

    Scopes are included: a reply may hold what a token with fewer scopes must not see.
    """
    fields = (action.name, request, None if scopes is None else sorted(scopes))
    return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).digest()


def _explain_conflict(begun: datetime, ended: bool, process: int) -> str:
    """Explain why a key's request has no stored reply: done, running, or aborted."""
    begun_at = begun.strftime("%Y-%m-%dT%H:%M:%SZ")
    if ended:
        return f"this was done at {begun_at} under this key; its answer is not kept"
    if _is_running(process):
        return f"this is being done since {begun_at}: ask again in a moment"
    return f"this was begun at {begun_at}, and broke off: look at what was done, and take a new key"


def _is_running(process: int) -> bool:
    return os.path.exists(f"/proc/{process}")
