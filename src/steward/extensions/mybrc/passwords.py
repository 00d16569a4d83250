"""Hashes of passwords: scrypt's, which takes a tenth of a second and 32 MB on purpose."""

import hashlib
import hmac
import secrets
from typing import Final

from steward.bank.errors import BankUsage

_KIND: Final = "scrypt"
_COST: Final = 2**15
_BLOCK: Final = 8
_MEMORY: Final = 64 << 20
_SALT: Final = 16
_KEY: Final = 32


def hashed(password: str) -> str:
    """A password as a line of the users file has it behind the name."""
    salt = secrets.token_bytes(_SALT)
    return f"{_KIND}${_COST}${_BLOCK}${salt.hex()}${_key(password, salt, _COST, _BLOCK).hex()}"


def matches(password: str, kept: str) -> bool:
    """Whether a password is the one of which the hash was kept.

    Raises:
        BankUsage: What was kept is no such hash.
    """
    try:
        kind, cost, block, salt, key = kept.split("$")
        numbers = int(cost), int(block)
        made = _key(password, bytes.fromhex(salt), *numbers)
        is_ours = kind == _KIND
    except ValueError as error:
        raise BankUsage(f"{kept[:12]!r} is no hash of a password", kept) from error
    return is_ours and hmac.compare_digest(made.hex(), key)


def _key(password: str, salt: bytes, cost: int, block: int) -> bytes:
    return hashlib.scrypt(
        password.encode(), salt=salt, n=cost, r=block, p=1, maxmem=_MEMORY, dklen=_KEY
    )
