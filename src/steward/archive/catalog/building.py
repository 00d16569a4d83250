"""A new catalogue that is not in use yet: filled by long transactions that nothing waits for."""

import hashlib
import os

import msgspec

from steward.archive.catalog.generations import Key, Progressed
from steward.archive.catalog.month import MonthWriter, Use, month_of, month_path, months_in
from steward.core.filesystems import sync_filesystem

_AT_ONCE = 1000
_OPEN_MONTHS = 12


class Builder:
    """Fills a new generation's directory.

    Args:
        directory: The generation's.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._months: dict[str, MonthWriter] = {}
        self._pending = 0

    def add(self, use: Use, data: bytes, sha256: bytes = b"") -> None:
        """Index a use and, if need be, its script; what is known of a use is replaced.

        Args:
            use: The use; its number of the script does not matter.
            data: The script's bytes, or as many of them as are indexed.
            sha256: Of the whole script, where ``data`` is not all of it.

        Raises:
            SqliteUnavailable: The disk is full.
        """
        writer = self._month(month_of(use.at))
        digest = sha256 or hashlib.sha256(data).digest()
        number = writer.knows(digest) or writer.add_script(digest, data)
        added = msgspec.structs.replace(use, script=number)
        writer.add_use(added)
        writer.identify(added)

    def has(self, use: Use) -> bool:
        """Whether a use is here."""
        return self._month(month_of(use.at)).has_use(use.cluster, use.key)

    def forget(self, at: int, key: Key) -> None:
        """Take out a use.

        Args:
            at: The script's time in the spool, microseconds since the epoch.
            key: The use.
        """
        month = month_of(at)
        if month in self._months or os.path.exists(month_path(self.directory, month)):
            self._month(month).forget(*key)

    def finish(self, position: int, purged: list[tuple[str, str, int]]) -> tuple[int, int]:
        """Make everything durable and note how far it goes; numbers of uses and of scripts.

        Args:
            position: The last event that is in it.
            purged: What was purged, with the event.
        """
        self._close_months()
        uses = scripts = 0
        for month in months_in(self.directory):
            writer = MonthWriter(month_path(self.directory, month))
            of_month = writer.counts()
            uses, scripts = uses + of_month[0], scripts + of_month[1]
            writer.shrink_log()
            writer.close()
        progressed = Progressed(self.directory)
        progressed.advance(position, purged)
        progressed.close()
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_filesystem(fd)
        finally:
            os.close(fd)
        return uses, scripts

    def abandon(self) -> None:
        """Let go of all files; harmless after :meth:`finish`."""
        for writer in self._months.values():
            writer.close()
        self._months.clear()

    def _month(self, month: str) -> MonthWriter:
        """A month's writer, inside a transaction."""
        writer = self._months.pop(month, None)
        if writer is None:
            # Whatever a crash leaves of it is thrown away, so nothing is synced until the end.
            writer = MonthWriter(month_path(self.directory, month), synchronous="OFF")
            writer.begin()
        self._months[month] = writer  # The one used last stands last.
        self._pending += 1
        if self._pending >= _AT_ONCE:
            self._pending = 0
            for each in self._months.values():
                each.commit()
                each.begin()
        while len(self._months) > _OPEN_MONTHS:
            oldest = self._months.pop(next(iter(self._months)))
            oldest.commit()
            oldest.close()
        return writer

    def _close_months(self) -> None:
        for writer in self._months.values():
            writer.commit()
            writer.close()
        self._months.clear()
