"""Wire protocol between a controller (``forwarder``) and ``steward serve`` (``receiver``).

A frame is a 4-byte little-endian length and a MessagePack array of two: the message's bytes and the
credential that authenticates them ("" where TLS authenticates the peer). Each side treats the
other's input as hostile: every length is bounded, and before authentication only a few kilobytes
are read.

    receiver                           controller
      ReceiverGreeting(nonce)  ------>
                               <------  ControllerHello(cluster, nonce)
      ReceiverReply(0)         ------>
                               <------  EventBatch(1)
      ReceiverReply(1)         ------>                        and so on

The credential of each message but the greeting covers its SHA-256, its number, its direction and
both nonces, so it cannot be replayed, used in another connection or reflected. Answers carry one
too, because the controller deletes bytes on their word.

Message types first, then encoding (:func:`credential_payload`, :func:`build_frame`), then
:class:`FrameStream`, which sends and receives frames with time limits.
"""

import hashlib
import socket
import struct
import time
from typing import Any, Final

import msgspec

from steward.core.errors import StewardError, Unavailable

VERSION: Final = 1
"""Version of the protocol; both sides must have the same."""
NONCE_BYTES: Final = 32
MAX_FIRST_FRAME_BYTES: Final = 1 << 16
"""Largest frame of a peer that is not authenticated yet, in bytes."""
MAX_WIRE_FRAME_BYTES: Final = 64 << 20
"""Largest frame, in bytes; a batch may be one script of nearly this size."""
MAX_BATCH_ROWS: Final = 1000
"""Most events of one batch."""
FROM_CONTROLLER: Final = "to-receiver"
FROM_RECEIVER: Final = "to-controller"

_HEADER = struct.Struct("<I")
_PIECE: Final = 1 << 18
"""Most bytes of one read from the socket."""


class WireError(StewardError):
    """Protocol error: the peer sent a malformed or unexpected message."""


class WireUnavailable(Unavailable):
    """Connection error: the peer is unreachable or too slow."""


class ReceiverGreeting(msgspec.Struct, frozen=True, tag="greeting"):
    """First message of a connection, from the receiver."""

    version: int
    nonce: bytes


class ControllerHello(msgspec.Struct, frozen=True, tag="hello"):
    """Controller's reply to the greeting: the cluster it reports for."""

    version: int
    cluster: str
    nonce: bytes


class ForwardedEvent(msgspec.Struct, frozen=True, array_like=True):
    """One event on the wire, with its script and environment bytes.

    Attributes:
        kind: The event's kind.
        cluster: The event's cluster.
        key: The event's idempotency key.
        data: The event's remaining fields, encoded as in the journal.
        script: The script of a job.script event.
        environment: The environment of a job.script event; None where none is archived.
    """

    kind: str
    cluster: str
    key: str
    data: bytes
    script: bytes | None = None
    environment: bytes | None = None


class EventBatch(msgspec.Struct, frozen=True, tag="batch"):
    """Batch of events; ``number`` is one more than that of the batch before."""

    number: int
    rows: list[ForwardedEvent]


class ReceiverReply(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """Receiver's answer to a batch, or to the hello (number 0).

    Attributes:
        number: Number of the batch.
        verdict: ``durable`` (all but the events in ``refused``), ``later`` (nothing could be
            written), or ``refused`` (this controller may not report, or not this way).
        detail: Reason, where the verdict is not ``durable``.
        refused: Index and reason of each event that the receiver will never accept.
    """

    number: int
    verdict: str
    detail: str = ""
    refused: list[tuple[int, str]] = []


WireMessage = ReceiverGreeting | ControllerHello | EventBatch | ReceiverReply

_encode_msgpack = msgspec.msgpack.Encoder().encode
_frame_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes])
_message_decoder: "msgspec.msgpack.Decoder[WireMessage]" = msgspec.msgpack.Decoder(WireMessage)


class Frame(msgspec.Struct, frozen=True):
    """Received frame: the message's bytes, and the credential that covers them."""

    body: bytes
    credential: bytes

    def decode_message(self) -> WireMessage:
        """Decode and return the message.

        Raises:
            WireError: It is no message of this protocol.
        """
        try:
            return _message_decoder.decode(self.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"a message cannot be read: {error}") from error


def credential_payload(direction: str, nonces: bytes, number: int, body: bytes) -> bytes:
    """Return the text that a message's MUNGE credential contains.

    Args:
        direction: ``FROM_CONTROLLER`` or ``FROM_RECEIVER``.
        nonces: The receiver's nonce, followed by the controller's once it is known.
        number: Number of the batch; 0 for the hello.
        body: The message's bytes.
    """
    digest = hashlib.sha256(body).hexdigest()
    return f"steward {VERSION} {direction} {nonces.hex()} {number} {digest}".encode()


def encode_message(message: WireMessage) -> bytes:
    """Encode a message as MessagePack."""
    return _encode_msgpack(message)


def build_frame(body: bytes, credential: bytes = b"") -> bytes:
    """Build a frame: length, message bytes and credential.

    Raises:
        WireError: The frame is too large.
    """
    data = _encode_msgpack((body, credential))
    if len(data) > MAX_WIRE_FRAME_BYTES:
        raise WireError(
            f"{len(data)} bytes are more than fit into one frame ({MAX_WIRE_FRAME_BYTES})"
        )
    return _HEADER.pack(len(data)) + data


class FrameStream:
    """Frames over one connection; every wait has a time limit.

    Args:
        connection: A connected stream socket.
        peer: Name of the other end in error messages.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._connection = connection
        self._peer = peer

    def send(self, frame: bytes, timeout_s: float) -> None:
        """Send a frame.

        Raises:
            WireUnavailable: The peer is away, or does not accept the frame in time.
        """
        try:
            self._connection.settimeout(timeout_s)
            self._connection.sendall(frame)
        except OSError as error:
            raise self._build_error(error) from error

    def receive(self, max_bytes: int, timeout_s: float) -> Frame | None:
        """Receive the next frame; return None if the peer closed the connection between frames.

        Args:
            max_bytes: Largest accepted length, in bytes.
            timeout_s: Time limit for the whole frame, in seconds.

        Raises:
            WireError: The frame is too large or malformed.
            WireUnavailable: The peer is away or too slow.
        """
        deadline = time.monotonic() + timeout_s
        header = self._read_bytes(_HEADER.size, deadline)
        if not header:
            return None
        self._check_complete(header, _HEADER.size)
        length = _HEADER.unpack(header)[0]
        if length > max_bytes:
            raise WireError(f"{self._peer} announces a frame of {length} bytes")
        body = self._read_bytes(length, deadline)
        self._check_complete(body, length)
        try:
            return Frame(*_frame_decoder.decode(body))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"{self._peer} sends no frames: {error}") from error

    def _read_bytes(self, length: int, deadline: float) -> bytearray:
        """Read ``length`` bytes, fewer at the end of the stream; memory grows as bytes arrive."""
        data = bytearray()
        try:
            while len(data) < length:
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError("no answer in time")
                self._connection.settimeout(remaining_s)
                chunk = self._connection.recv(min(_PIECE, length - len(data)))
                if not chunk:
                    break
                data += chunk
        except OSError as error:
            raise self._build_error(error) from error
        return data

    def _check_complete(self, data: bytearray, length: int) -> None:
        if len(data) < length:
            raise WireUnavailable(f"{self._peer} went away in the middle of a frame", self._peer)

    def _build_error(self, error: OSError) -> WireUnavailable:
        return WireUnavailable(f"{self._peer}: {error.strerror or error}", self._peer)


def expect_message(frame: Frame | None, message_type: Any, peer: str) -> Any:
    """Return the message of a frame, which must be of type ``message_type``.

    Raises:
        WireError: It is of another type.
        WireUnavailable: There is no frame.
    """
    if frame is None:
        raise WireUnavailable(f"{peer} closed the connection", peer)
    message = frame.decode_message()
    if not isinstance(message, message_type):
        raise WireError(f"{peer} says {type(message).__name__}, not {message_type.__name__}")
    return message
