"""Captured scripts: look up in the journal and in jobs.db whether a script was captured before.

:class:`CapturedScripts` is what a capture worker asks before it takes a spool entry. A job may be
pending for longer than the journal keeps the key of its script (months), while its spool entry
stays. Capturing it again would store the script twice, and would restore one that was purged.
jobs.db remembers captured scripts for good.
"""

import logging
from datetime import datetime

from steward.core.journal import JournalReader
from steward.core.sqlite import SqliteError, SqliteUnavailable
from steward.jobs import Jobs, database_path

log = logging.getLogger(__name__)


class CapturedScripts:
    """Lookup of captured scripts. Not thread-safe: use one per thread.

    Args:
        state_dir: Directory of jobs.db, which may not exist yet.
        reader: Reader of the journal.
    """

    def __init__(self, state_dir: str, reader: JournalReader) -> None:
        self._path = database_path(state_dir)
        self._reader = reader
        self._jobs: Jobs | None = None

    def was_captured(self, cluster: str, key: str) -> bool:
        """Return whether a script with this event key was ever captured.

        Raises:
            JournalUnavailable: The journal cannot be read now.
        """
        return self._reader.has_key(cluster, key) or self._is_purged(cluster, key) is not None

    def has_script(self, cluster: str, job_id: int, submit: datetime) -> bool:
        """Return whether the script of a submission was captured, even if purged since.

        Args:
            cluster: Name of the cluster.
            job_id: Raw id; the array's for an array, the leader's for a het job.
            submit: Submit time of one of its runs.
        """
        try:
            self._jobs = self._jobs or Jobs(self._path)
            return self._jobs.has_script(cluster, job_id, submit)
        except SqliteUnavailable as error:
            log.debug("cannot query jobs.db for captured scripts: %s", error)
            self.close()
            return False

    def can_delete_bytes(self, cluster: str, key: str) -> bool:
        """Return whether stored bytes of this script that no event names may be deleted.

        False if only jobs.db knows the script: its event may have been lost with a journal.

        Raises:
            JournalUnavailable: The journal cannot be read now.
        """
        return self._reader.has_key(cluster, key) or self._is_purged(cluster, key) is True

    def close(self) -> None:
        """Close jobs.db; the next lookup opens it again."""
        if self._jobs is not None:
            self._jobs.close()
            self._jobs = None

    def _is_purged(self, cluster: str, key: str) -> bool | None:
        """Return whether jobs.db says that a script was purged; None if unknown there."""
        try:
            self._jobs = self._jobs or Jobs(self._path)
            return self._jobs.is_purged(cluster, key)
        except (SqliteUnavailable, SqliteError) as error:
            # jobs.db does not exist yet or is unavailable: the jobs consumer reports that, and
            # capturing a script twice is harmless.
            log.debug("cannot look up earlier captures: %s", error)
            self.close()
            return None
