"""Reads a script's bytes wherever they are by now: in their store, or in an archive of files."""

from collections.abc import Callable, Sequence
from typing import Protocol

from steward.archive.errors import NotArchived
from steward.archive.files.reader import FilesReader, Placed, Which
from steward.core.config import Settings
from steward.core.events import JobScript
from steward.core.incoming import StoreError, Stores


class Reader(Protocol):
    """Reads what a sink keeps; :class:`FilesReader` is one."""

    def locate(self, script_key: str, cluster: str = "") -> Placed | None:
        """Where a script is; None if this sink does not have it."""

    def read(self, script_key: str, which: Which, cluster: str = "") -> bytes:
        """The bytes of a script or of its environment; raises NotArchived."""

    def close(self) -> None:
        """Let go of files."""


class Contents:
    """For consumers: what they read leaves its store when all have passed its event.

    Args:
        stores: The stores of incoming bytes.
        readers: Makes the readers of the archives that are asked in turn, when first needed.
    """

    def __init__(
        self, stores: Stores, readers: Callable[[], Sequence[Reader]] = lambda: ()
    ) -> None:
        self._stores = stores
        self._make_readers = readers
        self._readers: Sequence[Reader] | None = None

    def read(self, cluster: str, key: str, body: JobScript, which: Which) -> bytes | None:
        """The script or the environment; None if there was none.

        Args:
            cluster: The cluster's name.
            key: Key of the job.script event.
            body: What that event said.
            which: Of the two.

        Raises:
            NotArchived: The bytes are nowhere any more.
            Unavailable: They cannot be read now.
        """
        kept = getattr(body, which)
        if kept is None:
            return None
        try:
            return self._stores.read(body, kept)
        except (FileNotFoundError, StoreError):
            # An event that is sent or replayed long after it came, or whose sink was taken
            # out of the configuration: the bytes are where they were filed.
            return self._archived(cluster, key, which)

    def _archived(self, cluster: str, key: str, which: Which) -> bytes:
        if self._readers is None:
            self._readers = self._make_readers()
        for reader in self._readers:
            try:
                return reader.read(key, which, cluster)
            except NotArchived:
                continue
        raise NotArchived(f"the {which} of {key} has left its store, and no archive has it", key)

    def close(self) -> None:
        """Let go of the archives' databases."""
        for reader in self._readers or ():
            reader.close()
        self._readers = None


def contents_of(settings: Settings, stores: Stores) -> Contents:
    """What can be read with a configuration, whose sinks of files are asked in turn."""
    return Contents(
        stores, lambda: [FilesReader(settings, name) for name in settings.files_sinks()]
    )
