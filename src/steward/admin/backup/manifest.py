"""What a backup says of itself: every file in it with its checksum, and where it came from.

A backup is one tar, compressed by zstd. Its last member is the manifest.
"""

from datetime import datetime
from typing import Final

import msgspec

from steward.core.errors import StewardError, Unavailable, UsageError

FORMAT: Final = 1
"""Of the whole file; one of a later format is refused."""
MANIFEST: Final = "steward-backup.json"
SUFFIX: Final = ".tar.zst"
STATE: Final = "state/"
BYTES: Final = "incoming/"
CONFIG: Final = "config/"
ARCHIVE: Final = "archive/"
JOB_LOG: Final = "joblog"


class BackupError(StewardError):
    """A backup cannot be made, or cannot be put back."""


class BackupUsage(BackupError, UsageError):
    """What is named can be no backup."""


class BackupUnavailable(Unavailable):
    """A place that is written to or read from cannot be used now."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One file in a backup.

    Attributes:
        name: In the tar: ``state/journal.db``, ``incoming/STORE/NAME``, ``config/etc/…``,
            ``archive/SINK/…``, ``joblog/…``.
        size: In bytes.
        sha256: Of its content.
    """

    name: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup holds.

    Attributes:
        format: See ``FORMAT``.
        steward: Version of the Steward that made it.
        host: Name of the host that it was made on.
        made_at: When the databases were as they are in it.
        running: Whether the daemon ran.
        state_dir: Where the state directory was.
        owner: Name of the user whose it was; the uid where it had no name.
        config: Path of the configuration file; "" for none.
        head: Position of the journal's last event.
        stores: For each store of waiting scripts the directory that it was.
        trees: For each tree of files that is in it (``archive/SINK``, ``joblog``) where that was.
        ledger: Where the ledger is, if not in it: a database's URL, without its password.
        missing: How many waiting scripts were purged or trimmed meanwhile.
        members: Every other file in it.
    """

    steward: str
    host: str
    made_at: datetime
    state_dir: str
    owner: str
    head: int
    format: int = FORMAT
    running: bool = False
    config: str = ""
    stores: dict[str, str] = msgspec.field(default_factory=dict)
    trees: dict[str, str] = msgspec.field(default_factory=dict)
    ledger: str = ""
    missing: int = 0
    members: tuple[Member, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Size of everything in it, unpacked."""
        return sum(member.size for member in self.members)
