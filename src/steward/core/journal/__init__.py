"""The journal: a durable log of every event, written before anything acts on the event.

``store`` is the SQLite file with its one writer, ``reader`` serves the many readers;
``server`` is the process that owns the writer; ``client`` connects other processes to it.
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
