"""Archive imports: take over scripts from job_archive, SArchive, or slurmdbd's job script store.

The first part converts environments to the spool's format: a native uint32 with the number of
entries, then each entry followed by NUL (:func:`encode_spool_environment`). job_archive wrote the
file with its NULs turned into newlines, and its way of reading dropped all white space. SArchive's
first versions copied the file; later ones write ``NAME=value`` lines in any order.

:func:`import_tree` reads a directory tree of job_archive or SArchive; :func:`import_stored` reads
scripts that slurmdbd stored. Both write bytes to the incoming store, redact environments and append
job.script and job.seen events to the journal. They return counts (:class:`ScriptImportResult`).
"""

import logging
import os
import pwd
import re
import stat
import struct
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Literal, Protocol

import msgspec

from steward.archive.errors import ArchiveError, make_archive_unavailable
from steward.archive.files.compression import MAX_PLAIN_BYTES as _LARGEST
from steward.archive.files.compression import DamagedFile, read_plain
from steward.archive.files.layout import compile_layout
from steward.archive.files.manifest import FoundFile, FoundScript, find_named_scripts
from steward.archive.files.permissions import read_acl_readers
from steward.archive.files.tree import ArchiveTree
from steward.core.actions import Answer
from steward.core.consumers import Append
from steward.core.events import (
    JOB_SCRIPT,
    JOB_SEEN,
    Event,
    IncomingFile,
    JobFacts,
    JobScript,
    make_script_key,
)
from steward.core.layouts import format_count
from steward.core.records import JobRecord
from steward.core.script_stores import IncomingStore, make_incoming_filename
from steward.jobs.retention import get_leader_id

_COUNT = struct.Struct("=I")
_VARIABLE_START = re.compile(rb"[A-Za-z_][^=\0\n]*=")
# At most these bytes of the four-byte count remain before the first entry.
_LONGEST_COUNT = 4


def encode_spool_environment(entries: Iterable[bytes]) -> bytes:
    """Encode environment entries in the spool's format."""
    entry_list = list(entries)
    return _COUNT.pack(len(entry_list)) + b"".join(entry + b"\0" for entry in entry_list)


def convert_lines(data: bytes) -> bytes:
    """Convert ``NAME=value`` lines to the spool's format; other lines continue the value before."""
    entries: list[bytes] = []
    for line in data.rstrip(b"\n").split(b"\n"):
        if entries and not _VARIABLE_START.match(line):
            entries[-1] += b"\n" + line
        elif line:
            entries.append(line)
    return encode_spool_environment(entry.replace(b"\0", b"\n") for entry in entries)


def convert_job_archive_environment(data: bytes) -> bytes:
    """Convert the ``.env`` file of job_archive to the spool's format."""
    lines = [line for line in data.split(b"\n") if line]
    if lines and len(lines[0]) <= _LONGEST_COUNT and not _VARIABLE_START.match(lines[0]):
        lines = lines[1:]
    elif lines:
        lines[0] = _strip_count(lines[0])
    return encode_spool_environment(line.replace(b"\0", b"") for line in lines)


def _strip_count(entry: bytes) -> bytes:
    """Strip the bytes of the count (up to four, not zero) that run into the first entry."""
    if _VARIABLE_START.match(entry):
        return entry
    for length in range(1, _LONGEST_COUNT + 1):
        if _VARIABLE_START.match(entry[length:]):
            return entry[length:]
    return entry


def convert_sarchive_environment(data: bytes) -> bytes:
    """Convert SArchive's ``environment`` file, spool bytes or lines, to the spool's format."""
    if len(data) >= _COUNT.size and b"\0" in data:
        return data
    return convert_lines(data)


log = logging.getLogger(__name__)

TreeKind = Literal["job_archive", "sarchive"]

IMPORT_SOURCE = "import"
_EVENT_BATCH = 200
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CONVERTERS = {
    "job_archive": convert_job_archive_environment,
    "sarchive": convert_sarchive_environment,
}


class RedactionResult(Protocol):
    """Interface of a redacted environment, as ``steward.slurm.environment.Environment``."""

    @property
    def data(self) -> bytes:
        """Return the environment in the spool's format, without secrets."""
        ...

    @property
    def redacted(self) -> tuple[str, ...]:
        """Return the names of variables whose values were redacted."""
        ...

    @property
    def name(self) -> str:
        """Return the job name that the environment claims."""
        ...

    @property
    def directory(self) -> str:
        """Return the submit directory that the environment claims."""
        ...

    @property
    def host(self) -> str:
        """Return the submit host that the environment claims."""
        ...


RedactEnvironment = Callable[[bytes], RedactionResult]
"""Function that redacts an environment in the spool's format."""


class StoredSubmission(msgspec.Struct, frozen=True, kw_only=True):
    """Submission as slurmdbd stores it: job record, script and environment.

    Attributes:
        record: Its first run, or the first in the queried interval.
        script: The script; None if slurmdbd stored none.
        environment: The environment as lines; None if slurmdbd stored none.
        mtime_ns: Time of the script in the spool if slurmctld still has it, else the submit time;
            ns since the epoch.
        is_known: Whether the archive already has the script.
        is_unanswered: Whether slurmdbd did not list the submission although it exists.
    """

    record: JobRecord
    script: bytes | None = None
    environment: bytes | None = None
    mtime_ns: int = 0
    is_known: bool = False
    is_unanswered: bool = False


class ScriptImportResult(Answer, frozen=True, kw_only=True):
    """Result of an import: counts, and unknown users.

    Attributes:
        scripts: Scripts imported.
        owned: Imported scripts with a known owner.
        known: Scripts that the archive already had, captured or imported before.
        scriptless: Submissions whose script slurmdbd did not store.
        unanswered: Submissions that slurmdbd did not list although they exist.
        malformed: Rows of sacct that cannot be parsed.
        skipped: Files that were not regular, too large or unreadable.
        unknown_users: Names of user directories without a uid.
        doubtful: Scripts imported without owner, because their files belong to another uid.
    """

    scripts: int = 0
    owned: int = 0
    known: int = 0
    scriptless: int = 0
    unanswered: int = 0
    malformed: int = 0
    skipped: int = 0
    unknown_users: tuple[str, ...] = ()
    doubtful: int = 0

    @property
    def exit_code(self) -> int:
        """Exit code 1 if the import is incomplete."""
        return 1 if self.unanswered or self.malformed else 0

    def list_warnings(self) -> Iterable[str]:
        """Return files and submissions that were not imported, and unknown users."""
        if self.unanswered:
            yield (
                f"slurmdbd did not list {format_count(self.unanswered, 'submission')} that exist: "
                "either it purged them, or its query of the database failed. Look for 'Problem "
                "getting jobs' in slurmdbd's log, then repeat the import"
            )
        if self.malformed:
            yield f"cannot parse {format_count(self.malformed, 'row')} of sacct: no complete import"
        if self.skipped:
            yield f"skipped {format_count(self.skipped, 'file')}: the log has each name and reason"
        if self.unknown_users:
            names = ", ".join(self.unknown_users)
            yield f"users unknown on this host, so their scripts stay unverified: {names}"


def import_tree(
    root: str,
    kind: TreeKind,
    cluster: str,
    store: IncomingStore,
    redact: RedactEnvironment,
    append: Append,
    *,
    environments: bool = True,
    resolve: Callable[[str], int | None] | None = None,
    report: Callable[[int], None] | None = None,
) -> ScriptImportResult:
    """Import the scripts of a job_archive or SArchive tree.

    Args:
        root: Root directory of the tree, which is not changed.
        kind: Program that wrote the tree.
        cluster: The cluster whose jobs these are.
        store: Store to which bytes are written.
        redact: Redacts environments.
        append: Appends events to the journal.
        environments: Whether to import environments.
        resolve: Returns the uid of a user name, or None. Default: the system's.
        report: Called with the number of scripts imported so far.

    Raises:
        ArchiveUnavailable: The tree cannot be read.
        StoreUnavailable: The store cannot be written.
    """
    import_run = _ImportRun(cluster, store, redact, append, environments=environments)
    users = _UserUids(resolve or _find_uid_of_name)
    layout = compile_layout(kind)
    tree = ArchiveTree(root)
    try:
        tree.open_for_reading()
        for directory, names in tree.iterate_files():
            path = os.path.join(root, directory)
            for script in find_named_scripts(root, directory, names, path, layout):
                _import_script(import_run, tree, kind, script, users)
                if report and import_run.scripts and import_run.scripts % _EVENT_BATCH == 0:
                    report(import_run.scripts)
        import_run.flush()
    except OSError as error:
        raise make_archive_unavailable(root, error) from error
    finally:
        tree.close()
    if report:
        report(import_run.scripts)
    return import_run.result(users.list_unknown())


def import_stored(
    submissions: Iterable[StoredSubmission],
    cluster: str,
    store: IncomingStore,
    redact: RedactEnvironment,
    append: Append,
    *,
    environments: bool = True,
    report: Callable[[int], None] | None = None,
) -> ScriptImportResult:
    """Import scripts that slurmdbd stored.

    Args:
        submissions: The submissions, oldest first.
        cluster: The cluster whose jobs these are.
        store: Store to which bytes are written.
        redact: Redacts environments.
        append: Appends events to the journal.
        environments: Whether to import environments.
        report: Called with the number of scripts imported so far.

    Raises:
        StoreUnavailable: The store cannot be written.
    """
    import_run = _ImportRun(cluster, store, redact, append, environments=environments)
    for submission in submissions:
        record, environment = submission.record, submission.environment
        if submission.is_unanswered:
            import_run.unanswered += 1
            continue
        if submission.is_known or submission.script is None:
            import_run.known += submission.is_known
            import_run.scriptless += not submission.is_known
            continue
        spool_environment = None if environment is None else convert_lines(environment)
        import_run.add(
            get_leader_id(record), submission.mtime_ns, submission.script, spool_environment, record
        )
        if report and import_run.scripts and import_run.scripts % _EVENT_BATCH == 0:
            report(import_run.scripts)
    import_run.flush()
    if report:
        report(import_run.scripts)
    return import_run.result(())


class _ImportRun:
    """Import in progress: its counts, and events held back until their bytes are durable."""

    def __init__(
        self,
        cluster: str,
        store: IncomingStore,
        redact: RedactEnvironment,
        append: Append,
        *,
        environments: bool,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._redact = redact
        self._append = append
        self._environments = environments
        self._events: list[Event] = []
        self.scripts = 0
        self.owned = 0
        self.known = 0
        self.scriptless = 0
        self.unanswered = 0
        self.skipped = 0
        self.doubtful = 0

    def add(
        self,
        job_id: int,
        mtime_ns: int,
        script: bytes | None,
        environment: bytes | None,
        record: JobRecord | None,
    ) -> None:
        """Add a script, its environment and its job record to the import."""
        script_file = (
            None if script is None else self._store_file(job_id, mtime_ns, script, "script")
        )
        redaction = None
        environment_file = None
        if environment is not None and self._environments:
            redaction = self._redact(environment)
            environment_file = self._store_file(job_id, mtime_ns, redaction.data, "env")
        name = redaction.name if redaction else ""
        body = JobScript(
            job_id=job_id,
            spool_mtime_ns=mtime_ns,
            script=script_file,
            environment=environment_file,
            store=self._store.name,
            claimed_name=name or (record.name if record else ""),
            claimed_dir=redaction.directory if redaction else "",
            claimed_host=redaction.host if redaction else "",
            redacted=redaction.redacted if redaction else (),
        )
        self._add_event(JOB_SCRIPT, make_script_key(job_id, mtime_ns), mtime_ns, body)
        self.scripts += 1
        if record is not None and record.uid is not None:
            self.owned += 1
            key = f"import:{record.job_id}:{mtime_ns}"
            self._add_event(JOB_SEEN, key, mtime_ns, JobFacts(record=record))
        if len(self._events) >= _EVENT_BATCH:
            self.flush()

    def _store_file(self, job_id: int, mtime_ns: int, data: bytes, kind: str) -> IncomingFile:
        filename = make_incoming_filename(self._cluster, job_id, mtime_ns, len(data), kind)
        return self._store.write(filename, data)

    def _add_event(self, kind: str, key: str, at_ns: int, body: object) -> None:
        self._events.append(
            Event(
                kind=kind,
                cluster=self._cluster,
                key=key,
                at=datetime.fromtimestamp(at_ns / 1e9, UTC),
                seen_at=datetime.fromtimestamp(time.time(), UTC),
                source=IMPORT_SOURCE,
                body=body,
            )
        )

    def count_doubtful(self, script: FoundScript, uid: int) -> None:
        """Count a script whose files belong to another uid than its directory; log the first."""
        if not self.doubtful:
            log.warning(
                "job %d of %r is not assigned to uid %d, because its files belong to another "
                "user; further such jobs are not logged",
                script.job_id,
                script.user_directory,
                uid,
            )
        self.doubtful += 1

    def flush(self) -> None:
        """Make bytes durable, then append the collected events."""
        if self._events:
            self._store.sync()
            self._append(self._events)
            self._events = []

    def result(self, unknown_users: tuple[str, ...]) -> ScriptImportResult:
        """Return the counts."""
        counts = msgspec.convert(self, ScriptImportResult, from_attributes=True)
        return msgspec.structs.replace(counts, unknown_users=unknown_users)


class _UserUids:
    """Cache of the uids of user directories."""

    def __init__(self, resolve: Callable[[str], int | None]) -> None:
        self._resolve = resolve
        self._uids: dict[str, int | None] = {}

    def get_uid(self, name: str) -> int | None:
        if name not in self._uids:
            self._uids[name] = self._resolve(name) if name else None
        return self._uids[name]

    def list_unknown(self) -> tuple[str, ...]:
        return tuple(sorted(name for name, uid in self._uids.items() if name and uid is None))


def _find_uid_of_name(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None


def _import_script(
    import_run: _ImportRun,
    tree: ArchiveTree,
    kind: TreeKind,
    found_script: FoundScript,
    users: _UserUids,
) -> None:
    """Import one script of a tree, with owner if its directory and its files agree."""
    files = [
        _read_owned_file(import_run, tree, file)
        for file in (found_script.script, found_script.environment)
    ]
    script, environment = (file.data if file else None for file in files)
    if script is None and environment is None:
        return
    if script is not None:
        # Both programs copied the NUL that follows a script in the spool.
        script = script.removesuffix(b"\0")
    uid = users.get_uid(found_script.user_directory)
    if uid is not None and any(file and file.owner not in {None, uid} for file in files):
        import_run.count_doubtful(found_script, uid)
        uid = None
    # Only a broken clock gives times before 1970, and names of stored bytes have no sign.
    spool_mtime_ns = max(0, found_script.spool_mtime_ns)
    record = None
    if uid is not None:
        record = JobRecord(
            job_id=found_script.job_id,
            # A file name may be invalid UTF-8; an event is always valid.
            name=os.fsencode(found_script.name).decode("utf-8", "backslashreplace"),
            uid=uid,
            user=found_script.user_directory,
            submit=datetime.fromtimestamp(spool_mtime_ns // 10**9, UTC),
            batch=True,
        )
    spool_environment = None if environment is None else _CONVERTERS[kind](environment)
    import_run.add(found_script.job_id, spool_mtime_ns, script, spool_environment, record)


class _OwnedBytes(msgspec.Struct, frozen=True):
    """Bytes of a file, and its owner's uid according to the file; None if that is unknown."""

    data: bytes
    owner: int | None


def _read_owned_file(
    import_run: _ImportRun, tree: ArchiveTree, file: FoundFile | None
) -> _OwnedBytes | None:
    """Read a regular file of limited size; otherwise count it as skipped."""
    if file is None:
        return None
    directory, _, name = file.path.rpartition("/")
    reason = ""
    try:
        fd = os.open(name, _READ, dir_fd=tree.get_directory_fd(directory))
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        with os.fdopen(fd, "rb") as stream:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST:
                try:
                    return _OwnedBytes(
                        read_plain(stream, name, _LARGEST), _get_file_owner(fd, status)
                    )
                except DamagedFile as error:
                    reason = str(error)
            else:
                reason = "not a regular file, or too large"
    import_run.skipped += 1
    log.warning("import skips %r: %s", file.path, reason)
    return None


def _get_file_owner(fd: int, status: os.stat_result) -> int | None:
    """Return the uid whom a file's ACL admits, else the file's owner; None for root."""
    try:
        reader = read_acl_readers(fd).uid
    except ArchiveError as error:
        # The ACL format is newer than this Steward: its readers are unknown, so trust no owner.
        log.warning("%s", error)
        return -1
    # Both programs ran as root or as SlurmUser and admitted the owner by ACL.
    return reader if reader is not None else status.st_uid or None
