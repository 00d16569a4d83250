"""Who speaks, as MUNGE tells it: credentials made and opened by its library or its commands.

A credential proves the uid of the process that asked munged for it, and that
munged holds the cluster's key; munged itself refuses one that is too old or
was opened here before. See munge(7), unmunge(1).
"""

import os
import re
import subprocess
from typing import Final

import msgspec

from steward.core.ending import end_group
from steward.core.errors import Refused, Unavailable
from steward.core.munge import library

_TIMEOUT_S: Final = 15.0
_MOST_CREDENTIAL: Final = 1 << 14
_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_METADATA = re.compile(rb"UID: +(\d+)")
_HOST = re.compile(rb"ENCODE_HOST: +(?:(\S+) \((\S+)\)|(\S+))")
# munge_err_t of munge.h: what is the credential's own fault, and not munged's.
_BAD: Final = {
    8: "is none",
    9: "is of another version",
    10: "has a cipher that is not known here",
    11: "has a MAC that is not known here",
    12: "is compressed in a way that is not known here",
    13: "is of another realm",
    14: "was made with another key (the cluster's munge.key?)",
    15: "has expired: do the clocks agree?",
    16: "is from the future: do the clocks agree?",
    17: "was used before",
    18: "is for somebody else",
}


class MungeUnavailable(Unavailable):
    """munged does not answer."""


class Claim(msgspec.Struct, frozen=True):
    """What a credential proves.

    Attributes:
        uid: Of the process that it was made for.
        address: Of the host that it was made on, as its munged says it.
        payload: What it was made over.
    """

    uid: int
    address: str
    payload: bytes


class Munge:
    """One munged.

    Args:
        socket: Its socket; MUNGE's default if empty.
    """

    def __init__(self, socket: str = "") -> None:
        self._socket = socket
        self._where = (f"--socket={socket}",) if socket else ()

    def encode(self, payload: bytes) -> bytes:
        """A credential over these bytes.

        Raises:
            MungeUnavailable: munged does not answer.
        """
        if library.loaded() is not None:
            code, out, said = library.encode(self._socket, payload)
        else:
            code, out, said = _run(["munge", *self._where], payload)
        if code != 0:
            raise MungeUnavailable(f"munge makes no credential: {said or f'exit code {code}'}")
        return out.strip()

    def decode(self, credential: bytes) -> Claim:
        """Open a credential.

        Raises:
            Refused: It is none, is too old, was used before, or was made with another key.
            MungeUnavailable: munged does not answer.
        """
        if not 0 < len(credential) <= _MOST_CREDENTIAL:
            raise Refused("there is no MUNGE credential")
        if library.loaded() is not None:
            return _claim_of(library.decode(self._socket, credential))
        words = ["unmunge", *self._where, "--numeric", "--keys=UID,ENCODE_HOST"]
        code, out, said = _run(words, credential)
        if code in _BAD:
            raise Refused(f"the MUNGE credential {_BAD[code]}")
        head, _, payload = out.partition(b"\n\n")
        uid, host = _METADATA.search(head), _HOST.search(head)
        if code != 0 or uid is None or host is None:
            raise MungeUnavailable(
                f"unmunge opens no credential: {said or f'exit code {code}'}", code
            )
        address = (host[2] or host[3]).decode("ascii", "replace")
        return Claim(int(uid[1]), address, payload)


def _claim_of(opened: library.Opened) -> Claim:
    if opened.code in _BAD:
        raise Refused(f"the MUNGE credential {_BAD[opened.code]}")
    if opened.code:
        raise MungeUnavailable(f"munged opens no credential: {opened.said}", opened.code)
    return Claim(opened.uid, opened.address, opened.payload)


def _run(words: list[str], data: bytes) -> tuple[int, bytes, str]:
    environment = {"PATH": os.environ.get("PATH", _PATH), "LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise MungeUnavailable(
            f"{words[0]} cannot be started: {error.strerror}: install MUNGE", words
        ) from error
    try:
        out, err = process.communicate(data, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise MungeUnavailable(
            f"{words[0]} took longer than {_TIMEOUT_S:.0f} s: is munged well?", words
        ) from error
    finally:
        if process.returncode is None:
            end_group(process)
    return process.returncode, out, " ".join(err.decode("utf-8", "backslashreplace").split())[:400]
