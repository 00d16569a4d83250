"""Scripts that are sent again: what this tree lacks is copied from where it is, and filed.

The bytes are in their store still, or in another sink's tree. They are put where
scripts wait for their job, under the names that they had in the store, and from
there on nothing differs from a script that has just come.
"""

import hashlib
import os
from typing import Final

from steward.archive.contents import Contents
from steward.archive.errors import ArchiveError
from steward.archive.files.filing import Filing
from steward.archive.files.pending import HIDDEN, WAITING_DIRECTORY, Pending, one_name
from steward.archive.files.places import Which
from steward.archive.files.records import LOST_NS
from steward.archive.files.tree import Tree
from steward.core.errors import StewardError, Unavailable
from steward.core.events import ArchiveResend, Event, JobScript, Resent

_BOTH: Final[tuple[Which, Which]] = ("script", "environment")
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class Refilling:
    """Takes in what an archive.resend event sends.

    Args:
        tree: The tree.
        filing: Files into it.
        pending: The batch.
        contents: Where bytes are.
        environments: Whether environments are archived.
    """

    def __init__(
        self,
        tree: Tree,
        filing: Filing,
        pending: Pending,
        contents: Contents,
        *,
        environments: bool,
    ) -> None:
        self._tree = tree
        self._filing = filing
        self._pending = pending
        self._contents = contents
        self._environments = environments

    def resend(self, event: Event) -> list[str]:
        """File what is lacking; what is there already is left alone.

        Returns:
            What cannot be filed, as its bytes are nowhere any more: the others of the event
            do not wait for it.

        Raises:
            Unavailable: Bytes cannot be read now.
            OSError: The tree cannot be written.
        """
        body: ArchiveResend = event.body
        lost: list[str] = []
        for resent in body.scripts:
            try:
                self._one(event.cluster, resent)
            except Unavailable:
                raise
            except StewardError as error:
                lost.append(f"{resent.script_key} is not archived again: {error}")
        return lost

    def _one(self, cluster: str, resent: Resent) -> None:
        ref = (cluster, resent.script_key)
        row = self._pending.rows.get(ref)
        if row is None or row.since_ns == LOST_NS:
            body = resent.script
            self._bring(cluster, resent.script_key, body)
            self._filing.waiting(ref, body)
        self._filing.settle(ref, resent.identity)

    def _bring(self, cluster: str, key: str, body: JobScript) -> None:
        files: list[tuple[str, bytes]] = []
        for which in _BOTH if self._environments else _BOTH[:1]:
            kept = body.script if which == "script" else body.environment
            if kept is None:
                continue
            data = self._contents.read(cluster, key, body, which)
            if data is None or hashlib.sha256(data).hexdigest() != kept.sha256:
                raise ArchiveError(
                    f"its {which} was changed where it is kept: see 'steward archive verify'", key
                )
            files.append((one_name(kept.path), data))
        # Only now: half a script is never left behind.
        for name, data in files:
            self._put_aside(name, data)

    def _put_aside(self, name: str, data: bytes) -> None:
        fd = self._tree.directory(WAITING_DIRECTORY, HIDDEN)
        temporary = f".copy.{name}"
        out = os.open(temporary, _WRITE, 0o600, dir_fd=fd)
        with os.fdopen(out, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(out)
        os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
        self._tree.touch(WAITING_DIRECTORY)
