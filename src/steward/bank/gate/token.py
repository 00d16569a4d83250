"""Tokens in a job's admin_comment, which record its SU hold, and the key that signs them.

Slurm stores the token with the job, so the gate can rebuild holds if its database is lost.
`make_token`, `find_tokens` and `remove_tokens` write, parse and remove tokens; `is_genuine` and
`find_genuine_token` check the MAC over the token's content, the cluster and the user. Its key is in
Steward's state directory (`load_secret`, `store_secret`); only the gates of a site share it. A
token without a valid MAC is ignored.
"""

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
from functools import lru_cache
from typing import Final

import msgspec

from steward.bank.errors import BankError, GateUnavailable

KEY_FILE: Final = "gate.key"
"""Name of the key's file in the state directory."""
SECRET_BYTES: Final = 32
_ID_LENGTH: Final = 16
_DIGITS: Final = "abcdefghijklmnopqrstuvwxyz234567"
"""Digits of base 32."""
_LETTERS: Final = bytes(ord(_DIGITS[byte % 32]) for byte in range(256))
"""A letter for each byte value; every letter stands for equally many."""
_DIGIT_PAIRS: Final = [first + second for first in _DIGITS for second in _DIGITS]
"""Two digits for each number of ten bits."""
_MAC_BYTES: Final = 16
_VERSION: Final = "1"
# All parts have bounded lengths: others write into an admin_comment, too.
_TOKEN: Final = re.compile(
    r"(?<![A-Za-z0-9=.])steward=1\.([a-z2-7]{16})\.([0-9]{1,19})\.([0-9]{1,12})"
    r"\.([a-z2-7]{0,512})\.([a-z2-7]{26})(?![A-Za-z0-9.])"
)


class HoldToken(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed token; :func:`is_genuine` tells whether it is genuine.

    Attributes:
        id: The hold's id.
        amount: The initially held amount, micro-SU.
        expires_s: When the hold expires unless Slurm shows the job, s since the epoch.
        account: The account that pays.
        mac: The MAC that proves it.
        text: The whole token.
    """

    id: str
    amount: int
    expires_s: int
    account: str
    mac: str
    text: str


def make_hold_id() -> str:
    """Generate the id of a new hold."""
    return secrets.token_bytes(_ID_LENGTH).translate(_LETTERS).decode("ascii")


def make_token(
    secret: bytes, hold_id: str, amount: int, expires_s: int, account: str, cluster: str, uid: int
) -> str:
    """Make the token of a hold."""
    content = f"{_VERSION}.{hold_id}.{amount}.{expires_s}.{_encode_account(account)}"
    return f"steward={content}.{_compute_mac(secret, content, cluster, uid)}"


def find_tokens(text: str) -> list[HoldToken]:
    """Parse all tokens in an admin_comment, genuine or not."""
    if "steward=" not in text:
        return []
    tokens = []
    for match in _TOKEN.finditer(text):
        account = _decode_account(match[4])
        if account is not None:
            tokens.append(
                HoldToken(
                    id=match[1],
                    amount=int(match[2]),
                    expires_s=int(match[3]),
                    account=account,
                    mac=match[5],
                    text=match[0],
                )
            )
    return tokens


def is_genuine(token: HoldToken, secret: bytes, cluster: str, uid: int) -> bool:
    """Return True if Steward made the token for a job of this user on this cluster."""
    content = token.text.removeprefix("steward=").rpartition(".")[0]
    return hmac.compare_digest(_compute_mac(secret, content, cluster, uid), token.mac)


def find_genuine_token(text: str, secret: bytes, cluster: str, uid: int) -> HoldToken | None:
    """Return the first genuine token of this user's job in an admin_comment; None if none."""
    for token in find_tokens(text):
        if is_genuine(token, secret, cluster, uid):
            return token
    return None


def remove_tokens(text: str) -> str:
    """Remove all tokens from an admin_comment."""
    return " ".join(_TOKEN.sub(" ", text).split()) if "steward=" in text else text


def load_secret(state_dir: str) -> bytes:
    """Read the key that signs tokens; create it at the first call.

    It is in a file beside gate.db: deleting the database invalidates no token.

    Raises:
        GateUnavailable: The file cannot be read or written now.
        BankError: The file does not hold a key.
    """
    path = os.path.join(state_dir, KEY_FILE)
    try:
        try:
            with open(path, encoding="ascii") as file:
                return parse_secret(file.read(), path)
        except FileNotFoundError:
            store_secret(state_dir, secrets.token_bytes(SECRET_BYTES), is_first=True)
        with open(path, encoding="ascii") as file:
            return parse_secret(file.read(), path)
    except OSError as error:
        raise GateUnavailable(f"cannot use {path}: {error.strerror}", path) from error


def store_secret(state_dir: str, secret: bytes, *, is_first: bool = False) -> None:
    """Write the key to its file, atomically.

    Args:
        state_dir: The directory that holds it.
        secret: The key.
        is_first: Whether to keep a key that exists already.

    Raises:
        OSError: The file cannot be written.
    """
    path = os.path.join(state_dir, KEY_FILE)
    temporary_path = f"{path}.{os.getpid()}"
    fd = os.open(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w", encoding="ascii") as file:
            file.write(secret.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        if is_first:
            os.link(temporary_path, path)
        else:
            os.replace(temporary_path, path)
    except FileExistsError:
        pass  # another process was first, and its key counts
    finally:
        if os.path.exists(temporary_path):
            os.unlink(temporary_path)
    directory_fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory_fd)
    finally:
        os.close(directory_fd)


def parse_secret(text: str, path: str = "") -> bytes:
    """Parse a key from its hexadecimal text.

    Raises:
        BankError: The text holds no key.
    """
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise BankError(
            f"{path or 'the text'} does not contain the gate's secret: restore the file, or "
            "remove it to give jobs in the queue new holds",
            path,
        )
    return secret


def _to_base32(data: bytes) -> str:
    return base64.b32encode(data).decode("ascii").rstrip("=").lower()


@lru_cache(maxsize=16_384)
def _encode_account(account: str) -> str:
    return _to_base32(account.encode())


def _decode_account(text: str) -> str | None:
    """Decode the account's name in a token; None if it is malformed."""
    try:
        return base64.b32decode(text.upper() + "=" * (-len(text) % 8)).decode()
    except (binascii.Error, ValueError):
        return None  # not a token of Steward's


def _compute_mac(secret: bytes, content: str, cluster: str, uid: int) -> str:
    """Compute the MAC of a token's content for a cluster and a user."""
    mac = _make_keyed_mac(secret).copy()
    mac.update(f"{content}\0{cluster}\0{uid}".encode())
    # Base 32, as of `_to_base32`, in a quarter of its time: two digits for each ten bits.
    number = int.from_bytes(mac.digest()[:_MAC_BYTES], "big") << 2
    return "".join([_DIGIT_PAIRS[number >> shift & 1023] for shift in range(120, -10, -10)])


@lru_cache(maxsize=8)
def _make_keyed_mac(secret: bytes) -> hmac.HMAC:
    # slurmctld waits for each token. Setting up the algorithm and key each time doubles the cost of
    # a MAC when the processor's caches are cold.
    return hmac.new(secret, digestmod=hashlib.sha256)
