"""MUNGE authentication: make and verify credentials, and bind them to HTTP requests.

A credential proves the uid of the process that asked munged for it, and that munged holds the
cluster's key; munged rejects one that is too old or was decoded here before, see munge(7).
:class:`Munge` makes and verifies credentials, with libmunge (``encode_credential``,
``decode_credential``) or, where that is missing, with the commands munge and unmunge. Thousands of
nodes report within a minute: a command for each would cost more than the rest of their handling,
and unmunge also looks up the host's name, which may take seconds.

``build_statement`` makes the text that the credential of an HTTP request covers, four lines: a
version, method and path, SHA-256 of the body, and the host of the pages' address, so that a server
that receives the credential cannot use it at another. ``describe_difference`` compares two.
"""

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

from steward.core.errors import PermissionRefused, Unavailable, UsageError
from steward.core.processes import kill_group

_NAME: Final = "libmunge.so.2"
# Members of munge_opt_t in munge.h.
_ADDR4: Final = 5
_SOCKET: Final = 8


class DecodedCredential(msgspec.Struct, frozen=True):
    """Result of libmunge for a credential.

    Attributes:
        code: munge_err_t: 0 for a valid one.
        message: That code in words.
        uid: Uid of the process that made the credential.
        address: Address of the host that made it.
        payload: Data that it covers.
    """

    code: int
    message: str
    uid: int = -1
    address: str = ""
    payload: bytes = b""


@lru_cache(maxsize=1)
def load_libmunge() -> Any:
    """Load libmunge; return None if it is not installed."""
    try:
        library = ctypes.CDLL(_NAME)
    except OSError:
        return None
    library.munge_ctx_create.restype = ctypes.c_void_p
    library.munge_ctx_create.argtypes = []
    library.munge_ctx_destroy.restype = None
    library.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
    library.munge_strerror.restype = ctypes.c_char_p
    library.munge_ctx_strerror.restype = ctypes.c_char_p
    library.munge_ctx_strerror.argtypes = [ctypes.c_void_p]
    return library


class _Context:
    """A munge_ctx_t, for one call: threads must not share a context."""

    def __init__(self, socket: str) -> None:
        self.library = load_libmunge()
        self.pointer = ctypes.c_void_p(self.library.munge_ctx_create())
        if socket:
            self.library.munge_ctx_set(self.pointer, _SOCKET, ctypes.c_char_p(socket.encode()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.library.munge_ctx_destroy(self.pointer)

    def get_error(self, code: int) -> str:
        """Return the last error, in words."""
        text = self.library.munge_ctx_strerror(self.pointer) or self.library.munge_strerror(code)
        return (text or b"").decode("utf-8", "backslashreplace")


def encode_credential(socket: str, payload: bytes) -> tuple[int, bytes, str]:
    """Make a credential over these bytes; return munge_err_t, the credential and error text."""
    pointer = ctypes.c_void_p()
    with _Context(socket) as context:
        code = context.library.munge_encode(
            ctypes.byref(pointer), context.pointer, payload, ctypes.c_int(len(payload))
        )
        if code:
            return code, b"", context.get_error(code)
        credential = ctypes.string_at(pointer)
        _free(pointer)
    return 0, credential, ""


def decode_credential(socket: str, credential: bytes) -> DecodedCredential:
    """Verify a credential; the result of an invalid one has only the code and its words."""
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
        # The library also returns a payload for expired and replayed credentials.
        data = ctypes.string_at(payload, length.value) if payload.value else b""
        _free(payload)
        if code:
            return DecodedCredential(code, context.get_error(code))
        code = context.library.munge_ctx_get(context.pointer, _ADDR4, ctypes.byref(address))
        if code:
            return DecodedCredential(code, context.get_error(code))
    host = str(ipaddress.IPv4Address(struct.pack("=I", address.value)))
    return DecodedCredential(0, "", uid.value, host, data)


def _free(pointer: ctypes.c_void_p) -> None:
    if pointer.value:
        libc = ctypes.CDLL(None)
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free.restype = None
        libc.free(pointer)


_TIMEOUT_S: Final = 15.0
"""Longest run of munge and unmunge, in seconds."""
_MOST_CREDENTIAL: Final = 1 << 14
"""Longest credential, in bytes."""
_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_METADATA = re.compile(rb"UID: +(\d+)")
_HOST = re.compile(rb"ENCODE_HOST: +(?:(\S+) \((\S+)\)|(\S+))")
# munge_err_t of munge.h: faults of the credential itself, not of munged.
_INVALID_CREDENTIAL: Final = {
    8: "is missing",
    9: "is of another version",
    10: "has an unknown cipher",
    11: "has an unknown MAC",
    12: "has an unknown compression type",
    13: "is of another realm",
    14: "was made with another key: compare munge.key on both hosts",
    15: "has expired: synchronize the clocks of both hosts",
    16: "is from the future: synchronize the clocks of both hosts",
    17: "was used before",
    18: "is restricted to another user",
}


class MungeUnavailable(Unavailable):
    """munged does not answer."""


class MungeClaim(msgspec.Struct, frozen=True):
    """Facts that a valid credential proves.

    Attributes:
        uid: Uid of the process that made it.
        address: IP address of the host that made it, as its munged reports it.
        payload: Data that it covers.
    """

    uid: int
    address: str
    payload: bytes


class Munge:
    """Client of one munged.

    Args:
        socket: Socket of munged; MUNGE's default if empty.
    """

    def __init__(self, socket: str = "") -> None:
        self._socket = socket
        self._socket_option = (f"--socket={socket}",) if socket else ()

    def encode(self, payload: bytes) -> bytes:
        """Make a credential over these bytes.

        Raises:
            MungeUnavailable: munged does not answer.
        """
        if load_libmunge() is not None:
            code, out, message = encode_credential(self._socket, payload)
        else:
            code, out, message = _run_munge(["munge", *self._socket_option], payload)
        if code != 0:
            raise MungeUnavailable(
                f"cannot create a MUNGE credential: {message or f'exit code {code}'}"
            )
        return out.strip()

    def decode(self, credential: bytes) -> MungeClaim:
        """Verify a credential.

        Raises:
            PermissionRefused: It is none, is too old, was used before, or was made with another
                key.
            MungeUnavailable: munged does not answer.
        """
        if not 0 < len(credential) <= _MOST_CREDENTIAL:
            raise PermissionRefused("the MUNGE credential is missing or too large")
        if load_libmunge() is not None:
            return _make_claim(decode_credential(self._socket, credential))
        command = ["unmunge", *self._socket_option, "--numeric", "--keys=UID,ENCODE_HOST"]
        code, out, message = _run_munge(command, credential)
        if code in _INVALID_CREDENTIAL:
            raise PermissionRefused(f"the MUNGE credential {_INVALID_CREDENTIAL[code]}")
        head, _, payload = out.partition(b"\n\n")
        uid, host = _METADATA.search(head), _HOST.search(head)
        if code != 0 or uid is None or host is None:
            raise MungeUnavailable(
                f"cannot decode the MUNGE credential: {message or f'exit code {code}'}", code
            )
        address = (host[2] or host[3]).decode("ascii", "replace")
        return MungeClaim(int(uid[1]), address, payload)


def _make_claim(decoded: DecodedCredential) -> MungeClaim:
    if decoded.code in _INVALID_CREDENTIAL:
        raise PermissionRefused(f"the MUNGE credential {_INVALID_CREDENTIAL[decoded.code]}")
    if decoded.code:
        raise MungeUnavailable(
            f"cannot decode the MUNGE credential: {decoded.message}", decoded.code
        )
    return MungeClaim(decoded.uid, decoded.address, decoded.payload)


def _run_munge(command: list[str], data: bytes) -> tuple[int, bytes, str]:
    """Run munge or unmunge; return exit code, output and error text."""
    environment = {"PATH": os.environ.get("PATH", _PATH), "LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise MungeUnavailable(
            f"cannot start {command[0]}: {error.strerror}: install MUNGE", command
        ) from error
    try:
        out, err = process.communicate(data, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise MungeUnavailable(
            f"{command[0]} took longer than {_TIMEOUT_S:.0f} s: check munged", command
        ) from error
    finally:
        if process.returncode is None:
            kill_group(process)
    return process.returncode, out, " ".join(err.decode("utf-8", "backslashreplace").split())[:400]


SCHEME: Final = "Munge"
"""Scheme of the HTTP header ``Authorization``, before the credential."""
_STATEMENT_VERSION: Final = "steward api 1"
"""First line of every statement, with the version of its format."""
_USUAL_PORTS: Final = (":443", ":80")
_LINE: Final = re.compile(r"[A-Z]{1,20} /[!-~]{0,16384}", re.ASCII)
_CREDENTIAL: Final = re.compile(r"MUNGE:[A-Za-z0-9+/]{4,16384}={0,2}:", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


def build_statement(method: str, target: str, body: bytes, origin: str) -> bytes:
    """Return the text that a credential for an HTTP request covers.

    Args:
        method: HTTP method.
        target: Path from ``/api/`` on, with its query if there is one.
        body: Body of the request.
        origin: Host of the pages' address, with the port if it is not the usual one.
    """
    return _format_statement(method, target, hash_body(body), origin)


def hash_body(body: bytes) -> str:
    """Return the SHA-256 of a body, in hexadecimal, for its statement."""
    return hashlib.sha256(body).hexdigest()


def is_credential(text: str) -> bool:
    """Return whether a text has the form of a MUNGE credential."""
    return _CREDENTIAL.fullmatch(text) is not None


def build_statement_from_digest(method: str, target: str, digest: str, origin: str) -> bytes:
    """Return the same text as :func:`build_statement`, from the digest of the body.

    Args:
        method: HTTP method.
        target: Path from ``/api/`` on, with its query if there is one.
        digest: Digest of the body.
        origin: Host of the pages' address, with the port if it is not the usual one.

    Raises:
        UsageError: The values do not describe an HTTP request.
    """
    if not _LINE.fullmatch(f"{method} {target}") or not _DIGEST.fullmatch(digest):
        raise UsageError("not an HTTP request, so MUNGE cannot authenticate its sender")
    return _format_statement(method, target, digest, origin)


def describe_difference(covered: bytes, expected: bytes) -> str:
    """Describe how the text that a credential covers differs from its request's; "" if equal."""
    if covered == expected:
        return ""
    covered_lines, expected_lines = covered.split(b"\n"), expected.split(b"\n")
    if len(covered_lines) != len(expected_lines) or covered_lines[:3] != expected_lines[:3]:
        return "was made for another request"
    theirs, ours = (
        lines[3].decode("utf-8", "backslashreplace") for lines in (covered_lines, expected_lines)
    )
    return f"was made for {theirs!r}, but these pages are {ours!r}: correct 'url' in [web]"


def _format_statement(method: str, target: str, digest: str, origin: str) -> bytes:
    return (
        f"{_STATEMENT_VERSION}\n{method} {target}\n{digest}\n{_strip_usual_port(origin)}\n".encode()
    )


def _strip_usual_port(origin: str) -> str:
    host = origin.rpartition("@")[2].lower()
    for port in _USUAL_PORTS:
        host = host.removesuffix(port)
    return host
