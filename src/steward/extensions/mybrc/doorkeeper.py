"""Who may use the API: names and passwords in a file, tokens in the ledger, both hashed.

A token is random and long, so that SHA-256 is enough for it. Whoever
is taken out of the file is out at once, tokens and all. Who guesses is made to
wait, by address.
"""

import hashlib
import hmac
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Final

from steward.bank.errors import BankUsage, LedgerUnavailable
from steward.extensions.mybrc.errors import ApiError
from steward.extensions.mybrc.passwords import hashed, matches
from steward.extensions.mybrc.users_file import users_in

if TYPE_CHECKING:
    from steward.bank.ledger.opened import Ledger

log = logging.getLogger(__name__)

_TOKEN: Final = 20
"""Bytes of a token: 40 characters in hex, as myBRC's have."""
_MOST_TOKENS: Final = 100
_REMEMBERED_S: Final = 10.0
_FAILURES: Final = 10
_WITHIN_S: Final = 60.0
_MOST_ADDRESSES: Final = 10_000
_AT_ONCE: Final = 2
_TURN_S: Final = 1


def digest_of(token: str) -> str:
    """What the ledger knows a token by."""
    return hashlib.sha256(token.encode()).hexdigest()


class UsersFile:
    """The file of names and hashes, read again when it has changed.

    Args:
        path: Lines ``USER:HASH``; ``#`` begins a comment.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._read: tuple[int, int, int] | None = None
        self._said = ""
        self._users: dict[str, str] = {}
        # One of its own each run, so that whether a name is known cannot be told by the time.
        self._nobody = hashed(secrets.token_hex())

    def knows(self, user: str) -> bool:
        """Whether there is such a user."""
        return user in self._current()

    def admits(self, user: str, password: str) -> bool:
        """Whether this is the user's password; it takes as long where there is no such user."""
        kept = self._current().get(user, "")
        try:
            return matches(password, kept or self._nobody) and bool(kept)
        except BankUsage:
            log.error("%s: what stands behind %s is no hash, make it anew", self._path, user)
            return False

    def _current(self) -> dict[str, str]:
        with self._lock:
            try:
                found = os.stat(self._path)
                mark = (found.st_mtime_ns, found.st_size, found.st_ino)
                if mark != self._read:
                    with open(self._path, encoding="utf-8") as file:
                        self._users = dict(users_in(file.read()))
                    self._read, self._said = mark, ""
            except (OSError, UnicodeError) as error:
                # Fail closed: nobody is known while the file that says who is cannot be read.
                if str(error) != self._said:
                    log.error("nobody is let in to the myBRC API: %s: %s", self._path, error)
                self._users, self._read, self._said = {}, None, str(error)
            return self._users


class Failures:
    """Counts what went wrong by address, so that guessing takes long.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._times: dict[str, list[float]] = {}

    def check(self, address: str) -> None:
        """Let nobody on who has failed too often of late.

        Raises:
            ApiError: The address has.
        """
        with self._lock:
            now = self._clock()
            recent = [at for at in self._times.get(address, ()) if now - at < _WITHIN_S]
            if len(recent) >= _FAILURES:
                wait_s = max(1, int(recent[-_FAILURES] + _WITHIN_S - now) + 1)
                raise ApiError(429, f"too many failed tries, wait {wait_s} s", wait_s)

    def add(self, address: str) -> None:
        """Something went wrong."""
        with self._lock:
            now = self._clock()
            if len(self._times) >= _MOST_ADDRESSES:
                self._times = {
                    key: times for key, times in self._times.items() if now - times[-1] < _WITHIN_S
                }
                if len(self._times) >= _MOST_ADDRESSES:
                    self._times.pop(next(iter(self._times)))
            self._times[address] = [*self._times.get(address, ())[-_FAILURES:], now]


class Doorkeeper:
    """Gives tokens, and knows them again.

    Args:
        ledger: Where their digests are.
        users: Who may have one.
        now: The time.
    """

    def __init__(self, ledger: "Ledger", users: UsersFile, now: Callable[[], datetime]) -> None:
        self._ledger = ledger
        self._users = users
        self._now = now
        self._failures = Failures()
        self._hashing = threading.Semaphore(_AT_ONCE)
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, float]] = {}

    def login(self, user: str, password: str, address: str) -> str:
        """A new token for a user.

        Raises:
            ApiError: Name or password is wrong, or too much was tried.
        """
        self._failures.check(address)
        # Nobody waits for a turn: whoever does takes a thread from those who have a token.
        if not self._hashing.acquire(blocking=False):
            raise ApiError(429, "too many ask for a token just now", _TURN_S)
        try:
            is_right = self._users.admits(user, password)
        finally:
            self._hashing.release()
        if not is_right:
            self._failures.add(address)
            raise ApiError(400, "Unable to log in with provided credentials.")
        token = secrets.token_hex(_TOKEN)
        with self._ledger.transaction() as t:
            tokens = sorted(t.tokens.of(user), key=lambda one: one.created or self._now())
            for old in tokens[: max(0, len(tokens) - _MOST_TOKENS + 1)]:
                t.tokens.drop(old.digest)
            t.tokens.add(user, digest_of(token), self._now(), note=f"from {address}")
        return token

    def caller(self, authorization: str, address: str) -> str:
        """Whose token this is.

        Args:
            authorization: The header as it came: ``Token 0123…``.
            address: From where.

        Raises:
            ApiError: It is nobody's.
        """
        scheme, _, token = authorization.strip().partition(" ")
        token = token.strip()
        if scheme.lower() != "token" or not token:
            raise ApiError(401, "give a token: 'Authorization: Token …', from api_token_auth")
        user = self._user_of(digest_of(token))
        if not user:
            # Only here: behind one address may be one who guesses, and slurmctld.
            self._failures.check(address)
            self._failures.add(address)
            raise ApiError(401, "Invalid token.")
        return user

    def _user_of(self, digest: str) -> str:
        now = time.monotonic()
        with self._lock:
            user, until = self._known.get(digest, ("", 0.0))
        if now >= until:
            try:
                with self._ledger.reading() as t:
                    found = t.tokens.find(digest)
            except LedgerUnavailable:
                if not user:
                    raise
                # Known before: the gate can answer without the ledger, so let it be asked.
                return user if self._users.knows(user) else ""
            if found is None or not hmac.compare_digest(found.digest, digest):
                return ""
            if found.expires is not None and found.expires <= self._now():
                return ""
            user = found.user
            with self._lock:
                if len(self._known) >= _MOST_ADDRESSES:
                    self._known.clear()
                self._known[digest] = (user, now + _REMEMBERED_S)
        return user if self._users.knows(user) else ""
