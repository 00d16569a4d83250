"""Credential store credentials.db: login links, sessions and tokens, by SHA-256 of their secret.

Secrets are 256 random bits, so a plain digest is as safe as a slow one. A credential belongs
to a uid and to the user name that the uid had; it is worthless once either means another user.

:class:`CredentialStore` makes, finds, renews and ends credentials. A login link is ended by its one
use. An expired credential stays listed for 30 days. ``end_revoked`` ends credentials of a restored
backup that were revoked since.
"""

import hashlib
import os
import pwd
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final, Literal

import msgspec

from steward.admin.credentials.errors import (
    CredentialMissing,
    CredentialsError,
    CredentialsUnavailable,
    UnknownCredential,
)
from steward.core.access import TokenScope
from steward.core.sqlite import (
    Connection,
    SqliteError,
    SqliteUnavailable,
    create_for_owner,
    open_database,
    transaction,
)
from steward.core.timestamps import from_micros, to_micros

CREDENTIALS_FILENAME: Final = "credentials.db"
CredentialKind = Literal["login", "session", "token"]
_PREFIX: Final[dict[CredentialKind, str]] = {"login": "stl_", "session": "sts_", "token": "stt_"}
_USED_EVERY: Final = timedelta(minutes=1)
"""Precision of a credential's last use: otherwise each request would be a write."""

_MIGRATIONS: Final = (
    """
    CREATE TABLE credential (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        kind TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE,
        uid INTEGER NOT NULL,
        user TEXT NOT NULL,
        how TEXT NOT NULL,
        name TEXT NOT NULL,
        scopes TEXT NOT NULL,
        created_us INTEGER NOT NULL,
        expires_us INTEGER NOT NULL,
        used_us INTEGER NOT NULL DEFAULT 0,
        ended_us INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX credential_of_user ON credential (kind, uid);
    CREATE INDEX credential_expires ON credential (expires_us);
    """,
)
_COLUMNS: Final = (
    "id, kind, uid, user, how, name, scopes, created_us, expires_us, used_us, ended_us"
)


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


class CredentialStore:
    """Credentials of a state directory; for one thread at a time.

    Args:
        state_dir: Steward's state directory.
    """

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.join(state_dir, CREDENTIALS_FILENAME)
        with _translate_sqlite_errors():
            create_for_owner(self._path)
            self._connection: Connection = open_database(self._path, _MIGRATIONS)

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

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
        values = (
            *(kind, _hash_secret(secret), uid, user, how, name, ",".join(scopes)),
            *(to_micros(now), to_micros(expires)),
        )
        with _translate_sqlite_errors(), transaction(self._connection, self._path) as connection:
            # Long expired credentials are useless; tokens stay listed for a while.
            connection.execute(
                "DELETE FROM credential WHERE expires_us < ?",
                (to_micros(now - timedelta(days=30)),),
            )
            number: int = connection.execute(
                "INSERT INTO credential (kind, digest, uid, user, how, name, scopes, created_us, "
                "expires_us) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            ).lastrowid
        return secret, self.get(number)

    def get(self, number: int) -> Credential:
        """Return the credential of that number.

        Raises:
            CredentialMissing: There is none.
        """
        with _translate_sqlite_errors():
            row = self._connection.execute(
                f"SELECT {_COLUMNS} FROM credential WHERE id = ?",  # noqa: S608 - our own words
                (number,),
            ).fetchone()
        if row is None:
            raise CredentialMissing(f"there is no credential with the number {number}", number)
        return _make_credential(row)

    def find_valid(self, kind: CredentialKind, secret: str, now: datetime) -> Credential:
        """Return the valid credential of a secret.

        Raises:
            UnknownCredential: The secret is unknown, or no longer valid.
        """
        with _translate_sqlite_errors():
            row = self._connection.execute(
                f"SELECT {_COLUMNS} FROM credential WHERE digest = ?",  # noqa: S608 - our own words
                (_hash_secret(secret),),
            ).fetchone()
        credential = _make_credential(row) if row is not None else None
        if (
            credential is None
            or credential.kind != kind
            or credential.ended
            or credential.expires <= now
        ):
            raise UnknownCredential(
                f"this {kind} is not known, or not good any more: {_RENEWAL_HINTS[kind]}"
            )
        if not has_user_name(credential.uid, credential.user):
            raise UnknownCredential(f"this {kind} was made for a user who is another one by now")
        if credential.used is None or now - credential.used >= _USED_EVERY:
            self._set_time("used_us", credential.id, now)
        return credential

    def use_up(self, secret: str, now: datetime) -> Credential:
        """Use a login link up: return its credential and invalidate it.

        Raises:
            UnknownCredential: It is no login link, was used before, or has expired.
        """
        credential = self.find_valid("login", secret, now)
        with _translate_sqlite_errors(), transaction(self._connection, self._path) as connection:
            updated_rows = connection.execute(
                "UPDATE credential SET ended_us = ? WHERE id = ? AND ended_us = 0",
                (to_micros(now), credential.id),
            ).rowcount
        if updated_rows != 1:
            raise UnknownCredential(
                f"this login is not known, or not good any more: {_RENEWAL_HINTS['login']}"
            )
        return credential

    def renew(self, number: int, expires: datetime) -> None:
        """Extend a credential's validity."""
        self._set_time("expires_us", number, expires)

    def end(self, number: int, now: datetime) -> None:
        """Revoke a credential."""
        self._set_time("ended_us", number, now)

    def list_all(self, kind: CredentialKind, uid: int | None = None) -> list[Credential]:
        """Return the credentials of a kind, newest first; of one user, or of all."""
        with _translate_sqlite_errors():
            rows = self._connection.execute(
                f"SELECT {_COLUMNS} FROM credential WHERE kind = ? "  # noqa: S608 - our own words
                "AND (? IS NULL OR uid = ?) ORDER BY id DESC",
                (kind, uid, uid),
            ).fetchall()
        return [_make_credential(row) for row in rows]

    def _set_time(
        self, column: Literal["used_us", "ended_us", "expires_us"], number: int, moment: datetime
    ) -> None:
        with _translate_sqlite_errors(), transaction(self._connection, self._path) as connection:
            connection.execute(
                f"UPDATE credential SET {column} = ? WHERE id = ?",  # noqa: S608 - our own words
                (to_micros(moment), number),
            )


def end_revoked(restored_dir: str, replaced_dir: str, now: datetime) -> None:
    """End credentials of a restored backup that were revoked, or may have been, since the backup.

    Args:
        restored_dir: State directory with the restored files.
        replaced_dir: State directory that it replaces: a credential valid there stays valid.
        now: Current time.

    Raises:
        CredentialsError: The backup's database is damaged.
    """
    if not os.path.exists(os.path.join(restored_dir, CREDENTIALS_FILENAME)):
        return
    valid_digests = _list_valid_digests(replaced_dir)
    store = CredentialStore(restored_dir)
    try:
        with _translate_sqlite_errors(), transaction(store._connection, store._path) as connection:
            rows = connection.execute("SELECT id, digest FROM credential WHERE ended_us = 0")
            for number, digest in rows.fetchall():
                if bytes(digest) not in valid_digests:
                    connection.execute(
                        "UPDATE credential SET ended_us = ? WHERE id = ?", (to_micros(now), number)
                    )
    finally:
        store.close()


def _list_valid_digests(state_dir: str) -> frozenset[bytes]:
    """Return digests of credentials that are not revoked; none if they cannot be read."""
    if not os.path.exists(os.path.join(state_dir, CREDENTIALS_FILENAME)):
        return frozenset()
    try:
        store = CredentialStore(state_dir)
        try:
            with _translate_sqlite_errors():
                sql = "SELECT digest FROM credential WHERE ended_us = 0"
                return frozenset(bytes(row[0]) for row in store._connection.execute(sql))
        finally:
            store.close()
    except (CredentialsError, CredentialsUnavailable):
        return frozenset()


_RENEWAL_HINTS: Final[dict[CredentialKind, str]] = {
    "login": "run 'steward login' again",
    "session": "log in again",
    "token": "make one with 'steward token create'",
}


def has_user_name(uid: int, user: str) -> bool:
    """Return whether a uid still has the user name."""
    try:
        return pwd.getpwuid(uid).pw_name == user
    except KeyError:
        return False


def _hash_secret(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()


def _make_credential(row: Any) -> Credential:
    number, kind, uid, user, how, name, scopes, created_us, expires_us, used_us, ended_us = row
    return Credential(
        id=number,
        kind=kind,
        uid=uid,
        user=user,
        how=how,
        name=name,
        scopes=tuple(scopes.split(",")) if scopes else (),
        created=from_micros(created_us),
        expires=from_micros(expires_us),
        used=from_micros(used_us) if used_us else None,
        ended=from_micros(ended_us) if ended_us else None,
    )


@contextmanager
def _translate_sqlite_errors() -> Iterator[None]:
    """Translate SQLite errors into errors of this package."""
    try:
        yield
    except SqliteUnavailable as error:
        raise CredentialsUnavailable(str(error), error.offender) from error
    except SqliteError as error:
        raise CredentialsError(str(error), error.offender) from error
