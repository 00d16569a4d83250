"""Torque spool contents: environment parsing, and scripts and job files as events.

:func:`read_variables` splits a job's Variable_List (a comma-separated text without escapes) into an
environment and redacts it; where a split is uncertain it redacts more, never less.
:class:`TorqueScript` is a complete script with its job file, :class:`TorqueJobUpdate` a change that
a job file reports. Both are made by ``spool`` and read by capture.

Event keys are derived from the file's content, so a scan repeats harmlessly what the watch has
already reported.
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

from steward.capture.spool_entries import (
    ENVIRONMENT_MISSING,
    ENVIRONMENT_TOO_LARGE,
    ENVIRONMENT_UNREADABLE,
    MOST_ENVIRONMENT_BYTES,
    SCRIPT_TOO_LARGE,
    EntryContents,
    EnvironmentUnreadable,
    is_unlinked,
    read_whole,
)
from steward.core.events import JOB_END, JOB_SEEN, JOB_STATE, Event, JobFacts
from steward.core.records import JobRecord
from steward.core.redaction import REDACTED, Redactor
from steward.extensions.torque.records import (
    MAX_JOB_FILE_BYTES,
    TorqueJob,
    TorqueRecordError,
    parse_torque_job,
)
from steward.slurm.environment import Environment, limit_names
from steward.slurm.job_states import FINISHED, LOST

ENVIRONMENT_AMBIGUOUS: Final = "environment-ambiguous"
"""Flag: a value holds commas, a name comes twice, or bytes were lost; entries may be fragments."""
ENVIRONMENT_CUT: Final = "environment-cut"
"""Flag: entries behind a secret are left out, because they may be pieces of it."""

# A shell's exported functions are BASH_FUNC_name%% or BASH_FUNC_name().
_BOUNDARY: Final = re.compile(rb",(?=[A-Za-z_][A-Za-z0-9_.%()-]{0,200}=)")
"""Comma that separates two variables: a ``NAME=`` follows."""
_NAME: Final = re.compile(rb"[A-Za-z_][A-Za-z0-9_.%()-]{0,200}=")
"""Name of a variable with its ``=``."""
# libxml2 reads a byte of another encoding and the two or three behind it, possibly a comma, as one
# character: a name, or the rest of one, then follows it. The character's low bits tell.
_SWALLOWED: Final = re.compile(rb"(?<![\x80-\xff])[\x80-\xff]++[A-Za-z0-9_.-]*+=")
# Name that no shell exports, but that env(1) and programs may set.
_ODD_NAME: Final = re.compile(rb",([^,=\n]++)=")
_COMMA_BITS: Final = ord(",") & 0x3F
_HARMLESS_NAME: Final = re.compile(
    rb"(?:PBS_[A-Z_]+|HOME|USER|LOGNAME|SHELL|PATH|PWD|OLDPWD|LANG|LANGUAGE|LC_[A-Z]+|MAIL|TERM"
    rb"|HOSTNAME|HOSTTYPE|MACHTYPE|OSTYPE|SHLVL|EDITOR|VISUAL|PAGER|LESS|LESSOPEN|LS_COLORS"
    rb"|HISTSIZE|HISTCONTROL|INPUTRC|DISPLAY|TZ|TMPDIR|MANPATH|INFOPATH|LD_LIBRARY_PATH|CPATH"
    rb"|LIBRARY_PATH|PYTHONPATH|PKG_CONFIG_PATH|MODULEPATH|MODULESHOME|LOADEDMODULES|_LMFILES_"
    rb"|XDG_[A-Z]+(?:_[A-Z]+)*|SSH_(?:CLIENT|CONNECTION|TTY)|OMP_NUM_THREADS|DBUS_[A-Z_]+|_)="
)
"""Variables whose start ends a secret: their names are well known."""
_FILLER: Final = b"xxxx"
"""Filler appended to an entry's end, to detect a secret that a comma cut off."""
MAX_VARIABLES_COUNT: Final = 100_000
"""Most variables of an environment; each costs about 10 µs."""
_TAIL_BYTES: Final = 512
"""Bytes of an entry's end that may make the following text a secret."""
_COUNT: Final = struct.Struct("=I")


def read_variables(variables: str, redactor: Redactor) -> Environment:
    """Split a Variable_List into an environment without secrets; never fails.

    Torque joins ``NAME=value`` entries with commas and escapes nothing, so a value may contain what
    looks like the next variable. The list is split at commas before a ``NAME=``, into the form of
    Slurm's ``environment`` (a native uint32 with the number of entries, then each entry with a
    NUL), so that all code that shows, searches and sends environments serves both schedulers. What
    is uncertain is flagged.

    Where the end of a secret is uncertain, too much is removed rather than too little: from the
    first sign of a secret on, entries are dropped until a variable whose name systems themselves
    set (HOME, PATH, PBS_O_…), for anything before may be part of the secret. So only a text like
    ``,PATH=`` within a secret cuts its removal short.

    Args:
        variables: The text, its XML escapes undone.
        redactor: Detects secrets.
    """
    raw = variables.encode("utf-8", "backslashreplace").replace(b"\0", b"")
    entries = list(_split_entries(raw))
    kept_entries, redacted_names, has_cut = _redact_entries(raw, entries, redactor)
    flags: tuple[str, ...] = ()
    if _is_ambiguous(entries) or _has_lost_bytes(variables):
        flags = (ENVIRONMENT_AMBIGUOUS,)
    if has_cut:
        flags += (ENVIRONMENT_CUT,)
    data = _COUNT.pack(len(kept_entries)) + b"".join(entry + b"\0" for entry in kept_entries)
    return Environment(data=data, redacted=limit_names(redacted_names), flags=flags)


def is_too_large(variables: str) -> bool:
    """Return True if a Variable_List is so large that parsing it would delay other jobs."""
    if len(variables) > MOST_ENVIRONMENT_BYTES:
        return True
    raw = variables.encode("utf-8", "backslashreplace")
    if len(raw) > MOST_ENVIRONMENT_BYTES:
        return True
    return any(count >= MAX_VARIABLES_COUNT for count, _ in enumerate(_BOUNDARY.finditer(raw)))


def _split_entries(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces between commas that a ``NAME=`` follows, each with its offset."""
    begin = 0
    for comma in _BOUNDARY.finditer(raw):
        yield begin, raw[begin : comma.start()]
        begin = comma.end()
    if begin < len(raw):
        yield begin, raw[begin:]


def _redact_entries(
    raw: bytes, entries: Sequence[tuple[int, bytes]], redactor: Redactor
) -> tuple[list[bytes], list[str], bool]:
    """Redact entries; return kept entries, redacted names, and whether entries were left out."""
    spans = redactor.find_secret_spans(raw)
    secret_begin, secret_end = next(spans, (len(raw), len(raw)))
    kept_entries: list[bytes] = []
    redacted_names: list[str] = []
    is_secret = has_cut = False
    for (start, entry), redacted_form in zip(
        entries, _iterate_redacted(entries, redactor), strict=True
    ):
        stop = start + len(entry)
        # A comma may have split a secret, so that no piece looks like one.
        while secret_end <= start and secret_begin < len(raw):
            secret_begin, secret_end = next(spans, (len(raw), len(raw)))
        if is_secret and (secret_begin < start or _HARMLESS_NAME.match(entry) is None):
            has_cut = True
            continue
        begins_secret = secret_begin < stop and start <= secret_begin
        redacted_entry = (
            _entry_name(entry) + REDACTED if begins_secret and not redacted_form else redacted_form
        )
        is_secret = bool(redacted_entry)
        if redacted_entry.endswith(REDACTED):
            redacted_names.append(entry.partition(b"=")[0].decode("utf-8", "backslashreplace"))
        kept_entries.append(redacted_entry or entry)
    return kept_entries, redacted_names, has_cut


def _iterate_redacted(entries: Sequence[tuple[int, bytes]], redactor: Redactor) -> Iterator[bytes]:
    """Yield for each entry its redacted form; empty where it needs no redaction."""
    # One call for all entries, because single calls cost more. No entry holds a NUL.
    redacted_entries = redactor.redact_entries(
        b"\0".join(entry for _, entry in entries)
    ).data.split(b"\0")
    # The part that makes it a secret may begin behind the comma it was split at.
    tails = [_entry_tail(entry) + _FILLER for _, entry in entries]
    redacted_tails = redactor.redact_entries(b"\0".join(tails)).data.split(b"\0")
    pieces = zip(entries, redacted_entries, tails, redacted_tails, strict=False)
    for (_, entry), redacted_entry, tail, redacted_tail in pieces:
        name = _entry_name(entry)
        if not name:
            # No start of a variable: the piece before the first name, of damaged text.
            yield REDACTED
        elif (
            redacted_entry != entry
            or redacted_tail != tail
            or _SWALLOWED.search(entry, len(name))
            or any(
                redactor.is_secret(odd_name[1]) for odd_name in _ODD_NAME.finditer(entry, len(name))
            )
        ):
            yield name + REDACTED
        else:
            yield b""


def _entry_name(entry: bytes) -> bytes:
    """Return the name at the start of an entry, with its ``=``; empty where there is none."""
    match = _NAME.match(entry)
    return match[0] if match else b""


def _entry_tail(entry: bytes) -> bytes:
    """Return an entry; of a long one only the name and the end."""
    if len(entry) <= 2 * _TAIL_BYTES:
        return entry
    return _entry_name(entry) + entry[-_TAIL_BYTES:]


def _is_ambiguous(entries: Sequence[tuple[int, bytes]]) -> bool:
    """Return True if a name comes twice, or an entry holds a comma or has no name."""
    names = {entry.partition(b"=")[0] for _, entry in entries}
    return len(names) < len(entries) or any(
        b"," in entry or _NAME.match(entry) is None for _, entry in entries
    )


def _has_lost_bytes(variables: str) -> bool:
    """Return True if libxml2 may have merged a broken byte and a comma into one character."""
    if variables.isascii():
        return False
    return any(
        _COMMA_BITS in ((code := ord(letter)) & 0x3F, code >> 6 & 0x3F, code >> 12 & 0x3F)
        for letter in set(variables)
        if letter > "\x7f"
    )


log = logging.getLogger(__name__)

PIECE_BYTES: Final = 65536
"""Size of the pieces in which qsub sends a script, in bytes; some follow the job file."""

SCRIPT_MAYBE_CUT: Final = "script-maybe-cut"
"""Flag: the script's size is a multiple of a piece's, so it may be incomplete."""
RECORD_UNREADABLE: Final = "record-unreadable"
"""Flag: there is no job file beside the script, or it cannot be read."""

SPOOL_SOURCE: Final = "spool"

# Fields that the course of a run changes; any other change makes a job.seen event.
_RUN_FIELDS: Final = dict.fromkeys(
    ("state", "reason", "start", "end", "nodelist", "nodes", "cpus", "exit_code", "exit_signal")
)


class TorqueScript(msgspec.Struct, frozen=True):
    """Open descriptors of a complete ``.SC`` and its job file at that moment (-1 for none)."""

    job_id: int
    mtime_ns: int
    script_fd: int
    record_fd: int

    @property
    def is_removed(self) -> bool:
        """Whether pbs_server has removed the script."""
        return is_unlinked(self.script_fd)

    def read(self, redactor: Redactor) -> EntryContents:
        """Read the script byte for byte, and the job file's environment and claims."""
        script = read_whole(self.script_fd)
        if script is None:
            log.warning("job %d: script exceeds the size limit and is not archived", self.job_id)
            return EntryContents(None, flags=(SCRIPT_TOO_LARGE,))
        flags: tuple[str, ...] = ()
        if len(script) % PIECE_BYTES == 0:
            flags = (SCRIPT_MAYBE_CUT,)
        try:
            job = self._parse_job()
        except OSError as error:
            environment_flags = (*flags, RECORD_UNREADABLE, ENVIRONMENT_UNREADABLE)
            raise EnvironmentUnreadable(
                error, EntryContents(script, None, environment_flags)
            ) from error
        if job is None:
            return EntryContents(script, None, (*flags, RECORD_UNREADABLE, ENVIRONMENT_MISSING))
        environment, environment_flags = _read_environment(job, redactor)
        # The job name is left out: it can change, and the record that comes along has it.
        return EntryContents(
            script,
            environment,
            (*flags, *environment_flags),
            directory=job.record.work_dir,
            host=job.record.submit_host,
        )

    def _parse_job(self) -> TorqueJob | None:
        """Parse the job file; None where it is missing or malformed."""
        data = read_whole(self.record_fd, MAX_JOB_FILE_BYTES) if self.record_fd >= 0 else None
        try:
            return None if data is None else parse_torque_job(data, f"job {self.job_id}")
        except TorqueRecordError:
            return None  # reported when the file was first read

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.script_fd)
        if self.record_fd >= 0:
            os.close(self.record_fd)


class TorqueJobUpdate(msgspec.Struct, frozen=True):
    """Change that a job file reports, as events; no descriptor is held.

    Attributes:
        cluster: The cluster's name.
        job: Content of the file.
        read_at: When it was read, UTC.
        is_new: Whether more changed than the course of its run.
        is_lost: Whether the file is gone without having reported an end.
    """

    cluster: str
    job: TorqueJob
    read_at: datetime
    is_new: bool = True
    is_lost: bool = False

    @property
    def job_id(self) -> int:
        """Raw id of the job; made up for an array element."""
        return self.job.record.job_id

    @property
    def mtime_ns(self) -> int:
        """Zero: no script comes with it."""
        return 0

    @property
    def is_removed(self) -> bool:
        """False: it has no script that could be removed."""
        return False

    def read(self, redactor: Redactor) -> EntryContents:
        """Return the events that follow, redacted."""
        record = redactor.redact_record(self.job.record)
        return EntryContents(None, events=tuple(self._build_events(record)))

    def close(self) -> None:
        """Do nothing: no descriptor is held."""

    def _build_events(self, record: JobRecord) -> list[Event]:
        """Build the events of a change: seen, state, or end."""
        assert record.submit is not None
        run_key = f"{record.job_id}:{int(record.submit.timestamp())}:{record.restarts}"
        if self.is_lost:
            lost_record = msgspec.structs.replace(
                record, state=LOST, reason="", end=None, exit_code=None, exit_signal=None
            )
            return [self._build_event(JOB_END, f"{JOB_END}:{run_key}:{LOST}:0", lost_record, None)]
        events = []
        change_key = f"{self.job.changed_s}:{_record_digest(record)}"
        is_submission = record.state == "PENDING" and record.restarts == 0
        if self.is_new or is_submission:
            key = f"{JOB_SEEN}:{run_key}:{change_key}"
            events.append(self._build_event(JOB_SEEN, key, record, record.submit))
        if record.state in FINISHED:
            end = int(record.end.timestamp()) if record.end else 0
            key = f"{JOB_END}:{run_key}:{record.state}:{end}"
            events.append(self._build_event(JOB_END, key, record, record.end))
        elif not is_submission:
            key = f"{JOB_STATE}:{run_key}:{record.state}:{change_key}"
            start = record.start if record.state == "RUNNING" else None
            events.append(self._build_event(JOB_STATE, key, record, start))
        return events

    def _build_event(self, kind: str, key: str, record: JobRecord, at: datetime | None) -> Event:
        return Event(
            kind=kind,
            cluster=self.cluster,
            key=key,
            at=at or self.read_at,
            seen_at=self.read_at,
            source=SPOOL_SOURCE,
            body=JobFacts(record=record, whole=True),
        )


def strip_run_fields(record: JobRecord) -> JobRecord:
    """Return the record without the fields that a run's course changes, to detect other changes."""
    changes = {field: getattr(_EMPTY_RECORD, field) for field in _RUN_FIELDS}
    if record.state == "PENDING":
        del changes["reason"]
    return msgspec.structs.replace(record, **changes)


_EMPTY_RECORD: Final = JobRecord(job_id=0)


def _read_environment(
    job: TorqueJob, redactor: Redactor
) -> tuple[Environment | None, tuple[str, ...]]:
    """Return the redacted environment, and flags for its defects."""
    if not job.variables:
        # PBS_O_… variables always exist: an empty list was lost to a control character in a value.
        return None, (ENVIRONMENT_MISSING,)
    if is_too_large(job.variables):
        log.warning(
            "job %d: environment exceeds the size limit and is not archived", job.record.job_id
        )
        return None, (ENVIRONMENT_TOO_LARGE,)
    environment = read_variables(job.variables, redactor)
    return environment, environment.flags


def _record_digest(record: JobRecord) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(record), digest_size=8).hexdigest()
