"""Journal client: connection of a process to the journal's writer over a Unix socket.

:class:`JournalLink` appends events, reports a consumer's position and waits for new events.
The frame format is here too, for client and server: a 4-byte little-endian length and a
MessagePack array, whose first item is the verb. Requests with a number get ``ok`` or ``refused``
with that number: append, aside. Messages without an answer: passed, revived. Commands for the
writer go to its control socket (``control``). The server answers a ``wake`` once, with ``head``,
when the journal has the events that it asks for, and sends ``look`` when dead letters are to be
retried.

An append waits for the answer, which comes when the events are durable; if the writer restarts
meanwhile, the client sends the events again, which their keys make harmless. Many events go in
several frames, each after the previous answer.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from steward.core.events import Event
from steward.core.journal.store import EncodedEvent, JournalError, JournalUnavailable, encode_rows
from steward.core.waits import Backoff, Stop

JOURNAL_SOCKET = "journal.sock"
"""Name of the journal server's socket in the state directory."""
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Largest frame, in bytes."""
FRAME_BYTES = 4 * 1024 * 1024
"""Approximate size of one append, in bytes: the writer holds all clients' appends in memory."""
_ROW_BYTES = 32
"""Most bytes that MessagePack adds to a row; a frame's head needs no more."""
_HEADER = struct.Struct("<I")
_ANSWER_TIMEOUT_S = 30.0
"""Longest wait for an answer of the writer, in seconds."""

_pack = msgspec.msgpack.Encoder().encode
_unpack: "msgspec.msgpack.Decoder[list[Any]]" = msgspec.msgpack.Decoder(list[Any])


def encode_frame(message: Sequence[Any]) -> bytes:
    """Encode one message as a frame."""
    body = _pack(message)
    return _HEADER.pack(len(body)) + body


def split_into_frames(rows: Sequence[EncodedEvent]) -> Iterator[Sequence[EncodedEvent]]:
    """Split rows into frames of about :data:`FRAME_BYTES`.

    Raises:
        JournalError: One row is larger than a frame can hold.
    """
    start = size = 0
    for number, (kind, cluster, key, data) in enumerate(rows):
        row_bytes = (
            len(data) + sum(len(text.encode()) for text in (kind, cluster, key)) + _ROW_BYTES
        )
        if row_bytes + _ROW_BYTES > MAX_FRAME_BYTES:
            raise JournalError(
                f"event {key[:100]!r} has {row_bytes} bytes, more than the journal accepts", key
            )
        if size and size + row_bytes > FRAME_BYTES:
            yield rows[start:number]
            start, size = number, 0
        size += row_bytes
    if size:
        yield rows[start:]


class FrameDecoder:
    """Decoder that cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[Any]]:
        """Add received bytes; return the messages that they complete.

        Raises:
            JournalError: A frame is too large or is not a MessagePack array.
        """
        buffer = self._buffer
        buffer += data
        messages = []
        while len(buffer) >= _HEADER.size:
            length = _HEADER.unpack_from(buffer)[0]
            if length > MAX_FRAME_BYTES:
                raise JournalError(f"a frame of {length} bytes on {JOURNAL_SOCKET} is too large")
            end = _HEADER.size + length
            if len(buffer) < end:
                break
            try:
                messages.append(_unpack.decode(memoryview(buffer)[_HEADER.size : end]))
            except msgspec.MsgspecError as error:
                raise JournalError(f"cannot decode a frame on {JOURNAL_SOCKET}: {error}") from error
            del buffer[:end]
        return messages


class JournalLink:
    """Connection of one process or thread to the journal's writer.

    Args:
        state_dir: Directory of the journal.
        stop: Ends every wait.
    """

    def __init__(self, state_dir: str, stop: Stop) -> None:
        self._path = os.path.join(state_dir, JOURNAL_SOCKET)
        self._stop = stop
        self._socket: socket.socket | None = None
        self._frames = FrameDecoder()
        self._last_number = 0
        self._head = 0
        self._is_answered = False
        self._pending_wake: tuple[int, int] | None = None
        self._is_woken = False
        self._positions: dict[str, tuple[Any, ...]] = {}

    def append(self, events: Iterable[Event]) -> None:
        """Append events; return when they are durable. Retries until the Stop is set.

        Raises:
            JournalError: An event is larger than the journal takes; none was appended.
            JournalUnavailable: The Stop was set before the events were durable.
        """
        self.append_rows(encode_rows(events))

    def append_rows(self, rows: Sequence[EncodedEvent]) -> None:
        """Append events that are encoded already, as :meth:`append` does."""
        for frame in list(split_into_frames(rows)):
            self._append_with_retry(frame)

    def _append_with_retry(self, rows: Sequence[EncodedEvent]) -> None:
        """Append one frame of rows, retrying with back-off until the Stop is set."""
        backoff = Backoff()
        while True:
            try:
                self.append_once(rows)
            except JournalUnavailable:
                if self._stop.is_set():
                    raise
                self._stop.wait(backoff.next_s())
                if self._stop.is_set():
                    raise
            else:
                return

    def send_message(self, *message: Any) -> None:
        """Send a message that has no answer; lost if the writer is away, so it must be repeatable.

        The messages are those of ``JournalServer``: passed (a consumer's position), aside (a
        dead letter), revived. A new connection repeats each consumer's last "passed". Only
        "aside" is waited for: the cursor moves past the event, so nothing would repeat it.

        Raises:
            JournalUnavailable: An "aside" could not be written now.
        """
        if message[0] == "aside":
            try:
                self._send_request(message[0], message[1:])
            except JournalError as error:
                raise JournalUnavailable(str(error), self._path) from error
            return
        if message[0] == "passed":
            self._positions[message[1]] = message
        try:
            self._send(encode_frame(message))
        except (OSError, JournalUnavailable):
            # The consumer's own cursor is authoritative; the next connection reports it.
            self.close()

    def append_once(self, rows: Sequence[EncodedEvent]) -> None:
        """Append one frame of encoded events; return when they are durable; no retry.

        Raises:
            JournalError: The writer rejected them.
            JournalUnavailable: The writer is away.
        """
        self._send_request("append", rows)

    def wait(
        self, position: int, timeout_s: float, *, events: int = 1, delay_s: float = 0.0
    ) -> int:
        """Wait until the journal's head is beyond ``position``, time is over or the Stop is set.

        Also returns when dead letters of any consumer are to be retried.

        Args:
            position: Position of the last event that the caller has read.
            timeout_s: Longest wait, in seconds.
            events: Number of new events that end the wait at once.
            delay_s: Time from now after which a single new event ends the wait, in seconds.

        Returns:
            Last known head of the journal.
        """
        deadline = time.monotonic() + timeout_s
        try:
            wake = None if delay_s else (position, events)
            # The writer keeps a wake until it answers: an idle consumer need not repeat it.
            if wake is None or wake != self._pending_wake:
                self._send(encode_frame(["wake", position, events, delay_s]))
                self._is_answered = False
                self._pending_wake = wake
            while not (self._is_answered or self._is_woken or self._stop.is_set()):
                if self._receive(deadline - time.monotonic(), number=0) is None:
                    break
                # An answer to an earlier wait may come late.
                self._is_answered &= self._head > position
        except (OSError, JournalUnavailable):
            # The writer is restarting; the caller finds new events by reading.
            self.close()
            self._stop.wait(min(timeout_s, 0.2))
            return position + 1
        self._is_woken = False
        return self._head

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._pending_wake = None
        self._frames = FrameDecoder()

    def _connect(self) -> socket.socket:
        """Connect if needed; subscribe and repeat the consumers' positions."""
        if self._socket is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(_ANSWER_TIMEOUT_S)
            try:
                # Long state directories exceed sun_path; the link in /proc does not.
                fd = os.open(os.path.dirname(self._path), os.O_PATH | os.O_DIRECTORY)
                try:
                    connection.connect(f"/proc/self/fd/{fd}/{JOURNAL_SOCKET}")
                finally:
                    os.close(fd)
                # The writer collects positions before it writes them: a restart loses some, and a
                # consumer at the end of the journal has no new one to report.
                for message in self._positions.values():
                    connection.sendall(encode_frame(message))
            except OSError as error:
                connection.close()
                raise JournalUnavailable(
                    f"cannot reach the journal at {self._path}: {error.strerror}. Is 'steward "
                    "serve' running?",
                    self._path,
                ) from error
            self._socket = connection
        return self._socket

    def _send(self, data: bytes) -> None:
        self._connect().sendall(data)

    def _send_request(self, verb: str, argument: Sequence[Any]) -> None:
        """Send a numbered request and wait for its answer."""
        self._last_number += 1
        number = self._last_number
        try:
            self._send(encode_frame([verb, number, argument]))
            while True:
                reply = self._receive(_ANSWER_TIMEOUT_S, number=number)
                if reply is None:
                    raise TimeoutError(f"no answer within {_ANSWER_TIMEOUT_S:.0f} s")
                if reply:
                    break
        except OSError as error:
            self.close()
            raise JournalUnavailable(
                f"lost the connection to the journal at {self._path}: {error}", self._path
            ) from error
        if reply[0] == "refused":
            raise JournalError(str(reply[2]), verb)

    def _receive(self, timeout_s: float, *, number: int) -> list[Any] | None:
        """Read messages: return the answer of that number, [] for other news, None for none."""
        connection = self._connect()
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        if not number:
            poller.register(self._stop.fd, select.POLLIN)
        ready = poller.poll(max(0.0, timeout_s) * 1000)
        if not any(fd == connection.fileno() for fd, _ in ready):
            return None
        data = connection.recv(1 << 18)
        if not data:
            raise ConnectionResetError("connection closed")
        reply: list[Any] = []
        for message in self._frames.feed(data):
            if message[0] == "head":
                self._head, self._is_answered = message[1], True
                self._pending_wake = None
            elif message[0] == "look":
                self._is_woken = True
            elif message[1] == number:
                reply = message
        return reply
