"""Takes what was committed from the log of gate.db to its tables, and waits for the disk.

The thread that decides must never do that: a disk that others use may take a
second for an fsync. SQLite lets whoever commits first after a complete
checkpoint begin the log anew, with an fsync of its header. So this thread
commits then, with something of its own, and does all of it when no plugin has
asked for a moment. The longer the log, the shorter a moment will do.
"""

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from steward.bank.gate.precedence import go_first
from steward.core.sqlite import Connection, SqliteError, SqliteUnavailable, transaction, translated

if TYPE_CHECKING:
    from steward.bank.gate.store import Store

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.25
_AT_MOST_EVERY_S: Final = 2.0
_QUIET_S: Final = 1.0
_CATCH_UP: Final = 5
"""So often it is tried to have written back all that is there, while more comes."""
_BEGUN_ANEW: Final = "log"


class Checkpoints(threading.Thread):
    """Goes on beside the thread that decides.

    Args:
        store: Whose log it is; it is looked after by a connection of this thread's own.
        most_frames: Length of the log, in frames of 4 KiB, at which a checkpoint no longer waits
            for a quiet moment.
    """

    def __init__(self, store: "Store", *, most_frames: int = 16_384) -> None:
        super().__init__(name="checkpoints", daemon=True)
        self._store = store
        self._most_frames = most_frames
        self._end = threading.Event()
        self._own = 0
        self._after = 0.0

    def run(self) -> None:
        """Look now and then until :meth:`stop`."""
        # The one that decides waits where this one is stopped with the interpreter in hand.
        go_first()
        try:
            db = self._store.connect()
        except (SqliteUnavailable, SqliteError) as error:
            log.error("the log of gate.db grows until the gate is started again: %s", error)
            return
        while not self._end.wait(_LOOK_S):
            try:
                with translated(self._store.path):
                    self.look(db, time.monotonic())
            except (SqliteUnavailable, SqliteError) as error:
                # The log only grows meanwhile; the one that writes says so where it matters.
                log.debug("no checkpoint: %s", error)
        db.close()

    def look(self, db: Connection, now: float) -> None:
        """Write back and begin the log anew, if there is something and nobody asks."""
        frames, _ = _log_of(db)
        if frames <= self._own or now < self._after:
            return
        if now - self._store.asked_at < _QUIET_S * (1 - frames / self._most_frames):
            return
        self._after = now + _AT_MOST_EVERY_S
        for _ in range(_CATCH_UP):
            db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if self._begin_anew(db):
                return
        if frames > self._most_frames:
            with self._store.writing:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                self._commit(db)

    def _begin_anew(self, db: Connection) -> bool:
        """Commit as the first after a checkpoint; False if somebody has committed since."""
        with self._store.writing:
            frames, done = _log_of(db)
            if frames != done:
                return False
            self._commit(db)
            return True

    def _commit(self, db: Connection) -> None:
        with transaction(db, self._store.path):
            at = b"%d" % time.time_ns()
            db.execute("INSERT OR REPLACE INTO note VALUES (?, ?)", (_BEGUN_ANEW, at))
        self._own, _ = _log_of(db)

    def stop(self) -> None:
        """End, and wait for it."""
        self._end.set()
        self.join(5.0)


def _log_of(db: Connection) -> tuple[int, int]:
    """How many frames the log has, and how many of them were written back."""
    _, frames, done = db.execute("PRAGMA wal_checkpoint(NOOP)").fetchone()
    return int(frames), int(done)
