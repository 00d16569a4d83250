"""Journal control: commands for the journal's writer, over the local RPC.

Root and Steward's user send them with :func:`send_command` to the control socket in the state
directory. ``JournalServer`` first handles what its connected clients have sent, then the command.
"""

import os
from typing import Annotated

import msgspec

from steward.core.journal.store import JournalUnavailable
from steward.core.rpc import RpcUnavailable, send_request

CONTROL_SOCKET = "journal-control.sock"
"""Name of the control socket in the state directory."""
CONTROL_ACTION = "journal.control"
"""Name of every request on it."""
LONGEST_HOLD_S = 3600.0
"""Longest time that a backup may stop trimming, in seconds."""
LARGEST_INTEGER = 2**63 - 1
"""Largest integer that SQLite stores."""
_ANSWER_TIMEOUT_S = 30.0
"""Longest wait for an answer of the writer, in seconds."""


class RetryDeadLetters(msgspec.Struct, frozen=True, tag="retry"):
    """Retry a consumer's dead letters, or one of them; the answer is their number."""

    consumer: str
    event_id: Annotated[int, msgspec.Meta(ge=1, le=LARGEST_INTEGER)] | None = None


class ForgetConsumer(msgspec.Struct, frozen=True, tag="forget"):
    """Delete a consumer, which must not be running."""

    consumer: str


class ClearMissed(msgspec.Struct, frozen=True, tag="clear_missed"):
    """Clear a consumer's missed count: it receives the jobs submitted since ``since_s`` again."""

    consumer: str
    since_s: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)]


class HoldTrimming(msgspec.Struct, frozen=True, tag="hold"):
    """Trim nothing for some seconds: a backup copies the bytes that events refer to."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_HOLD_S)]


class WritePositions(msgspec.Struct, frozen=True, tag="write_positions"):
    """Write the consumers' collected positions now; the answer is the journal's head."""


JournalCommand = RetryDeadLetters | ForgetConsumer | ClearMissed | HoldTrimming | WritePositions


def send_command(state_dir: str, command: JournalCommand) -> int:
    """Send the journal's writer a command and return its answer; no retry.

    Raises:
        JournalUnavailable: The writer is away.
        StewardError: The writer rejected the command.
    """
    path = os.path.join(state_dir, CONTROL_SOCKET)
    try:
        return send_request(path, CONTROL_ACTION, command, int, timeout_s=_ANSWER_TIMEOUT_S)
    except RpcUnavailable as error:
        raise JournalUnavailable(str(error), path) from error
