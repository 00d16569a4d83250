"""Many batches at once into the journal: what waits is appended together, as one commit.

Each batch is answered only when it is durable. Thousands of nodes report within
a minute, and a commit for each would have the disk flush as often.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final

from steward.core.errors import StewardError, Unavailable
from steward.core.journal.link import FRAME_BYTES
from steward.core.journal.store import Row

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 40.0
"""Longer than the journal's link waits for an answer."""
_LAST_WORDS_S: Final = 2.0
_MOST_WAITING: Final = 4096


class AppendUnavailable(Unavailable):
    """The journal does not take anything now."""


class _Waiting:
    """One batch that somebody waits for."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.size = sum(len(row[3]) for row in rows)
        self.done = threading.Event()
        self.error: StewardError | None = None


class Appender:
    """Appends for many threads by one.

    Args:
        append: Appends rows durably, once; raises StewardError where it cannot.
    """

    def __init__(self, append: Callable[[Sequence[Row]], object]) -> None:
        self._append = append
        self._queue: queue.Queue[_Waiting | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def append(self, rows: Sequence[Row]) -> None:
        """Append rows; returns when they are durable.

        Raises:
            AppendUnavailable: They are not, as far as is known.
        """
        if not rows:
            return
        waiting = _Waiting(rows)
        try:
            self._queue.put_nowait(waiting)
        except queue.Full:
            raise AppendUnavailable("too many batches wait for the journal") from None
        if not waiting.done.wait(_PATIENCE_S):
            raise AppendUnavailable("the journal takes too long")
        if waiting.error is not None:
            raise AppendUnavailable(str(waiting.error)) from waiting.error

    def close(self) -> None:
        """Append what waits, and end."""
        self._queue.put(None)
        self._thread.join(_LAST_WORDS_S)

    def _run(self) -> None:
        while True:
            first = self._queue.get()
            if first is None:
                return
            batch, size = [first], first.size
            while size < FRAME_BYTES:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    self._queue.put(None)
                    break
                batch.append(more)
                size += more.size
            self._try(batch)

    def _try(self, batch: Sequence[_Waiting]) -> None:
        error: StewardError | None = None
        try:
            self._append([row for one in batch for row in one.rows])
        except StewardError as caught:
            error = caught
        except Exception as caught:
            # A fault of ours must not end the thread: the batch comes again meanwhile.
            log.exception("what nodes sent could not be appended")
            error = AppendUnavailable(f"unexpected: {type(caught).__name__}: {caught}")
        for one in batch:
            one.error = error
            one.done.set()
