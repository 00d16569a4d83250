"""What was captured before: the journal remembers it for months, jobs.db for good.

A job may wait in the queue for longer than the journal remembers the key of its
script, and its spool entry lies there all the while. Taken again it would be
kept twice, and would come back although it was purged.
"""

import logging
from datetime import datetime

from steward.core.journal import JournalReader
from steward.core.sqlite import SqliteError, SqliteUnavailable
from steward.jobs import Jobs, database_path

log = logging.getLogger(__name__)


class Known:
    """Knows the scripts that were captured; to be used by one thread at a time.

    Args:
        state_dir: Where jobs.db lies, if there is one yet.
        reader: The journal.
    """

    def __init__(self, state_dir: str, reader: JournalReader) -> None:
        self._path = database_path(state_dir)
        self._reader = reader
        self._jobs: Jobs | None = None

    def known(self, cluster: str, key: str) -> bool:
        """Whether there ever was an event of this key, of a script.

        Raises:
            JournalUnavailable: The journal cannot be read now.
        """
        return self._reader.known(cluster, key) or self._is_purged(cluster, key) is not None

    def has_script(self, cluster: str, job_id: int, submit: datetime) -> bool:
        """Whether a script of a submission was captured, or purged since.

        Args:
            cluster: The cluster's name.
            job_id: Raw id; of an array the array's, of a het job its leader's.
            submit: Submit time of one of its runs.
        """
        try:
            self._jobs = self._jobs or Jobs(self._path)
            return self._jobs.has_script(cluster, job_id, submit)
        except SqliteUnavailable as error:
            log.debug("jobs.db cannot be asked for captured scripts: %s", error)
            self.close()
            return False

    def over(self, cluster: str, key: str) -> bool:
        """Whether bytes of this script that no event names may go.

        Not where jobs.db alone knows it: their event may have been lost with a journal.

        Raises:
            JournalUnavailable: The journal cannot be read now.
        """
        return self._reader.known(cluster, key) or self._is_purged(cluster, key) is True

    def close(self) -> None:
        """Let go of jobs.db; the next question opens it again."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None

    def _is_purged(self, cluster: str, key: str) -> bool | None:
        try:
            self._jobs = self._jobs or Jobs(self._path)
            return self._jobs.is_purged(cluster, key)
        except (SqliteUnavailable, SqliteError) as error:
            # It is not made yet, or is away: then the jobs consumer says so, and a script is
            # taken again, which is harmless.
            log.debug("what was captured long ago cannot be looked up: %s", error)
            self.close()
            return None
