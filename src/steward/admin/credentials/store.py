"""Credential store credentials.db: login links, sessions and tokens, by SHA-256 of their secret.

Secrets are 256 random bits, so a plain digest is as safe as a slow one. A credential belongs
to a uid and to the user name that the uid had; it is worthless once either means another user.

:class:`CredentialStore` makes, finds, renews and ends credentials. A login link is ended by its one
use. An expired credential stays listed for 30 days, unless its user has many. ``end_revoked`` ends
credentials of a restored backup that were revoked since.
"""

import hashlib
import os
import pwd
import secrets
from collections.abc import Container, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final, Literal

import msgspec

from steward.admin.credentials.errors import (
    CredentialMissing,
    CredentialsError,
    CredentialsUnavailable,
)
from steward.core.access import TokenScope
from steward.core.databases import CREDENTIALS
from steward.core.errors import UnknownCredential
from steward.core.sqlite import Connection, Database, SqliteError, SqliteUnavailable
from steward.core.storage import Index, Rows, Table

CredentialKind = Literal["login", "session", "token"]
_PREFIX: Final[dict[CredentialKind, str]] = {"login": "stl_", "session": "sts_", "token": "stt_"}
_USED_EVERY: Final = timedelta(minutes=1)
"""Precision of a credential's last use: otherwise each request would be a write."""

_MAX_KEPT: Final = 200
"""Most credentials of a kind that are stored for a user, valid ones first, then the newest."""


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """Stored record of a credential, without its secret.

    Attributes:
        id: Number of the credential.
        kind: ``login``, ``session`` or ``token``.
        uid: Uid of its owner.
        user: User name of that uid at creation.
        how: How its owner was identified at creation: ``socket``, ``local``, ``proxy`` …
        name: Purpose, as its owner wrote it.
        scopes: Scopes of a token.
        created: Creation time, UTC.
        expires: End of validity, UTC.
        used: Last use, to a minute; None for never.
        ended: Time it was revoked, or used up; None for not.
    """

    id: int
    kind: CredentialKind
    uid: int
    user: str
    how: str
    name: str
    scopes: tuple[TokenScope, ...]
    created: datetime
    expires: datetime
    used: datetime | None = None
    ended: datetime | None = None


class _StoredCredential(Credential, frozen=True, kw_only=True):
    """Credential with the SHA-256 of its secret, which never leaves this module."""

    digest: bytes


_CREDENTIALS: Final = Table(
    _StoredCredential,
    "credential",
    key="id",
    autoincrement=True,
    indexes={
        "of_secret": Index("digest", is_unique=True),
        "of_user": Index("kind, uid"),
        "expires": Index("expires"),
    },
)
_ROWS: Final = Rows(Credential)


class CredentialStore:
    """Credentials of a state directory; for one thread at a time.

    Args:
        state_dir: Steward's state directory.
    """

    def __init__(self, state_dir: str) -> None:
        path = CREDENTIALS.locate(state_dir)
        with _translate_sqlite_errors():
            self._database = Database(path, (_CREDENTIALS.schema,), for_owner=True)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def create(
        self,
        kind: CredentialKind,
        *,
        uid: int,
        user: str,
        how: str,
        now: datetime,
        expires: datetime,
        name: str = "",
        scopes: tuple[TokenScope, ...] = (),
    ) -> tuple[str, Credential]:
        """Create a credential; return its secret, stored only as a digest, and its record."""
        secret = _PREFIX[kind] + secrets.token_urlsafe(32)
        credential = _StoredCredential(
            id=0,
            kind=kind,
            uid=uid,
            user=user,
            how=how,
            name=name,
            scopes=scopes,
            created=now,
            expires=expires,
            digest=_hash_secret(secret),
        )
        with self._transaction() as connection:
            # Long expired credentials are useless; tokens stay listed for a while.
            connection.execute(
                "DELETE FROM credential WHERE expires < ?", (now - timedelta(days=30),)
            )
            number: int = _CREDENTIALS.insert(connection, credential).lastrowid
            connection.execute(
                "DELETE FROM credential WHERE id IN (SELECT id FROM credential "
                "WHERE kind = ? AND uid = ? "
                "ORDER BY ended IS NOT NULL OR expires <= ?, id DESC LIMIT -1 OFFSET ?)",
                (kind, uid, now, _MAX_KEPT),
            )
        return secret, self.get(number)

    def get(self, number: int) -> Credential:
        """Return the credential of that number.

        Raises:
            CredentialMissing: There is none.
        """
        credentials = self._select("WHERE id = ?", number)
        if not credentials:
            raise CredentialMissing(f"unknown credential {number}", number)
        return credentials[0]

    def find_valid(self, kind: CredentialKind, secret: str, now: datetime) -> Credential:
        """Return the valid credential of a secret.

        Raises:
            UnknownCredential: The secret is unknown, or no longer valid.
        """
        credential = next(iter(self._select("WHERE digest = ?", _hash_secret(secret))), None)
        if (
            credential is None
            or credential.kind != kind
            or credential.ended
            or credential.expires <= now
        ):
            raise UnknownCredential(f"this {kind} is unknown or expired: {_RENEWAL_HINTS[kind]}")
        if not has_user_name(credential.uid, credential.user):
            raise UnknownCredential(f"this {kind} was created for another user with the same uid")
        if credential.used is None or now - credential.used >= _USED_EVERY:
            self._set_time("used", credential.id, now)
        return credential

    def use_up(self, secret: str, now: datetime) -> Credential:
        """Use a login link up: return its credential and invalidate it.

        Raises:
            UnknownCredential: It is no login link, was used before, or has expired.
        """
        credential = self.find_valid("login", secret, now)
        with self._transaction() as connection:
            updated_rows = connection.execute(
                "UPDATE credential SET ended = ? WHERE id = ? AND ended IS NULL",
                (now, credential.id),
            ).rowcount
        if updated_rows != 1:
            raise UnknownCredential(f"this login is unknown or expired: {_RENEWAL_HINTS['login']}")
        return credential

    def renew(self, number: int, expires: datetime) -> None:
        """Extend a credential's validity."""
        self._set_time("expires", number, expires)

    def end(self, number: int, now: datetime) -> None:
        """Revoke a credential."""
        self._set_time("ended", number, now)

    def list_all(self, kind: CredentialKind, uid: int | None = None) -> list[Credential]:
        """Return the credentials of a kind, newest first; of one user, or of all."""
        return self._select(
            "WHERE kind = ? AND (? IS NULL OR uid = ?) ORDER BY id DESC", kind, uid, uid
        )

    def list_valid_digests(self) -> dict[bytes, int]:
        """Return the digests of the credentials that are not revoked, with their numbers."""
        with _translate_sqlite_errors():
            rows = self._database.fetch("SELECT digest, id FROM credential WHERE ended IS NULL")
        return dict(rows)

    def end_all_except(self, valid_digests: Container[bytes], now: datetime) -> None:
        """Revoke the credentials whose digests are not among these."""
        revoked = [
            (now, number)
            for digest, number in self.list_valid_digests().items()
            if digest not in valid_digests
        ]
        with self._transaction() as connection:
            connection.executemany("UPDATE credential SET ended = ? WHERE id = ?", revoked)

    def _select(self, clause: str, *values: Any) -> list[Credential]:
        statement = f"SELECT {_ROWS.select_list} FROM credential {clause}"  # noqa: S608 - our own words
        with _translate_sqlite_errors():
            return _ROWS.fetch(self._database, statement, *values)

    def _set_time(
        self, column: Literal["used", "ended", "expires"], number: int, moment: datetime
    ) -> None:
        with self._transaction() as connection:
            connection.execute(
                f"UPDATE credential SET {column} = ? WHERE id = ?",  # noqa: S608 - our own words
                (moment, number),
            )

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with _translate_sqlite_errors(), self._database.transaction() as connection:
            yield connection


def end_revoked(restored_dir: str, replaced_dir: str, now: datetime) -> None:
    """End credentials of a restored backup that were revoked, or may have been, since the backup.

    Args:
        restored_dir: State directory with the restored files.
        replaced_dir: State directory that it replaces: a credential valid there stays valid.
        now: Current time.

    Raises:
        CredentialsError: The backup's database is damaged.
    """
    if not os.path.exists(CREDENTIALS.locate(restored_dir)):
        return
    valid_digests = _list_valid_digests(replaced_dir)
    store = CredentialStore(restored_dir)
    try:
        store.end_all_except(valid_digests, now)
    finally:
        store.close()


def _list_valid_digests(state_dir: str) -> Container[bytes]:
    """Return digests of credentials that are not revoked; none if they cannot be read."""
    if not os.path.exists(CREDENTIALS.locate(state_dir)):
        return ()
    try:
        store = CredentialStore(state_dir)
        try:
            return store.list_valid_digests()
        finally:
            store.close()
    except (CredentialsError, CredentialsUnavailable):
        return ()


_RENEWAL_HINTS: Final[dict[CredentialKind, str]] = {
    "login": "run 'steward login' again",
    "session": "log in again",
    "token": "create one with 'steward token create'",
}


def has_user_name(uid: int, user: str) -> bool:
    """Return whether a uid still has the user name."""
    try:
        return pwd.getpwuid(uid).pw_name == user
    except KeyError:
        return False


def _hash_secret(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()


@contextmanager
def _translate_sqlite_errors() -> Iterator[None]:
    """Translate SQLite errors into errors of this package."""
    try:
        yield
    except SqliteUnavailable as error:
        raise CredentialsUnavailable(str(error), error.offender) from error
    except SqliteError as error:
        raise CredentialsError(str(error), error.offender) from error
