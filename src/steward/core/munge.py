"""Who somebody is, on whichever host of a cluster, as MUNGE tells it."""

import ctypes
import hashlib
import ipaddress
import os
import re
import struct
import subprocess
from functools import lru_cache
from typing import Any, Final, Self

import msgspec

from steward.core.errors import Refused, Unavailable, UsageError
from steward.core.processes import end_group

_NAME: Final = "libmunge.so.2"
# munge_opt_t of munge.h.
_ADDR4: Final = 5
_SOCKET: Final = 8


class Opened(msgspec.Struct, frozen=True):
    """What the library says of a credential.

    Attributes:
        code: munge_err_t: 0 for a good one.
        said: That code in words.
        uid: Of the process that it was made for.
        address: Of the host that it was made on.
        payload: What it was made over.
    """

    code: int
    said: str
    uid: int = -1
    address: str = ""
    payload: bytes = b""


@lru_cache(maxsize=1)
def loaded() -> Any:
    """The library, ready for use; None where there is none."""
    try:
        found = ctypes.CDLL(_NAME)
    except OSError:
        return None
    found.munge_ctx_create.restype = ctypes.c_void_p
    found.munge_ctx_create.argtypes = []
    found.munge_ctx_destroy.restype = None
    found.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
    found.munge_strerror.restype = ctypes.c_char_p
    found.munge_ctx_strerror.restype = ctypes.c_char_p
    found.munge_ctx_strerror.argtypes = [ctypes.c_void_p]
    return found


class _Context:
    """A munge_ctx_t, for one call: a context must not be shared by threads."""

    def __init__(self, socket: str) -> None:
        self.library = loaded()
        self.pointer = ctypes.c_void_p(self.library.munge_ctx_create())
        if socket:
            self.library.munge_ctx_set(self.pointer, _SOCKET, ctypes.c_char_p(socket.encode()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.library.munge_ctx_destroy(self.pointer)

    def said(self, code: int) -> str:
        """What went wrong, in words."""
        text = self.library.munge_ctx_strerror(self.pointer) or self.library.munge_strerror(code)
        return (text or b"").decode("utf-8", "backslashreplace")


def encode(socket: str, payload: bytes) -> tuple[int, bytes, str]:
    """A credential over these bytes: munge_err_t, the credential, and what is wrong."""
    made = ctypes.c_void_p()
    with _Context(socket) as context:
        code = context.library.munge_encode(
            ctypes.byref(made), context.pointer, payload, ctypes.c_int(len(payload))
        )
        if code:
            return code, b"", context.said(code)
        credential = ctypes.string_at(made)
        _free(made)
    return 0, credential, ""


def decode(socket: str, credential: bytes) -> Opened:
    """What a credential says; of one that is not good only the code and its words."""
    payload = ctypes.c_void_p()
    length, uid, gid = ctypes.c_int(), ctypes.c_uint32(), ctypes.c_uint32()
    address = ctypes.c_uint32()
    with _Context(socket) as context:
        code = context.library.munge_decode(
            ctypes.c_char_p(credential),
            context.pointer,
            ctypes.byref(payload),
            ctypes.byref(length),
            ctypes.byref(uid),
            ctypes.byref(gid),
        )
        # Also of one that is too old, or was used before, the library hands out the payload.
        data = ctypes.string_at(payload, length.value) if payload.value else b""
        _free(payload)
        if code:
            return Opened(code, context.said(code))
        code = context.library.munge_ctx_get(context.pointer, _ADDR4, ctypes.byref(address))
        if code:
            return Opened(code, context.said(code))
    host = str(ipaddress.IPv4Address(struct.pack("=I", address.value)))
    return Opened(0, "", uid.value, host, data)


def _free(pointer: ctypes.c_void_p) -> None:
    if pointer.value:
        libc = ctypes.CDLL(None)
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free.restype = None
        libc.free(pointer)


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
        if loaded() is not None:
            code, out, said = encode(self._socket, payload)
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
        if loaded() is not None:
            return _claim_of(decode(self._socket, credential))
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


def _claim_of(opened: Opened) -> Claim:
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


SCHEME: Final = "Munge"
"""In the header ``Authorization``, before the credential."""
_WORD: Final = "steward api 1"
_USUAL_PORTS: Final = (":443", ":80")
_LINE: Final = re.compile(r"[A-Z]{1,20} /[!-~]{0,16384}", re.ASCII)
_CREDENTIAL: Final = re.compile(r"MUNGE:[A-Za-z0-9+/]{4,16384}={0,2}:", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


def statement(method: str, target: str, body: bytes, origin: str) -> bytes:
    """The text that a credential for a request is made over.

    Args:
        method: Of HTTP.
        target: The path from ``/api/`` on, with its query if there is one.
        body: What is sent.
        origin: Host, and port if it is not the usual one, of the pages' address.
    """
    return _text(method, target, digest(body), origin)


def digest(body: bytes) -> str:
    """What stands for a body in a statement: its SHA-256, in hexadecimal."""
    return hashlib.sha256(body).hexdigest()


def is_credential(text: str) -> bool:
    """Whether a text may be a credential, as far as can be said without munged."""
    return _CREDENTIAL.fullmatch(text) is not None


def statement_over(method: str, target: str, shown: str, origin: str) -> bytes:
    """The same as :func:`statement`, by the digest of a body that somebody else has read.

    Args:
        method: Of HTTP.
        target: The path from ``/api/`` on, with its query if there is one.
        shown: The digest of what is sent.
        origin: Host, and port if it is not the usual one, of the pages' address.

    Raises:
        UsageError: It is not a request of HTTP that is described so.
    """
    if not _LINE.fullmatch(f"{method} {target}") or not _DIGEST.fullmatch(shown):
        raise UsageError("that is no request of HTTP, whose maker MUNGE could name")
    return _text(method, target, shown, origin)


def difference(made: bytes, asked: bytes) -> str:
    """In what a credential's text is not that of the request it came with; "" if it is."""
    if made == asked:
        return ""
    made_lines, asked_lines = made.split(b"\n"), asked.split(b"\n")
    if len(made_lines) != len(asked_lines) or made_lines[:3] != asked_lines[:3]:
        return "was made over another request"
    theirs, ours = (
        lines[3].decode("utf-8", "backslashreplace") for lines in (made_lines, asked_lines)
    )
    return f"was made for {theirs!r}, and these pages are {ours!r} ('url' of [web])"


def _text(method: str, target: str, shown: str, origin: str) -> bytes:
    return f"{_WORD}\n{method} {target}\n{shown}\n{_plain(origin)}\n".encode()


def _plain(origin: str) -> str:
    host = origin.rpartition("@")[2].lower()
    for port in _USUAL_PORTS:
        host = host.removesuffix(port)
    return host
