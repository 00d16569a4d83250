"""Users and tokens of the myBRC API: password hashes, the users file, login and token checks.

Passwords are hashed with scrypt, which takes a tenth of a second and 32 MB on purpose.
:func:`set_user` and :func:`remove_user` edit the users file (``USER:HASH`` lines);
:class:`UsersFile` rereads it when it changes. :class:`FailedLogins` limits failed attempts by
address.

:class:`TokenAuthority` issues tokens and authenticates requests; ``application`` calls it. The
ledger stores a token's SHA-256, which is enough, because tokens are long and random. A user who is
removed from the file loses access at once, tokens included.
"""

import hashlib
import hmac
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Final

from steward.bank.errors import BankError, BankUsage, LedgerUnavailable
from steward.core.files import replace_file
from steward.extensions.mybrc.wire import ApiError

if TYPE_CHECKING:
    from steward.bank.ledger.ledger import Ledger


_HASH_SCHEME: Final = "scrypt"
_SCRYPT_N: Final = 2**15
"""scrypt's n, the cost factor of new hashes."""
_SCRYPT_R: Final = 8
"""scrypt's r, the block size of new hashes."""
_SCRYPT_MAX_MEMORY: Final = 64 << 20
"""Memory limit of scrypt, in bytes."""
_SALT_BYTES: Final = 16
_KEY_BYTES: Final = 32


def hash_password(password: str) -> str:
    """Hash a password into the text that follows the name in the users file."""
    salt = secrets.token_bytes(_SALT_BYTES)
    key = _derive_key(password, salt, _SCRYPT_N, _SCRYPT_R)
    return f"{_HASH_SCHEME}${_SCRYPT_N}${_SCRYPT_R}${salt.hex()}${key.hex()}"


def verify_password(password: str, stored_hash: str) -> bool:
    """Return True if a password matches a hash of the users file.

    Raises:
        BankUsage: The text is no such hash.
    """
    try:
        scheme, cost, block, salt, key = stored_hash.split("$")
        numbers = int(cost), int(block)
        derived_key = _derive_key(password, bytes.fromhex(salt), *numbers)
        is_scrypt = scheme == _HASH_SCHEME
    except ValueError as error:
        raise BankUsage(f"{stored_hash[:12]!r} is not a password hash", stored_hash) from error
    return is_scrypt and hmac.compare_digest(derived_key.hex(), key)


def _derive_key(password: str, salt: bytes, cost: int, block: int) -> bytes:
    """Derive a key from a password with scrypt."""
    return hashlib.scrypt(
        password.encode(),
        salt=salt,
        n=cost,
        r=block,
        p=1,
        maxmem=_SCRYPT_MAX_MEMORY,
        dklen=_KEY_BYTES,
    )


_USER_PATTERN: Final = re.compile(r"[^\s:#][^\s:]{0,149}")
"""User names: no blanks, no colons, no leading ``#``."""
_MIN_PASSWORD_LENGTH: Final = 8
"""Fewest characters of a password."""


def parse_users(text: str) -> list[tuple[str, str]]:
    """Parse a users file into names and password hashes; ``#`` begins a comment."""
    lines = (line.strip() for line in text.splitlines())
    parts = (line.partition(":") for line in lines if line and not line.startswith("#"))
    return [
        (user.strip(), stored_hash.strip())
        for user, colon, stored_hash in parts
        if colon and user.strip()
    ]


def set_user(path: str, user: str, password: str) -> bool:
    """Add a user with a password, or change the password.

    Returns:
        Whether the user is new.

    Raises:
        BankUsage: The name or the password is not allowed.
        BankError: The file cannot be read or written.
    """
    if not _USER_PATTERN.fullmatch(user):
        raise BankUsage(
            f"invalid user name {user!r}: leave out spaces, colons and a leading '#'", user
        )
    if len(password) < _MIN_PASSWORD_LENGTH:
        raise BankUsage(
            f"the password is too short: give {_MIN_PASSWORD_LENGTH} characters or more", user
        )
    lines = _read_lines(path)
    others = [line for line in lines if not _is_of(line, user)]
    _replace_users_file(path, [*others, f"{user}:{hash_password(password)}"])
    return len(others) == len(lines)


def remove_user(path: str, user: str) -> bool:
    """Remove a user; return False if there is none of that name.

    Raises:
        BankError: The file cannot be read or written.
    """
    lines = _read_lines(path)
    others = [line for line in lines if not _is_of(line, user)]
    if len(others) < len(lines):
        _replace_users_file(path, others)
    return len(others) < len(lines)


def _is_of(line: str, user: str) -> bool:
    return any(name == user for name, _ in parse_users(line))


def _read_lines(path: str) -> list[str]:
    """Read the lines of the users file; none if it is missing."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BankError(f"cannot read {path}: {reason}", path) from error


def _replace_users_file(path: str, lines: list[str]) -> None:
    """Replace the users file atomically and keep its owner and mode."""
    try:
        mode, owner, trusted = 0o600, None, frozenset[int]()
        if os.path.exists(path):
            file_status = os.stat(path)
            mode, owner = file_status.st_mode & 0o7777, (file_status.st_uid, file_status.st_gid)
            trusted = frozenset({file_status.st_uid})
        with replace_file(path, mode, owner=owner, trusted=trusted) as file:
            file.writelines(f"{line}\n".encode() for line in lines)
    except OSError as error:
        raise BankError(f"cannot write {path}: {error.strerror}", path) from error


log = logging.getLogger(__name__)

_TOKEN_BYTES: Final = 20
"""Length of a token in bytes: 40 characters in hex, as myBRC's."""
_MAX_TOKENS_PER_USER: Final = 100
"""Most tokens of one user; a new one replaces the oldest."""
_TOKEN_CACHE_S: Final = 10.0
"""Time for which a valid token is cached, in seconds."""
_MAX_FAILURES: Final = 10
"""Failed attempts of an address after which it must wait."""
_FAILURE_WINDOW_S: Final = 60.0
"""Time in which failed attempts count, in seconds."""
_MAX_ADDRESSES: Final = 10_000
"""Most addresses, and cached tokens, kept in memory."""
_CONCURRENT_HASHES: Final = 2
"""Passwords hashed at the same time, because each hash takes 32 MB."""
_LOGIN_RETRY_S: Final = 1
"""Retry-After of a login while other passwords are being hashed, in seconds."""


def hash_token(token: str, password_hash: str) -> str:
    """Return the SHA-256 under which the ledger stores a token.

    It covers the user's password hash, so that a token ends with the user's entry in the file.
    """
    return hashlib.sha256(f"{password_hash}:{token}".encode()).hexdigest()


class UsersFile:
    """Users file with names and password hashes, reread when it changes.

    Args:
        path: The file: lines ``USER:HASH``; ``#`` begins a comment.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file_version: tuple[int, int, int] | None = None
        self._last_error = ""
        self._users: dict[str, str] = {}
        # Hash checked for unknown users, new in each process, so that timing does not reveal names.
        self._decoy_hash = hash_password(secrets.token_hex())

    def check_password(self, user: str, password: str) -> str:
        """Return the user's hash if the password is the user's, else "".

        The check takes as long for an unknown user.
        """
        stored_hash = self.load_hashes().get(user, "")
        try:
            return stored_hash if verify_password(password, stored_hash or self._decoy_hash) else ""
        except BankUsage:
            log.error(
                "%s: the entry of %s is not a password hash; create it again", self._path, user
            )
            return ""

    def load_hashes(self) -> dict[str, str]:
        """Return the password hash of each user, reread if the file has changed."""
        with self._lock:
            try:
                file_status = os.stat(self._path)
                version = (file_status.st_mtime_ns, file_status.st_size, file_status.st_ino)
                if version != self._file_version:
                    with open(self._path, encoding="utf-8") as file:
                        self._users = dict(parse_users(file.read()))
                    self._file_version, self._last_error = version, ""
            except (OSError, UnicodeError) as error:
                # Fail closed: while the file cannot be read, there are no users.
                if str(error) != self._last_error:
                    log.error("the myBRC API rejects all requests: %s: %s", self._path, error)
                self._users, self._file_version, self._last_error = {}, None, str(error)
            return self._users


class FailedLogins:
    """Failed attempts by address: a rate limit against guessing.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._times: dict[str, list[float]] = {}

    def check(self, address: str) -> None:
        """Reject an address with too many recent failures.

        Raises:
            ApiError: The address has reached the limit (status 429).
        """
        with self._lock:
            now = self._clock()
            recent = [
                failed_at
                for failed_at in self._times.get(address, ())
                if now - failed_at < _FAILURE_WINDOW_S
            ]
            if len(recent) >= _MAX_FAILURES:
                wait_s = max(1, int(recent[-_MAX_FAILURES] + _FAILURE_WINDOW_S - now) + 1)
                raise ApiError(429, f"too many failed attempts: wait {wait_s} s", wait_s)

    def add(self, address: str) -> None:
        """Record a failed attempt."""
        with self._lock:
            now = self._clock()
            if len(self._times) >= _MAX_ADDRESSES:
                self._times = {
                    key: times
                    for key, times in self._times.items()
                    if now - times[-1] < _FAILURE_WINDOW_S
                }
                if len(self._times) >= _MAX_ADDRESSES:
                    self._times.pop(next(iter(self._times)))
            self._times[address] = [*self._times.get(address, ())[-_MAX_FAILURES:], now]


class TokenAuthority:
    """Issuer and checker of API tokens.

    Args:
        ledger: Ledger that stores the tokens' digests.
        users: Users that may have a token.
        now: Returns the current time.
    """

    def __init__(self, ledger: "Ledger", users: UsersFile, now: Callable[[], datetime]) -> None:
        self._ledger = ledger
        self._users = users
        self._now = now
        self._failures = FailedLogins()
        self._hash_slots = threading.Semaphore(_CONCURRENT_HASHES)
        self._lock = threading.Lock()
        self._token_cache: dict[str, float] = {}

    def login(self, user: str, password: str, address: str) -> str:
        """Issue a new token for a user.

        Raises:
            ApiError: Name or password is wrong, or the address failed too often.
        """
        self._failures.check(address)
        # Nobody waits for a free slot: a waiting login would take a thread from users with tokens.
        if not self._hash_slots.acquire(blocking=False):
            raise ApiError(
                429, f"too many token requests: try again in {_LOGIN_RETRY_S} s", _LOGIN_RETRY_S
            )
        try:
            password_hash = self._users.check_password(user, password)
        finally:
            self._hash_slots.release()
        if not password_hash:
            self._failures.add(address)
            raise ApiError(400, "Unable to log in with provided credentials.")
        token = secrets.token_hex(_TOKEN_BYTES)
        with self._ledger.transaction() as t:
            tokens = sorted(t.tokens.list_of_user(user), key=lambda row: row.created or self._now())
            for old in tokens[: max(0, len(tokens) - _MAX_TOKENS_PER_USER + 1)]:
                t.tokens.delete(old.digest)
            digest = hash_token(token, password_hash)
            t.tokens.add(user, digest, self._now(), note=f"from {address}")
        return token

    def authenticate(self, authorization: str, address: str) -> str:
        """Return the user that a token belongs to.

        Args:
            authorization: The Authorization header as received: ``Token 0123…``.
            address: Address of the client.

        Raises:
            ApiError: The token is invalid.
        """
        scheme, _, token = authorization.strip().partition(" ")
        token = token.strip()
        if scheme.lower() != "token" or not token:
            raise ApiError(
                401, "no token: send 'Authorization: Token …' with a token of api_token_auth"
            )
        user = self._find_user(token)
        if not user:
            # Check failures only here: a guesser and slurmctld may share one address.
            self._failures.check(address)
            self._failures.add(address)
            raise ApiError(401, "Invalid token.")
        return user

    def _find_user(self, token: str) -> str:
        """Return the user of a token, from cache or ledger; "" if invalid."""
        users = {
            hash_token(token, value): user for user, value in self._users.load_hashes().items()
        }
        now = time.monotonic()
        with self._lock:
            digest = next((digest for digest in users if digest in self._token_cache), "")
            cached_until = self._token_cache.get(digest, 0.0)
        if now < cached_until:
            return users[digest]
        try:
            with self._ledger.reading() as t:
                row = t.tokens.find(users)
        except LedgerUnavailable:
            if not digest:
                raise
            # The token was valid before, and the gate can answer without the ledger: accept it.
            return users[digest]
        if row is None or (row.expires is not None and row.expires <= self._now()):
            return ""
        with self._lock:
            if len(self._token_cache) >= _MAX_ADDRESSES:
                self._token_cache.clear()
            self._token_cache[row.digest] = now + _TOKEN_CACHE_S
        return users[row.digest]
