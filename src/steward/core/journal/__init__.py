"""The journal: every event, durable before anything acts on it.

``store`` is the SQLite file and its one writer, ``reading`` its many readers;
``server`` is the process that owns the writer; ``link`` is how every other
process reaches it.
"""

from steward.core.journal.client import JournalLink
from steward.core.journal.reader import (
    Backlog,
    ConsumerStatus,
    DeadLetter,
    JournalReader,
    refill_command,
)
from steward.core.journal.store import Journal, JournalError, JournalUnavailable

__all__ = [
    "Backlog",
    "ConsumerStatus",
    "DeadLetter",
    "Journal",
    "JournalError",
    "JournalLink",
    "JournalReader",
    "JournalUnavailable",
    "refill_command",
]
