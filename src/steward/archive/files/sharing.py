"""Identical scripts of one holder are stored once: the next one is a link to the last.

A link shares its ACL, so that files are shared only among those of one cluster,
user and account, in one tree, below the directory that this user alone may
enter. What is linked to is read and compared once a batch: damage to one file
must not become what the next job ran.
"""

from collections.abc import Iterable, Iterator, Mapping

from steward.archive.files.copying import Source
from steward.archive.files.counting import content
from steward.archive.files.packing import Damaged, is_packed, open_plain, plain_digest
from steward.archive.files.records import Records, Ref, Row, belongs_elsewhere
from steward.archive.files.tree import InTheWay, Tree
from steward.core.events import ARCHIVE_RESEND, JOB_IDENTITY, JOB_SCRIPT, Event, JobScript
from steward.core.records import JobRecord

Wanted = tuple[int, bytes | None, bytes | None]
"""A holder, and the SHA-256 of a script and of its environment."""

Where = tuple[str, str]
"""A directory below the root, and a file's name in it."""

_Content = tuple[int, bytes, bool]
"""A holder, the SHA-256 of a file, and whether it is an environment."""


class Sharing:
    """Finds files that others may be linked to, in one tree.

    Args:
        tree: The tree.
        records: The sink's database, for that tree.
    """

    def __init__(self, tree: Tree, records: Records) -> None:
        self._tree = tree
        self._records = records
        self._jobs: dict[_Content, int] = {}
        self._found: dict[_Content, Where] = {}

    def begin(self, wanted: Iterable[Wanted]) -> None:
        """Look up, at once, what the scripts of a batch may be linked to.

        Args:
            wanted: The scripts, as :func:`shareable` tells them.
        """
        self.drop()
        moved = self._records.moved
        asked: dict[int, _Content] = {}
        for holder, script, environment in wanted:
            if script is not None:
                number = content(holder, script, environment=False, moved=moved)
                asked[number] = (holder, script, False)
            if environment is not None:
                number = content(holder, environment, environment=True, moved=moved)
                asked[number] = (holder, environment, True)
        for number, job_id in self._records.contents(list(asked)).items():
            self._jobs[asked[number]] = job_id

    def drop(self) -> None:
        """Forget the batch."""
        self._jobs.clear()
        self._found.clear()

    def instead(
        self, row: Row, script: Source | None, environment: Source | None
    ) -> tuple[Source | None, Source | None]:
        """Identical files to link to, in place of a script's and its environment's bytes.

        Args:
            row: The script as it will be.
            script: The script's bytes, kept where there is none to link to.
            environment: The environment's, likewise.

        Raises:
            OSError: The tree cannot be read.
        """
        if not row.shared or row.holder is None:
            return script, environment
        if script is not None:
            of = (row.holder, script.sha, False)
            script = self._instead(script, of, row, row.script_length)
        if environment is not None:
            of = (row.holder, environment.sha, True)
            environment = self._instead(environment, of, row, row.env_length)
        return script, environment

    def _instead(self, source: Source, of: "_Content", row: Row, length: int) -> Source:
        found = self._found.get(of)
        if found is None:
            job_id = self._jobs.pop(of, None)
            if job_id is None:
                return source
            found = self._kept(source.sha, row, job_id, length)
            if found is None:
                return source
            self._found[of] = found
        path, name = found
        try:
            fd = self._tree.directory(path)
        except FileNotFoundError:
            # Purged in this batch, and nothing else was in it.
            return source
        return Source(fd, name, source.sha, packed=is_packed(name), otherwise=source)

    def add(self, row: Row, path: str) -> None:
        """A script was filed: those that follow in the batch may be linked to it."""
        if not row.shared or row.holder is None:
            return
        if row.script_sha is not None and row.script_name:
            self._found[row.holder, row.script_sha, False] = (path, row.script_name)
        if row.env_sha is not None and row.env_name:
            self._found[row.holder, row.env_sha, True] = (path, row.env_name)

    def _kept(self, sha: bytes, row: Row, job_id: int, length: int) -> Where | None:
        # All keys of a job's scripts begin alike.
        rows = self._records.select(
            "key >= ? AND key < ? AND cluster = ? AND holder = ? AND shared "
            "AND state BETWEEN ? AND ?",
            f"script:{job_id}:",
            f"script:{job_id};",
            row.cluster,
            row.holder,
            *self._records.states,
        )
        for other in rows:
            for name, digest in (
                (other.script_name, other.script_sha),
                (other.env_name, other.env_sha),
            ):
                if digest == sha and name and other.key != row.key:
                    path = self._records.directory(other.directory)
                    if self._is_sound(path, name, sha, length):
                        return path, name
        return None

    def _is_sound(self, path: str, name: str, sha: bytes, length: int) -> bool:
        try:
            with open_plain(self._tree.directory(path), name) as file:
                return plain_digest(file, name, length)[0] == sha
        except (FileNotFoundError, IsADirectoryError, InTheWay, Damaged):
            # Verify tells of it; this script gets bytes of its own.
            return False


def shareable(
    events: Iterable[Event], rows: Mapping[Ref, Row], records: Records
) -> Iterator[Wanted]:
    """What the scripts are that a batch files under their owners.

    Args:
        events: The batch.
        rows: What is known of its scripts.
        records: The sink's database.
    """
    fresh: dict[Ref, JobScript] = {}
    for event in events:
        found = None
        if event.kind == JOB_SCRIPT:
            fresh[event.cluster, event.key] = event.body
        elif event.kind == JOB_IDENTITY:
            ref = (event.cluster, event.body.script_key)
            found = _one(ref, event.body.record, rows.get(ref), fresh.get(ref), records)
        elif event.kind == ARCHIVE_RESEND:
            for sent in event.body.scripts:
                ref = (event.cluster, sent.script_key)
                if sent.identity is not None:
                    one = _one(ref, sent.identity.record, rows.get(ref), sent.script, records)
                    if one is not None:
                        yield one
        if found is not None:
            yield found


def _one(
    ref: Ref, record: JobRecord, row: Row | None, fresh: JobScript | None, records: Records
) -> Wanted | None:
    if record.uid is None or (row is not None and not belongs_elsewhere(row, record)):
        return None
    holder = records.known_holder((ref[0], record.uid, record.user, record.account))
    if holder is None:
        return None
    if row is not None:
        return holder, row.script_sha, row.env_sha
    if fresh is None:
        return None
    kept = (fresh.script, fresh.environment)
    script, environment = (bytes.fromhex(file.sha256) if file else None for file in kept)
    return holder, script, environment
