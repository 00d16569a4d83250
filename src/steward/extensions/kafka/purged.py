"""Which scripts were purged lately: what jobs.db may not know yet.

A purge may come out of a topic before its script. jobs.db remembers it for good,
but takes it in when it gets there; until then the journal alone knows, and the
script must not be taken.
"""

import logging
from collections.abc import Collection
from typing import Final

from steward.core.events import ARCHIVE_PURGE, ArchivePurge
from steward.core.journal import JournalReader
from steward.core.sqlite import SqliteError, SqliteUnavailable
from steward.extensions.kafka.jobs import Ref
from steward.jobs import Jobs, database_path

log = logging.getLogger(__name__)

_EVENTS: Final = 500
_MOST: Final = 100_000
"""So many scripts are remembered, about 15 MB; by then jobs.db has long taken in the oldest."""


class LatelyPurged:
    """Knows the scripts that the journal's orders to purge name, from where jobs.db stands.

    Args:
        state_dir: Where jobs.db lies, if there is one yet.
        reader: The journal.
    """

    def __init__(self, state_dir: str, reader: JournalReader) -> None:
        self._path = database_path(state_dir)
        self._reader = reader
        self._position: int | None = None
        self._purged: dict[Ref, None] = {}

    def look(self) -> Collection[Ref]:
        """What was purged lately, up to now.

        Raises:
            SqliteUnavailable: The journal cannot be read now.
        """
        if self._position is None:
            self._position = self._taken_in()
        upto = -1
        while upto != self._position:
            upto = self._position
            events, self._position = self._reader.read(upto, {ARCHIVE_PURGE}, _EVENTS)
            for event in events:
                if isinstance(event.body, ArchivePurge) and not event.body.sink:
                    for key in event.body.script_keys:
                        self._purged[event.cluster, key] = None
        while len(self._purged) > _MOST:
            del self._purged[next(iter(self._purged))]
        return self._purged

    def _taken_in(self) -> int:
        """Up to where jobs.db knows the journal."""
        try:
            jobs = Jobs(self._path)
        except (SqliteUnavailable, SqliteError) as error:
            # It is not made yet, or is away: then all that the journal has counts.
            log.debug("how far jobs.db is cannot be looked up: %s", error)
            return 0
        try:
            return jobs.cursor()
        except (SqliteUnavailable, SqliteError) as error:
            log.debug("how far jobs.db is cannot be read: %s", error)
            return 0
        finally:
            jobs.close()
