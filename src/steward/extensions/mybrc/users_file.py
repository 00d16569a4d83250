"""The file of those who may get a token of the myBRC API: lines ``USER:HASH``, written whole."""

import os
import re
from typing import Final

from steward.bank.errors import BankError, BankUsage
from steward.core.files import replacing
from steward.extensions.mybrc.passwords import hashed

_USER: Final = re.compile(r"[^\s:#][^\s:]{0,149}")
_SHORTEST: Final = 8


def users_in(text: str) -> list[tuple[str, str]]:
    """The users of such a file, and the hashes of their passwords; ``#`` begins a comment."""
    lines = (line.strip() for line in text.splitlines())
    parts = (line.partition(":") for line in lines if line and not line.startswith("#"))
    return [(user.strip(), kept.strip()) for user, colon, kept in parts if colon and user.strip()]


def set_user(path: str, user: str, password: str) -> bool:
    """Let a user in by a password.

    Returns:
        Whether there was no such user.

    Raises:
        BankUsage: The name or the password cannot be one.
        BankError: The file cannot be read or written.
    """
    if not _USER.fullmatch(user):
        raise BankUsage(f"{user!r} can be no name here: leave out blanks and colons", user)
    if len(password) < _SHORTEST:
        raise BankUsage(f"the password is too short: give {_SHORTEST} characters or more", user)
    lines = _lines(path)
    others = [line for line in lines if not _is_of(line, user)]
    _write(path, [*others, f"{user}:{hashed(password)}"])
    return len(others) == len(lines)


def drop_user(path: str, user: str) -> bool:
    """Let a user in no more; False if there is none of that name.

    Raises:
        BankError: The file cannot be read or written.
    """
    lines = _lines(path)
    others = [line for line in lines if not _is_of(line, user)]
    if len(others) < len(lines):
        _write(path, others)
    return len(others) < len(lines)


def _is_of(line: str, user: str) -> bool:
    return any(name == user for name, _ in users_in(line))


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeError) as error:
        raise BankError(f"{path} cannot be read: {error}", path) from error


def _write(path: str, lines: list[str]) -> None:
    """Put a new file in place of the old one, with its owner; nobody sees half of it."""
    try:
        mode, owner, trusted = 0o600, None, frozenset[int]()
        if os.path.exists(path):
            old = os.stat(path)
            mode, owner = old.st_mode & 0o7777, (old.st_uid, old.st_gid)
            trusted = frozenset({old.st_uid})
        with replacing(path, mode, owner=owner, trusted=trusted) as file:
            file.writelines(f"{line}\n".encode() for line in lines)
    except OSError as error:
        raise BankError(f"{path} cannot be written: {error.strerror}", path) from error
