"""Protocol between a controller (``forwarder``) and ``steward serve`` (``receiver``), over HTTP.

    POST /hello    random bytes          answer: the id of a new stream
    POST /events   the rows of batch 1   answer: ``durable``, and the rows that are refused
    POST /events   the rows of batch 2   and so on

:class:`RequestHead` is in the headers of a POST, so that the receiver checks it before it reads
the body. Its statement covers path, origin, cluster, stream, number and the SHA-256 of the body: a
MUNGE credential over it cannot be used for another batch, in another stream or at another address.
The statement of an answer covers the request's SHA-256, stream and number, the verdict and the
answer's body: the controller deletes bytes on its word. Where TLS authenticates both sides, neither
has a credential.

A number is due once. A controller that got no answer repeats the number and the body with a new
credential. Each side treats the other's input as hostile: every length is bounded.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec

from steward.core.errors import PermissionRefused, StewardError, Unavailable

VERSION: Final = 2
"""Version of the protocol; both sides must have the same."""
HELLO: Final = "/hello"
EVENTS: Final = "/events"
NONCE_BYTES: Final = 32
"""Length of a hello's body, in bytes."""
MAX_BODY_BYTES: Final = 64 << 20
"""Largest body, in bytes; a batch may be one script of nearly this size."""
MAX_BATCH_ROWS: Final = 1000
"""Most events of one batch."""
REPLY_CREDENTIAL: Final = "authentication-info"
"""Header of an answer's credential; that of a request is in ``authorization``."""
DURABLE: Final = "durable"
LATER: Final = "later"
REFUSED: Final = "refused"
RESTART: Final = "restart"

_HEX_32: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NUMBER: Final = re.compile(r"[0-9]{1,19}", re.ASCII)


class WireError(StewardError):
    """Protocol error: the peer sent a malformed or unexpected message."""


class WireUnavailable(Unavailable):
    """Connection error: the connection ended before the answer."""


class RequestHead(msgspec.Struct, frozen=True, kw_only=True):
    """Head of a POST.

    Attributes:
        path: ``HELLO`` or ``EVENTS``.
        origin: Address that the controller connects to, as in the header Host.
        cluster: Cluster that the controller reports for.
        stream: Id that the receiver gave the stream; empty in a hello.
        number: Number of the batch in its stream, from 1; 0 in a hello.
        digest: SHA-256 of the body, in hexadecimal.
    """

    path: str
    origin: str
    cluster: str
    stream: str = ""
    number: int = 0
    digest: str

    def check_body(self, body: bytearray) -> None:
        """Check that a body is the one that this head describes.

        Raises:
            WireError: It is another.
        """
        if hash_body(body) != self.digest:
            raise WireError("the body does not match its headers (SHA-256)")

    def build_headers(self) -> dict[str, str]:
        """Return the headers that carry this head."""
        return {
            "host": self.origin,
            "steward-version": str(VERSION),
            "steward-cluster": self.cluster,
            "steward-stream": self.stream,
            "steward-number": str(self.number),
            "steward-digest": self.digest,
        }

    def build_statement(self) -> bytes:
        """Return the text that the request's credential covers."""
        fields = (self.path, self.origin, self.cluster, self.stream, str(self.number), self.digest)
        return "\n".join((f"steward events {VERSION} request", *fields)).encode()

    def build_reply_statement(self, verdict: str, body: bytes) -> bytes:
        """Return the text that the credential of the answer covers."""
        fields = (self.digest, self.stream, str(self.number), verdict, hash_body(body))
        return "\n".join((f"steward events {VERSION} reply", *fields)).encode()


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


class ReceiverReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the receiver.

    Attributes:
        verdict: ``durable`` (all but the events in ``refused``), ``later`` (nothing could be
            written), ``refused`` (this controller may not report, or not this way), or ``restart``
            (the stream is unknown, or another number is due: say hello).
        detail: Reason, where the verdict is not ``durable``.
        stream: Id of the new stream, in the answer to a hello.
        refused: Index and reason of each event that the receiver will never accept.
    """

    verdict: str
    detail: str = ""
    stream: Annotated[str, msgspec.Meta(pattern=r"^(?:[0-9a-f]{64})?\Z")] = ""
    refused: list[tuple[int, str]] = []


encode_message = msgspec.msgpack.Encoder().encode
_rows_decoder = msgspec.msgpack.Decoder(list[ForwardedEvent])
_reply_decoder = msgspec.msgpack.Decoder(ReceiverReply)


def hash_body(body: bytes | bytearray) -> str:
    """Return the SHA-256 of a body, in hexadecimal."""
    return hashlib.sha256(body).hexdigest()


def parse_head(path: str, headers: Iterable[tuple[bytes, bytes]]) -> tuple[RequestHead, str]:
    """Parse the headers of a POST, with lower-case names.

    Returns:
        The head, and the value of ``authorization``.

    Raises:
        PermissionRefused: The controller has another version.
        WireError: They are not those of this protocol, or the body is too large.
    """
    values = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
    version = values.get("steward-version", "none")
    if version != str(VERSION):
        raise PermissionRefused(f"protocol version {version} is not supported: use {VERSION}")
    stream, number = values.get("steward-stream", ""), values.get("steward-number", "")
    digest, length = values.get("steward-digest", ""), values.get("content-length", "")
    is_hello = path == HELLO
    if not (
        _HEX_32.fullmatch(digest)
        and _NUMBER.fullmatch(number)
        and _NUMBER.fullmatch(length)
        and ((stream, number) == ("", "0") if is_hello else _HEX_32.fullmatch(stream))
    ):
        raise WireError("malformed headers")
    if int(length) > (NONCE_BYTES if is_hello else MAX_BODY_BYTES):
        raise WireError(f"invalid body length of {length} bytes")
    head = RequestHead(
        path=path,
        origin=values.get("host", ""),
        cluster=values.get("steward-cluster", ""),
        stream=stream,
        number=int(number),
        digest=digest,
    )
    return head, values.get("authorization", "")


def decode_rows(body: bytes | bytearray) -> list[ForwardedEvent]:
    """Decode the events of a batch.

    Raises:
        WireError: It is no batch, or has too many events.
    """
    rows: list[ForwardedEvent] = _decode(_rows_decoder, body)
    if len(rows) > MAX_BATCH_ROWS:
        raise WireError(
            f"a batch of {len(rows)} events is too large: the maximum is {MAX_BATCH_ROWS}"
        )
    return rows


def decode_reply(body: bytes) -> ReceiverReply:
    """Decode an answer.

    Raises:
        WireError: It is none.
    """
    reply: ReceiverReply = _decode(_reply_decoder, body)
    return reply


def _decode(decoder: "msgspec.msgpack.Decoder[Any]", body: bytes | bytearray) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"cannot decode a message: {error}") from error
