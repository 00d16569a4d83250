"""Idempotency keys of requests (repeats.db): a repeated request gets the same answer.

A client that got no answer cannot know whether its request was carried out. With a key of its
choice it may repeat the request: the daemon returns the first answer and does nothing twice. A
request that was rejected, failed temporarily, or only read, changed nothing and may be repeated
with its key: what people read, such as scripts, is not stored here. Keys are kept for a day, per
uid.
"""

import hashlib
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from steward.core.access import Caller
from steward.core.actions import Action, Answer
from steward.core.databases import REQUEST_KEYS
from steward.core.errors import (
    Conflict,
    NotFound,
    PermissionRefused,
    StewardError,
    Unavailable,
    UsageError,
)
from steward.core.events import utc_now
from steward.core.rpc import encode_answer_line, encode_error_line
from steward.core.sqlite import Database
from steward.core.storage import Index, Table

LONGEST_KEY: Final = 200
_KEEP_KEYS: Final = timedelta(days=1)
"""Time for which keys are kept."""
_MOST_ANSWER: Final = 1 << 20
"""Maximum size of a stored reply, in bytes."""
_HARMLESS_ERRORS: Final = (NotFound, PermissionRefused, Unavailable, UsageError)
"""Errors that are raised before an action changes anything."""


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """Request with a key; ``line`` is its stored reply, None where there is none."""

    uid: int
    key: str
    digest: bytes
    begun: datetime
    process: int
    line: bytes | None = None
    has_ended: bool = False


_REQUESTS: Final = Table(_Request, "repeat", key="uid, key", indexes={"begun": Index("begun")})


class IdempotencyStore:
    """Store of idempotency keys in the state directory.

    Args:
        state_dir: Steward's state directory.
        now: Returns the current time.
    """

    def __init__(self, state_dir: str, now: Callable[[], datetime] = utc_now) -> None:
        self._now = now
        path = REQUEST_KEYS.locate(state_dir)
        self._database = Database(path, (_REQUESTS.schema,), for_owner=True)

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
            raise UsageError(
                f"invalid idempotency key: use up to {LONGEST_KEY} printable characters", key
            )
        if action.stream:
            raise UsageError(
                f"{action.name} streams its reply: repeat the request without an idempotency key",
                key,
            )
        digest = _hash_request(action, request, asker.scopes)
        stored_line = self._reserve_key(asker.uid, key, digest)
        if stored_line is not None:
            return stored_line
        try:
            answer = run()
            line = encode_answer_line(answer)
        except _HARMLESS_ERRORS:
            self._delete_key(asker.uid, key)
            raise
        except StewardError as error:
            self._store_reply(asker.uid, key, encode_error_line(error))
            raise
        if isinstance(answer, Answer) and answer.has_changed_nothing:
            self._delete_key(asker.uid, key)
            return line
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
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM repeat WHERE begun < ?", (now - _KEEP_KEYS,))
            requests = _REQUESTS.select(self._database, "WHERE uid = ? AND key = ?", uid, key)
            if not requests:
                request = _Request(uid=uid, key=key, digest=digest, begun=now, process=os.getpid())
                _REQUESTS.insert(connection, request)
                return None
        (request,) = requests
        if request.digest != digest:
            raise UsageError("the idempotency key was used for another request: use a new key", key)
        if request.line is not None:
            return request.line
        raise Conflict(_explain_conflict(request), key)

    def _store_reply(self, uid: int, key: str, line: bytes | None) -> None:
        """Store the reply of a finished request."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE repeat SET has_ended = 1, line = ? WHERE uid = ? AND key = ?",
                (line, uid, key),
            )

    def _delete_key(self, uid: int, key: str) -> None:
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM repeat WHERE uid = ? AND key = ?", (uid, key))


def _hash_request(action: Action, request: Any, scopes: frozenset[str] | None) -> bytes:
    """Hash a request as decoded, so that its spelling does not matter.

    Scopes are included: a reply may hold what a token with fewer scopes must not see.
    """
    fields = (action.name, request, None if scopes is None else sorted(scopes))
    return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).digest()


def _explain_conflict(request: _Request) -> str:
    """Explain why a request has no stored reply: done, running, or aborted."""
    begun_at = request.begun.strftime("%Y-%m-%dT%H:%M:%SZ")
    if request.has_ended:
        return (
            f"a request with this key was completed at {begun_at}, but its reply is no longer "
            "stored"
        )
    if _is_running(request.process):
        return f"a request with this key is in progress since {begun_at}: try again in a moment"
    return (
        f"a request with this key began at {begun_at} and was interrupted: check its result, "
        "then use a new key"
    )


def _is_running(process: int) -> bool:
    return os.path.exists(f"/proc/{process}")
