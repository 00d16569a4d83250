"""MUNGE's library, called in place of its two commands where it is there.

Thousands of nodes report within a minute; starting a command for each
credential would cost more than everything else that is done for them. The
command ``unmunge`` also looks up the name of the host, which may take seconds.
"""

import ctypes
import ipaddress
import struct
from functools import lru_cache
from typing import Any, Final, Self

import msgspec

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
