"""What a sink on another machine is sent, and what it has to be able to do with it."""

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

import msgspec

from steward.core.events import JobIdentity, JobScript


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One archived script as it stands now; sent again, with a higher version, when it changes.

    Attributes:
        cluster: The cluster's name.
        key: Key of the job.script event.
        version: Grows with every change of the same document.
        body: What the job.script event said; None where that is not known any more, which
            is so only if ``partial`` or ``deleted``.
        identity: Whose it is, as last said; None while Slurm has not said (unverified).
        script: The script's bytes, as they are kept.
        environment: The environment's bytes, redacted, as they are kept.
        partial: The bytes are not at hand any more: only ``identity`` is news.
        deleted: It was purged: nothing of it may stay.
        corrects: The other end has had it with its bytes before; only what is known of the
            job is news.
    """

    cluster: str
    key: str
    version: int
    body: JobScript | None = None
    identity: JobIdentity | None = None
    script: bytes | None = None
    environment: bytes | None = None
    partial: bool = False
    deleted: bool = False
    corrects: bool = False

    @property
    def id(self) -> str:
        """What tells it from every other one, of every cluster: ``hpc1/1234:1763740800000000000``.

        The job's id, and the script's time in the scheduler's spool in ns since the epoch.
        """
        return f"{self.cluster}/{self.key.removeprefix('script:')}"

    @property
    def job_id(self) -> int:
        """The id in the spool entry's name."""
        return int(self.key.split(":")[1])

    @property
    def spool_mtime_ns(self) -> int:
        """The script's time in the spool, ns since the epoch: it decides on the month."""
        return int(self.key.split(":")[2])


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A document that the other end will never take as it is.

    Attributes:
        document: Which.
        why: Its reason, and the setting to change where one would help.
    """

    document: Document
    why: str


class Destination(Protocol):
    """The other end. It is made, used and closed by one thread of one process."""

    def send(self, documents: Sequence[Document]) -> list[Refusal]:
        """Send documents, in their order; on return each is durable there, or refused.

        Sending one again does no harm, nor does an older version after a newer one.

        Raises:
            Unavailable: The other end is away, or asked for patience (429); the whole batch
                will be sent again.
        """
        ...

    def expire(self, before: datetime) -> None:
        """Remove what is wholly older than a time (UTC), where the other end does not by itself.

        Raises:
            Unavailable: As for :meth:`send`.
        """
        ...

    def close(self) -> None:
        """Let go of connections; what was not acknowledged may be lost there, not here."""
        ...
