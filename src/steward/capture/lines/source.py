"""The source that turns the lines of a slurmctld's jobcomp.lua into events.

The place in the file is kept when the journal has the events: a crash in
between says some of them again, under the same keys.
"""

import logging
import os
import stat
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from steward.capture.lines.following import Batch, Following, Place
from steward.capture.lines.jobcomp import SOURCE, LineError, Told, end_event, told, told_behind
from steward.core.consumers import Append
from steward.core.errors import Unavailable
from steward.core.events import NODE_GAP, Event, utc_now
from steward.core.records import JobRecord
from steward.core.sqlite import open_database, transaction, translated
from steward.core.usage import NodeGap
from steward.core.waiting import Stop
from steward.slurm.people import People

log = logging.getLogger(__name__)

CONTROLLER: Final = "slurmctld"
"""Stands for a node's name where slurmctld itself lost lines."""

_MIGRATIONS: Final = (
    """
CREATE TABLE place (
    path TEXT PRIMARY KEY,
    inode INTEGER NOT NULL,
    at INTEGER NOT NULL,
    head TEXT NOT NULL,
    head_length INTEGER NOT NULL,
    written_ns INTEGER NOT NULL
);
""",
)
_MOST_AT_ONCE: Final = 500


class Places:
    """Keeps how far files were put to use: ``lines-CLUSTER.db``.

    Args:
        state_dir: The directory that holds the database.
        cluster: Whose files.

    Raises:
        SqliteError: The database cannot be used.
        SqliteUnavailable: It cannot be used now.
    """

    def __init__(self, state_dir: str, cluster: str) -> None:
        self._path = os.path.join(state_dir, f"lines-{cluster}.db")
        # What a power loss takes of it is read again.
        self._database = open_database(self._path, _MIGRATIONS, synchronous="NORMAL")

    def of(self, path: str) -> Place | None:
        """How far a file was put to use; None for not at all."""
        with translated(self._path):
            row = self._database.execute(
                "SELECT inode, at, head, head_length, written_ns FROM place WHERE path = ?",
                (path,),
            ).fetchone()
        if row is None:
            return None
        inode, at, head, head_length, written_ns = row
        return Place(
            inode=inode, offset=at, head=head, head_length=head_length, written_ns=written_ns
        )

    def keep(self, path: str, place: Place) -> None:
        """Remember a place.

        Raises:
            SqliteUnavailable: The database cannot be written now.
        """
        values = (
            path,
            place.inode,
            place.offset,
            place.head,
            place.head_length,
            place.written_ns,
        )
        with transaction(self._database, self._path) as database:
            database.execute("INSERT OR REPLACE INTO place VALUES (?, ?, ?, ?, ?, ?)", values)

    def close(self) -> None:
        """Let go of the database."""
        self._database.close()


class JobcompLines:
    """Follows the file of one cluster's slurmctld.

    Args:
        cluster: The cluster's name.
        path: The file.
        places: Where its place is kept.
        append: Appends events durably; may block.
        redact: Takes secrets out of what users wrote into a record.
    """

    def __init__(
        self,
        cluster: str,
        path: str,
        places: Places,
        append: Append,
        redact: Callable[[JobRecord], JobRecord] = lambda record: record,
    ) -> None:
        self.taken = 0
        """How many lines became events."""
        self._cluster = cluster
        self._path = path
        self._places = places
        self._append = append
        self._redact = redact
        self._people = People()
        self._following = Following(path, places.of(path))
        self._has_garbled = self._is_checked = False

    def run(self, stop: Stop, beat: Callable[[], None]) -> None:
        """Follow the file until the Stop is raised.

        Args:
            stop: Ends it.
            beat: Called for every batch of lines and while waiting.

        Raises:
            Unavailable: The place cannot be kept.
        """
        while not stop.is_set():
            beat()
            try:
                self.take(stop, beat)
            except Unavailable:
                if stop.is_set():
                    break  # it is all said again at the next start
                raise
            # Half a minute: whoever watches the beats waits no longer.
            stop.wait(min(30.0, self._following.due_s()), self._following.fd)

    def take(self, stop: Stop, beat: Callable[[], None] = lambda: None) -> None:
        """Make events of all that is new.

        Raises:
            Unavailable: The place cannot be kept, or the Stop was raised while the journal
                was away.
        """
        self._following.look()
        self._check_mode()
        for batch in self._following.batches():
            beat()
            events = self._events(batch)
            for begin in range(0, len(events), _MOST_AT_ONCE):
                self._append(events[begin : begin + _MOST_AT_ONCE])
            self._places.keep(self._path, batch.place)
            if stop.is_set():
                return

    def close(self) -> None:
        """Let go of the file."""
        self._following.close()

    def _events(self, batch: Batch) -> list[Event]:
        events = []
        garbled = batch.garbled
        for line in batch.lines:
            said, is_whole = self._told(line)
            garbled += not is_whole
            if said is None:
                continue
            events.append(end_event(self._cluster, said, self._redact(said.record)))
            if said.lost:
                log.warning("slurmctld could not write %d lines to %s", said.lost, self._path)
                name = f"lost:{int(said.at.timestamp())}:{said.record.job_id}"
                events.append(self._gap(name, "lost", said.lost, said.at))
        self.taken += len(batch.lines)
        if garbled:
            inode, offset = batch.begin
            at = datetime.fromtimestamp(batch.place.written_ns / 1e9, UTC)
            events.append(self._gap(f"garbled:{inode}:{offset}", "garbled", garbled, at))
        return events

    def _told(self, line: bytes) -> tuple[Told | None, bool]:
        """What a line says, and whether that is all that it should say."""
        try:
            return told(line, self._people), True
        except LineError as error:
            self._say_garbled(error)
            return told_behind(line, self._people), False

    def _gap(self, name: str, why: str, lines: int, at: datetime) -> Event:
        return Event(
            kind=NODE_GAP,
            cluster=self._cluster,
            key=f"{NODE_GAP}:{CONTROLLER}:{name}",
            at=at,
            seen_at=utc_now(),
            source=SOURCE,
            body=NodeGap(node=CONTROLLER, why=why, lines=lines),
        )

    def _say_garbled(self, error: LineError) -> None:
        if not self._has_garbled:
            log.error(
                "%s: %s: %r; others like it are only counted", self._path, error, error.offender
            )
        self._has_garbled = True

    def _check_mode(self) -> None:
        """Say once that everybody can read what people wrote into their jobs."""
        if self._is_checked:
            return
        try:
            file = os.stat(self._path).st_mode
            directory = os.stat(os.path.dirname(self._path)).st_mode
        except OSError:
            return
        self._is_checked = True
        if file & stat.S_IROTH and directory & stat.S_IXOTH:
            log.warning(
                "everybody can read %s, and names and comments of jobs in it: "
                "take the others' rights from its directory (chmod o= %s)",
                self._path,
                os.path.dirname(self._path),
            )
