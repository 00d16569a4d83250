"""What is taken from Torque's spool: a script with its job file, and what a job file tells.

Keys of events are made of what the file says, so that a scan repeats harmlessly
what was seen by watching.
"""

import hashlib
import logging
import os
import re
import struct
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final

import msgspec

from steward.capture.schedulers import (
    ENVIRONMENT_MISSING,
    ENVIRONMENT_TOO_LARGE,
    ENVIRONMENT_UNREADABLE,
    MOST_ENVIRONMENT_BYTES,
    SCRIPT_TOO_LARGE,
    Contents,
    EnvironmentUnreadable,
    is_unlinked,
    read_whole,
)
from steward.core.events import JOB_END, JOB_SEEN, JOB_STATE, Event, JobFacts
from steward.core.records import JobRecord
from steward.core.redaction import REDACTED, Redactor
from steward.extensions.torque.records import MOST_BYTES, TorqueJob, TorqueRecordError, read_job
from steward.slurm.environment import Environment, names_told
from steward.slurm.job_states import FINISHED, LOST

AMBIGUOUS: Final = "environment-ambiguous"
"""A value holds commas, a name comes twice, or bytes were lost: entries may be pieces."""
CUT: Final = "environment-cut"
"""Entries behind a secret are left out, for they may be pieces of it."""

# A shell's exported functions are BASH_FUNC_name%% or BASH_FUNC_name().
_BOUNDARY: Final = re.compile(rb",(?=[A-Za-z_][A-Za-z0-9_.%()-]{0,200}=)")
_NAME: Final = re.compile(rb"[A-Za-z_][A-Za-z0-9_.%()-]{0,200}=")
# libxml2 reads a byte of another encoding and the two or three behind it, a comma among them,
# as one character: a name, or what is left of one, then stands behind it. Its low bits tell.
_SWALLOWED: Final = re.compile(rb"(?<![\x80-\xff])[\x80-\xff]++[A-Za-z0-9_.-]*+=")
# A name that no shell exports, which env(1) and programs may set all the same.
_ODD_NAME: Final = re.compile(rb",([^,=\n]++)=")
_COMMA_BITS: Final = ord(",") & 0x3F
_SURE: Final = re.compile(
    rb"(?:PBS_[A-Z_]+|HOME|USER|LOGNAME|SHELL|PATH|PWD|OLDPWD|LANG|LANGUAGE|LC_[A-Z]+|MAIL|TERM"
    rb"|HOSTNAME|HOSTTYPE|MACHTYPE|OSTYPE|SHLVL|EDITOR|VISUAL|PAGER|LESS|LESSOPEN|LS_COLORS"
    rb"|HISTSIZE|HISTCONTROL|INPUTRC|DISPLAY|TZ|TMPDIR|MANPATH|INFOPATH|LD_LIBRARY_PATH|CPATH"
    rb"|LIBRARY_PATH|PYTHONPATH|PKG_CONFIG_PATH|MODULEPATH|MODULESHOME|LOADEDMODULES|_LMFILES_"
    rb"|XDG_[A-Z]+(?:_[A-Z]+)*|SSH_(?:CLIENT|CONNECTION|TTY)|OMP_NUM_THREADS|DBUS_[A-Z_]+|_)="
)
_MORE: Final = b"xxxx"
MOST_VARIABLES: Final = 100_000
"""What has more is no environment, and each costs some 10 us."""
_TAIL: Final = 512
"""As much of an entry's end as can make a secret of what follows it."""
_COUNT: Final = struct.Struct("=I")


def read_variables(variables: str, redactor: Redactor) -> Environment:
    """Take a Variable_List apart, without its secrets; never fails.

    Args:
        variables: The text, its XML escapes undone.
        redactor: Knows what is secret.
    """
    raw = variables.encode("utf-8", "backslashreplace").replace(b"\0", b"")
    entries = list(_entries(raw))
    kept, redacted, cut = _without_secrets(raw, entries, redactor)
    flags: tuple[str, ...] = ()
    if _is_ambiguous(entries) or _lost_bytes(variables):
        flags = (AMBIGUOUS,)
    if cut:
        flags += (CUT,)
    data = _COUNT.pack(len(kept)) + b"".join(entry + b"\0" for entry in kept)
    return Environment(data=data, redacted=names_told(redacted), flags=flags)


def is_too_large(variables: str) -> bool:
    """Whether taking a Variable_List apart would hold up the jobs behind it."""
    if len(variables) > MOST_ENVIRONMENT_BYTES:
        return True
    raw = variables.encode("utf-8", "backslashreplace")
    if len(raw) > MOST_ENVIRONMENT_BYTES:
        return True
    return any(count >= MOST_VARIABLES for count, _ in enumerate(_BOUNDARY.finditer(raw)))


def _entries(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """The pieces between the commas that a ``NAME=`` follows, each with where it begins."""
    begin = 0
    for comma in _BOUNDARY.finditer(raw):
        yield begin, raw[begin : comma.start()]
        begin = comma.end()
    if begin < len(raw):
        yield begin, raw[begin:]


def _without_secrets(
    raw: bytes, entries: Sequence[tuple[int, bytes]], redactor: Redactor
) -> tuple[list[bytes], list[str], bool]:
    """What may be kept, the names that lost their value, and whether entries were left out."""
    spans = redactor.secret_spans(raw)
    begin, end = next(spans, (len(raw), len(raw)))
    kept: list[bytes] = []
    redacted: list[str] = []
    is_secret = cut = False
    for (start, entry), lone in zip(entries, _shown(entries, redactor), strict=True):
        stop = start + len(entry)
        # A secret may have been cut by a comma, so that no piece looks like one.
        while end <= start and begin < len(raw):
            begin, end = next(spans, (len(raw), len(raw)))
        if is_secret and (begin < start or _SURE.match(entry) is None):
            cut = True
            continue
        is_glued = begin < stop and start <= begin
        shown = _name_of(entry) + REDACTED if is_glued and not lone else lone
        is_secret = bool(shown)
        if shown.endswith(REDACTED):
            redacted.append(entry.partition(b"=")[0].decode("utf-8", "backslashreplace"))
        kept.append(shown or entry)
    return kept, redacted, cut


def _shown(entries: Sequence[tuple[int, bytes]], redactor: Redactor) -> Iterator[bytes]:
    """What is kept of each entry that may not be kept as it is; empty for the others."""
    # All at one go, as it costs more to ask for each. None holds a NUL.
    alone = redactor.entries(b"\0".join(entry for _, entry in entries)).data.split(b"\0")
    # What makes it a secret may begin behind the comma that it was cut at.
    tails = [_tail(entry) + _MORE for _, entry in entries]
    longer = redactor.entries(b"\0".join(tails)).data.split(b"\0")
    pieces = zip(entries, alone, tails, longer, strict=False)
    for (_, entry), by_itself, tail, followed in pieces:
        name = _name_of(entry)
        if not name:
            # No variable's beginning: the piece before the first name, of what is damaged.
            yield REDACTED
        elif (
            by_itself != entry
            or followed != tail
            or _SWALLOWED.search(entry, len(name))
            or any(redactor.is_secret(odd[1]) for odd in _ODD_NAME.finditer(entry, len(name)))
        ):
            yield name + REDACTED
        else:
            yield b""


def _name_of(entry: bytes) -> bytes:
    """The name that an entry begins with, and its ``=``; empty where it begins with none."""
    named = _NAME.match(entry)
    return named[0] if named else b""


def _tail(entry: bytes) -> bytes:
    """An entry, of a long one the name and the end."""
    if len(entry) <= 2 * _TAIL:
        return entry
    return _name_of(entry) + entry[-_TAIL:]


def _is_ambiguous(entries: Sequence[tuple[int, bytes]]) -> bool:
    names = {entry.partition(b"=")[0] for _, entry in entries}
    return len(names) < len(entries) or any(
        b"," in entry or _NAME.match(entry) is None for _, entry in entries
    )


def _lost_bytes(variables: str) -> bool:
    """Whether a character may be one that libxml2 made of a broken one and a comma."""
    if variables.isascii():
        return False
    return any(
        _COMMA_BITS in ((code := ord(letter)) & 0x3F, code >> 6 & 0x3F, code >> 12 & 0x3F)
        for letter in set(variables)
        if letter > "\x7f"
    )


log = logging.getLogger(__name__)

PIECE_BYTES: Final = 65536
"""qsub sends a longer script in pieces of this size; the last ones come behind the job file."""

MAYBE_CUT: Final = "script-maybe-cut"
"""The script's size is a multiple of a piece's, so that nothing tells whether it is whole."""
RECORD_UNREADABLE: Final = "record-unreadable"
"""There is no job file beside the script, or it cannot be read."""

SOURCE: Final = "spool"

# What a run's course changes by itself; all else makes a job.seen.
_COURSE: Final = dict.fromkeys(
    ("state", "reason", "start", "end", "nodelist", "nodes", "cpus", "exit_code", "exit_signal")
)


class TorqueScript(msgspec.Struct, frozen=True):
    """Open descriptors on a complete ``.SC`` and the job file of that moment (-1 for none)."""

    job_id: int
    mtime_ns: int
    script_fd: int
    record_fd: int

    @property
    def is_removed(self) -> bool:
        """Whether pbs_server has removed the script."""
        return is_unlinked(self.script_fd)

    def read(self, redactor: Redactor) -> Contents:
        """The script byte for byte, and of the job file the environment and the claims."""
        script = read_whole(self.script_fd)
        if script is None:
            log.warning("job %d has a script too large to be kept", self.job_id)
            return Contents(None, flags=(SCRIPT_TOO_LARGE,))
        flags: tuple[str, ...] = ()
        if len(script) % PIECE_BYTES == 0:
            flags = (MAYBE_CUT,)
        try:
            job = self._job()
        except OSError as error:
            odd = (*flags, RECORD_UNREADABLE, ENVIRONMENT_UNREADABLE)
            raise EnvironmentUnreadable(error, Contents(script, None, odd)) from error
        if job is None:
            return Contents(script, None, (*flags, RECORD_UNREADABLE, ENVIRONMENT_MISSING))
        environment, odd = _environment(job, redactor)
        # Not the name: it can be changed, and the record that comes with it tells it.
        return Contents(
            script,
            environment,
            (*flags, *odd),
            directory=job.record.work_dir,
            host=job.record.submit_host,
        )

    def _job(self) -> TorqueJob | None:
        data = read_whole(self.record_fd, MOST_BYTES) if self.record_fd >= 0 else None
        try:
            return None if data is None else read_job(data, f"job {self.job_id}")
        except TorqueRecordError:
            return None  # said when the file was first looked at

    def close(self) -> None:
        """Let go of the bytes."""
        os.close(self.script_fd)
        if self.record_fd >= 0:
            os.close(self.record_fd)


class TorqueNews(msgspec.Struct, frozen=True):
    """What a job file has told, in events; nothing is held open.

    Attributes:
        cluster: The cluster's name.
        job: What the file says.
        taken_at: When it was read, UTC.
        is_new: Whether more than the course of its run is new.
        is_lost: Whether the file is gone, without having told of an end.
    """

    cluster: str
    job: TorqueJob
    taken_at: datetime
    is_new: bool = True
    is_lost: bool = False

    @property
    def job_id(self) -> int:
        """The raw id of the job; made up for an element of an array."""
        return self.job.record.job_id

    @property
    def mtime_ns(self) -> int:
        """No script comes with it."""
        return 0

    @property
    def is_removed(self) -> bool:
        """It has no script to be removed."""
        return False

    def read(self, redactor: Redactor) -> Contents:
        """The events that follow, without secrets."""
        record = redactor.record(self.job.record)
        return Contents(None, events=tuple(self._events(record)))

    def close(self) -> None:
        """Nothing is held."""

    def _events(self, record: JobRecord) -> list[Event]:
        assert record.submit is not None
        run = f"{record.job_id}:{int(record.submit.timestamp())}:{record.restarts}"
        if self.is_lost:
            lost = msgspec.structs.replace(
                record, state=LOST, reason="", end=None, exit_code=None, exit_signal=None
            )
            return [self._event(JOB_END, f"{JOB_END}:{run}:{LOST}:0", lost, None)]
        events = []
        changed = f"{self.job.changed_s}:{_digest(record)}"
        first = record.state == "PENDING" and record.restarts == 0
        if self.is_new or first:
            key = f"{JOB_SEEN}:{run}:{changed}"
            events.append(self._event(JOB_SEEN, key, record, record.submit))
        if record.state in FINISHED:
            end = int(record.end.timestamp()) if record.end else 0
            key = f"{JOB_END}:{run}:{record.state}:{end}"
            events.append(self._event(JOB_END, key, record, record.end))
        elif not first:
            key = f"{JOB_STATE}:{run}:{record.state}:{changed}"
            start = record.start if record.state == "RUNNING" else None
            events.append(self._event(JOB_STATE, key, record, start))
        return events

    def _event(self, kind: str, key: str, record: JobRecord, at: datetime | None) -> Event:
        return Event(
            kind=kind,
            cluster=self.cluster,
            key=key,
            at=at or self.taken_at,
            seen_at=self.taken_at,
            source=SOURCE,
            body=JobFacts(record=record, whole=True),
        )


def settled_part(record: JobRecord) -> JobRecord:
    """The record without what a run's course changes by itself: a change of it is news."""
    changes = {field: getattr(_NOTHING, field) for field in _COURSE}
    if record.state == "PENDING":
        del changes["reason"]
    return msgspec.structs.replace(record, **changes)


_NOTHING: Final = JobRecord(job_id=0)


def _environment(job: TorqueJob, redactor: Redactor) -> tuple[Environment | None, tuple[str, ...]]:
    """The environment as it may be kept, and what is odd about it."""
    if not job.variables:
        # PBS_O_… are always there: what is empty was lost to a control character in a value.
        return None, (ENVIRONMENT_MISSING,)
    if is_too_large(job.variables):
        log.warning("job %d has an environment too large to be kept", job.record.job_id)
        return None, (ENVIRONMENT_TOO_LARGE,)
    environment = read_variables(job.variables, redactor)
    return environment, environment.flags


def _digest(record: JobRecord) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(record), digest_size=8).hexdigest()
