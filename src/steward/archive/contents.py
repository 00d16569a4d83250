"""Script contents: read a script's or environment's bytes from the incoming store or an archive.

Capture writes bytes to a store (``.incoming/``) and consumers read them from there. Once all
consumers have passed the event, the store drops them; :class:`ScriptContents` then asks the files
sinks in turn, through :class:`FilesReader`. Used by the catalog and remote sinks.
:class:`EncodedContent` holds bytes in JSON, in replies and Kafka messages.
"""

import base64
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, Protocol

import msgspec

from steward.archive.errors import NotArchived
from steward.archive.files.reader import ContentKind, FilesReader, PlacedScript
from steward.core.config import Settings
from steward.core.events import ARCHIVE_RESEND, JOB_IDENTITY, JOB_SCRIPT, Event, JobScript
from steward.core.script_stores import IncomingStores, StoreError


class ArchiveReader(Protocol):
    """Interface of a sink's reader; :class:`FilesReader` implements it."""

    def locate(self, script_key: str, cluster: str = "") -> PlacedScript | None:
        """Return where a script is stored; None if this sink does not have it."""

    def read(self, script_key: str, kind: ContentKind, cluster: str = "") -> bytes:
        """Return the bytes of a script or of its environment; raise NotArchived if absent."""

    def close(self) -> None:
        """Close all files."""


class ScriptContents:
    """Reader of script bytes for consumers: from the store, else from an archive.

    Args:
        stores: Stores of incoming bytes.
        readers: Creates the archives' readers on first use; they are asked in order.
    """

    def __init__(
        self, stores: IncomingStores, readers: Callable[[], Sequence[ArchiveReader]] = lambda: ()
    ) -> None:
        self._stores = stores
        self._make_readers = readers
        self._readers: Sequence[ArchiveReader] | None = None

    def read(self, cluster: str, key: str, body: JobScript, kind: ContentKind) -> bytes | None:
        """Return the bytes of the script or the environment; None if the job has none.

        Args:
            cluster: The cluster's name.
            key: Key of the job.script event.
            body: Body of that event.
            kind: ``script`` or ``environment``.

        Raises:
            NotArchived: Neither a store nor an archive has the bytes.
            Unavailable: The bytes cannot be read now.
        """
        stored_file = getattr(body, kind)
        if stored_file is None:
            return None
        try:
            return self._stores.read(body, stored_file)
        except (FileNotFoundError, StoreError):
            # The store no longer has them: the event is resent or retried long after it came, or
            # its sink was removed from the configuration. An archive has the bytes.
            return self._read_archived(cluster, key, kind)

    def _read_archived(self, cluster: str, key: str, kind: ContentKind) -> bytes:
        """Read the bytes from the first archive that has them."""
        if self._readers is None:
            self._readers = self._make_readers()
        for reader in self._readers:
            try:
                return reader.read(key, kind, cluster)
            except NotArchived:
                continue
        raise NotArchived(
            f"the {kind} of {key} is neither in the incoming directory nor in an archive", key
        )

    def close(self) -> None:
        """Close the archives' databases."""
        for reader in self._readers or ():
            reader.close()
        self._readers = None


def make_script_contents(settings: Settings, stores: IncomingStores) -> ScriptContents:
    """Make script contents that fall back to every configured files sink."""
    return ScriptContents(
        stores, lambda: [FilesReader(settings, name) for name in settings.files_sinks()]
    )


_CONTROLS: Final = bytes(range(32))


class MessagePart(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all parts of a message: keyword-only and immutable."""


class EncodedContent(MessagePart, frozen=True, kw_only=True):
    """Bytes in a form that JSON can hold, without loss.

    Attributes:
        encoding: ``utf-8``: ``text`` is the decoded bytes; ``base64``: ``text`` is their base64,
            because they are not valid UTF-8, or because it is shorter.
        text: The bytes in that encoding.
    """

    text: str
    encoding: Literal["utf-8", "base64"] = "utf-8"

    @classmethod
    def from_bytes(cls, data: bytes) -> "EncodedContent":
        """Make the content for these bytes."""
        try:
            return cls(text=data.decode())
        except UnicodeDecodeError:
            return cls(text=base64.b64encode(data).decode("ascii"), encoding="base64")

    @classmethod
    def from_bytes_shortest(cls, data: bytes) -> "EncodedContent":
        """Make the content in the shorter encoding: JSON writes control characters as six bytes."""
        controls = len(data) - len(data.translate(None, _CONTROLS))
        if 5 * controls > len(data) // 3:
            return cls(text=base64.b64encode(data).decode("ascii"), encoding="base64")
        return cls.from_bytes(data)

    @property
    def data(self) -> bytes:
        """Return the bytes."""
        return base64.b64decode(self.text) if self.encoding == "base64" else self.text.encode()


def list_script_refs(events: Iterable[Event]) -> set[tuple[str, str]]:
    """Return cluster and key of every script that the events concern."""
    refs: set[tuple[str, str]] = set()
    for event in events:
        if event.kind == JOB_SCRIPT:
            refs.add((event.cluster, event.key))
        elif event.kind == JOB_IDENTITY:
            refs.add((event.cluster, event.body.script_key))
        elif event.kind == ARCHIVE_RESEND:
            refs.update((event.cluster, script.script_key) for script in event.body.scripts)
        else:
            refs.update((event.cluster, key) for key in event.body.script_keys)
    return refs
