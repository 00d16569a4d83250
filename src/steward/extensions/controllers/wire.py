"""What goes over the wire between a controller and the Steward that it reports to.

A frame is a 4-byte little-endian length and a MessagePack array of two: the
message's own bytes, and the credential that answers for them ("" where TLS
does). Either side is the other's hostile input: every length is bounded, and
until it is known who speaks only a few kilobytes are taken.

    receiver                    controller
      Greeting(nonce)  ------>
                       <------  Hello(cluster, nonce)
      Answer(0)        ------>
                       <------  Batch(1)
      Answer(1)        ------>                        and so on

The credential of each message but the greeting is made over its SHA-256, its
number, its direction and both nonces, so that none can be used twice, nor in
another connection, nor be sent back. Answers carry one as well: bytes are let
go of on this side because of them.
"""

import hashlib
import socket
import struct
import time
from typing import Any, Final

import msgspec

from steward.core.errors import StewardError, Unavailable

VERSION: Final = 1
NONCE_BYTES: Final = 32
FIRST_FRAME: Final = 1 << 16
"""Largest frame of one who is not known yet, in bytes."""
LARGEST_FRAME: Final = 64 << 20
"""Largest frame, in bytes: a batch may be one script of nearly this size."""
MOST_ROWS: Final = 1000
FROM_CONTROLLER: Final = "to-receiver"
FROM_RECEIVER: Final = "to-controller"

_HEADER = struct.Struct("<I")
_PIECE: Final = 1 << 18


class WireError(StewardError):
    """The other end said something that makes no sense here."""


class WireUnavailable(Unavailable):
    """The other end is away, or too slow."""


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """The receiver's first word."""

    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The controller's: whom it reports for."""

    version: int
    cluster: str
    nonce: bytes


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One event, with the bytes that it speaks of.

    Attributes:
        kind: The event's kind.
        cluster: Its cluster.
        key: Its key.
        data: The rest of it, as the journal holds it.
        script: For a job.script, the script.
        environment: For a job.script, the environment; None where none is kept.
    """

    kind: str
    cluster: str
    key: str
    data: bytes
    script: bytes | None = None
    environment: bytes | None = None


class Batch(msgspec.Struct, frozen=True, tag="batch"):
    """Some events; ``number`` is one more than that of the batch before."""

    number: int
    rows: list[Row]


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """What became of a batch, or of the hello (number 0).

    Attributes:
        number: The batch's.
        verdict: ``durable`` (all but what was refused), ``later`` (nothing could be
            written), or ``refused`` (this controller may not report, or not so).
        detail: Why, where it is not ``durable``.
        refused: Index and reason of each event that will never be taken.
    """

    number: int
    verdict: str
    detail: str = ""
    refused: list[tuple[int, str]] = []


Message = Greeting | Hello | Batch | Answer

_pack = msgspec.msgpack.Encoder().encode
_frame_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes])
_message_decoder: "msgspec.msgpack.Decoder[Message]" = msgspec.msgpack.Decoder(Message)


class Frame(msgspec.Struct, frozen=True):
    """A message as it came: its bytes, which the credential is for, and the credential."""

    body: bytes
    credential: bytes

    def message(self) -> Message:
        """What it says.

        Raises:
            WireError: It is none of ours.
        """
        try:
            return _message_decoder.decode(self.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"a message cannot be read: {error}") from error


def statement(direction: str, nonces: bytes, number: int, body: bytes) -> bytes:
    """What the credential of a message says.

    Args:
        direction: ``FROM_CONTROLLER`` or ``FROM_RECEIVER``.
        nonces: The receiver's nonce and then, once it is known, the controller's.
        number: Of the batch; 0 for the hello.
        body: The message's bytes.
    """
    digest = hashlib.sha256(body).hexdigest()
    return f"steward {VERSION} {direction} {nonces.hex()} {number} {digest}".encode()


def encoded(message: Message) -> bytes:
    """A message's bytes."""
    return _pack(message)


def frame_of(body: bytes, credential: bytes = b"") -> bytes:
    """A message's bytes as they go over the wire.

    Raises:
        WireError: They are too many.
    """
    data = _pack((body, credential))
    if len(data) > LARGEST_FRAME:
        raise WireError(f"{len(data)} bytes are more than fit into one frame ({LARGEST_FRAME})")
    return _HEADER.pack(len(data)) + data


class Stream:
    """Frames over one connection; every wait ends.

    Args:
        connection: A connected stream socket.
        peer: What the other end is called in errors.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._connection = connection
        self._peer = peer

    def send(self, frame: bytes, timeout_s: float) -> None:
        """Send a frame.

        Raises:
            WireUnavailable: The other end is away, or does not take it in time.
        """
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(frame)
        except OSError as error:
            raise self._away(error) from error

    def receive(self, most: int, timeout_s: float) -> Frame | None:
        """The next frame; None if the other end has closed the connection between two.

        Args:
            most: Its largest length, in bytes.
            timeout_s: How long it may take altogether.

        Raises:
            WireError: It is too large, or no frame.
            WireUnavailable: The other end is away, or too slow.
        """
        until = time.monotonic() + timeout_s
        header = self._exactly(_HEADER.size, until)
        if not header:
            return None
        self._check_whole(header, _HEADER.size)
        length = _HEADER.unpack(header)[0]
        if length > most:
            raise WireError(f"{self._peer} announces a frame of {length} bytes")
        body = self._exactly(length, until)
        self._check_whole(body, length)
        try:
            return Frame(*_frame_decoder.decode(body))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"{self._peer} sends no frames: {error}") from error

    def _exactly(self, length: int, until: float) -> bytearray:
        """So many bytes, or fewer where the connection ends; memory is taken as they come."""
        data = bytearray()
        try:
            while len(data) < length:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("no answer in time")
                self._connection.settimeout(left_s)
                piece = self._connection.recv(min(_PIECE, length - len(data)))
                if not piece:
                    break
                data += piece
        except OSError as error:
            raise self._away(error) from error
        return data

    def _check_whole(self, data: bytearray, length: int) -> None:
        if len(data) < length:
            raise WireUnavailable(f"{self._peer} went away in the middle of a frame", self._peer)

    def _away(self, error: OSError) -> WireUnavailable:
        return WireUnavailable(f"{self._peer}: {error.strerror or error}", self._peer)


def as_kind(frame: Frame | None, kind: Any, peer: str) -> Any:
    """The message of a frame, which must be of this kind.

    Raises:
        WireError: It is another.
        WireUnavailable: There is none.
    """
    if frame is None:
        raise WireUnavailable(f"{peer} closed the connection", peer)
    message = frame.message()
    if not isinstance(message, kind):
        raise WireError(f"{peer} says {type(message).__name__}, not {kind.__name__}")
    return message
