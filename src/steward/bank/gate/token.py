"""The token that a job carries in its admin_comment: what was held for it, and for whom.

Slurm keeps it with the job, so holds can be made anew where the gate's own
database is lost. It is told from what others write by a MAC over all that it
says, the cluster and the user, whose secret never leaves Steward's state
directory. One that was made by somebody else is as if it were not there.
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
SECRET_BYTES: Final = 32
_ID_LETTERS: Final = 16
_LETTERS: Final = bytes(b"abcdefghijklmnopqrstuvwxyz234567"[byte % 32] for byte in range(256))
"""A letter for each byte, every letter for as many."""
_MAC_BYTES: Final = 16
_VERSION: Final = "1"
# Bounded everywhere: an admin_comment is text that others write too.
_TOKEN: Final = re.compile(
    r"(?<![A-Za-z0-9=.])steward=1\.([a-z2-7]{16})\.([0-9]{1,19})\.([0-9]{1,12})"
    r"\.([a-z2-7]{0,512})\.([a-z2-7]{26})(?![A-Za-z0-9.])"
)


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A token as it was found; whether it is genuine :func:`verify` says.

    Attributes:
        id: The hold's id.
        amount: What was held at first, micro-SU.
        expires_s: When the hold is voided unless Slurm shows the job, s since the epoch.
        account: Who pays.
        mac: What proves it.
        text: The whole token.
    """

    id: str
    amount: int
    expires_s: int
    account: str
    mac: str
    text: str


def new_id() -> str:
    """An id that no other hold has."""
    return secrets.token_bytes(_ID_LETTERS).translate(_LETTERS).decode("ascii")


def make(
    secret: bytes, hold_id: str, amount: int, expires_s: int, account: str, cluster: str, uid: int
) -> str:
    """The token of a hold."""
    head = f"{_VERSION}.{hold_id}.{amount}.{expires_s}.{_written(account)}"
    return f"steward={head}.{_mac(secret, head, cluster, uid)}"


def find(text: str) -> list[Token]:
    """The tokens in an admin_comment, whatever stands around them, genuine or not."""
    if "steward=" not in text:
        return []
    found = []
    for match in _TOKEN.finditer(text):
        account = _account(match[4])
        if account is not None:
            found.append(
                Token(
                    id=match[1],
                    amount=int(match[2]),
                    expires_s=int(match[3]),
                    account=account,
                    mac=match[5],
                    text=match[0],
                )
            )
    return found


def verify(token: Token, secret: bytes, cluster: str, uid: int) -> bool:
    """Whether we made it, for a job of this user on this cluster."""
    head = token.text.removeprefix("steward=").rpartition(".")[0]
    return hmac.compare_digest(_mac(secret, head, cluster, uid), token.mac)


def genuine(text: str, secret: bytes, cluster: str, uid: int) -> Token | None:
    """The first token in an admin_comment that we made for this user's job; None without one."""
    for token in find(text):
        if verify(token, secret, cluster, uid):
            return token
    return None


def without(text: str) -> str:
    """An admin_comment without the tokens in it."""
    return " ".join(_TOKEN.sub(" ", text).split()) if "steward=" in text else text


def load_secret(state_dir: str) -> bytes:
    """The secret that tokens are made with; made at the first call.

    It lies beside gate.db, not in it: whoever deletes that loses no token.

    Raises:
        GateUnavailable: The file cannot be read or written now.
        BankError: It holds something else.
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
    """Write the secret down, whole or not at all.

    Args:
        state_dir: The directory that holds it.
        secret: What is written.
        is_first: Whether one that is there already stays.

    Raises:
        OSError: It cannot be written.
    """
    path = os.path.join(state_dir, KEY_FILE)
    made = f"{path}.{os.getpid()}"
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w", encoding="ascii") as file:
            file.write(secret.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        if is_first:
            os.link(made, path)
        else:
            os.replace(made, path)
    except FileExistsError:
        pass  # another process was first, and its secret is the one
    finally:
        if os.path.exists(made):
            os.unlink(made)
    directory = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def parse_secret(text: str, path: str = "") -> bytes:
    """The secret that a text holds.

    Raises:
        BankError: It holds none.
    """
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise BankError(
            f"{path or 'the text'} holds no secret of the gate: put the right one back, or "
            "remove it, and jobs in the queue get new holds",
            path,
        )
    return secret


def _text(data: bytes) -> str:
    return base64.b32encode(data).decode("ascii").rstrip("=").lower()


@lru_cache(maxsize=1024)
def _written(account: str) -> str:
    return _text(account.encode())


def _account(text: str) -> str | None:
    try:
        return base64.b32decode(text.upper() + "=" * (-len(text) % 8)).decode()
    except (binascii.Error, ValueError):
        return None  # not one of ours, then


def _mac(secret: bytes, head: str, cluster: str, uid: int) -> str:
    mac = _keyed(secret).copy()
    mac.update(f"{head}\0{cluster}\0{uid}".encode())
    return _text(mac.digest()[:_MAC_BYTES])


@lru_cache(maxsize=8)
def _keyed(secret: bytes) -> hmac.HMAC:
    # slurmctld waits for each token: to look the algorithm up and to take the key in each time
    # makes a MAC cost twice as much where the processor has done something else meanwhile.
    return hmac.new(secret, digestmod=hashlib.sha256)
